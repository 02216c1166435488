"""Reports and pass specs."""

from __future__ import annotations

import json

import pytest

from mgraph.ir.graph import Module
from mgraph.passes import PASSES, pass_class
from mgraph.passes.base import Pass, Report, Stage
from mgraph.passes.constant_fold import ConstantFold
from mgraph.passes.outline import Outline


def test_report_survives_json() -> None:
    report = Report()
    report.match("layer", "add_1", "norm")
    report.near_miss("layer", "mul", "rms-norm", "one user", "2 users")
    report.count("calls", 3)
    report.count("calls")
    again = Report.from_json(json.loads(json.dumps(report.to_json())))
    assert again == report
    assert again.counts == {"calls": 4} and again.near_misses[0].guard == "one user"


def test_spec_holds_what_differs_from_the_default() -> None:
    assert Outline().spec == "outline"
    assert Outline(min_nodes=9).spec == "outline{min_nodes=9}"
    assert ConstantFold(limit=0).spec == "constant-fold{limit=0}"


def test_a_pass_without_run_says_which() -> None:
    class Nothing(Pass):
        name = "nothing"
        stage = Stage.FUSE

    with pytest.raises(NotImplementedError, match="Nothing"):
        Nothing().run(Module("m"), Report())
    assert Nothing().weight_transforms(Module("m"), Module("m")) == ()


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_of_the_table_is_found(name: str) -> None:
    found = pass_class(name)
    assert found.name == name and isinstance(found.stage, Stage)
    assert found.__doc__ and found.run.__doc__
