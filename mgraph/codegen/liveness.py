"""Which values die where, which may share memory, which are written inline: what emitted code needs to keep memory low.

Two values *may alias* if one may be a view of the other. A tensor can be overwritten by an op that makes a new value if
the function made it itself, and no value that may alias it is read afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from mgraph.codegen.bundles import HandleType
from mgraph.ir.aten import overload
from mgraph.ir.graph import Function, Node, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.types import TensorType

_MAY_ALIAS = {
    "all_gather",  # over an axis of one rank
    "cast",
    "first_layer",
    "joined",
    "pad_extent_grad",  # the first of one part
    "padded_part",
    "part_of",
    "reduce_scatter",
    "repeated_part",
    "reshape",
    "split_rows",
    "aten._unsafe_view.default",
    "aten.dropout.default",
    "aten.einsum.default",
    "aten.meshgrid.default",
    "aten.meshgrid.indexing",
    "aten.broadcast_tensors.default",
    "aten.sum_to_size.default",
    "aten.type_as.default",
}
VIEWS = {
    "joined",
    "reshape",
    "aten.t.default",
    "aten.transpose.int",
    "aten.permute.default",
    "aten.view.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.expand.default",
    "aten.slice.Tensor",
    "aten.select.int",
}
"""Views that cost nothing and read well inside the one expression that uses them."""

PARTS = ("aten.select.int", "aten.slice.Tensor")
"""Views of a part of a tensor, told by numbers: a call takes one as it stands."""

ADDING = ("accumulate_", "accumulate_joined_")
"""Ops that add what their last operand holds to totals, and may make it there."""

_NAMING = {"call", "first_layer", "cross_entropy_with_grad", "pack", "rope_joined"}
"""Ops whose operands have names of their own: the loss takes the memory of its logits, which are a view."""

_OVERLAPPING = {"aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default", "aten.as_strided.default"}


def written_operands(node: Node) -> int:
    """How many of a node's results are its first operands, written in place.

    Names of in-place ops end in `_`; reductions over ranks work in place, too.
    """
    name = node.op.split(".")[1] if "." in node.op else node.op
    in_place = name == "all_reduce" or (name.endswith("_") and not name.endswith("__"))
    if not in_place:
        return 0
    return len(node.results) if "." in node.op else op_def(node.op).updated(node)


@functools.cache
def may_alias(op: str) -> bool:
    """Whether a result of the op may be a view of an operand."""
    if op in _MAY_ALIAS:
        return True
    return "." in op and any(result.alias_info is not None for result in overload(op)._schema.returns)


class Liveness:
    """Facts about one function.

    `loops` gives the loop of a node and its place in an iteration: nothing is inlined from one loop into another, nor
    what is not in all iterations, nor what reads something carried to behind the place from which on that is another
    value (`carried_until`). `absorbs` says whether a node's text may be part of the `accumulate_` that adds it to
    a total.
    """

    def __init__(
        self,
        function: Function,
        loops: Mapping[Node, tuple[int, int]],
        absorbs: Callable[[Node, Value], bool],
        carried_until: Mapping[Node, int],
    ) -> None:
        self.function = function
        self._producers = function.producers()
        self._absorbs = absorbs
        self._parent: dict[Value, Value] = {}
        self._foreign: set[Value] = set(function.inputs())
        self._overlapping: set[Value] = set()
        self._mutated: set[Value] = set()
        self.under_way: dict[Value, tuple[Value, ...]] = {}
        """Handles of what is under way in place → the tensors."""
        for node in function.nodes:
            self._alias(node)
        self.inlined = self._find_inlined(loops, carried_until)
        self.last_use = self._find_last_uses()
        self._group_end: dict[Value, int] = {}
        for value, index in self.last_use.items():
            root = self.group(value)
            self._group_end[root] = max(index, self._group_end.get(root, -1))
        self._foreign = {self.group(v) for v in self._foreign}
        self._overlapping = {self.group(v) for v in self._overlapping}

    def group(self, value: Value) -> Value:
        """The representative of all values that may alias `value`."""
        root = value
        while (parent := self._parent.get(root)) is not None:
            root = parent
        while value is not root:  # later look-ups are short: entry functions join thousands of states
            self._parent[value], value = root, self._parent[value]
        return root

    def is_inlined(self, node: Node) -> bool:
        """Whether the text of a node stands where its value is read. A call may have no result: all were in place."""
        return len(node.results) == 1 and node.results[0] in self.inlined

    def reads(self, node: Node) -> list[Value]:
        """Named values that the text of a node reads: its operands, inlined ones followed to what they read."""
        found: dict[Value, None] = {}
        for operand in self._touched(node):
            if operand in self.inlined:
                found.update(dict.fromkeys(self.reads(self.inlined[operand])))
            else:
                found[operand] = None
        return list(found)

    def _touched(self, node: Node) -> list[Value]:
        """What a node reads: its operands, and for `wait` the tensors that are reduced in place until then."""
        started = self.under_way.get(node.operands[0], ()) if node.op == "wait" else ()
        return [*node.operands, *started]

    def can_overwrite(self, value: Value, index: int) -> bool:
        """Whether node `index` may write its result into the memory of its operand `value`."""
        root = self.group(value)
        if value.is_state or value in self.inlined or root in self._foreign or root in self._overlapping:
            return False
        return self._group_end[root] <= index

    def _alias(self, node: Node) -> None:
        if node.op in ("call", "unpack", "pick"):
            # A callee may return its params; what a list holds is also known to whoever filled it.
            self._foreign.update(node.operands, node.results)
        written = written_operands(node)
        for result, operand in zip(node.results[:written], node.operands[:written], strict=True):
            self._join(result, operand)
            self._mutated.add(operand)
        if node.op in ADDING and node.attrs.get("late"):  # what it reads may be written no more in this function
            maker = self._producers.get(node.operands[-1])
            self._foreign.update(node.operands, maker.operands if maker is not None else ())
        if node.op in ("all_reduce_start", "store_start"):  # in all others, the handle holds what it needs
            places = node.operands[: len(node.result.type.types)]  # type: ignore[union-attr]
            self.under_way[node.result] = places
            self._mutated.update(places)
        if node.op.endswith("_start") or node.op == "wait":  # over an axis of one rank, all results are operands
            for operand in node.operands:
                for result in node.results:
                    self._join(result, operand)
        elif not written and may_alias(node.op):
            for result in node.results:
                for operand in node.operands:
                    self._join(result, operand)
        if node.op in _OVERLAPPING:
            self._overlapping.update(node.results)
        self._foreign.update(v for v in node.operands if v.is_state)

    def _join(self, a: Value, b: Value) -> None:
        a, b = self.group(a), self.group(b)
        if a is not b:
            self._parent[a] = b

    def _find_inlined(
        self, loops: Mapping[Node, tuple[int, int]], carried_until: Mapping[Node, int]
    ) -> dict[Value, Node]:
        users = self.function.users()
        results = set(self.function.results)
        mutated = {self.group(v) for v in self._mutated}
        inlined = {}
        for node in self.function.nodes:
            if len(node.results) != 1:
                continue
            value = node.results[0]
            readers = users.get(value, [])
            if len(readers) != 1 or value in results or self.group(value) in mutated:
                continue
            reader = readers[0]
            if loops.get(node, (-1,))[0] != loops.get(reader, (-1,))[0]:
                continue
            is_view = node.op in VIEWS and (reader.op not in _NAMING or (reader.op == "call" and node.op in PARTS))
            if is_view or (
                reader.op in ADDING and reader.operands[-1] is value and self._absorbs(node, reader.operands[0])
            ):
                inlined[value] = node

        def statement(node: Node) -> Node:
            while len(node.results) == 1 and node.results[0] in inlined:
                (node,) = users[node.results[0]]
            return node

        # What a loop carries goes by one name: its text may not stand where that is of the next iteration.
        late = [v for v, n in inlined.items() if n in carried_until and loops[statement(n)][1] > carried_until[n]]
        inlined = {value: node for value, node in inlined.items() if value not in late}
        named = {place for node, place in loops.items() if len(node.results) == 1 and node.result not in inlined}
        return {value: node for value, node in inlined.items() if loops.get(node) not in named}

    def _find_last_uses(self) -> dict[Value, int]:
        nodes = self.function.nodes
        last = dict.fromkeys(self.function.results, len(nodes))
        for index in range(len(nodes) - 1, -1, -1):
            node = nodes[index]
            # The text of an inlined node stands where its value is read.
            where = last[node.results[0]] if self.is_inlined(node) else index
            for operand in self._touched(node):
                last[operand] = max(where, last.get(operand, -1))
        for index, node in enumerate(nodes):
            for value in node.results:
                last.setdefault(value, index)
        return last


def is_small(value: Value) -> bool:
    """Whether a value is too small for the time of its death to matter, or a handle, which `wait` empties."""
    if isinstance(value.type, HandleType):
        return True
    if not isinstance(value.type, TensorType):
        return False
    count = value.type.numel
    return isinstance(count, int) and count <= 1024
