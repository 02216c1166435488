"""Tokens on their way to the experts of other ranks in messages of exactly as many rows as there are.

Shapes: T tokens of a rank, n ranks that share the experts, Q rows that a rank sends, R rows that it receives. Both are
ragged dims whose extents the host reads, once for each way there and back:

    sent = rows_sent(expert_places(indices))    received = all_to_all(sent)    sizes = read_sizes(sent, received)
    tokens, rows = exact_places(places, sizes)
    there     all_to_all(take_rows(x, tokens), sizes) {rows = "R"}
    back      unpack_rows(all_to_all(y, sizes) {rows = "Q", back = true}, rows) {part = 0.0}

`expert_sizes` stands for `sizes` until `expert-parallel`, and is what a backward is handed. Sizes are of a rank: of
what all ranks send to each other, n * n numbers, it has its n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.dims import symbol
from mgraph.ir.opdef import REQUIRED, define_op
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor

    Attrs = Mapping[str, Any]
    Types = Sequence[TensorType]


def _expert_sizes(indices: Tensor, *, num_experts: int, rows: str, ranks: int) -> Tensor:
    """How many rows go to each of the ranks that share the experts, and how many come from each: indices i64[T, K] →
    i64[2, n * n], of which a rank has [2, n]. On one rank nothing is sent: zeros."""
    return indices.new_zeros(2, ranks * ranks)


def _rows_sent(places: Tensor) -> Tensor:
    """How many tokens go to each rank: places i64[T, n], -1 where one does not go → i64[n * n], of which a rank has its
    n."""
    return (places >= 0).sum(0)


def _read_sizes(sent: Tensor, received: Tensor) -> Tensor:
    """What goes to each rank and what comes from each, i64[n * n] both, as i64[2, n * n] in the memory of the host,
    which waits for them."""
    import torch

    return torch.stack([sent, received])


def _infer_read(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(DType.I64, (2, *types[0].shape)),)


def _exact_places(places: Tensor, sizes: Tensor, *, rows: str) -> tuple[Tensor, Tensor]:
    """places i64[T, n], where a token lies among those that go to a rank, and sizes i64[2, n] → the token of each row
    that is sent, i64[Q], by ranks, and the row of each token and rank, i64[T, n]; -1 where it does not go."""
    import torch

    goes = places.t() >= 0
    tokens = goes.nonzero()[:, 1]
    assert len(tokens) == int(sizes[0].sum()), "sizes are of other places"
    return tokens, torch.where(goes, goes.flatten().cumsum(0).view(goes.shape) - 1, -1).t()


def _infer_places(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return TensorType(DType.I64, (symbol(attrs["rows"]),)), types[0]


def _take_rows(x: Tensor, tokens: Tensor) -> Tensor:
    """The rows x[tokens]: x [T, N], tokens i64[Q] → [Q, N]."""
    return x[tokens]


define_op(
    "expert_sizes",
    _expert_sizes,
    infer=lambda types, attrs: (TensorType(DType.I64, (2, attrs["ranks"] ** 2)),),
    attrs={"num_experts": REQUIRED, "rows": REQUIRED, "ranks": REQUIRED},
    bytes=traffic,
)
define_op(
    "rows_sent",
    _rows_sent,
    infer=lambda types, attrs: (TensorType(DType.I64, (int(str(types[0].shape[1])) ** 2,)),),
    flops=per_element(1),
    bytes=traffic,
)
define_op("read_sizes", _read_sizes, infer=_infer_read, bytes=traffic)
define_op(
    "exact_places",
    _exact_places,
    infer=_infer_places,
    attrs={"rows": REQUIRED},
    flops=per_element(2),
    bytes=traffic,
)
define_op(
    "take_rows",
    _take_rows,
    infer=lambda types, attrs: (TensorType(types[0].dtype, (*types[1].shape, *types[0].shape[1:])),),
    bytes=traffic,
)
