"""Tokens on their way to the experts of other ranks and back: expert parallelism.

Shapes: T tokens of a rank, K experts a token, N width, n ranks that share E experts (rank r has E/n of them, from
r·E/n on), R rows that a rank receives. A token is sent once to each rank that has any of its experts, however many of
them: with its row go its weights and the numbers of its experts, and what comes back is one row, the weighted sum over
those experts. `expert_send` and `expert_return` are adjoint, and are the identity on one rank; `expert-parallel`
replaces them by the other ops and collectives:

    send      places = expert_places(indices)    all_to_all(pack_rows(x, places))
    return    unpack_rows(all_to_all(y), places)

R is a ragged dim. Of the n·T rows that a rank has room for, T for each rank that it receives from, those in use come
first within the part of each rank; a row that is not in use has no experts, and is read into no result. With a budget
there is room for a `part` of T only, and what finds none is counted. With sizes that the host reads there is room for
the rows that there are (`exact`, `mgraph.ir.ops.exact_exchange`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import sympy

from mgraph.ir.dims import Dim, as_dim, symbol
from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.torch_bridge import promote
from mgraph.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

    Attrs = Mapping[str, Any]
    Types = Sequence[TensorType]


def _parted(operands: Sequence[Any], attrs: Attrs) -> tuple[Sequence[Any], Sequence[Any]]:
    """What goes on a way, and what says where: indices, with `exact` after the sizes of messages."""
    count = len(operands) - (2 if attrs.get("exact") else 1)
    return operands[:count], operands[count:]


def _expert_send(*operands: Any, num_experts: int, rows: str, choices: bool = False, exact: bool = False) -> Any:
    """Rows of tensors for the ranks that have a token's experts.

    Tensors [T, N] of any width, then indices i64[T, K] (with `exact` after `expert_sizes` of them) → each as [R, N],
    where R is the ragged dim `rows`; with
    `choices` at last i64[R, K], the experts of a row by their numbers on the rank that has it, and how many that rank
    has for one of another rank. On one rank: what it is given.
    """
    tensors, way = _parted(operands, {"exact": exact})
    return (*tensors, way[-1]) if choices else tuple(tensors)


def _infer_send(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    tensors, way = _parted(types, attrs)
    _same_tokens("expert_send", [*tensors, way[-1]])
    received = symbol(attrs["rows"])
    sent = [*tensors, way[-1]] if attrs.get("choices") else tensors
    return tuple(TensorType(t.dtype, (received, *t.shape[1:])) for t in sent)


def _send_gradient(request: GradientRequest) -> Sequence[Value | None]:
    tensors, way = _parted(request.node.operands, request.node.attrs)
    given = [c for c in request.cotangents[: len(tensors)] if c is not None]
    attrs = _way_attrs(request)
    made = iter(request.builder.emit("expert_return", (*given, *way), attrs, names=["dsent"] * len(given)))
    return *(None if c is None else next(made) for c in request.cotangents[: len(tensors)]), *[None] * len(way)


def _way_attrs(request: GradientRequest) -> dict[str, Any]:
    return {name: value for name, value in request.node.attrs.items() if name in ("num_experts", "rows", "exact")}


def _expert_return(*operands: Any, num_experts: int, rows: str, exact: bool = False) -> Any:
    """The inverse way: for each token the sum of the rows that stand for it on the ranks that have its experts.

    Tensors [R, N], then indices i64[T, K] (with `exact` after `expert_sizes` of them) → each as [T, N], summed in at
    least f32. On one rank: what it is given.
    """
    return tuple(_parted(operands, {"exact": exact})[0])


def _infer_return(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    tensors, way = _parted(types, attrs)
    return tuple(TensorType(t.dtype, (way[-1].shape[0], *t.shape[1:])) for t in tensors)


def _return_gradient(request: GradientRequest) -> Sequence[Value | None]:
    way = _parted(request.node.operands, request.node.attrs)[1]
    given = [c for c in request.cotangents if c is not None]
    attrs = _way_attrs(request)
    made = iter(request.builder.emit("expert_send", (*given, *way), attrs, names=["dreturned"] * len(given)))
    return *(None if c is None else next(made) for c in request.cotangents), *[None] * len(way)


def _same_tokens(op: str, types: Types) -> None:
    if any(t.shape[0] != types[-1].shape[0] for t in types):
        raise ValueError(f"{op}: {', '.join(map(str, types))} are not of equally many tokens")


def _expert_places(indices: Tensor, *, num_experts: int, ranks: int) -> Tensor:
    """Where each token lies among those that go to a rank: indices i64[T, K] → i64[T, ranks], -1 where it does not go.

    They are counted in the order of the tokens. A token goes to a rank once, however many of its experts are there, and
    nowhere for `num_experts`, an expert that dropped it.
    """
    owner = indices // (num_experts // ranks)
    goes = owner.new_zeros(indices.shape[0], ranks + 1).scatter(1, owner, 1)[:, :-1]
    return (goes.cumsum(0) - 1).where(goes > 0, -1)


def _infer_places(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(DType.I64, (types[0].shape[0], attrs["ranks"])),)


def room(tokens: Dim, part: float) -> Dim:
    """How many of so many tokens one rank may send to another: `part` of them, rounded up. `part` is the decimal it is
    written as; 1.0: all of them, which always fit."""
    if part == 1.0:
        return tokens
    share = Fraction(str(part))
    return as_dim(sympy.ceiling(sympy.Rational(share.numerator, share.denominator) * tokens))


def _slots(tokens: int, part: float) -> int:
    return int(str(room(tokens, part)))


def _within_room(places: Tensor, *, part: float) -> Tensor:
    """places i64[T, n] with -1 for tokens that a rank has no room for: of `part` of T tokens from each rank."""
    return places.where(places < _slots(places.shape[0], part), -1)


def _expert_overrun(indices: Tensor, *, num_experts: int, rows: str, ranks: int) -> Tensor:
    """How many tokens found no room on their way, by the rank that sent them, i64[ranks]: on one rank none.

    indices i64[T, K]. `expert-parallel` makes `places_overrun` of it.
    """
    return indices.new_zeros(ranks)


def _places_overrun(places: Tensor, index: Tensor, *, part: float) -> Tensor:
    """How many tokens this rank, number `index` (i64[]) of n, has no room for, at its place of i64[n], and 0 elsewhere.

    places i64[T, n] are those of all tokens.
    """
    import torch

    count = (places >= _slots(places.shape[0], part)).sum()
    ranks = torch.arange(places.shape[1], device=places.device)
    return torch.where(ranks == index, count, 0)


def _pack_rows(x: Tensor, places: Tensor, *, rows: str, fill: int = 0, part: float = 1.0) -> Tensor:
    """The rows that go to each rank: x [T, N], places i64[T, n] → [n·C, N], where C is T, or `part` of it; token t lies
    at d·C + places[t, d] for each rank d that it goes to. All other rows are `fill`; where nothing is said,
    nothing reads them."""
    tokens, ranks = places.shape
    out = x.new_full((ranks, _slots(tokens, part), *x.shape[1:]), fill)
    for rank in range(ranks):
        goes = places[:, rank] >= 0
        out[rank, places[goes, rank]] = x[goes]
    return out.flatten(0, 1)


def _infer_pack(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(types[0].dtype, (symbol(attrs["rows"]), *types[0].shape[1:])),)


def _unpack_rows(y: Tensor, places: Tensor, *, part: float = 1.0) -> Tensor:
    """The sum over the ranks that token t went to of y[d·C + places[t, d]]: y [n·C, N], places i64[T, n] → [T, N].

    Summed in at least f32. With a `part` of 0 places count all rows, of which there may be any number.
    """
    tokens, ranks = places.shape
    rows = promote(y)
    total = rows.new_zeros(tokens, *y.shape[1:])
    for rank in range(ranks):
        goes = places[:, rank] >= 0
        total[goes] += rows[rank * _slots(tokens, part) + places[goes, rank]]
    return rounded(total, y)


def _own_choices(indices: Tensor, index: Tensor, *, num_experts: int, ranks: int, used: bool = False) -> Tensor:
    """The experts of received rows by their numbers on this rank, number `index` (i64[]) of the `ranks` that share
    `num_experts`: indices i64[R, K] → i64[R, K], and how many a rank has for those of others. With `used` every row is
    a token's, so that there is none without experts, -1."""
    own = num_experts // ranks
    local = indices - index * own
    return local.where((local >= 0) & (local < own), own)


