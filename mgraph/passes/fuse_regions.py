"""fuse-regions: pointwise ops and reductions of rows that meet over one space become one `region` node.

    %t: bf16[B, S, 256] = aten.tanh.default(%x)                    %y = region(%x, %w) {results = [3], steps =
    %y: bf16[B, S, 256] = aten.mul.Tensor(%t, %w)          ==>         [["aten.tanh.default", [0], []],
                                                                        ["aten.mul.Tensor", [2, 1], []]]}

What a region saves is the traffic of memory: a value that is made and read within it stays in registers. So groups grow
along the values that they would keep, in the order of the function, and then join those that read the same, as long as

    one space    all values broadcast to one shape, whose last dim is a known number (`mgraph.ir.ops.region`)
    order        no path leaves the group and comes back, through other groups either
    tensors      it reads and writes at most `tensors` tensors of memory
    registers    at most `values` values live at once; where rows are reduced, and so held whole, they have at most
                 `held` elements
    parallelism  rows are reduced by a program each, so there are at least `rows` of them

and a group is fused if it keeps at least `saved` bytes from memory, reckoned with 8,192 positions. What stops a group
is a near miss. Random numbers, collectives, views and updates of state are never part of one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

from mgraph.errors import PassError
from mgraph.ir.dims import Dim, evaluate, names_in, product
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.ops.region import STEPS, UNSQUEEZE, Space, Step, space_of, step_refusal, taken_by
from mgraph.ir.types import Shard, TensorType
from mgraph.passes.base import Pass, Report, Stage

_FRESH = (STEPS - {UNSQUEEZE, "cast"}) | {
    "aten.linear.default",
    "aten.matmul.default",
    "aten.mm.default",
    "glu",
    "grouped_matmul",
    "matmul_add",
}
"""Ops whose results are memory of their own, contiguous."""

SIBLINGS = 16
"""Nodes that may lie between two groups that are joined because they read the same."""

POSITIONS = 8192
"""What named dims are taken for, but for the batch `B` of 1, where bytes are reckoned."""


@dataclass(frozen=True)
class FuseRegions(Pass):
    """Fuse pointwise ops and reductions of rows."""

    name: ClassVar[str] = "fuse-regions"
    stage: ClassVar[Stage] = Stage.FUSE
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    tensors: int = 8
    values: int = 16
    held: int = 49152
    rows: int = 64
    saved: int = 2**18
    sites: tuple[str, ...] = ()

    def on_twin(self, real: Module) -> Pass:
        """The same groups: what they save and hold there is less."""
        report = Report()
        self.run(real, report)
        sites = tuple(f"{match.function}:{' '.join(match.replaced)}" for match in report.matches)
        return replace(self, sites=sites) if sites else replace(self, tensors=0)

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function; a module without a group is returned as it is. `sites` names all groups there are:
        a function and its nodes."""
        sizes = {axis.name: axis.size for axis in module.mesh}
        functions = {name: _Partition(f, self, report, sizes).fused() for name, f in module.functions.items()}
        changed = any(functions[name] is not f for name, f in module.functions.items())
        return replace(module, functions=functions) if changed else module


@dataclass(eq=False)
class _Group:
    """Nodes that are to be one, as indices into the function. `open`: they may be part of a region."""

    nodes: tuple[int, ...]
    open: bool = False


@dataclass(frozen=True)
class _Body:
    """A group as a region: what it reads and gives, its steps, the numbers of the results, the types of all values,
    its space, and the most values that live at once."""

    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    steps: tuple[Step, ...]
    numbers: tuple[int, ...]
    types: tuple[TensorType, ...]
    space: Space
    live: int


