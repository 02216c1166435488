"""recompute: give up saved intermediates and compute them again in the backward.

Before (mode `full`):

    %h1, %a, %b = call @layer.fwd(%h0; @w)
    %dh0, %gw   = call @layer.bwd(%a, %b, %dh1; @w, @w.grad)

After: `layer.fwd` returns its outputs only, and `layer.bwd` begins with the part of the forward that it needs:

    %h1       = call @layer.fwd(%h0; @w)
    %dh0, %gw = call @layer.bwd(%h0, %dh1; @w, @w.grad)

Mode `none` keeps everything that autodiff saved. Activation checkpointing: Chen et al. 2016, arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.graph import Function, Module, Node, Phase, Value
from mgraph.passes.base import Pass, Report, Stage, Tier

MODES = ("none", "full")


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one forward/backward pair changes: indices into the forward's inputs that the new backward takes."""

    fwd: Function
    bwd: Function
    first_saved: int  # the operand of the old backward call that its forward call made
    kept_results: int
    params: tuple[int, ...]
    slots: tuple[int, ...]
    cotangents: int
    old_slots: int
    accumulators: int


@dataclass(frozen=True)
class Recompute(Pass):
    """Recompute layer functions in the backward; `mode` is `none` or `full`."""

    mode: str = "none"

    name: ClassVar[str] = "recompute"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"microbatch"})

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PassError(f"recompute mode {self.mode!r} is unknown", hint=f"one of {', '.join(MODES)}")

    def run(self, module: Module, report: Report) -> Module:
        """Change every forward/backward pair and its calls."""
        if self.mode == "none":
            return module
        plans: dict[str, _Plan] = {}
        for name, bwd in module.functions.items():
            fwd = module.functions.get(name.replace(".bwd", ".fwd")) if ".bwd" in name else None
            if fwd is not None and any(p.name in _intermediates(fwd) for p in bwd.params):
                plan = _plan(fwd, bwd, self.name)
                report.match(name, bwd.nodes[0].id, f"{len(fwd.results) - plan.kept_results} saved values recomputed")
                plans[fwd.name] = plans[bwd.name] = plan
        functions = {name: _recall(f, plans) for name, f in module.functions.items()}
        for plan in plans.values():
            functions[plan.fwd.name], functions[plan.bwd.name] = plan.fwd, plan.bwd
        return replace(module, functions=functions)


def _intermediates(function: Function) -> dict[str, Node]:
    return {v.name: node for node in function.nodes for v in node.results}


def _plan(fwd: Function, bwd: Function, made_by: str) -> _Plan:
    made = _intermediates(fwd)
    saved = [p for p in bwd.params if p.name in made]
    forward_params = {p.name: i for i, p in enumerate(fwd.params)}
    forward_slots = {s.name: i for i, s in enumerate(fwd.slots)}
    cotangents = tuple(p for p in bwd.params if p.name not in made and p.name not in forward_params)
    accumulators = tuple(s for s in bwd.slots if s.name not in forward_slots)
    needed = {v.name for v in saved}
    again: list[Node] = []
    for node in reversed(fwd.nodes):
        if any(v.name in needed for v in node.results):
            again.append(replace(node, phase=Phase.BACKWARD, made_by=made_by))
            needed.update(v.name for v in node.operands)
    again.reverse()
    computed = {v.name for node in again for v in node.results}
    rest = [n for n in bwd.nodes if n.results[0].name not in computed]
    read = {v.name for n in (*again, *rest) for v in n.operands} | {v.name for v in bwd.results}
    params = tuple(i for name, i in forward_params.items() if name in read)
    slots = tuple(i for name, i in forward_slots.items() if name in read)
    kept = len(fwd.results) - len(saved)
    new_bwd = replace(
        bwd,
        params=(*(fwd.params[i] for i in params), *cotangents),
        slots=(*(fwd.slots[i] for i in slots), *accumulators),
        nodes=(*again, *rest),
    )
    # Values of the pair are the same objects where the pair was never printed and parsed; by name they always are.
    new_bwd = _by_name(new_bwd, fwd)
    new_fwd = replace(fwd, results=fwd.results[:kept])
    return _Plan(
        new_fwd,
        new_bwd,
        bwd.params.index(saved[0]),
        kept,
        params,
        slots,
        len(cotangents),
        len(bwd.slots),
        len(accumulators),
    )


def _by_name(function: Function, source: Function) -> Function:
    """Reads of a value by another object of the same name become reads of the source's object."""
    own = {v.name: v for v in (*source.inputs(), *(v for n in source.nodes for v in n.results))}

    def exchanged(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(v if v.is_state else own.get(v.name, v) for v in values)

    nodes = tuple(replace(n, operands=exchanged(n.operands)) for n in function.nodes)
    return replace(function, nodes=nodes, results=exchanged(function.results))


def _recall(function: Function, plans: dict[str, _Plan]) -> Function:
    """Calls of changed functions with their new operands and results."""
    producers = function.producers()
    nodes: list[Node] = []
    for node in function.nodes:
        plan = plans.get(str(node.attrs.get("callee")))
        if plan is not None and node.attrs["callee"] == plan.fwd.name:
            node = replace(node, results=node.results[: plan.kept_results])
        elif plan is not None:
            node = replace(node, operands=_operands(node, plan, producers))
        nodes.append(node)
    return replace(function, nodes=tuple(nodes))


def _operands(node: Node, plan: _Plan, producers: dict[Value, Node]) -> tuple[Value, ...]:
    """The new operands of a backward call, read off the forward call whose results it had saved."""
    forward = producers[node.operands[plan.first_saved]]
    num_params, old = len(plan.fwd.params), node.operands
    slots_begin = len(old) - plan.old_slots
    return (
        *(forward.operands[i] for i in plan.params),
        *old[slots_begin - plan.cotangents : slots_begin],
        *(forward.operands[num_params + i] for i in plan.slots),
        *old[len(old) - plan.accumulators :],
    )
