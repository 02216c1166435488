"""What join-products joins: sums of products whose parts come from one place, and states that lie one after another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.types import Shard, TensorType
from mgraph.passes.calls import callee, calls, roots
from mgraph.passes.gathered import Gathers

ALIGNMENT = 16
"""Bytes of which every joined state but the last is a multiple: what the fast loads of kernels and libraries want."""

Chain = tuple[tuple[str, ...], ...]
"""For each call, the names of the states that are joined, in order."""


class Miss(Exception):
    """The guard that failed, and why."""


def check(holds: object, guard: str, why: str) -> None:
    """Raise `Miss` unless it holds."""
    if not holds:
        raise Miss(guard, why)


def bound_states(module: Module) -> dict[Value, tuple[str, ...]]:
    """The states that each slot stands for, one for each way in which the entries reach its function; a state stands
    for itself. What is also handed something else is left out."""
    found: dict[Value, list[str | None]] = {}

    def visit(function: Function, names: dict[Value, str]) -> None:
        for slot in function.slots:
            found.setdefault(slot, []).append(names.get(slot))
        for node in calls(function):
            inner = module.functions[callee(node)]
            given = node.operands[len(inner.params) :]
            passed = {s: v.name if v.is_state else names.get(v, "") for s, v in zip(inner.slots, given, strict=True)}
            visit(inner, {slot: name for slot, name in passed.items() if name})

    for name in roots(module):
        visit(module.functions[name], {})
    bound: dict[Value, tuple[str, ...]] = {state.value: (name,) for name, state in module.state.items()}
    for slot, states in found.items():
        known = tuple(name for name in states if name is not None)
        if len(known) == len(states):
            bound[slot] = known
    return bound


def joined_states(module: Module) -> dict[str, str]:
    """The states that must lie right after another one, and that one, by name."""
    bound = bound_states(module)
    after: dict[str, str] = {}
    for _, node in module.walk():
        if node.op.removesuffix("_") not in ("joined", "accumulate_joined"):
            continue
        tensors = node.operands if node.op == "joined" else node.operands[:-1]
        if node.attrs.get("gathered"):
            continue  # which lays them together
        for names in zip(*(bound[tensor] for tensor in tensors), strict=True):
            for before, name in itertools.pairwise(names):
                assert after.setdefault(name, before) == before, f"{name} lies after {after[name]} and after {before}"
    return after


def uneven_states(module: Module) -> frozenset[str]:
    """The matrices behind which another would not begin at a multiple of `ALIGNMENT` bytes."""
    sizes = {name: _matrix_bytes(state.type) for name, state in module.state.items()}
    return frozenset(name for name, size in sizes.items() if size is not None and size % ALIGNMENT)


def _matrix_bytes(type_: TensorType) -> int | None:
    """The size of a matrix whose extents are known; None for all else."""
    extents = [extent for extent in type_.shape if isinstance(extent, int)]
    return extents[0] * extents[1] * type_.dtype.bits // 8 if len(extents) == len(type_.shape) == 2 else None


class Chains:
    """The states that are joined so far, where they lie or where they are `gathered`; none that is `uneven` has another
    behind it."""

    def __init__(self, module: Module, uneven: frozenset[str]) -> None:
        self._module, self._uneven = module, uneven
        self._gathers = Gathers(module)
        self._bound = bound_states(module) | self._gathers.of_value
        self.of_state: dict[str, tuple[str, ...]] = {}
        self.gathered: set[str] = set()

    def add(self, *joined: Sequence[Value]) -> None:
        """Join the states that slots stand for, or that params are gathered from, in every call. Raises `Miss` where
        that cannot be."""
        chains: list[tuple[str, ...]] = []
        together = {name for tensors in joined for t in tensors for name in self._gathers.of_value.get(t, ())}
        for tensors in joined:
            for tensor in tensors:
                check(tensor in self._bound, "state", f"{tensor!r} is no state in every call")
            chains += zip(*(self._bound[tensor] for tensor in tensors), strict=True)
        for chain in chains:
            for name in chain:
                state = self._module.state[name]
                split = any(isinstance(placed, Shard) for _, placed in state.type.placement)
                whole = self._gathers.make_whole(state) if name in together else not split
                check(whole, "placement", f"{name} is split over ranks")
                check(not state.host, "place", f"{name} lies in the memory of the host")
                check(self.of_state.get(name, chain) == chain, "chain", f"{name} is joined with others, too")
                size = _matrix_bytes(state.type)
                check(size is not None, "shape", f"{name} is no matrix of known size")
                check(name == chain[-1] or name not in self._uneven, "alignment", f"{name} has {size} bytes")
            types = {(state.type.dtype, state.type.shape[1]) for state in map(self._module.state.__getitem__, chain)}
            check(len(types) == 1, "type", f"{', '.join(chain)} differ in type")
            check(len(set(chain)) == len(chain), "chain", f"{chain[0]} is joined with itself")
            if not together.isdisjoint(chain):
                ordered = self._gathers.have_in_order(chain)
                check(ordered, "order", f"{', '.join(chain)} are not gathered one after another")
        for chain in chains:
            self.of_state.update(dict.fromkeys(chain, chain))
        self.gathered |= together

    def place(self, tensor: Value) -> tuple[Chain, int] | None:
        """The chains that a tensor's states are of, and its place in these; None where it is in none."""
        names = self._bound.get(tensor, ())
        found = [self.of_state.get(name) for name in names]
        chains = tuple(chain for chain in found if chain is not None)
        places = {chain.index(name) for name, chain in zip(names, chains, strict=False)}
        return (chains, places.pop()) if chains and len(chains) == len(names) and len(places) == 1 else None


