"""Spreads functions over one mesh axis: chooses how each node runs on parts, and brings its operands there.

States are placed before. A function is spread as its first call passes its operands; other calls bring theirs there.
Inputs and results of functions are whole or split; of partial sums those that are read as such where they are made
(what experts give, of which the backward sums products) stay so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.dims import evaluate, symbol
from mgraph.ir.graph import Entry, Function, Module, Node, State, Value
from mgraph.ir.local import Division, declared_sizes
from mgraph.ir.signature import ShardingRule
from mgraph.ir.types import DType, Partial, PendingType, Placement, Shard, TensorType, Type
from mgraph.passes.calls import callee
from mgraph.passes.expert_weights import WAYS
from mgraph.passes.placing import rules_of

_NOMINAL = 1024
"""The extent of named dims where bytes are compared."""
_WEIGHT = 1e30
"""The cost of gathering what has no named dim, where activations are to be gathered: any other way is better."""
_EACH = ("adamw", "zero", "all_reduce", "all_reduce_start", "wait")
"""Ops that treat each operand alone: result i lies as operand i."""
_LINEAR = ("all_gather", "all_to_all", *WAYS, "reduce_scatter")
"""Ops that send each operand over another axis alone, so that of partial sums they give partial sums."""


class Spreader:
    """Spreads the functions of a module; `mapping` says what states have become, `counts` the collectives made.

    With the named dim `sequence`, a multiple of `size`, partial sums that have it are scattered along it, and what is
    made of them lies so until an op needs the whole; else they are reduced on all ranks.
    """

    def __init__(self, module: Module, axis: str, size: int, made_by: str, sequence: str | None = None) -> None:
        self.module, self.axis, self.size, self.made_by = module, axis, size, made_by
        self.sequence = None if sequence is None else symbol(sequence)
        others = {name: ranks for name, ranks in declared_sizes(module).items() if name != axis}
        before = Division.of(module, others)
        known = {sequence: math.lcm(size, before.multiples.get(sequence, 1))} if sequence else {}
        self.division = replace(before, multiples={**before.multiples, **known})
        self.mapping: dict[Value, Value] = {}
        self.functions: dict[str, Function] = {}
        self.counts: Counter[str] = Counter()

    def entry(self, entry: Entry, state: Mapping[str, State]) -> None:
        """Spread an entry function: its inputs and outputs are whole, its updates lie as their states."""
        function = self.module.functions[entry.function]
        wanted = [None] * len(entry.outputs) + [state[name].type.on(self.axis) for name in entry.updates]
        self.functions[function.name] = _Function(self, function, [None] * len(function.inputs())).spread(wanted)

    def called(self, name: str, inputs: Sequence[Placement | None]) -> Function:
        """A function as its first call has it spread."""
        if name not in self.functions:
            self.functions[name] = _Function(self, self.module.functions[name], inputs).spread(None)
        return self.functions[name]

    def on(self, value: Value) -> Placement | None:
        """Where a value lies over the axis."""
        type_ = value.type.value if isinstance(value.type, PendingType) else value.type
        return type_.on(self.axis)


class _Function:
    """One function while it is spread."""

    def __init__(self, owner: Spreader, function: Function, inputs: Sequence[Placement | None]) -> None:
        self.owner, self.source = owner, function
        self.builder: FunctionBuilder = rebuild(function, owner.made_by)
        self.mapping = dict(owner.mapping)
        for value, placement in zip(function.inputs(), inputs, strict=True):
            self.mapping[value] = self._placed(value, placement)
        self._read = {v for v in self.mapping.values() if isinstance(owner.on(v), Partial)}
        """Partial sums that are read as such, or that another function left so."""
        self._moved: dict[tuple[Value, Placement | None], Value] = {}
        self._index: Value | None = None
        self._readers = Counter(v.name for n in function.nodes for v in n.operands)
        self._readers.update(v.name for v in function.results)
        self._totals = {n.operands[1]: n.operands[0] for n in function.nodes if n.op == "accumulate"}

    def spread(self, wanted: Sequence[Placement | None] | None) -> Function:
        """The function with its results as wanted, or as they come (but partial sums reduced)."""
        for node in self.source.nodes:
            with self.builder.at(node):
                self._node(node)
        results = [self.mapping.get(v, v) for v in self.source.results]
        with self.builder.at(self.source.nodes[-1]) if self.source.nodes else nullcontext():
            targets = [self._settled(v) for v in results] if wanted is None else wanted
            moved = [self.to(v, place) for v, place in zip(results, targets, strict=True)]
        params, slots = ([self.mapping.get(v, v) for v in vs] for vs in (self.source.params, self.source.slots))
        return Function(
            self.source.name, tuple(params), tuple(slots), tuple(self.builder.nodes), tuple(moved), self.source.statics
        )

    def _placed(self, value: Value, placement: Placement | None) -> Value:
        """The value, placed; the same object where it lies so already."""
        if self.owner.on(value) == placement:
            return value
        type_: Type
        if isinstance(value.type, PendingType):
            type_ = PendingType(value.type.value.place(self.owner.axis, placement))
        else:
            type_ = value.type.place(self.owner.axis, placement)
        return Value(value.name, type_, value.is_state)

    # moving

    def to(self, value: Value, placement: Placement | None) -> Value:
        """A value brought to a placement. What was reduced once is read reduced from there on."""
        here = self.owner.on(value)
        if here == placement:
            return value
        if isinstance(here, Partial) and self._scattered(value) not in (None, placement):
            return self.to(self.to(value, self._scattered(value)), placement)
        found = self._moved.get((value, placement))
        if found is None:
            found = self._moved[value, placement] = self._move(value, here, placement)
        return found

    def _scattered(self, value: Value) -> Shard | None:
        """Where the sum of a partial value goes, if it has the dim of the sequence."""
        shape = value.tensor.shape
        if self.owner.sequence is None or shape.count(self.owner.sequence) != 1:
            return None
        return Shard(shape.index(self.owner.sequence))

    def _settled(self, value: Value) -> Placement | None:
        """Where a value goes at the edge of a function: partial sums are reduced, but for those that are read as such
        and that nothing needed whole so far."""
        here, sum_ = self.owner.on(value), self._scattered(value)
        if not isinstance(here, Partial) or (value in self._read and (value, sum_) not in self._moved):
            return here
        return sum_

    def _move(self, value: Value, here: Placement | None, placement: Placement | None) -> Value:
        axis = self.owner.axis
        if isinstance(here, Partial) and isinstance(placement, Shard) and placement == self._scattered(value):
            self.owner.counts["reduce_scatter"] += 1
            attrs = {"axis": axis, "dim": placement.dim}
            return self._emit("reduce_scatter", (value,), f"{value.name}_sum", attrs, placement)
        if isinstance(here, Partial) and placement is None:
            self.owner.counts["all_reduce"] += 1
            return self._emit("all_reduce", (value,), f"{value.name}_sum", {"axis": axis}, None)
        if isinstance(here, Shard) and placement is None:
            self.owner.counts["all_gather"] += 1
            return self._emit("all_gather", (value,), f"{value.name}_all", {"axis": axis, "dim": here.dim}, None)
        if here is None and isinstance(placement, Shard):
            attrs = {"dim": placement.dim, "parts": self.owner.size}
            return self._emit("part_of", (value, self._axis_index()), f"{value.name}_part", attrs, placement)
        assert not isinstance(placement, Partial), f"{value!r} cannot be made partial"
        return self.to(self.to(value, None), placement)

    def _emit(
        self, op: str, operands: Sequence[Value], name: str, attrs: Mapping[str, object], placement: Placement | None
    ) -> Value:
        """A node of one result that has the type of its first operand, placed."""
        type_ = operands[0].tensor.place(self.owner.axis, placement)
        return self.builder.emit(op, operands, attrs, types=[type_], names=[name])[0]

    def _axis_index(self) -> Value:
        """This rank's coordinate, made where it is first needed."""
        if self._index is None:
            self._index = self.builder.one("axis_index", axis=self.owner.axis)
        return self._index

    def _cost(self, value: Value, place: Placement | None) -> float:
        """Bytes over the axis to bring a value to a placement; infinite where it must not be brought there."""
        here = self.owner.on(value)
        if here == place or (here is None and isinstance(place, Shard)):
            return 0.0
        if isinstance(place, Partial) or (isinstance(here, Partial) and place not in (None, self._scattered(value))):
            return float("inf")  # scattering the sums would only be followed by gathering them
        type_ = value.tensor
        if self.owner.sequence is not None and isinstance(type_.numel, int):
            return _WEIGHT  # what is split of it was split so that activations are gathered
        elements = evaluate(type_.numel, dict.fromkeys(self.owner.module.dims, _NOMINAL))
        moved = elements * type_.dtype.bits / 8 * (self.owner.size - 1) / self.owner.size
        return float(2 * moved if isinstance(here, Partial) and place is None else moved)

    # nodes

    def _node(self, node: Node) -> None:
        operands = tuple(self._latest(self.mapping.get(v, v)) for v in node.operands)
        node = node.with_values(operands, node.results)
        special = _SPECIAL.get(node.op)
        if special is not None and special(self, node):
            return
        if node.op == "call":
            self._call(node)
        elif node.attrs.get("axis") == self.owner.axis or (node.op == "part_of" and self.owner.on(node.result)):
            self._keep(node, operands, [self.owner.on(v) for v in node.results])  # spread before
        elif node.op in _EACH:
            self._keep(node, operands, [self.owner.on(v) for v in operands[: len(node.results)]])
        elif node.op in _LINEAR:
            sent = [v if isinstance(self.owner.on(v), Partial) else self.to(v, None) for v in operands]
            places = [self.owner.on(v) for v in sent[: len(node.results)]]
            self._keep(node, sent, [*places, *[None] * (len(node.results) - len(places))])
        elif node.op == "accumulate":
            place = self.owner.on(operands[0])
            self._keep(node, (operands[0], self.to(operands[1], place)), [place])
        else:
            rule = self._choose(node)
            if node.op == "grouped_matmul" and len(operands) == 4 and rule.results == (Partial(),):
                self._biased_by_one(node, rule)
            elif node.op == "aten.linear.default" and len(operands) == 3 and rule.results == (Partial(),):
                self._biased(node, rule)
            else:
                self._keep(node, self._brought(operands, rule.operands), rule.results)

    def _latest(self, value: Value) -> Value:
        """A partial sum that was reduced before is read as its total: the reduction took its memory."""
        if not isinstance(self.owner.on(value), Partial):
            return value
        return self._moved.get((value, self._scattered(value)), value)

    def _brought(self, operands: Sequence[Value], places: Sequence[Placement | None]) -> tuple[Value, ...]:
        self._read |= {v for v, place in zip(operands, places, strict=True) if isinstance(place, Partial)}
        return tuple(self.to(v, place) for v, place in zip(operands, places, strict=True))

    def _keep(self, node: Node, operands: Sequence[Value], places: Sequence[Placement | None]) -> None:
        """The node on other operands, its results placed."""
        results = tuple(self._placed(v, place) for v, place in zip(node.results, places, strict=True))
        self.mapping.update(zip(node.results, results, strict=True))
        self.builder.nodes.append(node.with_values(tuple(operands), results))

    def _choose(self, node: Node) -> ShardingRule:
        """The cheapest rule; of equal ones that on whole tensors, then one that puts the result where it goes."""
        whole = ShardingRule("whole", (None,) * len(node.operands), (None,) * len(node.results))
        if not any(isinstance(v.type, TensorType) and self.owner.on(v) is not None for v in node.operands):
            return whole
        total = self._totals.get(node.results[0])
        goal = self.owner.on(self.mapping.get(total, total)) if total is not None else None

        def rank(rule: ShardingRule) -> tuple[float, bool]:
            cost = sum(self._cost(v, place) for v, place in zip(node.operands, rule.operands, strict=True))
            return cost, goal is not None and rule.results[0] != goal

        return min([whole, *rules_of(node, self.owner.size, self.owner.division)], key=rank)

    def _call(self, node: Node) -> None:
        operands = [self.to(v, self._settled(v)) for v in node.operands]
        body = self.owner.called(callee(node), [self.owner.on(v) for v in operands])
        places = [self.owner.on(v) for v in body.inputs()]
        self._keep(node, self._brought(operands, places), [self.owner.on(v) for v in body.results])
        self._read |= {v for v in map(self.mapping.__getitem__, node.results) if isinstance(self.owner.on(v), Partial)}

    def _biased(self, node: Node, rule: ShardingRule) -> None:
        """A bias is added once: to the sum of the partial products."""
        x, weight = self._brought(node.operands[:2], rule.operands[:2])
        result = node.result
        partial = self.builder.emit(
            node.op, (x, weight), {}, types=[result.tensor.place(self.owner.axis, Partial())], names=["product"]
        )[0]
        place = self._settled(partial)
        operands = (self.to(partial, place), self.to(node.operands[2], None))
        self._keep(replace(node, op="aten.add.Tensor", attrs={}, made_by=self.owner.made_by), operands, [place])

    def _biased_by_one(self, node: Node, rule: ShardingRule) -> None:
        """The bias of a product whose sum stays partial is added by the first rank alone."""
        *operands, bias = self._brought(node.operands, rule.operands)
        operands.append(self._emit("of_first", (bias, self._axis_index()), f"{bias.name}_first", {}, Partial()))
        self._keep(node, operands, rule.results)

    # ops that know of parts

    def _embedding(self, node: Node) -> bool:
        weight, tokens = node.operands
        if self.owner.on(weight) != Shard(0):
            return False
        operands = (weight, self.to(tokens, None), self._axis_index())
        self._keep(self._as(node, "embedding_part", {}), operands, [Partial()])
        return True

    def _embedding_grad(self, node: Node) -> bool:
        total = self._totals.get(node.result)
        if total is None or self.owner.on(self.mapping.get(total, total)) != Shard(0):
            return False
        operands = (*self._brought(node.operands, (None, None)), self._axis_index())
        padding = node.attrs.get("padding_idx", -1)
        attrs = {"shape": node.result.tensor.shape, "padding_idx": padding}
        self._keep(self._as(node, "embedding_part_grad", attrs), operands, [Shard(0)])
        return True

    def _cross_entropy(self, node: Node) -> bool:
        logits, labels = node.operands
        if self.owner.on(logits) != Shard(1):
            return False
        parts, axis = self.owner.size, self.owner.axis
        column = TensorType(DType.F32, (logits.tensor.shape[0], parts)).place(axis, Shard(1))
        operands = (logits, labels, self._axis_index())
        names = ("lse_part", "picked_part")
        attrs = {name: value for name, value in node.attrs.items() if name == "classes"}
        placed = self.builder.emit(
            "cross_entropy_part", operands, {"parts": parts, **attrs}, types=[column, column], names=names
        )
        self.owner.counts["all_gather"] += 1
        names = ("lse_parts", "picked_parts")
        whole = self.builder.emit("all_gather", placed, {"axis": axis, "dim": 1}, names=names)
        attrs = {name: value for name, value in node.attrs.items() if name != "classes"}
        self._keep(self._as(node, "cross_entropy_join", attrs), (*whole, labels), [None, None])
        return True

    def _cross_entropy_grad(self, node: Node) -> bool:
        dsum, logits, labels, lse = node.operands
        if self.owner.on(logits) != Shard(1):
            return False
        operands = (dsum, logits, labels, lse, self._axis_index())
        self._keep(self._as(node, "cross_entropy_part_grad", node.attrs), operands, [Shard(1)])
        return True

    def _global_norm(self, node: Node) -> bool:
        """The square root of the squares of the parts, summed over the axis, and those of whole tensors."""
        squares = self._squares(node)
        if squares is None:
            return False
        self._keep(self._as(node, "aten.sqrt.default", {}), (squares,), [None])
        return True

    def _square_sum(self, node: Node) -> bool:
        squares = self._squares(node)
        if squares is not None:
            self.mapping[node.result] = squares
        return squares is not None

    def _squares(self, node: Node) -> Value | None:
        """The sum of the squares of all operands over the axis; none where all of them are whole."""
        split = [v for v in node.operands if self.owner.on(v) is not None]
        if not split:
            return None
        type_ = node.result.tensor.place(self.owner.axis, Partial())
        squares = self.to(self.builder.emit("square_sum", split, types=[type_], names=["squares"])[0], None)
        whole = [v for v in node.operands if self.owner.on(v) is None]
        if not whole:
            return squares
        rest = self.builder.emit("square_sum", whole, types=[squares.type], names=["squares"])[0]
        return self.builder.emit("aten.add.Tensor", (squares, rest), types=[squares.type], names=["squares"])[0]

    def _reshape(self, node: Node) -> bool:
        """A partial sum that nothing else reads is reduced as what it becomes: along its sequence, or with others that
        are added to it."""
        (value,) = node.operands
        if not isinstance(self.owner.on(value), Partial) or self._readers[value.name] != 1:
            return False
        self._keep(node, self._brought(node.operands, (Partial(),)), [Partial()])
        return True

    def _dropout(self, node: Node) -> bool:
        """Where sequences are split, a rank draws the numbers of its own part."""
        x, *numbers = node.operands
        place = self._settled(x)
        if isinstance(place, Shard) and place.dim > 0 and x.tensor.shape[0] == node.attrs["samples"]:
            operands = (self.to(x, place), *numbers, self._axis_index())
            attrs = {**node.attrs, "dim": place.dim, "parts": self.owner.size}
            self._keep(self._as(node, "dropout_part", attrs), operands, [place])
        else:
            self._keep(node, (self.to(x, None), *numbers), [None])
        return True

    def _longer(self, node: Node) -> bool:
        """Each rank takes its own part of what is repeated or padded; where the axis does not divide it, it has all."""
        whole, own = self.to(node.operands[0], None), self._own_part(node)
        if own is None:
            self._keep(node, (whole,), [None])
        else:
            self._keep(self._as(node, _OWN_PART[node.op], own), (whole, self._axis_index()), [_along(node)])
        return True

    def _repeat_grad(self, node: Node) -> bool:
        own, place = self._own_part(node), _along(node)
        if own is None or self.owner.on(node.operands[0]) != place:
            return False
        self._keep(self._as(node, "repeated_part_grad", own), (node.operands[0], self._axis_index()), [Partial()])
        return True

    def _own_part(self, node: Node) -> dict[str, object] | None:
        """The attributes of an op on a rank's own part of what is longer; `None` where the axis does not divide it."""
        return None if _pieces(node) % self.owner.size else {**node.attrs, "ranks": self.owner.size}

    def _as(self, node: Node, op: str, attrs: Mapping[str, object]) -> Node:
        return replace(node, op=op, attrs=dict(attrs), made_by=self.owner.made_by)


