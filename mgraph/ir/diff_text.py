"""A diff between two modules, for people: totals first, then every function that changed.

    24 nodes matched, 3 changed, 0 moved, 1 added, 5 removed
    rms_norm: 0 -> 1 (+1)

    func @layer: changed; 24 matched, 3 changed, 1 added, 5 removed
      ~ %linear aten.linear.default: operands %mul_1, %w -> %rms_norm, %w
      > 12 nodes moved here from @forward: %view, %view_1, …
      + %rms_norm: f32[B, S, 64], … = rms_norm(%x, %weight) …
      - %mul: f32[B, S, 64] = aten.mul.Tensor(%x, %rsqrt) …

States whose names count up are folded, so that the text grows with the kinds of layers.
"""

from __future__ import annotations

import re

from mgraph.ir.diff import CLASSES, Change, FunctionDiff, ModuleDiff, Move
from mgraph.ir.printer import fold_names, name_text

_SHOWN = 160
"""Characters of one side of a changed part; operand lists of calls have thousands."""


def diff_text(diff: ModuleDiff, limit: int = 20) -> str:
    """The text of a diff, at most `limit` nodes of each class in each function."""
    if not diff:
        return "no difference\n"
    lines = [_counts_line(diff.counts, CLASSES)]
    lines += [_ops_line(op, counts) for op, counts in diff.ops.items() if counts[0] != counts[1]]
    for what, names in diff.declarations.items():
        for sign, listed in zip("+-~", names, strict=True):
            shown = fold_names(listed) if what == "state" else list(map(name_text, listed))
            lines += _limited([f"{sign} {what} {name}" for name in shown], limit, "")
    for function in diff.functions:
        if function.status != "same":
            lines += ["", *_function_lines(function, limit)]
    return "\n".join(lines) + "\n"


def change_text(change: Change) -> str:
    """What differs in a changed node: `operands %a, %b -> %a, %c; eps 1e-05 -> 1e-06`."""
    return "; ".join(f"{name} {_cut(old)} -> {_cut(new)}" for name, (old, new) in change.parts.items())


def _counts_line(counts: dict[str, int], always: tuple[str, ...] = ("matched",)) -> str:
    first, *more = [f"{number} {name}" for name, number in counts.items() if number or name in always]
    number, name = first.split()
    return ", ".join([f"{number} node{'s' * (number != '1')} {name}", *more])


def _ops_line(op: str, counts: tuple[int, int]) -> str:
    return f"{op}: {counts[0]} -> {counts[1]} ({counts[1] - counts[0]:+d})"


def _function_lines(diff: FunctionDiff, limit: int) -> list[str]:
    like = f", like @{name_text(diff.like)}" if diff.like else ""
    lines = [f"func @{name_text(diff.name)}: {diff.status}{like}; {_counts_line(diff.counts)}"]
    if diff.signature:
        lines.append("  its params, slots, statics or results changed")
    lines += [f"  {_ops_line(op, counts)}" for op, counts in diff.ops.items() if counts[0] != counts[1]]
    lines += _limited([f"~ %{name_text(c.id)} {_op(c)}: {change_text(c)}" for c in diff.changed], limit, "  ")
    lines += [f"  {line}" for line in _move_lines(diff.moved, limit)]
    lines += _limited([f"+ {text}" for text in diff.added.values()], limit, "  ")
    lines += _limited([f"- {text}" for text in diff.removed.values()], limit, "  ")
    return lines


def _op(change: Change) -> str:
    found = re.search(r" = (call @[^(]+|[^ (]+)\(", change.after)
    assert found is not None, f"not a node: {change.after}"
    return found[1]


def _move_lines(moves: tuple[Move, ...], limit: int) -> list[str]:
    """A line for all nodes that come from the same place."""
    groups: dict[tuple[str, str], list[str]] = {}
    for move in moves:
        groups.setdefault((move.function, move.phase), []).append(f"%{name_text(move.id)}")
    lines = []
    for (function, phase), ids in groups.items():
        places = [f"here from @{name_text(function)}"] * bool(function) + [f"out of phase {phase}"] * bool(phase)
        where = ", ".join(places) or "to another place in the order"
        more = [f"… and {len(ids) - limit} more"] if len(ids) > limit else []
        number = f"{len(ids)} node{'s' * (len(ids) != 1)}"
        lines.append(f"> {number} moved {where}: {', '.join([*ids[:limit], *more])}")
    return lines


def _limited(lines: list[str], limit: int, indent: str) -> list[str]:
    more = [f"{lines[0][0]} … and {len(lines) - limit} more"] if len(lines) > limit else []
    return [indent + line for line in [*lines[:limit], *more]]


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
