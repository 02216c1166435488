"""Cases of attention with masks (A2): windows, sinks, softcap and documents, forward and backward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import attention, attention_grad
from mgraph.codegen.triton.attention_problem import Attention
from mgraph.ir.ops.attention import attention as body
from mgraph.ir.ops.attention import attention_grad as gradient_body


@functools.cache
def flex() -> Any:
    """The module of flex attention."""
    import torch.nn.attention.flex_attention as module

    return module


@dataclass(frozen=True)
class Sizes:
    """B, H, G and S, and the mean length of a document."""

    batch: int
    queries: int
    keys: int
    rows: int
    document: int = 0


def draw(problem: Attention, sizes: Sizes, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v [B, H, S, D], in memory [B, S, H, D], and the further operands."""
    batch, rows = sizes.batch, sizes.rows

    def heads(number: int, width: int) -> Tensor:
        made = torch.randn(batch, rows, number, width, device=device, dtype=torch.bfloat16)
        return made.permute(0, 2, 1, 3)

    more = []
    for name in problem.extra:
        if name == "sinks":
            more.append(torch.randn(sizes.queries, device=device, dtype=torch.bfloat16))
        else:
            more.append((torch.rand(batch, rows, device=device) < 1 / sizes.document).long().cumsum(1))
    width, keys = problem.width, sizes.keys
    return heads(sizes.queries, width), heads(keys, width), heads(keys, problem.value_width), *more


def by_parts(
    run: Callable[..., tuple[Tensor, ...]], problem: Attention, heads: tuple[int, ...], groups: tuple[int, ...]
) -> Callable[..., tuple[Tensor, ...]]:
    """The op's body for one batch, one head of the keys and one document at a time, whose scores fit in memory.

    `heads` and `groups` say which operands have a dim of query heads and which of key heads; sinks have the former.
    """

    def whole(*operands: Tensor) -> tuple[Tensor, ...]:
        number, count = operands[groups[0]].shape[1], operands[heads[0]].shape[0]
        given = operands[: len(operands) - len(problem.extra)]
        more = dict(zip(problem.extra, operands[len(given) :], strict=True))
        rows = []
        for batch in range(count):
            parts = []
            for group in range(number):
                of_group = [operand[batch : batch + 1].chunk(number, 1)[group] for operand in given]
                sinks = [more["sinks"].chunk(number)[group]] if "sinks" in more else []
                found = [
                    run(*(operand[:, :, begin:end] for operand in of_group), *sinks, **options(problem))
                    for begin, end in documents(more.get("segments"), batch, given[0].shape[2])
                ]
                parts.append(
                    [torch.cat(same, 2) if same[0].dim() > 1 else same[0] for same in zip(*found, strict=True)]
                )
            rows.append([torch.cat(same, 1 if same[0].dim() > 1 else 0) for same in zip(*parts, strict=True)])
        return tuple(
            torch.cat(same) if same[0].dim() > 1 else torch.stack(same).sum(0) for same in zip(*rows, strict=True)
        )

    return whole


def documents(ids: Tensor | None, batch: int, rows: int) -> list[tuple[int, int]]:
    """Where the documents of a row begin and end; all is one without."""
    inner = [] if ids is None else (ids[batch].diff().nonzero().flatten() + 1).tolist()
    return list(itertools.pairwise([0, *inner, rows]))


def options(problem: Attention) -> dict[str, Any]:
    """The attributes of the op, of one document."""
    return {
        "scale": problem.scale,
        "causal": problem.causal,
        "window": problem.window,
        "softcap": problem.softcap,
        "extra": tuple(name for name in problem.extra if name != "segments"),
    }


