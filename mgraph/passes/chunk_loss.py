"""chunk-loss: the linear over the vocabulary, its loss and both gradients in one op, which takes some rows at a time.

Before:

    %logits = aten.linear.default(%x, %weight)
    %flat = reshape(%logits)
    %sum, %lse, %dlogits = cross_entropy_with_grad(%flat, %labels, %dsum)
    %d = reshape(%dlogits)
    %dx = aten.matmul.default(%d, %weight)
    %new = accumulate(@weight.grad, aten.mm.default(aten.t.default(%d), %x))

After:

    %new, %sum, %dx = linear_cross_entropy_with_grad(@weight.grad, %x, %weight, %labels, %dsum) {rows}

`budget` is how many bytes of logits there may be at once (0: the pass does nothing), of which `rows` follows. It runs
after fuse-loss, where nothing else reads the logits, their gradient, or lse, and the weight's gradient goes to a total.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.types import DType
from mgraph.passes.base import Pass, Report, Stage, Tier

CHUNKED = "linear_cross_entropy_with_grad"
ROUND_ROWS = 128
"""Rows are a multiple of this where there are as many: tiles of a matrix product are whole then."""


@dataclass(frozen=True)
class ChunkLoss(Pass):
    """Never make all logits at once."""

    name: ClassVar[str] = "chunk-loss"
    stage: ClassVar[Stage] = Stage.FUSE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    budget: int = 0

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function; a module without a match is returned as it is."""
        if not self.budget:
            return module
        functions = {name: self._chunked(function, report) for name, function in module.functions.items()}
        changed = any(functions[name] is not f for name, f in module.functions.items())
        return replace(module, functions=functions) if changed else module

    def _chunked(self, function: Function, report: Report) -> Function:
        for node in function.nodes:
            if node.op == "cross_entropy_part_grad":
                why = "the vocabulary is split over ranks, which join their parts between the loss and the gradient"
                report.near_miss(function.name, node.id, CHUNKED, "vocabulary", why)
        for loss in [node for node in function.nodes if node.op == "cross_entropy_with_grad"]:
            try:
                found = _Head(function, loss)
            except _Miss as miss:
                report.near_miss(function.name, loss.id, CHUNKED, *miss.args)
                continue
            rows = rows_within(self.budget, loss.operands[0])
            function, node = found.joined(rows, self.name)
            report.match(function.name, node.id, CHUNKED, [n.id for n in found.replaced], [node.id])
        return function


