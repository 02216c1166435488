"""What ranks that see other tokens have together: sums over them, and parts of which such a sum is made.

`joint-losses` writes both before autodiff, for axes that the mesh gets later. `joint_sum` is then replaced by an
`all_reduce` over its axis (`data-parallel`, `fully-shard`); `axis_share` stays. With n ranks along the axis, each of
which adds its own loss to the whole:

    op            rank r gets        gradient of rank r
    joint_sum     sum of x over all  sum of dy over all: each rank's loss depends on what every rank gave
    axis_share    x / n              dy / n
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value


def _joint_sum(x: Tensor, *, axis: str) -> Tensor:
    """The sum of x over the ranks of an axis that the mesh has not yet: x itself."""
    return x


def _axis_share(x: Tensor, *, axis: str) -> Tensor:
    """x divided by the number of ranks along the axis, of which there is one where the mesh has no such axis."""
    return x


def _infer(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (types[0],)


def _same_of_gradient(request: GradientRequest) -> Sequence[Value | None]:
    return (request.builder.one(request.node.op, request.cotangent, name="dx", axis=request.node.attrs["axis"]),)


define_op("joint_sum", _joint_sum, infer=_infer, attrs={"axis": REQUIRED}, gradient=_same_of_gradient, bytes=traffic)
define_op(
    "axis_share",
    _axis_share,
    infer=_infer,
    attrs={"axis": REQUIRED},
    gradient=_same_of_gradient,
    flops=per_element(1),
    bytes=traffic,
)
