"""Evaluate what depends on constants only, and put scalar constants into the attributes of their readers.

    %a: f32[] = aten.full.default() {dtype = f32, fill_value = 2.0, size = ()}
    %b: f32[] = aten.neg.default(%a)                                  ==>    %c = aten.mul.Tensor(%x) {other = -2.0}
    %c: f32[4] = aten.mul.Tensor(%x, %b)

A folded value is one `aten.full.default` where all its elements are equal, else one `constant`. `and` with all true and
`or` with all false vanish. Positions (`arange`) and triangles are not folded: masks are read from them
(`mgraph.passes.mask`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.interpreter import run_function
from mgraph.ir.opdef import op_def
from mgraph.ir.ops.constant import WRITTEN, written
from mgraph.ir.types import DType, TensorType
from mgraph.passes.base import Pass, Report, Stage

_KEPT = {"call", "aten.tril.default", "aten.triu.default"}
_SOURCES = {"aten.full.default", "constant"}
# A scalar divisor is a product with its reciprocal on some devices: division is left alone.
_TAKES_SCALAR = {"aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor"}
_NEUTRAL = {"aten.bitwise_and.Tensor": True, "aten.bitwise_or.Tensor": False}


@dataclass(frozen=True)
class ConstantFold(Pass):
    """Fold constant subgraphs whose values have at most `limit` elements."""

    name: ClassVar[str] = "constant-fold"
    stage: ClassVar[Stage] = Stage.NORMALIZE
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})

    limit: int = WRITTEN

    def run(self, module: Module, report: Report) -> Module:
        """Fold every function by itself."""
        functions = {name: _Folder(f, self.limit, report).run() for name, f in module.functions.items()}
        changed = any(functions[name] is not f for name, f in module.functions.items())
        return replace(module, functions=functions) if changed else module


class _Folder:
    """The folding of one function. `known` holds the tensors of small constants, `fills` the number of uniform ones."""

    def __init__(self, function: Function, limit: int, report: Report) -> None:
        self.function, self.limit, self.report = function, limit, report
        self.builder: FunctionBuilder = rebuild(function, ConstantFold.name)
        self.known: dict[Value, Any] = {}
        self.fills: dict[Value, Any] = {}

    def run(self) -> Function:
        changed = False
        for old in self.function.nodes:
            operands = tuple(self.builder.value(v) for v in old.operands)
            node = old if operands == old.operands else replace(old, operands=operands)
            same = self.neutral(node)
            if same is not None:
                self.builder.replace(node.result, same)
            else:
                made = list(self.fold(node))
                self.builder.nodes.extend(made)
                if made == [node]:
                    continue
            self.report.match(self.function.name, node.id, node.op)
            changed = True
        return self.builder.build(self.function.results) if changed else self.function

    def neutral(self, node: Node) -> Value | None:
        """The other operand of `and` with all true, `or` with all false, if it has the type of the result."""
        if node.op in _NEUTRAL and len(node.operands) == 2:
            for value, other in (node.operands, node.operands[::-1]):
                if self.fills.get(other) is _NEUTRAL[node.op] and value.type == node.result.type:
                    return value
        return None

    def fold(self, node: Node) -> Iterator[Node]:
        if node.op == "aten.full.default":
            self.fills[node.result] = node.attrs["fill_value"]
        if not self.foldable(node):
            yield self.absorb(node)
            return
        tensors = self.evaluate(node)
        for value, tensor in zip(node.results, tensors, strict=True):
            self.known[value] = tensor
        if node.op in _SOURCES:
            yield node
            return
        for value, tensor in zip(node.results, tensors, strict=True):
            yield self.constant(node, value, tensor)

    def foldable(self, node: Node) -> bool:
        if node.op in _KEPT or not all(v in self.known for v in node.operands):
            return False
        declared = op_def(node.op)
        if declared.random or declared.collective or (not node.operands and node.op not in _SOURCES):
            return False
        small = all(
            isinstance(v.type, TensorType) and isinstance(v.type.numel, int) and v.type.numel <= self.limit
            for v in node.results
        )
        return small and all(_is_plain(value) for value in node.attrs.values())

    def evaluate(self, node: Node) -> tuple[Any, ...]:
        alone = Function("fold", tuple(dict.fromkeys(node.operands)), (), (node,), node.results)
        return run_function(Module("fold"), alone, [self.known[v] for v in alone.params])

    def constant(self, node: Node, value: Value, tensor: Any) -> Node:
        type_ = value.tensor
        op, attrs = written(type_, tensor.reshape(-1).tolist())
        if "fill_value" in attrs:
            self.fills[value] = attrs["fill_value"]
        return replace(node, op=op, operands=(), results=(value,), attrs=attrs, made_by=ConstantFold.name)

    def absorb(self, node: Node) -> Node:
        """`x + c` with a 0-d constant of the same dtype, as an attribute."""
        if node.op not in _TAKES_SCALAR or len(node.operands) != 2 or node.attrs:
            return node
        value, other = node.operands
        if other.tensor.shape or other not in self.known or value.type != node.result.type:
            return node
        if value.tensor.dtype is not other.tensor.dtype:
            return node
        attrs = {"other": self.known[other].item()}
        return replace(node, operands=(value,), attrs=attrs, made_by=ConstantFold.name)


def _is_plain(value: Any) -> bool:
    """Whether an attribute is known now: no static, no named dim."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str | DType)
