"""Instances of attention with all masks, their operands, and what is right: the ops' own bodies in float64."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mgraph.codegen.triton.attention_problem import Attention
from mgraph.ir.ops.attention import attention, attention_grad

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

PROBLEMS: dict[str, Attention] = {
    "window": Attention("bf16", 16, 16, 0.25, causal=True, window=40, share=2),
    "long_window": Attention("f16", 16, 16, 0.25, causal=True, window=140),
    "window_of_one": Attention("f16", 16, 16, 0.25, causal=True, window=1),
    "window_ahead": Attention("f16", 16, 16, 0.3, window=2),
    "softcap": Attention("f16", 64, 64, 0.5, causal=True, softcap=2.0),
    "softcap_of_all": Attention("bf16", 16, 16, 0.5, softcap=2.0, square=False),
    "narrow": Attention("bf16", 20, 20, 0.3, causal=True),
    "uneven": Attention("f16", 80, 16, 0.1, causal=True),
    "narrow_values": Attention("bf16", 64, 32, 0.125, causal=True, share=2),
    "past": Attention("f16", 16, 16, 0.25, causal=True, square=False, share=2),
    "documents": Attention("bf16", 64, 64, 0.125, causal=True, more=(("segments", "i64"),), share=2),
    "long_documents": Attention("f16", 16, 16, 0.25, causal=True, more=(("segments", "i64"),)),
    "mixed": Attention("f16", 16, 16, 0.25, more=(("segments", "i32"), ("segments", "i64"))),
    "padding": Attention("f16", 16, 16, 0.25, causal=True, square=False, more=(("keys", "bool"),)),
    "sinks_in_a_window": Attention("bf16", 64, 64, 0.125, causal=True, window=33, more=(("sinks", "bf16"),), share=2),
    "all": Attention(
        "f16",
        80,
        80,
        0.3,
        causal=True,
        window=50,
        softcap=3.0,
        more=(("keys", "i64"), ("sinks", "f32"), ("segments", "i64")),
        share=2,
    ),
}
SIZES = {
    "window": (1, 4, 2, 129, 129),
    "long_window": (1, 1, 1, 333, 333),
    "window_of_one": (2, 1, 1, 7, 7),
    "window_ahead": (1, 1, 1, 70, 70),
    "softcap": (1, 1, 1, 129, 129),
    "softcap_of_all": (1, 2, 2, 33, 70),
    "narrow": (1, 3, 1, 40, 40),
    "uneven": (1, 1, 1, 129, 129),
    "narrow_values": (1, 2, 1, 70, 70),
    "past": (1, 2, 1, 70, 33),
    "documents": (2, 2, 1, 200, 200),
    "long_documents": (1, 1, 1, 333, 333),
    "mixed": (1, 1, 1, 129, 129),
    "padding": (2, 2, 2, 33, 70),
    "sinks_in_a_window": (1, 2, 1, 129, 129),
    "all": (2, 2, 1, 129, 129),
}
"""Batch, query heads, key heads, queries and keys."""

WIDER = {
    f"{name}_{width}": replace(PROBLEMS[name], width=width, value_width=width)
    for name in ("softcap", "documents", "window", "past", "padding", "sinks_in_a_window", "all")
    for width in (96, 128, 256)
}
"""The same of wider heads, which are cut otherwise, and which the interpreter is too slow for."""
SIZES |= {name: SIZES[name.rpartition("_")[0]] for name in WIDER}
EVERY = PROBLEMS | WIDER


def heads(generator: torch.Generator, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Numbers [B, H, S, D] that lie as [B, S, H, D + 16]: as parts of a projection."""
    batch, number, rows, width = shape
    whole = torch.randn(batch, rows, number, width + 16, generator=generator).to(dtype)
    return whole[..., :width].permute(0, 2, 1, 3)


def draw(name: str) -> tuple[Tensor, ...]:
    """q, k, v and the further operands of an instance."""
    problem, (batch, queries, groups, rows, columns) = EVERY[name], SIZES[name]
    generator = torch.Generator().manual_seed(rows + problem.width)
    dtype = DTYPES[problem.dtype]
    q = heads(generator, (batch, queries, rows, problem.width), dtype)
    k = heads(generator, (batch, groups, columns, problem.width), dtype)
    v = heads(generator, (batch, groups, columns, problem.value_width), dtype).contiguous()
    more: list[Tensor] = []
    for kind, wanted in problem.more:
        if kind == "sinks":
            more.append(torch.randn(queries, generator=generator).to(DTYPES[wanted]))
        elif kind == "segments":
            more.append(
                segments(generator, batch, rows, ordered=name != "mixed", length=120 if "long" in name else 30).to(
                    getattr(torch, f"int{wanted[1:]}")
                )
            )
        else:
            keys = torch.rand(batch, columns, generator=generator) < 0.7
            keys[0, :5] = False
            keys[-1, columns // 2 :] = False
            more.append(keys if wanted == "bool" else 3 * keys.long())
    return q, k, v, *more


def segments(generator: torch.Generator, batch: int, rows: int, *, ordered: bool, length: int = 30) -> Tensor:
    """Numbers of documents one after another, of about `length` rows; or of four, shuffled."""
    if not ordered:
        return torch.randint(-2, 2, (batch, rows), generator=generator)
    return (torch.rand(batch, rows, generator=generator) < 1 / length).long().cumsum(1) - 1


def displaced(inputs: tuple[Tensor, ...], elements: int = 1, device: str = "cpu") -> tuple[Tensor, ...]:
    """The same on a device, with parts of projections, and sums of their rows, so many elements beyond a 16-byte
    boundary."""

    def further(tensor: Tensor) -> Tensor:
        if tensor.dim() < 3:
            return tensor.to(device)
        size = tensor.untyped_storage().nbytes() // tensor.element_size() + elements
        whole = torch.empty(size, dtype=tensor.dtype, device=device)
        return whole.as_strided(tensor.shape, tensor.stride(), elements).copy_(tensor)

    return tuple(map(further, inputs))


DISPLACED = ("past", "all")
"""Instances that are also run on displaced operands."""


def wide(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Floats as float64."""
    return tuple(t.double() if t.is_floating_point() else t for t in tensors)


def results(name: str, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """out and lse in float64."""
    p = EVERY[name]
    return attention(*wide(inputs), scale=p.scale, causal=p.causal, window=p.window, softcap=p.softcap, extra=p.extra)


def gradients(name: str, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """dq, dk, dv, and dsinks, in float64; the inputs are dout, q, k, v, out, lse, ..."""
    p = EVERY[name]
    return attention_grad(
        *wide(inputs), scale=p.scale, causal=p.causal, window=p.window, softcap=p.softcap, extra=p.extra
    )


def operands_of_gradients(name: str) -> tuple[Tensor, ...]:
    """dout, q, k, v, out, lse and the further operands of an instance."""
    q, k, v, *more = draw(name)
    out, lse = results(name, (q, k, v, *more))
    dout = heads(torch.Generator().manual_seed(3), (*out.shape,), DTYPES[EVERY[name].dtype])
    return dout, q, k, v, out.to(q.dtype), lse.float(), *more


def error(found: Tensor, expected: Tensor) -> float:
    """The error in the Frobenius norm, relative to what it should be unless that is about 0; infinite where infinities
    differ."""
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    got, want = found.double()[finite], expected.double()[finite]
    return float((got - want).norm()) / max(float(want.norm()), 0.01)
