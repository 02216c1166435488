"""The text of one function of step.py: names, statements, loops, and a `del` where a value dies.

Names follow the values and are reused as soon as their value is dead. A comment names the origin of the lines below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

import sympy

from mgraph.codegen.bundles import ListType, expanded, is_list, picked
from mgraph.codegen.dim_text import DimScope, python_text
from mgraph.codegen.kernel_sites import KernelSites
from mgraph.codegen.liveness import ADDING, Liveness, is_small
from mgraph.codegen.loops import (
    INDEX,
    Carried,
    Loop,
    Operand,
    Slot,
    Stacked,
    carried_until,
    find_loops,
    loop_places,
    template,
)
from mgraph.codegen.names import NamePool, base_name, identifier, slot_names
from mgraph.codegen.prepare import called
from mgraph.codegen.sent import puts_off, sent_next
from mgraph.codegen.source import SourceWriter
from mgraph.codegen.state_tables import LAYER, SHORT, StateTables
from mgraph.codegen.torch_provider import (
    Site,
    Written,
    absorbable,
    joined_text,
    listed,
    overwritable,
    put_off,
    write,
    write_accumulated,
)
from mgraph.ir.dims import names_in
from mgraph.ir.graph import Entry, Function, Node, Origin, Value
from mgraph.ir.local import Division
from mgraph.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the functions of one step.py share."""

    functions: Mapping[str, Function]
    names: Mapping[str, str]
    kernels: KernelSites
    tables: StateTables
    division: Division
    pieces: frozenset[str] = frozenset()
    """Functions of which each call is a CUDA graph, where an entry is not one as a whole."""


@dataclass(frozen=True, slots=True)
class Element:
    """A place in a list that a loop filled with `count` tensors."""

    list: str
    place: int
    count: int


