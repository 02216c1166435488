"""offload: what the backward needs, and the optimizer's state, wait in the memory of the host.

Activations. Before:

    %h1, %a0 = call @layer.fwd(%h0)
    %h2, %a1 = call @layer.fwd(%h1)
    …
    %d1 = call @layer.bwd(%a1, %d2)
    %d0 = call @layer.bwd(%a0, %d1)

After, what the last layer saved stays, since it is needed at once:

    %h1, %a0 = call @layer.fwd(%h0)
    %p = to_host_start(%a0)               while the next layer runs
    %h2, %a1 = call @layer.fwd(%h1)
    %a0_host = wait(%p)                   from here on %a0 takes no memory of the device
    …
    %q = to_device_start(%a0_host)        a layer ahead
    %d1 = call @layer.bwd(%a1, %d2)
    %a0_back = wait(%q)
    %d0 = call @layer.bwd(%a0_back, %d1)

The optimizer. Masters and moments become state of the host (`host` in the text), and `adamw` is cut into nodes of a
layer's parameters, or of `chunk` bytes of that state. Each is fetched while the one before is updated, and stored while
the next one is:

    %m1, … = wait(%q1)
    %q2 = to_device_start(@layers.2.w.m, …)
    %new_m1, … = adamw(…, %m1, …)
    … = wait(%s0)
    %s1 = store_start(@layers.1.w.m, …, %new_m1, …)

So there are at most three such parts on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.aten import overload
from mgraph.ir.builder import rebuild
from mgraph.ir.dims import evaluate
from mgraph.ir.graph import Function, Module, Node, Phase, StateKind, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.ops.cost import value_bytes
from mgraph.ir.types import TensorType
from mgraph.passes.activations import extents
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.calls import callee
from mgraph.passes.differentiation import VIEWS
from mgraph.passes.recompute import size_text

ENTRIES = ("microbatch", "last")
"""Entries that have a forward and a backward."""
_SMALL = 64
"""What takes less than this part of what a call of a layer saves stays where it is: a copy costs a launch."""
_MOVED = (StateKind.MASTER, StateKind.MOMENT)


@dataclass(frozen=True)
class Offload(Pass):
    """Move saved activations, or the optimizer's state, to the memory of the host; sizes are told by microbatches of
    `batch` sequences of `seq` tokens. Of what a call of a layer saves at most `limit` bytes move, the largest tensors
    first (0: all), or exactly `values` (`layer.fwd:glu`; the names of others in the entry)."""

    activations: bool = False
    optimizer: bool = False
    batch: int = 8
    seq: int = 2048
    limit: int = 0
    chunk: int = 2**30
    values: tuple[str, ...] = ()

    name: ClassVar[str] = "offload"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"microbatch", "finish"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite the entries. Raises PassError where there is no such state."""
        sizes = extents(module, {"B": self.batch, "S": self.seq})
        if self.activations:
            for name in _functions(module):
                rewritten = _Activations(self, module, module.functions[name], sizes, report).rewritten()
                module = module.with_function(rewritten)
        if self.optimizer:
            updates = [f for f in module.functions.values() if any(n.op == "adamw" for n in f.nodes)]
            moved: set[str] = set()
            for function in updates:
                streamed = _Optimizer(module, function, sizes, self.chunk, self.name)
                module = module.with_function(streamed.rewritten())
                moved |= streamed.moved
                report.match(function.name, function.nodes[0].id, f"the update in {streamed.parts} parts")
            if not moved:
                raise PassError("no state of the optimizer can be moved to the host", hint="leave out --offload")
            states = {n: replace(s, host=True) if n in moved else s for n, s in module.state.items()}
            module = replace(module, state=states)
            report.count("states_on_host", len(moved))
        return module

    def on_twin(self, real: Module) -> Pass:
        """The pass that moves on the twin what this one moves on the real module."""
        if not self.activations:
            return self
        sizes = extents(real, {"B": self.batch, "S": self.seq})
        chosen: set[str] = set()
        for name in _functions(real):
            chosen |= _Activations(self, real, real.functions[name], sizes, Report()).chosen()
        return replace(self, values=tuple(sorted(chosen)))


