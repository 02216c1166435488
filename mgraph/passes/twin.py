"""The reduced twin of a module: the same graph with small extents and few layers, on which passes are checked.

    reduce(module) -> twin, Reduction("heads 32 -> 6, head_dim 128 -> 8, d_model 4096 -> 48, ..., layers 32 -> 4")

Depth: layers that do the same (they become calls of one function with the same statics) shrink to the shortest walk
that still has every kind between the same neighbours (four layers of one kind), because what a pass does may depend
on where a layer's inputs come from and its results go to. A dropped layer's result becomes its input. Width:
`mgraph.passes.extents`. The verifier infers every type of the twin anew: one that is not well typed is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sympy

from mgraph.errors import GraphError
from mgraph.ir.dims import Dim
from mgraph.ir.graph import Function, InitCall, Module, Node, State, Value
from mgraph.ir.types import PendingType, Physical, TensorType, Type
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.calls import callee, calls
from mgraph.passes.extents import (
    ATTENTIONS,
    DIM_ATTRS,
    Assignment,
    Relation,
    assign,
    map_dim,
    relations,
    static_extents,
)
from mgraph.passes.outline import Outline

SMALL = 5_000_000
"""A module with at most so many state elements can be checked as it is."""
SHORTEST = 16
"""No bound of a named dim (a table of positions) shrinks below this: the sequences that are run are shorter."""
_STATICS = 4  # a static with more values (the layer's index) does not tell layers apart
_SCALES = frozenset({"scale", "other", "value"})  # float attributes that may be a root of an extent


@dataclass(frozen=True)
class Reduction:
    """How a twin is smaller: new extents by old, names of extents, and the numbers of layer calls."""

    extents: Mapping[int, int]
    names: Mapping[int, str]
    layers: tuple[int, int] = (0, 0)
    why_not: str = ""

    @property
    def shortened(self) -> bool:
        """Whether layers were dropped."""
        return self.layers[0] != self.layers[1]

    def __str__(self) -> str:
        parts = [f"{self.names.get(old, 'extent')} {old} -> {new}" for old, new in sorted(self.extents.items())]
        if self.layers[0]:
            parts.append(f"layers {self.layers[0]} -> {self.layers[1]}")
        text = ", ".join(parts) or "nothing to reduce"
        return f"not reduced ({self.why_not})" if self.why_not else text


class NoTwin(Exception):
    """A module has no reduced twin and is too large to be run as it is; the message says why."""


def reduce(module: Module, ranks: int = 1, parts: int = 1) -> tuple[Module, Reduction]:
    """The twin of a captured module and how it was made.

    Extents that `parts` divides keep to that, so that they can be split alike. With `ranks` that share the heads,
    numbers that divide it do so still, and it divides numbers of heads where it did, so that keys and values are
    repeated alike.

    Where no reduction is found, a small module is its own twin; otherwise NoTwin is raised.
    """
    short, layers = shorten(module)
    least = {d.maximum: SHORTEST for d in module.dims.values() if d.maximum is not None}
    found = static_extents(short)
    heads = {v for _, n in short.walk() if n.op in ATTENTIONS for v in n.operands[0].tensor.shape[1:2]}
    kept = [
        Relation((n,), partial(_kept, n, ranks, math.lcm(parts, ranks if n in heads else 1)))
        for n in found
        if ranks * parts > 1
    ]
    new = assign(found, [*relations(short), *kept], least)
    why = "no small extents keep all relations of the graph" if new is None else ""
    if new is not None:
        twin = _Narrowing(new).module(short)
        try:
            verify(twin)
            changed = {old: small for old, small in new.items() if old != small}
            return twin, Reduction(changed, _names(short), layers)
        except GraphError as error:
            why = " ".join(str(error).removeprefix("error: ").split())
    size = state_elements(module)
    if size > SMALL:
        raise NoTwin(f"{why}; the model has {size} state elements, too many to run as it is")
    return module, Reduction({}, {}, why_not=why)


def _kept(extent: int, ranks: int, divisor: int, new: Assignment) -> bool:
    """Whether the new extent divides `ranks` if the old one does, and can be divided by `divisor` if that can."""
    small = new[extent]
    return (extent % divisor != 0 or small % divisor == 0) and (ranks % extent != 0 or ranks % small == 0)


def state_elements(module: Module) -> int:
    """The number of elements of all states."""
    return sum(math.prod(int(d) for d in s.type.shape) for s in module.state.values())


# depth


def shorten(module: Module) -> tuple[Module, tuple[int, int]]:
    """The module with fewer layers, and the numbers of layers before and after."""
    outlined = Outline().run(module, Report())
    functions = dict(module.functions)
    before = after = 0
    for name in dict.fromkeys(e.function for e in module.entries.values()):
        layers = calls(outlined.functions[name])
        carried = [_carried(node, outlined.functions[callee(node)]) for node in layers]
        kinds = _kinds(layers)
        kept = set(shortest_walk(kinds) if all(c is not None for c in carried) else range(len(layers)))
        before, after = before + len(layers), after + len(kept)
        dropped = {
            node.results[0]: source
            for index, (node, source) in enumerate(zip(layers, carried, strict=True))
            if index not in kept and source is not None
        }
        if dropped:
            functions[name] = _without(functions[name], dropped)
    read = {v for f in functions.values() for n in f.nodes for v in n.operands if v.is_state}
    read_before = {v for _, n in module.walk() for v in n.operands if v.is_state}
    state = {n: s for n, s in module.state.items() if s.value in read or s.value not in read_before}
    return replace(module, functions=functions, state=state), (before, after)


def _carried(node: Node, body: Function) -> Value | None:
    """What a layer's only result was before the layer: the one param of its type that differs from call to call."""
    params = node.operands[: len(body.params)]
    found = [v for v, p in zip(params, body.params, strict=True) if p.type == node.results[0].type and not v.is_state]
    return found[0] if len(found) == 1 and len(node.results) == 1 else None


