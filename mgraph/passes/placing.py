"""How an op may run on parts: per op the placements of operands and results over one axis that go together.

They follow from dim signatures (of declared ops, and of torch's in `SIGNATURES`), from declared strategies, and, where
dims move (`reshape`, `permute`, broadcasting), from the shapes. In all of them each rank runs the op as it is on its
parts; but a bias that is added to a partial product must be added after the sum. An op of which nothing is known has
none: it runs on whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

from mgraph.ir.dims import Dim, as_dim, divide
from mgraph.ir.facts import share
from mgraph.ir.graph import Node
from mgraph.ir.local import Division
from mgraph.ir.opdef import op_def
from mgraph.ir.signature import ShardingRule, Signature, parse_signature
from mgraph.ir.types import Partial, Placement, Shard, TensorType

UNDIVIDED = Division({}, frozenset())
"""No other axis divides an extent, and of no named dim it is known that it is a multiple of a number."""

SIGNATURES = {
    "aten.linear.default": "... k+, n k+, n -> ... n",
    "aten.mm.default": "m k+, k+ n -> m n",
    "aten.bmm.default": "b m k+, b k+ n -> b m n",
    "aten.t.default": "m n -> n m",
}
_MATMULS = {2: "... k+, k+ n -> ... n", 3: "b m k+, b k+ n -> b m n", 4: "a b m k+, a b k+ n -> a b m n"}
_EXTRAS = {"sinks": Shard(0)}
"""Operands of attention by name that are split with its heads; the others are the same for all."""


def shape_of(node: Node, operand: int) -> tuple[Dim, ...]:
    """The logical shape of an operand."""
    return node.operands[operand].tensor.shape


def rules_of(node: Node, size: int, division: Division = UNDIVIDED) -> list[ShardingRule]:
    """The ways to split a node over an axis of `size` ranks: those whose dims it divides, of what the other axes of
    `division` leave of them."""
    if not all(isinstance(v.type, TensorType) for v in (*node.operands, *node.results)):
        return []
    return [rule for rule in _rules(node) if _fits(node, rule, size, division)]


def _rules(node: Node) -> Iterator[ShardingRule]:
    if node.op in _OWN:
        yield from _OWN[node.op](node)
        return
    signature = _signature(node)
    if signature is not None:
        yield from _of_signature(signature, node)
    elif "." not in node.op:
        for strategy in op_def(node.op).strategies:
            yield ShardingRule(strategy.name, strategy.operands, strategy.results)
    elif is_pointwise(node.op):
        yield from _pointwise(node)


def _signature(node: Node) -> Signature | None:
    if node.op == "aten.matmul.default":
        left, right = len(shape_of(node, 0)), len(shape_of(node, 1))
        fits = right == 2 or left == right
        return parse_signature(_MATMULS[right]) if fits and right in _MATMULS and left >= 2 else None
    if node.op in SIGNATURES:
        return parse_signature(SIGNATURES[node.op])
    return op_def(node.op).signature if "." not in node.op else None


def _of_signature(signature: Signature, node: Node) -> Iterator[ShardingRule]:
    """The signature's rules with dims counted from the front, for as many operands as there are."""
    count = len(node.operands)
    leads = [i for i, p in enumerate(signature.operands[:count]) if p.terms and p.terms[0].text == "..."]
    leading = len(shape_of(node, leads[0])) - len(signature.operands[leads[0]].terms) + 1 if leads else 0
    ranks = [len(v.tensor.shape) for v in node.operands], [len(v.tensor.shape) for v in node.results]
    for rule in signature.sharding_rules(leading):
        operands, results = (
            tuple(_from_front(p, rank) for p, rank in zip(placements, ranks_, strict=False))
            for placements, ranks_ in zip((rule.operands, rule.results), ranks, strict=True)
        )
        yield ShardingRule(rule.name, operands, results)