@dataclass(eq=False)
class _Partition:
    """The groups of one function."""

    function: Function
    limits: FuseRegions
    report: Report
    sizes: dict[str, int | None]
    group_of: list[_Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        nodes = self.function.nodes
        self.made = {value: i for i, node in enumerate(nodes) for value in node.results}
        self.before: list[set[int]] = [{self.made[v] for v in n.operands if v in self.made} for n in nodes]
        collectives = [i for i, n in enumerate(nodes) if n.op == "call" or op_def(n.op).collective]
        for first, second in pairwise(collectives):
            self.before[second].add(first)  # all ranks keep their order
        self.after: list[set[int]] = [set() for _ in nodes]
        for i, made in enumerate(self.before):
            for j in made:
                self.after[j].add(i)
        self.kept = set(self.function.results)
        self.group_of = [self._single(i) for i in range(len(nodes))]

    def fused(self) -> Function:
        """The function with a region for each group that pays; itself if there is none."""
        if self.limits.sites:
            bodies = self._named()
        else:
            for i in range(len(self.function.nodes)):
                for j in sorted(self.before[i], reverse=True):
                    self._join(j, i)
            self._join_siblings()
            found = {group: self._paying(group) for group in dict.fromkeys(self.group_of)}
            bodies = {group: body for group, body in found.items() if body is not None}
        if not bodies:
            return self.function
        return replace(self.function, nodes=tuple(self._emit(bodies)))

    def _named(self) -> dict[_Group, _Body]:
        """The groups that the option names."""
        index = {node.id: i for i, node in enumerate(self.function.nodes)}
        bodies = {}
        for site in self.limits.sites:
            function, _, ids = site.rpartition(":")
            if function == self.function.name and all(name in index for name in ids.split(" ")):
                group = _Group(tuple(sorted(index[name] for name in ids.split(" "))))
                body = self._body(group.nodes)
                if isinstance(body, str):
                    raise PassError(f"{ids} are no region: {body}", where=f"@{function}")
                for i in group.nodes:
                    self.group_of[i] = group
                bodies[group] = body
        return bodies

    def _single(self, index: int) -> _Group:
        """A group of one node, which is open if the node may be part of a region."""
        node = self.function.nodes[index]
        shapes = [value.type.shape for value in node.operands if isinstance(value.type, TensorType)]
        if node.op not in STEPS or not any(shapes):
            return _Group((index,))
        tensors = [value.tensor for value in (*node.operands, *node.results)]
        refusal = step_refusal(node.op, node.attrs, tensors[:-1], tensors[-1])
        if refusal is not None:
            self._miss(node, "step", refusal)
        return _Group((index,), refusal is None)

    def _split(self, space: Space, types: Iterable[TensorType]) -> str | None:
        """Which type has a last dim that lies over ranks: over how many is not known, or its rows are reduced."""
        for type_ in types:
            for axis, placement in type_.placement:
                known = self.sizes[axis] == 1 or (self.sizes[axis] is not None and not space.reduces)
                if isinstance(placement, Shard) and placement.dim == len(type_.shape) - 1 and not known:
                    return f"the last dim of {type_} lies over {axis}"
        return None

    def _join_siblings(self) -> None:
        """Make one group of those that read one wide value and are not far apart, so that it is read once."""
        for value, readers in self.function.users().items():
            indices = sorted({self.made[node.results[0]] for node in readers})
            for one, other in pairwise(indices):
                if self.group_of[other].nodes[0] - self.group_of[one].nodes[-1] <= SIBLINGS:
                    self._join(one, other, value)

    def _join(self, maker: int, reader: int, shared: Value | None = None) -> None:
        """Make one group of those of a node and of one that reads it, or the same as it, where that is possible."""
        one, other = self.group_of[maker], self.group_of[reader]
        if one is other or not (one.open and other.open):
            return
        node = self.function.nodes[reader]
        if node.phase is not self.function.nodes[maker].phase:
            return
        indices = tuple(sorted({*one.nodes, *other.nodes}))
        refusal = self._refusal(indices, shared)
        if refusal is None:
            group = _Group(indices, True)
            for index in indices:
                self.group_of[index] = group
        elif shared is None:
            self._miss(node, *refusal)

    def _refusal(self, indices: tuple[int, ...], shared: Value | None) -> tuple[str, str] | None:
        """The guard that keeps nodes from being a group, and what is wrong."""
        body = self._body(indices)
        if isinstance(body, str):
            return "space", body
        if shared is not None and shared.tensor.shape != body.space.shape:
            return "space", f"{shared!r} is not as wide as the group"
        limit = self._limit(body)
        if limit is not None:
            return limit
        way = self._way_back(set(indices))
        return None if way is None else ("order", f"{way!r} reads the group and is read by it")

    def _limit(self, body: _Body) -> tuple[str, str] | None:
        """The limit that a body passes, and by how much."""
        limits = self.limits
        outside = len(body.operands) + len(body.results)
        if outside > limits.tensors:
            return "tensors", f"{outside} tensors are read and written, more than {limits.tensors}"
        if body.live > limits.values:
            return "registers", f"{body.live} values live at once, more than {limits.values}"
        if not body.space.reduces:
            return None
        elements, rows = body.live * body.space.columns, _count(product(body.space.shape[:-1]))
        if elements > limits.held:
            values = f"{body.live} values of {body.space.columns} columns"
            return "registers", f"{values} live at once, {elements} elements of a row, more than {limits.held}"
        if rows < limits.rows:
            return "parallelism", f"{rows} rows are reduced, fewer than {limits.rows}"
        return None

    def _body(self, indices: Sequence[int]) -> _Body | str:
        """The region of some nodes, or why they are none."""
        nodes = [self.function.nodes[i] for i in indices]
        inside = {node.result for node in nodes}
        operands = tuple(dict.fromkeys(v for node in nodes for v in node.operands if v not in inside))
        within = set(indices)
        results = tuple(
            node.result
            for i, node in zip(indices, nodes, strict=True)
            if node.result in self.kept or self.after[i] - within
        )
        numbers = {value: i for i, value in enumerate((*operands, *(node.result for node in nodes)))}
        steps = tuple(
            Step(node.op, tuple(numbers[v] for v in node.operands), tuple(sorted(node.attrs.items()))) for node in nodes
        )
        given = tuple(numbers[value] for value in results)
        types = tuple(value.tensor for value in numbers)
        space = space_of(types, steps, given)
        if isinstance(space, str):
            return space
        split = self._split(space, (type_ for i, type_ in enumerate(types) if i not in space.squeezed))
        if split is not None:
            return split
        return _Body(operands, results, steps, given, types, space, _most_live(types, steps, given, space))

    def _way_back(self, group: set[int]) -> Node | None:
        """A node outside a group that depends on it and that it depends on, whole groups counted as one."""
        todo = [(j, j) for i in group for j in self.after[i] if j not in group]
        seen = set[int]()
        while todo:
            index, first = todo.pop()
            if index in seen:
                continue
            for other in self.group_of[index].nodes:
                seen.add(other)
                for following in self.after[other]:
                    if following in group:
                        return self.function.nodes[first]
                    todo.append((following, first))
        return None

    def _paying(self, group: _Group) -> _Body | None:
        """The body of a group if fusing it pays."""
        if len(group.nodes) < 2:
            return None
        body = self._body(group.nodes)
        assert not isinstance(body, str), body
        nodes = [self.function.nodes[i] for i in group.nodes]
        apart = sum(_bytes(v) for node in nodes for v in (*node.operands, *node.results) if node.op != UNSQUEEZE)
        fused = sum(map(_bytes, (*body.operands, *body.results)))
        last, saved = nodes[-1], apart - fused
        amount = f"{saved:,} of {apart:,} bytes"
        if saved < self.limits.saved:
            self._miss(last, "bytes", f"{len(nodes)} nodes would save {amount}, less than {self.limits.saved:,}")
            return None
        self.report.count("nodes", len(nodes))
        self.report.match(
            self.function.name,
            last.id,
            f"{len(nodes)} nodes over {list(body.space.shape)} save {amount}",
            [node.id for node in nodes],
            [body.results[0].name],
        )
        return body

    def _miss(self, node: Node, guard: str, detail: str) -> None:
        self.report.near_miss(self.function.name, node.id, "region", guard, detail)

    def _emit(self, bodies: dict[_Group, _Body]) -> list[Node]:
        """All nodes in an order in which each follows what it reads, and else that of the function: a region stands
        where its last node stood, and what reads it follows."""
        groups = dict.fromkeys(group if group in bodies else _Group((i,)) for i, group in enumerate(self.group_of))
        owner = {i: group for group in groups for i in group.nodes}
        waits = {g: {owner[j] for i in g.nodes for j in self.before[i]} - {g} for g in groups}
        readers: dict[_Group, list[_Group]] = {}
        for group, needed in waits.items():
            for other in needed:
                readers.setdefault(other, []).append(group)
        ready = [(group.nodes[-1], group) for group in groups if not waits[group]]
        heapq.heapify(ready)
        made = []
        while ready:
            _, group = heapq.heappop(ready)
            made.append(self._node(group, bodies.get(group)))
            for reader in readers.get(group, ()):
                waits[reader].discard(group)
                if not waits[reader]:
                    heapq.heappush(ready, (reader.nodes[-1], reader))
        assert len(made) == len(groups), "a group depends on itself"
        return made

    def _node(self, group: _Group, body: _Body | None) -> Node:
        last = self.function.nodes[group.nodes[-1]]
        if body is None:
            return last
        attrs: dict[str, Any] = {"results": body.numbers, "steps": tuple(map(tuple, body.steps))}
        taken = self._taken(group, body)
        attrs |= {} if taken is None else {"takes": taken}
        return Node("region", body.operands, body.results, attrs, last.phase, last.origin, self.limits.name)

    def _taken(self, group: _Group, body: _Body) -> int | None:
        """The first operand that nothing reads after the group, and whose memory a result may have."""
        for position, value in enumerate(body.operands):
            maker = self.made.get(value)
            if maker is None or value in self.kept or self.function.nodes[maker].op not in _FRESH:
                continue
            ends = [self.group_of[i].nodes[-1] for i in self.after[maker] if value in self.function.nodes[i].operands]
            fits = taken_by(body.types, body.space, body.numbers, position) is not None
            if fits and max(ends) <= group.nodes[-1]:
                return position
        return None


def _most_live(types: Sequence[TensorType], steps: Sequence[Step], results: Sequence[int], space: Space) -> int:
    """The most values as wide as the space that a thread holds at once: operands from the start, results to the end."""
    first = len(types) - len(steps)
    wide = {i for i, t in enumerate(types) if i not in space.squeezed and t.shape[-1:] == space.shape[-1:]}
    last = {i: len(types) for i in results}
    for number, step in enumerate(steps, first):
        for i in step.operands:
            last.setdefault(i, number)
            last[i] = max(last[i], number)
    return max(sum(1 for i in wide if i <= number <= last.get(i, -1)) for number in range(first, len(types)))


def _bytes(value: Value) -> int:
    """Bytes of a value, with named dims as they are reckoned."""
    return _count(value.tensor.numel) * value.tensor.dtype.bits // 8


def _count(dim: Dim) -> int:
    """An extent, with named dims as they are reckoned."""
    return int(evaluate(dim, {name: 1 if name == "B" else POSITIONS for name in names_in(dim)}))
