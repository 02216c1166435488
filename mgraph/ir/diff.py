"""What changed between two modules, by stable value names: the answer to "what did this pass do?".

A node is found again by its id (the name of its first result) in the function of the same name. It is *matched* if it
computes the same, *changed* if not, *moved* if its order among the nodes of both sides changed or if it now stands in
another function, else *added* or *removed*.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgraph.ir.equality import attr_key, node_key
from mgraph.ir.graph import Entry, Function, Module, Node, State
from mgraph.ir.printer import attr_text, callee_of, fold_names, name_text, node_text, reference
from mgraph.ir.types import Type


@dataclass(frozen=True, slots=True)
class Change:
    """A node of both sides that computes something else, with what differs: `op`, `operands`, `results`, `eps`, …"""

    id: str
    what: tuple[str, ...]
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Move:
    """A node that stands elsewhere: in another order (no `function`), or in another function."""

    id: str
    function: str = ""


@dataclass(frozen=True, slots=True)
class FunctionDiff:
    """What changed in one function; `status` is `same`, `changed`, `added` or `removed`. Nodes are listed as text."""

    name: str
    status: str
    matched: int
    changed: tuple[Change, ...] = ()
    moved: tuple[Move, ...] = ()
    added: Mapping[str, str] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    signature: bool = False
    ops: Mapping[str, tuple[int, int]] = field(default_factory=dict)


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

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts and strings."""
        return {
            "functions": [_function_json(f) for f in self.functions],
            "ops": {op: list(counts) for op, counts in self.ops.items()},
            "declarations": {
                what: {"added": list(added), "removed": list(removed), "changed": list(changed)}
                for what, (added, removed, changed) in self.declarations.items()
            },
        }

    def text(self, limit: int = 20) -> str:
        """For people: op counts first, then every function that changed, at most `limit` nodes of each sort."""
        if not self:
            return "no difference\n"
        lines = [_count_line(op, counts) for op, counts in self.ops.items() if counts[0] != counts[1]]
        for what, names in self.declarations.items():
            for sign, listed in zip("+-~", names, strict=True):
                shown = fold_names(listed) if what == "state" else list(map(name_text, listed))
                lines += _limited([f"{sign} {what} {name}" for name in shown], limit, "")
        for function in self.functions:
            if function.status != "same":
                lines += ["", *_function_text(function, limit)]
        return "\n".join(lines).lstrip("\n") + "\n"


def diff_modules(before: Module, after: Module) -> ModuleDiff:
    """Compare two modules, functions in the order of `after`, removed ones last."""
    names = [*after.functions, *(n for n in before.functions if n not in after.functions)]
    gone, new = _lone_nodes(before, after), _lone_nodes(after, before)
    moved_to = {(f, id_): new[id_][0] for id_, (f, op) in gone.items() if id_ in new and new[id_][1] == op}
    moved_from = {(to, id_): f for (f, id_), to in moved_to.items()}
    functions = tuple(_diff_function(name, before, after, moved_to, moved_from) for name in names)
    return ModuleDiff(functions, _op_counts(_nodes(before), _nodes(after)), _declarations(before, after))


def to_json_text(diff: ModuleDiff) -> str:
    """The JSON text of a diff, indented."""
    return json.dumps(diff.to_json(), indent=2) + "\n"


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