def _from_front(placement: Placement | None, rank: int) -> Placement | None:
    return Shard(placement.dim % rank) if isinstance(placement, Shard) and placement.dim < 0 else placement


def _fits(node: Node, rule: ShardingRule, size: int, division: Division) -> bool:
    places = zip((*node.operands, *node.results), (*rule.operands, *rule.results), strict=True)
    return all(
        p.factor is None and share(division.local_type(v.tensor).shape[p.dim], size, division.multiples) is not None
        for v, p in places
        if isinstance(p, Shard)
    )


@cache
def is_pointwise(op: str) -> bool:
    """Whether each element of torch's op's result depends on the elements of its operands at the same place alone."""
    import torch

    from mgraph.ir.aten import overload

    tags = overload(op).tags
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    return torch.Tag.pointwise in tags or op in ("aten.clone.default", "aten.contiguous.default")


def _pointwise(node: Node) -> Iterator[ShardingRule]:
    """Any dim of the result; operands are split where they have it, and not where they are broadcast along it."""
    for dim, extent in enumerate(node.results[0].tensor.shape):
        operands = tuple(_aligned(v.tensor.shape, node.results[0].tensor.shape, dim) for v in node.operands)
        if extent != 1 and any(operands):
            yield ShardingRule(f"dim {dim}", operands, (Shard(dim),) * len(node.results))


def _aligned(shape: Sequence[Dim], result: Sequence[Dim], dim: int) -> Placement | None:
    """Where an operand that is broadcast to `result` has its dim."""
    own = dim - (len(result) - len(shape))
    return Shard(own) if own >= 0 and shape[own] == result[dim] else None


def _linear_map(node: Node) -> Iterator[ShardingRule]:
    """Sums: of partial sums they are partial."""
    if not node.attrs:
        yield ShardingRule("sum", (Partial(),) * len(node.operands), (Partial(),))
    yield from _pointwise(node)


def _attention(node: Node) -> Iterator[ShardingRule]:
    """Heads: those of queries with those of keys and values that they read."""
    strategy = next(s for s in op_def(node.op).strategies if s.name == "heads")
    named = node.attrs.get("extra", ())
    assert isinstance(named, tuple)
    extras = tuple(_EXTRAS.get(str(name)) for name in named)
    sinks = tuple(Shard(0) for _ in node.results[len(strategy.results) :])
    yield ShardingRule("heads", (*strategy.operands, *extras), (*strategy.results, *sinks))


def _paged(node: Node) -> Iterator[ShardingRule]:
    """Heads: those of queries with the caches of those that they read. What says where rows lie is the same for all."""
    heads, whole = Shard(1), (None,)
    if node.op.startswith("paged_attention"):
        yield ShardingRule("heads", (heads,) * 3 + whole * 3 + (Shard(0),) * (len(node.operands) - 6), (heads,))
    else:
        new = len(node.results) + 2
        yield ShardingRule("heads", (heads,) * new + whole * (len(node.operands) - new), (heads,) * len(node.results))


def _rope(node: Node) -> Iterator[ShardingRule]:
    """Any dim but the last, which is turned; the tables are split where they have it."""
    x = shape_of(node, 0)
    for dim in range(len(x) - 1):
        tables = tuple(_aligned(shape_of(node, i), x, dim) for i in (1, 2))
        yield ShardingRule(f"dim {dim}", (Shard(dim), *tables), (Shard(dim),))


def _reshape(node: Node) -> Iterator[ShardingRule]:
    """The first dim of each group of dims that becomes another: `[.., 64] -> [.., 4, 16]` splits 64 and 4."""
    for old, new in _groups(shape_of(node, 0), node.results[0].tensor.shape):
        yield ShardingRule(f"dim {new}", (Shard(old),), (Shard(new),))


