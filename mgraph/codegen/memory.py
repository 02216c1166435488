"""Predicts the memory of a rank, in bytes: what the state takes, and what each entry holds at its peak besides.

An entry's functions are walked as they are emitted: a value dies at its last use, a view or a result in place takes no
memory of its own, saved tensors travel in lists that the backward empties (`prepare`, `liveness`). While a node runs,
its operands and its results are there, and what its op declares to need besides (`workspace`); what a kernel or a
library needs within itself is not counted, nor what an allocator keeps. Extents are those of one rank: named dims as
given, others divided as placements say, rounded up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mgraph.codegen.bundles import ListType, expanded, is_list, picked
from mgraph.codegen.liveness import Liveness, may_alias, written_operands
from mgraph.codegen.loops import carried_until, find_loops, loop_places
from mgraph.codegen.prepare import called, prepare
from mgraph.codegen.torch_provider import absorbable, overwritable
from mgraph.ir.dims import evaluate
from mgraph.ir.graph import Function, Module, Node, Phase, StateKind, Value
from mgraph.ir.local import Division
from mgraph.ir.opdef import is_known_op, op_def
from mgraph.ir.types import Shard, TensorType, Type
from mgraph.passes.cache_groups import shared_bytes

_STRIDED = ("transpose", "permute", "t", "mT", "expand", "expand_as", "slice", "select", "split", "chunk", "unbind")
"""Views after which a reshape makes a copy."""


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Memory that one node of a function made: `bytes` for its result `value`."""

    function: str
    value: Value
    node: Node | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a function holds at once beyond what its caller has: where, and what makes it up."""

    bytes: int = 0
    function: str = ""
    node: Node | None = None
    alive: tuple[Storage, ...] = ()


Held = tuple["Storage | int", ...]
"""What a value refers to: storages, or the number of an input of the function that has them."""


KINDS = ("inputs", "activations", "gradients", "optimizer", "brought", "workspace")
"""What a storage is for: made by the forward, the backward or the update; brought by collectives or from the host."""


@dataclass(frozen=True, slots=True)
class Point:
    """What is there while a node runs, beside the state: bytes by kind, in the order of KINDS."""

    function: str
    node: Node
    bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.bytes)


@dataclass(frozen=True, slots=True)
class Profile:
    """A function's peak, what each of its results refers to, of results that are lists each element, and what is there
    over its nodes and those of what it calls."""

    peak: Peak
    results: tuple[Held, ...]
    lists: Mapping[int, tuple[Held, ...]]
    points: tuple[Point, ...] = ()

    @property
    def kept(self) -> int:
        """Bytes of its own that outlive a call."""
        return sum(h.bytes for h in dict.fromkeys(h for held in self.results for h in held) if isinstance(h, Storage))


class RankMemory:
    """The memory of one rank of a module whose updates are in place.

    `extents` are those of the named dims, `sizes` those of the basic mesh axes. Ops that are run `by_kernels` need no
    memory besides.
    """

    def __init__(
        self,
        module: Module,
        extents: Mapping[str, int],
        sizes: Mapping[str, int],
        by_kernels: frozenset[str] = frozenset(),
    ) -> None:
        self.module, self._extents, self._by_kernels = module, extents, by_kernels
        self._functions = prepare(module)
        self._division = Division.of(module, sizes)
        self._profiles: dict[tuple[object, ...], Profile] = {}
        self._bytes: dict[Type, int] = {}

    def state(self) -> dict[StateKind, int]:
        """Bytes of the state on the device by kind; of caches that share memory once."""
        found: Counter[StateKind] = Counter()
        for state in self.module.state.values():
            found[state.kind] += 0 if state.host else self.bytes(state.type)
        if found[StateKind.CACHE]:
            caches = {s.name: self.bytes(s.type) for s in self.module.state.values() if s.kind is StateKind.CACHE}
            found[StateKind.CACHE] = shared_bytes(self.module, caches)
        return dict(found)

    def host(self) -> dict[str, int]:
        """Bytes of the host's memory: of the state there, and of what an entry puts there at most."""
        state = sum(self.bytes(s.type) for s in self.module.state.values() if s.host)
        put = [
            sum(self.bytes(v.type) for n in self.module.functions[e.function].nodes for v in n.operands
                if n.op == "to_host_start")
            for e in self.module.entries.values()
        ]  # fmt: skip
        return {"state": state, "activations": max(put, default=0)}

    def bytes(self, type_: Type) -> int:
        """Bytes of a rank's part of a tensor."""
        if type_ not in self._bytes:
            assert isinstance(type_, TensorType), f"{type_} is no tensor"
            count = math.prod(self._local_shape(type_))
            self._bytes[type_] = -(-count * type_.dtype.bits // 8)
        return self._bytes[type_]

    def workspace(self, node: Node) -> TensorType | None:
        """The tensor that a node needs for itself while it runs."""
        if "." in node.op or not is_known_op(node.op) or node.op in self._by_kernels:
            return None
        needs = op_def(node.op).workspace
        return None if needs is None else needs(node, [self._local_shape(v.tensor) for v in node.operands])

    def _local_shape(self, type_: TensorType) -> list[int]:
        shape: list[int] = [evaluate(extent, self._extents) for extent in type_.shape]
        for axis, placed in type_.placement:
            if isinstance(placed, Shard) and self._division.divides(type_.shape[placed.dim], axis):
                shape[placed.dim] = -(-shape[placed.dim] // self._division.sizes[axis])
        return shape

    def entry(self, name: str) -> Peak:
        """The peak of an entry, its inputs included."""
        function = self._functions[self.module.entries[name].function]
        inputs = tuple(Storage(function.name, p, None, self.bytes(p.type)) for p in function.params)
        peak = self._profile(function, {}).peak
        return replace(peak, bytes=peak.bytes + sum(s.bytes for s in inputs), alive=(*inputs, *peak.alive))

    def timeline(self, name: str) -> tuple[Point, ...]:
        """What is there while an entry runs, node by node, those of called functions too; its inputs included."""
        function = self._functions[self.module.entries[name].function]
        inputs = sum(self.bytes(p.type) for p in function.params)
        points = self._profile(function, {}).points
        return tuple(replace(p, bytes=(p.bytes[0] + inputs, *p.bytes[1:])) for p in points)

    def total(self) -> int:
        """Bytes of the state on the device, and of the highest peak of an entry."""
        return sum(self.state().values()) + max((self.entry(name).bytes for name in self.module.entries), default=0)

    def reserved(self) -> int:
        """Bytes that a rank needs of its device: CUDA graphs keep the memory of the highest of their entries, in one
        pool, so that what is launched op by op has its own beside that. An entry in pieces counts as both."""
        entries = self.module.entries.items()
        kept = [self.entry(name).bytes for name, entry in entries if entry.captured or entry.pieces]
        beside = [self.entry(name).bytes for name, entry in entries if not entry.captured]
        return sum(self.state().values()) + max(kept, default=0) + max(beside, default=0)

    def functions(self) -> dict[str, Profile]:
        """The profile of each function that the entries asked for so far call, by name: callers before callees."""
        entries = {entry.function for entry in self.module.entries.values()}
        return {str(key[0]): p for key, p in reversed(self._profiles.items()) if key[0] not in entries}

    def _profile(self, function: Function, lists: Mapping[Value, tuple[Held, ...]]) -> Profile:
        """`lists` are the elements of lists among the params: storages that die here."""
        numbers: dict[Storage, int] = {}
        shapes = tuple(
            tuple((numbers.setdefault(h, len(numbers)), h.bytes) for h in held if isinstance(h, Storage))
            for elements in lists.values()
            for held in elements
        )
        key = (function.name, shapes)
        if key not in self._profiles:
            self._profiles[key] = _Walk(self, function, dict(lists)).profile()
        return self._profiles[key]

    def call(self, node: Node, lists: Mapping[int, tuple[Held, ...]]) -> Profile:
        """The profile of a call's function; `lists` are the elements of its operands that are lists."""
        function = self.function_of(node)
        inputs = function.inputs()
        places = [position for position, _ in expanded(node, function)]
        return self._profile(function, {inputs[places.index(p)]: elements for p, elements in lists.items()})

    def function_of(self, node: Node) -> Function:
        """The function that a call runs, as it is emitted."""
        return self._functions[called(node)]


@dataclass(slots=True)
class _Walk:
    """One function, node by node."""

    memory: RankMemory
    function: Function
    lists: dict[Value, tuple[Held, ...]]
    held: dict[Value, Held] = field(default_factory=dict)
    strided: set[Value] = field(default_factory=set)
    columns: set[Value] = field(default_factory=set)
    """Of those, what is some columns of a tensor without gaps."""
    users: Counter[Storage] = field(default_factory=Counter)
    live: int = 0
    peak: Peak = Peak()
    kinds: Counter[str] = field(default_factory=Counter)
    points: list[Point] = field(default_factory=list)

    def profile(self) -> Profile:
        function = self.function
        loops = find_loops(function)
        liveness = Liveness(function, loop_places(loops), absorbable, carried_until(loops))
        dying: dict[int, list[Value]] = {}
        for value, index in liveness.last_use.items():
            dying.setdefault(index, []).append(value)
        for index, value in enumerate(function.inputs()):
            elements = self.lists.get(value)
            self._hold(value, (index,) if elements is None else _storages(elements))
        for index, node in enumerate(function.nodes):
            self._step(node, index, liveness)
            for value in dying.get(index, ()):
                self._drop(value)
        results = tuple(self.held.get(v, ()) for v in function.results)
        lists = {i: self.lists[v] for i, v in enumerate(function.results) if v in self.lists}
        return Profile(self.peak, results, lists, tuple(self.points))

    def _step(self, node: Node, index: int, liveness: Liveness) -> None:
        if node.op == "call":
            self._call(node)
        elif node.op == "pack":
            self.lists[node.result] = tuple(self.held[v] for v in node.operands)
            self._hold(node.result, tuple(dict.fromkeys(h for held in self.lists[node.result] for h in held)))
        elif node.op == "pick":
            self.lists[node.result] = tuple(self.lists[node.operands[0]][place] for place in picked(node))
            self._hold(node.result, _storages(self.lists[node.result]))
        elif node.op == "unpack":
            self._unpack(node)
        elif node.op.endswith("_start"):
            self._start(node, liveness)
        elif node.op == "wait":
            self._wait(node)
        else:
            absorbed = liveness.is_inlined(node) and not may_alias(node.op)
            taken = _overwritten(node, index, liveness)
            for position, value in enumerate(node.results):
                source = None if absorbed else self._source(node, position, taken)
                if absorbed:
                    self._hold(value, ())
                elif source is not None:
                    self._hold(value, self.held.get(source, ()))
                    self._mark(node, value, source)
                else:
                    self._hold(value, (self._storage(value, node),))
            self._note(node)

    def _source(self, node: Node, position: int, taken: int | None) -> Value | None:
        """The operand whose memory a result has; None where it has its own."""
        if position < written_operands(node):
            return node.operands[position]
        result = node.results[position]
        if taken is not None and result.tensor.shape == node.operands[taken].tensor.shape:
            return node.operands[taken]
        if not may_alias(node.op) or not node.operands:
            return None
        operand = node.operands[0]
        if node.op in ("all_gather", "reduce_scatter"):
            operand = node.operands[position]
            sizes = (self.memory.bytes(v.type) for v in (operand, result))
            return operand if len(set(sizes)) == 1 else None  # an axis of one rank hands on what it gets
        if node.op in ("cast", "aten.type_as.default", "aten.to.dtype"):
            return operand if operand.tensor.dtype is result.tensor.dtype else None
        copies = node.op in ("reshape", "aten.reshape.default", "aten.contiguous.default") and operand in self.strided
        copies = copies and not (operand in self.columns and _splits_columns(node))
        return None if copies or "einsum" in node.op else operand

    def _mark(self, node: Node, value: Value, source: Value) -> None:
        name = node.op.split(".")[1] if "." in node.op else node.op
        whole = name in ("slice", "select", "split", "chunk", "unbind") and not node.attrs.get("dim", 0)
        last = len(source.tensor.shape) - 1
        if name == "slice" and last and node.attrs.get("dim", 0) in (-1, last) and source not in self.strided:
            self.columns.add(value)
        if (name in _STRIDED and not whole) or source in self.strided:
            self.strided.add(value)

    def _given(self, node: Node) -> list[Held]:
        """What each input of the function that a call runs refers to."""
        places = expanded(node, self.memory.function_of(node))
        operands = [(node.operands[position], element) for position, element in places]
        return [self.held.get(v, ()) if element is None else self.lists[v][element] for v, element in operands]

    def _storage(self, value: Value, node: Node, type_: Type | None = None) -> Storage:
        return Storage(self.function.name, value, node, self.memory.bytes(type_ or value.type))

    def _unpack(self, node: Node) -> None:
        """A list's tensors: each is its own from here on, and dies by itself."""
        for value, held in zip(node.results, self.lists[node.operands[0]], strict=True):
            self._hold(value, tuple(h for h in held if isinstance(h, Storage)))
        self._note(node)
        self._drop(node.operands[0])

    def _start(self, node: Node, liveness: Liveness) -> None:
        """A handle: reductions are in place; else it holds what is received, and of several tensors a flat copy. What
        goes to the host is held until it is there, and takes no memory afterwards."""
        handle = node.result
        if node.op in ("to_host_start", "store_start"):
            count = len(handle.type.types)  # type: ignore[union-attr]
            sources = node.operands[count:] if node.op == "store_start" else node.operands
            self.lists[handle] = ((),) * count
            self._hold(handle, tuple(dict.fromkeys(h for v in sources for h in self.held.get(v, ()))))
            return
        if handle in liveness.under_way:
            self.lists[handle] = tuple(self.held.get(v, ()) for v in node.operands)
        else:
            types = handle.type.types  # type: ignore[union-attr]
            self.lists[handle] = tuple((self._storage(handle, node, type_),) for type_ in types)
        sent = [self.memory.bytes(t) for v in node.operands for t in _types(v)]
        copied = handle not in liveness.under_way and len(sent) > 1 and node.op != "to_device_start"
        copy = (Storage(self.function.name, handle, node, sum(sent)),) if copied else ()
        self._hold(handle, (*_storages(self.lists[handle]), *copy))
        self._note(node)

    def _wait(self, node: Node) -> None:
        elements = self.lists[node.operands[0]]
        if is_list(node.results[0]):
            self.lists[node.result] = elements
            self._hold(node.result, _storages(elements))
        else:
            for value, held in zip(node.results, elements, strict=True):
                self._hold(value, held)
        self._note(node)

    def _call(self, node: Node) -> None:
        lists = {i: self.lists[v] for i, v in enumerate(node.operands) if _is_handed(v)}
        profile = self.memory.call(node, lists)
        given = self._given(node)
        # What only a list has is the callee's from here on: it frees the tensors one by one.
        handed = {h for elements in lists.values() for h in _storages(elements) if self.users[h] == 1}
        own = tuple(h for h in self.users if h not in handed)
        total = sum(h.bytes for h in own) + profile.peak.bytes
        if total > self.peak.bytes:
            self.peak = Peak(total, profile.peak.function, profile.peak.node, (*own, *profile.peak.alive))
        around = dict.fromkeys(KINDS, 0)
        for h in own:
            around[_kind(h)] += h.bytes
        for point in profile.points:
            there = tuple(a + b for a, b in zip(around.values(), point.bytes, strict=True))
            self.points.append(replace(point, bytes=there))
        made: dict[Storage, Storage] = {}

        def here(refers: Held) -> Held:
            """The same for the caller: each call makes its own storages."""
            found: dict[Storage | int, None] = {}
            for h in refers:
                if isinstance(h, Storage):
                    found[made.setdefault(h, replace(h))] = None
                else:
                    found.update(dict.fromkeys(given[h]))
            return tuple(found)

        for position, (value, refers) in enumerate(zip(node.results, profile.results, strict=True)):
            self._hold(value, here(refers))
            if position in profile.lists:
                self.lists[value] = tuple(map(here, profile.lists[position]))

    def _hold(self, value: Value, refers: Held) -> None:
        self.held[value] = refers
        for h in refers:
            if isinstance(h, Storage):
                if not self.users[h]:
                    self.live += h.bytes
                    self.kinds[_kind(h)] += h.bytes
                self.users[h] += 1

    def _drop(self, value: Value) -> None:
        if value in self.function.results:
            return
        for h in self.held.pop(value, ()):
            if isinstance(h, Storage):
                self.users[h] -= 1
                if not self.users[h]:
                    self.live -= h.bytes
                    self.kinds[_kind(h)] -= h.bytes
                    del self.users[h]

    def _note(self, node: Node) -> None:
        """The node runs: operands and results are there, and what its op says that it needs for itself."""
        needed = self.memory.workspace(node)
        own = () if needed is None else (self._storage(Value("workspace", needed), node),)
        needs = sum(s.bytes for s in own)
        live = self.live + needs
        held = tuple(self.kinds[kind] for kind in KINDS[:-1])
        self.points.append(Point(self.function.name, node, (*held, needs)))
        if live > self.peak.bytes:
            self.peak = Peak(live, self.function.name, node, (*self.users, *own))


def _kind(storage: Storage) -> str:
    """What a storage is for."""
    node = storage.node
    if node is None:
        return "inputs"
    if node.op in ("wait", "all_gather", "reduce_scatter") or node.op.endswith("_start"):
        return "brought"
    return {Phase.BACKWARD: "gradients", Phase.OPTIMIZER: "optimizer"}.get(node.phase, "activations")


def _storages(elements: Iterable[Held]) -> tuple[Storage, ...]:
    """The storages of a list, each once."""
    return tuple(dict.fromkeys(h for held in elements for h in held if isinstance(h, Storage)))


def _is_handed(value: Value) -> bool:
    return isinstance(value.type, ListType) and value.type.handed


def _types(value: Value) -> tuple[TensorType, ...]:
    """The types of a list, or of one tensor."""
    return value.type.types if isinstance(value.type, ListType) else (value.tensor,)


def _splits_columns(node: Node) -> bool:
    """Whether a reshape leaves all dims but the last as they are."""
    rows = node.operands[0].tensor.shape[:-1]
    return node.op != "aten.contiguous.default" and node.result.tensor.shape[: len(rows)] == rows


def _overwritten(node: Node, index: int, liveness: Liveness) -> int | None:
    """The operand whose memory the emitted node takes for its result."""
    for position in overwritable(node):
        value = node.operands[position]
        others = {liveness.group(v) for i, v in enumerate(node.operands) if i != position}
        if (
            liveness.group(value) not in others
            and liveness.last_use[value] == index
            and liveness.can_overwrite(value, index)
        ):
            return position
    return None
