"""Finds repeated runs of calls that can be written as one `for` loop.

A loop's iterations are the same nodes, each operand of one of five kinds: made outside and the same in all iterations;
made earlier in the same iteration; *carried* from the iteration before; a *slot*, state whose name holds the
layer number; or *stacked*: made by the iteration of an earlier loop that is as far from its end as this one is from the
start, so that the earlier loop pushes and this one pops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mgraph.ir.graph import Function, Node, Value

MAX_PERIOD = 12
"""The longest body looked for, in nodes."""


@dataclass(frozen=True, slots=True)
class Outside:
    """The same value in every iteration."""


@dataclass(frozen=True, slots=True)
class Local:
    """Result `result` of node `node` of the same iteration."""

    node: int
    result: int


@dataclass(frozen=True, slots=True)
class Carried:
    """The same of the iteration before; the first iteration takes `initial`."""

    node: int
    result: int
    initial: Value


@dataclass(frozen=True, slots=True)
class Slot:
    """State whose name is `template` with the layer number in its braces."""

    template: str


@dataclass(frozen=True, slots=True)
class Stacked:
    """What an earlier loop (by its position) pushed: a result of a node or, `of_operand`, what a node read."""

    loop: int
    node: int
    index: int
    of_operand: bool


Operand = Outside | Local | Carried | Slot | Stacked


@dataclass(slots=True)
class Loop:
    """`count` iterations of `period` nodes from node `start` on; `layers`: the layer numbers, None where no slot is."""

    function: Function
    start: int
    period: int
    count: int
    layers: range | None = None
    operands: dict[tuple[int, int], Operand] = field(default_factory=dict)
    pushed: set[tuple[int, int]] = field(default_factory=set)
    pushed_operands: set[tuple[int, int]] = field(default_factory=set)

    @property
    def end(self) -> int:
        """One past the last node."""
        return self.start + self.period * self.count

    def node(self, iteration: int, index: int) -> Node:
        """Node `index` of an iteration."""
        return self.function.nodes[self.start + iteration * self.period + index]

    def carried(self) -> dict[tuple[int, int], Value]:
        """What is carried, (node, result) → initial value."""
        return {(o.node, o.result): o.initial for o in self.operands.values() if isinstance(o, Carried)}


def find_loops(function: Function) -> list[Loop]:
    """The loops of a function, in order; what cannot be written as a loop is left alone."""
    banned: set[int] = set()
    while True:
        loops = _search(function, banned)
        wrong = [loop for loop in loops if not _uses_allow(function, loop, loops)]
        if not wrong:
            return loops
        banned.update(loop.start for loop in wrong)


def _search(function: Function, banned: set[int]) -> list[Loop]:
    keys = [_key(node) for node in function.nodes]
    loops: list[Loop] = []
    index = 0
    while index < len(keys):
        loop = _longest(function, keys, index, loops) if index not in banned else None
        if loop is None:
            index += 1
            continue
        for operand in loop.operands.values():
            if isinstance(operand, Stacked):
                source = loops[operand.loop]
                pushed = source.pushed_operands if operand.of_operand else source.pushed
                pushed.add((operand.node, operand.index))
        loops.append(loop)
        index = loop.end
    return loops


def _key(node: Node) -> tuple[object, ...]:
    attrs = {k: v for k, v in node.attrs.items() if not k.startswith("static.")}
    return node.op, len(node.operands), len(node.results), tuple(sorted((k, repr(v)) for k, v in attrs.items()))


def _longest(function: Function, keys: list[tuple[object, ...]], start: int, earlier: list[Loop]) -> Loop | None:
    best: Loop | None = None
    for period in range(1, MAX_PERIOD + 1):
        body = keys[start : start + period]
        if len(body) < period or not any(key[0] == "call" for key in body):
            continue
        count = 1
        while keys[start + count * period : start + (count + 1) * period] == body:
            count += 1
        for attempt in (count, count - 1):
            loop = _loop(function, start, period, attempt, earlier) if attempt >= 2 else None
            if loop is not None and (best is None or loop.end > best.end):
                best = loop
    return best


def _loop(function: Function, start: int, period: int, count: int, earlier: list[Loop]) -> Loop | None:
    """The loop, if every operand is of one kind in all iterations."""
    loop = Loop(function, start, period, count)
    inside = {
        value: (t, m, r) for t in range(count) for m in range(period) for r, value in enumerate(loop.node(t, m).results)
    }
    layers: set[range] = set()
    for m in range(period):
        for o in range(len(loop.node(0, m).operands)):
            values = [loop.node(t, m).operands[o] for t in range(count)]
            operand = _classify(values, inside, earlier, layers)
            if operand is None or (isinstance(operand, Carried) and m > operand.node):
                return None
            loop.operands[m, o] = operand
    if len(layers) > 1:
        return None
    loop.layers = next(iter(layers), None)
    return loop


def _classify(
    values: Sequence[Value],
    inside: dict[Value, tuple[int, int, int]],
    earlier: list[Loop],
    layers: set[range],
) -> Operand | None:
    first = values[0]
    if all(v is first for v in values):
        return Outside() if first not in inside else None
    if all(v.is_state for v in values):
        found = template([v.name for v in values])
        if found is None:
            return None
        layers.add(found[1])
        return Slot(found[0])
    if any(v.is_state for v in values):
        return None
    _, node, result = inside.get(values[1], (0, -1, -1))
    if all(inside.get(v) == (t, node, result) for t, v in enumerate(values)):
        return Local(node, result)
    if first not in inside and all(inside.get(v) == (t, node, result) for t, v in enumerate(values[1:])):
        return Carried(node, result, first)
    return _stacked(values, earlier)


def _stacked(values: Sequence[Value], earlier: list[Loop]) -> Stacked | None:
    """The place of an earlier loop whose values, last iteration first, these are."""
    for position, loop in enumerate(earlier):
        if loop.count != len(values):
            continue
        for m in range(loop.period):
            nodes = [loop.node(loop.count - 1 - t, m) for t in range(loop.count)]
            for of_operand in (False, True):
                rows = [n.operands if of_operand else n.results for n in nodes]
                for index in range(len(rows[0])):
                    if all(row[index] is value for row, value in zip(rows, values, strict=True)):
                        return Stacked(position, m, index, of_operand)
    return None


def template(names: Sequence[str]) -> tuple[str, range] | None:
    """Names that differ in one number, which goes up or down by 1: their template and the numbers."""
    parts = [name.split(".") for name in names]
    if len({len(p) for p in parts}) != 1:
        return None
    places = [i for i in range(len(parts[0])) if len({p[i] for p in parts}) > 1]
    if len(places) != 1 or not all(p[places[0]].isdigit() for p in parts):
        return None
    numbers = [int(p[places[0]]) for p in parts]
    step = numbers[1] - numbers[0]
    expected = range(numbers[0], numbers[0] + step * len(numbers), step) if step in (1, -1) else range(0)
    if list(expected) != numbers:
        return None
    where = places[0]
    return ".".join([*parts[0][:where], "{}", *parts[0][where + 1 :]]), expected


def _uses_allow(function: Function, loop: Loop, loops: list[Loop]) -> bool:
    """Whether what the loop makes is read outside only from its last iteration, or popped by a later loop."""
    popped = {
        other.node(t, m).operands[o]
        for other in loops
        for (m, o), operand in other.operands.items()
        if isinstance(operand, Stacked) and loops[operand.loop] is loop
        for t in range(other.count)
    }
    early = {
        value
        for t in range(loop.count)
        for m in range(loop.period)
        for r, value in enumerate(loop.node(t, m).results)
        if t < loop.count - 1 or value in popped
    }
    stacked = {
        (id(other.node(t, m)), o)
        for other in loops
        for (m, o), operand in other.operands.items()
        if isinstance(operand, Stacked)
        for t in range(other.count)
    }
    if early & set(function.results):
        return False
    outside = [n for i, n in enumerate(function.nodes) if not loop.start <= i < loop.end]
    return not any(v in early and (id(n), o) not in stacked for n in outside for o, v in enumerate(n.operands))