def rows_within(budget: int, logits: Value) -> int:
    """How many rows of logits a budget of bytes has room for, at least one."""
    vocabulary = logits.tensor.shape[1]
    assert isinstance(vocabulary, int), f"{logits!r} have a known number of columns"
    rows = budget * 8 // (vocabulary * logits.tensor.dtype.bits)
    return max(1, rows // ROUND_ROWS * ROUND_ROWS or rows)


class _Miss(Exception):
    """The guard that failed, and why."""


def _check(holds: object, guard: str, why: str) -> None:
    if not holds:
        raise _Miss(guard, why)


class _Head:
    """A loss with all that is made of it; `_Miss` where something is missing."""

    def __init__(self, function: Function, loss: Node) -> None:
        self._function, self._loss = function, loss
        self._producers, self._users = function.producers(), function.users()
        logits, self._labels, self._dsum = loss.operands
        total_loss, lse, dlogits = loss.results
        _check(isinstance(logits.tensor.shape[1], int), "vocabulary", f"{logits!r} has no known number of columns")
        _check(lse not in self._users and lse not in function.results, "lse", f"{lse!r} is read")
        self._linear, forward_views = self._maker(logits)
        _check(self._linear.op == "aten.linear.default", "linear", f"the logits are made by `{self._linear.op}`")
        _check(len(self._linear.operands) == 2, "bias", f"`{self._linear.id}` has a bias")
        self._x, self._weight = self._linear.operands
        readers, backward_views = self._readers(dlogits)
        self._dx = self._one(readers, "dx", lambda n: n.op == "aten.matmul.default" and n.operands[1] is self._weight)
        _check(len(readers) > 1, "dweight", f"nothing makes a gradient of {self._weight!r}")
        transposed = self._one(readers, "dweight", lambda n: n.op == "aten.t.default")
        _check(len(readers) == 2, "dlogits", f"the gradient is read by {', '.join(f'`{n.op}`' for n in readers)}")
        product = self._one(self._sole(transposed.result, "dweight"), "dweight", self._is_dweight)
        (self._update,) = self._sole(product.result, "total")
        _check(
            self._update.op == "accumulate", "total", f"{product.result!r} goes to `{self._update.op}`, not to a total"
        )
        self._check_total(self._update.operands[0])
        dx, x = self._dx.result, self._x
        _check(dx.type == x.type, "dx", f"{dx!r} is {dx.type}, and {x!r} is {x.type}")
        gone = {*forward_views, *backward_views, self._linear, loss, self._dx, transposed, product, self._update}
        self.replaced = tuple(node for node in function.nodes if node in gone)
        self._results = self._update.result, total_loss, self._dx.result

    def _maker(self, value: Value) -> tuple[Node, list[Node]]:
        """What made a value, behind reshapes that nothing else reads."""
        views: list[Node] = []
        while True:
            maker = self._producers.get(value)
            if maker is None:
                raise _Miss("linear", f"{value!r} is not made in this function")
            self._sole(value, "logits")
            if maker.op != "reshape":
                return maker, views
            views.append(maker)
            value = maker.operands[0]

    def _readers(self, value: Value) -> tuple[list[Node], list[Node]]:
        """All that reads a value or a reshape of it, and the reshapes."""
        _check(value not in self._function.results, "dlogits", f"{value!r} is a result of the function")
        readers: list[Node] = []
        views: list[Node] = []
        for node in self._users.get(value, ()):
            if node.op == "reshape":
                further = self._readers(node.result)
                readers, views = readers + further[0], [*views, node, *further[1]]
            else:
                readers.append(node)
        return readers, views

    def _sole(self, value: Value, guard: str) -> list[Node]:
        users = self._users.get(value, [])
        _check(value not in self._function.results, guard, f"{value!r} is a result of the function")
        _check(len(users) == 1, guard, f"{value!r} has {len(users)} readers")
        return users

    def _one(self, nodes: Iterable[Node], guard: str, fits: Callable[[Node], Any]) -> Node:
        nodes = list(nodes)
        found = [node for node in nodes if fits(node)]
        _check(len(found) == 1, guard, f"{len(found)} of {', '.join(f'`{n.op}`' for n in nodes) or 'no node'} fit")
        return found[0]

    def _is_dweight(self, node: Node) -> bool:
        """Whether a node multiplies the transposed gradient by the linear's input."""
        if node.op != "aten.mm.default":
            return False
        right = node.operands[1]
        while right is not self._x and (maker := self._producers.get(right)) is not None and maker.op == "reshape":
            right = maker.operands[0]
        return right is self._x

    def _check_total(self, total: Value) -> None:
        """The total is there before the loss, and nothing else reads it: it is written in place."""
        self._sole(total, "total")
        maker = self._producers.get(total)
        nodes = self._function.nodes
        early = maker is None or nodes.index(maker) < nodes.index(self._loss)
        _check(early, "total", f"{total!r} is made after the loss")
        exact = total.tensor.dtype in (DType.F32, DType.F64)
        _check(exact, "total", f"{total!r} is {total.tensor.dtype.text}: every chunk would round the sum to that")

    def joined(self, rows: int, made_by: str) -> tuple[Function, Node]:
        """The function with one node in the place of the loss."""
        operands = (self._update.operands[0], self._x, self._weight, self._labels, self._dsum)
        attrs = {"rows": rows, **self._loss.attrs}
        node = replace(self._loss, op=CHUNKED, operands=operands, results=self._results, attrs=attrs, made_by=made_by)
        gone = set(self.replaced) - {self._loss}
        nodes = tuple(node if n is self._loss else n for n in self._function.nodes if n not in gone)
        return replace(self._function, nodes=nodes), node
