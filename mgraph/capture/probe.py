"""Which layers of a model do the same, found by running the model once without values (`mgraph.capture.trial`).

Two layers are of one *kind* where

* they have the same structure, and every attribute that either of them reads is alike in both;
* they are handed alike arguments, run the same ops on the same operands (tensors of their own by relative name), with
  the same other arguments, and return alike results.

The first alone does not show what hangs on state elsewhere, the second alone not what hangs on sizes other than these.
A layer whose effect is not all in what it is handed and what it returns is *unfit*: it is no kind's. State that is
neither the model's nor reached from it (a counter of a Python module) sees one run more than without a probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from mgraph.capture.alike import Alike, Place, attributes, differing, partners, same_structure
from mgraph.capture.layers import outermost_lists
from mgraph.capture.trial import Call, Trial, Unsuited

LEAST = 4
"""Lists of fewer layers are traced as they are."""


@dataclass(frozen=True)
class Findings:
    """What a probe found.

    `kinds` has the layers that do what others do, by path, with the number of their kind; `layers` how many layers each
    list has; `reasons`, per list, why its other layers are traced as they are, with how many layers each reason holds
    for.
    """

    kinds: Mapping[str, int]
    layers: Mapping[str, int]
    reasons: Mapping[str, Mapping[str, int]]

    def lines(self, copied: Mapping[str, int], reason: str = "") -> tuple[str, ...]:
        """A line per list: how many of its layers were traced, how many copied, and why no more of them; `reason` is
        what kept all layers from being copied."""
        made = []
        for path, count in self.layers.items():
            known = copied.get(path, 0)
            line = f"{path.partition('.')[2] or path}: {count} layers, {count - known} traced, {known} copied"
            why = [f"{number} not copied: {cause}" for cause, number in self.reasons[path].items()]
            made.append("; ".join([line, *why, *[f"none copied: {reason}"] * bool(reason)]))
        return tuple(made)


def probe(model: nn.Module, arguments: tuple[Tensor, ...]) -> Findings:
    """Judge the layers of a model by a run of it with these arguments, of which the shapes and dtypes count."""
    lists = outermost_lists(model, LEAST)
    if not lists:
        return Findings({}, {}, {})
    suspects = _suspects(lists)
    try:
        calls = Trial(model, [name for members in lists.values() for name in members], suspects).calls(arguments)
    except Unsuited as error:
        return Findings({}, _sizes(lists), {path: {str(error): len(members)} for path, members in lists.items()})
    return _findings(lists, calls)


def _sizes(lists: Mapping[str, Mapping[str, nn.Module]]) -> dict[str, int]:
    return {path: len(members) for path, members in lists.items()}


def _suspects(lists: Mapping[str, Mapping[str, nn.Module]]) -> set[Place]:
    """Attributes in which layers of a list differ from its first layer, where that has the same structure."""
    found: set[Place] = set()
    for members in lists.values():
        firsts: list[nn.Module] = []
        for layer in members.values():
            first = next((f for f in firsts if same_structure(f, layer)), None)
            if first is None:
                firsts.append(layer)
            else:
                found.update(differing(first, layer, Alike(partners(first, layer))))
    return found


def _findings(lists: Mapping[str, Mapping[str, nn.Module]], calls: Mapping[str, list[Call]]) -> Findings:
    kinds: dict[str, int] = {}
    reasons: dict[str, dict[str, int]] = {}
    number = 0
    for path, members in lists.items():
        groups: list[list[Call]] = []
        why = reasons[path] = {}
        for name, layer in members.items():
            call, reason = _only(calls.get(name, []), layer)
            if call is None:
                why[reason] = why.get(reason, 0) + 1
                continue
            same = next((g for g in groups if _same(members[g[0].path], layer, g[0], call)), None)
            if same is None:
                groups.append([call])
            else:
                same.append(call)
        for group in groups:
            if len(group) > 1:
                number += 1
                kinds.update({call.path: number for call in group})
            else:
                reason = "does what no other layer does"
                why[reason] = why.get(reason, 0) + 1
    return Findings(kinds, _sizes(lists), reasons)


def _only(calls: list[Call], layer: nn.Module) -> tuple[Call | None, str]:
    """The one run of a layer, or why there is none that counts."""
    if len(calls) != 1:
        return None, f"runs {len(calls)} times"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return None, "has hooks"
    return (None, calls[0].unfit) if calls[0].unfit else (calls[0], "")


def _same(one: nn.Module, two: nn.Module, first: Call, second: Call) -> bool:
    """Whether two layers are of one kind."""
    if first.log != second.log or not same_structure(one, two):
        return False
    alike = Alike(partners(one, two))
    parts, others = dict(one.named_modules()), dict(two.named_modules())
    for path, name in first.reads | second.reads:
        mine, other = attributes(parts[path]), attributes(others[path])
        if name not in mine or name not in other or not alike(mine[name], other[name]):
            return False
    return True
