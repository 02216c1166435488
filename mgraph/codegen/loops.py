"""Finds repeated runs of calls that can be written as one `for` loop.

A loop's iterations are the same nodes, each operand of one of five kinds: made outside and the same in all iterations;
made earlier in the same iteration; *carried* from the iteration before; a *slot*, state whose name holds the
number of the iteration's layer, or of one a fixed number of layers away; or *stacked*: an earlier loop pushes what each
iteration makes, and whoever reads it pops. Readers are later loops and nodes outside of loops, which together must ask
for everything exactly once, the last first. A part of a tensor may be told by the number of the layer (`d_losses[i]`).
An iteration may be several layers, of kinds in turns: the numbers of layers go on by as many.

What nodes outside of loops read otherwise of iterations before the last is *gathered* in a list, as losses of layers
that are added up at the end. The list dies as a whole: so these are too small for it to matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from mgraph.codegen.bundles import HandleType
from mgraph.codegen.liveness import is_small
from mgraph.ir.dims import Dim, as_dim, symbol
from mgraph.ir.graph import Function, Node, Value
from mgraph.ir.types import TensorType

MAX_PERIOD = 24
"""The longest body looked for, in nodes."""

INDEX = "i"
"""The name of the number of an iteration's layer in emitted code."""

_NUMBERS = ("index", "start", "end")
"""Attributes of torch's ops on parts of a tensor, which may differ between iterations."""


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
    steps: dict[int, dict[str, Dim]] = field(default_factory=dict)
    """By how much numbers of nodes go on from iteration to iteration."""
    gathered: set[tuple[int, int]] = field(default_factory=set)
    """Results, by node and place, of which each iteration's is read outside."""

    @property
    def end(self) -> int:
        """One past the last node."""
        return self.start + self.period * self.count

    def node(self, iteration: int, index: int) -> Node:
        """Node `index` of an iteration."""
        return self.function.nodes[self.start + iteration * self.period + index]

    def results(self, index: int, place: int) -> list[Value]:
        """One result of a node, of all iterations."""
        return [self.node(t, index).results[place] for t in range(self.count)]

    @property
    def turn(self) -> Dim:
        """How many iterations there are between the one of a layer's number and that of the lowest layer."""
        return as_dim(sympy.floor(self._turn))

    @property
    def _turn(self) -> sympy.Expr:
        """The same as a quotient, which is whole in every iteration."""
        layers = self.layers or range(self.count)
        return (symbol(INDEX) - min(layers)) / sympy.Integer(abs(layers.step))

    def with_index(self, index: int) -> Node:
        """Node `index` of every iteration, by the name of the number of its layer."""
        node, layers = self.node(0, index), self.layers or range(self.count)
        moved = {}
        for key, step in self.steps.get(index, {}).items():
            first = _dim(node.attrs[key])
            lowest, up = (first, step) if layers.step > 0 else (first + step * (self.count - 1), -step)
            of_layers = isinstance(up, int) and up % layers.step == 0  # then it is told without a division
            moved[key] = as_dim(lowest + up * (self._turn if of_layers else self.turn))
        return replace(node, attrs={**node.attrs, **moved}) if moved else node

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


def loop_places(loops: Sequence[Loop]) -> dict[Node, tuple[int, int]]:
    """The loop of each node that is in one, and its place in an iteration."""
    return {
        loop.node(t, m): (number, m)
        for number, loop in enumerate(loops)
        for t in range(loop.count)
        for m in range(loop.period)
    }


def carried_until(loops: Sequence[Loop]) -> dict[Node, int]:
    """The nodes that read what a loop carries, and the place in an iteration from which on it is another value."""
    found: dict[Node, int] = {}
    for loop in loops:
        for (m, _), operand in loop.operands.items():
            if isinstance(operand, Carried):
                for node in (loop.node(t, m) for t in range(loop.count)):
                    found[node] = min(operand.node, found.get(node, operand.node))
    return found


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
    numbers = _numbers(node)
    attrs = {k: v for k, v in node.attrs.items() if not k.startswith("static.") and k not in numbers}
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
        steps = _steps([loop.node(t, m) for t in range(count)])
        if steps is None:
            return None
        loop.steps |= {m: steps} if steps else {}
        for o in range(len(loop.node(0, m).operands)):
            values = [loop.node(t, m).operands[o] for t in range(count)]
            operand = _classify(values, inside, earlier, layers)
            if operand is None or (isinstance(operand, Carried) and m > operand.node):
                return None
            loop.operands[m, o] = operand
    begun = {(o.node, o.result, o.initial) for o in loop.operands.values() if isinstance(o, Carried)}
    if len(begun) > len(loop.carried()):
        return None  # as of two values before the loop that are one from its first iteration on
    if any(a.type != b.type for m in range(period) for t in range(count) for a, b in _results(loop, t, m)):
        return None  # as of parts that grow: what is decided of the first iteration would not hold for others
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