@dataclass(frozen=True)
class Term:
    """A product of a sum: left [..., n] @ weight [n, k], and what the left one is made of."""

    left: Value
    weight: Value
    source: Value


@dataclass(frozen=True)
class Sum:
    """A sum of products that can be one. `products` and `updates` are those of the weights' gradients, of `input` (none
    where the weights have none; no updates where the function gives the gradients to its caller); `emit` makes the left
    operands beside each other, in the order of the terms."""

    root: Node
    terms: tuple[Term, ...]
    products: tuple[Node, ...]
    updates: tuple[Node, ...]
    input: Value
    flat_type: TensorType
    gone: tuple[Node, ...]
    text: str
    emit: Callable[[Any], Value]


def sums_of(function: Function, root: Node) -> Iterator[Sum]:
    """The sum that a `matmul_add` ends, if it ends one. Raises `Miss` unless its parts come from one gated unit or from
    attention, and where something is in the way."""
    view = _View(function)
    chain = view.chain(root)
    if not chain:
        return
    by_left = {node.operands[-2]: node for node in chain}
    made = _of_unit(view, by_left) or _of_heads(view, by_left)
    if made is None:
        raise Miss("parts", "its parts come neither from one gated unit nor from attention, two of them turned")
    terms, emit, makers = made
    gradients = [view.weight_gradient(term.left, by_left[term.left]) for term in terms]
    known = [g for g in gradients if g is not None]
    check(len(known) in (0, len(gradients)), "gradient", "some of the weights have gradients, and others none")
    products, updates = tuple(g.product for g in known), tuple(g.update for g in known if g.update is not None)
    check(
        len(updates) in (0, len(products)), "gradient", "some gradients of the weights are added up, others given back"
    )
    value, flat = root.result, root.result.tensor
    if known:
        inputs = {(g.input, g.product.operands[1].type) for g in known}
        check(len(inputs) == 1, "input", "the gradients of the weights are products with different inputs")
        value, flat = known[0].input, known[0].flat
        check(len({repr(dict(u.attrs)) for u in updates}) < 2, "fresh", "some totals are written and others added to")
        check(view.is_made_before(value, root), "order", f"{value!r} is made after the sum")
        late = all(view.place[reader] > view.place[root] for u in updates for reader in view.readers(u.result))
        check(late, "order", "a gradient of a weight is read before the sum is made")
    gone = {*chain, *makers, *(node for g in known for node in g.nodes)}
    ordered = tuple(node for node in function.nodes if node in gone)
    names = ", ".join(term.weight.name for term in terms)
    yield Sum(root, terms, products, updates, value, flat, ordered, names, emit)


