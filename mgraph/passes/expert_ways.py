"""Ways to experts: where tokens are taken to those that are chosen for them, whoever chose."""

from __future__ import annotations

from mgraph.errors import PassError
from mgraph.ir.graph import Function, Node, Value
from mgraph.ir.types import DType, TensorType
from mgraph.passes.differentiation import VIEWS

TAKES = ("moe_dispatch", "padded_dispatch", "expert_send", "split_rows")
"""Ops that take tokens to the experts that are chosen, and with them the choice that counts."""
_THROUGH = VIEWS | {"cast", "gather", "wait"}
"""Ops whose result is their first operand in another form."""
_ON_THE_WAY = _THROUGH | {"aten.add.Tensor", "aten.mul.Tensor", "aten.masked_fill.Scalar"}
"""What noise and groups do to scores with a bias before the best are chosen."""


def taken_choice(function: Function, node: Node) -> Value | None:
    """The choice i64[T, K] by which a node takes tokens to experts; None where it takes none, or only goes on with what
    another one took."""
    if node.op not in TAKES:
        return None
    choice = next((v for v in reversed(node.operands) if _is_choice(v)), None)
    if choice is None or any(maker.op in TAKES for maker in _makers(function, choice)):
        return None
    return choice


def router_of(function: Function, choice: Value) -> Node | None:
    """The raised router whose choice this is, or was before it was replayed or cut to what experts have room for; None
    where a router that was not raised made it."""
    return next((maker for maker in _makers(function, choice) if maker.op == "moe_route"), None)


def bias_of(function: Function, choice: Value, experts: int) -> tuple[Value, Node] | None:
    """What is added to scores for a choice alone, and the node that does; None where nothing is. Of a router that was
    not raised (noise is in its scores, say) this is what it adds of a number for each expert, the last before it
    chooses."""
    router = router_of(function, choice)
    if router is not None:
        return (router.operands[1], router) if len(router.operands) == 2 else None
    made = function.producers()
    ahead = [maker.operands[0] for maker in _makers(function, choice) if maker.op == "aten.topk.default"]
    for value in ahead:
        maker = made.get(value)
        if maker is None or maker.op not in _ON_THE_WAY:
            continue
        for operand in maker.operands if maker.op == "aten.add.Tensor" else ():
            if operand.tensor.shape == (experts,) and kept_in(function, operand) is not None:
                return operand, maker
        ahead += [v for v in maker.operands if v not in ahead]
    return None


def kept_in(function: Function, value: Value) -> Value | None:
    """The state or slot that a value is, or is another form of; None where it is computed."""
    made = function.producers()
    while value in made and made[value].op in _THROUGH:
        value = made[value].operands[0]
    return value if value.is_state or value in function.slots else None


def num_experts(function: Function, node: Node) -> int:
    """How many experts a way leads to."""
    users, ahead = function.users(), [node]
    for each in ahead:
        if "num_experts" in each.attrs:
            return int(str(each.attrs["num_experts"]))
        ahead += [user for value in each.results for user in users.get(value, []) if user not in ahead]
    raise AssertionError(f"no experts behind %{node.id}")


def owner_of(function: Function, node: Node, choice: Value) -> Value:
    """The weight, a state or a slot, that counts of a way belong to: that which makes the logits of its router, else
    the first of its experts."""
    experts, router = num_experts(function, node), router_of(function, choice)
    weight = _router_weight(function, router, experts) if router is not None else None
    return weight if weight is not None else _expert_weight(function, node, experts)


def _is_choice(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.tensor.dtype is DType.I64 and len(value.tensor.shape) == 2


def _makers(function: Function, choice: Value) -> list[Node]:
    """The nodes that a choice is made by, back through numbers of experts alone, the last first."""
    made, found, ahead = function.producers(), list[Node](), [choice]
    for value in ahead:
        maker = made.get(value)
        if maker is not None and maker not in found:
            found.append(maker)
            ahead += [v for v in maker.operands if _is_choice(v)]
    return found


def _router_weight(function: Function, router: Node, experts: int) -> Value | None:
    """The weight that makes the logits of a router, if one does."""
    made, ahead = function.producers(), [router.operands[0]]
    for value in ahead:
        given = value.is_state or value in function.slots
        if given and len(value.tensor.shape) > 1 and experts in value.tensor.shape:
            return value
        ahead += [v for v in made[value].operands if v not in ahead] if value in made else []
    return None


def _expert_weight(function: Function, node: Node, experts: int) -> Value:
    """The first weight that what a way takes to experts is multiplied with."""
    users, ahead = function.users(), [node]
    for each in ahead:
        for value in each.operands:
            kept = kept_in(function, value)
            if kept is not None and len(kept.tensor.shape) > 1 and kept.tensor.shape[0] == experts:
                return kept
        ahead += [user for value in each.results for user in users.get(value, []) if user not in ahead]
    hint = "experts whose weights are [experts, ...]"
    raise PassError(f"no weights of {experts} experts are behind %{node.id}", str(node.origin), hint)
