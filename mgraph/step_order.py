"""The order of collectives of a step.py, read off its text: nothing is run, and loops are not unrolled.

The compiler compares it with the graph that the step was written from; the trainer reads it once more before the first
step, since a step.py may be edited. A collective that some ranks might leave out (under a condition, in a loop whose
length is a value, behind an early return) is refused: the ranks that reach it would wait for ever.

What is read are calls of the runtime's collectives, `rt.all_reduce_start(…, "dp")`, and calls of functions of the step
that lead to some. The order of a function is the order in which Python evaluates them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from mgraph.errors import PackageError

KINDS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
"""Collectives of the runtime; each may also be split in two, with the ending `_start`, and `wait`."""

FILE = "step.py"
_RUNTIME = "rt"
_HINT = "let every rank reach it, always: choose values with torch.where, not with Python"


@dataclass(frozen=True, slots=True)
class Step:
    """One call: of a collective over an axis, or of a function of the step (`axis` is empty)."""

    name: str
    axis: str
    line: int

    @property
    def text(self) -> str:
        """`all_reduce@dp`, or the function's name."""
        return f"{self.name}@{self.axis}" if self.axis else self.name


@dataclass(frozen=True, slots=True)
class Repeat:
    """What a loop of known length does in each round."""

    count: int
    steps: tuple[Item, ...]

    @property
    def text(self) -> str:
        """`94*(layer_fwd)`."""
        return f"{self.count}*({' '.join(step.text for step in self.steps)})"


Item: TypeAlias = "Step | Repeat"
StepOrder = dict[str, tuple[Item, ...]]
"""By function of the step: its collectives and its calls of functions that issue any; functions without are absent."""


def read_step_order(text: str, file: str = FILE) -> StepOrder:
    """The order of a step.py. Raises PackageError at the first collective that some ranks might leave out."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise PackageError(f"not Python: {error.msg}", f"{file}:{error.lineno}", "compile the package again") from error
    bodies = {node.name: node.body for node in tree.body if isinstance(node, ast.FunctionDef)}
    issuing = _issuing(bodies)
    order: StepOrder = {}
    for name in bodies:
        if name in issuing:
            reader = _Reader(issuing, file)
            reader.read(bodies[name])
            for doubt in reader.doubts:
                _refuse(doubt, file)
            order[name] = tuple(reader.items)
    return order


def order_text(order: StepOrder) -> dict[str, str]:
    """The order of each function as text, equal for equal orders whatever the lines."""
    return {name: " ".join(item.text for item in items) for name, items in order.items()}


def expanded(items: Iterable[Item]) -> Iterator[Step]:
    """The steps of a function one by one, loops written out; functions called are not."""
    for item in items:
        if isinstance(item, Step):
            yield item
        else:
            for _ in range(item.count):
                yield from expanded(item.steps)


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A place that may or may not run, what it holds, and whether it may leave the function."""

    line: int
    why: str
    items: tuple[Item, ...]
    leaves: bool


