"""adamw: the `finish` entry: normalise by the global count, clip, update with AdamW, reset the accumulators.

After (states `name.m`, `name.v`, and `name.master` for params below f32, are declared; `step` counts updates):

    func @finish(%lr: f32[]) {
      %norm = global_norm(@w.grad, …)
      %scale, %grad_norm = gradient_scale(%norm, @acc.count) {max_norm = 1.0}
      %w, …, %m, …, %v, … = adamw(@w, …, @w.m, …, @w.v, …, @w.grad, …, %lr, %scale, @step) {n = …}
      … = zero(@acc.loss_sum, @acc.count, @w.grad, …)
    }
    entry finish = @finish -> (loss, grad_norm, count) updates (…)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Entry, Module, Origin, Phase, State, StateKind, Value
from mgraph.ir.types import DType, TensorType
from mgraph.passes.autodiff import COUNT_TOTAL, LOSS_TOTAL, accumulator_states
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.differentiation import gradient_type

STEP = "step"


@dataclass(frozen=True)
class AdamW(Pass):
    """Derive the optimizer entry.

    `weight_decay` applies to parameters of two dims or more (Megatron's rule: norms and biases do not decay);
    `max_norm` 0 turns clipping off.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_norm: float = 1.0

    name: ClassVar[str] = "adamw"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"microbatch"})
    provides: ClassVar[frozenset[str]] = frozenset({"finish"})

    def run(self, module: Module, report: Report) -> Module:
        """Add the moments, masters and step count, and the entry."""
        grads = accumulator_states(module.state)
        params = [module.state[s.name.removesuffix(".grad")] for s in grads]
        moments = {p.name: _moments(p) for p in params}
        masters = {p.name: _master(p) for p in params if p.type.dtype in (DType.BF16, DType.F16)}
        step = State.make(STEP, TensorType(DType.I64), StateKind.SCALAR, init=(("zeros_",),))
        added = [*masters.values(), *(m for pair in moments.values() for m in pair), step]
        state = {**module.state, **{s.name: s for s in added}}

        scalar = gradient_type(TensorType(grads[0].type.dtype))
        builder = FunctionBuilder("finish", self.name, phase=Phase.OPTIMIZER)
        builder.origin = Origin("optimizer")
        lr = builder.param("lr", scalar)
        loss_total, count_total = state[LOSS_TOTAL].value, state[COUNT_TOTAL].value
        norm = builder.one("global_norm", *(g.value for g in grads), name="norm")
        scale, grad_norm = builder.emit(
            "gradient_scale", (norm, count_total), {"max_norm": self.max_norm}, names=("scale", "grad_norm"),
            types=(scalar, scalar),
        )  # fmt: skip
        updates: dict[str, Value] = {}
        for low in (False, True):
            group = [(p, g) for p, g in zip(params, grads, strict=True) if (p.name in masters) is low]
            if group:
                updates |= self._update(builder, group, moments, masters if low else {}, (lr, scale, state[STEP].value))
                report.count("parameters", len(group))
        updates[STEP] = builder.one("aten.add.Scalar", state[STEP].value, other=1, name="next_step")
        divisor = builder.one("aten.clamp.default", count_total, min=1, name="divisor")
        loss = builder.one("aten.div.Tensor", loss_total, divisor, name="loss")
        count = builder.one("aten.clone.default", count_total, name="count")
        resets = [loss_total, count_total, *(g.value for g in grads)]
        names = [f"zero_{v.name.replace('.', '_')}" for v in resets]
        zeros = builder.emit("zero", resets, types=[v.type for v in resets], names=names)
        updates |= dict(zip((v.name for v in resets), zeros, strict=True))
        function = builder.build((loss, grad_norm, count, *updates.values()))
        entry = Entry("finish", "finish", ("loss", "grad_norm", "count"), tuple(updates))
        return replace(module, state=state, entries={**module.entries, "finish": entry}).with_function(function)

    def _update(
        self,
        builder: FunctionBuilder,
        group: Sequence[tuple[State, State]],
        moments: dict[str, tuple[State, State]],
        masters: dict[str, State],
        scalars: tuple[Value, Value, Value],
    ) -> dict[str, Value]:
        """One adamw node over a group of params; returns the new value of each state it updates."""
        params = [p for p, _ in group]
        lists = [
            [masters.get(p.name, p) for p in params],
            [moments[p.name][0] for p in params],
            [moments[p.name][1] for p in params],
        ]
        if masters:
            lists.append(params)
        targets = [s for states in lists for s in states]
        attrs = {
            "n": len(group),
            "masters": bool(masters),
            "beta1": self.beta1,
            "beta2": self.beta2,
            "eps": self.eps,
            "weight_decays": tuple(self.weight_decay if len(p.type.shape) > 1 else 0.0 for p in params),
        }
        operands = [*(s.value for s in targets), *(g.value for _, g in group), *scalars]
        names = [f"new_{s.name.replace('.', '_')}" for s in targets]
        results = builder.emit("adamw", operands, attrs, types=[s.type for s in targets], names=names)
        return dict(zip((s.name for s in targets), results, strict=True))


def _moments(param: State) -> tuple[State, State]:
    """First and second moment, in f32 (f64 for f64), from zero."""
    type_, zeros = gradient_type(param.type), (("zeros_",),)
    return (
        State.make(f"{param.name}.m", type_, StateKind.MOMENT, init=zeros),
        State.make(f"{param.name}.v", type_, StateKind.MOMENT, init=zeros),
    )


def _master(param: State) -> State:
    """The f32 copy that the optimizer updates; it begins as the param was drawn, rounded."""
    type_ = gradient_type(param.type)
    return State.make(f"{param.name}.master", type_, StateKind.MASTER, init=(("copy_from", param.name),))
