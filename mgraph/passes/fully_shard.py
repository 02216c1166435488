"""fully-shard: ranks of a data axis share parameters, gradients and optimizer state, each a part of every tensor.

Each rank runs its own microbatches, as under `data-parallel`. Between uses a rank holds its shard of a tensor; what
shards it has goes by `level`, the stage of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054):

    level   sharded                         a microbatch                    finish
    1       optimizer state                                                 scatters gradients, gathers parameters
    2       optimizer state, gradients      scatters gradients              gathers parameters
    3       and parameters                  gathers parameters, scatters
                                            gradients (`mgraph.passes.gathering`)

A tensor is sharded along its first dim that the axis divides (what tensor parallelism left of it). One that has none
stays whole and is a near miss; its gradient is summed in `finish`, as those of `data-parallel`.

With `experts`, at any level, the weights of experts stay with their ranks, `S(0)` with all that is theirs: they are
never gathered, nor are their gradients scattered, since `expert-parallel` sends all tokens to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.graph import Axis, Function, Module, Phase, State, StateKind, Value
from mgraph.ir.local import bound_dims, data_axes
from mgraph.ir.types import PendingType, Shard, TensorType
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.data_parallel import accumulators, spread_finish, with_batches_apart, with_experts_apart
from mgraph.passes.expert_weights import expert_states
from mgraph.passes.gathering import Sharded, by_dim, scattered_type, with_units

MOST_WHOLE = 0.1
"""The largest part of the parameters that may stay whole on every rank."""
_FIRST_LEVEL = {StateKind.MOMENT: 1, StateKind.MASTER: 1, StateKind.GRAD: 2, StateKind.PARAM: 3}
"""The level from which on states of a kind are sharded."""


@dataclass(frozen=True)
class FullyShard(Pass):
    """Shard states over a data axis of `size` ranks.

    `reshard`: a layer's parameters are given up after its forward, and gathered again for its backward. `wide`:
    gradients narrower than f32 are summed over the ranks in f32.
    """

    axis: str = "fsdp"
    size: int = 2
    level: int = 3
    reshard: bool = True
    wide: bool = False
    experts: bool = False

    name: ClassVar[str] = "fully-shard"
    stage: ClassVar[Stage] = Stage.SHARD
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"microbatch", "finish"})
    provides: ClassVar[frozenset[str]] = frozenset({"fully-shard"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"fully-shard"})

    def __post_init__(self) -> None:
        if self.size < 1:
            raise PassError(f"the axis {self.axis} has size {self.size}", hint="a size of at least 1")
        if self.level not in (1, 2, 3):
            raise PassError(f"ZeRO has no level {self.level}", hint="1, 2 or 3")

    def on_twin(self, real: Module) -> Pass:
        """Over two ranks, with states that lie as those of `real`."""
        shards = self._shards(real, Report())
        return _OnTwin(self.axis, min(self.size, 2), self.level, self.reshard, self.wide, self.experts, shards)

    def run(self, module: Module, report: Report) -> Module:
        """Place states, then rewrite `finish` and the data entries."""
        apart = expert_states(module) if self.experts else frozenset()
        placements = {name: p for name, p in self._placements(module, report).items() if name not in apart}
        module = with_experts_apart(module, self.axis, apart)
        # Major first: replicas, then shards, then what divides a layer.
        at = len(data_axes(module.mesh, bound_dims(module)))
        module = replace(module, mesh=(*module.mesh[:at], Axis(self.axis, self.size), *module.mesh[at:]))
        totals = [name for name in accumulators(module) if name not in apart]
        reduced = [name for name in totals if name not in placements]
        partial = totals if self.level == 1 else reduced
        module = with_batches_apart(module, self.axis, partial, reduced, self.name, report)
        module = self._placed(module, placements)
        by_kind: dict[StateKind, dict[str, Shard]] = {kind: {} for kind in StateKind}
        for name, placement in placements.items():
            by_kind[module.state[name].kind][name] = placement
        sharded = Sharded(
            self.axis,
            by_kind[StateKind.PARAM] if self.level > 2 else {},
            by_kind[StateKind.GRAD] if self.level > 1 else {},
            self.reshard,
            self.wide,
        )
        entries = [name for name in module.entries if name != "finish"]
        module, units = with_units(module, entries, sharded, self.name)
        report.count("units", units)
        if self.level < 3:
            module = module.with_function(_on_parts(module, self, placements))
        return spread_finish(module, self.axis, self.size, self.name)

    def _placements(self, module: Module, report: Report) -> dict[str, Shard]:
        """Where states that may be sharded lie, by name: as the parameter whose they are."""
        found = self._shards(module, report)
        placements = {}
        for state in module.state.values():
            owner = state.name if state.name in found else state.name.rpartition(".")[0]
            placement = found.get(owner)
            if placement is not None and state.kind in _FIRST_LEVEL:
                placements[state.name] = placement
        return placements

    def _shards(self, module: Module, report: Report) -> Mapping[str, Shard | None]:
        """How parameters are sharded, by name; None: not at all."""
        sizes = {axis.name: axis.size or 1 for axis in module.mesh}
        owners = {s.name: s for s in module.state.values() if s.kind is StateKind.PARAM}
        found = {name: shard_of(owner.type, sizes, self.size) for name, owner in owners.items()}
        whole = {name: owners[name].type for name, placement in found.items() if placement is None}
        for name, type_ in whole.items():
            guard = f"{self.axis}={self.size} divides a dim"
            report.near_miss("", name, f"sharded over {self.axis}", guard, str(type_))
        total = sum(_elements(owner.type) for owner in owners.values())
        if sum(map(_elements, whole.values())) > MOST_WHOLE * total:
            largest = max(whole, key=lambda name: _elements(whole[name]))
            raise PassError(
                f"{self.axis}={self.size} divides no dim of {len(whole)} parameters of {len(owners)}, "
                f"such as {largest} {whole[largest]}",
                where="--mesh",
                hint=f"an {self.axis} that divides a dim of each, e.g. {self.axis}=2",
            )
        report.count("sharded parameters", len(owners) - len(whole))
        report.count("whole parameters", len(whole))
        return found

    def _placed(self, module: Module, placements: Mapping[str, Shard]) -> Module:
        """The module with its states placed that this level shards."""
        state = dict(module.state)
        for name, placement in placements.items():
            if self.level >= _FIRST_LEVEL[state[name].kind]:
                state[name] = state[name].placed(self.axis, placement)
        values = {old.value: state[name].value for name, old in module.state.items()}
        functions = {name: function.with_values(values) for name, function in module.functions.items()}
        return replace(module, state=state, functions=functions)


@dataclass(frozen=True)
class _OnTwin(FullyShard):
    """The pass on the twin of a module, whose parameters are sharded as given: small extents divide otherwise."""

    given: Mapping[str, Shard | None] = field(default_factory=dict)

    def _shards(self, module: Module, report: Report) -> Mapping[str, Shard | None]:
        return self.given


def shard_of(type_: TensorType, sizes: Mapping[str, int], size: int) -> Shard | None:
    """The first dim of a state that `size` divides, after the axes that it is sharded over already (by their sizes)."""
    for dim, extent in enumerate(type_.shape):
        others = math.prod(sizes[axis] for axis, p in type_.placement if isinstance(p, Shard) and p.dim == dim)
        if isinstance(extent, int) and extent % (others * size) == 0:
            return Shard(dim)
    return None


def _on_parts(module: Module, pass_: FullyShard, placements: Mapping[str, Shard]) -> Function:
    """`finish` where parameters are whole: each rank updates its part of them, and gathers the others'.

    Where accumulators are whole too (level 1), they are scattered first.
    """
    entry, axis = module.entries["finish"], pass_.axis
    finish = module.functions[entry.function]
    builder = rebuild(finish, pass_.name)
    builder.phase, builder.origin = Phase.OPTIMIZER, finish.nodes[0].origin
    index = builder.one("axis_index", axis=axis)
    scattered: dict[Value, Value] = {}
    if pass_.level == 1:
        gradients = [s.value for n, s in module.state.items() if n in placements and s.kind is StateKind.GRAD]
        for dim, values in by_dim(gradients, lambda v: placements[v.name]).items():
            attrs: dict[str, object] = {"axis": axis, "dim": dim} | ({"wide": True} if pass_.wide else {})
            types = [scattered_type(v.tensor, axis, dim, wide=pass_.wide) for v in values]
            parts = _exchange(builder, "reduce_scatter_start", values, attrs, types, "part")
            scattered.update(zip(values, parts, strict=True))
    parameters = {s.value: placements[n] for n, s in module.state.items() if _is_whole(s, placements)}
    for node in finish.nodes:
        # The reset is of the accumulator itself; everything else reads the shards.
        operands = node.operands if node.op == "zero" else tuple(scattered.get(v, v) for v in node.operands)
        if node.op == "adamw":
            operands = tuple(_part(builder, v, index, pass_, parameters.get(v)) for v in operands)
        builder.nodes.append(replace(node, operands=operands))
    count = len(entry.outputs)
    updates = dict(zip(entry.updates, finish.results[count:], strict=True))
    updated = [name for name in updates if name in module.state and _is_whole(module.state[name], placements)]
    for dim, names in by_dim(updated, lambda name: placements[name]).items():
        values = [updates[name] for name in names]
        types = [v.tensor.place(axis, None) for v in values]
        gathered = _exchange(builder, "all_gather_start", values, {"axis": axis, "dim": dim}, types, "whole")
        updates.update(zip(names, gathered, strict=True))
    return builder.build([*finish.results[:count], *updates.values()])


def _is_whole(state: State, placements: Mapping[str, Shard]) -> bool:
    """Whether a parameter is held whole whose optimizer state is sharded."""
    return state.kind is StateKind.PARAM and state.trainable and state.name in placements


def _part(builder: FunctionBuilder, value: Value, index: Value, pass_: FullyShard, place: Shard | None) -> Value:
    """This rank's part of a parameter; other values as they are."""
    if place is None:
        return value
    attrs = {"dim": place.dim, "parts": pass_.size}
    types = [value.tensor.place(pass_.axis, place)]
    return builder.emit("part_of", (value, index), attrs, types=types, names=[f"{_short(value)}_part"])[0]


def _exchange(
    builder: FunctionBuilder,
    op: str,
    values: Sequence[Value],
    attrs: Mapping[str, object],
    types: Sequence[TensorType],
    ending: str,
) -> tuple[Value, ...]:
    """A split-phase collective and its wait, as one bucket."""
    names = [f"{_short(v)}_{ending}" for v in values]
    pending = builder.emit(
        op, values, attrs, types=[PendingType(t) for t in types], names=[f"{name}_pending" for name in names]
    )
    return builder.emit("wait", pending, types=types, names=names)


def _short(value: Value) -> str:
    return value.name.replace(".", "_")


def _elements(type_: TensorType) -> int:
    return math.prod(int(extent) for extent in type_.shape)