def flex_forward(problem: Attention) -> Callable[..., tuple[Tensor, Tensor]]:
    """Flex attention with the same masks; a sink is added to the sums afterwards.

    The blocks of a mask are found once for a shape, or for some documents, as users of it do.
    """
    masks: dict[Any, Any] = {}

    def mask_of(q: Tensor, ids: Tensor | None) -> Any:
        key = (q.shape, None if ids is None else ids.data_ptr())
        if key not in masks:

            def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                visible = i >= j
                visible = visible if problem.window is None else visible & (i - j < problem.window)
                return visible if ids is None else visible & (ids[b, i] == ids[b, j])

            batch = None if ids is None else q.shape[0]
            masks[key] = flex().create_block_mask(seen, batch, None, q.shape[2], q.shape[2], q.device)
        return masks[key]

    def bend(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        cap = problem.softcap or 1.0
        return cap * torch.tanh(score / cap)

    compiled: list[Any] = []

    def run(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(problem.extra, more, strict=True))
        if not compiled:
            compiled.append(torch.compile(flex().flex_attention, dynamic=False))
        out, lse = compiled[0](
            q,
            k,
            v,
            score_mod=None if problem.softcap is None else bend,
            block_mask=mask_of(q, given.get("segments")),
            scale=problem.scale,
            enable_gqa=True,
            return_lse=True,
        )
        if "sinks" not in given:
            return out, lse
        total = torch.logaddexp(lse, given["sinks"].float()[:, None])
        return out * (lse - total).exp()[..., None].to(out.dtype), total

    return run


def flex_backward(problem: Attention) -> Callable[..., tuple[Tensor, ...]]:
    """The gradient of flex attention without sinks, of a forward that runs once for some inputs.

    It runs on the stream of captures, since its gradient will run where it did.
    """
    run = flex_forward(replace(problem, more=tuple(m for m in problem.more if m[0] != "sinks")))
    made: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}

    def gradient(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Tensor
    ) -> tuple[Tensor, ...]:
        if dout.data_ptr() not in made:
            if torch.cuda.graph.default_capture_stream is None:
                torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
            leaves = tuple(t.detach().requires_grad_() for t in (q, k, v))
            kept = [t for name, t in zip(problem.extra, more, strict=True) if name != "sinks"]
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.graph.default_capture_stream):
                made[dout.data_ptr()] = run(*leaves, *kept)[0], leaves
            torch.cuda.synchronize()
        result, leaves = made[dout.data_ptr()]
        return torch.autograd.grad(result, leaves, dout, retain_graph=True)

    return gradient


def traffic(problem: Attention, sizes: Sizes, backward: bool) -> int:
    """Bytes of operands and results, each moved once."""
    batch, rows = sizes.batch, sizes.rows
    widths = problem.width + problem.value_width
    moved = 2 * batch * rows * (sizes.queries + sizes.keys) * widths
    return (2 if backward else 1) * moved + 4 * batch * sizes.queries * rows


def cases(name: str, what: str, problem: Attention, sizes: Sizes) -> list[Case]:
    """Forward and backward."""
    site = name.replace("-", "_")
    problem = replace(problem, share=sizes.queries // sizes.keys)
    about = f"B {sizes.batch}, H {sizes.queries}, G {sizes.keys}, S {sizes.rows}, D {problem.width}, bf16"
    workload = f"{what}: {about}"

    def saved(device: torch.device) -> tuple[Tensor, ...]:
        q, k, v, *more = draw(problem, sizes, device)
        out, lse = by_parts(body, problem, (0,), (1, 2))(q, k, v, *more)
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.randn_like(out), q, k, v, out, lse, *more

    return [
        Case(
            id=f"A2-{name}",
            workload=f"attention, {workload}",
            spec=attention.forward(f"attention_{site}", problem),
            inputs=lambda device: draw(problem, sizes, device),
            reference=by_parts(body, problem, (0,), (1, 2)),
            peers={"flex": flex_forward(problem)},
            bytes=traffic(problem, sizes, backward=False),
            bound=6e-3,
        ),
        Case(
            id=f"A2-{name}-grad",
            workload=f"gradient of attention, {workload}",
            spec=attention_grad.backward(f"attention_{site}_grad", problem),
            inputs=saved,
            reference=by_parts(gradient_body, problem, (1, 0, 4, 5), (2, 3)),
            peers={"flex": flex_backward(problem)},
            bytes=traffic(problem, sizes, backward=True),
            bound=1e-2,
        ),
    ]


SQUARE = Sizes(4, 32, 8, 4096)
PACKED = Attention("bf16", 128, 128, 128**-0.5, True, more=(("segments", "i64"),))
CASES = [
    *cases("window", "window 1024", Attention("bf16", 128, 128, 128**-0.5, True, 1024), SQUARE),
    *cases(
        "sinks",
        "sinks and window 128",
        Attention("bf16", 64, 64, 0.125, True, 128, more=(("sinks", "bf16"),)),
        Sizes(4, 64, 8, 4096),
    ),
    *cases("softcap", "softcap 50", Attention("bf16", 128, 128, 128**-0.5, True, softcap=50.0), SQUARE),
    *(
        case
        for name, batch, rows, document in (("", 4, 4096, 512), ("-8k", 2, 8192, 1024), ("-32k", 1, 32768, 2048))
        for case in cases(
            f"documents{name}", f"documents of about {document}", PACKED, Sizes(batch, 32, 8, rows, document)
        )
    ),
]