@dataclass
class _Reader(ast.NodeVisitor):
    """Reads statements in the order in which Python evaluates them; `issuing` are the functions that matter."""

    issuing: frozenset[str]
    file: str
    items: list[Item] = field(default_factory=list)
    doubts: list[_Doubt] = field(default_factory=list)

    def read(self, nodes: Sequence[ast.AST]) -> None:
        """Read one after the other; what is neither a branch nor calls anything that matters is passed over."""
        for node in nodes:
            if isinstance(node, _COMPOUND) or _called([node]) & (self.issuing | {""}):
                self.visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """What is called comes after its arguments."""
        self.generic_visit(node)
        kind = _kind(node)
        if kind is not None:
            self.items.append(Step(kind, self._axis(node), node.lineno))
        elif isinstance(node.func, ast.Name) and node.func.id in self.issuing:
            self.items.append(Step(node.func.id, "", node.lineno))

    def visit_Assign(self, node: ast.Assign) -> None:
        """The value comes before its targets."""
        self.read([node.value, *node.targets])

    def visit_For(self, node: ast.For) -> None:
        """A loop over a range of numbers is repetition; any other may be of another length on each rank."""
        self.visit(node.iter)
        count = _length(node.iter)
        inner = self._inner(node.body)
        cut = _holds(node.body, ast.Return, ast.Break, ast.Continue)
        if count is None or cut:
            why = "may end early" if cut else "has a length that is not written there"
            leaves = _holds(node.body, ast.Return)
            self.doubts.append(_Doubt(node.lineno, f"in a loop that {why}", tuple(inner.items), leaves))
        elif inner.items:
            self.items.append(Repeat(count, tuple(inner.items)))
        self.read(node.orelse)

    def visit_If(self, node: ast.If) -> None:
        """Branches may run."""
        self.visit(node.test)
        self._doubt(node, "under a condition", [*node.body, *node.orelse])

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """One of both runs."""
        self.visit(node.test)
        self._doubt(node, "under a condition", [node.body, node.orelse])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """All but the first operand may run."""
        self.visit(node.values[0])
        self._doubt(node, "under a condition", node.values[1:])

    def generic_visit(self, node: ast.AST) -> None:
        """Whatever else has a body of its own may run, once or often."""
        found = next((why for kinds, why in _DOUBTFUL if isinstance(node, kinds)), None)
        if found is None:
            super().generic_visit(node)
        else:
            self._doubt(node, found, list(ast.iter_child_nodes(node)))

    def _doubt(self, node: ast.AST, why: str, inside: Sequence[ast.AST]) -> None:
        inner = self._inner(inside)
        line = getattr(node, "lineno", 1)
        self.doubts.append(_Doubt(line, why, tuple(inner.items), _holds(inside, ast.Return)))

    def _inner(self, nodes: Sequence[ast.AST]) -> _Reader:
        inner = _Reader(self.issuing, self.file)
        inner.read(nodes)
        self.doubts += inner.doubts
        return inner

    def _axis(self, node: ast.Call) -> str:
        given = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "axis")]
        if len(given) == 1 and isinstance(given[0], ast.Constant) and isinstance(given[0].value, str):
            return given[0].value
        raise PackageError(
            "the axis of a collective is no text", f"{self.file}:{node.lineno}", 'write it there, such as "dp"'
        )


_DOUBTFUL: tuple[tuple[tuple[type[ast.AST], ...], str], ...] = (
    ((ast.While,), "in a loop that has a length that is not written there"),
    ((ast.Try, ast.TryStar), "where an error may skip it"),
    ((ast.Match,), "under a condition"),
    ((ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp), "in a comprehension"),
    ((ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), "in a function within a function"),
)


def _holds(nodes: Iterable[ast.AST], *kinds: type[ast.AST]) -> bool:
    """Whether a statement of one of the kinds stands anywhere in them."""
    return any(isinstance(n, kinds) for node in nodes for n in ast.walk(node))


def _length(loop: ast.expr) -> int | None:
    """The length of `range(…)` of whole numbers, reversed or not."""
    if not isinstance(loop, ast.Call) or not isinstance(loop.func, ast.Name) or loop.keywords:
        return None
    if loop.func.id == "reversed" and len(loop.args) == 1:
        return _length(loop.args[0])
    try:
        numbers = [ast.literal_eval(argument) for argument in loop.args]
        return len(range(*numbers)) if loop.func.id == "range" else None
    except (ValueError, TypeError):
        return None


_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.TryStar, ast.Match)


def _kind(call: ast.Call) -> str | None:
    """The collective that a call is, split or not; None for any other call."""
    called = call.func
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == _RUNTIME:
        kind = called.attr.removesuffix("_start")
        return kind if kind in KINDS else None
    return None


def _called(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that are called anywhere in them, and an empty one for a collective."""
    calls = [node for top in nodes for node in ast.walk(top) if isinstance(node, ast.Call)]
    return {c.func.id for c in calls if isinstance(c.func, ast.Name)} | {"" for c in calls if _kind(c) is not None}


def _issuing(bodies: Mapping[str, Sequence[ast.stmt]]) -> frozenset[str]:
    """The functions that issue collectives, themselves or through others."""
    called = {name: _called(body) for name, body in bodies.items()}
    found = {name for name, names in called.items() if "" in names}
    while more := {name for name, names in called.items() if names & found} - found:
        found |= more
    return frozenset(found)


def _steps(items: Iterable[Item]) -> Iterator[Step]:
    """Every step once, whatever loops it stands in."""
    for item in items:
        yield from [item] if isinstance(item, Step) else _steps(item.steps)


def _refuse(doubt: _Doubt, file: str) -> None:
    """Raise where a doubtful place issues collectives, or leaves a function that does."""
    step = next(_steps(doubt.items), None)
    if step is not None:
        what = f"rt.{step.name} over {step.axis}" if step.axis else f"{step.name}, which issues collectives,"
        raise PackageError(f"{what} stands {doubt.why}", f"{file}:{step.line}", _HINT)
    if doubt.leaves:
        raise PackageError("a function that issues collectives may end early", f"{file}:{doubt.line}", _HINT)
