"""Cases of tokens on their way to the experts of other ranks and back (K8): where each lies among those for a rank,
the rows that go there, and the sums of those that come back, or of those that experts with fixed room give.

Tokens take experts that are all alike, so that with 8 of 64 experts nearly every one goes to both of two ranks. What is
packed without a fill has room for a part of them only, so that a token lies in every row, and all can be compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.cases_moe import torch_dtype
from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import exchange
from mgraph.codegen.triton.exchange import Exchange, Places
from mgraph.runtime import v1 as rt
from mgraph.runtime.kernels import evaluate


def draw_choices(tokens: int, routing: Places, device: torch.device) -> Tensor:
    """Experts of each token, i64 [T, K]."""
    return torch.rand(tokens, routing.experts, device=device).topk(routing.choices, -1).indices


def draw_places(tokens: int, routing: Places, part: float, device: torch.device) -> Tensor:
    """Places of tokens that find room, i64 [T, ranks]."""
    indices = draw_choices(tokens, routing, device)
    places = rt.expert_places(indices, num_experts=routing.experts, ranks=routing.ranks)
    return rt.within_room(places, part=part)


def draw_rows(rows: int, problem: Exchange, device: torch.device) -> Tensor:
    """Rows of values, or of numbers of experts."""
    dtype = torch_dtype(problem.dtype)
    if not dtype.is_floating_point:
        return torch.randint(99, (rows, problem.width), device=device, dtype=dtype)
    return torch.randn(rows, problem.width, device=device).to(dtype)


def places_case(id_: str, tokens: int, routing: Places) -> Case:
    """Choices are read once, and places written once."""

    def reference(indices: Tensor) -> tuple[Tensor, ...]:
        ranks = torch.arange(routing.ranks, device=indices.device)
        goes = (indices[..., None] // (routing.experts // routing.ranks) == ranks).any(1)
        return (torch.where(goes, goes.cumsum(0) - 1, -1),)

    def form(indices: Tensor) -> Tensor:
        return rt.expert_places(indices, num_experts=routing.experts, ranks=routing.ranks)

    return Case(
        id=id_,
        workload=f"{tokens} tokens, {_words(routing)}",
        spec=exchange.places("places", routing),
        inputs=lambda device: (draw_choices(tokens, routing, device),),
        reference=reference,
        peers={"eager": form, "compile": form},
        bytes=8 * tokens * (routing.choices + routing.ranks),
        bound=0.0,
    )


def pack_case(id_: str, tokens: int, routing: Places, problem: Exchange) -> Case:
    """Tokens are read once, and each row written once."""
    room, fill = evaluate(problem.room, {"T": tokens}), problem.fill or 0

    def reference(x: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        rows = x.new_full((problem.ranks, room, problem.width), fill)
        for rank, place in enumerate(places.unbind(1)):
            rows[rank, place[place >= 0]] = x[place >= 0]
        return (rows.flatten(0, 1),)

    def form(x: Tensor, places: Tensor) -> Tensor:
        return rt.pack_rows(x, places, fill=fill, part=problem.part)

    return Case(
        id=id_,
        workload=f"{tokens} tokens of {problem.width} {problem.dtype}, {_words(routing)}, room for {room} of a rank",
        spec=exchange.pack("pack", problem),
        inputs=lambda device: (
            draw_rows(tokens, problem, device),
            draw_places(tokens, routing, problem.part, device),
        ),
        reference=reference,
        peers={"eager": form, "compile": form},
        bytes=(tokens + problem.ranks * room) * problem.width * torch_dtype(problem.dtype).itemsize,
        bound=0.0,
    )


def unpack_case(id_: str, tokens: int, routing: Places, problem: Exchange) -> Case:
    """Rows are read once, and each token written once."""
    room = evaluate(problem.room, {"T": tokens})

    def reference(rows: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        first = torch.arange(problem.ranks, device=rows.device) * room
        return _total(rows, torch.ones_like(places), places.where(places < 0, places + first))

    def form(rows: Tensor, places: Tensor) -> Tensor:
        return rt.unpack_rows(rows, places, part=problem.part)

    return _sum_case(
        id_,
        f"{tokens} tokens of {problem.width} {problem.dtype}, {_words(routing)}, room for {room} of a rank",
        problem,
        tokens,
        lambda device: (
            draw_rows(problem.ranks * room, problem, device),
            draw_places(tokens, routing, problem.part, device),
        ),
        reference,
        form,
    )


def weighted_case(id_: str, tokens: int, problem: Exchange) -> Case:
    """Weighted sums of rows that lie anywhere, of pairs of which one in four was dropped."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        pairs = tokens * problem.ranks
        places = torch.randperm(pairs, device=device).view(tokens, problem.ranks)
        weights = torch.rand(tokens, problem.ranks, device=device)
        return draw_rows(pairs, problem, device), weights, places.where(places % 4 > 0, -1)

    def form(rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        return rt.padded_combine(rows, weights, places, dtype=torch.float32)

    words = f"{tokens} tokens of {problem.ranks} rows of {problem.width} {problem.dtype}, weights f32"
    return _sum_case(id_, words, problem, tokens, inputs, _total, form)


def _total(rows: Tensor, weights: Tensor, places: Tensor) -> tuple[Tensor, ...]:
    """The weighted sum of the rows that lie at the places of each token."""
    total = rows.new_zeros(len(places), rows.shape[1])
    for weight, place in zip(weights.unbind(1), places.unbind(1), strict=True):
        goes = place >= 0
        total[goes] += weight[goes, None] * rows[place[goes]]
    return (total,)


def _sum_case(
    id_: str,
    workload: str,
    problem: Exchange,
    tokens: int,
    inputs: Callable[[torch.device], tuple[Tensor, ...]],
    reference: Callable[..., tuple[Tensor, ...]],
    form: Callable[..., Tensor],
) -> Case:
    return Case(
        id=id_,
        workload=workload,
        spec=exchange.unpack("unpack", problem),
        inputs=inputs,
        reference=reference,
        peers={"eager": form, "compile": form},
        bytes=tokens * (problem.ranks + 1) * problem.width * torch_dtype(problem.dtype).itemsize,
        bound=3e-3,
    )


def _words(routing: Places) -> str:
    return f"{routing.choices} of {routing.experts} experts on {routing.ranks} ranks"


ROUTING = Places(64, 8, 2)

CASES = [
    places_case("K8-places", 16384, ROUTING),
    pack_case("K8-pack", 16384, ROUTING, Exchange(2048, 2, "bf16", part=0.9)),
    unpack_case("K8-unpack", 16384, ROUTING, Exchange(2048, 2, "bf16")),
    weighted_case("K8-sums", 16384, Exchange(2048, 8, "bf16", None, 0.0, True)),
]
