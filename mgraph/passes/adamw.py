"""adamw: the `finish` entry: normalise by the global count, clip, update with AdamW or Adam, reset the accumulators.

After (states `name.m`, `name.v`, and `name.master` for params below f32, are declared; `step` counts updates, `skipped`
the steps that were none because loss or gradients were not finite):

    func @finish(%lr: f32[]) {
      %norm = global_norm(@w.grad, …)
      %finite = all_finite(%norm, @acc.loss_sum)
      %scale, %grad_norm = gradient_scale(%norm, @acc.count) {max_norm = 1.0}
      %new_step = aten.add.Tensor(@step, %finite)
      %w, …, %m, …, %v, … = adamw(@w, …, @w.m, …, @w.v, …, @w.grad, …, %lr, %scale, %new_step, %finite) {n = …}
      … = zero(@acc.loss_sum, @acc.count, @w.grad, …)
    }
    entry finish = @finish -> (loss, grad_norm, count, skipped) updates (…)

Where the loss is scaled (`autodiff{loss_scale=…}`), the norm and the factor on the gradients are divided by the scale,
and the scale is updated. Where nothing is clipped (`max_norm=0`), the factor does not hang on the norm:

      %scale = aten.reciprocal.default(%tokens)                                    %tokens: the count, at least 1
      %grad_norm = aten.div.Tensor(%norm, %tokens)

and with `check=loss` the update does not at all: %finite is all_finite(@acc.loss_sum). Then the norm may be had after
the update, or with it (`fuse-squares`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.errors import PassError, did_you_mean
from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Entry, Module, Node, Origin, Phase, State, StateKind, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.types import DType, TensorType
from mgraph.parameter_groups import assign
from mgraph.passes.autodiff import CLEAN_STEPS, COUNT_TOTAL, LOSS_SCALE, LOSS_TOTAL, accumulator_states
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.differentiation import gradient_type

STEP, SKIPPED = "step", "skipped"
OPTIMIZERS = ("adamw", "adam")
CHECKED = ("gradients", "loss")
SCALARS = 4
"""The last operands of an update: rate, scale, number of the update, and whether it is one."""


@dataclass(frozen=True)
class AdamW(Pass):
    """Derive the optimizer entry.

    `optimizer` is `adamw` or `adam` (weight decay as part of the gradient). `weight_decay` applies to parameters of two
    dims or more (Megatron's rule: norms and biases do not decay), unless a rule of `groups` says otherwise; a rule
    (`mgraph.parameter_groups`) multiplies rate and decay of the parameters that it names. `max_norm` 0 turns clipping
    off. A scaled loss's scale grows by `growth` after `interval` clean steps and shrinks by `backoff` after another.
    A step is none where what is checked is not finite: `gradients` (their norm, and the loss) or the `loss` alone.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_norm: float = 1.0
    optimizer: str = "adamw"
    groups: tuple[str, ...] = ()
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    check: str = "gradients"

    name: ClassVar[str] = "adamw"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"microbatch"})
    provides: ClassVar[frozenset[str]] = frozenset({"finish", "derived"})

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            hint = did_you_mean(self.optimizer, OPTIMIZERS)
            raise PassError(f"optimizer {self.optimizer!r} is unknown", hint=hint)
        if self.check not in CHECKED:
            raise PassError(f"check is {self.check!r}", hint=did_you_mean(self.check, CHECKED) or " or ".join(CHECKED))
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise PassError(f"{name} is {getattr(self, name)}", hint="a value from 0 to below 1")

    def run(self, module: Module, report: Report) -> Module:
        """Add the moments, masters and counts of steps, and the entry."""
        grads = accumulator_states(module.state)
        params = [module.state[s.name.removesuffix(".grad")] for s in grads]
        moments = {p.name: _moments(p) for p in params}
        masters = {p.name: _master(p) for p in params if p.type.dtype in (DType.BF16, DType.F16)}
        count = TensorType(DType.I64)
        counts = [State.make(n, count, StateKind.SCALAR, init=(("zeros_",),)) for n in (STEP, SKIPPED)]
        added = [*masters.values(), *(m for pair in moments.values() for m in pair), *counts]
        state = {**module.state, **{s.name: s for s in added}}

        builder = FunctionBuilder("finish", self.name, phase=Phase.OPTIMIZER)
        builder.origin = Origin("optimizer")
        lr = builder.param("lr", gradient_type(TensorType(grads[0].type.dtype)))
        updates: dict[str, Value] = {}
        outputs, scale, finite = self._measures(builder, state, grads, updates)
        updates[STEP] = builder.one("aten.add.Tensor", state[STEP].value, finite, name="new_step")
        for low in (False, True):
            group = [(p, g) for p, g in zip(params, grads, strict=True) if (p.name in masters) is low]
            if group:
                scalars = (lr, scale, updates[STEP], finite)
                updates |= self._update(builder, module, group, moments, masters if low else {}, scalars)
                report.count("parameters", len(group))
        resets = [state[LOSS_TOTAL].value, state[COUNT_TOTAL].value, *(g.value for g in grads)]
        names = [f"zero_{v.name.replace('.', '_')}" for v in resets]
        zeros = builder.emit("zero", resets, types=[v.type for v in resets], names=names)
        updates |= dict(zip((v.name for v in resets), zeros, strict=True))
        function = builder.build((*outputs.values(), *updates.values()))
        entry = Entry("finish", "finish", tuple(outputs), tuple(updates))
        return replace(module, state=state, entries={**module.entries, "finish": entry}).with_function(function)

    def _measures(
        self, builder: FunctionBuilder, state: dict[str, State], grads: Sequence[State], updates: dict[str, Value]
    ) -> tuple[dict[str, Value], Value, Value]:
        """The outputs of the entry by name, the factor on the gradients, and whether the step is finite."""
        loss_total, count_total = state[LOSS_TOTAL].value, state[COUNT_TOTAL].value
        norm = builder.one("global_norm", *(g.value for g in grads), name="norm")
        finite = builder.one("all_finite", *[norm] * (self.check == "gradients"), loss_total, name="finite")
        loss_scale = state[LOSS_SCALE].value if LOSS_SCALE in state else None
        if loss_scale is not None:
            norm = builder.one("aten.div.Tensor", norm, loss_scale, name="unscaled_norm")
        divisor = builder.one("aten.clamp.default", count_total, min=1, name="divisor")
        if self.max_norm:
            attrs: dict[str, object] = {"max_norm": self.max_norm}
            scale, grad_norm = builder.emit("gradient_scale", (norm, count_total), attrs, names=("scale", "grad_norm"))
        else:
            tokens = builder.one("cast", divisor, dtype=norm.tensor.dtype, name="tokens")
            scale = builder.one("aten.reciprocal.default", tokens, name="scale")
            grad_norm = builder.one("aten.div.Tensor", norm, tokens, name="grad_norm")
        outputs = {"loss": builder.one("aten.div.Tensor", loss_total, divisor, name="loss"), "grad_norm": grad_norm}
        outputs["count"] = builder.one("aten.clone.default", count_total, name="count")
        failed = builder.one("aten.logical_not.default", finite, name="failed")
        updates[SKIPPED] = builder.one("aten.add.Tensor", state[SKIPPED].value, failed, name="new_skipped")
        outputs["skipped"] = updates[SKIPPED]
        if loss_scale is not None:
            scale = builder.one("aten.div.Tensor", scale, loss_scale, name="unscale")
            outputs["loss_scale"] = builder.one("aten.clone.default", loss_scale, name="used_loss_scale")
            attrs = {"growth": self.growth, "backoff": self.backoff, "interval": self.interval}
            operands = (loss_scale, state[CLEAN_STEPS].value, finite)
            names = ("new_loss_scale", "new_clean_steps")
            updates[LOSS_SCALE], updates[CLEAN_STEPS] = builder.emit("loss_scale_update", operands, attrs, names=names)
        return outputs, scale, finite

    def _update(
        self,
        builder: FunctionBuilder,
        module: Module,
        group: Sequence[tuple[State, State]],
        moments: dict[str, tuple[State, State]],
        masters: dict[str, State],
        scalars: tuple[Value, ...],
    ) -> dict[str, Value]:
        """One adamw node over some params; returns the new value of each state it updates."""
        params = [p for p, _ in group]
        lists = [
            [masters.get(p.name, p) for p in params],
            [moments[p.name][0] for p in params],
            [moments[p.name][1] for p in params],
        ]
        if masters:
            lists.append(params)
        targets = [s for states in lists for s in states]
        rules = assign(self.groups, [s.name for s in module.state.values() if s.kind is StateKind.PARAM])
        rates = tuple(rules[p.name].lr for p in params)
        attrs = {
            "n": len(group),
            "masters": bool(masters),
            "decoupled": self.optimizer == "adamw",
            "beta1": self.beta1,
            "beta2": self.beta2,
            "eps": self.eps,
            "weight_decays": tuple(rules[p.name].decay(self.weight_decay, len(p.type.shape)) for p in params),
            "rates": rates if set(rates) != {1.0} else (),
        }
        operands = [*(s.value for s in targets), *(g.value for _, g in group), *scalars]
        names = [f"new_{s.name.replace('.', '_')}" for s in targets]
        results = builder.emit("adamw", operands, attrs, types=[s.type for s in targets], names=names)
        return dict(zip((s.name for s in targets), results, strict=True))


def gradients_of(update: Node) -> tuple[Value, ...]:
    """The gradients that a node `adamw` reads."""
    end = len(update.operands) - SCALARS
    return update.operands[end - op_def("adamw").complete(update.attrs)["n"] : end]


def _moments(param: State) -> tuple[State, State]:
    """First and second moment, in f32 (f64 for f64), from zero."""
    type_, zeros = gradient_type(param.type), (("zeros_",),)
    return (
        State.make(f"{param.name}.m", type_, StateKind.MOMENT, init=zeros),
        State.make(f"{param.name}.v", type_, StateKind.MOMENT, init=zeros),
    )


def _master(param: State) -> State:
    """The f32 copy that the optimizer updates; it begins as the param was drawn, before that was rounded."""
    type_ = gradient_type(param.type)
    return State.make(f"{param.name}.master", type_, StateKind.MASTER, init=param.init, seed_name=param.seed_name)
