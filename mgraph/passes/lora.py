"""lora: linears whose weights a rule names get a trained update of low rank; all other parameters are frozen.

Before:

    func @layer(%x: f32[B, S, 64]; %attn.q.weight: f32[64, 64]) {
      %linear: f32[B, S, 64] = aten.linear.default(%x, %attn.q.weight)

After `lora{rules=["*.attn.q: rank=8, alpha=16, dropout=0.1"]}`:

    state @layers.0.attn.q.weight: f32[64, 64] = param
    state @layers.0.attn.q.lora_A.weight: f32[8, 64] = param trainable init [["uniform_", -0.125, 0.125]]
    state @layers.0.attn.q.lora_B.weight: f32[64, 8] = param trainable init [["zeros_"]]
    func @layer(%x: f32[B, S, 64]; %attn.q.weight, %attn.q.lora_A.weight, %attn.q.lora_B.weight, %rng.seed, …) {
      %linear: f32[B, S, 64] = aten.linear.default(%x, %attn.q.weight)
      %dropout: f32[B, S, 64] = dropout(%x, %rng.seed, …) {p = 0.1, site = "layers.*.attn.q.lora_dropout", …}
      %lora: f32[B, S, 8] = aten.linear.default(%dropout, %attn.q.lora_A.weight)
      %mul: f32[B, S, 8] = aten.mul.Tensor(%lora) {other = 2.0}
      %lora_1: f32[B, S, 64] = aten.linear.default(%mul, %attn.q.lora_B.weight)
      %add: f32[B, S, 64] = aten.add.Tensor(%linear, %lora_1)

How the functions are rewritten is in `mgraph.passes.adapting`. An entry `evaluation`, without the dropout, is made
where there is dropout and the model has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mgraph import name_rules
from mgraph.adapters import AdapterRule, adapter_names, parse_adapter
from mgraph.errors import OptionError, PassError
from mgraph.ir.graph import Entry, Function, Module, Node, State, StateKind, Value
from mgraph.ir.ops.random import STATES, sequences_in
from mgraph.ir.types import DType, TensorType
from mgraph.passes.adapting import FORMS, Adapting, Target
from mgraph.passes.autodiff import EVALUATION
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.calls import callee


@dataclass(frozen=True, slots=True)
class _Read:
    """A node, no call, that reads a state, and the value that the state is in its function."""

    function: Function
    node: Node
    value: Value


@dataclass(frozen=True)
class Lora(Pass):
    """Add adapters of low rank to the linears that `rules` name, and train those alone, with the parameters of `train`.

    The text of rules is in `mgraph.adapters`; `train` is `PATTERN|PATTERN`.
    """

    rules: tuple[str, ...] = ()
    train: str = ""

    name: ClassVar[str] = "lora"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"forward"})
    provides: ClassVar[frozenset[str]] = frozenset({"adapted"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"adapted"})

    def run(self, module: Module, report: Report) -> Module:
        """Declare the adapters, rewrite the functions that the entries call, and freeze the rest."""
        targets = self.targets(module, report)
        drops = any(target.rule.dropout for target in targets.values())
        if drops and EVALUATION not in module.entries:
            module = _with_evaluation(module)
        state = _frozen(module, self.train, report)
        for weight, target in targets.items():
            state |= {s.name: s for s in _adapter_states(module.state[weight], target)}
        if drops:
            scalar = TensorType(DType.I64)
            made = {n: State.make(n, scalar, StateKind.SCALAR, init=i, persist=False) for n, i in STATES.items()}
            state = {**state, **{name: s for name, s in made.items() if name not in state}}
        module = replace(module, state=state)
        adapting = Adapting(module, targets, self.name, report)
        for entry in module.entries.values():
            adapting.entry(module.functions[entry.function], quiet=entry.name == EVALUATION)
        report.count("adapters", len(targets))
        return replace(module, functions={**module.functions, **adapting.functions})

    def targets(self, module: Module, report: Report) -> dict[str, Target]:
        """The weights that get an adapter, by name; the others that a rule is about are near misses.

        Raises OptionError for a rule that is about no parameter, PassError for one that adapts none.
        """
        rules = [parse_adapter(rule) for rule in self.rules]
        params = {s.name: s for s in module.state.values() if s.kind is StateKind.PARAM}
        readers = [_reads(module, module.functions[entry.function]) for entry in module.entries.values()]
        targets: dict[str, Target] = {}
        misses: dict[AdapterRule, str] = {}
        seen = set()
        for name, rule in name_rules.first_rules(rules, params, "adapter", "--lora").items():
            if rule is None:
                continue
            found = _target(params[name], rule, module, [r.get(params[name].value, []) for r in readers])
            if isinstance(found, Target):
                targets[name] = found
                continue
            function, node = (found.read.function.name, found.read.node.id) if found.read else ("", name)
            misses.setdefault(rule, f"{name}: {found.detail}")
            if (function, node, found.guard) not in seen:  # one for all layers
                seen.add((function, node, found.guard))
                report.near_miss(function, node, self.name, found.guard, f"{self.name} at {name}: {found.detail}")
        for rule in rules:
            if all(target.rule != rule for target in targets.values()):
                hint = "name weights of linears, e.g. '*.q_proj|*.v_proj'"
                raise PassError(f"the adapter '{rule.text}' fits no linear: {misses[rule]}", "--lora", hint)
        return targets

    def states_before(self, before: Module, states: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Adapters amount to `W + scale B A` in place of W; with dropout they do not."""
        targets = self.targets(before, Report())
        if any(target.rule.dropout for target in targets.values()):
            return None
        merged = {}
        for weight, target in targets.items():
            a, b = (states[name].double() for name in adapter_names(weight))
            update = target.rule.scale * (b @ a)
            base = states[weight]
            merged[weight] = (base.double() + (update.T if target.transposed else update)).to(base.dtype)
        return {**states, **merged}


