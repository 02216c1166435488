"""Op declarations: one `OpDef` holds all facts of an op, and one registry holds all ops.

An op's `body` is what it *means*, in torch. `infer` gives result types; it defaults to the dim `signature`. `gradient`
emits the backward nodes. Ops of torch itself (`aten.mul.Tensor`) are not declared: `op_def` makes their declaration
on demand from torch's schema (`mgraph.ir.aten`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mgraph.errors import MgraphError
from mgraph.ir.signature import Signature, parse_signature
from mgraph.ir.types import Placement, TensorType, Type

if TYPE_CHECKING:
    from mgraph.ir.builder import FunctionBuilder
    from mgraph.ir.graph import Node, Value


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@dataclass(frozen=True, slots=True)
class Strategy:
    """A named way to run an op on sharded operands where its signature cannot say it.

    `operands` and `results` are placements over one axis; `body` runs on each rank's local tensors and may use
    `axis_index` and collectives (`None`: the op's own body is right on local tensors).
    """

    name: str
    operands: tuple[Placement | None, ...]
    results: tuple[Placement | None, ...]
    body: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class GradientRequest:
    """What a gradient rule gets: where to emit, the node, a cotangent per result (`None`: not needed), and which
    operands need a gradient."""

    builder: FunctionBuilder
    node: Node
    cotangents: tuple[Value | None, ...]
    needs: tuple[bool, ...]

    @property
    def cotangent(self) -> Value:
        """The cotangent of the first result."""
        assert self.cotangents[0] is not None
        return self.cotangents[0]


Infer = Callable[[Sequence[TensorType], Mapping[str, Any]], tuple[Type, ...]]
Gradient = Callable[[GradientRequest], Sequence["Value | None"]]
Cost = Callable[["Node"], Any]


@dataclass(frozen=True, slots=True)
class OpDef:
    """All facts of an op.

    `attrs` maps attribute names to defaults (`REQUIRED` for none). `gradient` is `None` for an op with no gradient
    (integer results, optimizer). `flops` and `bytes` take a node and give a dim expression. `workspace` takes a node
    and its operands' shapes and gives the tensor that it needs for itself while it runs. `updates` is how many of the
    first operands the in-place form writes, where those are not as many as it has results: a number, or a function of
    the attributes.
    """

    name: str
    doc: str
    body: Callable[..., Any]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    signature: Signature | None = None
    infer: Infer | None = None
    gradient: Gradient | None = None
    flops: Cost | None = None
    bytes: Cost | None = None
    workspace: Callable[[Node, Sequence[Sequence[int]]], TensorType] | None = None
    updates: int | Callable[[Mapping[str, Any]], int] | None = None
    strategies: tuple[Strategy, ...] = ()
    compute_dtype: str = "operands"
    random: bool = False
    collective: bool = False
    free_attrs: bool = False

    def complete(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes with defaults filled in."""
        return {**{k: v for k, v in self.attrs.items() if v is not REQUIRED}, **attrs}

    def updated(self, node: Node) -> int:
        """How many of a node's first operands its in-place form writes, to be its first results."""
        if callable(self.updates):
            return self.updates(self.complete(node.attrs))
        return len(node.results) if self.updates is None else self.updates

    def result_types(self, types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[Type, ...]:
        """Types of the results; raises ValueError where operands do not fit."""
        attrs = self.complete(attrs)
        if self.infer is not None:
            return self.infer(types, attrs)
        assert self.signature is not None, f"{self.name} has neither signature nor infer"
        return self.signature.infer(types, attrs)


_OPS: dict[str, OpDef] = {}


def define_op(
    name: str,
    body: Callable[..., Any],
    *,
    signature: str | None = None,
    **facts: Any,
) -> OpDef:
    """Declare an op; its documentation is the body's docstring. A duplicate name is an error."""
    assert name not in _OPS, f"op {name} is declared twice"
    assert body.__doc__, f"the body of {name} needs a docstring"
    parsed = parse_signature(signature) if signature is not None else None
    _OPS[name] = OpDef(name, body.__doc__, body, signature=parsed, **facts)
    return _OPS[name]


def op_def(name: str) -> OpDef:
    """The declaration of an op; torch's own ops are declared on demand. Unknown names raise, with the nearest name."""
    _load()
    if name in _OPS:
        return _OPS[name]
    if "." in name:
        from mgraph.ir.aten import aten_op_def

        return _OPS.setdefault(name, aten_op_def(name))
    if name.endswith("_") and name[:-1] in _OPS:
        # The in-place form: the same meaning; its results reuse the storage of its first operands.
        return _OPS.setdefault(name, replace(_OPS[name[:-1]], name=name))
    near = difflib.get_close_matches(name, _OPS, n=1)
    raise MgraphError(f"unknown op {name!r}", hint=f"did you mean {near[0]!r}?" if near else "see `mgraph ops`")


def is_known_op(name: str) -> bool:
    """Whether text may name this op, without importing torch: a declared op, or any dotted torch op."""
    _load()
    return name in _OPS or name.count(".") == 2 or (name.endswith("_") and name[:-1] in _OPS)


def declared_ops() -> dict[str, OpDef]:
    """All declared ops by name, in sorted order."""
    _load()
    return dict(sorted((n, d) for n, d in _OPS.items() if "." not in n and not n.endswith("_")))


def _load() -> None:
    import mgraph.ir.ops  # noqa: F401  (its import declares the ops)
