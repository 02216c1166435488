"""Patterns over nodes: how passes recognise chains of ops, and say why one almost fitted.

A pattern describes a *value* by the node that makes it, and is matched from the last node of a chain upwards:

    normed = op("aten.mul.Tensor", capture("wide"), op("aten.rsqrt.default", mean), commutative=True)
    root   = op("aten.mul.Tensor", optional_cast(normed), capture("weight"), commutative=True)

* `capture(name)` takes any value; the same name twice must be the same value;
* `op(names, *operands, **attrs)` takes a node of one of these ops with exactly these operands and attributes. An
  attribute is given by its value, by `where(text, test)`, or `ANY`; one that the pattern does not mention must be
  absent (but for `args`);
* `either(a, b)` tries alternatives in order; `commutative=True` tries the operands both ways round.

A match must own what it replaces: a value inside the chain that something else reads fails the guard `users`, unless
its node is `shared` (a cast or a reshape that may serve others too). `Guard`s check what a single node cannot say.
The attempt that got furthest is kept as the `Failure`, with its first failing guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgraph.ir.graph import Function, Node, Value


@dataclass(frozen=True, slots=True)
class Where:
    """A test of an attribute: `text` says what is expected, `test(value, node)` decides."""

    text: str
    test: Callable[[Any, Node], bool]


def where(text: str, test: Callable[[Any, Node], bool]) -> Where:
    """A test of an attribute by a predicate over its value and node; `text` completes "expected …"."""
    return Where(text, test)


def _is_last(value: Any, node: Node) -> bool:
    rank = len(node.operands[0].tensor.shape)
    return value in (-1, rank - 1) or value in ((-1,), (rank - 1,))


ANY = Where("anything", lambda value, node: True)
LAST_DIM = Where("the last dim", _is_last)
NUMBER = Where("a number", lambda value, node: isinstance(value, int | float) and not isinstance(value, bool))


@dataclass(frozen=True, slots=True)
class Capture:
    """Any value, bound to a name."""

    name: str


@dataclass(frozen=True, slots=True)
class Op:
    """A node of one of `ops`; `result` is which of its results the value is; `name` binds it, `binds` the value."""

    ops: tuple[str, ...]
    operands: tuple[Pattern, ...]
    attrs: Mapping[str, Any]
    name: str = ""
    commutative: bool = False
    result: int = 0
    shared: bool = False
    binds: str = ""


@dataclass(frozen=True, slots=True)
class Either:
    """The first alternative that fits."""

    options: tuple[Pattern, ...]


Pattern = Capture | Op | Either


def capture(name: str) -> Capture:
    """Any value, bound to `name`."""
    return Capture(name)


def op(
    ops: str | tuple[str, ...],
    *operands: Pattern,
    name: str = "",
    commutative: bool = False,
    result: int = 0,
    shared: bool = False,
    binds: str = "",
    **attrs: Any,
) -> Op:
    """A node of one of these ops, with these operands and attributes (see the module's documentation)."""
    names = (ops,) if isinstance(ops, str) else ops
    return Op(names, operands, attrs, name, commutative, result, shared, binds)


def either(*options: Pattern) -> Either:
    """Alternatives, tried in order."""
    return Either(options)


def optional_cast(inner: Pattern, name: str = "") -> Either:
    """`inner`, or a cast of it to any dtype: the longer chain is tried first. The cast may have other readers."""
    return either(op("cast", inner, dtype=ANY, shared=True, name=name), inner)


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition on a whole match: gives `None` where it holds, else what is wrong."""

    name: str
    check: Callable[[Match], str | None]


Steps = tuple[tuple[Node, Value, bool], ...]
"""The nodes of a chain from the root up: each with the value it was taken by, and whether it is shared."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a pattern found: captured values, named nodes, and every node of the chain."""

    root: Node
    values: Mapping[str, Value]
    nodes: Mapping[str, Node]
    steps: Steps = ()

    def __getitem__(self, name: str) -> Value:
        return self.values[name]

    def attr(self, node: str, name: str, default: Any = None) -> Any:
        """An attribute of a named node; `default` where the chain has no such node or the node no such attribute."""
        return self.nodes[node].attrs.get(name, default) if node in self.nodes else default

    @property
    def chain(self) -> frozenset[Node]:
        """All nodes of the chain."""
        return frozenset(node for node, _, _ in self.steps)

    @property
    def owned(self) -> set[Node]:
        """The nodes that no other match may take."""
        return {node for node, _, shared in self.steps if not shared}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed: how far it got (-1: number of operands, 0: structure, 1: users, 2: guards; then how many
    nodes had fitted), at which node, by which guard, and what was wrong."""

    progress: tuple[int, int]
    node: Node
    guard: str
    detail: str
    touched: frozenset[Node]


@dataclass(frozen=True, slots=True)
class _State:
    values: Mapping[str, Value] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    steps: Steps = ()

    @property
    def chain(self) -> frozenset[Node]:
        return frozenset(node for node, _, _ in self.steps)


Exports = Callable[[Match], Sequence[Value]]


class Matcher:
    """Matches patterns in one function; remembers nothing between attempts."""

    def __init__(self, function: Function) -> None:
        self.producers = function.producers()
        self.users = function.users()
        self.returned = set(function.results)
        self._best: Failure | None = None

    def match(
        self, pattern: Pattern, root: Node, guards: Sequence[Guard] = (), exports: Exports | None = None
    ) -> Match | Failure:
        """Match a chain that ends in `root`. `exports` names the values that others may go on reading (default: the
        root's); the guards are checked in order once the chain and its users fit."""
        self._best = None
        for value in root.results:
            for state in self._solve(pattern, value, root, _State()):
                found = Match(root, state.values, state.nodes, state.steps)
                exported = {value} if exports is None else set(exports(found))
                if self._owns(found, exported, value, guards):
                    return found
        assert self._best is not None, f"a pattern of captures alone matches anything: {pattern}"
        return self._best

    def _owns(self, found: Match, exported: set[Value], root: Value, guards: Sequence[Guard]) -> bool:
        inside = {node for node, _, _ in found.steps}
        for node, value, shared in found.steps:
            readers = self.users.get(value, [])
            outside = sum(reader not in inside for reader in readers) + (value in self.returned)
            if outside and not shared and value is not root and value not in exported:
                total, expected = len(readers) + (value in self.returned), len(readers) - outside
                expected += value in self.returned
                detail = f"`{_short(node.op)}` has {total} users, expected {expected}"
                self._fail(found.chain, node, "users", detail, stage=1)
                return False
        for guard in guards:
            wrong = guard.check(found)
            if wrong is not None:
                self._fail(found.chain, found.root, guard.name, wrong, stage=2)
                return False
        return True

    def _fail(self, touched: frozenset[Node], node: Node, guard: str, detail: str, stage: int = 0) -> None:
        progress = (stage, len(touched))
        if self._best is None or progress > self._best.progress:
            self._best = Failure(progress, node, guard, detail, touched)

    def _solve(self, pattern: Pattern, value: Value, reader: Node, state: _State) -> Iterator[_State]:
        node = self.producers.get(value)
        if not _may_be(pattern, node):
            found = f"{value!r}" if node is None else f"`{_short(node.op)}`"
            expected = " or ".join(dict.fromkeys(f"`{_short(o)}`" for o in _ops(pattern)))
            self._fail(state.chain, reader, "op", f"`{_short(reader.op)}` reads {found}, expected {expected}")
        elif isinstance(pattern, Either):
            for option in pattern.options:
                if _may_be(option, node):
                    yield from self._solve(option, value, reader, state)
        elif isinstance(pattern, Capture):
            values = self._bound(pattern.name, value, reader, state)
            if values is not None:
                yield _State(values, state.nodes, state.steps)
        elif node is not None:
            yield from self._solve_op(pattern, node, value, reader, state)

    def _bound(self, name: str, value: Value, reader: Node, state: _State) -> Mapping[str, Value] | None:
        bound = state.values.get(name, value)
        if bound is value:
            return {**state.values, name: value} if name else state.values
        detail = f"`{_short(reader.op)}` reads {value!r}, expected {bound!r} ({name})"
        self._fail(state.chain, reader, "operand", detail)
        return None

    def _solve_op(self, pattern: Op, node: Node, value: Value, reader: Node, state: _State) -> Iterator[_State]:
        if node.results[pattern.result] is not value:
            detail = f"`{_short(reader.op)}` reads {value!r}, expected result {pattern.result} of `{_short(node.op)}`"
            self._fail(state.chain, reader, "result", detail)
            return
        if len(node.operands) != len(pattern.operands):
            detail = f"`{_short(node.op)}` has {len(node.operands)} operands, expected {len(pattern.operands)}"
            self._fail(state.chain | {node}, node, "operands", detail, stage=-1)
            return
        for name in dict.fromkeys((*pattern.attrs, *(a for a in node.attrs if a != "args"))):
            wrong = _wrong_attr(pattern, node, name)
            if wrong is not None:
                self._fail(state.chain | {node}, node, "attr", wrong)
                return
        values = self._bound(pattern.binds, value, reader, state)
        if values is None:
            return
        named = {**state.nodes, pattern.name: node} if pattern.name else state.nodes
        reached = _State(values, named, (*state.steps, (node, value, pattern.shared)))
        orders = [pattern.operands, pattern.operands[::-1]] if pattern.commutative else [pattern.operands]
        for operands in orders:
            yield from self._solve_all(operands, node, 0, reached)

    def _solve_all(self, patterns: tuple[Pattern, ...], node: Node, index: int, state: _State) -> Iterator[_State]:
        if index == len(patterns):
            yield state
            return
        for reached in self._solve(patterns[index], node.operands[index], node, state):
            yield from self._solve_all(patterns, node, index + 1, reached)


def ops_in(pattern: Pattern) -> frozenset[str]:
    """The ops of all nodes that a pattern may take."""
    found, seen, todo = set[str](), set[int](), [pattern]
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue  # parts are shared: as a tree, a pattern may have thousands
        seen.add(id(part))
        if isinstance(part, Either):
            todo += part.options
        elif isinstance(part, Op):
            found.update(part.ops)
            todo += part.operands
    return frozenset(found)


def _ops(pattern: Pattern) -> tuple[str, ...]:
    """The ops that can make the value of a pattern; none for a capture."""
    if isinstance(pattern, Either):
        return tuple(o for option in pattern.options for o in _ops(option))
    return pattern.ops if isinstance(pattern, Op) else ()


def _may_be(pattern: Pattern, node: Node | None) -> bool:
    """Whether the op of a node, or of none, fits the top of a pattern."""
    if isinstance(pattern, Either):
        return any(_may_be(option, node) for option in pattern.options)
    return isinstance(pattern, Capture) or (node is not None and node.op in pattern.ops)


def _wrong_attr(pattern: Op, node: Node, name: str) -> str | None:
    actual, wanted = node.attrs.get(name), pattern.attrs.get(name)
    exact = type(actual) is type(wanted) and actual == wanted
    if wanted.test(actual, node) if isinstance(wanted, Where) else exact:
        return None
    text = wanted.text if isinstance(wanted, Where) else repr(wanted) if wanted is not None else "none"
    return f"`{_short(node.op)}` has {name} = {actual!r}, expected {text}"


def _short(name: str) -> str:
    """`aten.mul.Tensor` is known as `mul`."""
    return name.split(".")[1] if "." in name else name