def _along(node: Node) -> Shard:
    """The split along the dim that an op works along."""
    return Shard(int(str(node.attrs["dim"])))


def _pieces(node: Node) -> int:
    """Of how many equal pieces a repeated or padded dim is made."""
    if "times" in node.attrs:
        return int(str(node.attrs["parts"])) * int(str(node.attrs["times"]))
    pieces = node.attrs["to"]
    assert isinstance(pieces, tuple), f"{node!r} pads to {pieces}"
    return math.prod(int(str(n)) for n in pieces)


_OWN_PART = {"pad_extent": "padded_part", "repeat_parts": "repeated_part"}
"""The ops by which a rank takes its own part of what is longer than a weight."""
_SPECIAL: dict[str, Callable[[_Function, Node], bool]] = {
    "aten.embedding.default": _Function._embedding,
    "aten.embedding_dense_backward.default": _Function._embedding_grad,
    "cross_entropy": _Function._cross_entropy,
    "cross_entropy_grad": _Function._cross_entropy_grad,
    "global_norm": _Function._global_norm,
    "square_sum": _Function._square_sum,
    "dropout": _Function._dropout,
    "reshape": _Function._reshape,
    "pad_extent": _Function._longer,
    "repeat_parts": _Function._longer,
    "repeat_parts_grad": _Function._repeat_grad,
}