def _results(loop: Loop, iteration: int, node: int) -> Iterator[tuple[Value, Value]]:
    """What a node gives in the first iteration, and in another."""
    return zip(loop.node(0, node).results, loop.node(iteration, node).results, strict=True)


def _steps(nodes: Sequence[Node]) -> dict[str, Dim] | None:
    """By how much the numbers of parts go on from iteration to iteration; None where they do not go on evenly."""
    steps: dict[str, Dim] = {}
    for key in _numbers(nodes[0]):
        numbers = [node.attrs.get(key) for node in nodes]
        if all(number == numbers[0] for number in numbers):
            continue
        if not all(isinstance(number, int | sympy.Expr) for number in numbers):
            return None
        steps[key] = as_dim(_dim(numbers[1]) - _dim(numbers[0]))
        if any(as_dim(_dim(numbers[0]) + steps[key] * t) != number for t, number in enumerate(numbers)):
            return None
    return steps


def _numbers(node: Node) -> tuple[str, ...]:
    return _NUMBERS if "." in node.op else ()


def _dim(number: object) -> Dim:
    assert isinstance(number, int | sympy.Expr), f"{number!r} is no number"
    return number


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
    """Names that differ in one number, which goes up or down evenly: their template and the numbers."""
    parts = [name.split(".") for name in names]
    if len({len(p) for p in parts}) != 1:
        return None
    places = [i for i in range(len(parts[0])) if len({p[i] for p in parts}) > 1]
    if len(places) != 1 or not all(p[places[0]].isdigit() for p in parts):
        return None
    numbers = [int(p[places[0]]) for p in parts]
    step = numbers[1] - numbers[0]
    expected = range(numbers[0], numbers[0] + step * len(numbers), step) if step else range(0)
    if list(expected) != numbers:
        return None
    where = places[0]
    return ".".join([*parts[0][:where], "{}", *parts[0][where + 1 :]]), expected


def _uses_allow(function: Function, loop: Loop, loops: list[Loop]) -> bool:
    """Whether what the loop makes is read outside only from its last iteration, popped, or gathered for it."""
    popped = {
        (id(other.node(t, m)), o)
        for other in loops
        for (m, o), operand in other.operands.items()
        if isinstance(operand, Stacked)
        for t in range(other.count)
    } | {(id(node), o) for node, o in loop.popped}
    outside = [(i, n) for i, n in enumerate(function.nodes) if not loop.start <= i < loop.end]
    reads: dict[Value, list[int]] = {}
    for index, node in outside:
        for o, value in enumerate(node.operands):
            if (id(node), o) not in popped:
                reads.setdefault(value, []).append(index)
    for value in function.results:
        reads.setdefault(value, []).append(len(function.nodes))
    stacks = {k for other in loops for k in other.operands.values() if isinstance(k, Stacked)}
    stacked = {v for k in stacks if loops[k.loop] is loop for v in _pushed(loop, k)}
    carried = loop.carried()
    in_loops = loop_places(loops).keys()
    for place in [(m, r) for m in range(loop.period) for r in range(len(loop.node(0, m).results))]:
        values = loop.results(*place)
        last = () if values[-1] in stacked else values[-1:]  # has its name after the loop
        if any(v in reads for v in values if v not in last):
            # What is carried keeps its name: the last iteration's may be read by it, wherever and for how long.
            if not _may_gather(function, values, reads, in_loops, named=place in carried):
                return False
            loop.gathered.add(place)
    return True


def _may_gather(
    function: Function,
    values: Sequence[Value],
    reads: Mapping[Value, Sequence[int]],
    in_loops: Collection[Node],
    named: bool,
) -> bool:
    """Whether one list may hold the values of all iterations until it dies as a whole, for which they must be small;
    `named`: apart from the last."""
    listed = values[:-1] if named else values
    readers = [function.nodes[i] for v in listed for i in reads.get(v, ()) if i < len(function.nodes)]
    if not isinstance(values[0].type, TensorType) or any(node in in_loops for node in readers):
        return False
    return len(listed) > 1 and is_small(values[0]) and all(v in reads for v in listed)
