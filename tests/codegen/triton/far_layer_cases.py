"""Sites of layers on tensors of more than 2**31 elements: rows of experts, gated units, rotary embedding and attention
of joined projections, and the norm of gradients. See `far_case.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases_attention import options
from mgraph.codegen.triton import attention, attention_grad, glu, moe_rows, rope_join, square_sum
from mgraph.codegen.triton.attention_problem import Attention
from mgraph.codegen.triton.glu import Glu
from mgraph.codegen.triton.moe_rows import MoeRows
from mgraph.codegen.triton.rope import Rope
from mgraph.codegen.triton.rope_join import RopeJoin, RopeJoined
from mgraph.codegen.triton.square_sum import SquareSum
from mgraph.ir.ops.attention import attention as attend
from mgraph.ir.ops.attention import attention_grad as attend_grad
from mgraph.runtime.kernels import DTYPES
from tests.codegen.triton.far_case import END, Drawn, Far, far
from tests.codegen.triton.test_rope import BHS
from tests.codegen.triton.test_rope_join import wanted as joined_heads


def order_of(rows: int, device: torch.device) -> Tensor:
    """Rows in the order of their tokens, but for the last, which are the other way round."""
    order = torch.arange(rows, device=device)
    order[-END:] = order[-END:].flip(0)
    return order


def by_tokens(rows: Tensor, choices: int) -> Tensor:
    """The last rows as those of tokens, in float64."""
    last: Tensor = rows[-END:].double().flip(0).unflatten(0, (-1, choices))
    return last


def expert_sums(tokens: int, choices: int, width: int) -> Far:
    """Weighted sums of the rows of experts."""
    problem = MoeRows(width, choices, "bf16", "f32")

    def draw(device: torch.device) -> Drawn:
        rows, weights = far(tokens * choices, width, device=device), torch.rand(tokens, choices, device=device)
        last = weights[-END // choices :, :, None].double()
        return (rows, weights, order_of(len(rows), device)), [(last * by_tokens(rows, choices)).sum(1)]

    return Far(moe_rows.combine("sums", problem), draw)


def expert_sums_gradient(tokens: int, choices: int, width: int) -> Far:
    """Their gradients, of rows and of weights."""
    problem = MoeRows(width, choices, "bf16", "f32")

    def draw(device: torch.device) -> Drawn:
        dy = far(tokens, width, device=device, last=END // choices)
        rows, weights = far(tokens * choices, width, device=device), torch.rand(tokens, choices, device=device)
        grad, last = dy[-END // choices :, None].double(), weights[-END // choices :, :, None].double()
        wanted = [(grad * last).flatten(0, 1).flip(0), (grad * by_tokens(rows, choices)).sum(2)]
        return (dy, rows, weights, order_of(len(rows), device)), wanted

    return Far(moe_rows.combine_grad("sums_grad", problem), draw)


def token_gradient(tokens: int, choices: int, width: int) -> Far:
    """The gradient of tokens that went to experts: sums of the rows of two tensors."""
    problem = MoeRows(width, choices, "bf16", more=True)

    def draw(device: torch.device) -> Drawn:
        rows, more = (far(tokens * choices, width, device=device) for _ in range(2))
        wanted = (by_tokens(rows, choices) + by_tokens(more, choices)).sum(1)
        return (rows, order_of(len(rows), device), more), [wanted]

    return Far(moe_rows.dispatch_grad("tokens", problem), draw)


def gate_and_up(rows: int, size: int, device: torch.device, turns: bool, shift: int) -> tuple[Tensor, ...]:
    """Both as parts of one projection: halves, or columns in turns."""
    whole = far(rows, 2 * size, device=device, shift=shift)
    parts: tuple[Tensor, ...] = whole.unflatten(-1, (-1, 2)).unbind(-1) if turns else whole.chunk(2, -1)
    return parts


def gated(rows: int, size: int, turns: bool, shift: int = 0) -> Far:
    """Gated units of joined projections."""

    def draw(device: torch.device) -> Drawn:
        gate, up = parts = gate_and_up(rows, size, device, turns, shift)
        wide = gate[-END:].double()
        return parts, [wide * wide.sigmoid() * up[-END:].double()]

    return Far(glu.forward("unit", Glu(size, 1, "bf16", "silu", spaced=turns)), draw)


def gated_gradient(rows: int, size: int, layout: str, shift: int = 0) -> Far:
    """The gradients of gate and up, which lie as `layout` says."""
    turns = layout == "interleaved"
    problem = Glu(size, 1, "bf16", "silu", joined=True, layout=layout, spaced=turns)

    def draw(device: torch.device) -> Drawn:
        inputs = far(rows, size, device=device, shift=shift), *gate_and_up(rows, size, device, turns, shift)
        dy, gate, up = (tensor[-END:].double() for tensor in inputs)
        part = gate.sigmoid()
        found = dy * up * part * (1 + gate * (1 - part)), dy * gate * part
        if turns:
            return inputs, [torch.stack(found, -1).flatten(-2)]
        return inputs, [torch.cat(found[:: -1 if layout == "swapped" else 1], -1)]

    return Far(glu.backward("unit_grad", problem), draw)


Heads = tuple[int, int, int]
"""Heads of q, k and v."""


def positions(tensor: Tensor) -> Tensor:
    """The rows of a result [B, S, ...]."""
    return tensor.flatten(0, 1)


def heads_of(batch: int, length: int, number: int, width: int, device: torch.device, shift: int = 0) -> Tensor:
    """Heads [B, H, S, width] that lie as [B, S, H, width], of which the last rows of the last sequence hold
    anything."""
    rows = far(batch * length, number, width, device=device, shift=shift)
    return rows.view(batch, length, number, width).transpose(1, 2)


def heads_apart(batch: int, length: int, number: int, width: int, device: torch.device) -> Tensor:
    """The same that lie as [B, H, S, width]."""
    made = far(batch * number * length, width, device=device).view(batch, number, length, width)
    made[-1, :, -END:].normal_()
    return made


def join(batch: int, length: int, heads: Heads, width: int, apart: bool = False) -> Far:
    """Gradients of q, k and v, turned back and beside each other."""
    problem = RopeJoin(Rope("bf16", "bf16", width, width, BHS, ("", "S"), heads[0], inverse=True), heads)

    def draw(device: torch.device) -> Drawn:
        drawn = heads_apart if apart else heads_of
        parts = [drawn(batch, length, number, width, device) for number in heads]
        tables = [far(length, width, device=device)[None] for _ in "cs"]
        last = [part[-1:, :, -END:].cpu() for part in parts]
        (wanted,) = joined_heads(problem, *last, *(table[:, -END:].cpu() for table in tables))
        return (*parts, *tables), [wanted]

    return Far(rope_join.join("join", problem), draw, rows=positions)


def turn(batch: int, length: int, heads: Heads, width: int) -> Far:
    """Heads of q and k, turned where they lie beside those of v."""
    turned = sum(heads[:2])
    problem = RopeJoin(Rope("bf16", "bf16", width, width, BHS, ("", "S"), turned), heads)

    def draw(device: torch.device) -> Drawn:
        x = far(batch * length, problem.width, device=device)
        tables = [far(length, width, device=device)[None] for _ in "cs"]
        last = x[-END:].unflatten(-1, (-1, width)).transpose(0, 1)[None].cpu().split(heads, 1)
        (wanted,) = joined_heads(problem, *last, *(table[:, -END:].cpu() for table in tables))
        return (x.view(batch, length, -1), *tables), [wanted]

    return Far(rope_join.turn("turn", RopeJoined(problem.rope, turned, problem.width)), draw, rows=positions)


def norm(elements: int, dtype: str) -> Far:
    """The norm of two gradients, a large and a small one."""

    def draw(device: torch.device) -> Drawn:
        tensors = [far(count, device=device, last=1000, dtype=DTYPES[dtype]) for count in (elements, 1001)]
        parts = [tensor[-1000:].double() for tensor in tensors]
        return (tensors,), [torch.cat(parts).norm()[None]]

    return Far(square_sum.build("norm", SquareSum(dtype, root=True)), draw, bound=1e-5, rows=lambda made: made[None])


@dataclass(frozen=True)
class Sequences:
    """Batch, heads of queries and of keys, length; how many of the last rows of a sequence see each other alone; and so
    many elements beyond 16-byte boundaries tensors begin."""

    batch: int
    queries: int
    keys: int
    length: int
    reach: int
    shift: int = 0

    def heads(self, number: int, width: int, device: torch.device) -> Tensor:
        """Heads [B, H, S, width]."""
        return heads_of(self.batch, self.length, number, width, device, self.shift)

    def inputs(self, problem: Attention, device: torch.device) -> list[Tensor]:
        """q, k, v and the further operands; documents are as long as the reach."""
        batch, length = self.batch, self.length
        heads = ((self.queries, problem.width), (self.keys, problem.width), (self.keys, problem.value_width))
        more = {
            "sinks": lambda: torch.randn(self.queries, device=device).bfloat16(),
            "segments": lambda: ((torch.arange(length, device=device) - length) // self.reach).repeat(batch, 1),
        }
        return [*(self.heads(*head, device) for head in heads), *(more[name]() for name in problem.extra)]

    def last(self, tensors: list[Tensor]) -> list[Tensor]:
        """What the last rows may see, in float64, without the numbers of documents, of which they are one."""
        rows = [t[-1:, :, -self.reach :] if t.dim() > 2 else t for t in tensors if t.is_floating_point()]
        return [tensor.double() for tensor in rows]


def positions_of_heads(tensor: Tensor) -> Tensor:
    """The rows of a result [B, H, S, ...], each of all heads; of sinks, which have none, all of it."""
    return tensor.transpose(1, 2).flatten(0, 1) if tensor.dim() > 2 else tensor


def ends_of(made: Sequence[Tensor]) -> list[Tensor]:
    """What is compared of exact results."""
    return [positions_of_heads(tensor)[-END:] for tensor in made]


def masked(problem: Attention, sizes: Sequences) -> Far:
    """Attention with a mask."""
    problem = replace(problem, share=sizes.queries // sizes.keys)

    def draw(device: torch.device) -> Drawn:
        inputs = sizes.inputs(problem, device)
        return tuple(inputs), ends_of(attend(*sizes.last(inputs), **options(problem)))

    return Far(attention.forward("attend", problem), draw, rows=positions_of_heads)


def masked_gradient(problem: Attention, sizes: Sequences) -> Far:
    """Its gradient. Rows that hold nothing add nothing, whatever their sums are."""
    problem = replace(problem, share=sizes.queries // sizes.keys)

    def draw(device: torch.device) -> Drawn:
        q, k, v, *more = sizes.inputs(problem, device)
        dout, out = (sizes.heads(sizes.queries, problem.value_width, device) for _ in range(2))
        lse = torch.zeros(sizes.batch, sizes.queries, sizes.length, device=device)
        right = attend(*sizes.last([q, k, v, *more]), **options(problem))
        for tensor, result in zip((out, lse), right, strict=True):
            tensor[-1:, :, -sizes.reach :] = result
        inputs = [dout, q, k, v, out, lse, *more]
        return tuple(inputs), ends_of(attend_grad(*sizes.last(inputs), **options(problem)))

    return Far(attention_grad.backward("attend_grad", problem), draw, rows=positions_of_heads)


TOKENS, WIDER_TOKENS, FEW_CHOICES = (131_200, 8, 2048), (44_000, 8, 6144), (530_000, 2, 4096)
"""Tokens, experts of each, and width of rows that have more than 2**31 elements; of rows wider than a tile; and of so
few a token that tokens have as many, too."""
GATED = (150_000, 14_336)
"""Rows and columns of gate and of up."""
LONG, MANY = (1, 530_000, (32, 8, 8), 128), (260, 2048, (32, 8, 8), 128)
"""One long sequence, and many: batch, length, heads, width."""

HEADS, LITTLE_HEADS = (1, 530_000, (32, 32, 32), 128), (2, 100, (4, 2, 2), 16)

SINKS = Attention("bf16", 64, 64, 0.125, True, 128, more=(("sinks", "bf16"),))
SOFTCAP = Attention("bf16", 128, 128, 128**-0.5, True, softcap=50.0)
DOCUMENTS = Attention("bf16", 192, 128, 192**-0.5, True, more=(("segments", "i64"),))
WIDE_VALUES = Attention("bf16", 64, 128, 0.125, True, 128)
ATTENTION = {
    "window with sinks": (
        (SINKS, Sequences(1, 64, 8, 530_000, END + 128)),
        (replace(SINKS, width=16, value_width=16, window=40), Sequences(1, 4, 2, 150, END + 40)),
    ),
    "window with sinks, off boundaries": (
        (SINKS, Sequences(1, 64, 8, 530_000, END + 128, 1)),
        (replace(SINKS, width=16, value_width=16, window=40), Sequences(1, 4, 2, 150, END + 40, 1)),
    ),
    "softcap": (
        (SOFTCAP, Sequences(520, 32, 32, 1024, 1024)),
        (replace(SOFTCAP, width=32, value_width=32, softcap=3.0), Sequences(2, 2, 1, 100, 100)),
    ),
    "documents": (
        (DOCUMENTS, Sequences(2, 32, 32, 270_000, 1024)),
        (replace(DOCUMENTS, width=24, value_width=16), Sequences(2, 1, 1, 150, 70)),
    ),
}
"""Problems on a GPU, and small ones. Of the last, rows of out are narrower than those of q."""

CASES: dict[str, tuple[Callable[..., Far], tuple[Any, ...], tuple[Any, ...]]] = {
    "sums of experts' rows": (expert_sums, TOKENS, (40, 8, 64)),
    "sums of experts' wide rows": (expert_sums, WIDER_TOKENS, (40, 8, 2100)),
    "sums of few rows each": (expert_sums, FEW_CHOICES, (40, 2, 64)),
    "gradients of sums": (expert_sums_gradient, TOKENS, (40, 8, 64)),
    "gradients of sums of wide rows": (expert_sums_gradient, WIDER_TOKENS, (10, 8, 4100)),
    "gradients of sums of few rows each": (expert_sums_gradient, FEW_CHOICES, (40, 2, 64)),
    "gradient of tokens": (token_gradient, TOKENS, (40, 8, 64)),
    "gradient of tokens, wide rows": (token_gradient, WIDER_TOKENS, (10, 8, 2100)),
    "gradient of tokens, few rows each": (token_gradient, FEW_CHOICES, (40, 2, 64)),
    "joined gated unit": (gated, (*GATED, False), (70, 128, False)),
    "gated unit in turns": (gated, (*GATED, True), (70, 128, True)),
    "gated unit in turns, off boundaries": (gated, (*GATED, True, 1), (70, 128, True, 1)),
    "joined gated unit's gradient": (gated_gradient, (*GATED, "halves"), (70, 128, "halves")),
    "joined gated unit's gradient, swapped": (gated_gradient, (*GATED, "swapped"), (70, 128, "swapped")),
    "gated unit's gradient in turns": (gated_gradient, (*GATED, "interleaved"), (70, 128, "interleaved")),
    "gated unit's gradient in turns, off boundaries": (
        gated_gradient,
        (*GATED, "interleaved", 1),
        (70, 128, "interleaved", 1),
    ),
    "heads joined": (join, LONG, LITTLE_HEADS),
    "heads joined, apart": (join, (*HEADS, True), (*LITTLE_HEADS, True)),
    "heads joined, many sequences": (join, MANY, LITTLE_HEADS),
    "joined heads turned": (turn, LONG, LITTLE_HEADS),
    "joined heads turned, many sequences": (turn, MANY, LITTLE_HEADS),
    "norm of gradients": (norm, (2**31 + 100_000, "f32"), (70_000, "f32")),
    "norm of 16-bit gradients": (norm, (2**31 + 100_000, "bf16"), (70_000, "bf16")),
    **{f"attention, {name}": (masked, *sizes) for name, sizes in ATTENTION.items()},
    "attention, wide values": (
        masked,
        (WIDE_VALUES, Sequences(2, 32, 8, 530_000, END + 128)),
        (replace(WIDE_VALUES, width=16, value_width=32, window=40), Sequences(2, 4, 2, 150, END + 40)),
    ),
    **{f"gradient of attention, {name}": (masked_gradient, *sizes) for name, sizes in ATTENTION.items()},
}
"""How each case is made, its sizes on a GPU, and small ones."""
