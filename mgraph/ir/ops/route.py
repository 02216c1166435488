"""Routers of mixtures of experts: which experts each token goes to, and with which weights.

Shapes: T tokens, E experts, K experts a token. The families differ in what they score with, in what they choose by, and
in what they do to the chosen scores:

    scores    softmax over all experts (Mixtral, Qwen3-MoE), over the chosen ones (gpt-oss), or sigmoid (DeepSeek-V3)
    choice    the K largest, after adding a bias that steers the load but weighs nothing, within the best groups
    weights   the chosen scores, divided by their sum, times a constant
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.torch_bridge import promote, to_torch_dtype
from mgraph.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

SCORES = ("softmax", "softmax_chosen", "sigmoid")
WEIGHING: Mapping[str, Any] = {"score": "softmax", "renormalize": False, "epsilon": 0.0, "scale": 1.0}
"""Attributes that say how logits become weights: all that the gradient depends on beside the choice."""
CHOOSING: Mapping[str, Any] = {"groups": 1, "top_groups": 1, "group_best": 1}
"""Attributes that say how experts are chosen, beside `top_k`."""


def _scores(logits: Any, score: str) -> Any:
    assert score in SCORES, f"unknown score {score!r}"
    if score == "softmax_chosen":
        return logits
    return logits.softmax(-1) if score == "softmax" else logits.sigmoid()


def moe_choices(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    top_k: int,
    score: str = "softmax",
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
) -> list[tuple[Any, int]]:
    """The decisions of `moe_route`, in order: pairs (values [T, n], how many of the largest are taken).

    The first is that between groups, where there are some; the last is that between experts, with -inf in groups that
    were not chosen.
    """
    scores = _scores(promote(logits), score)
    if bias is not None:
        scores = scores + promote(bias)
    if groups == 1:
        return [(scores, top_k)]
    grouped = scores.unflatten(-1, (groups, -1))
    best = grouped.topk(group_best, -1).values.sum(-1)
    chosen = best.new_zeros(best.shape, dtype=bool).scatter(1, best.topk(top_groups, -1).indices, True)
    return [(best, top_groups), (grouped.masked_fill(~chosen[..., None], float("-inf")).flatten(1), top_k)]


def moe_route(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    top_k: int,
    score: str = "softmax",
    renormalize: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
    dtype: DType = DType.F32,
) -> tuple[Tensor, Tensor]:
    """Choose the `top_k` experts of each token by falling score.

    logits [T, E], optional bias [E] → weights [T, K] in `dtype`, indices i64[T, K]. Scores, in at least f32, are
    softmax(logits) or sigmoid(logits); with `softmax_chosen` the choice is made on the logits and the softmax runs over
    the chosen ones. The choice is made on score + bias; with `groups` > 1 only among the experts of the `top_groups`
    groups whose `group_best` largest sum to most. Weights are the chosen scores without the bias, divided by their
    sum + `epsilon` if `renormalize`, times `scale`. Equal scores are ordered as torch.topk orders them.
    """
    values, _ = moe_choices(
        logits, bias, top_k=top_k, score=score, groups=groups, top_groups=top_groups, group_best=group_best
    )[-1]
    indices = values.topk(top_k, -1).indices
    return weighed(logits, indices, score, renormalize, epsilon, scale, dtype), indices


def weighed(
    logits: Tensor, indices: Tensor, score: str, renormalize: bool, epsilon: float, scale: float, dtype: DType
) -> Tensor:
    """The weights [T, K] that `moe_route` gives these experts; logits [T, E], indices i64[T, K]."""
    weights = _scores(promote(logits), score).gather(1, indices)
    if score == "softmax_chosen":
        weights = weights.softmax(-1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + epsilon)
    made: Tensor = (weights * scale).to(to_torch_dtype(dtype))
    return made


def moe_route_grad(
    dweights: Tensor,
    logits: Tensor,
    indices: Tensor,
    *,
    score: str = "softmax",
    renormalize: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """Gradient of `moe_route` for the logits [T, E], the choice held fixed.

    Of chosen scores s and weights w = s / (Σ s + ε): `ds = (dw - Σ dw · w) / (Σ s + ε)`. Of a softmax p of logits, over
    all experts or the chosen ones: `dlogits = p · (dp - Σ dp · p)`. Of a sigmoid: `dlogits = ds · s · (1 - s)`.
    """
    import torch

    wide, grad = promote(logits), promote(dweights) * scale
    if score == "softmax_chosen":
        chosen = wide.gather(1, indices).softmax(-1)
    else:
        scores = _scores(wide, score)
        chosen = scores.gather(1, indices)
    if renormalize:
        total = chosen.sum(-1, keepdim=True) + epsilon
        grad = (grad - (grad * chosen).sum(-1, keepdim=True) / total) / total
    if score == "softmax":
        grad = torch.zeros_like(wide).scatter(1, indices, grad)
        return rounded(scores * (grad - (grad * scores).sum(-1, keepdim=True)), logits)
    if score == "sigmoid":
        dlogits = grad * chosen * (1 - chosen)
    else:
        dlogits = chosen * (grad - (grad * chosen).sum(-1, keepdim=True))
    return rounded(torch.zeros_like(wide).scatter(1, indices, dlogits), logits)


def _gradient(request: GradientRequest) -> Sequence[Value | None]:
    node = request.node
    attrs = {name: node.attrs.get(name, default) for name, default in WEIGHING.items()}
    operands = (request.cotangent, node.operands[0], node.results[1])
    dlogits = request.builder.emit("moe_route_grad", operands, attrs, names=("dlogits",))
    return (*dlogits, *(None for _ in node.operands[1:]))


def _infer(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    tokens, experts = types[0].shape
    if len(types) > 1 and types[1].shape != (experts,):
        raise ValueError(f"moe_route: logits {types[0]} and bias {types[1]} do not fit")
    if isinstance(experts, int) and experts % attrs["groups"]:
        raise ValueError(f"moe_route: {experts} experts are not {attrs['groups']} equal groups")
    shape = (tokens, attrs["top_k"])
    return TensorType(attrs["dtype"], shape), TensorType(DType.I64, shape)


define_op(
    "moe_route",
    moe_route,
    infer=_infer,
    attrs={"top_k": REQUIRED, **WEIGHING, **CHOOSING, "dtype": DType.F32},
    gradient=_gradient,
    flops=per_element(5),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "moe_route_grad",
    moe_route_grad,
    infer=lambda types, attrs: (types[1],),
    attrs=WEIGHING,
    flops=per_element(5),
    bytes=traffic,
    compute_dtype="f32",
)