def _diff_function(
    name: str,
    before: Module,
    after: Module,
    moved_to: Mapping[tuple[str, str], str],
    moved_from: Mapping[tuple[str, str], str],
) -> FunctionDiff:
    old, new = before.functions.get(name), after.functions.get(name)
    olds, news = _ids(old), _ids(new)
    both = [id_ for id_ in news if id_ in olds]
    changed = []
    for id_ in both:
        what = _what_changed(olds[id_], news[id_])
        if what:
            texts = node_text(olds[id_], before.functions), node_text(news[id_], after.functions)
            changed.append(Change(id_, what, *texts))
    moved = [Move(id_) for id_ in _out_of_order(both, list(olds))]
    moved += [Move(id_, moved_from[name, id_]) for id_ in news if (name, id_) in moved_from]
    added = {i: node_text(n, after.functions) for i, n in news.items() if i not in olds and (name, i) not in moved_from}
    removed = {
        i: node_text(n, before.functions) for i, n in olds.items() if i not in news and (name, i) not in moved_to
    }
    left = any((name, id_) in moved_to for id_ in olds)
    signature = old is not None and new is not None and _signature(old) != _signature(new)
    different = bool(changed or moved or added or removed or left or signature)
    status = "added" if old is None else "removed" if new is None else "changed" if different else "same"
    ops = _op_counts(olds.values(), news.values())
    return FunctionDiff(
        name, status, len(both) - len(changed), tuple(changed), tuple(moved), added, removed, signature, ops
    )


def _signature(function: Function) -> tuple[Any, ...]:
    def typed(values: Sequence[Any]) -> tuple[tuple[str, Type], ...]:
        return tuple((repr(v), v.type) for v in values)

    return typed(function.params), typed(function.slots), typed(function.results), function.statics


def _what_changed(old: Node, new: Node) -> tuple[str, ...]:
    if node_key(old) == node_key(new):
        return ()
    what = [] if old.op == new.op else ["op"]
    if list(map(repr, old.operands)) != list(map(repr, new.operands)):
        what.append("operands")
    if [(v.name, v.type) for v in old.results] != [(v.name, v.type) for v in new.results]:
        what.append("results")
    if old.phase != new.phase:
        what.append("phase")
    names = sorted(old.attrs.keys() | new.attrs.keys())
    missing = object()
    for name in names:
        sides = [attr_key(n.attrs[name]) if name in n.attrs else missing for n in (old, new)]
        if sides[0] != sides[1]:
            what.append(name)
    return tuple(what)


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
        name: (reference(s.value), s.type, s.kind, attr_text(s.init), s.trainable, s.persist, s.seed_name)
        for name, s in states.items()
    }


def _entry_keys(entries: Mapping[str, Entry]) -> dict[str, Any]:
    return {name: (e.function, e.outputs, e.updates) for name, e in entries.items()}


def _count_line(op: str, counts: tuple[int, int]) -> str:
    return f"{op}: {counts[0]} -> {counts[1]} ({counts[1] - counts[0]:+d})"


def _function_text(diff: FunctionDiff, limit: int) -> list[str]:
    lines = [f"func @{name_text(diff.name)}: {diff.status}, {diff.matched} nodes the same"]
    if diff.signature:
        lines.append("  its params, slots, statics or results changed")
    lines += [f"  {_count_line(op, counts)}" for op, counts in diff.ops.items() if counts[0] != counts[1]]
    changes = [f"~ ({', '.join(c.what)}) {c.before}\n       now {c.after}" for c in diff.changed]
    lines += _limited(changes, limit, "  ")
    lines += _limited([_move_text(move) for move in diff.moved], limit, "  ")
    lines += _limited([f"+ {text}" for text in diff.added.values()], limit, "  ")
    lines += _limited([f"- {text}" for text in diff.removed.values()], limit, "  ")
    return lines


def _move_text(move: Move) -> str:
    return f"> %{name_text(move.id)} moved" + (f" here from @{name_text(move.function)}" if move.function else "")


def _limited(lines: list[str], limit: int, indent: str) -> list[str]:
    more = [f"{lines[0][0]} … and {len(lines) - limit} more"] if len(lines) > limit else []
    return [indent + line for line in [*lines[:limit], *more]]


def _function_json(diff: FunctionDiff) -> dict[str, Any]:
    return {
        "name": diff.name,
        "status": diff.status,
        "matched": diff.matched,
        "changed": [{"id": c.id, "what": list(c.what), "before": c.before, "after": c.after} for c in diff.changed],
        "moved": [{"id": m.id, "from": m.function or diff.name} for m in diff.moved],
        "added": dict(diff.added),
        "removed": dict(diff.removed),
        "signature": diff.signature,
        "ops": {op: list(counts) for op, counts in diff.ops.items()},
    }