def _groups(before: Sequence[Dim], after: Sequence[Dim]) -> list[tuple[int, int]]:
    """First dims (without ones) of the smallest runs of dims on both sides with equal products."""
    left = [(i, d) for i, d in enumerate(before) if d != 1]
    right = [(i, d) for i, d in enumerate(after) if d != 1]
    found = []
    while left and right:
        (first, a), (second, b) = left.pop(0), right.pop(0)
        found.append((first, second))
        while a != b:
            if left and divide(b, a) is not None:
                a = as_dim(a * left.pop(0)[1])
            elif right and divide(a, b) is not None:
                b = as_dim(b * right.pop(0)[1])
            else:
                return found[:-1]
    return found


def _permute(node: Node) -> Iterator[ShardingRule]:
    rank = len(shape_of(node, 0))
    order = list(range(rank))
    if node.op == "aten.permute.default":
        dims = node.attrs["dims"]
        assert isinstance(dims, tuple)
        order = [int(str(d)) % rank for d in dims]
    else:
        a, b = (int(str(node.attrs[name])) % rank for name in ("dim0", "dim1"))
        order[a], order[b] = b, a
    for new, old in enumerate(order):
        yield ShardingRule(f"dim {old}", (Shard(old),), (Shard(new),))


def _expand(node: Node) -> Iterator[ShardingRule]:
    result = node.results[0].tensor.shape
    for dim in range(len(result)):
        own = _aligned(shape_of(node, 0), result, dim)
        if own is not None and result[dim] != 1:
            yield ShardingRule(f"dim {dim}", (own,), (Shard(dim),))


def _along(node: Node) -> Iterator[ShardingRule]:
    """Ops that work along one dim: all others."""
    rank = len(shape_of(node, 0))
    along = int(str(node.attrs.get("dim", 0))) % rank
    for dim in range(rank):
        if dim != along:
            yield ShardingRule(f"dim {dim}", (Shard(dim),) * len(node.operands), (Shard(dim),) * len(node.results))


def _stepped(node: Node) -> Iterator[ShardingRule]:
    """Every n-th of a dim, and the gradient of that: a part of the dim has its own, as it is a multiple of n."""
    yield from _along(node)
    whole, taken = (v.tensor.shape for v in (node.operands[0], node.result))
    if node.op == "aten.slice_backward.default":
        whole, taken = taken, whole
    along = int(str(node.attrs.get("dim", 0))) % len(whole)
    start, step = node.attrs.get("start") or 0, node.attrs.get("step", 1)
    if not isinstance(start, int) or not isinstance(step, int) or step == 1:
        return
    if 0 <= start < step and whole[along] == step * taken[along]:
        yield ShardingRule(f"every {step} of dim {along}", (Shard(along),), (Shard(along),))


def _selected(node: Node) -> Iterator[ShardingRule]:
    """The dims that nothing is chosen along."""
    along = int(str(node.attrs["dim"])) % len(shape_of(node, 0))
    for dim in range(len(shape_of(node, 0))):
        if dim != along:
            yield ShardingRule(f"dim {dim}", (Shard(dim), None), (Shard(dim),))


def _sum(node: Node) -> Iterator[ShardingRule]:
    """A dim that is summed makes partial sums; others keep their order."""
    rank, given = len(shape_of(node, 0)), node.attrs.get("dim")
    summed = {int(str(d)) % rank for d in given} if isinstance(given, tuple) and given else set(range(rank))
    kept = iter(range(rank) if node.attrs.get("keepdim") else range(rank - len(summed)))
    for dim in range(rank):
        place = next(kept) if dim not in summed or node.attrs.get("keepdim") else 0
        yield ShardingRule(f"dim {dim}", (Shard(dim),), (Partial() if dim in summed else Shard(place),))


def _made(node: Node) -> Iterator[ShardingRule]:
    """Equal elements: any dim."""
    for dim in range(len(node.results[0].tensor.shape)):
        yield ShardingRule(f"dim {dim}", (), (Shard(dim),))


