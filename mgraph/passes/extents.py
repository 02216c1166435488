"""Smaller extents for the same graph: which static extents there are, how they hang together, and a small assignment.

Equal extents form one class and stay equal, different ones stay different. The graph ties classes to each other:

    reshape [.., 4096] -> [.., 32, 128]    4096 = 32 * 128        cat, slice, split     128 = 64 + 64
    attention of 32 heads over 8           8 divides 32           top-k of 8 with k 2   more than 2 stay

The extents of a graph satisfy its own relations, so an assignment always exists; the search looks for a small one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import sympy

from mgraph.ir.dims import Dim, as_dim
from mgraph.ir.graph import Module, Node, Value
from mgraph.ir.types import PendingType, TensorType

KEPT = 4
"""Extents up to this stay as they are: there is nothing to gain, and they often mean a number (k, pairs)."""
_SMALLEST, _LARGEST, _STEPS = 3, 4096, 100_000

DIM_ATTRS = frozenset(
    {
        *("size", "shape", "sizes", "output_size", "normalized_shape", "num_classes", "num_experts"),
        *("start", "end", "length", "split_size", "split_sizes", "repeats"),
    }
)
"""Attributes that hold extents or positions along a dim."""

_RESHAPES = frozenset({"reshape", "aten.view.default", "aten.unflatten.int", "aten.flatten.using_ints"})
_SPLITS = frozenset({"aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default"})
ATTENTIONS = frozenset({"aten.scaled_dot_product_attention.default", "attention"})
"""Ops whose operands are [B, heads, S, D]."""

Assignment = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Relation:
    """What must hold between the new values of some extents."""

    extents: tuple[int, ...]
    holds: Callable[[Assignment], bool]


def map_dim(dim: Dim, new: Assignment) -> Dim:
    """A dim with its static factors replaced: `4096`, `2*B*S`. Constants added to named dims stay."""
    if isinstance(dim, int):
        return new.get(dim, dim) if dim >= 0 else -new.get(-dim, -dim)
    terms = []
    for term in sympy.Add.make_args(dim):
        coefficient, rest = term.as_coeff_Mul()
        follows = coefficient.is_Integer and rest != 1
        terms.append(new.get(int(coefficient), int(coefficient)) * rest if follows else term)
    return as_dim(sympy.Add(*terms))


def _factors(shape: Iterable[Dim]) -> Counter[int]:
    """The static factors of a shape, counted; ones left out."""
    found: Counter[int] = Counter()
    for dim in shape:
        number = dim if isinstance(dim, int) else int(dim.as_coeff_Mul()[0])
        if number != 1:
            found[number] += 1
    return found


def _tensor(value: Value) -> TensorType:
    return value.type.value if isinstance(value.type, PendingType) else value.type


def values_of(module: Module) -> Iterator[Value]:
    """Every value of a module: states, inputs and results."""
    yield from (s.value for s in module.state.values())
    for function in module.functions.values():
        yield from function.inputs()
        yield from (v for node in function.nodes for v in node.results)


def static_extents(module: Module) -> set[int]:
    """All static extents above 1, in types and in attributes that hold extents."""
    found: set[int] = set()
    for type_ in {_tensor(v) for v in values_of(module)}:
        found.update(_factors(type_.shape))
    for _, node in module.walk():
        for name, value in node.attrs.items():
            if name in DIM_ATTRS:
                items = value if isinstance(value, tuple) else (value,)
                found.update(abs(i) for i in items if type(i) is int and 1 < abs(i) < 2**31)
    return {n for n in found if n > 1}


def relations(module: Module) -> list[Relation]:
    """How the extents of a module hang together, each relation once."""
    found: dict[tuple[object, ...], Relation] = {}
    for _, node in module.walk():
        for key, relation in _relations(node):
            found.setdefault(key, relation)
    return list(found.values())


def _relations(node: Node) -> Iterator[tuple[tuple[object, ...], Relation]]:
    if node.op in _RESHAPES:
        before, after = _factors(_tensor(node.operands[0]).shape), _factors(_tensor(node.result).shape)
        yield from _product(before - after, after - before)
    elif node.op in ATTENTIONS:
        heads, groups = (_tensor(v).shape[1] for v in node.operands[:2])
        if isinstance(heads, int) and isinstance(groups, int):
            yield ("divides", groups, heads), Relation((heads, groups), lambda new: new[heads] % new[groups] == 0)
    elif node.op in ("aten.topk.default", "moe_route"):
        k, total = _tensor(node.results[0]).shape[-1], _tensor(node.operands[0]).shape[-1]
        if isinstance(k, int) and isinstance(total, int) and k < total:
            yield ("more", k, total), Relation((k, total), lambda new: new[k] < new[total])
    elif node.op == "aten.cat.default":
        dim = int(str(node.attrs.get("dim", 0)))
        yield from _sum(_tensor(node.result).shape[dim], [_tensor(v).shape[dim] for v in node.operands])
    elif node.op in _SPLITS:
        dim = int(str(node.attrs.get("dim", 0)))
        yield from _sum(_tensor(node.operands[0]).shape[dim], [_tensor(v).shape[dim] for v in node.results])
    elif node.op in ("aten.slice.Tensor", "aten.narrow.default"):
        yield from _slice(node)
    elif node.op in ("aten.repeat.default", "aten.repeat_interleave.self_int"):
        yield from _repeat(node)
    elif node.op.startswith("aten.arange."):
        yield from _range(node)
    elif node.op in ("aten.stack.default", "aten.unbind.int", "aten.select.int"):
        yield from _counted(node)


def _counted(node: Node) -> Iterator[tuple[tuple[object, ...], Relation]]:
    """As many parts as a dim has are put together or taken apart, or one is taken that has to be there."""
    dim, index = int(str(node.attrs.get("dim", 0))), node.attrs.get("index")
    total = _tensor(node.result if node.op == "aten.stack.default" else node.operands[0]).shape[dim]
    if not isinstance(total, int):
        return
    if node.op != "aten.select.int":
        yield ("all", total), Relation((total,), lambda new: new[total] == total)
    elif isinstance(index, int):
        least = index + 1 if index >= 0 else -index
        yield ("least", total, least), Relation((total,), lambda new: new[total] >= least)


def _product(left: Counter[int], right: Counter[int]) -> Iterator[tuple[tuple[object, ...], Relation]]:
    """The products of two bags of extents are equal."""
    if left or right:
        a, b = tuple(sorted(left.elements())), tuple(sorted(right.elements()))

        def holds(new: Assignment) -> bool:
            return math.prod(new[x] for x in a) == math.prod(new[x] for x in b)

        yield ("product", *sorted((a, b))), Relation((*a, *b), holds)


def _sum(total: Dim, parts: list[Dim]) -> Iterator[tuple[tuple[object, ...], Relation]]:
    """A total of static parts; an empty part is left out."""
    numbers = tuple(p for p in parts if isinstance(p, int) and p)
    if isinstance(total, int) and all(isinstance(p, int) for p in parts):
        key = ("sum", total, *numbers)
        yield key, Relation((total, *numbers), lambda new: new[total] == sum(new[p] for p in numbers))


def _slice(node: Node) -> Iterator[tuple[tuple[object, ...], Relation]]:
    """`extent = start + length + rest`: the part before, the part taken, the part after; or every so many of them."""
    dim = int(str(node.attrs.get("dim", 0)))
    extent, length = _tensor(node.operands[0]).shape[dim], _tensor(node.result).shape[dim]
    start, step = node.attrs.get("start"), int(str(node.attrs.get("step", 1)))
    if not isinstance(extent, int) or not isinstance(length, int):
        return
    begin = int(str(start)) if start is not None else 0
    begin = begin + extent if begin < 0 else begin
    if step != 1:
        yield from _strided(node, extent, begin, step, length)
        return
    end = begin + length
    if begin:
        yield from _sum(end, [begin, length])
    if end < extent:
        key = ("more", end, extent)
        yield key, Relation((end, extent), lambda new: new[end] < new[extent])
    if start is not None and int(str(start)) < 0:
        yield from _sum(extent, [begin, -int(str(start))])


def _strided(
    node: Node, extent: int, begin: int, step: int, length: int
) -> Iterator[tuple[tuple[object, ...], Relation]]:
    """`length = ceil((end - start) / step)`: the interleaved halves of gate and up have step 2."""
    given = node.attrs.get("end")
    end = min(extent, int(str(given))) if given is not None else extent

    def holds(new: Assignment) -> bool:
        first, last = (int(str(map_dim(n, new))) for n in (begin, end))
        return -(-(last - first) // step) == new[length]

    yield ("strided", begin, end, step), Relation(tuple(n for n in (begin, end, length) if n > 1), holds)


def _repeat(node: Node) -> Iterator[tuple[tuple[object, ...], Relation]]:
    before, after = _tensor(node.operands[0]).shape, _tensor(node.result).shape
    repeats = node.attrs["repeats"]
    times = repeats if isinstance(repeats, tuple) else (repeats,)
    lead = (1,) * (len(after) - len(before))
    for old, new in zip((*lead, *before), after, strict=True):
        if old != new and isinstance(old, int) and isinstance(new, int) and new // old in times:
            yield from _product(_factors((new,)), _factors((old, new // old)))


def _range(node: Node) -> Iterator[tuple[tuple[object, ...], Relation]]:
    length = _tensor(node.result).shape[0]
    start, end, step = (node.attrs.get(name, default) for name, default in (("start", 0), ("end", 0), ("step", 1)))
    if not (isinstance(length, int) and isinstance(start, int) and isinstance(end, int) and isinstance(step, int)):
        return

    def holds(new: Assignment) -> bool:
        first, last = (int(str(map_dim(n, new))) for n in (start, end))
        return -(-(last - first) // step) == new[length]

    extents = tuple(n for n in (start, end, length) if n > 1)
    yield ("range", start, end, step), Relation(extents, holds)


def assign(extents: Iterable[int], ties: Iterable[Relation], least: Assignment) -> dict[int, int] | None:
    """New values for all extents: pairwise distinct, none larger than before, every relation kept, small ones first.

    `least` gives lower bounds. `None` where the search takes too long.
    """
    ordered = sorted(extents)
    new = {n: n for n in ordered if n <= KEPT} | {1: 1}
    taken = {n for n in new if n > 1}
    open_ = [n for n in ordered if n not in new]
    position = {n: i for i, n in enumerate(open_)}
    due: list[list[Relation]] = [[] for _ in open_]
    for tie in ties:
        last = max((position[n] for n in tie.extents if n in position), default=None)
        if last is not None:
            due[last].append(tie)
    steps = 0

    def place(index: int) -> bool:
        nonlocal steps
        if index == len(open_):
            return True
        extent = open_[index]
        for value in range(max(_SMALLEST, least.get(extent, 0)), min(extent, _LARGEST) + 1):
            steps += 1
            if steps > _STEPS:
                return False
            if value in taken:
                continue
            new[extent] = value
            taken.add(value)
            if all(tie.holds(new) for tie in due[index]) and place(index + 1):
                return True
            taken.remove(value)
            del new[extent]
        return False

    return new if place(0) else None
