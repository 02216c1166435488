"""Text -> Module: the inverse of `mgraph.ir.printer`. Errors name line and column, with a caret and the nearest name.

Only syntax and names are checked here; everything else is the verifier's. Blank lines and lines that start with `#`
mean nothing. The grammar is the first thing in `docs/ir.md`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mgraph.ir.cursor import Cursor
from mgraph.ir.dims import Extent, NamedDim
from mgraph.ir.fold import RANGE
from mgraph.ir.graph import (
    AttrValue,
    Axis,
    Entry,
    Fact,
    Function,
    InitCall,
    Module,
    Node,
    Origin,
    Phase,
    State,
    StateKind,
    Value,
)
from mgraph.ir.printer import HEADER
from mgraph.ir.types import TensorType, Type

_DIM_NAME = re.compile(r"[A-Za-z_]\w*")
_STATE_RANGE = re.compile(r"state @[\w.-]*" + RANGE.pattern)
_NAME_RANGE = re.compile(r"@([\w.-]*" + RANGE.pattern + r"[\w.-]*)")
_STATEMENTS = ("module", "dim", "axis", "fact", "state", "func", "entry")


def parse_module(text: str, source: str = "<text>") -> Module:
    """Read a module. `source` names the text in errors. Raises GraphError."""
    return _Parser(text, source).module()


@dataclass(slots=True)
class _Body:
    """Where a function stands: its header line and the lines up to the closing brace."""

    header: int
    end: int
    parsed: Function | None = None
    open: bool = False


class _Parser:
    """Reads statements in order; bodies of functions come last, since a call takes its result types from its callee."""

    def __init__(self, text: str, source: str) -> None:
        self.lines = text.splitlines()
        self.source = source
        self.types: dict[str, Type] = {}
        self.dims: dict[str, NamedDim] = {}
        self.axes: dict[str, Axis] = {}
        self.facts: list[Fact] = []
        self.state: dict[str, State] = {}
        self.bodies: dict[str, _Body] = {}
        self.entries: dict[str, Entry] = {}

    def module(self) -> Module:
        """The whole text."""
        statements = [i for i, line in enumerate(self.lines) if line.strip() and not line.lstrip().startswith("#")]
        if not statements or self.lines[statements[0]].strip() != HEADER:
            self.cursor(statements[0] if statements else 0).fail(f"the first line must be {HEADER!r}")
        if len(statements) == 1:
            self.cursor(statements[0]).fail('expected a line `module "name"` after the header')
        cursor = self.cursor(statements[1])
        cursor.expect("module")
        name = cursor.string()
        cursor.finish()
        position = 2
        while position < len(statements):
            position = self.statement(statements, position)
        functions = {function: self.function(function) for function in self.bodies}
        return Module(
            name, self.dims, tuple(self.axes.values()), tuple(self.facts), self.state, functions, self.entries
        )

    def cursor(self, line: int, text: str | None = None) -> Cursor:
        """A cursor over one line (or over `text` in its place)."""
        if text is None:
            text = self.lines[line] if line < len(self.lines) else ""
        return Cursor(text, line + 1, self.source, self.types)

    def statement(self, statements: list[int], position: int) -> int:
        """Read one statement; gives the position of the next one."""
        line = statements[position]
        cursor = self.cursor(line)
        if cursor.accept("dim"):
            self.dim(cursor)
        elif cursor.accept("axis"):
            self.axis(cursor)
        elif cursor.accept("fact"):
            self.facts.append(Fact(cursor.string(), cursor.accept("proved")))
        elif cursor.accept("state"):
            return self.states(statements, position)
        elif cursor.accept("func"):
            return self.skip_body(cursor, statements, position)
        elif cursor.accept("entry"):
            self.entry(cursor)
        else:
            at = cursor.skip()
            cursor.unknown("statement", cursor.text[at:].split(" ")[0], _STATEMENTS, at)
        cursor.finish()
        return position + 1

    def dim(self, cursor: Cursor) -> None:
        """`dim S 2..4096`, `dim R 0.. ragged <= 2*B*S by bound`"""
        name = self.new(cursor, "dim", cursor.match(_DIM_NAME, "the name of a dim"), self.dims)
        minimum = cursor.integer("the least extent")
        cursor.expect("..")
        at = cursor.skip()
        maximum = cursor.integer() if cursor.text[at : at + 1].lstrip("-").isdigit() else None
        bound = extent = None
        if cursor.accept("ragged"):
            cursor.expect("<=")
            bound = cursor.word_dim()
            if cursor.accept("by"):
                at = cursor.skip()
                word = cursor.name()
                if word not in [e.value for e in Extent]:
                    cursor.unknown("way to know an extent", word, [e.value for e in Extent], at)
                extent = Extent(word)
        self.dims[name] = NamedDim(name, minimum, maximum, bound, extent)

    def axis(self, cursor: Cursor) -> None:
        """`axis dp = *`, `axis tp = 4`, `axis ep = dp*tp`"""
        name = self.new(cursor, "mesh axis", cursor.match(_DIM_NAME, "the name of a mesh axis"), self.axes)
        cursor.expect("=")
        size: int | None = None
        of: list[str] = []
        if not cursor.accept("*"):
            at = cursor.skip()
            if cursor.text[at : at + 1].lstrip("-").isdigit():
                size = cursor.integer()
            else:
                of.append(cursor.match(_DIM_NAME, "'*', a size or a product of axes"))
                while cursor.accept("*"):
                    of.append(cursor.match(_DIM_NAME, "the name of a mesh axis"))
        self.axes[name] = Axis(name, size, tuple(of))

    def states(self, statements: list[int], position: int) -> int:
        """One state line, or neighbouring lines with the same range, which count up together."""
        found = _STATE_RANGE.match(self.lines[statements[position]])
        if found is None:
            self.one_state(self.cursor(statements[position]))
            return position + 1
        first, last = int(found.group(1)), int(found.group(2))
        if last < first:
            self.cursor(statements[position]).fail("the range counts down", found.start(1))
        span = found.group()[found.group().index("{") :]
        end = position
        while end < len(statements):
            line = _STATE_RANGE.match(self.lines[statements[end]])
            if line is None or line.groups() != found.groups():
                break
            end += 1
        for number in range(first, last + 1):
            for line_number in statements[position:end]:
                self.one_state(self.cursor(line_number, self.lines[line_number].replace(span, str(number))))
        return end

    def one_state(self, cursor: Cursor) -> None:
        """`state @name: type = kind [trainable] [transient] [host] [seed name] [init [...]]`"""
        cursor.expect("state")
        cursor.expect("@")
        name = self.new(cursor, "state", cursor.name(), self.state)
        cursor.expect(":")
        at = cursor.skip()
        type_ = cursor.type()
        if not isinstance(type_, TensorType):
            cursor.fail("a state is a tensor, never pending", at)
        cursor.expect("=")
        at = cursor.skip()
        kind = cursor.name("the kind of state")
        if kind not in [k.value for k in StateKind]:
            cursor.unknown("kind of state", kind, [k.value for k in StateKind], at)
        trainable = cursor.accept("trainable")
        persist = not cursor.accept("transient")
        host = cursor.accept("host")
        seed = cursor.name() if cursor.accept("seed") else name
        init = self.init(cursor) if cursor.accept("init") else ()
        cursor.finish()
        state = State.make(
            name, type_, StateKind(kind), init=init, trainable=trainable, persist=persist, seed_name=seed
        )
        self.state[name] = replace(state, host=True) if host else state

    def init(self, cursor: Cursor) -> tuple[InitCall, ...]:
        """`[["normal_", 0.0, 0.02]]`: calls, each a name and plain numbers, names or lists of numbers."""
        at = cursor.skip()
        calls: list[InitCall] = []
        value = cursor.attr()
        for call in value if isinstance(value, tuple) else (value,):
            if not isinstance(call, tuple) or not all(isinstance(a, str | int | float | tuple) for a in call):
                cursor.fail('an initialiser is a list of calls, such as [["normal_", 0.0, 0.02]]', at)
            calls.append(call)
        return tuple(calls)

    def entry(self, cursor: Cursor) -> None:
        """`entry microbatch = @microbatch -> (loss_sum, count) updates (@layers.{0..31}.w.grad) captured`, or in the
        place of `captured` the functions of which a call is: `pieces (@layer.fwd, @layer.bwd)`"""
        name = self.new(cursor, "entry", cursor.name(), self.entries)
        cursor.expect("=")
        at = cursor.skip()
        cursor.expect("@")
        function = cursor.name("the name of a function")
        if function not in self.bodies:
            cursor.unknown("function", function, self.bodies, at)
        cursor.expect("->")
        cursor.expect("(")
        outputs = cursor.items(")", cursor.name)
        updates: tuple[str, ...] = ()
        if cursor.accept("updates"):
            cursor.expect("(")
            updates = tuple(_unfold(cursor.items(")", lambda: _updated(cursor))))
        captured = cursor.accept("captured")
        pieces: tuple[str, ...] = ()
        if cursor.accept("pieces"):
            cursor.expect("(")
            pieces = tuple(cursor.items(")", lambda: self.piece(cursor)))
        self.entries[name] = Entry(name, function, tuple(outputs), updates, captured, pieces)

    def piece(self, cursor: Cursor) -> str:
        """`@layer.fwd`: a function of the module."""
        at = cursor.skip()
        cursor.expect("@")
        name = cursor.name("the name of a function")
        if name not in self.bodies:
            cursor.unknown("function", name, self.bodies, at)
        return name

    def skip_body(self, cursor: Cursor, statements: list[int], position: int) -> int:
        """Note where a function stands; its lines are read when all names of the module are known."""
        cursor.expect("@")
        name = self.new(cursor, "function", cursor.name(), self.bodies)
        end = position + 1
        while end < len(statements) and self.lines[statements[end]].strip() != "}":
            end += 1
        if end == len(statements):
            cursor.fail(f"function {name!r} has no closing '}}'", 0)
        self.bodies[name] = _Body(statements[position], statements[end])
        return end + 1

    def new(self, cursor: Cursor, what: str, name: str, known: Iterable[str]) -> str:
        """A name declared here; fails if it has been declared before."""
        if name in known:
            cursor.fail(f"{what} {name!r} is declared twice", cursor.position - len(name))
        return name

    def function(self, name: str) -> Function:
        """A function, read on first need."""
        body = self.bodies[name]
        if body.parsed is None:
            if body.open:
                self.cursor(body.header).fail(f"function {name!r} calls itself")
            body.open = True
            body.parsed = _FunctionParser(self, name, body).function()
        return body.parsed


class _FunctionParser:
    """Reads one function."""

    def __init__(self, parser: _Parser, name: str, body: _Body) -> None:
        self.parser = parser
        self.name = name
        self.body = body
        self.values: dict[str, Value] = {}

    def function(self) -> Function:
        """Header, nodes, `return`."""
        cursor = self.parser.cursor(self.body.header)
        cursor.expect("func")
        cursor.expect("@")
        cursor.name()
        cursor.expect("(")
        params, slots = self.inputs(cursor)
        statics: tuple[str, ...] = ()
        if cursor.accept("static"):
            cursor.expect("(")
            statics = tuple(cursor.items(")", cursor.name))
        cursor.expect("{")
        cursor.finish()
        nodes: list[Node] = []
        for line in range(self.body.header + 1, self.body.end):
            cursor = self.parser.cursor(line)
            if cursor.at_end() or cursor.text.startswith("#", cursor.position):
                continue
            if cursor.accept("return"):
                results = [] if cursor.at_end() else self.references(cursor)
                cursor.finish()
                self.nothing_after(line)
                return Function(self.name, params, slots, tuple(nodes), tuple(results), statics)
            nodes.append(self.node(cursor))
        raise self.parser.cursor(self.body.end).error(f"function {self.name!r} has no `return`")

    def nothing_after(self, line: int) -> None:
        """Fail on a node after `return`."""
        for after in range(line + 1, self.body.end):
            cursor = self.parser.cursor(after)
            if not cursor.at_end() and not cursor.text.startswith("#", cursor.position):
                cursor.fail("only '}' may follow `return`")

    def inputs(self, cursor: Cursor) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """`%x: type, …; %slot: type, …)`"""
        groups: list[list[Value]] = [[]]
        while not cursor.accept(")"):
            if len(groups) == 1 and cursor.accept(";"):
                groups.append([])
            elif groups[-1]:
                cursor.expect(",")
            groups[-1].append(self.define(cursor))
        return tuple(groups[0]), tuple(groups[1]) if len(groups) > 1 else ()

    def define(self, cursor: Cursor, type_: Type | None = None) -> Value:
        """`%name: type`, or `%name` where the type is known; fails if the name is taken."""
        at = cursor.skip()
        cursor.expect("%")
        name = cursor.name()
        if name in self.values:
            cursor.fail(f"value %{name} is defined twice", at)
        if type_ is None:
            cursor.expect(":")
            type_ = cursor.type()
        self.values[name] = Value(name, type_)
        return self.values[name]

    def reference(self, cursor: Cursor) -> Value:
        """`%name` of a value, or `@name` of a state."""
        at = cursor.skip()
        known: dict[str, Value] = self.values
        if cursor.accept("@"):
            name = cursor.name()
            if name not in self.parser.state:
                cursor.unknown("state", name, self.parser.state, at)
            return self.parser.state[name].value
        cursor.expect("%")
        name = cursor.name()
        if name not in known:
            cursor.unknown("value", name, known, at)
        return known[name]

    def references(self, cursor: Cursor) -> list[Value]:
        """One or more references."""
        found = [self.reference(cursor)]
        while cursor.accept(","):
            found.append(self.reference(cursor))
        return found

    def node(self, cursor: Cursor) -> Node:
        """`%y: type, … = op(%a, …; …) {name = value, …} phase at "path" "file":line by pass`"""
        start = cursor.skip()
        types: list[Type | None] = []
        while not types or cursor.accept(","):
            cursor.expect("%")
            cursor.name()
            types.append(cursor.type() if cursor.accept(":") else None)
        cursor.expect("=")
        op, callee = cursor.name("an op"), None
        if op == "call" and cursor.skip() and cursor.accept("@"):
            at = cursor.position - 1
            callee = cursor.name("the name of a function")
            if callee not in self.parser.bodies:
                cursor.unknown("function", callee, self.parser.bodies, at)
        operands = self.operands(cursor)
        attrs = self.attrs(cursor)
        if callee is not None:
            attrs["callee"] = callee
        phase = self.phase(cursor)
        origin = self.origin(cursor)
        cursor.expect("by")
        made_by = cursor.name("the name of a pass")
        cursor.finish()
        cursor.position = start
        return Node(op, operands, self.results(cursor, types, callee), attrs, phase, origin, made_by)

    def results(self, cursor: Cursor, types: list[Type | None], callee: str | None) -> tuple[Value, ...]:
        """Define the results. They come last, so that a node cannot read its own result; a call may leave types out."""
        count = len(types)
        if callee is not None and types == [None] * count:
            types = [v.type for v in self.parser.function(callee).results]
            if len(types) != count:
                cursor.fail(f"the call has {count} results, but {callee!r} returns {len(types)}")
            return tuple(cursor.items("=", lambda: self.define(cursor, types.pop(0))))
        return tuple(cursor.items("=", lambda: self.define(cursor)))

    def operands(self, cursor: Cursor) -> tuple[Value, ...]:
        """`(%x, %y; @slot)`: the semicolon only separates a callee's params from its slots for the eye."""
        cursor.expect("(")
        found: list[Value] = []
        while not cursor.accept(")"):
            if found and not cursor.accept(";"):
                cursor.expect(",")
            elif not found:
                cursor.accept(";")
            found.append(self.reference(cursor))
        return tuple(found)

    def attrs(self, cursor: Cursor) -> dict[str, AttrValue]:
        """`{name = value, …}`, or nothing."""
        found: dict[str, AttrValue] = {}

        def attribute() -> None:
            at = cursor.skip()
            name = cursor.name("the name of an attribute")
            if name in found:
                cursor.fail(f"attribute {name!r} is given twice", at)
            cursor.expect("=")
            found[name] = cursor.attr()

        if cursor.accept("{"):
            cursor.items("}", attribute)
        return found

    def phase(self, cursor: Cursor) -> Phase:
        """A phase word."""
        at = cursor.skip()
        word = cursor.name("a phase")
        if word not in [p.value for p in Phase]:
            cursor.unknown("phase", word, [p.value for p in Phase], at)
        return Phase(word)

    def origin(self, cursor: Cursor) -> Origin:
        """`at "path" "file":line`, or `at "path"`, or nothing."""
        if not cursor.accept("at"):
            return Origin()
        path = cursor.string()
        if not cursor.text.startswith('"', cursor.skip()):
            return Origin(path)
        file = cursor.string()
        cursor.expect(":")
        return Origin(path, file, cursor.integer("a line number"))


def _updated(cursor: Cursor) -> str | tuple[str, int, int]:
    """`@name`, or `@name` with a range: its template and the range."""
    found = _NAME_RANGE.match(cursor.text, cursor.skip())
    if found is None:
        cursor.expect("@")
        return cursor.name("the name of a state")
    cursor.position = found.end()
    return found.group(1), int(found.group(2)), int(found.group(3))


def _unfold(items: list[str | tuple[str, int, int]]) -> list[str]:
    """All names; neighbours with the same range count up together."""
    names: list[str] = []
    position = 0
    while position < len(items):
        item = items[position]
        if isinstance(item, str):
            names.append(item)
            position += 1
            continue
        _, first, last = item
        templates: list[str] = []
        while position < len(items):
            neighbour = items[position]
            if isinstance(neighbour, str) or neighbour[1:] != (first, last):
                break
            templates.append(neighbour[0])
            position += 1
        for number in range(first, last + 1):
            names += [RANGE.sub(str(number), t) for t in templates]
    return names
