"""autodiff: the forward entry becomes `microbatch` (loss and gradients into accumulators), `evaluate` and `predict`.

Before:

    func @forward(%tokens, %labels) { … return %loss_sum, %count, %logits }
    entry forward = @forward -> (loss_sum, count, logits)

After (backward seeded with 1 on the loss *sum*; every trainable param gets an accumulator state `name.grad`):

    func @microbatch(%tokens, %labels) { … %d = aten.ones.default() … %grad_w = accumulate(@w.grad, %dw) … }
    entry microbatch = @microbatch -> (loss_sum, count) updates (acc.loss_sum, acc.count, w.grad, …)
    entry evaluate = @evaluate -> (loss_sum, count)          (from the entry `evaluation` where there is one)
    entry predict = @predict -> (logits)

What the forward gives besides (the decisions of routers), all three give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.graph import Entry, Function, Module, Node, Phase, State, StateKind
from mgraph.ir.types import DType, TensorType
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.calls import callee, callers_first, calls, part_of
from mgraph.passes.dce import DeadCode, size
from mgraph.passes.differentiation import Differentiator, Sweep, gradient_type

EVALUATION = "evaluation"
"""The entry of a model that computes something else when it is not trained: without dropout and noise."""
LOSS, COUNT, LOGITS = "loss_sum", "count", "logits"
LOSS_TOTAL, COUNT_TOTAL = "acc.loss_sum", "acc.count"
LOSS_SCALE, CLEAN_STEPS = "loss_scale", "clean_steps"
"""The factor on the gradients of a scaled loss, and the steps since it last changed (`mgraph.passes.adamw`)."""


@dataclass(frozen=True)
class Autodiff(Pass):
    """Derive the training entries from the captured forward.

    With `loss_scale` the backward is seeded with the state `loss_scale`, which begins with this value, so that small
    gradients do not vanish in f16; 0 seeds it with 1. With `low_sums` gradients are summed in the dtype of their
    parameters, else in f32.
    """

    loss_scale: float = 0.0
    low_sums: bool = False

    name: ClassVar[str] = "autodiff"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"forward"})
    provides: ClassVar[frozenset[str]] = frozenset({"microbatch"})
    invalidates: ClassVar[frozenset[str]] = frozenset({"forward"})

    def run(self, module: Module, report: Report) -> Module:
        """Differentiate the forward entry's function."""
        entry = module.entries["forward"]
        function = module.entry_function("forward")
        if entry.outputs[:2] != (LOSS, COUNT):
            raise PassError(f"the forward entry gives {entry.outputs}, not a loss sum and a count")
        differentiator = Differentiator(module, self.name, low_sums=self.low_sums)
        besides = tuple(name for name in entry.outputs[2:] if name != LOGITS)
        more = [entry.outputs.index(name) for name in besides]
        microbatch, state = _microbatch(differentiator, module, function, self.loss_scale, more)
        updates = (LOSS_TOTAL, COUNT_TOTAL, *(s.name for s in state if s.kind is StateKind.GRAD))
        report.count("gradients", len(updates) - 2)
        quiet = module.entry_function(EVALUATION if EVALUATION in module.entries else "forward")
        functions = {n: f for n, f in module.functions.items() if n not in (function.name, quiet.name)}
        extra = [quiet.results[i] for i in more]
        evaluate = part_of(quiet, "evaluate", (*quiet.results[:2], *extra))
        functions |= {**differentiator.functions, "microbatch": microbatch, "evaluate": evaluate}
        entries = {
            "microbatch": Entry("microbatch", "microbatch", (LOSS, COUNT, *besides), updates),
            "evaluate": Entry("evaluate", "evaluate", (LOSS, COUNT, *besides)),
        }
        if LOGITS in entry.outputs:
            logits = quiet.results[entry.outputs.index(LOGITS)]
            entries["predict"] = Entry("predict", "predict", (LOGITS, *besides))
            functions |= _without_losses(module, entries["predict"], part_of(quiet, "predict", (logits, *extra)))
        declared = {**module.state, **{s.name: s for s in state}}
        return replace(module, functions=functions, entries=entries, state=declared)


