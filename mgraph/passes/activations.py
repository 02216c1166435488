"""What a microbatch holds between forward and backward, in bytes, and what it costs to compute it again instead.

A *pair* is a layer function in both forms, called by the entry: `layer.fwd` returns saved values, `layer.bwd` takes
them. A value is *held* if forward nodes of the entry make it and backward nodes of the entry read it; views are held
as what they view. Which values of a pair are kept decides what is held, and which forward nodes the backward runs
again. Costs are those of the ops' declarations, a byte moved counting as `FLOPS_PER_BYTE` operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from mgraph.ir.dims import Dim, evaluate
from mgraph.ir.graph import Function, Module, Node, Phase, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.ops.cost import flops_of, traffic, value_bytes
from mgraph.passes.calls import callee
from mgraph.passes.differentiation import VIEWS

FLOPS_PER_BYTE = 300
"""Operations that an H100 does (bf16, dense) in the time in which it moves a byte of its memory."""

Kept: TypeAlias = Mapping[str, frozenset[str]]  # fwd function -> the saved values that stay saved
Sizes: TypeAlias = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Pair:
    """One layer function's forward and backward form, and their calls in the entry function, matched by what is saved.

    `saved` are the names of the intermediates that `fwd` returns for `bwd`, the same in both functions.
    """

    fwd: Function
    bwd: Function
    saved: tuple[str, ...]
    calls: tuple[tuple[Node, Node], ...]

    def again(self, kept: frozenset[str]) -> tuple[Node, ...]:
        """The forward nodes that must run in the backward where only `kept` is saved, in order."""
        wanted = set(self.saved) - kept
        found = []
        for node in reversed(self.fwd.nodes):
            if any(v.name in wanted for v in node.results):
                found.append(node)
                wanted |= {v.name for v in node.operands} - kept
        return tuple(reversed(found))

    def settled(self, kept: frozenset[str]) -> frozenset[str]:
        """`kept` without the results of nodes that run again anyway."""
        return kept - {v.name for node in self.again(kept) for v in node.results}

    def params(self, kept: frozenset[str]) -> tuple[int, ...]:
        """The forward's params that the backward reads."""
        again = self.again(kept)
        made = {v.name for node in again for v in node.results}
        own = [node for node in self.bwd.nodes if node.results[0].name not in made]
        read = {v.name for node in (*again, *own) for v in node.operands} | {v.name for v in self.bwd.results}
        return tuple(i for i, p in enumerate(self.fwd.params) if p.name in read)

    def repeatable(self, kept: frozenset[str]) -> bool:
        """Whether the nodes that run again give the same values: torch's own random ops would not."""
        return not any("." in node.op and op_def(node.op).random for node in self.again(kept))

    def units(self) -> list[frozenset[str]]:
        """The saved values, those of one node together."""
        groups = [frozenset(v.name for v in node.results) & set(self.saved) for node in self.fwd.nodes]
        return [group for group in groups if group]


def pairs_of(module: Module, entry: Function) -> dict[str, Pair]:
    """The pairs that an entry function, and nothing else, calls and that save something, by the forward's name."""
    producers = entry.producers()
    calls: dict[str, list[tuple[Node, Node]]] = {}
    for node in entry.nodes:
        fwd = module.functions.get(callee(node).replace(".bwd", ".fwd")) if node.op == "call" else None
        if fwd is None or ".bwd" not in callee(node):
            continue
        bwd, made = module.functions[callee(node)], {v.name for n in fwd.nodes for v in n.results}
        first = next((i for i, p in enumerate(bwd.params) if p.name in made), None)
        if first is not None:
            calls.setdefault(fwd.name, []).append((producers[node.operands[first]], node))
    inner = {callee(n) for f, n in module.walk() if n.op == "call" and f is not entry}
    found = {}
    for name, matched in calls.items():
        fwd, bwd = module.functions[name], module.functions[callee(matched[0][1])]
        made = {v.name for n in fwd.nodes for v in n.results}
        if not {name, bwd.name} & inner:
            found[name] = Pair(fwd, bwd, tuple(p.name for p in bwd.params if p.name in made), tuple(matched))
    return found


def extents(module: Module, sizes: Sizes) -> dict[str, int]:
    """The extents of all named dims: as given, else the least; of ragged ones the bound."""
    found = {n: sizes.get(n, d.minimum) for n, d in module.dims.items() if not d.ragged}
    return found | {n: evaluate(d.bound, found) for n, d in module.dims.items() if d.bound is not None}