Found = tuple[tuple[Term, ...], Callable[[Any], Value], list[Node]]


def _of_unit(view: _View, by_left: dict[Value, Node]) -> Found | None:
    """The products of both gradients of a gated unit."""
    makers = {view.made.get(left) for left in by_left}
    unit = makers.pop()
    if makers or unit is None or unit.op != "glu_grad" or set(unit.results) != set(by_left):
        return None
    terms = tuple(Term(left, by_left[left].operands[-1], left) for left in unit.results)
    given = unit.results[0].tensor
    type_ = replace(given, shape=(*given.shape[:-1], 2 * given.shape[-1]))

    def emit(make: Any) -> Value:
        value: Value = make("glu_grad_joined", unit.operands, type_, "dglu", **unit.attrs)
        return value

    return terms, emit, [unit]


def _of_heads(view: _View, by_left: dict[Value, Node]) -> Found | None:
    """The products of the heads of q, k and v: two that turn alike, and one that does not."""
    if len(by_left) != 3:
        return None
    terms, views = [], []
    for left, node in by_left.items():
        flat = view.maker(left, "reshape")
        turned = view.maker(flat.operands[0], "aten.permute.default") if flat is not None else None
        if flat is None or turned is None or turned.attrs.get("dims") != (0, 2, 1, 3):
            return None
        terms.append(Term(left, node.operands[-1], turned.operands[0]))
        views += [flat, turned]  # the flat one is left, of which weight_gradient sees to it
    ropes = [made for term in terms if (made := view.maker(term.source, "rope")) is not None]
    if len(ropes) != 2:
        return None
    check(ropes[0].attrs == ropes[1].attrs, "rope", "q and k turn differently")
    check(ropes[0].operands[1:] == ropes[1].operands[1:], "rope", "q and k turn by different tables")
    # The order of q and k is that of their params or slots, and so the same wherever the weights are read.
    order = {value: place for place, value in enumerate((*view.function.params, *view.function.slots))}
    terms.sort(key=lambda term: (view.maker(term.source, "rope") is None, order.get(term.weight, 0), term.weight.name))
    for node in [*views[1::2], *ropes]:
        view.check_sole(node.result)
    q, k, v = (term.source.tensor.shape for term in terms)
    check((q[0], *q[2:]) == (k[0], *k[2:]) == (v[0], *v[2:]), "heads", "q, k and v differ in more than heads")
    first = terms[0].left.tensor
    type_ = replace(first, shape=(*first.shape[:-1], (q[1] + k[1] + v[1]) * q[3]))
    turning = [view.made[term.source].operands[0] for term in terms[:2]]

    def emit(make: Any) -> Value:
        operands = (*turning, terms[2].source, *ropes[0].operands[1:])
        value: Value = make("rope_join", operands, type_, "dheads", **ropes[0].attrs)
        return value

    return tuple(terms), emit, [*views, *ropes]


@dataclass(frozen=True)
class Turning:
    """The ropes of q and k, each with the permutation before it."""

    ropes: tuple[Node, Node]
    views: tuple[Node, Node]

    @property
    def tables(self) -> tuple[Value, ...]:
        """cos and sin."""
        return self.ropes[0].operands[1:]

    @property
    def attrs(self) -> dict[str, Any]:
        """Those of `rope_joined`."""
        heads = [rope.result.tensor.shape[1] for rope in self.ropes]
        return {**self.ropes[0].attrs, "heads": heads[0] + heads[1], "width": self.ropes[0].result.tensor.shape[3]}