def _view(node: Node) -> Iterator[ShardingRule]:
    """Parts of a longer form of what is whole: `mgraph.passes.spreading` has the op that takes a rank's own."""
    yield ShardingRule("parts", (None,), (Shard(int(str(node.attrs["dim"]))),))


def _of_first(node: Node) -> Iterator[ShardingRule]:
    """What one rank alone adds: any dim."""
    for dim in range(len(shape_of(node, 0))):
        yield ShardingRule(f"dim {dim}", (Shard(dim), None), (Shard(dim),))


def _dropout(node: Node) -> Iterator[ShardingRule]:
    """Any dim but the batch, by the op of parts that `mgraph.passes.spreading` has."""
    for dim in range(1, len(shape_of(node, 0))):
        yield ShardingRule(f"dim {dim}", (Shard(dim), None, None, None), (Shard(dim),))


def _cast(node: Node) -> Iterator[ShardingRule]:
    for dim in range(len(shape_of(node, 0))):
        yield ShardingRule(f"dim {dim}", (Shard(dim),), (Shard(dim),))


def _grouped(node: Node) -> Iterator[ShardingRule]:
    """The columns of a product of experts' rows, or what is summed over; there a bias is added by one rank alone, as
    `mgraph.passes.spreading` sees to."""
    turned = bool(node.attrs.get("transpose_w", False))
    inner, outer = (Shard(2), Shard(1)) if turned else (Shard(1), Shard(2))
    columns = Shard(1)
    bias = (columns,) * (len(node.operands) - 3)
    yield ShardingRule("columns", (None, outer, None, *bias), (columns,))
    yield ShardingRule("summed", (columns, inner, None, *[None] * len(bias)), (Partial(),))


def _summed_rows(node: Node) -> Iterator[ShardingRule]:
    """Sums of experts' rows, and the gradient of their weights: linear in the rows, of which there may be partial
    sums."""
    if node.op in ("moe_combine_grad", "padded_combine_grad"):  # of dy and rows
        taken = (None, Partial(), *[None] * (len(node.operands) - 2))
        yield ShardingRule("partial rows", taken, (None, Partial()))
        return
    rows = shape_of(node, 0)
    places = tuple(Partial() if v.tensor.shape == rows else None for v in node.operands)  # perhaps more of them
    yield ShardingRule("partial rows", places, (Partial(),) * len(node.results))


_OWN: dict[str, Callable[[Node], Iterator[ShardingRule]]] = {
    "attention": _attention,
    "attention_grad": _attention,
    "grouped_matmul": _grouped,
    "moe_combine": _summed_rows,
    "moe_combine_grad": _summed_rows,
    "moe_dispatch_grad": _summed_rows,
    "padded_combine": _summed_rows,
    "padded_combine_grad": _summed_rows,
    "swap_blocks": _summed_rows,
    "unpack_rows": _summed_rows,
    "join_rows": _summed_rows,
    "split_rows": _summed_rows,
    "kv_append": _paged,
    "rope_kv_append": _paged,
    "paged_attention": _paged,
    "rope": _rope,
    "reshape": _reshape,
    "cast": _cast,
    "dropout": _dropout,
    "of_first": _of_first,
    "pad_extent": _view,
    "repeat_parts": _view,
    "aten.add.Tensor": _linear_map,
    "aten.sub.Tensor": _linear_map,
    "aten.permute.default": _permute,
    "aten.transpose.int": _permute,
    "aten.expand.default": _expand,
    "aten.full.default": _made,
    "aten.ones.default": _made,
    "aten.zeros.default": _made,
    "aten.index_select.default": _selected,
    "aten.slice.Tensor": _stepped,
    "aten.slice_backward.default": _stepped,
    "aten.cat.default": _along,
    "aten.split.Tensor": _along,
    "aten.split_with_sizes.default": _along,
    "aten.sum.dim_IntList": _sum,
    "aten.sum.default": _sum,
}
