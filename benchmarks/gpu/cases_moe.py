"""Cases of the rows of a mixture of experts: their sums per token, and the gradient of the weighted one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import moe_rows
from mgraph.codegen.triton.moe_rows import MoeRows
from mgraph.ir.ops import moe
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.types import DType
from mgraph.runtime import v1 as rt

EXPERTS = 64
SKEW = 2
"""The share of an expert falls with its number: the first of 64 has one row in eight."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name."""
    dtype: torch.dtype = to_torch_dtype(DType.parse(name))
    return dtype


def draw(names: str, tokens: int, problem: MoeRows, device: torch.device) -> tuple[Tensor, ...]:
    """The tensors of these names, of a router that prefers some experts."""
    pairs = tokens * problem.choices
    weights = torch_dtype(problem.weights or "f32")
    make: dict[str, Callable[[], Tensor]] = {
        "x": lambda: torch.randn(tokens, problem.width, device=device).to(torch_dtype(problem.dtype)),
        "rows": lambda: torch.randn(pairs, problem.width, device=device).to(torch_dtype(problem.dtype)),
        "weights": lambda: torch.rand(tokens, problem.choices, device=device).to(weights),
        "order": lambda: (torch.rand(pairs, device=device) ** SKEW * EXPERTS).long().sort(stable=True).indices,
    }
    return tuple(make[name]() for name in names.split())


def combine_case(name: str, tokens: int, problem: MoeRows) -> Case:
    """The weighted sum: each row is read once, each token written once."""
    torch_form = partial(rt.moe_combine, dtype=torch_dtype(problem.products))
    return _case(
        f"combine-{name}",
        tokens,
        problem,
        moe_rows.combine,
        "rows weights order",
        lambda *inputs: (moe.moe_combine(*inputs, dtype=DType.F64),),
        torch_form,
        passes=1,
    )


def gradient_case(name: str, tokens: int, problem: MoeRows) -> Case:
    """Its gradient: each row is read once and written once, each token read once."""
    inputs = "x rows weights order"
    return _case(
        f"gradient-{name}",
        tokens,
        problem,
        moe_rows.combine_grad,
        inputs,
        moe.moe_combine_grad,
        rt.moe_combine_grad,
        passes=2,
    )


def dispatch_grad_case(name: str, tokens: int, problem: MoeRows) -> Case:
    """The plain sum, of one tensor of rows or the sum of two."""
    return _case(
        f"dispatch-grad-{name}",
        tokens,
        problem,
        moe_rows.dispatch_grad,
        "rows order rows" if problem.more else "rows order",
        lambda *inputs: (moe.moe_dispatch_grad(*inputs, top_k=problem.choices),),
        partial(rt.moe_dispatch_grad, top_k=problem.choices),
        passes=2 if problem.more else 1,
    )


def _case(
    name: str,
    tokens: int,
    problem: MoeRows,
    build: Callable[[str, MoeRows], Any],
    names: str,
    reference: Callable[..., tuple[Tensor, ...]],
    torch_form: Callable[..., Any],
    passes: int,
) -> Case:
    """`passes` says how often the rows are read or written."""
    tensors = f"{problem.dtype}, weights {problem.weights or 'none'}, products {problem.products}"
    rows = tokens * problem.choices
    return Case(
        id=f"moe-{name}",
        workload=f"{tokens} tokens of {problem.choices} rows of {problem.width} {tensors}",
        spec=build(f"moe_{name.replace('-', '_')}", problem),
        inputs=lambda device: draw(names, tokens, problem, device),
        reference=reference,
        peers={"eager": torch_form, "compile": torch_form},
        bytes=(passes * rows + tokens) * problem.width * 2,
        bound=3e-3,
    )


WIDE, NARROW, ODD = (
    MoeRows(2048, 8, "bf16", "f32"),
    MoeRows(2048, 8, "bf16", "bf16", "bf16"),
    MoeRows(2880, 4, "bf16", "bf16", "bf16"),
)

CASES = [
    combine_case("f32", 16384, WIDE),
    combine_case("bf16", 16384, NARROW),
    combine_case("odd", 8191, ODD),
    gradient_case("f32", 16384, WIDE),
    gradient_case("bf16", 16384, NARROW),
    gradient_case("odd", 8191, ODD),
    dispatch_grad_case("2048", 16384, MoeRows(2048, 8, "bf16")),
    dispatch_grad_case("two", 16384, MoeRows(2048, 8, "bf16", more=True)),
    dispatch_grad_case("odd", 8191, MoeRows(2880, 4, "bf16")),
]