def _kinds(layers: Sequence[Node]) -> list[tuple[Any, ...]]:
    """What each layer does: its function, and the statics that have few values."""
    values: dict[str, set[str]] = {}
    for node in layers:
        for name, value in node.attrs.items():
            values.setdefault(name, set()).add(repr(value))
    telling = [n for n, found in values.items() if n.startswith("static.") and len(found) <= _STATICS]
    return [(callee(node), *(repr(node.attrs.get(n)) for n in telling)) for node in layers]


def shortest_walk(kinds: Sequence[Any]) -> list[int]:
    """Indices of a short subsequence in which every kind has the same neighbours, and kinds appear in the same order:
    stretches between two equal kinds are cut out, long ones first."""

    def facts(walk: Sequence[int]) -> tuple[Any, ...]:
        # The first layer is a kind of its own: only its input may need no gradient.
        here = [kinds[i] if i else (kinds[i], "first") for i in walk]
        neighbours = zip([None, *here], here, [*here[1:], None], strict=False)
        return set(neighbours), list(dict.fromkeys(here))

    walk = list(range(len(kinds)))
    wanted = facts(walk)
    while True:
        cuts = [
            (i, j)
            for length in range(len(walk) - 1, 0, -1)
            for i in range(len(walk) - length)
            for j in (i + length,)
            if kinds[walk[i]] == kinds[walk[j]] and i > 0
        ]
        cut = next((c for c in cuts if facts(walk[: c[0]] + walk[c[1] :]) == wanted), None)
        if cut is None:
            return walk
        walk = walk[: cut[0]] + walk[cut[1] :]


def _without(function: Function, dropped: Mapping[Value, Value]) -> Function:
    """The function where each dropped result is what it is mapped to; nodes that only dropped layers needed go."""

    def now(value: Value) -> Value:
        while value in dropped:
            value = dropped[value]
        return value

    results = tuple(map(now, function.results))
    nodes = [replace(n, operands=tuple(map(now, n.operands))) for n in function.nodes]
    was_live, live = _live(function.nodes, function.results), _live(nodes, results)
    gone: set[Value] = set()
    kept = []
    for old, node in zip(function.nodes, nodes, strict=True):
        useless = not any(v in live for v in node.results) and any(v in was_live for v in node.results)
        if useless or any(v in gone for v in old.operands if v not in dropped):
            gone.update(node.results)
        else:
            kept.append(node)
    return replace(function, nodes=tuple(kept), results=results)


def _live(nodes: Sequence[Node], results: Sequence[Value]) -> set[Value]:
    live = set(results)
    for node in reversed(nodes):
        if any(v in live for v in node.results):
            live.update(node.operands)
    return live


# width


