"""What changed between two modules, by stable value names: the answer to "what did this pass do?".

A node is found again by its id (the name of its first result) in the function of the same name, else, where it left
that function and stands in one other, there. Each node is in one class:

    matched   computes the same in the same place
    changed   computes something else: another op, operands, types or attributes
    moved     the same, elsewhere: in another function, another phase, or another order
    added     of the second module alone
    removed   of the first module alone

A new function that mostly repeats one of the first module (`layer.fwd` repeats `layer`) is *like* it and compared with
it, so that what counts as added is what a reader has not seen before.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgraph.ir.equality import attr_key
from mgraph.ir.graph import Entry, Function, Module, Node, State
from mgraph.ir.printer import attr_text, callee_of, name_text, node_text, reference
from mgraph.ir.types import Type

CLASSES = ("matched", "changed", "moved", "added", "removed")


@dataclass(frozen=True, slots=True)
class Change:
    """A node of both sides that computes something else.

    `parts` maps what differs (`op`, `operands`, `results`, `types`, `phase`, `function`, an attribute) to its text
    before and after; `before` and `after` are the nodes as text.
    """

    id: str
    parts: Mapping[str, tuple[str, str]]
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Move:
    """A node that stands elsewhere: where it was (`function`, `phase`), each empty where that is as before."""

    id: str
    function: str = ""
    phase: str = ""


@dataclass(frozen=True, slots=True)
class FunctionDiff:
    """What changed in one function; `status` is `same`, `changed`, `added` or `removed`.

    `like` names the function of the first module that an added one repeats. Nodes added and removed are listed as text.
    """

    name: str
    status: str
    matched: int
    like: str = ""
    changed: tuple[Change, ...] = ()
    moved: tuple[Move, ...] = ()
    added: Mapping[str, str] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    signature: bool = False
    ops: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """How many nodes are in each class."""
        sizes = (self.matched, *(len(part) for part in (self.changed, self.moved, self.added, self.removed)))
        return dict(zip(CLASSES, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class ModuleDiff:
    """What changed in a module: functions, op counts (before, after), and declarations by name."""

    functions: tuple[FunctionDiff, ...]
    ops: Mapping[str, tuple[int, int]]
    declarations: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]
    """`dims`, `state`, `entries`, … -> names added, removed, changed; only kinds with a difference."""

    def __bool__(self) -> bool:
        """Whether anything changed."""
        return bool(self.declarations) or any(f.status != "same" for f in self.functions)

    @property
    def counts(self) -> dict[str, int]:
        """How many nodes of all functions are in each class."""
        return {name: sum(f.counts[name] for f in self.functions) for name in CLASSES}

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts and strings."""
        return {
            "counts": self.counts,
            "functions": [_function_json(f) for f in self.functions],
            "ops": {op: list(counts) for op, counts in self.ops.items()},
            "declarations": {
                what: {"added": list(added), "removed": list(removed), "changed": list(changed)}
                for what, (added, removed, changed) in self.declarations.items()
            },
        }


def diff_modules(before: Module, after: Module) -> ModuleDiff:
    """Compare two modules, functions in the order of `after`, removed ones last."""
    names = [*after.functions, *(n for n in before.functions if n not in after.functions)]
    pairing = _pair(before, after)
    functions = tuple(_diff_function(name, before, after, pairing) for name in names)
    return ModuleDiff(functions, _op_counts(_nodes(before), _nodes(after)), _declarations(before, after))


