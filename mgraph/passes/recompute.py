"""recompute: give up saved intermediates and compute them again in the backward.

Before:

    %h1, %a, %b = call @layer.fwd(%h0; @w)
    %dh0, %gw   = call @layer.bwd(%a, %b, %dh1; @w, @w.grad)

After (mode `full`): `layer.fwd` returns its outputs only, and `layer.bwd` begins with the part of the forward that it
needs:

    %h1       = call @layer.fwd(%h0; @w)
    %dh0, %gw = call @layer.bwd(%h0, %dh1; @w, @w.grad)

Mode `selective` keeps the values that are dear to compute again and gives up as many of the others as it takes to hold
at most `budget` bytes between forward and backward of a microbatch of `batch` sequences of `seq` tokens
(`mgraph.passes.activations`), or gives up exactly `values` (`layer.fwd:a`). Mode `none` keeps everything that autodiff
saved. Activation checkpointing: Chen et al. 2016, arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.errors import PassError, did_you_mean
from mgraph.ir.graph import Function, Module, Node, Phase, Value
from mgraph.passes.activations import Held, Kept, Pair, choose, least_kept, pairs_of
from mgraph.passes.base import Pass, Report, Stage, Tier

MODES = ("none", "selective", "full")
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


@dataclass(frozen=True)
class Recompute(Pass):
    """Recompute layer functions in the backward; `mode` is `none`, `selective` or `full`."""

    mode: str = "none"
    budget: int = 0
    batch: int = 8
    seq: int = 2048
    values: tuple[str, ...] = ()

    name: ClassVar[str] = "recompute"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"microbatch"})

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PassError(f"recompute mode {self.mode!r} is unknown", hint=f"one of {', '.join(MODES)}")
        if self.mode == "selective" and not (self.budget or self.values):
            raise PassError("recompute is selective without a budget", hint="recompute{mode=selective,budget=BYTES}")

    def run(self, module: Module, report: Report) -> Module:
        """Change every forward/backward pair and its calls."""
        if self.mode == "none":
            return module
        entry = module.entry_function("microbatch")
        pairs = pairs_of(module, entry)
        held = Held(module, entry, pairs, {"B": self.batch, "S": self.seq})
        kept = self._kept(held)
        everything = {name: frozenset(pair.saved) for name, pair in pairs.items()}
        report.count("bytes_held_before", held.bytes(everything))
        report.count("bytes_held", held.bytes(kept))
        report.count("flops_added", sum(held.flops(pair, kept[name]) for name, pair in pairs.items()))
        report.count("cost_added", int(sum(held.cost(pair, kept[name]) for name, pair in pairs.items())))
        plans: dict[str, _Plan] = {}
        for name, pair in pairs.items():
            if kept[name] != everything[name]:
                plan = _plan(pair, kept[name], self.name)
                plans[pair.fwd.name] = plans[pair.bwd.name] = plan
                report.match(pair.bwd.name, pair.bwd.nodes[0].id, _told(held, pair, kept))
        if not plans:
            return module
        functions = {**module.functions, entry.name: _recall(entry, plans)}
        for plan in plans.values():
            functions[plan.fwd.name], functions[plan.bwd.name] = plan.fwd, plan.bwd
        return replace(module, functions=functions)

    def on_twin(self, real: Module) -> Pass:
        """The pass that gives up on the twin what this one gives up on the real module."""
        if self.mode != "selective":
            return self
        entry = real.entry_function("microbatch")
        held = Held(real, entry, pairs_of(real, entry), {"B": self.batch, "S": self.seq})
        kept = self._kept(held)
        given_up = [f"{n}:{v}" for n, pair in held.pairs.items() for v in pair.saved if v not in kept[n]]
        return replace(self, budget=0, values=tuple(given_up)) if given_up else Recompute()

    def _kept(self, held: Held) -> Kept:
        """The saved values that stay saved, by forward function. Raises PassError where the budget is too small."""
        if self.mode == "full":
            return {name: least_kept(pair) for name, pair in held.pairs.items()}
        if self.values:
            return self._named(held.pairs)
        kept, total = choose(held, self.budget)
        if total > self.budget:
            raise PassError(
                f"a microbatch of {self.batch} sequences of {self.seq} tokens holds at least {size_text(total)} "
                f"between forward and backward, more than the budget of {size_text(self.budget)}",
                where="--activation-budget",
                hint=f"--activation-budget {size_text(total, up=True)}, or a smaller --batch or --seq",
            )
        return kept

    def _named(self, pairs: Mapping[str, Pair]) -> Kept:
        known = {f"{name}:{value}" for name, pair in pairs.items() for value in pair.saved}
        for value in self.values:
            if value not in known:
                raise PassError(f"no saved value is named {value!r}", hint=did_you_mean(value, known))
        kept = {}
        for name, pair in pairs.items():
            kept[name] = pair.settled(frozenset(v for v in pair.saved if f"{name}:{v}" not in self.values))
            if not pair.repeatable(kept[name]):
                raise PassError(f"the values of @{name} depend on random numbers that cannot be drawn again")
        return kept


def size_text(number: int, up: bool = False) -> str:
    """Bytes for a reader, as budgets are given: two digits after the point, rounded up where asked for."""
    unit, name = next(((u, n) for u, n in _UNITS if number >= u), _UNITS[-1])
    hundredths = -(-number * 100 // unit) if up else round(number * 100 / unit)
    return f"{hundredths / 100:g}{name}"


def _told(held: Held, pair: Pair, kept: Kept) -> str:
    """What is given up, the bytes that this frees, and the operations that it adds."""
    name = pair.fwd.name
    everything = {n: frozenset(p.saved) if n == name else kept[n] for n, p in held.pairs.items()}
    freed = held.bytes(everything) - held.bytes(kept)
    given_up = ", ".join(v for v in pair.saved if v not in kept[name])
    flops = held.flops(pair, kept[name])
    return f"{given_up} computed again in {len(pair.calls)} calls: {size_text(freed)} freed, {flops:.3g} flops added"


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one pair changes: indices of what the new backward takes, in the forward's inputs and the old operands."""

    fwd: Function
    bwd: Function
    results: tuple[int, ...]
    """The old forward's results that the new one gives."""
    params: tuple[int, ...]
    slots: tuple[int, ...]
    first_saved: int
    rest: tuple[int, ...]
    """The old operands of the backward that stay: kept values, then cotangents."""
    accumulators: int


