"""tensor-parallel: the ranks of a mesh axis share each layer: weights are split, and values lie as their use says.

Which weights are split is said by `mgraph.passes.parallel_sites`; where values lie follows from them in order of the
graph, forward and backward alike: of the ways in which an op may run on parts (`mgraph.passes.placing`), the one whose
operands move the fewest bytes. Partial sums stay partial through sums, and are reduced once, where they are first read
as anything else:

    %up = aten.linear(%x, %ffn.up.weight{tp=S(0)})                    f32[B, S, 176]{tp=S(2)}
    %down = aten.linear(%glu{tp=S(2)}, %ffn.down.weight{tp=S(1)})     f32[B, S, 64]{tp=P(sum)}
    %down_sum = all_reduce(%down) {axis = "tp"}                       f32[B, S, 64]
    %y = aten.add(%x, %down_sum)

With `sequence` (sequence parallelism) the sums of activations are scattered along the sequence instead, and lie so
until they are gathered for the next split matrix product: norms, dropout and the residual are computed on shards, whose
weights have partial gradients. The bytes sent are the same, and a layer holds a `size`-th of what lies in between:

    %down_sum = reduce_scatter(%down) {axis = "tp", dim = 1}          f32[B, S, 64]{tp=S(1)}
    %y = aten.add(%x, %down_sum)                                      f32[B, S, 64]{tp=S(1)}
    %normed_all = all_gather(%normed) {axis = "tp", dim = 1}          f32[B, S, 64]

An embedding, a cross entropy and a norm over parts become ops that know of parts (`mgraph/ir/ops/vocabulary.py`).
Attributes keep speaking of whole tensors, as types do; who runs a node takes its part (`mgraph.ir.local`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.errors import OptionError, PassError
from mgraph.ir.dims import dim_text, divide
from mgraph.ir.graph import Axis, Fact, Function, Module, State, StateKind
from mgraph.ir.types import Shard
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.parallel_sites import weight_placements
from mgraph.passes.spreading import Spreader
from mgraph.placement_rules import FLAG, KIND, PlacementRule, chosen

_FORWARD = ("evaluate", "step")
"""The entry whose whole forward computation shows how weights are used: that of training, or of inference."""
SEQUENCE = "S"
"""The named dim of the tokens of a sequence."""
_FOLLOWING = (StateKind.GRAD, StateKind.MOMENT, StateKind.MASTER)
"""States that lie as the parameter whose name theirs extends."""


@dataclass(frozen=True)
class TensorParallel(Pass):
    """Split weights and work over a mesh axis of `size` ranks.

    A rule of `place` (`PATTERN: S(1)@tp`, or `R@tp`) puts the parameters that it names elsewhere than their use would.
    With `sequence` activations lie split along the sequence between the blocks of a layer.
    """

    axis: str = "tp"
    size: int = 2
    place: tuple[str, ...] = ()
    sequence: bool = False

    name: ClassVar[str] = "tensor-parallel"
    stage: ClassVar[Stage] = Stage.SHARD
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"derived"})
    provides: ClassVar[frozenset[str]] = frozenset({"tensor-parallel"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"tensor-parallel"})

    def __post_init__(self) -> None:
        if self.size < 1:
            raise PassError(f"the axis {self.axis} has size {self.size}", hint="a size of at least 1")

    def on_twin(self, real: Module) -> Pass:
        """Over two ranks, which divide what more ranks do."""
        return replace(self, size=min(self.size, 2))

    def run(self, module: Module, report: Report) -> Module:
        """Place states, then every function from its callers' side, and insert the collectives."""
        mesh = (*module.mesh, Axis(self.axis, self.size))
        placements = self._placements(module, report)
        state = {name: _placed(s, self.axis, _placement_of(s, placements)) for name, s in module.state.items()}
        sequence = SEQUENCE if self.sequence and self.size > 1 else None
        if sequence is not None and sequence not in module.dims:
            raise PassError(f"the model has no dim {sequence} that sequences are split along", "--sequence-parallel")
        spreader = Spreader(module, self.axis, self.size, self.name, sequence)
        spreader.mapping.update({s.value: state[name].value for name, s in module.state.items()})
        for entry in module.entries.values():
            spreader.entry(entry, state)
        for name, count in sorted(spreader.counts.items()):
            report.count(name, count)
        functions: dict[str, Function] = {n: spreader.functions.get(n, f) for n, f in module.functions.items()}
        facts = (*module.facts, Fact(f"{sequence} % {self.axis} == 0")) if sequence is not None else module.facts
        return replace(module, mesh=mesh, facts=facts, state=state, functions=functions)

    def _placements(self, module: Module, report: Report) -> dict[str, Shard]:
        """Where the weights lie that are split: as rules say, and as their use says."""
        params = [s.name for s in module.state.values() if s.kind is StateKind.PARAM]
        rules = chosen(self.place, self.axis, params)
        if self.size == 1:
            return {}
        forward = next(name for name in _FORWARD if name in module.entries)
        placed = weight_placements(module, forward, self.axis, self.size, report, rules)
        for name, rule in rules.items():
            if rule.dim is not None:
                _check(rule, module.state[name], self.size)
                placed[name] = Shard(rule.dim)
        if rules:
            report.count("placed by rule", len(rules))
        return placed


def _check(rule: PlacementRule, state: State, size: int) -> None:
    """Refuse a dim that a state has not, or that the axis does not divide."""
    shape, dim = state.type.shape, rule.dim
    assert dim is not None, "a rule that splits"
    text = f"the {KIND} '{rule.text}' splits dim {dim} of {state.name} {state.type}"
    if dim >= len(shape):
        raise OptionError(f"{text}, which has {len(shape)}", FLAG, "dims count from 0")
    if divide(shape[dim], size) is None:
        hint = f"another dim, or {rule.axis} of a size that divides {dim_text(shape[dim])}"
        raise OptionError(f"{text}, which {rule.axis}={size} does not divide", FLAG, hint)


def _placement_of(state: State, placements: dict[str, Shard]) -> Shard | None:
    owner = state.name.rpartition(".")[0] if state.kind in _FOLLOWING else state.name
    return placements.get(owner)


def _placed(state: State, axis: str, placement: Shard | None) -> State:
    if placement is None:
        return state
    return state.placed(axis, placement)
