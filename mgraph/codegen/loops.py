"""Finds repeated runs of calls that can be written as one `for` loop.

A loop's iterations are the same nodes, each operand of one of five kinds: made outside and the same in all iterations;
made earlier in the same iteration; *carried* from the iteration before; a *slot*, state whose name holds the
number of the iteration's layer, or of one a fixed number of layers away; or *stacked*: an earlier loop pushes what each
iteration makes, and whoever reads it pops. Readers are later loops and nodes outside of loops, which together must ask
for everything exactly once, the last first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mgraph.codegen.bundles import HandleType
from mgraph.ir.graph import Function, Node, Value

MAX_PERIOD = 24
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
    """State whose name is `template` with the layer number, and `shift` more, in its braces."""

    template: str
    shift: int = 0


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
    popped: dict[tuple[Node, int], Stacked] = field(default_factory=dict)
    """Operands of nodes outside of loops that come off a stack of this loop, by node and place."""

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
        wrong = _pop(function, loops)
        wrong |= {loop.start for loop in loops if not _uses_allow(function, loop, loops)}
        if not wrong:
            return loops
        banned |= wrong


def _search(function: Function, banned: set[int]) -> list[Loop]:
    keys = [_key(node) for node in function.nodes]
    loops: list[Loop] = []
    index = 0
    while index < len(keys):
        loop = _longest(function, keys, index, loops) if index not in banned else None
        if loop is None:
            index += 1
            continue
        # What an iteration hands to the next lives all along: of the places to begin, the one that hands on least.
        places = [place for place in range(index + 1, index + loop.period) if place not in banned]
        turned = [_longest(function, keys, place, loops) for place in places]
        same = [other for other in turned if other and (other.period, other.count) == (loop.period, loop.count)]
        loop = min([loop, *same], key=_tensors_carried)
        for operand in loop.operands.values():
            if isinstance(operand, Stacked):
                source = loops[operand.loop]
                pushed = source.pushed_operands if operand.of_operand else source.pushed
                pushed.add((operand.node, operand.index))
        loops.append(loop)
        index = loop.end
    return loops


def _tensors_carried(loop: Loop) -> int:
    return sum(not isinstance(initial.type, HandleType) for initial in loop.carried().values())


def _key(node: Node) -> tuple[object, ...]:
    attrs = {k: v for k, v in node.attrs.items() if not k.startswith("static.")}
    return node.op, len(node.operands), len(node.results), tuple(sorted((k, repr(v)) for k, v in attrs.items()))


def _longest(function: Function, keys: list[tuple[object, ...]], start: int, earlier: list[Loop]) -> Loop | None:
    best: Loop | None = None
    for period in range(1, MAX_PERIOD + 1):
        body = keys[start : start + period]
        if len(body) < period or not any(key[0] in ("call", "wait") for key in body):
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
    layers: list[range] = []
    for m in range(period):
        for o in range(len(loop.node(0, m).operands)):
            values = [loop.node(t, m).operands[o] for t in range(count)]
            operand = _classify(values, inside, earlier, layers)
            if operand is None or (isinstance(operand, Carried) and m > operand.node):
                return None
            loop.operands[m, o] = operand
    loop.layers = _layers_of(loop) or next(iter(layers), None)
    for place, operand in loop.operands.items():
        if isinstance(operand, Slot):
            m, o = place
            found = template([loop.node(t, m).operands[o].name for t in range(count)])
            assert found is not None and loop.layers is not None, f"{operand} has no layers"
            if found[1].step != loop.layers.step:
                return None
            loop.operands[place] = Slot(operand.template, found[1].start - loop.layers.start)
    return loop


def _layers_of(loop: Loop) -> range | None:
    """The layers that the calls of a loop run, by where they come from."""
    for m in range(loop.period):
        nodes = [loop.node(t, m) for t in range(loop.count)]
        found = template([node.origin.path for node in nodes]) if nodes[0].op == "call" else None
        if found is not None:
            return found[1]
    return None


def _classify(
    values: Sequence[Value],
    inside: dict[Value, tuple[int, int, int]],
    earlier: list[Loop],
    layers: list[range],
) -> Operand | None:
    first = values[0]
    if all(v is first for v in values):
        return Outside() if first not in inside else None
    if all(v.is_state for v in values):
        found = template([v.name for v in values])
        if found is None:
            return None
        layers.append(found[1])
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
    """The place of an earlier loop whose values, from some iteration on and the last first, these are: best from its
    last."""
    places = [
        Stacked(position, m, index, of_operand)
        for position, loop in enumerate(earlier)
        for of_operand in (False, True)
        for m in range(loop.period)
        for index in range(len(loop.node(0, m).operands if of_operand else loop.node(0, m).results))
    ]
    fitting: dict[int, Stacked] = {}
    for place in places:
        pushed = _pushed(earlier[place.loop], place)[::-1]
        start = next((t for t, v in enumerate(pushed) if v is values[0]), None)
        if start is not None and _same(pushed[start : start + len(values)], values):
            fitting.setdefault(start, place)
    return fitting[min(fitting)] if fitting else None


def _pushed(loop: Loop, stacked: Stacked) -> list[Value]:
    """What the iterations of a loop push, in order."""
    nodes = [loop.node(t, stacked.node) for t in range(loop.count)]
    return [(n.operands if stacked.of_operand else n.results)[stacked.index] for n in nodes]


def _same(left: Sequence[Value], right: Sequence[Value]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def _pop(function: Function, loops: list[Loop]) -> set[int]:
    """Find who pops each stack. Gives the starts of loops whose stacks are not popped whole, the last first."""
    wrong: set[int] = set()
    for stacked in dict.fromkeys(k for loop in loops for k in loop.operands.values() if isinstance(k, Stacked)):
        source = loops[stacked.loop]
        pushed = _pushed(source, stacked)
        reads = list(_reads(function, loops, stacked, set(pushed)))
        by_loops = [(node, o) for node, o, in_loop in reads if in_loop]
        order = by_loops if len(by_loops) == len(pushed) else [(node, o) for node, o, _ in reads]
        if _same([node.operands[o] for node, o in order], pushed[::-1]):
            source.popped |= dict.fromkeys((place for place in order if place not in by_loops), stacked)
        else:
            wrong.update(loop.start for loop in loops if stacked in loop.operands.values())
    return wrong


def _reads(
    function: Function, loops: list[Loop], stacked: Stacked, pushed: set[Value]
) -> Iterator[tuple[Node, int, bool]]:
    """The operands after a stack's loop that may come off it, and whether they are those of a loop that pops it."""
    index = loops[stacked.loop].end
    while index < len(function.nodes):
        node = function.nodes[index]
        loop = next((other for other in loops if other.start <= index < other.end), None)
        for o, value in enumerate(node.operands):
            pops = loop is not None and loop.operands.get(((index - loop.start) % loop.period, o)) == stacked
            if pops or (loop is None and value in pushed):
                yield node, o, pops
        index += 1


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
    """Whether what the loop makes is read outside only from its last iteration, or popped."""
    stacks = {k for other in loops for k in other.operands.values() if isinstance(k, Stacked)}
    stacked = {v for k in stacks if loops[k.loop] is loop for v in _pushed(loop, k)}
    made = [v for node in function.nodes[loop.start : loop.end] for v in node.results]
    last = len(made) - len(made) // loop.count
    early = {v for i, v in enumerate(made) if i < last or v in stacked}
    if early & set(function.results):
        return False
    popped = {
        (id(other.node(t, m)), o)
        for other in loops
        for (m, o), operand in other.operands.items()
        if isinstance(operand, Stacked)
        for t in range(other.count)
    } | {(id(node), o) for node, o in loop.popped}
    outside = [n for i, n in enumerate(function.nodes) if not loop.start <= i < loop.end]
    return not any(v in early and (id(n), o) not in popped for n in outside for o, v in enumerate(n.operands))
