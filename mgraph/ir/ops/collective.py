"""Collectives over a named mesh axis. A node takes any number of tensors (a bucket) and runs as one communication.

Bodies here are what a collective means for ALL ranks of a group at once: they take, per operand, the list of the
ranks' tensors and give the list of the ranks' results; the all-ranks interpreter runs them. `*_start` gives pending
values and `wait` the tensors; on one rank alone (a group of 1) every collective is the identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mgraph.ir.dims import Dim, symbol
from mgraph.ir.opdef import REQUIRED, define_op
from mgraph.ir.types import DType, Partial, PendingType, Shard, TensorType, Type


def _all_reduce(*groups: Any, axis: str, reduction: str = "sum") -> Any:
    """The reduction over the axis, on every rank: `P(sum)` (or `P(max)`) to `R`."""
    return tuple([_reduced(ranks, reduction, ranks[0].dtype)] * len(ranks) for ranks in groups)


def _infer_all_reduce(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return tuple(t.place(attrs["axis"], None) for t in types)


def _start(infer: Any) -> Any:
    def infer_start(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[Type, ...]:
        return tuple(PendingType(t) for t in infer(types, attrs))

    return infer_start


_REDUCE = {"axis": REQUIRED, "reduction": "sum"}
all_reduce = define_op("all_reduce", _all_reduce, attrs=_REDUCE, infer=_infer_all_reduce, collective=True)
all_reduce_start = define_op(
    "all_reduce_start", _all_reduce, attrs=_REDUCE, infer=_start(_infer_all_reduce), collective=True
)


def _all_gather(*groups: Any, axis: str, dim: int, extent: Dim | None = None, together: bool = False) -> Any:
    """The shards of all ranks joined along `dim`: `S(dim)` to `R`. With an `extent`, that of the result along `dim`,
    the results count as values of their ranks, of which the extent has all: `S(dim)` to `S(dim)`. Results that are
    `together` lie one after another in memory, as `joined` reads them."""
    import torch

    return tuple([torch.cat(list(ranks), dim)] * len(ranks) for ranks in groups)


def _infer_all_gather(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return _with_extent(types, attrs) if attrs.get("extent") is not None else _infer_all_reduce(types, attrs)


def _with_extent(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    """The types with another extent along the dim of a collective; they lie as before."""
    dim = attrs["dim"]
    return tuple(replace(t, shape=(*t.shape[:dim], attrs["extent"], *t.shape[dim + 1 :])) for t in types)


_GATHER = {"axis": REQUIRED, "dim": REQUIRED, "extent": None}
all_gather = define_op("all_gather", _all_gather, attrs=_GATHER, infer=_infer_all_gather, collective=True)
all_gather_start = define_op(
    "all_gather_start",
    _all_gather,
    attrs={**_GATHER, "together": False},
    infer=_start(_infer_all_gather),
    collective=True,
)


def _reduce_scatter(
    *groups: Any, axis: str, dim: int, reduction: str = "sum", wide: bool = False, extent: Dim | None = None
) -> Any:
    """The reduction over the axis, each rank keeping its shard along `dim`: `P(sum)` to `S(dim)`. `wide`: terms that
    are narrower than f32 are added up in f32, which is the result. With an `extent`, that of the result along `dim`,
    the operands count as values of their ranks: `S(dim)` to `S(dim)`."""
    import torch

    made = []
    for ranks in groups:
        narrow = wide and ranks[0].is_floating_point() and ranks[0].dtype.itemsize < 4
        total = _reduced(ranks, reduction, torch.float32 if narrow else ranks[0].dtype)
        made.append(list(total.chunk(len(ranks), dim)))
    return tuple(made)


def _reduced(ranks: Sequence[Any], reduction: str, dtype: Any) -> Any:
    """The reduction of one tensor over the ranks of a group, in a dtype."""
    import torch

    stacked = torch.stack(list(ranks))
    return stacked.sum(0, dtype=dtype) if reduction == "sum" else stacked.amax(0).to(dtype)


def _infer_reduce_scatter(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    if attrs.get("extent") is not None:
        return _with_extent(types, attrs)
    for t in types:
        if not isinstance(t.on(attrs["axis"]), Partial):
            raise ValueError(f"reduce_scatter of {t}, which is not partial over {attrs['axis']}")
    if attrs.get("wide") and attrs.get("reduction", "sum") != "sum":
        raise ValueError(f"a wide reduction is a sum, not {attrs['reduction']}")
    return tuple(_widened(t, attrs).place(attrs["axis"], Shard(attrs["dim"])) for t in types)


def _widened(type_: TensorType, attrs: Mapping[str, Any]) -> TensorType:
    narrow = type_.dtype.is_float and type_.dtype.bits < DType.F32.bits
    return replace(type_, dtype=DType.F32) if attrs.get("wide") and narrow else type_


_SCATTER = {"axis": REQUIRED, "dim": REQUIRED, "reduction": "sum", "wide": False, "extent": None}
reduce_scatter = define_op(
    "reduce_scatter", _reduce_scatter, attrs=_SCATTER, infer=_infer_reduce_scatter, collective=True
)
reduce_scatter_start = define_op(
    "reduce_scatter_start", _reduce_scatter, attrs=_SCATTER, infer=_start(_infer_reduce_scatter), collective=True
)


def _all_to_all(
    *groups: Any, axis: str, split_dim: int, join_dim: int, rows: str | None = None, back: bool = False
) -> Any:
    """Rank i sends chunk j along `split_dim` to rank j, which joins along `join_dim`: `S(join)` to `S(split)`.

    Chunks are equal. With `rows`, the ragged dim of the results, a last operand `read_sizes` says how many rows go to
    each rank and come from each; `back` sends as many as came, and gets as many as were sent.
    """
    import torch

    made = []
    sizes = [] if rows is None else [t.tolist()[back] for t in groups[-1]]
    for ranks in groups if rows is None else groups[:-1]:
        if rows is None:
            chunks = [list(t.chunk(len(ranks), split_dim)) for t in ranks]
        else:
            chunks = [list(t.split(sent)) for t, sent in zip(ranks, sizes, strict=True)]
        made.append([torch.cat([c[j] for c in chunks], join_dim) for j in range(len(ranks))])
    return tuple(made)


def _infer_all_to_all(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    if attrs.get("rows") is not None:
        received = symbol(attrs["rows"])
        return tuple(replace(t, shape=(received, *t.shape[1:])) for t in types[:-1])
    if attrs["split_dim"] == attrs["join_dim"]:
        return tuple(types)
    return tuple(t.place(attrs["axis"], Shard(attrs["split_dim"])) for t in types)


_EXCHANGE = {"axis": REQUIRED, "split_dim": REQUIRED, "join_dim": REQUIRED, "rows": None, "back": False}
all_to_all = define_op("all_to_all", _all_to_all, attrs=_EXCHANGE, infer=_infer_all_to_all, collective=True)
all_to_all_start = define_op(
    "all_to_all_start", _all_to_all, attrs=_EXCHANGE, infer=_start(_infer_all_to_all), collective=True
)


def _wait(*pending: Any) -> Any:
    """The tensors of pending values."""
    return pending if len(pending) > 1 else pending[0]


def _infer_wait(types: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    for t in types:
        if not isinstance(t, PendingType):
            raise ValueError(f"wait of {t}, which is not pending")
    return tuple(t.value for t in types)


wait = define_op("wait", _wait, infer=_infer_wait)


def _axis_index(*, axis: str) -> Any:
    """This rank's coordinate on the axis, i64[]."""
    raise AssertionError(f"axis_index({axis}) is run by the interpreter")


def _infer_axis_index(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (TensorType(DType.I64),)


axis_index = define_op("axis_index", _axis_index, attrs={"axis": REQUIRED}, infer=_infer_axis_index)


def _part_of(x: Any, index: Any, *, dim: int, parts: int) -> Any:
    """One of `parts` equal parts of x along `dim`, number `index` (i64[]): `R` to `S(dim)` where that is the rank's
    coordinate. Nothing is sent."""
    size = x.shape[dim] // parts
    return x.narrow(dim, int(index) * size, size)


def _of_first(x: Any, index: Any) -> Any:
    """x on the rank of coordinate 0, `index` (i64[]), and zeros on all others: `R` to `P(sum)`. Nothing is sent."""
    import torch

    return x if int(index) == 0 else torch.zeros_like(x)


of_first = define_op("of_first", _of_first, infer=lambda types, _: (types[0],))
part_of = define_op("part_of", _part_of, attrs={"dim": REQUIRED, "parts": REQUIRED}, infer=lambda types, _: (types[0],))