def _plan(pair: Pair, kept: frozenset[str], made_by: str) -> _Plan:
    fwd, bwd = pair.fwd, pair.bwd
    forward_params = {p.name for p in fwd.params}
    forward_slots = {s.name: i for i, s in enumerate(fwd.slots)}
    again = [replace(n, phase=Phase.BACKWARD, made_by=made_by) for n in pair.again(kept)]
    computed = {v.name for node in again for v in node.results}
    nodes = (*again, *(n for n in bwd.nodes if n.results[0].name not in computed))
    read = {v.name for n in nodes for v in n.operands} | {v.name for v in bwd.results}
    params, slots = pair.params(kept), tuple(i for name, i in forward_slots.items() if name in read)
    accumulators = tuple(s for s in bwd.slots if s.name not in forward_slots)
    rest = tuple(i for i, p in enumerate(bwd.params) if p.name in kept or p.name not in (*pair.saved, *forward_params))
    new_bwd = replace(
        bwd,
        params=(*(fwd.params[i] for i in params), *(bwd.params[i] for i in rest)),
        slots=(*(fwd.slots[i] for i in slots), *accumulators),
        nodes=nodes,
    )
    given_up = set(pair.saved) - kept
    own = len(fwd.results) - len(pair.saved)
    results = tuple(i for i, v in enumerate(fwd.results) if i < own or v.name not in given_up)
    return _Plan(
        replace(fwd, results=tuple(fwd.results[i] for i in results)),
        # Values of the pair are the same objects where it was never printed and parsed; by name they always are.
        _by_name(new_bwd, fwd),
        results,
        params,
        slots,
        next(i for i, p in enumerate(bwd.params) if p.name in pair.saved),
        rest,
        len(accumulators),
    )


def _by_name(function: Function, source: Function) -> Function:
    """Reads of a value by another object of the same name become reads of the source's object."""
    own = {v.name: v for v in (*source.inputs(), *(v for n in source.nodes for v in n.results))}

    def exchanged(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(v if v.is_state else own.get(v.name, v) for v in values)

    nodes = tuple(replace(n, operands=exchanged(n.operands)) for n in function.nodes)
    return replace(function, params=exchanged(function.params), nodes=nodes, results=exchanged(function.results))


def _recall(function: Function, plans: Mapping[str, _Plan]) -> Function:
    """Calls of changed functions with their new operands and results."""
    producers = function.producers()
    nodes: list[Node] = []
    for node in function.nodes:
        plan = plans.get(str(node.attrs.get("callee"))) if node.op == "call" else None
        if plan is not None and node.attrs["callee"] == plan.fwd.name:
            node = replace(node, results=tuple(node.results[i] for i in plan.results))
        elif plan is not None:
            node = replace(node, operands=_operands(node, plan, producers))
        nodes.append(node)
    return replace(function, nodes=tuple(nodes))


def _operands(node: Node, plan: _Plan, producers: Mapping[Value, Node]) -> tuple[Value, ...]:
    """The new operands of a backward call, read off the forward call whose results it had saved."""
    forward, old = producers[node.operands[plan.first_saved]], node.operands
    num_params = len(plan.fwd.params)
    return (
        *(forward.operands[i] for i in plan.params),
        *(old[i] for i in plan.rest),
        *(forward.operands[num_params + i] for i in plan.slots),
        *old[len(old) - plan.accumulators :],
    )
