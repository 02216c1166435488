"""Which weights tensor parallelism splits: a table of ops that may run on parts, and the weights around them.

    op                    split                     weights before it           weights after it
    attention             heads                     rows (column parallel)      columns (row parallel)
    glu and activations   the inner width           rows (column parallel)      columns (row parallel)
    aten.embedding        the vocabulary            rows
    cross_entropy         the vocabulary            rows (column parallel)
    logits of a step      the vocabulary            rows (column parallel)

The last are the results of an entry of inference. What lies between the op and the weight (reshape, rope, a norm of
each head, a cap of the logits) is followed by the rules of `mgraph.passes.placing`. A place where one weight cannot be
found stays whole, and is a near miss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from mgraph.errors import PassError
from mgraph.ir.dims import dim_text, divide
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.signature import ShardingRule
from mgraph.ir.types import Placement, Shard, TensorType
from mgraph.passes.base import Report
from mgraph.passes.calls import callee, callers_first, calls
from mgraph.passes.placing import rules_of

INNER = ("glu", "squared_relu", "aten.gelu.default", "aten.relu.default")
"""Ops on the inner width of a feed-forward."""


class NoSite(Exception):
    """A place cannot be split; the message says what is in the way."""


@dataclass
class Walk:
    """The weights that splitting one node splits, and all values and nodes on the way with their placements."""

    function: Function
    producers: Mapping[Value, Node]
    users: Mapping[Value, list[Node]]
    weights: dict[Value, Shard] = field(default_factory=dict)
    split: dict[Value, Shard] = field(default_factory=dict)
    rules: dict[Node, ShardingRule] = field(default_factory=dict)

    @staticmethod
    def of(function: Function) -> Walk:
        """A walk that has not begun."""
        return Walk(function, function.producers(), function.users())

    def back(self, value: Value, placement: Placement | None) -> None:
        """Split a value, and what it is made of up to the weights."""
        if not isinstance(placement, Shard) or self._known(value, placement):
            return
        if value.is_state or value in self.function.slots:
            self.weights[value] = placement
            return
        node = self.producers.get(value)
        if node is None:
            raise NoSite(f"%{value.name} comes from outside the function")
        index = node.results.index(value)
        self._apply(node, self._rule(node, lambda rule: rule.results[index] == placement))

    def onward(self, value: Value, placement: Placement | None) -> None:
        """Split a value, and what is made of it up to partial sums."""
        if not isinstance(placement, Shard) or self._known(value, placement):
            return
        for node in self.users.get(value, ()):
            own = [i for i, v in enumerate(node.operands) if v is value]
            rule = self._rule(node, partial(_takes, own, placement))
            self._apply(node, rule)
            for result, place in zip(node.results, rule.results, strict=True):
                self.onward(result, place)

    def _apply(self, node: Node, rule: ShardingRule) -> None:
        self.rules[node] = rule
        for operand, place in zip(node.operands, rule.operands, strict=True):
            self.back(operand, place)

    def _known(self, value: Value, placement: Shard) -> bool:
        before = self.split.setdefault(value, placement)
        if before != placement:
            raise NoSite(f"%{value.name} would be split both as {before} and as {placement}")
        return before is not placement

    @staticmethod
    def _rule(node: Node, fits: Callable[[ShardingRule], bool]) -> ShardingRule:
        found = [] if node.op == "call" else [rule for rule in rules_of(node, 1) if fits(rule)]
        if not found:
            raise NoSite(f"{node.op} %{node.id} needs the whole tensor")
        return found[0]


def _takes(places: Sequence[int], placement: Shard, rule: ShardingRule) -> bool:
    """Whether a rule has these operands placed so."""
    return all(rule.operands[i] == placement for i in places)


@dataclass(frozen=True)
class _Site:
    """The slots and states that one site splits, and what is wrong where the axis does not divide them."""

    weights: Mapping[Value, Shard]
    problem: PassError | None


def weight_placements(
    module: Module, entry: str, axis: str, size: int, report: Report, settled: Collection[str] = ()
) -> dict[str, Shard]:
    """Where the states lie that are split, by name, from the forward computation of an entry.

    `settled` names states that are placed otherwise; they are left out. Raises PassError where the axis does not divide
    what it would split, unless all weights of the site are settled.
    """
    start = module.entries[entry].function
    sites: dict[str, list[_Site]] = {}
    for name in callers_first(module, [start]):
        sites[name] = _sites_of(module.functions[name], axis, size, report)
    if "logits" in module.entries[entry].outputs:
        function = module.functions[start]
        logits = function.results[module.entries[entry].outputs.index("logits")]
        sites[start] += _logits_site(function, logits, sites[start], axis, size, report)
    found: dict[str, Shard] = {}
    _bind(module, module.functions[start], {}, sites, settled, found)
    return found


def _bind(
    module: Module,
    function: Function,
    slots: Mapping[Value, Value],
    sites: Mapping[str, Sequence[_Site]],
    settled: Collection[str],
    found: dict[str, Shard],
) -> None:
    """Follow slots to the states that calls pass for them."""
    for site in sites[function.name]:
        places = {slots.get(value, value).name: placement for value, placement in site.weights.items()}
        if site.problem is not None and not all(name in settled for name in places):
            raise site.problem
        for name, placement in places.items():
            if name not in settled and found.setdefault(name, placement) != placement:
                raise PassError(f"@{name} would be split both as {found[name]} and as {placement}")
    for node in calls(function):
        body = module.functions[callee(node)]
        given = node.operands[len(body.params) :]
        inner = {slot: slots.get(v, v) for slot, v in zip(body.slots, given, strict=True)}
        _bind(module, body, inner, sites, settled, found)


def _sites_of(function: Function, axis: str, size: int, report: Report) -> list[_Site]:
    """The sites of one function."""
    start = Walk.of(function)
    weights: dict[Value, Shard] = {}
    found = []
    for node in function.nodes:
        what = _SITES.get(node.op)
        if what is None:
            continue
        walk = Walk(function, start.producers, start.users)
        try:
            _walk(walk, node)
            clash = next((v for v, p in walk.weights.items() if weights.get(v, p) != p), None)
            if clash is not None:
                raise NoSite(f"{clash!r} is split as {weights[clash]} elsewhere")
        except NoSite as why:
            report.near_miss(
                function.name, node.id, f"tensor parallel {what}", "every weight around is found", str(why)
            )
            continue
        weights |= walk.weights
        found.append(_Site(walk.weights, _problem(walk, node, what, axis, size)))
        report.match(function.name, node.id, _split(what, axis, walk))
    return found


def _logits_site(
    function: Function, logits: Value, others: Sequence[_Site], axis: str, size: int, report: Report
) -> list[_Site]:
    """The site of the logits that an entry gives, if their weight is found; only wanted rows are gathered."""
    walk = Walk.of(function)
    node = walk.producers[logits]
    try:
        walk.back(logits, Shard(len(logits.tensor.shape) - 1))
        weights = {value: place for site in others for value, place in site.weights.items()}
        clash = next((v for v, p in walk.weights.items() if weights.get(v, p) != p), None)
        if clash is not None:
            raise NoSite(f"{clash!r} is split as {weights[clash]} elsewhere")
    except NoSite as why:
        what, guard = f"tensor parallel {_ENTRIES}", "every weight around is found"
        report.near_miss(function.name, node.id, what, guard, str(why))
        return []
    report.match(function.name, node.id, _split(_ENTRIES, axis, walk))
    return [_Site(walk.weights, _problem(walk, node, _ENTRIES, axis, size))]


def _split(what: str, axis: str, walk: Walk) -> str:
    names = ", ".join(f"{v.name} {p}" for v, p in walk.weights.items())
    return f"{what} split over {axis}: {names}"


def _walk(walk: Walk, node: Node) -> None:
    """Split the operands and results of the node of a site."""
    if node.op == "aten.embedding.default":
        if node.attrs.get("scale_grad_by_freq") or not _is_weight(walk, node.operands[0]):
            raise NoSite("the table is no weight, or its gradient counts tokens")
        walk.back(node.operands[0], Shard(0))
    elif node.op == "cross_entropy":
        walk.back(node.operands[0], Shard(1))
    elif node.op in ("attention", "paged_attention"):
        for operand, place in zip(node.operands, rules_of(node, 1)[0].operands, strict=True):
            walk.back(operand, place)
        walk.onward(node.results[0], Shard(1))
    else:
        last = Shard(len(node.results[0].tensor.shape) - 1)
        for operand in node.operands:
            walk.back(operand, last)
        walk.onward(node.result, last)


def heads(function: Function, node: Node) -> tuple[Walk, Walk]:
    """What splitting an attention by heads splits but for its keys and values, and what makes those.

    Raises NoSite where a weight cannot be found.
    """
    own, shared = Walk.of(function), Walk.of(function)
    rule = rules_of(node, 1)[0]
    for index, (operand, place) in enumerate(zip(node.operands, rule.operands, strict=True)):
        (shared if index in (1, 2) else own).back(operand, place)
    own.rules[node] = rule
    own.onward(node.results[0], Shard(1))
    return own, shared


def vocabulary(function: Function, node: Node) -> Walk:
    """What splitting the vocabulary of an embedding or a cross entropy splits.

    Raises NoSite where a weight cannot be found.
    """
    walk = Walk.of(function)
    _walk(walk, node)
    return walk


def _is_weight(walk: Walk, value: Value) -> bool:
    return value.is_state or value in walk.function.slots


def _problem(walk: Walk, node: Node, what: str, axis: str, size: int) -> PassError | None:
    """What is wrong with an axis that does not divide what would be split. Operands of the site are told first."""
    shared = node.operands[1:3] if node.op in ("attention", "paged_attention") else ()
    for value in (*node.operands, *node.results, *walk.split):
        place = walk.split.get(value)
        if place is None or not isinstance(value.type, TensorType):
            continue
        extent = value.type.shape[place.dim]
        if divide(extent, size) is None:
            where = node.origin.path or walk.function.name
            kind, hint = "", f"a {axis} that divides {dim_text(extent)}"
            if value in shared:
                # What could be repeated has been, by the pass repeat-heads.
                kind, hint = "key/value ", f"{hint}, or a multiple of it that divides the query heads"
            if what in PADDED:
                hint = f"{hint}, or in training --pad {PADDED[what]}"
            return PassError(
                f"{axis}={size} does not divide the {dim_text(extent)} {kind}{what} of {where}",
                where=str(node.origin),
                hint=hint,
            )
    return None


_HEADS, _ENTRIES = "heads", "entries of the vocabulary"
PADDED = {_HEADS: "heads", _ENTRIES: "vocab"}
"""What the pass `pad` makes divisible, and its name there."""
_SITES = {
    "attention": _HEADS,
    "paged_attention": _HEADS,
    "aten.embedding.default": _ENTRIES,
    "cross_entropy": _ENTRIES,
    **dict.fromkeys(INNER, "inner columns"),
}