def _without_losses(module: Module, entry: Entry, predict: Function) -> dict[str, Function]:
    """The function of `predict`, and those that it calls where losses of layers, with what ranks send for them, have
    dropped out: under names of their own."""
    alone = replace(module, functions={**module.functions, predict.name: predict}, entries={entry.name: entry})
    swept = DeadCode().run(alone, Report())
    own: dict[str, str] = {}
    for name in reversed(callers_first(swept, {predict.name})[1:]):
        function = swept.functions[name]
        if size([function]) != size([module.functions[name]]) or any(callee(node) in own for node in calls(function)):
            own[name] = f"{name}.{predict.name}"
    made = {}
    for name, new in {**own, predict.name: predict.name}.items():
        nodes = (_calling(node, own) if node.op == "call" else node for node in swept.functions[name].nodes)
        made[new] = replace(swept.functions[name], name=new, nodes=tuple(nodes))
    return made


def _calling(node: Node, names: Mapping[str, str]) -> Node:
    """A call, by another name of what it calls if there is one."""
    return replace(node, attrs={**node.attrs, "callee": names.get(callee(node), callee(node))})


def _microbatch(
    differentiator: Differentiator, module: Module, function: Function, loss_scale: float, more: Sequence[int]
) -> tuple[Function, list[State]]:
    """Forward and backward of one microbatch, and the accumulator states it needs; of the results besides loss and
    count, it gives `more`."""
    trimmed = part_of(function, "microbatch", [function.results[i] for i in (0, 1, *more)])
    loss, count, *besides = trimmed.results
    needs = tuple(False for _ in trimmed.inputs())
    sweep = Sweep(differentiator, trimmed, "microbatch", needs)
    state = _accumulators(differentiator, loss.tensor.dtype)
    scaling = _loss_scale_states(loss.tensor, loss_scale) if loss_scale else []
    by_name = {s.name: s for s in state}
    read = {v for node in trimmed.nodes for v in node.operands if v.is_state}
    for value in sorted(read, key=lambda v: v.name):
        if module.state[value.name].trainable:
            sweep.accumulators[value] = by_name[f"{value.name}.grad"].value
    forward = sweep.forward()
    if loss not in sweep.active:
        raise PassError("the loss depends on no trainable parameter", where=str(function.nodes[-1].origin))
    with sweep.builder.at(forward[-1], Phase.BACKWARD):
        if scaling:
            scale = scaling[0].value
            same = scale.tensor.dtype is loss.tensor.dtype
            sweep.add(loss, scale if same else sweep.builder.one("cast", scale, dtype=loss.tensor.dtype))
        else:
            one = sweep.builder.one("aten.ones.default", size=(), dtype=loss.tensor.dtype, name="d_loss_sum")
            sweep.add(loss, one)
        sweep.backward()
    with sweep.builder.at(forward[-1]):
        totals = [
            sweep.builder.one("accumulate", by_name[name].value, value)
            for name, value in ((LOSS_TOTAL, loss), (COUNT_TOTAL, count))
        ]
    current = {f"{value.name}.grad": new for value, new in sweep.accumulators.items()}
    grads = [current.get(s.name, s.value) for s in state if s.kind is StateKind.GRAD]
    nodes = (*forward, *sweep.builder.nodes)
    return replace(trimmed, nodes=nodes, results=(loss, count, *besides, *totals, *grads)), [*state, *scaling]


def _loss_scale_states(type_: TensorType, begin: float) -> list[State]:
    return [
        State.make(LOSS_SCALE, gradient_type(type_), StateKind.SCALAR, init=(("fill_", begin),)),
        State.make(CLEAN_STEPS, TensorType(DType.I64), StateKind.SCALAR, init=(("zeros_",),)),
    ]


def _accumulators(differentiator: Differentiator, loss_dtype: DType) -> list[State]:
    """Loss and count totals, and one gradient accumulator per trainable parameter."""
    zeros = (("zeros_",),)
    made = [
        State.make(LOSS_TOTAL, TensorType(loss_dtype), StateKind.SCALAR, init=zeros, persist=False),
        State.make(COUNT_TOTAL, TensorType(DType.I64), StateKind.SCALAR, init=zeros, persist=False),
    ]
    for state in differentiator.module.state.values():
        if state.kind is StateKind.PARAM and state.trainable:
            type_ = differentiator.accumulator_type(state.type)
            made.append(State.make(f"{state.name}.grad", type_, StateKind.GRAD, init=zeros, persist=False))
    return made


def accumulator_states(state: Mapping[str, State]) -> list[State]:
    """The gradient accumulators of a module, in declaration order."""
    return [s for s in state.values() if s.kind is StateKind.GRAD]