def _functions(module: Module) -> list[str]:
    """The functions of the entries that have a forward and a backward."""
    return sorted({module.entries[name].function for name in ENTRIES if name in module.entries})


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Tensors that travel together, at the first forward call from `ready` on: they are there before it, and nothing of
    the forward reads them after it. The backward call at `taker` does."""

    values: tuple[Value, ...]
    ready: int
    taker: int


class _Activations:
    """An entry function whose saved tensors travel."""

    def __init__(
        self, options: Offload, module: Module, function: Function, sizes: Mapping[str, int], report: Report
    ) -> None:
        self.options, self.module, self.function, self.sizes, self.report = options, module, function, sizes, report
        self.producers, self.users = function.producers(), function.users()
        self.place = {node: index for index, node in enumerate(function.nodes)}
        self._shared: dict[str, frozenset[int]] = {}

    def rewritten(self) -> Function:
        """The function with copies around its calls."""
        nodes, takers = self.function.nodes, self._calls(Phase.BACKWARD)
        forward, parcels = self._calls(Phase.FORWARD), self._all_parcels()
        if not parcels:
            self.report.near_miss(
                self.function.name, nodes[0].id, "activations", "saved", "no layer but the last saves anything alone"
            )
            return self.function
        send: dict[int, list[_Parcel]] = {}
        fetch: dict[int, list[_Parcel]] = {}
        for parcel in parcels:
            send.setdefault(next(i for i in forward if i >= parcel.ready), []).append(parcel)
            fetch.setdefault(takers[takers.index(parcel.taker) - 1], []).append(parcel)
        self.builder = rebuild(self.function, self.options.name)
        self.under_way: dict[_Parcel, tuple[Value, ...]] = {}
        for index, node in enumerate(nodes):
            back = [p for p in parcels if p.taker == index]
            for parcel in back:
                self._wait(parcel, node)
            for parcel in fetch.get(index, ()):
                self._start("to_device_start", parcel, node)
            for parcel in send.get(index, ()):
                self._start("to_host_start", parcel, node)
            self._kept(node, back)
            for parcel in send.get(index, ()):
                self._wait(parcel, node)
        total = sum(self._bytes(v) for p in parcels for v in p.values)
        count = len(takers) - 1
        saved = f"{size_text(total)} of what {count} call{'s' * (count != 1)} saved"
        self.report.match(self.function.name, nodes[takers[-1]].id, saved)
        self.report.count("bytes_on_host", total)
        return self.builder.build(self.function.results)

    def chosen(self) -> set[str]:
        """What moves, by the names of `values`."""
        return {self._key(v) for p in self._all_parcels() for v in p.values}

    def _calls(self, phase: Phase) -> list[int]:
        """The places of the calls of a phase."""
        return [i for i, n in enumerate(self.function.nodes) if n.op == "call" and n.phase is phase]

    def _all_parcels(self) -> list[_Parcel]:
        last = max(self._calls(Phase.FORWARD), default=-1)
        return [p for t in self._calls(Phase.BACKWARD)[1:] for p in self._parcels(t) if p.ready <= last]

    def _key(self, value: Value) -> str:
        """What a value is called in `values`."""
        producer = self.producers[value]
        if producer.op != "call":
            return value.name
        function = self.module.functions[callee(producer)]
        return f"{function.name}:{function.results[producer.results.index(value)].name}"

    def _start(self, op: str, parcel: _Parcel, node: Node) -> None:
        values = parcel.values if op == "to_host_start" else self.under_way[parcel]
        with self.builder.at(node):
            names = [f"{v.name}_pending" for v in parcel.values]
            types = op_def(op).result_types([v.tensor for v in values], {})
            self.under_way[parcel] = self.builder.emit(op, values, types=types, names=names)

    def _wait(self, parcel: _Parcel, node: Node) -> None:
        ending = "host" if node.phase is Phase.FORWARD else "back"
        with self.builder.at(node):
            types = [v.tensor for v in parcel.values]
            names = [f"{v.name}_{ending}" for v in parcel.values]
            self.under_way[parcel] = self.builder.emit("wait", self.under_way[parcel], types=types, names=names)

    def _kept(self, node: Node, back: Sequence[_Parcel]) -> None:
        """The node, reading what came back."""
        found = {v: new for p in back for v, new in zip(p.values, self.under_way[p], strict=True)}
        self.builder.nodes.append(
            node.with_values(tuple(found.get(v, v) for v in node.operands), node.results) if found else node
        )

    def _parcels(self, taker: int) -> Iterator[_Parcel]:
        """What the call at `taker` alone reads of the forward, by the node that made it."""
        node = self.function.nodes[taker]
        by_producer: dict[Node, list[Value]] = {}
        for value in self._within([v for v in dict.fromkeys(node.operands) if self._travels(v, node)]):
            by_producer.setdefault(self.producers[value], []).append(value)
        for producer, values in by_producer.items():
            readers = [self.place[n] for v in values for n in self.users[v] if n is not node]
            yield _Parcel(tuple(values), max([self.place[producer] + 1, *readers]), taker)

    def _within(self, values: Sequence[Value]) -> list[Value]:
        """Those of the values that one call saves which move."""
        if self.options.values:
            return [v for v in values if self._key(v) in self.options.values]
        least = sum(map(self._bytes, values)) // _SMALL
        taken, left = set(), self.options.limit or sum(map(self._bytes, values))
        for value in sorted(values, key=self._bytes, reverse=True):
            if least < self._bytes(value) <= left:
                taken.add(value)
                left -= self._bytes(value)
        return [v for v in values if v in taken]

    def _travels(self, value: Value, taker: Node) -> bool:
        producer = self.producers.get(value)
        if producer is None or producer.phase is not Phase.FORWARD or not isinstance(value.type, TensorType):
            return False
        if value in self.function.results or _may_view(producer.op):
            return False
        readers = self.users[value]
        if any(_may_view(n.op) for n in readers) or list(taker.operands).count(value) != 1:
            return False
        if any(n.phase is not Phase.FORWARD for n in readers if n is not taker):
            return False
        return producer.op != "call" or producer.results.index(value) not in self._sharing(callee(producer))

    def _sharing(self, name: str) -> frozenset[int]:
        """The results of a function that may be views of what others have, or of a part of something."""
        if name not in self._shared:
            function = self.module.functions[name]
            roots: dict[Value, Value] = {}
            for node in function.nodes:
                if _may_view(node.op) and node.operands:
                    roots |= dict.fromkeys(node.results, roots.get(node.operands[0], node.operands[0]))
            of = [roots.get(v, v) for v in function.results]
            made = {v for node in function.nodes for v in node.results if node.op != "call"}
            self._shared[name] = frozenset(
                i
                for i, (value, root) in enumerate(zip(function.results, of, strict=True))
                if of.count(root) > 1
                or (value not in made and root is value)
                or root not in made
                or self._bytes(root) != self._bytes(value)
            )
        return self._shared[name]

    def _bytes(self, value: Value) -> int:
        return int(evaluate(value_bytes(value), self.sizes))


class _Optimizer:
    """A function whose updates of parameters are cut into parts, with their state fetched from the host and stored."""

    def __init__(self, module: Module, function: Function, sizes: Mapping[str, int], chunk: int, made_by: str) -> None:
        self.module, self.function, self.sizes, self.chunk = module, function, sizes, chunk
        self.made_by = made_by
        self.moved: set[str] = set()
        self.parts = 0

    def rewritten(self) -> Function:
        """The function with its `adamw` nodes in parts."""
        self.builder = rebuild(self.function, self.made_by)
        for node in self.function.nodes:
            if node.op == "adamw":
                with self.builder.at(node):
                    self._stream(node)
            else:
                self.builder.keep(node)
        return self.builder.build(self.function.results)

    def _stream(self, node: Node) -> None:
        attrs = op_def("adamw").complete(node.attrs)
        count = attrs["n"]
        lists = [node.operands[i * count : (i + 1) * count] for i in range(5 if attrs["masters"] else 4)]
        results = [node.results[i * count : (i + 1) * count] for i in range(len(lists) - 1)]
        away = [i for i, values in enumerate(lists) if all(map(self._can_move, values))]
        if not away:
            self.builder.keep(node)
            return
        self.moved |= {v.name for i in away for v in lists[i]}
        parts = list(self._cut([[values[j] for i, values in enumerate(lists) if i in away] for j in range(count)]))
        self.parts += len(parts)
        pending = self._fetch(lists, away, parts[0])
        stored: tuple[tuple[Value, ...], tuple[Value, ...]] | None = None
        for number, places in enumerate(parts):
            operands = {i: [self.builder.value(values[j]) for j in places] for i, values in enumerate(lists)}
            operands |= self._waited(pending, away, len(places))
            ahead = self._fetch(lists, away, parts[number + 1]) if number + 1 < len(parts) else ()
            new = self._update(node, attrs, operands, places)
            for i, values in enumerate(results):
                if i not in away:
                    for j, value in zip(places, new[i], strict=True):
                        self.builder.replace(values[j], value)
            states = tuple(lists[i][j] for i in away for j in places)
            made = tuple(v for i in away for v in new[i])
            names = [f"{v.name.replace('.', '_')}_stored" for v in states]
            types = op_def("store_start").result_types([v.tensor for v in (*states, *made)], {})
            if stored is not None:
                self._end(*stored)
            begun = self.builder.emit("store_start", (*states, *made), types=types, names=names)
            stored, pending = (begun, tuple(results[i][j] for i in away for j in places)), ahead
        if stored is not None:
            self._end(*stored)

    def _can_move(self, value: Value) -> bool:
        return value.is_state and self.module.state[value.name].kind in _MOVED

    def _bytes(self, value: Value) -> int:
        return int(evaluate(value_bytes(value), self.sizes))

    def _cut(self, states: Sequence[Sequence[Value]]) -> Iterator[list[int]]:
        """The places of each part: the parameters of a layer, of at most `chunk` bytes of state where there are two."""
        places: list[int] = []
        total, before = 0, ""
        for place, values in enumerate(states):
            layer = _layer(values[0].name) if values else ""
            size = sum(self._bytes(v) for v in values)
            if places and (layer != before or total + size > self.chunk):
                yield places
                places, total = [], 0
            places.append(place)
            total, before = total + size, layer
        yield places

    def _fetch(self, lists: Sequence[Sequence[Value]], away: Sequence[int], places: Sequence[int]) -> tuple[Value, ...]:
        states = [lists[i][j] for i in away for j in places]
        types = op_def("to_device_start").result_types([v.tensor for v in states], {})
        names = [f"{v.name.rpartition('.')[2]}_pending" for v in states]
        return self.builder.emit("to_device_start", states, types=types, names=names)

    def _waited(self, pending: Sequence[Value], away: Sequence[int], count: int) -> dict[int, list[Value]]:
        types = [v.type.value for v in pending]  # type: ignore[union-attr]
        names = [v.name.partition("_pending")[0] for v in pending]  # m, v, master: as short as step.py wants them
        here = self.builder.emit("wait", pending, types=types, names=names)
        return {i: list(here[k * count : (k + 1) * count]) for k, i in enumerate(away)}

    def _update(
        self, node: Node, attrs: Mapping[str, object], operands: Mapping[int, Sequence[Value]], places: Sequence[int]
    ) -> list[tuple[Value, ...]]:
        """The update of some parameters: the new values of all lists but the gradients."""
        per_place = {k: tuple(attrs[k][j] for j in places) for k in ("weight_decays", "rates") if attrs[k]}  # type: ignore[index]
        given = [v for i in sorted(operands) for v in operands[i]]
        written = [v for i in sorted(operands)[:-1] for v in operands[i]]
        made = self.builder.emit(
            "adamw",
            (*given, *node.operands[-4:]),
            {**node.attrs, **per_place, "n": len(places)},
            types=[v.type for v in written],
            names=[f"new_{v.name.replace('.', '_')}" for v in written],
        )
        return [made[i * len(places) : (i + 1) * len(places)] for i in range(len(operands) - 1)]

    def _end(self, begun: Sequence[Value], results: Sequence[Value]) -> None:
        """End a store: its states have their new values, which were those of the results."""
        types = [v.tensor for v in results]
        ended = self.builder.emit("wait", begun, types=types, names=[f"{v.name}_there" for v in results])
        for old, new in zip(results, ended, strict=True):
            self.builder.replace(old, new)


def _layer(name: str) -> str:
    """What comes up to the first number in the name of a state: `layers.3` of `layers.3.attn.q.weight.m`."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return name.rpartition(".")[0] if number is None else ".".join(parts[: number + 1])


def _may_view(op: str) -> bool:
    """Whether the first result of an op may be a view of its first operand."""
    if op in VIEWS or op in ("cast", "reshape", "all_gather", "reduce_scatter", "part_of", "wait"):
        return True
    return "." in op and any(result.alias_info is not None for result in overload(op)._schema.returns)
