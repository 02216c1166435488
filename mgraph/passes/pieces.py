"""Pieces of a function: runs of nodes that can be CUDA graphs, made functions of their own.

    func @layer.fwd(%x: bf16[B, S, 64]; %w: …) {            func @layer.fwd.part1(%x: bf16[B, S, 64]; %w: …) {
      %q = aten.linear.default(%x, %w)                        %q = aten.linear.default(%x, %w)
      …                                                       …
      %places, %sent = …                                      return %flat, %places, %sent }
      %received = all_to_all(%sent) …               ==>     func @layer.fwd(%x: bf16[B, S, 64]; %w: …) {
      %sizes = read_sizes(%sent, %received)                   %flat, %places, %sent = call @layer.fwd.part1(%x; %w)
      …                                                       %received = all_to_all(%sent) …
                                                              %sizes = read_sizes(%sent, %received)
                                                              …

Nothing changes its place but what asks for this rank's number, which needs nothing and is a number of the host: it
goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mgraph.ir.aten import overload
from mgraph.ir.dims import Dim, factor_of, names_in, substitute
from mgraph.ir.graph import AttrValue, Function, Node, Static, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.types import TensorType

NUMBERS = ("axis_index",)
"""Ops that give a number of the host, the same in each call."""
LEAST = 4
"""Nodes that compute something, from which on a piece saves more launches than its own costs."""


@dataclass(frozen=True)
class Split:
    """A function in pieces: what is left of it, the functions that were made, and how many nodes they took."""

    function: Function
    pieces: tuple[Function, ...]
    taken: int


def split(
    function: Function, allowed: Callable[[Node], bool], bounds: Mapping[str, Dim], name: Callable[[int], str]
) -> Split:
    """The runs of at least LEAST nodes that are `allowed` as functions, the first called `name(1)`; `bounds` are those
    of ragged dims."""
    first = [node for node in function.nodes if node.op in NUMBERS]
    nodes = [*first, *(node for node in function.nodes if node.op not in NUMBERS)]
    made: list[Function] = []
    left: list[Node] = []
    position = taken = 0
    for start, end in _runs(nodes, allowed, bounds):
        left += nodes[position:start]
        read = {v for node in [*nodes[:start], *nodes[end:]] for v in node.operands} | set(function.results)
        piece, call = _outlined(function, nodes[start:end], read, name(len(made) + 1))
        made.append(piece)
        left.append(call)
        position, taken = end, taken + end - start
    left += nodes[position:]
    return Split(replace(function, nodes=tuple(left)) if made else function, tuple(made), taken)


def _runs(nodes: Sequence[Node], allowed: Callable[[Node], bool], bounds: Mapping[str, Dim]) -> list[tuple[int, int]]:
    """Where pieces begin and end."""
    runs = _stretches([node.op not in NUMBERS and allowed(node) for node in nodes])
    return [(a, b) for a, b in runs if sum(map(_computes, nodes[a:b])) >= LEAST and _tells(nodes[a:b], bounds)]


def _stretches(inside: Sequence[bool]) -> Iterator[tuple[int, int]]:
    start = None
    for i, is_in in enumerate([*inside, False]):
        if is_in and start is None:
            start = i
        elif not is_in and start is not None:
            yield start, i
            start = None


def _computes(node: Node) -> bool:
    """Whether a node launches anything."""
    if "." not in node.op:
        return node.op not in ("reshape", "split_rows", "part_of")
    return not any(result.alias_info is not None for result in overload(node.op)._schema.returns)


def _tells(nodes: Sequence[Node], bounds: Mapping[str, Dim]) -> bool:
    """Whether what a run reads tells the extents that its nodes speak of."""
    made = {v for node in nodes for v in node.results}
    told = [dim for node in nodes for v in node.operands if v not in made for dim in _shape(v)]
    named = [name for v in made for dim in _shape(v) for name in names_in(substitute(dim, bounds))]
    return all(any(factor_of(dim, name) is not None for dim in told) for name in dict.fromkeys(named))


def _shape(value: Value) -> tuple[Dim, ...]:
    return value.type.shape if isinstance(value.type, TensorType) else ()


def _outlined(function: Function, nodes: Sequence[Node], read: set[Value], name: str) -> tuple[Function, Node]:
    """A function of these nodes, and its call; `read` is what all else reads."""
    made = {v: None for node in nodes for v in node.results}
    given = dict.fromkeys(v for node in nodes for v in node.operands if v not in made)
    states = _states(function)
    params = tuple(v for v in given if v not in states and not v.is_state)
    slots = tuple(v for v in given if v in states or v.is_state)
    results = tuple(v for v in made if v in read)
    statics = tuple(dict.fromkeys(s for node in nodes for s in _statics(tuple(node.attrs.values()))))
    own = {v: Value(v.name, v.type) for v in (*given, *made)}
    piece = Function(name, params, slots, tuple(nodes), results, statics).with_values(own)
    attrs: dict[str, AttrValue] = {"callee": name, **{f"static.{s}": Static(s) for s in statics}}
    first = nodes[0]
    return piece, Node("call", (*params, *slots), results, attrs, first.phase, first.origin, "cuda-graphs")


def _states(function: Function) -> set[Value]:
    """The slots of a function, and what they are after updates in place."""
    found = set(function.slots)
    for node in function.nodes:
        if node.op.endswith("_") and "." not in node.op:
            count = op_def(node.op).updated(node)
            written = zip(node.results[:count], node.operands[:count], strict=True)
            found.update(result for result, value in written if value in found)
    return found


def _statics(value: AttrValue) -> Iterator[str]:
    if isinstance(value, tuple):
        for part in value:
            yield from _statics(part)
    elif isinstance(value, Static):
        yield value.name
