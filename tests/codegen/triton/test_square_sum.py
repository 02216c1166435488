"""Sums of squares over lists: kernels in Triton's interpreter and twins against float64, and what is refused."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.codegen.kernel_sites import kernel_sites
from mgraph.codegen.step import step_text
from mgraph.codegen.triton import kernels_text, reference_text, square_sum
from mgraph.codegen.triton.square_sum import SquareSum, Tuning
from mgraph.ir.graph import Node
from mgraph.passes.base import Report
from mgraph.passes.in_place import InPlace
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, interpret
from tests.codegen.triton.ptx_of import ptx_of
from tests.passes.raising import module_of
from tests.passes.test_adamw import trainer

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
PROBLEMS = {
    "squares": SquareSum("f32"),
    "norm": SquareSum("f32", root=True),
    "brain": SquareSum("bf16"),
    "half": SquareSum("f16", root=True),
}
CUT = Tuning(chunk=64, tile=32, vector=4, num_warps=1)
SHAPES = [(3, 5), (), (16, 4), (0, 3), (129,), (7,), (32, 8), (1, 1)]


def draw(problem: SquareSum, sizes: list[int]) -> list[Tensor]:
    """Tensors of these places in SHAPES, in one memory; some begin at odd places."""
    whole = torch.randn(2304, generator=torch.Generator().manual_seed(len(sizes))).to(DTYPES[problem.dtype])
    return [whole[288 * i + (i == 6) :][: torch.Size(SHAPES[i]).numel()].view(SHAPES[i]) for i in sizes]


def exact(problem: SquareSum, tensors: list[Tensor]) -> Tensor:
    squares = torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()
    return squares.sqrt() if problem.root else squares


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """Lists of even and odd sizes and places, of even ones only, and of one number; what is not finite stays so."""
    specs = [square_sum.build(name, problem, CUT) for name, problem in PROBLEMS.items()]
    specs.append(square_sum.build("tuned", SquareSum("f32")))
    cases: list[tuple[str, Any]] = [
        (name, (draw(problem, sizes),)) for name, problem in PROBLEMS.items() for sizes in ([*range(8)], [2], [1])
    ]
    large = torch.randn(2**18 + 3, generator=torch.Generator().manual_seed(1))
    cases += [("tuned", ([large, large[:5]],)), ("squares", ([torch.tensor([1.0, torch.inf])],))]
    results = interpret(specs, cases, tmp_path)
    for (name, (tensors,)), ((made,), _) in zip(cases[:-1], results[:-1], strict=True):
        want = exact(PROBLEMS.get(name, SquareSum("f32")), tensors)
        assert made.shape == () and made.dtype is torch.float32
        torch.testing.assert_close(made.double(), want, rtol=5e-7, atol=0, msg=name)
    assert results[-1][0][0].isinf()


@pytest.mark.parametrize("name", PROBLEMS)
def test_twin(name: str) -> None:
    twins = types.ModuleType("twins")
    exec(reference_text([square_sum.build("add", PROBLEMS[name])]), twins.__dict__)
    tensors = draw(PROBLEMS[name], [*range(8)])
    torch.testing.assert_close(twins.add(tensors).double(), exact(PROBLEMS[name], tensors), rtol=1e-6, atol=0)


def node(op: str, *dtypes: str) -> Node:
    params = ", ".join(f"%x{i}: {dtype}[4]" for i, dtype in enumerate(dtypes))
    names = ", ".join(f"%x{i}" for i in range(len(dtypes)))
    return module_of(f"\nfunc @f({params}) {{\n  %y: f32[] = {op}({names})\n  return %y\n}}\n").functions["f"].nodes[0]


def test_problem_of_a_node() -> None:
    assert square_sum.problem_of(node("square_sum", "bf16", "bf16")) == SquareSum("bf16")
    assert square_sum.problem_of(node("global_norm", "f32")) == SquareSum("f32", root=True)
    assert "the tensors are bf16 and f32" in str(square_sum.problem_of(node("global_norm", "f32", "bf16")))
    assert "the tensors are i32" in str(square_sum.problem_of(node("global_norm", "i32")))


def test_a_step_calls_the_site() -> None:
    module = InPlace().run(trainer(), Report())
    text = step_text(module, kernel_sites(module, gpu=True))
    assert re.search(r'norm = K\.global_norm_0\(\[state\[f"\{name\}\.grad"\] for name in PARAMETERS\]\)', text), text
    assert "rt.global_norm" not in text and "rt.global_norm(" in step_text(module)


def test_full_lines_are_read(tmp_path: Path) -> None:
    texts = ptx_of([square_sum.build("norm", SquareSum("bf16"))], tmp_path)
    assert len(re.findall(r"ld\.global\.v4\.b32", texts["norm_parts.aligned"])) == 4
    assert ".v4" not in texts["norm_parts"]


def test_emitted_lines_fit() -> None:
    specs = [square_sum.build(name, problem) for name, problem in PROBLEMS.items()]
    for text in (kernels_text(specs), reference_text(specs)):
        assert max(map(len, text.splitlines())) <= 120
