"""Fingerprints and what they say of a mismatch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from mgraph.codegen.fingerprint import explain_mismatch, fingerprint, option_values


@dataclass(frozen=True)
class Inner:
    depth: int = 2


@dataclass(frozen=True)
class Options:
    name: str = "a"
    path: Path = Path("x")
    inner: Inner = field(default_factory=Inner)


def test_all_fields_are_covered() -> None:
    assert option_values(Options()) == {"name": "a", "path": "x", "inner": {"depth": 2}}


def test_mismatch_names_the_field() -> None:
    old = fingerprint("graph", Options())
    assert explain_mismatch(old, fingerprint("graph", Options())) == []
    changed = fingerprint("graph 2", replace(Options(), inner=Inner(3)))
    assert explain_mismatch(old, changed) == ["option inner.depth changed from 2 to 3", "the graph changed"]
    assert explain_mismatch(old, {**old, "options": {"name": "a", "path": "x", "new": 1}}) == [
        "option inner.depth is gone: it was 2",
        "option new is new: 1",
    ]
    one, other = (fingerprint("graph", Options(), text) for text in ("fast", "slow"))
    assert explain_mismatch(one, one) == [] and explain_mismatch(one, other) == ["what the profile holds changed"]
    assert "with all options equal" in explain_mismatch(old, fingerprint("other", Options()))[0]