define_op(
    "expert_send",
    _expert_send,
    infer=_infer_send,
    attrs={"num_experts": REQUIRED, "rows": REQUIRED, "choices": False, "exact": False},
    gradient=_send_gradient,
    bytes=traffic,
)
define_op(
    "expert_return",
    _expert_return,
    infer=_infer_return,
    attrs={"num_experts": REQUIRED, "rows": REQUIRED, "exact": False},
    gradient=_return_gradient,
    bytes=traffic,
)
define_op(
    "expert_places",
    _expert_places,
    infer=_infer_places,
    attrs={"num_experts": REQUIRED, "ranks": REQUIRED},
    flops=per_element(2),
    bytes=traffic,
)
define_op("pack_rows", _pack_rows, infer=_infer_pack, attrs={"rows": REQUIRED, "fill": 0, "part": 1.0}, bytes=traffic)
define_op(
    "within_room",
    _within_room,
    infer=lambda types, attrs: (types[0],),
    attrs={"part": REQUIRED},
    flops=per_element(1),
    bytes=traffic,
)
define_op(
    "expert_overrun",
    _expert_overrun,
    infer=lambda types, attrs: (TensorType(DType.I64, (attrs["ranks"],)),),
    attrs={"num_experts": REQUIRED, "rows": REQUIRED, "ranks": REQUIRED},
    bytes=traffic,
)
define_op(
    "places_overrun",
    _places_overrun,
    infer=lambda types, attrs: (TensorType(DType.I64, (types[0].shape[1],)),),
    attrs={"part": REQUIRED},
    flops=per_element(1),
    bytes=traffic,
)
define_op(
    "unpack_rows",
    _unpack_rows,
    attrs={"part": 1.0},
    infer=lambda types, attrs: (TensorType(types[0].dtype, (types[1].shape[0], *types[0].shape[1:])),),
    flops=per_element(1),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "own_choices",
    _own_choices,
    infer=lambda types, attrs: (TensorType(DType.I64, types[0].shape),),
    attrs={"num_experts": REQUIRED, "ranks": REQUIRED, "used": False},
    flops=per_element(2),
    bytes=traffic,
)