class FunctionText:
    """Writes one function; `entry` is given for entry points."""

    def __init__(self, function: Function, context: StepContext, entry: Entry | None) -> None:
        self._function, self._context, self._entry = function, context, entry
        self._loops = find_loops(function)
        self._live = Liveness(function, loop_places(self._loops), absorbable, carried_until(self._loops))
        unpacked = [v for n in function.nodes if n.op == "unpack" for v in n.results]
        states = [v for n in function.nodes for v in n.operands if v.is_state]
        given = [*function.params, *unpacked, *function.slots, *states]
        told = {name for v in given if isinstance(v.type, TensorType) for d in v.tensor.shape for name in names_in(d)}
        read = context.division.read
        self._unread = (_named(function) & read) - told if read else set[str]()
        """Dims whose extents the host reads, and of which no tensor so far told this function."""
        made = {*self._unread, *(INDEX for loop in self._loops if loop.steps)}
        self._dims = DimScope(given, context.division, made)
        callees = {context.names[called(n)] for n in function.nodes if n.op == "call"}
        self._pool = NamePool(
            reserved=self._dims.names | self._unread | callees | {identifier(s) for s in function.statics}
        )
        self._names: dict[Value, str] = {}  # by a name of the pool
        self._texts: dict[Value, str] = {}  # by another expression: state
        self._pinned: set[Value] = set()
        self._put_down: set[Value] = set()  # of what loops carry: no more read in an iteration
        self._stacks: dict[Stacked, str] = {}
        self._elements: dict[Value, Element] = {}  # what loops gathered, which is small: lists live to the end
        self._sent = sent_next(function)
        self._popped = {place: stacked for loop in self._loops for place, stacked in loop.popped.items()}
        self._preferred = self._carried_names()
        self._loop: Loop | None = None
        self._place: dict[Node, int] = {}  # node of the loop's body → its position
        self._body = SourceWriter()
        self._origin = Origin()
        self._uses_device = False

    def write(self, writer: SourceWriter) -> None:
        """Append the whole function."""
        self._name_inputs()
        header = SourceWriter(depth=1)
        with self._body.indented():
            self._statements(header)
            self._return()
        if self._entry is not None:
            writer.line("@torch.no_grad()")
        writer.line(self._signature())
        with writer.indented():
            writer.line(f'"""{self._summary()}"""')
            writer.paste(header)
            self._dims.bind(writer, self._input_texts)
            if self._uses_device:
                writer.line(f"device = {self._device_source()}")
        writer.paste(self._body)

    def _name_inputs(self) -> None:
        for value in self._function.params:
            is_input = self._entry is not None
            self._names[value] = self._pool.take(identifier(value.name) if is_input else base_name(value.name))
        short = slot_names(v.name for v in self._function.slots)
        for value in self._function.slots:
            self._names[value] = self._pool.take(short[value.name])
        self._inputs = set(self._function.inputs())
        self._input_texts = {v: self._names[v] for v in self._function.inputs()}
        for node in self._function.nodes:
            self._input_texts |= {v: f'state["{v.name}"]' for v in node.operands if v.is_state}

    def _signature(self) -> str:
        names = [self._input_texts[v] for v in self._function.inputs()]
        if self._entry is not None:
            parts = ["state: State", *(f"{n}: Tensor" for n in names)]
            return f"def {identifier(self._entry.name)}({', '.join(parts)}) -> tuple[Tensor, ...]:"
        statics = [identifier(s) for s in self._function.statics]
        parts = [*names, *(["*", *statics] if statics else [])]
        return f"def {self._context.names[self._function.name]}({', '.join(parts)}):"

    def _summary(self) -> str:
        inputs = ", ".join(f"{self._input_texts[v]} {_type_text(v)}" for v in self._function.params)
        outputs = ", ".join(map(_type_text, self._function.results))
        if self._entry is not None:
            outputs = ", ".join(self._entry.outputs)
            name = f"Entry point {self._entry.name}"
        else:
            paths = [n.origin.path.split(".") for n in self._function.nodes if n.origin.path]
            name = ".".join(_common(paths)) or self._function.name
        name += ", a CUDA graph" * (self._function.name in self._context.pieces)
        text = f"{name}: {inputs or 'nothing'} → {outputs or 'nothing'}."
        return text if len(text) < 110 else f"{name}: {len(self._function.params)} inputs → {outputs}."[:110]

    def _device_source(self) -> str:
        tensors = [v for v in self._function.inputs() if not is_list(v)]
        if self._entry is not None:
            return "rt.device(state)"
        return f"{self._input_texts[tensors[0]]}.device"

    def _device(self) -> str:
        self._uses_device = True
        return "device"

    def _statements(self, header: SourceWriter) -> None:
        starts = {loop.start: loop for loop in self._loops}
        index = 0
        while index < len(self._function.nodes):
            loop = starts.get(index)
            if loop is not None:
                self._write_loop(loop)
                index = loop.end
                continue
            node = self._function.nodes[index]
            if node.op == "unpack":
                self._write_unpack(node, index, header)
            else:
                self._write_node(node, index)
            index += 1

    def _write_unpack(self, node: Node, index: int, header: SourceWriter) -> None:
        kept = self._names[node.operands[0]]
        names = [self._pool.take(base_name(v.name)) for v in node.results]
        for value, name in zip(node.results, names, strict=True):
            self._names[value] = name
            self._input_texts[value] = name
        header.line(f"{_listed(names)} = {kept}")
        header.line(f"{kept}.clear()  # from here on each dies at its last use")
        unused = [v for v in node.results if self._live.last_use[v] == index]
        self._bury(unused, set(), final=False)

    def _write_node(self, node: Node, index: int) -> None:
        """One statement, and the deaths that it brings."""
        if self._live.is_inlined(node) or node.op == "pack":
            self._push(node, before=True)
            return
        self._comment(node)
        if node.op == "call":
            written = Written(self._call_text(node), {})
        elif node.op == "wait":
            written = self._wait_text(node)
        elif node.op == "pick":
            written = Written(f"[{self._operand(node, 0)}[i] for i in {picked(node)}]", {})
        else:
            written = self._node_text(node, index)
        self._push(node, before=True)
        mark = (self._function.name, node.id) if node.results else None
        for line in written.before:
            self._body.line(line, mark)
        named = [
            line
            for result, operand in (written.results.items() if node.op != "wait" else ())
            for line in self._refer(node.results[result], node.operands[operand], self._operand(node, operand))
        ]
        dead = [v for v in self._live.reads(node) if self._live.last_use[v] == index and self._dies_here(v)]
        freed = self._release(dead)
        left = self._bind(node, index, written, freed)
        self._body.line(f"{_listed(left)} = {written.text}" if left else written.text, mark)
        for line in (*written.after, *named):
            self._body.line(line, mark)
        for value in node.results if self._unread else ():
            if value in self._names and isinstance(value.type, TensorType):
                self._unread -= self._dims.bind_made(self._body, value, self._names[value], self._unread)
        self._push(node, before=False)
        self._bury_names((freed | self._read_for_the_last_time(node)) - set(left), final=self._is_last(index))

    def _read_for_the_last_time(self, node: Node) -> set[str]:
        """Names of what a loop carries that an iteration reads no more before it makes it anew."""
        loop = self._loop
        if loop is None:
            return set()
        found = set()
        second = [loop.node(1, m) for m in range(loop.period)]
        for (made, result), initial in loop.carried().items():
            value = loop.node(0, made).results[result]
            last = max((m for m, n in enumerate(second) if self._reads(n, value)), default=loop.period)
            over = last <= self._place[node] < made and value not in self._put_down and not is_small(initial)
            if over and self._pool.alone(self._names[value]):
                self._put_down.add(value)
                found.add(self._names[value])
        return found

    def _carried_by(self) -> set[str]:
        """The names of what the loop carries."""
        loop = self._loop
        return set() if loop is None else {self._names[loop.node(0, m).results[r]] for m, r in loop.carried()}

    def _reads(self, node: Node, value: Value) -> bool:
        """Whether the statement of a node names a value."""
        return not self._live.is_inlined(node) and value in self._live.reads(node)

    def _bind(self, node: Node, index: int, written: Written, freed: set[str]) -> list[str]:
        """Names of the results that the statement binds."""
        left = []
        for position, value in enumerate(node.results):
            if position in written.results:
                continue
            if (
                self._live.last_use[value] == index
                and value not in self._pinned
                and not self._is_pushed(node, position)
            ):
                left.append("_")
                if not is_small(value):
                    freed.add("_")
                continue
            if value not in self._names:
                self._names[value] = self._pool.take(self._base(value))
            left.append(self._names[value])
        if all(name == "_" for name in left):
            freed.discard("_")
            return []
        return left

    def _dies_here(self, value: Value) -> bool:
        """Whether the end of a value's life may be written: in a loop, only of what the iteration itself made."""
        return value not in self._pinned and (self._loop is None or value in self._body_values(self._loop))

    def _refer(self, value: Value, source: Value, text: str) -> tuple[str, ...]:
        """A value is the tensor of another, written `text`. Gives the line that binds its name if it has one: a loop
        carries it by that."""
        if value in self._names:
            return (f"{self._names[value]} = {text}",) if self._names[value] != text else ()
        if text in self._carried_by():
            self._names[value] = self._pool.share(text)
        elif source in self._names:
            self._names[value] = self._pool.share(self._names[source])
        elif source in self._elements:
            self._elements[value] = self._elements[source]
        else:
            self._texts[value] = text
        return ()

    def _wait_text(self, node: Node) -> Written:
        """The end of what was started. Reductions were in place; else there are new tensors, in a list."""
        started = self._live.under_way.get(node.operands[0])
        text = f"rt.wait({self._operand(node, 0)})"
        if started is None:
            alone = len(node.results) == 1 and not is_list(node.results[0])
            return Written(f"{text}[0]" if alone else text, {})
        named = [
            line
            for result, source in zip(node.results, started, strict=True)
            for line in self._refer(result, source, self._text(source))
        ]
        return Written(text, {i: i for i in range(len(node.results))}, after=tuple(named))

    def _node_text(self, node: Node, index: int) -> Written:
        last = node.operands[-1] if node.operands else None
        if node.op in ADDING and last in self._live.inlined and absorbable(self._live.inlined[last], node.operands[0]):
            part = self._live.inlined[last]
            fresh = bool(node.attrs.get("fresh"))
            totals = [self._operand(node, i) for i in range(len(node.results))]
            total = totals[0] if node.op == "accumulate_" else joined_text(totals)
            text = write_accumulated(self._site(part, index), node.operands[0], total, fresh=fresh)
            text = put_off(text) if node.attrs.get("late") else text
            return Written(text, {i: i for i in range(len(totals))})
        return write(self._site(node, index))

    def _site(self, node: Node, index: int) -> Site:
        overwrite = next((i for i in overwritable(node) if self._may_take(node, i, index)), None)
        texts = [self._operand(node, i) for i in range(len(node.operands))]
        tensors = partial(self._tensors, node)
        lists, sent = self._lists(node), self._sent.get(node, "")
        if self._loop is not None and node in self._place:
            node = self._loop.with_index(self._place[node])
        return Site(node, texts, self._dims, self._context.kernels, self._device, tensors, overwrite, lists, sent)

    def _may_take(self, node: Node, operand: int, index: int) -> bool:
        """Whether a node, in a loop that of every iteration, may write over an operand."""
        if node.operands[operand] not in self._names or not self._ends_at(node, operand, index):
            return False
        place, loop = self._place.get(node), self._loop
        if loop is None or place is None:
            return True
        nodes = [loop.node(t, place) for t in range(loop.count)]
        return all(self._ends_at(n, operand, index + t * loop.period) for t, n in enumerate(nodes))

    def _ends_at(self, node: Node, operand: int, index: int) -> bool:
        value = node.operands[operand]
        others = [v for i, v in enumerate(node.operands) if i != operand]
        same = {self._live.group(v) for v in others}
        return (
            self._live.group(value) not in same
            and self._live.last_use[value] == index
            and self._live.can_overwrite(value, index)
        )

    def _operand(self, node: Node, position: int) -> str:
        """The text of an operand: a name, state, or an inlined view."""
        value = node.operands[position]
        loop = self._loop
        if loop is not None:
            place = self._place.get(node)
            kind = loop.operands.get((place, position)) if place is not None else None
            if isinstance(kind, Slot):
                return f'state[f"{kind.template.format("{" + _number(kind) + "}")}"]'
            if isinstance(kind, Stacked):
                return f"{self._stacks[kind]}.pop()"
            if isinstance(kind, Carried):
                return self._names[loop.node(0, kind.node).results[kind.result]]
        elif (node, position) in self._popped:
            return f"{self._stacks[self._popped[node, position]]}.pop()"
        return self._text(value)

    def _text(self, value: Value) -> str:
        if value in self._live.inlined:
            return write(self._site(self._live.inlined[value], -1)).text
        if value in self._texts:
            return self._texts[value]
        if value in self._elements and value not in self._names:
            return f"{self._elements[value].list}[{self._elements[value].place}]"
        return f'state["{value.name}"]' if value.is_state else self._names[value]

    def _tensors(self, node: Node, values: Sequence[Value], hint: str) -> str:
        """The text of a list of operands of a node."""
        if len(values) == 1 and is_list(values[0]):
            return self._operand(node, node.operands.index(values[0]))
        if self._loop is not None:
            places = [node.operands.index(v) for v in values]
            kinds = [self._loop.operands[self._place[node], place] for place in places]
            return self._slots(kinds) or f"[{', '.join(self._operand(node, place) for place in places)}]"
        names = [self._state_name(v) for v in values]
        if len(values) > SHORT and all(name is not None for name in names):
            return self._context.tables.tensors([n for n in names if n is not None], hint)
        places = [node.operands.index(v) for v in values]
        popped = any((node, place) in self._popped for place in places)
        if popped:
            return f"[{', '.join(self._operand(node, place) for place in places)}]"
        return listed(list(zip(places, map(self._text, values), strict=True)), self._lists(node))

    def _lists(self, node: Node) -> dict[int, tuple[str, int]]:
        """Where operands of a node are all that a loop gathered in a list: its text, and how many they are."""
        found = {}
        for start, value in enumerate(node.operands):
            if (first := self._elements.get(value)) is None:
                continue
            elements = [self._elements.get(v) for v in node.operands[start : start + first.count]]
            whole = [replace(first, place=place) for place in range(first.count)]
            if elements == whole:
                found[start] = (first.list, first.count)
            elif elements == whole[::-1]:
                found[start] = (f"{first.list}[::-1]", first.count)
        return found

    def _state_name(self, value: Value) -> str | None:
        text = self._texts.get(value, "")
        if text.startswith('state["'):
            return text.removeprefix('state["').removesuffix('"]')
        return value.name if value.is_state else None

    def _call_text(self, node: Node) -> str:
        callee = self._context.functions[called(node)]
        name = self._context.names[callee.name]
        count = len(node.operands) - len(callee.slots)
        slots = range(count, len(node.operands))
        stars = {position for position, element in expanded(node, callee) if element is not None}
        arguments = [f"{'*' * (i in stars)}{self._operand(node, i)}" for i in range(count)]
        table = self._slot_table(node, slots, f"{name.upper()}_STATE")
        arguments += [table] if table else [self._operand(node, i) for i in slots]
        for static in callee.statics:
            arguments.append(f"{identifier(static)}={self._static(node, static)}")
        return f"{name}({', '.join(arguments)})"

    def _slot_table(self, node: Node, slots: range, hint: str) -> str:
        """All slots of a call in a loop by one table of templates; empty where they are few or not all templates."""
        if self._loop is None:
            return ""
        table = self._slots([self._loop.operands[self._place[node], i] for i in slots], hint)
        return f"*{table}" if table else ""

    def _slots(self, kinds: Sequence[Operand], hint: str = LAYER) -> str:
        """The list of many slots of one layer in a loop; empty for any other operands."""
        slots = [kind for kind in kinds if isinstance(kind, Slot)]
        if len(slots) <= SHORT or len(slots) < len(kinds) or len({slot.shift for slot in slots}) > 1:
            return ""
        return self._context.tables.of_layer([slot.template for slot in slots], _number(slots[0]), hint)

    def _static(self, node: Node, static: str) -> str:
        site = self._site(node, -1)
        if self._loop is None:
            return site.literal(node.attrs[f"static.{static}"])
        place, loop = self._place[node], self._loop
        values = [site.literal(loop.node(t, place).attrs[f"static.{static}"]) for t in range(loop.count)]
        if len(set(values)) == 1:
            return values[0]
        layers = loop.layers or range(loop.count)
        ordered = [v for _, v in sorted(zip(layers, values, strict=True))]
        return f"({', '.join(ordered)})[{python_text(loop.turn)}]"

    def _write_loop(self, loop: Loop) -> None:
        body = {loop.node(0, m): m for m in range(loop.period)}
        self._open_lists(loop)
        self._carry_in(loop)
        layers = loop.layers or range(loop.count)
        statics = any(k.startswith("static.") for n in body for k in n.attrs)
        uses_index = loop.layers is not None or statics or bool(loop.steps)
        self._body.line(f"for {INDEX if uses_index else '_'} in {_range_text(layers)}:")
        kept_after = self._results_after(loop)
        self._pinned.update(kept_after)
        self._loop, self._place = loop, body
        with self._body.indented():
            for m, node in enumerate(body):
                self._write_node(node, loop.start + m)
        self._loop, self._place = None, {}
        self._carry_out(loop, kept_after)

    def _open_lists(self, loop: Loop) -> None:
        """The lists that a loop fills: what is popped from, and what it gathers."""
        position = self._loops.index(loop)
        pushed = [Stacked(position, m, r, False) for m, r in sorted(loop.pushed)]
        pushed += [Stacked(position, m, o, True) for m, o in sorted(loop.pushed_operands)]
        for stacked in pushed:
            node = loop.node(0, stacked.node)
            value = (node.operands if stacked.of_operand else node.results)[stacked.index]
            handed = isinstance(value.type, ListType) and value.type.handed
            self._stacks[stacked] = self._pool.take("saved" if handed else f"{self._base(value)}_stack")
            self._body.line(f"{self._stacks[stacked]} = []")
        for m, r in sorted(loop.gathered):
            values = loop.results(m, r)
            name = self._pool.take(f"{self._base(values[0])}_list")
            self._elements |= {v: Element(name, place, loop.count) for place, v in enumerate(values)}
            self._body.line(f"{name} = []")

    def _base(self, value: Value) -> str:
        return self._preferred.get(value, base_name(value.name))

    def _carry_in(self, loop: Loop) -> None:
        """Give what is carried the name of its initial value, or copy that to a new name where it is still needed."""
        for (m, r), initial in loop.carried().items():
            result = loop.node(0, m).results[r]
            name = self._names.get(initial)
            is_free = initial not in self._pinned and self._only_carried(initial, loop)
            if is_free and name is not None and self._pool.alone(name):
                self._names[result] = name
                if initial in self._inputs:
                    continue
                del self._names[initial]
            else:
                self._names[result] = self._pool.take(self._base(result))
                self._body.line(f"{self._names[result]} = {self._text(initial)}")

    def _only_carried(self, value: Value, loop: Loop) -> bool:
        """Whether a value is read by name only as the initial value of something that the loop carries."""
        kinds = {(id(other.node(t, m)), o): kind for other in self._loops for (m, o), kind in other.operands.items()
                 for t in range(other.count)}  # fmt: skip
        mine = range(loop.start, loop.end)
        # The text of a view from before may stand anywhere.
        earlier = [n for n in self._function.nodes[: loop.start] if value in n.operands and self._live.is_inlined(n)]
        if any(self._live.last_use[node.result] >= loop.start for node in earlier):
            return False
        for index, node in enumerate(self._function.nodes):
            for o, operand in enumerate(node.operands):
                kind = kinds.get((id(node), o))
                is_mine = index in mine and isinstance(kind, Carried) and kind.initial is value
                popped = isinstance(kind, Stacked) or (node, o) in self._popped
                if operand is value and index >= loop.start and not is_mine and not popped:
                    return False
        uses = {kind for (m, o), kind in loop.operands.items() if isinstance(kind, Carried) and kind.initial is value}
        return len(uses) == 1 and value not in self._function.results and value not in self._live.inlined

    def _carried_names(self) -> dict[Value, str]:
        """What a loop carries is named as the param that takes it, from before the loop on."""
        names: dict[Value, str] = {}
        for loop in self._loops:
            for (m, o), kind in loop.operands.items():
                node = loop.node(0, m)
                if isinstance(kind, Carried) and node.op == "call":
                    name = self._param_name(node, o)
                    names[kind.initial] = names[loop.node(0, kind.node).results[kind.result]] = name
        return names

    def _param_name(self, call: Node, operand: int) -> str:
        """What the function names an operand of a call; a list in the place of several params has its own name."""
        value, function = call.operands[operand], self._context.functions[called(call)]
        place = [position for position, _ in expanded(call, function)].index(operand)
        param = function.inputs()[place]
        return base_name(value.name if is_list(value) and not is_list(param) else param.name)

    def _results_after(self, loop: Loop) -> dict[Value, Value]:
        """Results of the first iteration whose name must outlive it → the last iteration's value."""
        carried = loop.carried()
        found = {}
        for m in range(loop.period):
            for r, value in enumerate(loop.node(0, m).results):
                final = loop.node(loop.count - 1, m).results[r]
                used = self._live.last_use[final] >= loop.end and (m, r) not in loop.pushed | loop.gathered
                if (m, r) in carried or used:
                    found[value] = final
        return found

    def _carry_out(self, loop: Loop, kept_after: Mapping[Value, Value]) -> None:
        freed: set[str] = set()
        self._pinned.difference_update(kept_after)
        for value, final in kept_after.items():
            name = self._names.pop(value)
            if self._live.last_use[final] >= loop.end:
                self._names[final] = name
            elif self._pool.release(name):
                freed.add(name)
        outside = [
            v
            for v in list(self._names)
            if loop.start <= self._live.last_use[v] < loop.end and v not in self._inputs and v not in self._pinned
        ]
        freed |= self._release(outside)
        for value in self._body_values(loop) & self._names.keys():
            name = self._names.pop(value)
            if self._pool.release(name) and value not in self._elements:
                freed.add(name)
        self._bury_names(freed, final=self._is_last(loop.end - 1))

    def _body_values(self, loop: Loop) -> set[Value]:
        return {v for m in range(loop.period) for v in loop.node(0, m).results}

    def _is_pushed(self, node: Node, result: int) -> bool:
        return self._loop is not None and (self._place[node], result) in self._loop.pushed | self._loop.gathered

    def _push(self, node: Node, before: bool) -> None:
        """Push what later loops pop: operands `before` the statement of the node, results after it."""
        if self._loop is None:
            return
        place = self._place[node]
        for stacked, name in self._stacks.items():
            if self._loops[stacked.loop] is self._loop and (stacked.node, stacked.of_operand) == (place, before):
                text = self._operand(node, stacked.index) if before else self._text(node.results[stacked.index])
                self._body.line(f"{name}.append({text})")
        for r, value in enumerate(node.results) if not before else ():
            if (place, r) in self._loop.gathered:
                self._body.line(f"{self._elements[value].list}.append({self._names[value]})")

    def _release(self, dead: Sequence[Value]) -> set[str]:
        """Give up the names of dead values; those that end up free and matter to memory."""
        freed = set()
        for value in dead:
            if value in self._inputs or value not in self._names:
                continue
            name = self._names.pop(value)
            if self._pool.release(name) and not is_small(value):
                freed.add(name)
        return freed

    def _bury(self, dead: Sequence[Value], keep: set[str], final: bool) -> None:
        self._bury_names(self._release(dead) - keep, final)

    def _bury_names(self, names: set[str], final: bool) -> None:
        if names and not final:
            self._body.line(f"del {', '.join(sorted(names))}")

    def _is_last(self, index: int) -> bool:
        """Whether nothing but the return follows."""
        return self._loop is None and all(
            n.op == "pack" or self._live.is_inlined(n) for n in self._function.nodes[index + 1 :]
        )

    def _comment(self, node: Node) -> None:
        origin = node.origin
        path = origin.path
        if self._loop is not None:
            place, loop = self._place[node], self._loop
            found = template([loop.node(t, place).origin.path for t in range(loop.count)])
            path = found[0].format("*") if found is not None else path
        if origin == self._origin or not (origin.path or origin.file):
            return
        self._origin = origin
        where = f"{origin.file}:{origin.line}" if origin.file else ""
        self._body.line("# " + "  ".join(part for part in (path, where) if part))

    def _return(self) -> None:
        results = self._function.results
        if self._entry is not None:
            count = len(self._entry.outputs)
            for name, value in zip(self._entry.updates, results[count:], strict=True):
                self._update(name, value)
            texts = [self._text(v) for v in results[:count]]
            if puts_off(self._function, self._context.functions):
                self._body.line("rt.catch_up()")
            self._body.line(
                f"return ({', '.join(texts)},)" if len(texts) == 1 else f"return {', '.join(texts) or '()'}"
            )
            return
        packs = {n.results[0]: n for n in self._function.nodes if n.op == "pack"}
        texts = [
            f"[{', '.join(self._text(o) for o in packs[v].operands)}]" if v in packs else self._text(v) for v in results
        ]
        self._body.line(f"return {_listed(texts)}" if texts else "return None")

    def _update(self, name: str, value: Value) -> None:
        """A state's new value, unless it was made in place."""
        text = self._text(value)
        if text != f'state["{name}"]':
            self._body.line(f'state["{name}"].copy_({text})')