def to_json_text(diff: ModuleDiff) -> str:
    """The JSON text of a diff, indented."""
    return json.dumps(diff.to_json(), indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class _Pairing:
    """Which nodes are found again outside the function of their name.

    `came` maps (function after, id) to the function before that the node left. `like` maps an added function to the one
    that it repeats, `kept` a function before to the ids that such functions repeat.
    """

    came: Mapping[tuple[str, str], str]
    like: Mapping[str, str]
    kept: Mapping[str, frozenset[str]]

    def left(self, function: str) -> set[str]:
        """The ids that left a function of the first module for another."""
        return {id_ for (_, id_), source in self.came.items() if source == function}


def _pair(before: Module, after: Module) -> _Pairing:
    gone, new = _lone_nodes(before, after), _lone_nodes(after, before)
    came = {(new[id_][0], id_): f for id_, (f, op) in gone.items() if id_ in new and new[id_][1] == op}
    like: dict[str, str] = {}
    kept: dict[str, frozenset[str]] = {}
    for function in after.functions.values():
        if function.name in before.functions:
            continue
        ids = {n.id: n.op for n in function.nodes if (function.name, n.id) not in came}
        shared = {f.name: {n.id for n in f.nodes if ids.get(n.id) == n.op} for f in before.functions.values()}
        best = max(shared, key=lambda name: len(shared[name]), default="")
        # Ids such as `add_1` meet by chance: a repeated function has most of its nodes in common.
        if best and shared[best] and 2 * len(shared[best]) >= min(len(ids), len(before.functions[best].nodes)):
            like[function.name] = best
            kept[best] = kept.get(best, frozenset()) | shared[best]
    return _Pairing(came, like, kept)


def _nodes(module: Module) -> list[Node]:
    return [node for _, node in module.walk()]


def _ids(function: Function | None) -> dict[str, Node]:
    return {node.id: node for node in function.nodes} if function is not None else {}


def _lone_nodes(module: Module, other: Module) -> dict[str, tuple[str, str]]:
    """Nodes (id -> function, op) that the same function of the other module lacks, by ids that only one of them has."""
    lone: dict[str, list[tuple[str, str]]] = {}
    for function in module.functions.values():
        known = _ids(other.functions.get(function.name))
        for node in function.nodes:
            if node.id not in known:
                lone.setdefault(node.id, []).append((function.name, node.op))
    return {id_: places[0] for id_, places in lone.items() if len(places) == 1}


def _diff_function(name: str, before: Module, after: Module, pairing: _Pairing) -> FunctionDiff:
    like = pairing.like.get(name, "")
    old, new = before.functions.get(like or name), after.functions.get(name)
    olds, news = _ids(old), _ids(new)
    both = [id_ for id_, node in news.items() if id_ in olds and (not like or olds[id_].op == node.op)]
    disordered = set(_out_of_order(both, list(olds)))
    changed, moved, added = [], [], {}
    for id_, node in news.items():
        source = pairing.came.get((name, id_), "")
        if not source and id_ not in both:
            added[id_] = node_text(node, after.functions)
            continue
        other = _ids(before.functions[source])[id_] if source else olds[id_]
        parts = _what_changed(other, node, elsewhere=bool(source))
        phase = other.phase if other.phase != node.phase else ""
        if parts:
            where = {"function": (f"@{source}", f"@{name}")} if source else {}
            phases = {"phase": (str(other.phase), str(node.phase))} if phase else {}
            texts = node_text(other, before.functions), node_text(node, after.functions)
            changed.append(Change(id_, {**parts, **phases, **where}, *texts))
        elif source or phase or id_ in disordered:
            moved.append(Move(id_, source, phase))
    # What a function like this one lacks still stands in the function of the first module, or is told there.
    absent = {} if like else {i: n for i, n in olds.items() if i not in news}
    away = pairing.left(name) | pairing.kept.get(name, frozenset())
    removed = {i: node_text(n, before.functions) for i, n in absent.items() if i not in away}
    signature = old is not None and new is not None and _signature(old) != _signature(new)
    different = bool(changed or moved or added or absent or signature)
    status = "removed" if new is None else "added" if name not in before.functions else "same"
    matched = len(news) - len(changed) - len(moved) - len(added)
    return FunctionDiff(
        name,
        "changed" if status == "same" and different else status,
        matched,
        like,
        tuple(changed),
        tuple(moved),
        added,
        removed,
        signature,
        _op_counts(olds.values(), news.values()),
    )


def _signature(function: Function) -> tuple[Any, ...]:
    def typed(values: Sequence[Any]) -> tuple[tuple[str, Type], ...]:
        return tuple((repr(v), v.type) for v in values)

    return typed(function.params), typed(function.slots), typed(function.results), function.statics


def _what_changed(old: Node, new: Node, *, elsewhere: bool) -> dict[str, tuple[str, str]]:
    """What differs but the phase. The same value has other names in other functions: there, operands do not count."""
    parts: dict[str, tuple[str, str]] = {}
    if old.op != new.op:
        parts["op"] = old.op, new.op
    names = [", ".join(map(reference, node.operands)) for node in (old, new)]
    if names[0] != names[1] and not elsewhere:
        parts["operands"] = names[0], names[1]
    if [v.name for v in old.results] != [v.name for v in new.results]:
        parts["results"] = _typed(old), _typed(new)
    elif [v.type for v in old.results] != [v.type for v in new.results]:
        types = [", ".join(str(v.type) for v in node.results) for node in (old, new)]
        parts["types"] = types[0], types[1]
    for name in sorted(old.attrs.keys() | new.attrs.keys()):
        sides = [attr_key(n.attrs[name]) if name in n.attrs else None for n in (old, new)]
        if sides[0] != sides[1]:
            texts = [attr_text(n.attrs[name]) if name in n.attrs else "absent" for n in (old, new)]
            parts[name] = texts[0], texts[1]
    return parts


def _typed(node: Node) -> str:
    return ", ".join(f"{reference(v)}: {v.type}" for v in node.results)


def _out_of_order(new_order: Sequence[str], old_order: Sequence[str]) -> list[str]:
    """The fewest ids whose removal leaves both orders the same: all but a longest increasing subsequence."""
    place = {id_: index for index, id_ in enumerate(old_order)}
    tails: list[int] = []
    lengths = []
    for id_ in new_order:
        length = bisect.bisect_left(tails, place[id_])
        tails[length : length + 1] = [place[id_]]
        lengths.append(length)
    kept: set[str] = set()
    wanted, limit = len(tails) - 1, len(place)
    for id_, length in zip(reversed(new_order), reversed(lengths), strict=True):
        if length == wanted and place[id_] < limit:
            kept.add(id_)
            wanted, limit = wanted - 1, place[id_]
    return [id_ for id_ in new_order if id_ not in kept]


def _op_counts(before: Any, after: Any) -> dict[str, tuple[int, int]]:
    old, new = (Counter(_op_name(node) for node in nodes) for nodes in (before, after))
    return {op: (old[op], new[op]) for op in sorted({*old, *new})}


def _op_name(node: Node) -> str:
    callee = callee_of(node)
    return node.op if callee is None else f"call @{name_text(callee)}"


def _declarations(before: Module, after: Module) -> dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
    tables: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
        "dim": (before.dims, after.dims),
        "axis": ({a.name: a for a in before.mesh}, {a.name: a for a in after.mesh}),
        "fact": ({f.text: f for f in before.facts}, {f.text: f for f in after.facts}),
        "state": (_state_keys(before.state), _state_keys(after.state)),
        "entry": (_entry_keys(before.entries), _entry_keys(after.entries)),
    }
    found = {}
    for what, (old, new) in tables.items():
        added = tuple(name for name in new if name not in old)
        removed = tuple(name for name in old if name not in new)
        changed = tuple(name for name in new if name in old and old[name] != new[name])
        if added or removed or changed:
            found[what] = (added, removed, changed)
    return found


def _state_keys(states: Mapping[str, State]) -> dict[str, Any]:
    return {
        name: (reference(s.value), s.type, s.kind, attr_text(s.init), s.trainable, s.persist, s.seed_name, s.host)
        for name, s in states.items()
    }


def _entry_keys(entries: Mapping[str, Entry]) -> dict[str, Any]:
    return {name: (e.function, e.outputs, e.updates, e.captured, e.pieces) for name, e in entries.items()}


def _function_json(diff: FunctionDiff) -> dict[str, Any]:
    changed = [
        {"id": c.id, "parts": {k: list(v) for k, v in c.parts.items()}, "before": c.before, "after": c.after}
        for c in diff.changed
    ]
    return {
        "name": diff.name,
        "status": diff.status,
        "like": diff.like,
        "counts": diff.counts,
        "changed": changed,
        "moved": [{"id": m.id, "function": m.function or diff.name, "phase": m.phase} for m in diff.moved],
        "added": dict(diff.added),
        "removed": dict(diff.removed),
        "signature": diff.signature,
        "ops": {op: list(counts) for op, counts in diff.ops.items()},
    }
