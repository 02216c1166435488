"""fuse-products: a product that is summed with another, or with the gradient of a dispatch, adds to it.

    %a = aten.matmul.default(%dq, %wq)           %a = aten.matmul.default(%dq, %wq)
    %b = aten.matmul.default(%dk, %wk)     ==>
    %dx = aten.add.Tensor(%a, %b)                %dx = matmul_add(%a, %dk, %wk)

So the gradient of what several projections read is summed where each product is made, without passing through memory
for it. The first product must be read by nothing else: its memory takes the sum. In place of it may stand
`moe_dispatch_grad`, or with `ep` the `unpack_rows` of what comes back, which the product of the router adds to; other
sums are left to the regions, as these may read the product where they make what it is added to.

    %s = aten.add.Tensor(%a, %b)         ==>     %dx = moe_dispatch_grad(%a, %order, %b)
    %dx = moe_dispatch_grad(%s, %order)

The gradient of a dispatch sums rows as it is, and takes both parts of what the experts' products made for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.passes.base import Pass, Report, Stage, Tier

_PRODUCT = "aten.matmul.default"
_TOTALS = {_PRODUCT, "moe_dispatch_grad", "unpack_rows"}
"""Ops whose result, memory of its own, takes the sum."""


@dataclass(frozen=True)
class FuseProducts(Pass):
    """Add products in the product."""

    name: ClassVar[str] = "fuse-products"
    stage: ClassVar[Stage] = Stage.FUSE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function; a module without a match is returned as it is."""
        functions = {
            name: self._dispatched(self._rewrite(function, report), report)
            for name, function in module.functions.items()
        }
        changed = any(functions[name] is not f for name, f in module.functions.items())
        return replace(module, functions=functions) if changed else module

    def _rewrite(self, function: Function, report: Report) -> Function:
        makers = function.producers()
        order = {node: index for index, node in enumerate(function.nodes)}
        users = {value: len(nodes) for value, nodes in function.users().items()}
        for value in function.results:
            users[value] = users.get(value, 0) + 1
        made: dict[Node, Node] = {}
        gone: set[Node] = set()
        for node in function.nodes:
            parts = sorted(
                (makers[v] for v in node.operands if v in makers),
                key=lambda part: (part.op == _PRODUCT, order[part]),
            )
            if node.op != "aten.add.Tensor" or len(parts) != 2 or not _is_sum(parts[0], parts[1], made):
                continue
            first, second = parts
            guard = _guard(node, first, second, users)
            if guard is not None:
                report.near_miss(function.name, node.id, self.name, *guard)
                continue
            operands = (first.result, *second.operands)
            made[node] = replace(node, op="matmul_add", operands=operands, attrs={}, made_by=self.name)
            gone.add(second)
            report.match(function.name, node.id, f"{second.id} is added to {first.id}", [second.id, node.id], [node.id])
        return _replaced(function, made, gone)

    def _dispatched(self, function: Function, report: Report) -> Function:
        """Gradients of a dispatch with both parts of a sum that only they read."""
        makers, users = function.producers(), function.users()
        made: dict[Node, Node] = {}
        gone: set[Node] = set()
        for node in function.nodes:
            given = 2 + bool(node.attrs.get("others"))
            total = node.operands[0] if node.op == "moe_dispatch_grad" and len(node.operands) == given else None
            sum_ = makers.get(total) if total is not None else None
            if total is None or sum_ is None or sum_.op != "aten.add.Tensor":
                continue
            if sum_.attrs or any(part.type != total.type for part in sum_.operands):
                report.near_miss(function.name, node.id, self.name, "sum", f"`{sum_.id}` is no sum of two such rows")
                continue
            if len(users[total]) != 1 or total in function.results:
                report.near_miss(function.name, node.id, self.name, "users", f"`{sum_.id}` is read elsewhere, too")
                continue
            first, second = sum_.operands
            made[node] = replace(node, operands=(first, *node.operands[1:], second), made_by=self.name)
            gone.add(sum_)
            report.match(function.name, node.id, f"it takes the parts of {sum_.id}", [sum_.id, node.id], [node.id])
        return _replaced(function, made, gone)


def _replaced(function: Function, made: Mapping[Node, Node], gone: Set[Node]) -> Function:
    """The function with other nodes for some, and without those that these took in; itself where there are none."""
    if not made:
        return function
    return replace(function, nodes=tuple(made.get(node, node) for node in function.nodes if node not in gone))


def _is_sum(first: Node, second: Node, made: Mapping[Node, Node]) -> bool:
    """Whether the second of two nodes is a product, and the first what it may add to, perhaps a sum of some already."""
    return (first.op in _TOTALS or first in made) and second.op == _PRODUCT and first is not second


def _guard(node: Node, first: Node, second: Node, users: Mapping[Value, int]) -> tuple[str, str] | None:
    """The first guard that fails, and how."""
    if node.attrs:
        return "attr", f"the sum has attributes {dict(node.attrs)}"
    for part in (first, second):
        if users[part.result] != 1:
            return "users", f"`{part.id}` has {users[part.result]} users, expected 1"
    if not first.result.type == second.result.type == node.result.type:
        return "type", f"{first.result!r}, {second.result!r} and {node.result!r} differ in type"
    if len(second.operands[1].tensor.shape) != 2:
        return "type", f"{second.operands[1]!r} is no matrix"
    return None
