"""skip-padding: tokens that only fill a step up choose no expert.

    %rows, %order, %offsets = moe_dispatch(%x, %indices)      ==>  %real = real_choice(%indices, %starts)
                                                                   %rows, %order, %offsets = moe_dispatch(%x, %real)
                                                                       {others = true}
    %sum = moe_combine(%out, %weights, %order)                     %sum = moe_combine(%out, %weights, %order, %offsets)

A CUDA graph holds steps of one number of tokens; a shorter step is padded (`runtime/serving/step_graphs.py`), and where
requests end is in `%starts`, as attention reads it. What padding would choose are experts that perhaps no request has:
their matrices would be read for nothing. Its rows now come last, are not computed, and its sum is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.passes.base import Pass, Report, Stage, Tier

_STARTS = 3
"""The operand of `paged_attention` that says where the tokens of each request begin, and at its end where all end."""


@dataclass(frozen=True)
class SkipPadding(Pass):
    """In a step that is served, let tokens of no request choose no expert."""

    name: ClassVar[str] = "skip-padding"
    stage: ClassVar[Stage] = Stage.FUSE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function with attention over the cache; a module without a match is returned as it is."""
        functions = {name: _skipped(function, report) for name, function in module.functions.items()}
        changed = any(functions[name] is not f for name, f in module.functions.items())
        return replace(module, functions=functions) if changed else module


def _skipped(function: Function, report: Report) -> Function:
    starts = next((node.operands[_STARTS] for node in function.nodes if node.op == "paged_attention"), None)
    users, names = function.users(), FunctionBuilder(function.name, "", function.names())
    nodes: list[Node] = []
    offsets: dict[Node, Value] = {}
    """Of the sums of rows that may be of no expert."""
    for node in function.nodes:
        if node.op == "moe_dispatch" and not node.attrs.get("others"):
            readers = [reader for reader in users.get(node.results[1], []) if reader.op != "moe_combine"]
            if starts is None or readers:
                why = (
                    f"{node.results[1]!r} is read by {readers[0].op}" if readers else "no attention says where all end"
                )
                report.near_miss(function.name, node.id, SkipPadding.name, "users" if readers else "starts", why)
            else:
                offsets |= dict.fromkeys(users.get(node.results[1], []), node.results[2])
                x, indices = node.operands
                real = Value(names.fresh("real"), indices.type)
                experts = {"num_experts": node.attrs["num_experts"]}
                choice = replace(node, op="real_choice", operands=(indices, starts), results=(real,), attrs=experts)
                sorted_ = replace(node, operands=(x, real), attrs={**node.attrs, "others": True})
                nodes += [replace(made, made_by=SkipPadding.name) for made in (choice, sorted_)]
                report.match(function.name, node.id, "padding chooses no expert", [node.id], [choice.id, node.id])
                continue
        if node in offsets:
            node = replace(node, operands=(*node.operands, offsets[node]), made_by=SkipPadding.name)
        nodes.append(node)
    return replace(function, nodes=tuple(nodes)) if offsets else function
