"""Cases of QK-norm, rotary embedding and the append to the paged cache in one (K7)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import RmsNorm, rope_append
from mgraph.codegen.triton.rope_append import RopeAppend
from mgraph.runtime.kernels import DTYPES
from mgraph.runtime.norm import rms_norm
from mgraph.runtime.ops import rope
from mgraph.runtime.paged import kv_append_, rope_kv_append_

ROWS = 1 << 16
"""Of the cache."""


def inputs(problem: RopeAppend, tokens: int, rows: int) -> Callable[[torch.device], tuple[Any, ...]]:
    """An empty cache of so many rows, and queries, keys and values as projections give them."""

    def make(device: torch.device) -> tuple[Any, ...]:
        dtype = DTYPES[problem.dtype]
        caches = (torch.zeros(rows, problem.groups, problem.width, device=device, dtype=dtype) for _ in range(2))
        heads = (problem.heads, problem.groups, problem.groups)
        new = (torch.randn(tokens, count, problem.width, device=device).to(dtype) for count in heads)
        slots = torch.randperm(rows, device=device)[:tokens]
        tables = torch.randn(2, tokens, problem.table_width, device=device).to(DTYPES[problem.table])
        weights = [torch.rand(problem.width, device=device).to(dtype) + 0.5 for _ in range(2 * bool(problem.norm))]
        return *caches, *new, slots, *tables, *weights

    return make


def separate(problem: RopeAppend) -> Callable[..., Tensor]:
    """The runtime's op: norms, rotations and appends one after the other."""

    def run(*given: Tensor) -> Tensor:
        return rope_kv_append_(*given, eps=problem.norm.eps if problem.norm else 0.0)

    return run


def apart(problem: RopeAppend) -> Callable[..., Tensor]:
    """A compiled kernel or two for each part: norms, then rotations, then appends. Nothing is joined across parts."""

    def normalise(x: Tensor, weight: Tensor) -> Tensor:
        assert problem.norm is not None
        return rms_norm(x, weight, eps=problem.norm.eps, round=problem.norm.round)[0]

    def normed(q: Tensor, k: Tensor, *weights: Tensor) -> list[Tensor]:
        return [normalise(x, weight) for x, weight in zip((q, k), weights, strict=True)]

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        return [rope(x, cos[:, None], sin[:, None]) for x in (q, k)]

    @functools.cache
    def compiled() -> list[Any]:
        return [torch.compile(part, dynamic=False) for part in (normed, turned, kv_append_)]

    def run(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, *more: Tensor) -> Tensor:
        cos, sin, *weights = more
        parts = compiled()
        if weights:
            q, k = parts[0](q, k, *weights)
        q, k = parts[1](q, k, cos, sin)
        parts[2](keys, values, k, v, slots)
        return q

    return run


def case(name: str, problem: RopeAppend, tokens: int, rows: int = ROWS) -> Case:
    """A case; what is new is read and written once."""
    elements = tokens * (problem.heads + 2 * problem.groups) * problem.width
    tables = 2 * tokens * problem.table_width * DTYPES[problem.table].itemsize
    return Case(
        id=name,
        workload=f"{tokens} tokens, {problem}",
        spec=rope_append.append(name.replace("-", "_"), problem),
        inputs=inputs(problem, tokens, rows),
        reference=lambda *given: (separate(problem)(*given),),
        peers={"eager": separate(problem), "compile": separate(problem), "apart": apart(problem)},
        written=(0, 1),
        bytes=2 * elements * DTYPES[problem.dtype].itemsize + tables,
        bound=5e-3,
    )


LLAMA_8B = RopeAppend("bf16", "bf16", 32, 8, 128, 128, 128)
QWEN3_8B = RopeAppend("bf16", "bf16", 32, 8, 128, 128, 128, norm=RmsNorm(128, "bf16", "bf16", 1e-6, "normed"))
CASES = [
    case(f"K7-{name}-{tokens}", problem, tokens)
    for name, problem in (("llama", LLAMA_8B), ("qwen3", QWEN3_8B))
    for tokens in (1, 16, 128, 8192)
]
