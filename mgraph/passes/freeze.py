"""freeze: parameters that the recipe freezes are trained no more, so autodiff makes no gradients for them.

Before:

    state @embed.weight: f32[256, 64] = param trainable

After `freeze{groups=["embed.*: frozen"]}`:

    state @embed.weight: f32[256, 64] = param
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.graph import Module, StateKind
from mgraph.parameter_groups import assign
from mgraph.passes.base import Pass, Report, Stage, Tier


@dataclass(frozen=True)
class Freeze(Pass):
    """Stop training the parameters that a rule of `groups` freezes (`PATTERN|PATTERN: frozen`)."""

    groups: tuple[str, ...] = ()

    name: ClassVar[str] = "freeze"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"forward"})

    def run(self, module: Module, report: Report) -> Module:
        """Unmark the frozen parameters."""
        params = [s for s in module.state.values() if s.kind is StateKind.PARAM]
        groups = assign(self.groups, [s.name for s in params])
        frozen = {s.name: replace(s, trainable=False) for s in params if s.trainable and groups[s.name].frozen}
        if not frozen:
            return module
        if not any(s.trainable and s.name not in frozen for s in params):
            raise PassError("every parameter is frozen", "--groups", "leave some parameters to be trained")
        report.count("frozen", len(frozen))
        return replace(module, state={**module.state, **frozen})
