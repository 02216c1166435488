"""Which states are the weights of experts: what grouped products multiply rows with, expert by expert."""

from __future__ import annotations

from mgraph.errors import PassError
from mgraph.ir.graph import Function, Module, StateKind, Value
from mgraph.ir.local import bound_dims
from mgraph.ir.types import Shard
from mgraph.passes.calls import callee, calls
from mgraph.passes.parallel_sites import NoSite, Walk

EXPERTS = Shard(0)
"""How ranks share experts: each has some of them whole."""
GRADIENTS = ("grouped_outer", "grouped_sum")
"""The ops that give the gradients of their weights and biases."""
WAYS = ("expert_send", "expert_return", "padded_send", "padded_return")
"""The ops by which tokens go to their experts and come back, before they go over an axis."""
_FORWARD = "evaluate"
_FOLLOWING = (StateKind.GRAD, StateKind.MOMENT, StateKind.MASTER)


def expert_states(module: Module) -> frozenset[str]:
    """The parameters of experts, with the gradients, moments and masters that are theirs, by name.

    Their first dim is that of the experts. Raises PassError where a weight of a grouped product is none of its own.
    """
    found: set[str] = set()
    _collect(module, module.functions[module.entries[_FORWARD].function], {}, found)
    of_them = {s.name for s in module.state.values() if s.kind in _FOLLOWING and s.name.rpartition(".")[0] in found}
    return frozenset(found | of_them)


def split_without_ways(module: Module) -> bool:
    """Whether ranks have their own experts, but tokens do not go to them yet: between the pass of a data axis that
    splits experts and `expert-parallel`."""
    if "finish" not in module.entries or not any(node.op in WAYS for _, node in module.walk()):
        return False
    data = {axis for _, axis in bound_dims(module)}
    params = [module.state[name].type for name in expert_states(module)]
    return any(type_.on(axis) == EXPERTS for type_ in params for axis in data)


def _collect(module: Module, function: Function, slots: dict[Value, Value], found: set[str]) -> None:
    walk = Walk.of(function)
    for node in function.nodes:
        if node.op == "grouped_matmul":
            weights = (node.operands[1], *node.operands[3:])
            try:
                for weight in weights:
                    walk.back(weight, EXPERTS)
            except NoSite as why:
                raise PassError(f"the experts of %{node.id} cannot be shared: {why}", str(node.origin)) from why
    found.update(slots.get(value, value).name for value in walk.weights)
    for node in calls(function):
        body = module.functions[callee(node)]
        given = node.operands[len(body.params) :]
        _collect(module, body, {s: slots.get(v, v) for s, v in zip(body.slots, given, strict=True)}, found)
