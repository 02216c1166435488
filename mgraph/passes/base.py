"""What a pass is: a frozen dataclass with typed options, a stage, a numerics tier, and one `run`.

A pass gives a new module and writes what it did into a `Report`. It does not verify, time or dump anything: the
runner's instruments do. Its text form, `name{option=value,...}`, holds the options that differ from their defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from mgraph.ir.graph import Module
from mgraph.passes.spec import print_spec


class Stage(StrEnum):
    """Where in the compiler a pass belongs, in order."""

    NORMALIZE = "normalize"
    RAISE = "raise"
    DERIVE = "derive"
    SHARD = "shard"
    PRECISION = "precision"
    FUSE = "fuse"
    SCHEDULE = "schedule"


class Tier(StrEnum):
    """What a pass may do to the numbers."""

    BITWISE = "bitwise"  # torch.equal before and after
    REASSOCIATING = "reassociating"  # at most 1e-9 apart on the lifted (float64) graph
    PRECISION_CHANGING = "precision-changing"  # reassociating with quantizers as identity, plus the recipe's bound


@dataclass(frozen=True, slots=True)
class Match:
    """One place where a pass applied: the function, the node's id, and what was done there.

    A pass that replaces chains names the nodes of the chain (`replaced`, in the graph before) and those that took their
    place (`made`, in the graph after).
    """

    function: str
    node: str
    detail: str
    replaced: tuple[str, ...] = ()
    made: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A place where a pattern almost applied: the first guard that failed, and with which facts."""

    function: str
    node: str
    pattern: str
    guard: str
    detail: str


@dataclass(slots=True)
class Report:
    """What one run of a pass did: matches, near misses, and named counts."""

    matches: list[Match] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def match(
        self, function: str, node: str, detail: str = "", replaced: Iterable[str] = (), made: Iterable[str] = ()
    ) -> None:
        """Record a place where the pass applied."""
        self.matches.append(Match(function, node, detail, tuple(replaced), tuple(made)))

    def near_miss(self, function: str, node: str, pattern: str, guard: str, detail: str = "") -> None:
        """Record a place where `pattern` failed, with its first failing guard."""
        self.near_misses.append(NearMiss(function, node, pattern, guard, detail))

    def count(self, name: str, number: int = 1) -> None:
        """Add to a named count."""
        self.counts[name] = self.counts.get(name, 0) + number

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads back."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Report:
        """The report that `to_json` gave."""
        report = Report([], [NearMiss(**m) for m in data["near_misses"]], dict(data["counts"]))
        for match in data["matches"]:
            report.match(**match)
        return report


@dataclass(frozen=True, slots=True)
class WeightTransform:
    """How a pass stores one state otherwise than the logical checkpoint, and the way back.

    `forward` takes the logical tensor and gives the stored one; `inverse(forward(x))` equals `x` bitwise, so that
    checkpoints stay in the logical form whatever the passes did.
    """

    state: str
    forward: Callable[[Any], Any]
    inverse: Callable[[Any], Any]


@dataclass(frozen=True)
class Pass:
    """Base of all passes; a subclass is a frozen dataclass whose fields are its options.

    `requires`, `provides`, `invalidates` and `conflicts` are names of properties of the module (`outlined`,
    `canonical`, …): a pass runs only where all it requires and none it conflicts with hold.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    invalidates: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()
    whole_steps: ClassVar[bool] = False
    """Whether only whole steps mean what they did: a microbatch and its end, from what the last one left."""

    def run(self, module: Module, report: Report) -> Module:
        """The new module; what was done goes into `report`. A module that needs nothing is returned as it is."""
        raise NotImplementedError(type(self).__name__)

    def weight_transforms(self, before: Module, after: Module) -> tuple[WeightTransform, ...]:
        """Per changed state, how its stored form follows from the logical one; none for most passes."""
        return ()

    def states_before(self, before: Module, states: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The states with which `before` computes what the module after this pass does with `states` (tensors by name,
        of any float dtype); `None` where there are none. Only a pass that adds what changes the results has others."""
        return states

    def inputs_after(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Inputs (tensors by name) with which the module after this pass computes what `before` does with those of them
        that it takes. Only a pass that adds an input has others."""
        return inputs

    def on_twin(self, real: Module) -> Pass:
        """The pass to run on the reduced twin of `real`: this one, unless its decisions hang on extents."""
        return self

    @property
    def spec(self) -> str:
        """The text form; parsing it gives an equal pass."""
        options = {
            f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        }
        return print_spec(self.name, options)
