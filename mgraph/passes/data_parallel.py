"""data-parallel: each rank of a mesh axis runs its own microbatches; `finish` first sums over the axis.

Before (`finish`):

    %norm = global_norm(@w.grad, …)

After:

    %sum_w_grad, … = all_reduce_start(@w.grad, …, @acc.loss_sum, @acc.count) {axis = "dp"}
    … = wait(…)
    %norm = global_norm(%w_grad, …)

Inputs of the data entries are `S(dim of B)` over the axis, accumulators `P(sum)`, and what lies between is placed by
its dependence on B: a value with B in its shape is sharded there, any other that depends on one is partial.

With `experts` the weights of experts are split over the axis, `S(0)` with all that is theirs, and their gradients are
left as they are: `expert-parallel` sends all tokens to them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import rebuild
from mgraph.ir.dims import names_in
from mgraph.ir.facts import dependent
from mgraph.ir.graph import Axis, Function, Module, Node, Phase, State, Value
from mgraph.ir.types import Partial, PendingType, Placement, Shard, TensorType
from mgraph.passes.autodiff import COUNT_TOTAL, LOSS_TOTAL, accumulator_states
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.calls import callee
from mgraph.passes.counting import count_states
from mgraph.passes.expert_weights import EXPERTS, GRADIENTS, expert_states
from mgraph.passes.placing import rules_of
from mgraph.passes.spreading import Spreader

BATCH = "B"


@dataclass(frozen=True)
class DataParallel(Pass):
    """Insert the gradient reduction over a mesh axis; `size` 0 leaves the axis open (`*`: bound at launch)."""

    axis: str = "dp"
    size: int = 0
    experts: bool = False

    name: ClassVar[str] = "data-parallel"
    stage: ClassVar[Stage] = Stage.SHARD
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"microbatch", "finish"})
    provides: ClassVar[frozenset[str]] = frozenset({"data-parallel"})

    def run(self, module: Module, report: Report) -> Module:
        """Place the data entries over the axis and reduce in `finish`. Raises PassError for an axis that there is."""
        if any(axis.name == self.axis for axis in module.mesh):
            raise PassError(f"the mesh has an axis {self.axis} already", hint="another axis")
        module = replace(module, mesh=(*module.mesh, Axis(self.axis, self.size or None)))
        apart = expert_states(module) if self.experts else frozenset()
        partial = [name for name in accumulators(module) if name not in apart]
        module = with_experts_apart(module, self.axis, apart)
        module = with_batches_apart(module, self.axis, partial, partial, self.name, report)
        return spread_finish(module, self.axis, self.size, self.name) if apart else module


def accumulators(module: Module) -> list[str]:
    """The states that add up over microbatches."""
    counted = [module.state[LOSS_TOTAL], module.state[COUNT_TOTAL], *count_states(module.state)]
    return [s.name for s in (*accumulator_states(module.state), *counted)]


def with_experts_apart(module: Module, axis: str, names: Collection[str]) -> Module:
    """The module with these states split over the axis, expert by expert."""
    state = {n: s.placed(axis, EXPERTS) if n in names else s for n, s in module.state.items()}
    values = {old.value: state[name].value for name, old in module.state.items()}
    functions = {name: function.with_values(values) for name, function in module.functions.items()}
    return replace(module, state=state, functions=functions)


def spread_finish(module: Module, axis: str, size: int, made_by: str) -> Module:
    """`finish` where ranks of the axis hold parts of states: norms are summed over it."""
    spreader = Spreader(module, axis, size, made_by)
    spreader.entry(module.entries["finish"], module.state)
    return replace(module, functions={**module.functions, **spreader.functions})


def with_batches_apart(
    module: Module, axis: str, partial: Sequence[str], reduced: Sequence[str], made_by: str, report: Report
) -> Module:
    """Each rank of the axis has its own microbatches: the states in `partial` are partial sums over it. Those in
    `reduced` are first added up in `finish`, as one bucket."""
    module = _with_joint_sums(module, axis, made_by)
    module = _place(module, axis, set(partial))
    finish = module.entry_function("finish")
    builder = rebuild(finish, made_by)
    builder.phase, builder.origin = Phase.OPTIMIZER, finish.nodes[0].origin
    values = [module.state[name].value for name in reduced]
    totals_of = [v.tensor.place(axis, None) for v in values]
    pending = {t: PendingType(t) for t in dict.fromkeys(totals_of)}
    names = [f"sum_{v.name.replace('.', '_')}" for v in values]
    started = builder.emit(
        "all_reduce_start",
        values,
        {"axis": axis},
        names=[f"{n}_pending" for n in names],
        types=[pending[t] for t in totals_of],
    )
    totals = dict(zip(values, builder.emit("wait", started, names=names, types=totals_of), strict=True))
    for node in finish.nodes:
        # The reset is of the accumulator itself; everything else reads the totals.
        operands = node.operands if node.op == "zero" else tuple(totals.get(v, v) for v in node.operands)
        builder.nodes.append(replace(node, operands=operands))
    report.match(finish.name, started[0].name, f"{len(values)} accumulators summed over {axis} as one bucket")
    return module.with_function(builder.build(finish.results))


def _with_joint_sums(module: Module, axis: str, made_by: str) -> Module:
    """The module whose sums over the ranks of the axis (`joint-losses`) are reductions."""
    functions = {}
    for name, function in module.functions.items():
        if any(_is_joint(node, axis) for node in function.nodes):
            builder = rebuild(function, made_by)
            for node in function.nodes:
                if _is_joint(node, axis):
                    with builder.at(node):
                        (total,) = builder.emit("all_reduce", node.operands, {"axis": axis}, names=[node.result.name])
                    builder.replace(node.result, total)
                else:
                    builder.keep(node)
            functions[name] = builder.build(function.results)
    return replace(module, functions={**module.functions, **functions})


def _is_joint(node: Node, axis: str) -> bool:
    return node.op == "joint_sum" and node.attrs["axis"] == axis


def _place(module: Module, axis: str, partial: set[str]) -> Module:
    """Placements over the axis of states and of every value in the functions that the data entries use."""
    states: dict[str, State] = {}
    mapping: dict[Value, Value] = {}
    for name, state in module.state.items():
        if name in partial:
            placed = state.placed(axis, Partial("sum"))
            mapping[state.value] = placed.value
            state = placed
        states[name] = state
    placer = _Placer(module, axis, mapping)
    for entry in module.entries.values():
        function = module.functions[entry.function]
        if entry.name == "finish":
            placer.placed[function.name] = _place_reset(function, mapping)
        else:
            placer.place(function, [None] * len(function.inputs()))
    return replace(module, state=states, functions={n: placer.placed.get(n, f) for n, f in module.functions.items()})


def _place_reset(function: Function, mapping: dict[Value, Value]) -> Function:
    """The optimizer's function: it works on totals, so only the accumulators and their resets are partial."""
    mapping = dict(mapping)
    for node in function.nodes:
        if node.op == "zero":
            for old, state in zip(node.results, node.operands, strict=True):
                if state in mapping:
                    mapping[old] = Value(old.name, mapping[state].type)
    return function.with_values(mapping)


