"""overlap-gradients: an entry for the last microbatch of a step and its end, whose reductions begin early.

Before, a step is microbatches and then `finish`, which first sums accumulators over a data axis:

    microbatch:  …, %a1 = call @layer.bwd(…; @layers.1.w.grad)      finish:  %p = all_reduce_start(@layers.0.w.grad, …)
                 …, %a0 = call @layer.bwd(…; @layers.0.w.grad)               … = wait(%p)

After, the last microbatch may be the entry `last` instead, and there is no `finish` after it:

    last:  …, %a1 = call @layer.bwd(…; @layers.1.w.grad)
           %p1 = all_reduce_start(%a1) {axis = "dp"}                 while the backward goes on
           …, %a0 = call @layer.bwd(…; @layers.0.w.grad)
           %p0 = all_reduce_start(%a0) {axis = "dp"}
           … = wait(%p0)
           … = wait(%p1)
           …                                                         as `finish` goes on

A message holds what one call, or the nodes between two calls, have added up (buckets as of PyTorch DDP, Li et al. 2020,
arXiv:2006.15704, along the layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Entry, Function, Module, Node, Phase, Value
from mgraph.passes.base import Pass, Report, Stage, Tier

LAST = "last"
_ADDING = ("call", "accumulate_each")
"""Ops whose results are a bucket by themselves."""


@dataclass(frozen=True)
class OverlapGradients(Pass):
    """Add the entry `last`, in which reductions run beside the backward."""

    name: ClassVar[str] = "overlap-gradients"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"microbatch", "finish", "data-parallel"})
    provides: ClassVar[frozenset[str]] = frozenset({LAST})
    conflicts: ClassVar[frozenset[str]] = frozenset({LAST, "in-place"})

    def run(self, module: Module, report: Report) -> Module:
        """Join both functions; what `finish` first reduces begins in the microbatch."""
        microbatch, finish = module.entries["microbatch"], module.entries["finish"]
        joined = _Joined(module, module.functions[microbatch.function], module.functions[finish.function], self.name)
        function = joined.function(microbatch, finish)
        report.match(
            LAST, function.nodes[0].id, f"{joined.buckets} messages for reductions of {joined.reduced} tensors"
        )
        updates = (*finish.updates, *(name for name in microbatch.updates if name not in finish.updates))
        entry = Entry(LAST, LAST, (*finish.outputs, *microbatch.outputs[2:]), updates)
        return replace(module, entries={**module.entries, LAST: entry}).with_function(function)


@dataclass
class _Joined:
    """The microbatch's nodes, then those of `finish`, which reads what the microbatch made of the states."""

    module: Module
    microbatch: Function
    finish: Function
    made_by: str
    buckets: int = 0
    reduced: int = 0
    _values: dict[Value, Value] = field(default_factory=dict)
    """States, and values of `finish` → values of the joined function."""
    _waits: dict[Node, list[tuple[Value, ...]]] = field(default_factory=dict)
    """A reduction of `finish` → what its messages start, the last one first."""

    def function(self, microbatch: Entry, finish: Entry) -> Function:
        """The joined function."""
        taken = self.microbatch.names()
        self.builder = FunctionBuilder(LAST, self.made_by, taken)
        made = self.microbatch.results[len(microbatch.outputs) :]
        self._values = {self.module.state[n].value: v for n, v in zip(microbatch.updates, made, strict=True)}
        params = []
        for param in self.finish.params:
            self._values[param] = Value(self.builder.fresh(param.name), param.type)
            params.append(self._values[param])
        starts = self._messages()
        for index, node in enumerate(self.microbatch.nodes):
            self.builder.nodes.append(node)
            for start in starts.get(index, ()):
                self._start(start, node)
        for node in self.finish.nodes:
            self._node(node)
        self.builder.params, self.builder.slots = [*self.microbatch.params, *params], []
        given = len(finish.outputs)
        results = [self._values.get(v, v) for v in self.finish.results[:given]]
        results += self.microbatch.results[2 : len(microbatch.outputs)]
        results += [self._values.get(v, v) for v in self.finish.results[given:]]
        results += [v for n, v in zip(microbatch.updates, made, strict=True) if n not in finish.updates]
        return self.builder.build(results)

    # reductions

    def _messages(self) -> dict[int, list[tuple[Node, list[int]]]]:
        """After which node of the microbatch which operands of which reduction of `finish` can be sent."""
        nodes = self.microbatch.nodes
        places = {v: index for index, node in enumerate(nodes) for v in node.results}
        calls = [index for index, node in enumerate(nodes) if node.op == "call"]
        found: dict[int, list[tuple[Node, list[int]]]] = {}
        for node in self.finish.nodes:
            if not node.op.endswith("_start"):
                continue
            by_place: dict[int, list[int]] = {}
            for position, operand in enumerate(node.operands):
                made = places.get(self._values.get(operand, operand))
                if made is None:
                    continue
                following = next((call for call in calls if call > made), len(nodes))
                by_place.setdefault(made if nodes[made].op in _ADDING else following - 1, []).append(position)
            self.reduced += sum(map(len, by_place.values()))
            for place, positions in by_place.items():
                found.setdefault(place, []).append((node, positions))
        return found

    def _start(self, message: tuple[Node, Sequence[int]], after: Node) -> None:
        node, positions = message
        operands = [self._values[node.operands[p]] for p in positions]
        types = [node.results[p].type for p in positions]
        names = [node.results[p].name for p in positions]
        with self.builder.at(after, Phase.BACKWARD):
            pending = self.builder.emit(node.op, operands, node.attrs, types=types, names=names)
        self._values.update(zip((node.results[p] for p in positions), pending, strict=True))
        self._waits.setdefault(node, []).insert(0, pending)
        self.buckets += 1

    # the end of the step

    def _node(self, node: Node) -> None:
        if any(v in self._values for v in node.results):  # a reduction that has begun, but for what is not made before
            rest = [p for p, v in enumerate(node.results) if v not in self._values]
            if rest:
                self._start((node, rest), node)
            return
        begun = next((start for start in self._waits if node.op == "wait" and start.results == node.operands), None)
        if begun is not None:
            self._wait(node, begun)
            return
        # The reset is of the accumulator itself; everything else reads what the microbatch made of it.
        states = node.op == "zero"
        operands = tuple(v if states and v.is_state else self._values.get(v, v) for v in node.operands)
        results = tuple(Value(self.builder.fresh(v.name), v.type) for v in node.results)
        self._values.update(zip(node.results, results, strict=True))
        self.builder.nodes.append(node.with_values(operands, results))

    def _wait(self, node: Node, begun: Node) -> None:
        """End the messages of a reduction, the last one first: once it is through, all others are."""
        results = {self._values[v]: r for v, r in zip(node.operands, node.results, strict=True)}
        with self.builder.at(node):
            for pending in self._waits[begun]:
                types = [results[v].type for v in pending]
                names = [results[v].name for v in pending]
                made = self.builder.emit("wait", pending, types=types, names=names)
                self._values.update(zip((results[v] for v in pending), made, strict=True))