class _Narrowing:
    """Rewrites a module to new extents; every value is replaced by one with the same name."""

    def __init__(self, new: Mapping[int, int]) -> None:
        self.new = new
        self.values: dict[Value, Value] = {}
        self.roots = {float(n) ** p: float(m) ** p for n, m in new.items() if n != m for p in (0.5, -0.5)}

    def module(self, module: Module) -> Module:
        dims = {
            name: replace(d, maximum=None if d.maximum is None else self.new.get(d.maximum, d.maximum))
            for name, d in module.dims.items()
        }
        state = {name: self.state(s) for name, s in module.state.items()}
        functions = {name: self.function(f) for name, f in module.functions.items()}
        return replace(module, dims=dims, state=state, functions=functions)

    def dim(self, dim: Dim) -> Dim:
        return map_dim(dim, self.new)

    def shape(self, shape: Sequence[Dim]) -> tuple[Dim, ...]:
        return tuple(map(self.dim, shape))

    def type(self, type_: Type) -> Type:
        if isinstance(type_, PendingType):
            return PendingType(self.tensor(type_.value))
        return self.tensor(type_)

    def tensor(self, type_: TensorType) -> TensorType:
        physical: Physical | None = type_.physical
        if physical is not None:
            physical = replace(physical, shape=self.shape(physical.shape))
        factors = tuple((dim, self.shape(parts)) for dim, parts in type_.factors)
        return replace(type_, shape=self.shape(type_.shape), factors=factors, physical=physical)

    def value(self, value: Value) -> Value:
        if value not in self.values:
            self.values[value] = Value(value.name, self.type(value.type), value.is_state)
        return self.values[value]

    def state(self, state: State) -> State:
        return replace(state, value=self.value(state.value), init=tuple(self.init(c, state) for c in state.init))

    def init(self, call: InitCall, state: State) -> InitCall:
        """`copy_` of written-out numbers keeps the leading part of every dim."""
        if call[0] != "copy_":
            return call
        values = call[1]
        assert isinstance(values, tuple), f"{state.name}: copy_ of {values}"
        return ("copy_", self.leading(values, state.type.shape))

    def leading(self, values: Sequence[Any], shape: Sequence[Dim]) -> tuple[Any, ...]:
        if not shape:
            return tuple(values)
        size = len(values) // int(shape[0])
        count = int(self.dim(shape[0]))
        return tuple(v for i in range(count) for v in self.leading(values[i * size : (i + 1) * size], shape[1:]))

    def function(self, function: Function) -> Function:
        def all_of(values: Sequence[Value]) -> tuple[Value, ...]:
            return tuple(map(self.value, values))

        nodes = tuple(
            replace(n, operands=all_of(n.operands), results=all_of(n.results), attrs=self.attrs(n))
            for n in function.nodes
        )
        return replace(
            function,
            params=all_of(function.params),
            slots=all_of(function.slots),
            nodes=nodes,
            results=all_of(function.results),
        )

    def attrs(self, node: Node) -> dict[str, Any]:
        attrs = {name: self.attr(name, value) for name, value in node.attrs.items()}
        if node.op == "constant":
            attrs["values"] = self.leading(node.attrs["values"], node.result.tensor.shape)  # type: ignore[arg-type]
        return attrs

    def attr(self, name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self.attr(name, v) for v in value)
        if isinstance(value, sympy.Expr) or (type(value) is int and name in DIM_ATTRS):
            return self.dim(value)
        if isinstance(value, float) and name in _SCALES:
            return next((new for old, new in self.roots.items() if math.isclose(old, value, rel_tol=1e-6)), value)
        return value


# names


def _names(module: Module) -> dict[int, str]:
    """What each extent is, from where it appears first."""
    names: dict[int, str] = {}

    def call(name: str, *dims: Dim) -> None:
        for dim in dims:
            if isinstance(dim, int):
                names.setdefault(dim, name)

    for _, node in module.walk():
        shapes = [v.type.shape if isinstance(v.type, TensorType) else () for v in node.operands]
        if node.op == "aten.embedding.default":
            call("vocab", shapes[0][0])
            call("d_model", shapes[0][1])
        elif "attention" in node.op:
            call("heads", shapes[0][1])
            call("kv_heads", shapes[1][1])
            call("head_dim", shapes[0][3])
        elif node.op in ("aten.topk.default", "moe_route"):
            call("experts", shapes[0][-1])
        elif node.op.split(".")[1:2] in (["silu"], ["gelu"], ["relu"]):
            call("ff", shapes[0][-1])
    halves = [extent // 2 for extent, name in names.items() if name == "head_dim" and extent % 2 == 0]
    call("head_dim/2", *halves)
    for state in module.state.values():
        call(".".join(p for p in state.name.removesuffix(".weight").split(".") if not p.isdigit()), *state.type.shape)
    return names
