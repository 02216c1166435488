"""Sites on tensors of more than 2**31 elements, of which the far end alone holds anything: what they give there.

Each case is made of its sizes, so that it is also run on small tensors. On a CPU large ones cost no memory before they
are touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import cases_adamw
from mgraph.codegen.triton import adamw, embedding_grad, expert_glu, grouped, grouped_outer
from mgraph.codegen.triton import paged_attention as paged
from mgraph.codegen.triton import rope_append as append
from mgraph.codegen.triton.adamw import AdamW
from mgraph.codegen.triton.embedding_grad import EmbeddingGrad
from mgraph.codegen.triton.expert_glu import ExpertGlu
from mgraph.codegen.triton.glu import Glu
from mgraph.codegen.triton.grouped import Product
from mgraph.codegen.triton.grouped_outer import Outer
from mgraph.codegen.triton.paged_attention import PagedAttention
from mgraph.codegen.triton.rms_norm import RmsNorm
from mgraph.codegen.triton.rope_append import RopeAppend
from tests.codegen.triton import far_layer_cases
from tests.codegen.triton.far_case import END, Drawn, Far, far
from tests.codegen.triton.test_rope_append import exact, given
from tests.ir.ops.paged_cases import expected, ragged


def ends(experts: int, rows: int, device: torch.device) -> Tensor:
    """Where the rows of experts end: the last two have half of those each that hold anything."""
    others = torch.arange(1, experts - 1) * (rows - END) // (experts - 2)
    return torch.cat([others, torch.tensor([rows - END // 2, rows])]).int().to(device)


def halves(rows: Tensor) -> Tensor:
    """Those of the last rows that are of each of the last two experts, in float64."""
    return rows[-END:].double().view(2, END // 2, -1)


def by_experts(rows: Tensor, matrices: Tensor, transposed: bool = False) -> Tensor:
    """The last rows by the matrices of their experts, in float64."""
    wide = matrices[-2:].double()
    return (halves(rows) @ (wide.mT if transposed else wide)).flatten(0, 1)


def product(experts: int, inner: int, width: int, rows: int, transposed: bool = False, shift: int = 0) -> Far:
    """Rows of experts by their matrices."""
    matrix = (width, inner) if transposed else (inner, width)

    def draw(device: torch.device) -> Drawn:
        x = far(rows, inner, device=device, shift=shift)
        w = far(experts, *matrix, device=device, last=2, scale=inner**-0.5, shift=shift)
        return (x, w, ends(experts, rows, device)), [by_experts(x, w, transposed)]

    return Far(grouped.product("product", Product(experts, inner, width, "bf16", transposed)), draw)


def unit(experts: int, inner: int, width: int, rows: int) -> Far:
    """Gated units of experts, with gate and up."""
    problem = ExpertGlu(experts, 1, inner, width, Glu(width, 1, "bf16", "silu"), keep=True)

    def draw(device: torch.device) -> Drawn:
        x, order = far(rows, inner, device=device), torch.arange(rows, device=device)
        matrices = [far(experts, inner, width, device=device, last=2, scale=inner**-0.5) for _ in range(2)]
        gate, up = (by_experts(x, w) for w in matrices)
        return (x, order, ends(experts, rows, device), *matrices), [gate * gate.sigmoid() * up, gate, up]

    return Far(expert_glu.forward("unit", problem), draw)


def unit_gradient(experts: int, inner: int, width: int, rows: int) -> Far:
    """The gradients of units, and what those of matrices and weights are made of."""
    problem = ExpertGlu(experts, 1, inner, width, Glu(width, 1, "bf16", "silu"), weights="f32")

    def draw(device: torch.device) -> Drawn:
        dy, order = far(rows, inner, device=device), torch.arange(rows, device=device)
        weights, share = torch.full((rows, 1), 0.75, device=device), 0.75
        w = far(experts, width, inner, device=device, last=2, scale=inner**-0.5)
        kept = [far(rows, width, device=device) for _ in range(2)]
        gate, up = (tensor[-END:].double() for tensor in kept)
        g, part = by_experts(dy, w, transposed=True), gate.sigmoid()
        y = gate * part * up
        wanted = [share * g * up * part * (1 + gate * (1 - part)), share * g * gate * part, share * y]
        return (dy, weights, order, ends(experts, rows, device), w, *kept), [*wanted, (g * y).sum(1, keepdim=True)]

    return Far(expert_glu.backward("unit_grad", problem), draw)


def outer(experts: int, left: int, right: int, rows: int, taken: str = "") -> Far:
    """Gradients of the matrices of experts; with a side that is `taken` from tokens, added to a total."""
    problem = Outer(experts, left, right, "bf16", taken, total="f32" if taken else "")

    def draw(device: torch.device) -> Drawn:
        sides = far(rows, left, device=device), far(rows, right, device=device)
        wanted, all_ = halves(sides[0]).mT @ halves(sides[1]), (*sides, ends(experts, rows, device))
        if not taken:
            return all_, [wanted]
        total = far(experts, left, right, device=device, last=1, dtype=torch.float32)
        return (total, *sides, torch.arange(rows, device=device), all_[2]), [wanted + total[-2:].double()]

    return Far(grouped_outer.outer("outer", problem), draw)


def embedding(vocabulary: int, width: int, tokens: int) -> Far:
    """A gradient whose rows come from the last on: four of the last row but two, the very last of the last row, and all
    others, in many windows, of the row between."""

    def draw(device: torch.device) -> Drawn:
        total = far(vocabulary, width, device=device, last=3, dtype=torch.float32)
        grad = far(tokens, width, device=device, last=9)
        ids = torch.full((tokens,), vocabulary - 2, dtype=torch.int32, device=device)
        ids[:4], ids[-1] = vocabulary - 3, vocabulary - 1
        order = torch.arange(tokens, device=device).roll(1).flip(0)
        order[-1] = tokens - 1
        sums = [grad[part].double().sum(0) for part in (slice(-5, -1), slice(-9, -5), slice(-1, None))]
        return (total, grad, ids, order), [total[-3:].double() + torch.stack(sums)]

    return Far(embedding_grad.build("embedding", EmbeddingGrad(width, "bf16")), draw, bound=1e-5)


def update(elements: int) -> Far:
    """AdamW on one f32 master of a bf16 parameter, and the sum of the squares of its gradient."""
    groups = ((cases_adamw.DECAY, 1.0, 1),)
    problem = AdamW(groups, "f32", "f32", "bf16", *cases_adamw.BETAS, cases_adamw.EPS, sums=(0,))

    def draw(device: torch.device) -> Drawn:
        size = {"device": device, "last": 1000, "dtype": torch.float32}
        w, m, v, grad = (far(elements, **size, scale=scale) for scale in (0.02, 1e-3, 1e-3, 1e-3))  # type: ignore[arg-type]
        v[-1000:].square_()
        param = far(elements, device=device)
        numbers = [torch.tensor(number, device=device) for number in (3e-4, 1.0, 7, True)]
        lists = [[tensor] for tensor in (w, m, v, param, grad)]
        exact = [[tensor[-1000:].double()] for (tensor,) in lists]
        wanted = [tensor for (tensor,) in cases_adamw.reference(1)(*exact, *numbers)]
        return (*lists, *numbers), [*wanted, exact[-1][0].square().sum()[None]]

    return Far(adamw.build("update", problem), draw, bound=8e-3)


def attention(blocks: int, new: int, length: int, table: int) -> Far:
    """Tokens of requests over the last of so many blocks of a cache, with tables for so many rows."""
    problem = PagedAttention("bf16", 32, 8, 128, 128, 16, 128**-0.5)

    def draw(device: torch.device) -> Drawn:
        requests = [(new, length), (new, length // 2)]
        sizes = {"heads": 32, "groups": 8, "width": 128, "block_size": 16, "padding": (0, 0), "table": table // 16}
        few = ragged(requests, **sizes, dtype=torch.bfloat16)  # type: ignore[arg-type]
        caches = [far(blocks * 16, 8, 128, device=device, last=1) for _ in range(2)]
        for cache, part in zip(caches, (few.keys, few.values), strict=True):
            cache[-len(part) :] = part.to(device)
        tables = few.blocks + blocks - len(few.keys) // 16
        rest = (tensor.to(device) for tensor in (few.starts, few.lengths, tables))
        return (few.q.to(device), *caches, *rest), [expected(few, problem.scale)]

    return Far(paged.forward("attend", problem), draw)


def appended(rows: int) -> Far:
    """Tokens that are written to the last of so many rows of a cache."""
    norm = RmsNorm(128, "bf16", "bf16", 1e-6, "normed")
    problem = RopeAppend("bf16", "bf16", 32, 8, 128, 128, 128, norm=norm)

    def draw(device: torch.device) -> Drawn:
        few = given(problem)
        keys, values, turned = exact(problem, few)
        caches = [far(rows, 8, 128, device=device, last=1, scale=0.0) for _ in range(2)]
        slots = few[5] + rows - len(keys)
        rest = (tensor.to(device) for tensor in (*few[2:5], slots, *few[6:]))
        return (*caches, *rest), [turned, keys, values]

    return Far(append.append("append", problem), draw, written=(0, 1))


MATRICES, ROWS, WIDE = (160, 4096, 4096), (64, 4096, 256, 530_000), (64, 256, 4096, 530_000)
"""Experts whose matrices, rows, and results of rows together have more than 2**31 elements."""
LITTLE = (4, 128, 256)

CASES: dict[str, tuple[Callable[..., Far], tuple[Any, ...], tuple[Any, ...]]] = {
    "products": (product, (*MATRICES, 9600), (*LITTLE, 300)),
    "products, off boundaries": (product, (*MATRICES, 9600, False, 1), (*LITTLE, 300, False, 1)),
    "products, some rows": (product, (*MATRICES, 6400), (*LITTLE, 160)),
    "products, few rows": (product, (*MATRICES, 1600), (*LITTLE, 72)),
    "products, transposed": (product, (*MATRICES, 9600, True), (*LITTLE, 300, True)),
    "products of many rows": (product, ROWS, (*LITTLE, 300)),
    "products with many rows": (product, WIDE, (*LITTLE, 300)),
    "units": (unit, (*MATRICES, 9600), (*LITTLE, 300)),
    "units of many rows": (unit, ROWS, (*LITTLE, 300)),
    "units with many rows": (unit, WIDE, (*LITTLE, 300)),
    "gradients of units": (unit_gradient, (*MATRICES, 9600), (*LITTLE, 300)),
    "gradients of units of many rows": (unit_gradient, ROWS, (*LITTLE, 300)),
    "gradients of units with many rows": (unit_gradient, WIDE, (*LITTLE, 300)),
    "outer products": (outer, (*MATRICES, 9600), (*LITTLE, 300)),
    "outer products, taken": (outer, (*MATRICES, 9600, "right"), (*LITTLE, 300, "right")),
    "outer products of many rows": (outer, ROWS, (*LITTLE, 300)),
    "outer products of many rows, taken": (outer, (*ROWS, "left"), (*LITTLE, 300, "left")),
    "embedding's gradient": (embedding, (262_144, 8448, 260_000), (20, 96, 300)),
    "update": (update, (2**31 + 100_000,), (20_000,)),
    "attention, a token": (attention, (131_200, 1, 300, 512), (60, 1, 300, 512)),
    "attention, a token, long": (attention, (131_200, 1, 300, 4096), (60, 1, 60, 4096)),
    "attention, chunks": (attention, (131_200, 40, 300, 512), (60, 5, 60, 512)),
    "append": (appended, (2_100_000,), (40,)),
    **far_layer_cases.CASES,
}
"""How each case is made, its sizes on a GPU, and small ones."""