def turning(function: Function, linears: Sequence[Node]) -> Turning | None:
    """How q and k turn, the first two of three projections, if nothing else reads them and they turn alike."""
    view = _View(function)
    ropes: list[Node] = []
    views: list[Node] = []
    for linear in linears[:2] if len(linears) == 3 else ():
        value, node = linear.result, linear
        for op in ("reshape", "aten.permute.default", "rope"):
            readers = view.readers(value)
            if len(readers) != 1 or value in function.results or readers[0].op != op:
                return None
            (node,) = readers
            value = node.result
        if view.made[node.operands[0]].attrs.get("dims") != (0, 2, 1, 3):
            return None
        ropes.append(node)
        views.append(view.made[node.operands[0]])
    if len(ropes) != 2 or ropes[0].attrs != ropes[1].attrs or ropes[0].operands[1:] != ropes[1].operands[1:]:
        return None
    first = min(linears, key=view.place.__getitem__)
    wide = {rope.result.tensor.shape[3] for rope in ropes}
    columns = sum(linear.result.tensor.shape[-1] for linear in linears)
    early = all(view.is_made_before(table, first) for table in ropes[0].operands[1:])
    alike = len(wide) == 1 and columns % wide.pop() == 0 and len(first.result.tensor.shape) == 3
    return Turning((ropes[0], ropes[1]), (views[0], views[1])) if early and alike else None


@dataclass(frozen=True)
class _WeightGradient:
    """left^T @ input, added to a total, or a result of the function; `flat` is the type of left as a matrix, `nodes`
    all that made it."""

    product: Node
    update: Node | None
    input: Value
    flat: TensorType
    nodes: tuple[Node, ...]


class _View:
    """Who makes and who reads the values of a function."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.made, self._users = function.producers(), function.users()
        self.place = {node: index for index, node in enumerate(function.nodes)}
        self._results = set(function.results)

    def readers(self, value: Value) -> list[Node]:
        """The nodes that read a value."""
        return self._users.get(value, [])

    def maker(self, value: Value, op: str) -> Node | None:
        """What made a value, if it is a node of this op."""
        node = self.made.get(value)
        return node if node is not None and node.op == op else None

    def check_sole(self, value: Value) -> Node:
        """The one node that reads a value."""
        readers = self.readers(value)
        check(len(readers) == 1 and value not in self._results, "users", f"{value!r} is read elsewhere, too")
        return readers[0]

    def chain(self, root: Node) -> list[Node]:
        """The products of a sum of which `root` is the last, which nothing adds to; none where it is no such sum."""
        readers = self.readers(root.result)
        if any(node.op == "matmul_add" and node.operands[0] is root.result for node in readers):
            return []
        found = [root]
        while found[-1].op == "matmul_add":
            before = self.made.get(found[-1].operands[0])
            if before is None or before.op not in ("matmul_add", "aten.matmul.default"):
                return []
            found.append(before)
        lefts = {node.operands[-2] for node in found}
        return found if len(lefts) == len(found) and all(len(n.operands[-1].tensor.shape) == 2 for n in found) else []

    def is_made_before(self, value: Value, node: Node) -> bool:
        """Whether a value is there when a node runs."""
        maker = self.made.get(value)
        return maker is None or self.place[maker] < self.place[node]

    def _check_is(self, node: Node, op: str) -> None:
        check(node.op == op, "gradient", f"`{node.id}` is no gradient of the weight, added to a total")

    def weight_gradient(self, left: Value, product: Node) -> _WeightGradient | None:
        """What else is made of the left operand of a product: the gradient of its weight, or nothing."""
        check(left not in self._results, "users", f"{left!r} is a result of the function")
        others = [node for node in self.readers(left) if node is not product]
        if not others:
            return None
        check(len(others) == 1, "users", f"{left!r} is read elsewhere, too")
        nodes = [others[0]]
        flat = left
        if nodes[0].op == "reshape":
            flat = nodes[0].result
            nodes.append(self.check_sole(flat))
        self._check_is(nodes[-1], "aten.t.default")
        turned = nodes[-1]
        mm = self.check_sole(turned.result)
        self._check_is(mm, "aten.mm.default")
        nodes.append(mm)
        update = None
        if mm.result not in self._results or self.readers(mm.result):
            update = self.check_sole(mm.result)
            self._check_is(update, "accumulate")
            nodes.append(update)
        check(mm.operands[0] is turned.result, "gradient", f"`{mm.id}` is not the product with the input")
        given = mm.operands[1]
        if (shaped := self.maker(given, "reshape")) is not None:
            given = shaped.operands[0]
        return _WeightGradient(mm, update, given, flat.tensor, tuple(nodes))
