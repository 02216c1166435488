"""replayable-routing: entries take the decisions of all routers, and give those that were taken.

Before:

    func @layer(%x; …) { … %weights, %indices = moe_route(%logits)  %rows, … = moe_dispatch(%x, %indices) … }
    func @forward(%tokens, %labels) { …  %y = call @layer(%x; …)  … }
    entry forward = @forward -> (loss_sum, count, logits)

After (`routing: i16[B, S, L, K]` has L routers' K experts for each token; -1 leaves the choice to the router):

    func @layer(%x, %given; …) {
      … %weights, %indices = moe_route(%logits)
      %chosen = replay_choice(%indices, %given)  %weighed = moe_weigh(%logits, %chosen)
      %rows, … = moe_dispatch(%x, %chosen) … %taken = cast(%chosen) {dtype = i16}  return …, %taken }
    func @forward(%tokens, %labels, %routing) { …  %given, %rest = first_layer(%layers)
      %y, %taken = call @layer(%x, %given; …)  …  %all = stack_choices(%taken_1, %taken) … }
    entry forward = @forward -> (loss_sum, count, logits, routing)

What leads from a decision to the dispatch (the capacity of experts) stays behind it. A router that was not raised is
known by the indices that the dispatch reads: whatever reads them reads those that are given, and of a `topk`, `max` or
`min` the values at these. Weights that come from the choice in another way (values of a `sort` of which a part is
taken) would be those of experts that did not get the tokens, and are an error. The backward reads what the forward was
given, so recomputation chooses as the forward did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.dims import as_dim, symbol
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.ops.replay import ROUTING
from mgraph.ir.types import DType, TensorType
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.calls import callee

_MOST_EXPERTS = 2**15
_BEHIND = ("moe_capacity", "moe_drop_padding", "reshape")
"""Ops between the decision of a router and the dispatch: what they give, of which operand."""
_VALUES_AT = {"aten.topk.default": -1, "aten.max.dim": None, "aten.min.dim": None}
"""Ops that choose by scores and give these, too: and along which dim, if that is not said."""
_HINT = "mgraph explain PKG raise-moe says which experts were found, and why others were not"


@dataclass(frozen=True)
class ReplayableRouting(Pass):
    """Give every entry that has routers the input and the output `routing`."""

    name: ClassVar[str] = "replayable-routing"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"forward"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"expert-dispatch", ROUTING})
    provides: ClassVar[frozenset[str]] = frozenset({ROUTING})

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite all entries. Raises PassError where there is no router, or decisions have no common form."""
        rewriting = _Rewriting(module, self.name, report)
        entries = dict(module.entries)
        for entry in module.entries.values():
            if rewriting.entry(module.functions[entry.function]):
                entries[entry.name] = replace(entry, outputs=(*entry.outputs, ROUTING))
        if not report.matches:
            raise PassError("the model has no routers that were found", "--replayable-routing", _HINT)
        return replace(module, functions={**module.functions, **rewriting.done}, entries=entries)

    def inputs_after(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of the module before, and no decisions."""
        return {n: t.new_full(t.shape, -1) if n == ROUTING else t for n, t in inputs.items()}


@dataclass(frozen=True)
class _Router:
    """A decision that a function takes: the maker of the indices, and what of it they are."""

    maker: Node
    indices: Value
    shape: tuple[Any, ...]
    """That of the indices which the dispatch reads."""
    experts: int
    name: str


@dataclass
class _Rewriting:
    """The functions of a module while they are rewritten, each once."""

    module: Module
    made_by: str
    report: Report
    done: dict[str, Function] = field(default_factory=dict)
    _routers: dict[str, list[_Router]] = field(default_factory=dict)
    """By function: its own routers, and those of its calls, in order of execution."""

    def entry(self, function: Function) -> bool:
        """Rewrite the function of an entry; whether it has routers."""
        routers = self.routers(function.name)
        if function.name in self.done or not routers:
            return bool(routers)
        tokens, choices = _form(routers)
        batch, seq, layers = symbol("B"), symbol("S"), len(routers)
        if as_dim(batch * seq) != tokens:
            node = routers[0].maker
            raise PassError(
                f"a router chooses for {tokens} tokens, expected B*S", str(node.origin), "a router of all tokens alike"
            )
        builder = rebuild(function, self.made_by)
        given = builder.param(ROUTING, TensorType(DType.I16, (batch, seq, layers, choices)))
        with builder.at(function.nodes[0]):
            by_layer = builder.one("aten.permute.default", given, dims=(2, 0, 1, 3))
            rest = builder.one("reshape", by_layer, name="layers", shape=(layers, tokens, choices))
        body = _Body(self, function, builder)
        body.rewrite(rest)
        taken = body.taken[::-1]
        with builder.at(function.nodes[-1]):
            attrs = {"layers": _distinct(routers), "experts": tuple(r.experts for r in routers)}
            (stacked,) = builder.emit("stack_choices", taken, attrs)
            made = builder.one("reshape", stacked, name="all_taken", shape=(batch, seq, layers, choices))
        self.done[function.name] = builder.build((*function.results, made))
        return True

    def called(self, name: str) -> Function:
        """The function that a call runs, which takes decisions as further params and gives them as further results."""
        if name not in self.done:
            function = self.module.functions[name]
            builder = rebuild(function, self.made_by)
            given = [builder.param("given", _type(r)) for r in self.routers(name)]
            body = _Body(self, function, builder)
            body.rewrite(given)
            self.done[name] = builder.build((*function.results, *body.taken))
        return self.done[name]

    def routers(self, name: str) -> list[_Router]:
        """The routers of a function, in the order in which it runs them, named from there."""
        if name not in self._routers:
            function = self.module.functions[name]
            own = {router.maker.id: router for router in _routers_of(function)}
            found: list[_Router] = []
            for node in function.nodes:
                if node.op == "call":
                    inner = self.routers(callee(node))
                    found += [replace(r, name=_named(r.name, node.origin.path)) for r in inner]
                elif node.id in own:
                    found.append(own[node.id])
            self._routers[name] = found
        return self._routers[name]


@dataclass
class _Body:
    """One function while it is rewritten: decisions come from a list, or one by one off what has those of all."""

    owner: _Rewriting
    function: Function
    builder: FunctionBuilder
    taken: list[Value] = field(default_factory=list)

    def rewrite(self, given: list[Value] | Value) -> None:
        """Append the function's nodes with the decisions put in."""
        routers = {router.maker.id: router for router in _routers_of(self.function)}
        self._given = given
        for node in self.function.nodes:
            if node.op == "call" and (inner := self.owner.routers(callee(node))):
                self._call(node, len(inner))
                continue
            self.builder.keep(node)
            if node.id in routers:
                self._replay(routers[node.id])

    def _next(self) -> Value:
        if isinstance(self._given, list):
            return self._given.pop(0)
        first, self._given = self.builder.emit("first_layer", (self._given,), names=("given", "rest"))
        return first

    def _call(self, node: Node, count: int) -> None:
        function = self.owner.called(callee(node))
        width = len(self.owner.module.functions[callee(node)].params)
        with self.builder.at(node):
            given = [self._next() for _ in range(count)]
            types = [v.type for v in function.results[-count:]]
            more = [Value(self.builder.fresh("taken"), type_) for type_ in types]
        operands = (*node.operands[:width], *given, *node.operands[width:])
        self.builder.keep(node.with_values(operands, (*node.results, *more)))
        self.taken += more

    def _replay(self, router: _Router) -> None:
        node, indices, builder = router.maker, router.indices, self.builder
        with builder.at(node):
            given = self._next()
            if indices.tensor.shape != router.shape:
                given = builder.one("reshape", given, shape=indices.tensor.shape)
            chosen = builder.one("replay_choice", indices, given, name="chosen")
            if node.op == "moe_route":
                attrs = {
                    k: v for k, v in node.attrs.items() if k in ("score", "renormalize", "epsilon", "scale", "dtype")
                }
                (weights,) = builder.emit("moe_weigh", (node.operands[0], chosen), attrs, names=("weighed",))
                builder.replace(node.results[0], weights)
            elif _gives_values(node):
                dim = node.attrs.get("dim", _VALUES_AT[node.op])
                values = builder.one("aten.gather.default", node.operands[0], chosen, name="values_at", dim=dim)
                builder.replace(node.results[0], values)
            builder.replace(indices, chosen)
            taken = builder.one("cast", chosen, name="taken", dtype=DType.I16)
            if indices.tensor.shape != router.shape:
                taken = builder.one("reshape", taken, shape=router.shape)
        self.taken.append(taken)
        self.owner.report.match(self.function.name, node.id, f"{router.experts} experts", made=(chosen.name,))


def _type(router: _Router) -> TensorType:
    return TensorType(DType.I16, router.shape)


def _routers_of(function: Function) -> list[_Router]:
    """The decisions that the function's own dispatches read."""
    producers = function.producers()
    found: dict[str, _Router] = {}
    for node in function.nodes:
        if node.op != "moe_dispatch":
            continue
        value = indices = node.operands[1]
        maker = producers.get(value)
        while maker is not None and maker.op in _BEHIND:
            value = maker.operands[maker.results.index(value)]
            maker = producers.get(value)
        if maker is None or value.tensor.dtype is not DType.I64:
            raise PassError(f"what decides over the experts of {node.id} was not found", str(node.origin), _HINT)
        experts = int(str(node.attrs["num_experts"]))
        if experts > _MOST_EXPERTS:
            raise PassError(f"{experts} experts cannot be numbered in 16 bits", str(node.origin))
        _check_weights(function, node, maker, value)
        found[maker.id] = _Router(maker, value, indices.tensor.shape, experts, maker.origin.path)
    return list(found.values())


def _gives_values(node: Node) -> bool:
    """Whether a node gives the scores at what it chooses, one beside each index."""
    return node.op in _VALUES_AT and len(node.results[1].tensor.shape) == len(node.operands[0].tensor.shape)


def _check_weights(function: Function, dispatch: Node, maker: Node, indices: Value) -> None:
    """Raises PassError where weights of experts come from a choice past the indices that others may be given for."""
    producers = function.producers()
    given = {indices, *(maker.results if maker.op == "moe_route" or _gives_values(maker) else ())}
    before, ahead = list[Node](), [indices]
    for value in ahead:
        node = producers.get(value)
        if node is not None and node not in before:
            before.append(node)
            ahead += [v for v in node.operands if v.tensor.dtype is DType.I64]
    choosing: set[Node] = set()  # not numbers that are the same whatever the scores
    for node in (n for n in function.nodes if n in before):
        if any(v.tensor.dtype is not DType.I64 or producers.get(v) in choosing for v in node.operands):
            choosing.add(node)
    combines = (n for n in function.nodes if n.op == "moe_combine" and n.operands[2] in dispatch.results)
    read = [combine.operands[1] for combine in combines]
    for value in read:
        node = producers.get(value)
        if value in given or node is None:
            continue
        if node in choosing:
            hint = "take them from the scores: scores.gather(-1, experts); or leave out --replayable-routing"
            what = f"weights of experts come from the choice that {node.op.removeprefix('aten.').split('.')[0]} makes"
            raise PassError(f"{what}: experts that are replayed would get those of others", str(node.origin), hint)
        read += [v for v in node.operands if v not in read and isinstance(v.type, TensorType)]


def _form(routers: Sequence[_Router]) -> tuple[Any, Any]:
    """Tokens and choices, which all routers must have the same."""
    first = routers[0]
    for router in routers:
        if router.shape != first.shape:
            raise PassError(
                f"routers choose {router.shape[1]} experts for {router.shape[0]} tokens, and {first.shape[1]} for "
                f"{first.shape[0]}: their decisions do not fit into one input",
                str(router.maker.origin),
            )
    return first.shape[0], first.shape[1]


def _named(path: str, caller: str) -> str:
    """A path in a shared function, with the caller's numbers where it has stars."""
    numbers = caller.split(".")
    parts = path.split(".")
    return ".".join(numbers[i] if part == "*" and i < len(numbers) else part for i, part in enumerate(parts))


def _distinct(routers: Sequence[_Router]) -> tuple[str, ...]:
    """Their names; of those that share one, the later ones with their number."""
    seen: dict[str, int] = {}
    names = []
    for router in routers:
        count = seen[router.name] = seen.get(router.name, 0) + 1
        names.append(router.name if count == 1 else f"{router.name}#{count}")
    return tuple(names)
