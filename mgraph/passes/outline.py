"""Turn repeated layers into one function called many times.

    func @forward(%x: f32[B, 64]) {                            func @layer(%x: f32[B, 64]; %w: f32[64, 64]) {
      %y = aten.linear.default(%x, @layers.0.w)                  %y: f32[B, 64] = aten.linear.default(%x, %w)
             at "layers.0"                                              at "layers.*"
      %z = aten.relu.default(%y) at "layers.0"          ==>      %z: f32[B, 64] = aten.relu.default(%y)
      %y_1 = aten.linear.default(%z, @layers.1.w)                return %z
             at "layers.1"                                     }
      %z_1 = aten.relu.default(%y_1) at "layers.1"             func @forward(%x: f32[B, 64]) {
      return %z_1                                                %z = call @layer(%x; @layers.0.w) at "layers.0"
    }                                                            %z_1 = call @layer(%z; @layers.1.w) at "layers.1"
                                                                 return %z_1 }

Nodes are grouped by the first `<list>.<index>` of their module path. A group becomes a *segment*; where values leave it
and come back (a layer applied twice), it becomes several. Segments with the same structure and the same shared
arguments become one function. Structure is: ops, how values flow, types, attributes, module paths relative to the
layer, and names of states relative to the layer. A *shared* argument is one that several segments of the list read and
that no segment of the list makes (rotary tables), or that is made from integers alone, constants or inputs (a mask):
layers that read different ones stay different functions, so that what is known of the argument holds for the whole
function. Numbers that differ are lifted to statics of the call. What is read outside of a segment becomes a result.
Lists within layers are outlined in turn.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Node, Origin, Static, Value
from mgraph.passes.base import Pass, Report, Stage
from mgraph.passes.keys import attr_key, attrs_key
from mgraph.passes.serve_entries import SAMPLING

_LAYER = re.compile(r"^((?:[^.]+\.)*?[^.]+)\.(\d+)(?=\.|$)")
_LIFTABLE = (int, float)
_ENTRIES = ("forward", "evaluation", "microbatch", "evaluate", "predict", "finish", "step", *SAMPLING)
"""Names of entries that passes make later: no layer is called so."""


@dataclass(frozen=True)
class Outline(Pass):
    """Outline repeated layers. A layer of fewer than `min_nodes` nodes stays inline."""

    name: ClassVar[str] = "outline"
    stage: ClassVar[Stage] = Stage.NORMALIZE
    provides: ClassVar[frozenset[str]] = frozenset({"outlined"})

    min_nodes: int = 4

    def run(self, module: Module, report: Report) -> Module:
        """Outline every function, and then the functions that this made."""
        functions = dict(module.functions)
        todo = list(functions)
        while todo:
            name = todo.pop()
            made, function = _Outliner(functions[name], functions, self.min_nodes).run(report)
            if made:
                functions[name] = function
                functions.update({f.name: f for f in made})
                todo += [f.name for f in made]
        return replace(module, functions=functions) if len(functions) > len(module.functions) else module


@dataclass(slots=True, eq=False)
class _Segment:
    """Nodes of one layer that can run as one unit. Values are known by local numbers: externals first come first."""

    list_path: str
    index: str
    bit: int
    nodes: list[Node] = field(default_factory=list)
    depends: int = 0  # bits of the segments that it reads from, directly or not
    externals: list[Value] = field(default_factory=list)
    key: tuple[Any, ...] = ()
    numbers: list[tuple[Any, ...]] = field(default_factory=list)  # per node: its liftable attributes
    first: int = 0  # position of its first node in the function
    escaping: set[int] = field(default_factory=set)  # positions of the values that are read outside of it

    @property
    def path(self) -> str:
        return f"{self.list_path}.{self.index}"


class _Outliner:
    """The outlining of one function."""

    def __init__(self, function: Function, functions: dict[str, Function], min_nodes: int) -> None:
        self.function = function
        self.functions = functions
        self.min_nodes = min_nodes
        self.slots = set(function.slots)
        self.type_ids: dict[Any, int] = {}
        self.type_objects: dict[int, int] = {}  # most values share the object of their type: no need to hash it again
        self.readers = function.users()
        self.returned = set(function.results)

    def run(self, report: Report) -> tuple[list[Function], Function]:
        """The functions made, and this function with calls in place of the segments; nothing made: unchanged."""
        # A layer that nothing reads would be a call without results: it stays inline, for dce to remove.
        segments = [s for s in self.segments() if len(s.nodes) >= self.min_nodes and self.escaping(s)]
        segments, units = self.schedulable(segments)
        if not segments:
            return [], self.function
        made: list[Function] = []
        calls: dict[_Segment, Node] = {}
        names = set(self.functions)
        for kind in self.kinds(segments):
            name = _function_name(kind[0].list_path, names)
            names.add(name)
            made_function, kind_calls = self.outline(name, kind)
            made.append(made_function)
            calls.update(zip(kind, kind_calls, strict=True))
            report.count("calls", len(kind))
            for segment, call in zip(kind, kind_calls, strict=True):
                report.match(self.function.name, call.id, f"{segment.path} calls {name}")
        report.count("functions", len(made))
        nodes = [calls[unit] if isinstance(unit, _Segment) else unit for unit in units]
        return made, replace(self.function, nodes=tuple(nodes))

    def segments(self) -> list[_Segment]:
        """Group the nodes by layer; a group that depends on itself through other nodes begins a new segment."""
        layer_of: dict[str, tuple[str, str] | None] = {}
        current: dict[tuple[str, str], _Segment] = {}
        segments: list[_Segment] = []
        depends: dict[Value, int] = {}  # through which segments a value was made, its own included
        owner: dict[Value, _Segment] = {}
        for position, node in enumerate(self.function.nodes):
            path = node.origin.path
            if path not in layer_of:
                found = _LAYER.match(path)
                layer_of[path] = (found.group(1), found.group(2)) if found else None
            layer = layer_of[path]
            segment = current.get(layer) if layer else None
            outside = 0
            for value in node.operands:
                if segment is None or owner.get(value) is not segment:
                    outside |= depends.get(value, 0)
            if layer is not None:
                if segment is None or outside & segment.bit:
                    segment = _Segment(*layer, bit=1 << len(segments), first=position)
                    segments.append(segment)
                    current[layer] = segment
                    outside = 0
                    for value in node.operands:
                        outside |= depends.get(value, 0)
                segment.nodes.append(node)
                segment.depends |= outside
                outside = segment.depends | segment.bit
                for value in node.results:
                    owner[value] = segment
            for value in node.results:
                depends[value] = outside
        return segments

    def order(self, segments: Iterable[_Segment]) -> list[Node | _Segment]:
        """Nodes and segments so that each comes after what it reads, else in the old order; those that wait on each
        other are missing."""
        unit_of: dict[Node, _Segment] = {n: s for s in segments for n in s.nodes}
        maker: dict[Value, Node | _Segment] = {}
        first: dict[Node | _Segment, int] = {}
        for position, node in enumerate(self.function.nodes):
            unit = unit_of.get(node, node)
            first.setdefault(unit, position)
            for value in node.results:
                maker[value] = unit
        units = list(first)
        waits: dict[Node | _Segment, int] = {}
        readers: dict[Node | _Segment, list[Node | _Segment]] = {u: [] for u in units}
        for unit in units:
            nodes = unit.nodes if isinstance(unit, _Segment) else (unit,)
            sources = {maker[v] for n in nodes for v in n.operands if v in maker} - {unit}
            waits[unit] = len(sources)
            for source in sources:
                readers[source].append(unit)
        ready = [first[u] for u in units if not waits[u]]
        heapq.heapify(ready)
        at = {position: unit for unit, position in first.items()}
        ordered: list[Node | _Segment] = []
        while ready:
            unit = at[heapq.heappop(ready)]
            ordered.append(unit)
            for reader in readers[unit]:
                waits[reader] -= 1
                if not waits[reader]:
                    heapq.heappush(ready, first[reader])
        return ordered

    def schedulable(self, segments: list[_Segment]) -> tuple[list[_Segment], list[Node | _Segment]]:
        """The segments without those that wait on each other (two layers that feed each other in turns), which stay
        inline; and the order of what there is then."""
        while True:
            units = self.order(segments)
            ordered = set(units)
            kept = [s for s in segments if s in ordered]
            if len(kept) == len(segments):
                return kept, units
            segments = kept

    def kinds(self, segments: list[_Segment]) -> list[list[_Segment]]:
        """Segments that become one function, in order of first appearance."""
        by_structure: dict[Any, list[_Segment]] = {}
        readers: dict[tuple[str, Value], int] = {}
        list_bits: dict[str, int] = {}
        for segment in segments:
            self.number(segment)
            by_structure.setdefault(segment.key, []).append(segment)
            list_bits[segment.list_path] = list_bits.get(segment.list_path, 0) | segment.bit
            for value in segment.externals:
                readers[segment.list_path, value] = readers.get((segment.list_path, value), 0) + 1
        depends = self.dependence(segments)
        constants = self.constants()
        kinds: dict[Any, list[_Segment]] = {}
        for structure, members in by_structure.items():
            path = members[0].list_path
            own = list_bits[path]
            carried = [
                any(depends.get(member.externals[i], 0) & own for member in members)
                for i in range(len(members[0].externals))
            ]
            for member in members:
                shared = tuple(
                    None if is_carried else constants.get(value, value if readers[path, value] > 1 else None)
                    for value, is_carried in zip(member.externals, carried, strict=True)
                )
                kinds.setdefault((structure, shared), []).append(member)
        return sorted(kinds.values(), key=lambda kind: kind[0].first)

    def constants(self) -> dict[Value, int]:
        """Values made from no state and no floats of the input, like masks and positions; those made alike have the
        same number."""
        integers = [value for value in self.function.params if not value.tensor.dtype.is_float]
        constants = {value: number for number, value in enumerate(integers)}
        numbers: dict[Any, int] = {**constants}
        for node in self.function.nodes:
            if all(value in constants for value in node.operands):
                key = node.op, tuple(constants[value] for value in node.operands), attrs_key(node.attrs)
                for index, value in enumerate(node.results):
                    constants[value] = numbers.setdefault((key, index), len(numbers))
        return constants

    def dependence(self, segments: Iterable[_Segment]) -> dict[Value, int]:
        """Per value, the segments it was made through."""
        unit_of: dict[Node, _Segment] = {n: s for s in segments for n in s.nodes}
        depends: dict[Value, int] = {}
        for node in self.function.nodes:
            segment = unit_of.get(node)
            bits = segment.depends | segment.bit if segment else 0
            if segment is None:
                for value in node.operands:
                    bits |= depends.get(value, 0)
            if bits:
                for value in node.results:
                    depends[value] = bits
        return depends

    def number(self, segment: _Segment) -> None:
        """Fill in a segment's externals, structure key and liftable numbers."""
        prefix = segment.path
        local: dict[Value, Any] = {}
        key: list[Any] = [segment.list_path]
        for node in segment.nodes:
            operands = []
            for value in node.operands:
                code = local.get(value)
                if code is None:
                    code = len(local)
                    local[value] = code
                    segment.externals.append(value)
                    operands.append((code, self.type_id(value.type), self.role(value, prefix)))
                else:
                    operands.append(code)
            attrs, numbers = [], []
            items = node.attrs.items()
            for name, attr in sorted(items) if len(items) > 1 else items:
                if type(attr) in _LIFTABLE and not name.startswith("dim"):
                    attrs.append((name, type(attr)))
                    numbers.append((name, attr_key(attr)))
                else:
                    attrs.append((name, attr_key(attr)))
            types = []
            for value in node.results:
                local[value] = len(local)
                types.append(self.type_id(value.type))
            path = node.origin.path[len(prefix) :]
            key.append((node.op, tuple(operands), tuple(attrs), tuple(types), path, node.phase))
            segment.numbers.append(tuple(numbers))
        segment.key = tuple(key)

    def type_id(self, type_: Any) -> int:
        found = self.type_objects.get(id(type_))
        if found is None:
            found = self.type_objects[id(type_)] = self.type_ids.setdefault(type_, len(self.type_ids))
        return found

    def role(self, value: Value, prefix: str) -> Any:
        """What an external is: a parameter, a state of the layer by its relative name, or one shared state."""
        if not value.is_state and value not in self.slots:
            return "param"
        relative = _relative(value, prefix)
        return value if relative is None else relative

    def is_slot(self, value: Value) -> bool:
        return value.is_state or value in self.slots

    def outline(self, name: str, kind: Sequence[_Segment]) -> tuple[Function, list[Node]]:
        """The function of one kind, from its first segment, and the call of each segment."""
        model = kind[0]
        inputs = [i for i, v in enumerate(model.externals) if not self.is_slot(v)]
        slots = [i for i, v in enumerate(model.externals) if self.is_slot(v)]
        results = sorted(set().union(*(s.escaping for s in kind)))
        lifted = _differing(kind)
        function = self.body(name, kind, inputs, slots, results, lifted)
        calls = []
        for segment in kind:
            made = [v for n in segment.nodes for v in n.results]
            attrs: dict[str, Any] = {"callee": name}
            for (position, attr), static in lifted.items():
                attrs[f"static.{static}"] = segment.nodes[position].attrs[attr]
            origin = replace(segment.nodes[0].origin, path=segment.path)
            operands = tuple(segment.externals[i] for i in inputs + slots)
            outputs = tuple(made[i] for i in results)
            calls.append(Node("call", operands, outputs, attrs, segment.nodes[0].phase, origin, "outline"))
        return function, calls

    def escaping(self, segment: _Segment) -> set[int]:
        """Which of the values made in a segment are read outside of it, by their position; kept in the segment."""
        inside, readers, returned = set(segment.nodes), self.readers, self.returned
        made = [v for n in segment.nodes for v in n.results]
        segment.escaping = {i for i, v in enumerate(made) if v in returned or not inside.issuperset(readers.get(v, ()))}
        return segment.escaping

    def body(
        self,
        name: str,
        kind: Sequence[_Segment],
        inputs: Sequence[int],
        slots: Sequence[int],
        results: Sequence[int],
        lifted: dict[tuple[int, str], str],
    ) -> Function:
        """The function, from the first segment; a parameter that differs from call to call is named `x`."""
        model = kind[0]
        builder = FunctionBuilder(name, "outline")
        builder.statics = tuple(dict.fromkeys(lifted.values()))
        new: dict[Value, Value] = {}
        for i in inputs:
            value = model.externals[i]
            same = all(segment.externals[i] is value for segment in kind)
            new[value] = builder.param(value.name if same else "x", value.type)
        for i in slots:
            value = model.externals[i]
            new[value] = builder.slot(_relative(value, model.path) or value.name, value.type)
        made: list[Value] = []
        for position, node in enumerate(model.nodes):
            attrs = dict(node.attrs)
            for attr in attrs:
                if (position, attr) in lifted:
                    attrs[attr] = Static(lifted[position, attr])
            outputs = tuple(Value(builder.fresh(v.name), v.type) for v in node.results)
            new.update(zip(node.results, outputs, strict=True))
            made += outputs
            path = f"{model.list_path}.*{node.origin.path[len(model.path) :]}"
            origin = Origin(path, node.origin.file, node.origin.line)
            operands = tuple(new[v] for v in node.operands)
            builder.nodes.append(replace(node, operands=operands, results=outputs, attrs=attrs, origin=origin))
        return builder.build([made[i] for i in results])