@dataclass(frozen=True, slots=True)
class _Miss:
    """Why a parameter that a rule is about gets no adapter: the first guard that fails, and the read it fails at."""

    guard: str
    detail: str
    read: _Read | None = None


def _target(weight: State, rule: AdapterRule, module: Module, entries: Sequence[Sequence[_Read]]) -> Target | _Miss:
    """The adapter of a parameter, whose reads are given by entry."""
    if len(weight.type.shape) != 2:
        return _Miss("a matrix", f"it has {len(weight.type.shape)} dims", entries[0][0] if entries[0] else None)
    if any(name in module.state for name in adapter_names(weight.name)):
        return _Miss("free names", f"the model has {adapter_names(weight.name)[0]} already")
    ways = set()
    for found in entries:
        if len(found) != 1:
            detail = f"it is read {len(found)} times, expected 1 (a tied weight, or one of several layers)"
            return _Miss("one reader", detail, found[-1] if found else None)
        (read,) = found
        form = FORMS.get(read.node.op)
        if form is None or read.node.operands[form.weight] is not read.value:
            return _Miss("a linear", f"{read.node.op} reads it", read)
        factors = sorted(set(read.node.attrs) - {"args"})
        if factors:
            return _Miss("no factors", f"{read.node.op} has {', '.join(factors)}", read)
        x = read.node.operands[form.x].tensor
        if rule.dropout and sequences_in(x.shape) is None:
            return _Miss(
                "batch first", f"the batch is not the first dim of its input {x}, so nothing can drop out", read
            )
        ways.add(form.transposed)
    assert len(ways) == 1, f"{weight.name} is read in several ways"
    return Target(rule, ways.pop())


def _reads(module: Module, function: Function) -> dict[Value, list[_Read]]:
    """Where the inputs and states of a function are read, in it and in what it calls."""
    known: dict[str, dict[Value, list[_Read]]] = {}

    def of(function: Function) -> dict[Value, list[_Read]]:
        if function.name not in known:
            found: dict[Value, list[_Read]] = {}
            for node in function.nodes:
                called = module.functions[callee(node)] if node.op == "call" else None
                for index, value in enumerate(node.operands):
                    own = [_Read(function, node, value)]
                    found.setdefault(value, []).extend(of(called).get(called.inputs()[index], []) if called else own)
            known[function.name] = found
        return known[function.name]

    return of(function)


def _adapter_states(weight: State, target: Target) -> tuple[State, State]:
    """A [rank, in], drawn as torch draws a linear's weight (uniform within 1 / sqrt(in)), and B [out, rank], zero."""
    rows, columns = weight.type.shape
    outs, ins = (columns, rows) if target.transposed else (rows, columns)
    bound = float(int(ins)) ** -0.5
    names, rank = adapter_names(weight.name), target.rule.rank
    drawn = (("uniform_", -bound, bound),)
    kind = StateKind.PARAM
    return (
        State.make(names[0], TensorType(weight.type.dtype, (rank, ins)), kind, init=drawn, trainable=True),
        State.make(names[1], TensorType(weight.type.dtype, (outs, rank)), kind, init=(("zeros_",),), trainable=True),
    )


def _frozen(module: Module, train: str, report: Report) -> dict[str, State]:
    """The states, of which no parameter is trained but those that a pattern of `train` names."""
    names = [s.name for s in module.state.values() if s.kind is StateKind.PARAM]
    patterns = name_rules.split_patterns(train)
    if patterns and not any(name_rules.fits(patterns, name) for name in names):
        raise OptionError(f"'{train}' matches no parameter", "--lora-train", name_rules.nearest(patterns, names))
    frozen = {n for n in names if module.state[n].trainable and not name_rules.fits(patterns, n)}
    report.count("frozen", len(frozen))
    return {n: replace(s, trainable=s.trainable and n not in frozen) for n, s in module.state.items()}


def _with_evaluation(module: Module) -> Module:
    """The module with an entry `evaluation` that is the same as `forward`."""
    forward = module.entries["forward"]
    assert EVALUATION not in module.functions, f"a function is named {EVALUATION}"
    function = replace(module.functions[forward.function], name=EVALUATION)
    entry = Entry(EVALUATION, EVALUATION, forward.outputs)
    return replace(module, entries={**module.entries, EVALUATION: entry}).with_function(function)
