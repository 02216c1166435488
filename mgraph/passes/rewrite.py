"""Replacing matched chains by other nodes, and reporting the chains that almost matched.

A `Rule` has a pattern, guards and an `emit` that makes the replacement. A chain may have several results that others
read (`exports`); `emit` gives a new value for each. The replacement stands where the last value it reads is made, and
the nodes of the chain that nothing reads any more go. A near miss is the best failed attempt around a node that marks
the beginning of a chain (`anchors`), or that a wrong attribute kept from it, e.g.

    rms_norm at layers.*.norm (models/layers.py:31): `rsqrt` has 2 users, expected 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.pattern import Failure, Guard, Match, Matcher, Pattern, ops_in
from mgraph.passes.base import Pass, Report, Stage, Tier

Emit = Callable[[FunctionBuilder, Match], Sequence[Value]]


def _root_value(match: Match) -> tuple[Value, ...]:
    return (match.root.results[0],)


@dataclass(frozen=True, slots=True)
class Rule:
    """A chain and what takes its place: `emit` gives one value for each of `exports`, in that order."""

    name: str
    pattern: Pattern
    anchors: tuple[str, ...]
    emit: Emit
    guards: tuple[Guard, ...] = ()
    exports: Callable[[Match], Sequence[Value]] = _root_value


class RaisePass(Pass):
    """A pass that replaces chains by semantic ops, function by function."""

    stage: ClassVar[Stage] = Stage.RAISE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})

    def rules(self, module: Module, function: Function) -> Sequence[Rule]:
        """The rules for one function, in order of preference."""
        raise NotImplementedError(type(self).__name__)

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function; a module without a match is returned as it is."""
        functions = {
            name: rewrite(function, self.rules(module, function), self.name, report)
            for name, function in module.functions.items()
        }
        changed = any(functions[name] is not f for name, f in module.functions.items())
        return replace(module, functions=functions) if changed else module


def rewrite(function: Function, rules: Sequence[Rule], made_by: str, report: Report) -> Function:
    """Replace all matches of the rules, longest chains first; the same function where nothing matches."""
    found, failures = _find(function, rules)
    taken = {node for _, match in found for node, _, _ in match.steps}
    owned = {node for _, match in found for node in match.owned}
    for name in dict.fromkeys(rule.name for rule in rules):
        named = [rule for rule in rules if rule.name == name]
        _report_near_misses(function, named, failures.get(name, []), owned, report)
    if not found:
        return function
    index_of = {node: i for i, node in enumerate(function.nodes)}
    found.sort(key=lambda item: index_of[item[1].root])
    pending: dict[int, list[tuple[Rule, Match]]] = {}
    for (rule, match), at in zip(found, _positions(function, found, index_of), strict=True):
        pending.setdefault(at, []).append((rule, match))
        report.count(rule.name)
    builder = rebuild(function, made_by)
    _emit(builder, pending.get(-1, []), report)
    for i, node in enumerate(function.nodes):
        builder.keep(node)
        _emit(builder, pending.get(i, []), report)
    return _without_dead(builder.build(function.results), taken)


def _find(function: Function, rules: Sequence[Rule]) -> tuple[list[tuple[Rule, Match]], dict[str, list[Failure]]]:
    """Matches, no two of which own a node in common, and the failures of each rule."""
    matcher = Matcher(function)
    found: list[tuple[Rule, Match]] = []
    owned: set[Node] = set()
    failures: dict[str, list[Failure]] = {}
    for rule in rules:
        for node in reversed(function.nodes):
            if node in owned:
                continue
            outcome = matcher.match(rule.pattern, node, rule.guards, rule.exports)
            if isinstance(outcome, Failure):
                failures.setdefault(rule.name, []).append(outcome)
            elif not outcome.owned & owned:
                found.append((rule, outcome))
                owned |= outcome.owned
    return found, failures


def _report_near_misses(
    function: Function, rules: Sequence[Rule], failures: Sequence[Failure], owned: set[Node], report: Report
) -> None:
    """Of each anchor in no match, the best attempt that took it, else the best that a wrong attribute kept from it."""
    name, anchors = rules[0].name, {op for rule in rules for op in rule.anchors}
    ops = frozenset().union(*(ops_in(rule.pattern) for rule in rules))
    producers = function.producers()
    stopped = [(f, _above(f.node, ops, producers)) for f in failures if f.guard == "attr"]
    reported: set[Failure] = set()
    for anchor in function.nodes:
        if anchor.op not in anchors or anchor in owned:
            continue
        attempts = [f for f in failures if anchor in f.touched] or [f for f, above in stopped if anchor in above]
        best = max(attempts, key=lambda f: f.progress, default=None)
        if best is not None and best not in reported:
            reported.add(best)
            detail = f"{name} at {_place(best.node)}: {best.detail}"
            report.near_miss(function.name, best.node.id, name, best.guard, detail)


def _above(node: Node, ops: frozenset[str], producers: Mapping[Value, Node]) -> set[Node]:
    """What a node is made of, by way of nodes of these ops alone."""
    found, todo = set[Node](), [node]
    while todo:
        for value in todo.pop().operands:
            maker = producers.get(value)
            if maker is not None and maker.op in ops and maker not in found:
                found.add(maker)
                todo.append(maker)
    return found


def _place(node: Node) -> str:
    return f"{node.origin.path} ({node.origin})" if node.origin.path else str(node.origin)


def _positions(function: Function, found: Sequence[tuple[Rule, Match]], index_of: Mapping[Node, int]) -> list[int]:
    """After which node each replacement stands: the last of what it reads, or of the replacement that makes that."""
    producers = function.producers()
    maker = {value: i for i, (rule, match) in enumerate(found) for value in rule.exports(match)}
    known: dict[int, int] = {}

    def position(i: int) -> int:
        if i not in known:
            rule, match = found[i]
            reads = [v for v in match.values.values() if v not in rule.exports(match)]
            after = [index_of[producers[v]] for v in reads if v in producers]
            known[i] = max([*after, *(position(maker[v]) for v in reads if v in maker)], default=-1)
        return known[i]

    return [position(i) for i in range(len(found))]


def _emit(builder: FunctionBuilder, matches: Sequence[tuple[Rule, Match]], report: Report) -> None:
    for rule, match in matches:
        before = len(builder.nodes)
        with builder.at(match.root):
            made = rule.emit(builder, match)
        chain = dict.fromkeys(node.id for node, _, shared in reversed(match.steps) if not shared)
        nodes = [node.id for node in builder.nodes[before:]]
        report.match(builder.name, match.root.id, f"{rule.name} at {_place(match.root)}", chain, nodes)
        for old, new in zip(rule.exports(match), made, strict=True):
            assert old.tensor.shape == new.tensor.shape, f"{rule.name}: {old!r} is {old.type}, {new!r} is {new.type}"
            assert old.tensor.dtype is new.tensor.dtype, f"{rule.name}: {old!r} is {old.type}, {new!r} is {new.type}"
            builder.replace(old, new)


def _without_dead(function: Function, candidates: set[Node]) -> Function:
    """Drop the nodes of matched chains that nothing reads any more (a rebuilt node is known by its results)."""
    chain = {value for node in candidates for value in node.results}
    live = set(function.results)
    kept = []
    for node in reversed(function.nodes):
        if node.results[0] in chain and not any(v in live for v in node.results):
            continue
        kept.append(node)
        live.update(node.operands)
    return replace(function, nodes=tuple(reversed(kept)))