def _relative(value: Value, prefix: str) -> str | None:
    """The name of a state within its layer; `None` for a state of no or another layer.

    Within a layer function paths begin with `layers.*.` but slots are named relative to the layer.
    """
    local = prefix.rpartition("*.")[2] + "."
    return value.name[len(local) :] if value.name.startswith(local) else None


def _differing(kind: Sequence[_Segment]) -> dict[tuple[int, str], str]:
    """The attributes whose numbers differ among segments: (node position, attribute) → name of the static.

    Attributes that differ in the same way (the same window in two nodes) share one static.
    """
    lifted: dict[tuple[int, str], str] = {}
    names: dict[Any, str] = {}
    for position, columns in enumerate(zip(*(s.numbers for s in kind), strict=True)):
        if all(c == columns[0] for c in columns):
            continue
        for column in zip(*columns, strict=True):
            attr, values = column[0][0], tuple(value for _, value in column)
            if len(set(values)) > 1:
                if values not in names:
                    taken = sum(n == attr or n.startswith(attr + "_") for n in names.values())
                    names[values] = f"{attr}_{taken}" if taken else attr
                lifted[position, attr] = names[values]
    return lifted


def _function_name(list_path: str, taken: Iterable[str]) -> str:
    """`layers` gives `layer`, then `layer_1`, …"""
    last = list_path.rpartition(".")[2]
    singular = last[:-1] if len(last) > 1 and last.endswith("s") and not last.endswith("ss") else last
    names = {*taken, *_ENTRIES}
    name, number = singular, 0
    while name in names:
        number += 1
        name = f"{singular}_{number}"
    return name