class _Placer:
    """Places the values of data functions, callers first: a callee's inputs lie as its first call passes them."""

    def __init__(self, module: Module, axis: str, states: dict[Value, Value]) -> None:
        self.module, self.axis, self.states = module, axis, states
        self._size = next(a.size or 1 for a in module.mesh if a.name == axis)
        self._batch = dependent(module.dims, BATCH)
        self.placed: dict[str, Function] = {}
        self._types: dict[tuple[int, Placement | None], TensorType] = {}  # most values share the object of their type

    def place(self, function: Function, inputs: Sequence[Placement | None]) -> Function:
        """Place the values of a function; inputs without B lie as given."""
        mapping = dict(self.states)
        for value, placement in zip(function.inputs(), inputs, strict=True):
            mapping[value] = self._retyped(value, placement)
        for node in function.nodes:
            operands = [self._on(mapping.get(v, v)) for v in node.operands]
            if node.op == "call":
                body = self.placed.get(callee(node)) or self.place(self.module.functions[callee(node)], [*operands])
                placements = [self._on(v) for v in body.results]
            elif node.op == "all_reduce" and node.attrs["axis"] == self.axis:
                placements = [None] * len(node.results)  # a sum over the ranks, the same on all
            elif node.op == "axis_share" and node.attrs["axis"] == self.axis:
                placements = [Partial("sum")]  # of what is the same on all too
            elif (experts := self._of_experts(node, operands)) is not None:
                placements = [*experts]
            else:
                depends = any(placement is not None for placement in operands)
                placements = [Partial("sum") if depends else None] * len(node.results)
            for value, placement in zip(node.results, placements, strict=True):
                mapping[value] = self._retyped(value, placement)
        self.placed[function.name] = function.with_values(mapping)
        return self.placed[function.name]

    def _of_experts(self, node: Node, operands: Sequence[Placement | None]) -> Sequence[Placement | None] | None:
        """Where the results lie of what works on weights of experts that are split; None for any other node."""
        split = {i for i, p in enumerate(operands) if p == EXPERTS and self._batch_dim(node.operands[i]) is None}
        if node.op in GRADIENTS and self._experts_are_split():
            return [EXPERTS]
        if node.op == "expert_sizes" and self._experts_are_split():
            return [Shard(1)]
        if node.op == "even_ends" and self._experts_are_split():
            return [EXPERTS]
        if node.op == "moe_dispatch" and self._experts_are_split():
            return [None, None, EXPERTS]  # rows and their order have the batch in their shapes
        if not split or any(self._batch_dim(v) is not None for v in node.results):
            return None
        if node.op == "accumulate":
            return [EXPERTS]
        rules = rules_of(node, self._size)
        fits = (r for r in rules if all((r.operands[i] == EXPERTS) == (i in split) for i in range(len(operands))))
        rule = next(fits, None)
        assert rule is not None, f"{node!r} works on the weights of experts, and not expert by expert"
        return rule.results

    def _experts_are_split(self) -> bool:
        return any(s.type.on(self.axis) == EXPERTS for s in self.module.state.values())

    def _batch_dim(self, value: Value) -> int | None:
        return _batch_dim(value.type, self._batch) if isinstance(value.type, TensorType) else None

    def _on(self, value: Value) -> Placement | None:
        return value.type.on(self.axis) if isinstance(value.type, TensorType) else None

    def _retyped(self, value: Value, otherwise: Placement | None) -> Value:
        """The value sharded along its batch dim, or else placed as given."""
        if not isinstance(value.type, TensorType):
            return value
        key = id(value.type), otherwise
        placed = self._types.get(key)
        if placed is None:
            dim = _batch_dim(value.type, self._batch)
            placement = Shard(dim) if dim is not None else otherwise
            placed = value.type if placement is None else value.type.place(self.axis, placement)
            self._types[key] = placed
        return value if placed is value.type else Value(value.name, placed, value.is_state)


@lru_cache(maxsize=4096)
def _batch_dim(type_: TensorType, batch: frozenset[str]) -> int | None:
    """The first dim whose extent depends on the batch: on one of these named dims."""
    return next((i for i, d in enumerate(type_.shape) if names_in(d) & batch), None)
