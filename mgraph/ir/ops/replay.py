"""Decisions of routers that come from outside: which experts a token goes to, as recorded before.

Shapes: T tokens, K experts a token, E experts, L routers. Only decisions are replayed: weights are made anew of the
scores that the router has now, so that gradients flow through them as through those of its own choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.ops.route import WEIGHING, weighed
from mgraph.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

    Attrs = Mapping[str, Any]
    Types = Sequence[TensorType]

ROUTING = "routing"
"""The input and the output of entries that have the decisions: i16[B, S, L, K]."""


def _replay_choice(indices: Tensor, given: Tensor) -> Tensor:
    """The experts that are given, and those that were chosen where none is given.

    indices i64[T, K], given i16[T, K], -1 where the router is to choose → i64[T, K].
    """
    return indices.where(given < 0, given.long())


def _infer_choice(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    indices, given = types
    if indices.dtype is not DType.I64 or given.dtype is not DType.I16 or indices.shape != given.shape:
        raise ValueError(f"replay_choice: indices {indices} and given {given} do not fit")
    return (indices,)


def _moe_weigh(
    logits: Tensor,
    indices: Tensor,
    *,
    score: str = "softmax",
    renormalize: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
    dtype: DType = DType.F32,
) -> Tensor:
    """The weights that `moe_route` gives the experts of its choice, of any choice.

    logits [T, E], indices i64[T, K] → weights [T, K] in `dtype`. Attributes are as there.
    """
    return weighed(logits, indices, score, renormalize, epsilon, scale, dtype)


def _infer_weigh(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    logits, indices = types
    if len(logits.shape) != 2 or len(indices.shape) != 2 or logits.shape[0] != indices.shape[0]:
        raise ValueError(f"moe_weigh: logits {logits} and indices {indices} do not fit")
    return (TensorType(attrs["dtype"], indices.shape),)


def _weigh_gradient(request: GradientRequest) -> Sequence[Value | None]:
    node = request.node
    attrs = {name: node.attrs.get(name, default) for name, default in WEIGHING.items()}
    operands = (request.cotangent, *node.operands)
    return (*request.builder.emit("moe_route_grad", operands, attrs, names=("dlogits",)), None)


def _first_layer(given: Tensor) -> tuple[Tensor, Tensor]:
    """The decisions of the first router, and those of all others: given [L, T, K] → [T, K], [L - 1, T, K]."""
    return given[0], given[1:]


def _infer_first(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (given,) = types
    if not given.shape or not isinstance(given.shape[0], int) or given.shape[0] < 1:
        raise ValueError(f"first_layer: {given} has no first of a known number of layers")
    return TensorType(given.dtype, given.shape[1:]), TensorType(given.dtype, (given.shape[0] - 1, *given.shape[1:]))


def _stack_choices(*choices: Any, layers: Any, experts: Any) -> Any:
    """The decisions of all routers: L times i16[T, K], that of the last router first, → i16[T, L, K], the first first.

    `layers` are their names, `experts` how many each chooses from.
    """
    import torch

    return torch.stack(choices[::-1], 1)


def _infer_stack(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if len({t.shape for t in types}) != 1 or len(types) != len(attrs["layers"]) or len(types) != len(attrs["experts"]):
        raise ValueError(f"stack_choices: {[str(t) for t in types]} of {len(attrs['layers'])} layers do not fit")
    tokens, choices = types[0].shape
    return (TensorType(DType.I16, (tokens, len(types), choices)),)


define_op("replay_choice", _replay_choice, infer=_infer_choice, flops=per_element(1), bytes=traffic)
define_op(
    "moe_weigh",
    _moe_weigh,
    infer=_infer_weigh,
    attrs={**WEIGHING, "dtype": DType.F32},
    gradient=_weigh_gradient,
    flops=per_element(5),
    bytes=traffic,
    compute_dtype="f32",
)
define_op("first_layer", _first_layer, infer=_infer_first)
define_op(
    "stack_choices",
    _stack_choices,
    infer=_infer_stack,
    attrs={"layers": REQUIRED, "experts": REQUIRED},
    bytes=traffic,
)
