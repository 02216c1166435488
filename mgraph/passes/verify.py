"""`--verify`: check every pass on the reduced twin of the model, and that the twin stays the model's twin.

Each pass also runs on the twin (`mgraph.passes.twin`). Afterwards the twin's graph must be the same as the model's,
extents and number of layers aside, and its numbers must be those of before (`mgraph.passes.equivalence`). The result
goes into `measured["verify"]`:

    {"status": "verified", "method": "both graphs", "error": 3e-16, "bound": 1e-09, "native": 1.0}
    {"status": "unverified", "why": "entry 'score' has no independent reference"}

What several passes do only together (`split_without_ways`) is checked after the last of them, beside what was before.
A pass that changes the numbers is an error that names pass, entry and output. What cannot be checked is `unverified`
and never counts as a pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from mgraph.errors import MgraphError, PassError
from mgraph.ir.equality import isomorphic
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.types import PendingType
from mgraph.passes.base import Pass, Report
from mgraph.passes.equivalence import Evidence, Mismatch, Unverified, check
from mgraph.passes.expert_weights import split_without_ways
from mgraph.passes.instrument import Instrument
from mgraph.passes.pipeline import PassResult, run_pipeline
from mgraph.passes.samples import Shapes
from mgraph.passes.twin import NoTwin, Reduction, reduce

VERIFIED, UNVERIFIED = "verified", "unverified"
_FEW = 4  # a node with more operands or results than this has one per state, and their number follows the depth


class TwinCheck(Instrument):
    """`measured["verify"]`: whether the pass keeps the numbers, measured on the twin that `reduction` describes.

    Twin and model can both be split into `parts`, and their heads over `ranks` (`mgraph.passes.twin.reduce`).
    """

    def __init__(self, ranks: int = 1, parts: int = 1) -> None:
        self._ranks, self._parts = ranks, parts
        self.reduction: Reduction | None = None
        self.why_not = "no pipeline was started"
        self._twin: Module | None = None
        self._begun: Module | None = None

    def start(self, module: Module) -> None:
        """Make the twin."""
        try:
            self._twin, self.reduction = reduce(module, self._ranks, self._parts)
            self._shapes = Shapes.of(self._twin)
        except NoTwin as error:
            self.why_not = str(error)

    def passing(self, pass_: Pass) -> None:
        """Remember the pass."""
        self._pass = pass_

    def after(self, result: PassResult, before: Module, after: Module) -> None:
        """Run the pass on the twin and check it. Raises PassError where the numbers differ."""
        try:
            evidence = self._check(before, after)
        except Unverified as reason:
            result.measured["verify"] = {"status": UNVERIFIED, "why": str(reason)}
        else:
            result.measured["verify"] = {"status": VERIFIED, **_worst(evidence)}

    def _check(self, real_before: Module, real: Module) -> list[Evidence]:
        if self._twin is None or self.reduction is None:
            raise Unverified(self.why_not)
        try:
            before, self._twin = self._twin, self._pass.on_twin(real_before).run(self._twin, Report())
        except (MgraphError, AssertionError) as error:
            self._twin, self.why_not = None, f"pass {self._pass.name!r} fails on the twin: {error}"
            raise Unverified(self.why_not) from error
        before, self._begun = self._begun or before, None
        if split_without_ways(self._twin):
            self._begun = before
            raise Unverified("experts are split, and tokens do not go to them yet: checked with expert-parallel")
        try:
            evidence = check(self._pass, before, self._twin, self._shapes.fitting(self._twin))
        except Mismatch as wrong:
            raise PassError(
                f"pass '{self._pass.name}' changes the numbers: entry '{wrong.entry}', output '{wrong.output}': "
                f"{wrong.kind}: {wrong.error:.3g} (allowed {wrong.bound:.3g})",
                where=f"{self._pass.spec}, on the twin: {self.reduction}",
                hint=f"leave the pass out with --disable {self._pass.name}, and report this",
            ) from wrong
        difference = differs(real, self._twin, self.reduction.shortened)
        if difference:
            raise Unverified(f"the pass did something else on the twin: {difference}")
        return evidence


def _worst(evidence: Sequence[Evidence]) -> dict[str, Any]:
    """The methods, and the largest error and ratio."""
    ratios = [e.native for e in evidence if e.native is not None]
    return {
        "method": "; ".join(dict.fromkeys(e.method for e in evidence)),
        "error": max((e.error for e in evidence), default=0.0),
        "bound": max((e.bound for e in evidence), default=0.0),
        "native": max(ratios, default=None),
    }


def verify_pipeline(module: Module, pipeline: Sequence[Pass] | str) -> tuple[PassResult, ...]:
    """Run a pipeline with every pass checked on the twin; the results hold `measured["verify"]`."""
    return run_pipeline(module, pipeline, [TwinCheck()])[1]


def verify_table(results: Iterable[PassResult]) -> str:
    """The checks as lines of text, one per pass."""
    rows = [("pass", "status", "error", "bound", "native", "how")]
    for result in results:
        found = result.measured["verify"]
        if found["status"] == VERIFIED:
            ratio = "" if found["native"] is None else f"{found['native']:.2f}x"
            rows.append(
                (result.name, VERIFIED, f"{found['error']:.1e}", f"{found['bound']:.0e}", ratio, found["method"])
            )
        else:
            rows.append((result.name, UNVERIFIED, "", "", "", found["why"]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


# the same graph, extents and depth aside


def differs(real: Module, twin: Module, shortened: bool) -> str:
    """The first difference between a module and its twin, empty for none.

    Where layers were dropped, the entries' own functions are compared by the set of their nodes, each with what it
    reads (states by name without layer numbers); all other functions must be isomorphic.
    """
    if real.functions.keys() != twin.functions.keys():
        return f"functions {sorted(real.functions.keys() ^ twin.functions.keys())} exist on one side only"
    outputs = [{n: (e.function, e.outputs) for n, e in m.entries.items()} for m in (real, twin)]
    if outputs[0] != outputs[1]:
        return "the entries are not the same"
    tops = {e.function for e in real.entries.values()}
    for name, function in real.functions.items():
        other = twin.functions[name]
        if not (shortened and name in tops):
            if not isomorphic(function, other):
                return f"@{name} is not isomorphic"
        else:
            apart = _neighbourhoods(function) ^ _neighbourhoods(other)
            if apart:
                return f"@{name} has a node on one side only: {min(map(str, apart))}"
    return ""


def _neighbourhoods(function: Function) -> set[Any]:
    """Every node with its operands, each known by the state, input or op (and callee) that it comes from."""
    source: dict[Value, Any] = {p: ("input", p.name) for p in function.inputs()}

    def of(value: Value) -> Any:
        return ("state", re.sub(r"(?<=\.)\d+(?=\.)", "*", value.name)) if value.is_state else source[value]

    found = set()
    for node in function.nodes:
        made = [_kind(v) for v in node.results]
        read = [of(v) for v in node.operands]
        callee = node.attrs.get("callee")
        found.add((node.op, callee, frozenset(node.attrs), node.phase, _short(node, read), _short(node, made)))
        for index, value in enumerate(node.results):
            source[value] = (node.op, callee, index if node.op == "call" else 0)
    return found


def _short(node: Node, items: list[Any]) -> Any:
    return tuple(items) if node.op == "call" or len(items) <= _FEW else frozenset(items)


def _kind(value: Value) -> Any:
    type_ = value.type.value if isinstance(value.type, PendingType) else value.type
    return type_.dtype, len(type_.shape), type_.placement