def _listed(names: Sequence[str]) -> str:
    """Names or expressions with commas, in brackets where they are many: those may be broken into lines."""
    text = ", ".join(names)
    return text if len(names) < 12 else f"({text})"


def _number(slot: Slot) -> str:
    """The layer of a slot, where `i` is that of the iteration."""
    return f"i {'-' if slot.shift < 0 else '+'} {abs(slot.shift)}" if slot.shift else "i"


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    """The components that all paths begin with."""
    return [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]


def _type_text(value: Value) -> str:
    if not isinstance(value.type, TensorType):
        return str(value.type)
    return f"{value.type.dtype.text}[{', '.join(map(python_text, value.type.shape))}]"


def _range_text(layers: range) -> str:
    step = abs(layers.step)
    low, high = min(layers), max(layers) + step
    text = f"range({low}, {high}, {step})" if step > 1 else f"range({low}, {high})" if low else f"range({high})"
    return text if layers.step > 0 else f"reversed({text})"


def _named(function: Function) -> set[str]:
    """The named dims that attributes of a function speak of."""

    def names(value: object) -> set[str]:
        if isinstance(value, tuple):
            return set().union(*map(names, value))
        return set(names_in(value)) if isinstance(value, sympy.Expr) else set()

    return set().union(*(names(tuple(node.attrs.values())) for node in function.nodes))
