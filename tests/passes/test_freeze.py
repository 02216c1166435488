"""Frozen parameters: which are unmarked; what follows from it is in test_adamw.py."""

from __future__ import annotations

import pytest

from mgraph.errors import OptionError, PassError
from mgraph.passes.base import Report
from mgraph.passes.freeze import Freeze
from mgraph.passes.pipeline import parse_pipeline, print_pipeline
from tests.passes.models import mlp_module


def test_rules_unmark_parameters() -> None:
    module, report = mlp_module(), Report()
    found = Freeze(("layers.0.up: lr=2", "layers.*: frozen")).run(module, report)
    assert [n for n, s in found.state.items() if s.trainable] == ["embed", "layers.0.up"]
    assert report.counts == {"frozen": 3}
    assert all(found.state[n].value is s.value for n, s in module.state.items())


def test_nothing_to_freeze_and_everything_frozen() -> None:
    module = mlp_module()
    assert Freeze(("embed: lr=2",)).run(module, Report()) is module
    with pytest.raises(PassError, match="every parameter is frozen"):
        Freeze(("*: frozen",)).run(module, Report())
    with pytest.raises(OptionError, match="matches no parameter"):
        Freeze(("head: frozen",)).run(module, Report())


def test_its_text() -> None:
    pipeline = (Freeze(("a.*|b: frozen", "c: lr=0.5")),)
    assert parse_pipeline(print_pipeline(pipeline)) == pipeline
