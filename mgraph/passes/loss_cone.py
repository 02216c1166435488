"""What only losses are made of, and which ops make, and keep, sums over tokens. For `joint-losses`."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy

from mgraph.ir.dims import names_in, symbol
from mgraph.ir.graph import AttrValue, Function, Module, Node, StateKind, Value
from mgraph.ir.types import TensorType
from mgraph.passes.calls import callee, roots

_SUMS = (
    "aten.sum.default",
    "aten.sum.dim_IntList",
    "aten.bincount.default",
    "aten.histc.default",
    "cross_entropy",
    "expert_counts",
)
_MEANS = ("aten.mean.default", "aten.mean.dim")
_ADDED_TO = ("aten.index_add.default", "aten.scatter_add.default")
"""Sums over tokens too, if what they add to is 0."""
_LINEAR = (
    *_SUMS[:2],
    *_MEANS,
    "reshape",
    "aten.neg.default",
    "aten.permute.default",
    "aten.expand.default",
    "aten.select.int",
    "aten.slice.Tensor",
    "aten.clone.default",
)
_SCALED = ("aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar")
_ADDITIVE = ("aten.add.Tensor", "aten.sub.Tensor", "aten.stack.default", "aten.cat.default")
_BILINEAR = ("aten.mul.Tensor", "aten.dot.default", "aten.mv.default", "aten.mm.default", "aten.matmul.default")


def created(node: Node, function: Function) -> str:
    """What a node that takes tokens makes of them: a `sum` or a `mean` over them, or "", something else."""
    if node.op in _MEANS:
        return "mean"
    if node.op in _ADDED_TO:
        return "sum" if is_zero(node.operands[0], function) else ""
    return "sum" if node.op in _SUMS else ""


def is_zero(value: Value, function: Function) -> bool:
    """Whether a value is zeros, wherever the function is called."""
    made = function.producers().get(value)
    return made is not None and made.op == "aten.full.default" and made.attrs.get("fill_value") == 0


def linear(node: Node) -> bool:
    """Whether a node gives of a sum of tensors the sum of what it gives of each."""
    if len(node.operands) != 1:
        return False
    nothing = node.op in _ADDITIVE[:2] and node.attrs.get("other") == 0  # with which Python's sum begins
    return node.op in (*_LINEAR, *_SCALED) or nothing or (node.op == "cast" and node.result.tensor.dtype.is_float)


def additive(node: Node) -> bool:
    """Whether a node adds its operands up, or puts them beside each other."""
    return node.op in _ADDITIVE and (len(node.operands) > 1 or "args" in node.attrs)


def bilinear(node: Node) -> bool:
    """Whether a node is linear in each of its two operands."""
    return node.op in _BILINEAR and len(node.operands) == 2


def mentions(node: Node, batch: frozenset[str]) -> bool:
    """Whether attributes of a node speak of how many tokens there are."""
    return any(_mentions(value, batch) for value in node.attrs.values())


def _mentions(value: AttrValue, batch: frozenset[str]) -> bool:
    if isinstance(value, tuple):
        return any(_mentions(part, batch) for part in value)
    return isinstance(value, sympy.Expr) and bool(names_in(value) & batch)


def divides_by_tokens(node: Node, batch: frozenset[str]) -> bool:
    """Whether a node divides by a multiple of B: by how many tokens, or choices, a rank has."""
    by = node.attrs.get("other")
    if node.op not in ("aten.div.Tensor", "aten.div.Scalar") or len(node.operands) != 1:
        return False
    return isinstance(by, sympy.Expr) and "B" in names_in(by) and not names_in(by / symbol("B")) & batch


@dataclass
class Cone:
    """Of which values of a module nothing is made but losses."""

    module: Module
    batch: frozenset[str]
    _callers: dict[str, list[tuple[Function, Node]]] = field(default_factory=dict)
    _of: dict[str, FunctionCone] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.roots = roots(self.module)
        for function, node in self.module.walk():
            if node.op == "call":
                self._callers.setdefault(callee(node), []).append((function, node))

    def of(self, function: Function) -> FunctionCone:
        """That of a function."""
        if function.name not in self._of:
            self._of[function.name] = FunctionCone(self, function)
        return self._of[function.name]

    def results(self, function: Function, value: Value) -> list[tuple[Function, Value]]:
        """What a value is in callers, if it is a result of the function."""
        places = [i for i, v in enumerate(function.results) if v is value]
        return [(caller, node.results[i]) for caller, node in self._callers.get(function.name, ()) for i in places]


class FunctionCone:
    """Questions about the values of one function; those of `module` are answered once each."""

    def __init__(self, cone: Cone, function: Function) -> None:
        self._cone, self.function = cone, function
        self._users = function.users()
        self._pure: dict[Value, bool] = {}
        self._told: dict[Value, bool] = {}
        self._differentiable: set[Value] | None = None

    def of_tokens(self, value: Value) -> bool:
        """Whether a value has a dim of tokens."""
        return isinstance(value.type, TensorType) and any(names_in(d) & self._cone.batch for d in value.type.shape)

    def pure(self, value: Value) -> bool:
        """Whether a value has no dim of tokens, nor has anything that is made of it."""
        if value not in self._pure:
            callers = self._cone.results(self.function, value)
            self._pure[value] = (
                isinstance(value.type, TensorType)
                and not self.of_tokens(value)
                and all(self._keeps_pure(value, node) for node in self._users.get(value, ()))
                and all(self._cone.of(caller).pure(result) for caller, result in callers)
            )
        return self._pure[value]

    def _keeps_pure(self, value: Value, node: Node) -> bool:
        if node.op != "call":
            return all(self.pure(v) for v in node.results)
        body = self._cone.module.functions[callee(node)]
        given = zip(body.inputs(), node.operands, strict=True)
        return all(self._cone.of(body).pure(param) for param, v in given if v is value)

    def told(self, value: Value) -> bool:
        """Whether a value does no more than be added up to what the entry gives."""
        if value not in self._told:
            self._told[value] = self.told_by(value) and all(
                (linear(node) or additive(node)) and not mentions(node, self._cone.batch) and self.told(node.result)
                for node in self._users.get(value, ())
            )
        return self._told[value]

    def told_by(self, value: Value) -> bool:
        """Whether that is what callers do with it, if it is a result."""
        return all(self._cone.of(caller).told(result) for caller, result in self._cone.results(self.function, value))

    def differentiable(self, value: Value) -> bool:
        """Whether a gradient may flow through a value to a parameter; what callers hand over may have one."""
        if self._differentiable is None:
            found = {v for v in self.function.inputs() if v.tensor.dtype.is_float}
            state = self._cone.module.state
            for node in self.function.nodes:
                if any(v in found or (v.is_state and state[v.name].kind is StateKind.PARAM) for v in node.operands):
                    found |= {v for v in node.results if isinstance(v.type, TensorType) and v.type.dtype.is_float}
            self._differentiable = found
        return value in self._differentiable
