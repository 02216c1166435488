"""in-place: updates of state reuse its storage.

Before:

    %grad_w = accumulate(@w.grad, %dw)          entry … updates (w.grad)

After:

    %grad_w = accumulate_(@w.grad, %dw)

An op may write over its first operands where they are old values of state (a slot, or a state) that nothing reads
afterwards: neither later in the function, nor, for a slot, in a caller after the call. It may write over this rank's
part of a state (`part_of`) for which the same holds, where that is the one part taken: what becomes of the state is
then made of the parts of all ranks. Until this pass the graph is functional.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.opdef import op_def
from mgraph.passes.base import Pass, Report, Stage, Tier

UPDATES = frozenset(
    {
        "accumulate",
        "accumulate_each",
        "accumulate_joined",
        "adamw",
        "expert_bias_update",
        "kv_append",
        "linear_cross_entropy_with_grad",
        "rope_kv_append",
        "zero",
    }
)


@dataclass(frozen=True)
class InPlace(Pass):
    """Choose the in-place form of updates where it is safe."""

    name: ClassVar[str] = "in-place"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    tier: ClassVar[Tier] = Tier.BITWISE
    provides: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite the update ops of every function."""
        read_later = _slots_read_after_calls(module)
        functions = {
            name: _rewrite(function, read_later.get(name, set()), report) for name, function in module.functions.items()
        }
        changed = any(functions[name] is not f for name, f in module.functions.items())
        return replace(module, functions=functions) if changed else module


def _rewrite(function: Function, read_later: set[int], report: Report) -> Function:
    last = _last_reads(function)
    parts = _only_parts(function)
    blocked = {function.slots[i] for i in read_later} | (set(function.results) & set(function.slots))
    owned: set[Value] = set(function.slots)
    nodes: list[Node] = []
    brought = {v for node in function.nodes if node.op == "to_device_start" for v in node.results}
    for index, node in enumerate(function.nodes):
        if node.op == "wait" and set(node.operands) <= brought:
            owned.update(node.results)  # copies of state on the host, which nobody else has
        if node.op in UPDATES:
            written = op_def(node.op).updated(node)
            targets = node.operands[:written]
            free = [v for v in targets if (root := parts.get(v, v)).is_state or root in owned]
            late = [v for v in targets if _last_read_of(v, parts, last) > index or parts.get(v, v) in blocked]
            if len(free) == len(targets) and not late:
                report.match(function.name, node.id, node.op)
                node = replace(node, op=f"{node.op}_")
                owned.update(node.results[:written])
            else:
                guard = "is read again later" if late else "is not an old value of state"
                culprit = late[0] if late else next(v for v in targets if v not in free)
                report.near_miss(function.name, node.id, node.op, guard, repr(culprit))
        nodes.append(node)
    return function if tuple(nodes) == function.nodes else replace(function, nodes=tuple(nodes))


def _last_reads(function: Function) -> dict[Value, int]:
    """The last node that reads what a value holds; a reset does not."""
    nodes = enumerate(function.nodes)
    return {v: index for index, node in nodes if node.op != "zero" for v in node.operands}


def _only_parts(function: Function) -> dict[Value, Value]:
    """The one part that is taken of a value which is not returned, and that value."""
    made = {node.results[0]: node.operands[0] for node in function.nodes if node.op == "part_of"}
    times = Counter(made.values())
    return {part: whole for part, whole in made.items() if times[whole] == 1 and whole not in function.results}


def _last_read_of(value: Value, parts: Mapping[Value, Value], last: Mapping[Value, int]) -> int:
    """The last node that reads a value, or what it is a part of."""
    return max(last.get(value, -1), last.get(parts.get(value, value), -1))


def _slots_read_after_calls(module: Module) -> dict[str, set[int]]:
    """Per function, the slots whose state some caller reads again after a call (or passes twice)."""
    found: dict[str, set[int]] = {}
    for function in module.functions.values():
        last, returned = _last_reads(function), set(function.results)
        for index, node in enumerate(function.nodes):
            if node.op != "call":
                continue
            callee = module.functions[str(node.attrs["callee"])]
            times = Counter(node.operands)
            for slot, operand in enumerate(node.operands[len(callee.params) :]):
                if last[operand] > index or times[operand] > 1 or operand in returned:
                    found.setdefault(callee.name, set()).add(slot)
    return found