class Held:
    """Measures what an entry function holds, for given extents of the named dims."""

    def __init__(self, module: Module, entry: Function, pairs: Mapping[str, Pair], sizes: Sizes) -> None:
        self.module, self.pairs, self.entry = module, pairs, entry
        self.sizes = extents(module, sizes)
        self._base: dict[Value, Value] = {}
        self._made: set[Value] = set()
        for node in entry.nodes:
            if node.phase is Phase.FORWARD:
                self._made.update(node.results)
                if node.op in VIEWS:
                    self._base[node.results[0]] = self._base.get(node.operands[0], node.operands[0])
        paired = {id(backward) for pair in pairs.values() for _, backward in pair.calls}
        backward = [n for n in entry.nodes if n.phase is Phase.BACKWARD and id(n) not in paired]
        self._always = self._bases(v for node in backward for v in node.operands)
        self._costs: dict[int, float] = {}

    def _bases(self, values: Iterable[Value]) -> set[Value]:
        return {base for v in values if (base := self._base.get(v, v)) in self._made}

    def number(self, dim: Dim) -> int:
        """A dim expression for the extents."""
        return int(evaluate(dim, self.sizes))

    def bytes(self, kept: Kept) -> int:
        """The bytes held."""
        held = set(self._always)
        total = 0
        for name, pair in self.pairs.items():
            needed = pair.params(kept[name])
            types = {v.name: v for node in pair.fwd.nodes for v in node.results}
            total += len(pair.calls) * sum(self.number(value_bytes(types[n])) for n in kept[name])
            held |= self._bases(forward.operands[i] for forward, _ in pair.calls for i in needed)
        return total + sum(self.number(value_bytes(v)) for v in held)

    def cost(self, pair: Pair, kept: frozenset[str]) -> float:
        """The cost of computing again what is not kept, for all calls."""
        return len(pair.calls) * sum(map(self._cost, pair.again(kept)))

    def flops(self, pair: Pair, kept: frozenset[str]) -> int:
        """The operations of computing again what is not kept, for all calls."""
        return len(pair.calls) * sum(self._sum(n, lambda node: self.number(flops_of(node))) for n in pair.again(kept))

    def _cost(self, node: Node) -> float:
        if id(node) not in self._costs:
            self._costs[id(node)] = self._sum(
                node, lambda n: self.number(flops_of(n)) + FLOPS_PER_BYTE * self.number(traffic(n))
            )
        return self._costs[id(node)]

    def _sum(self, node: Node, of: Callable[[Node], int]) -> int:
        """A number of a node, views counting nothing, and calls what their function counts."""
        if node.op == "call":
            return sum(self._sum(n, of) for n in self.module.functions[callee(node)].nodes)
        return 0 if node.op in VIEWS else of(node)


def held_bytes(module: Module, sizes: Sizes) -> int:
    """The bytes that the entry `microbatch` holds between forward and backward."""
    entry = module.entry_function("microbatch")
    pairs = pairs_of(module, entry)
    return Held(module, entry, pairs, sizes).bytes({name: frozenset(pair.saved) for name, pair in pairs.items()})


def least_kept(pair: Pair) -> frozenset[str]:
    """What must stay saved where everything that can be computed again is."""
    kept = frozenset(pair.saved)
    if pair.repeatable(frozenset()):
        return frozenset()
    for unit in pair.units():
        if pair.repeatable(kept - unit):
            kept = pair.settled(kept - unit)
    return kept


def choose(held: Held, budget: int) -> tuple[dict[str, frozenset[str]], int]:
    """What to keep so that at most `budget` bytes are held, and the bytes then held (above the budget: the least).

    Greedily, what frees most bytes for its cost is given up first; at the end, what fits in again is taken back, the
    costliest first.
    """
    kept = {name: frozenset(pair.saved) for name, pair in held.pairs.items()}
    least = {name: least_kept(pair) for name, pair in held.pairs.items()}
    total = held.bytes(kept)
    while total > budget:
        best: tuple[float, str, frozenset[str], int] | None = None
        for name, pair in held.pairs.items():
            now = held.cost(pair, kept[name])
            for unit in (*pair.units(), frozenset(pair.saved) - least[name]):
                fewer = pair.settled(kept[name] - unit)
                if fewer == kept[name] or not pair.repeatable(fewer):
                    continue
                bytes_ = held.bytes({**kept, name: fewer})
                ratio = (held.cost(pair, fewer) - now) / (total - bytes_) if bytes_ < total else float("inf")
                if bytes_ < total and (best is None or ratio < best[0]):
                    best = ratio, name, fewer, bytes_
        if best is None:
            return kept, total
        _, name, fewer, total = best
        kept[name] = fewer
    return _taken_back(held, kept, budget)


def _taken_back(held: Held, kept: dict[str, frozenset[str]], budget: int) -> tuple[dict[str, frozenset[str]], int]:
    gains = []
    for name, pair in held.pairs.items():
        for unit in pair.units():
            if not unit <= kept[name]:
                gain = held.cost(pair, kept[name]) - held.cost(pair, kept[name] | unit)
                gains.append((gain, name, unit))
    for _, name, unit in sorted(gains, key=lambda item: -item[0]):
        more = {**kept, name: held.pairs[name].settled(kept[name] | unit)}
        if held.bytes(more) <= budget and held.cost(held.pairs[name], more[name]) < held.cost(
            held.pairs[name], kept[name]
        ):
            kept = more
    return kept, held.bytes(kept)
