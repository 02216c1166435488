"""Pipelines as text, their order checks, selection, and the runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from mgraph.capture import capture
from mgraph.errors import PassError
from mgraph.ir.graph import Module
from mgraph.passes.base import Pass, Report, Stage
from mgraph.passes.instrument import Instrument, VerifyEach
from mgraph.passes.outline import Outline
from mgraph.passes.pipeline import (
    NORMALIZE,
    PassResult,
    check_order,
    make_pass,
    parse_pipeline,
    print_pipeline,
    run_pipeline,
    select,
)
from tests.passes.build import assert_same_results, random_state, stacked


def test_text_round_trips() -> None:
    text = "outline{min_nodes=7},canonicalize,constant-fold,cse,dce"
    assert print_pipeline(parse_pipeline(text)) == text
    assert parse_pipeline(text)[0] == Outline(min_nodes=7)
    assert print_pipeline(parse_pipeline(NORMALIZE)) == NORMALIZE


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(PassError, match="unknown pass 'outlin'") as caught:
        parse_pipeline("outlin")
    assert caught.value.hint == "did you mean 'outline'?"
    with pytest.raises(PassError, match="no option 'min_node'") as caught:
        parse_pipeline("outline{min_node=3}")
    assert caught.value.hint == "did you mean 'min_nodes'?"
    with pytest.raises(PassError, match="no option 'x'") as caught:
        parse_pipeline("dce{x=3}")
    assert caught.value.hint == "it takes no options"


@pytest.mark.parametrize("value", ["true", "2.5", "word", "[1]", "none"])
def test_option_values_have_their_declared_type(value: str) -> None:
    with pytest.raises(PassError, match="option 'min_nodes' of pass 'outline'") as caught:
        parse_pipeline(f"outline{{min_nodes={value}}}")
    assert caught.value.hint == "give a value of type int"


@dataclass(frozen=True)
class Needs(Pass):
    """Requires what `canonicalize` provides, and cannot follow `outline`."""

    name: ClassVar[str] = "needs"
    stage: ClassVar[Stage] = Stage.RAISE
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"outlined"})
    invalidates: ClassVar[frozenset[str]] = frozenset({"canonical"})

    def run(self, module: Module, report: Report) -> Module:
        """Nothing."""
        return module


def test_order_is_checked() -> None:
    canonicalize, outline = make_pass("canonicalize"), make_pass("outline")
    with pytest.raises(PassError, match="'needs' requires the property 'canonical'") as caught:
        check_order([Needs()])
    assert caught.value.hint == "put 'canonicalize' before it, or do not disable it"
    assert caught.value.where == "pass 1 of 'needs'"
    with pytest.raises(PassError, match="cannot run where the property 'outlined' holds"):
        check_order([outline, canonicalize, Needs()])
    assert check_order([canonicalize, Needs(), outline]) == {"outlined"}
    assert check_order([Needs()], frozenset({"canonical"})) == frozenset()


def test_wrong_pipelines_run_nothing() -> None:
    class Forbidden(Instrument):
        def before(self, result: PassResult, module: Module) -> None:
            raise AssertionError("a pass ran")

    with pytest.raises(PassError, match="requires the property 'canonical'"):
        run_pipeline(stacked(2), "dce,constant-fold", [Forbidden()])


def test_selection() -> None:
    pipeline = parse_pipeline(NORMALIZE)

    def names(**how: object) -> list[str]:
        return [p.name for p in select(pipeline, **how)]  # type: ignore[arg-type]

    assert names(disable=["c*"]) == ["outline", "dce"]
    assert names(only=["c*", "dce"], disable=["cse"]) == ["canonicalize", "constant-fold", "dce"]
    assert names(stop_after="constant-fold") == ["outline", "canonicalize", "constant-fold"]
    with pytest.raises(PassError, match="no pass of the pipeline is named 'dca'") as caught:
        names(disable=["dca"])
    assert caught.value.hint == "did you mean 'dce'?"


def test_results_and_order_of_instruments() -> None:
    events: list[str] = []

    class Log(Instrument):
        def __init__(self, name: str) -> None:
            self.name = name

        def start(self, module: Module) -> None:
            events.append(f"start {self.name}")

        def before(self, result: PassResult, module: Module) -> None:
            events.append(f"before {result.name} {self.name}")

        def after(self, result: PassResult, before: Module, after: Module) -> None:
            events.append(f"after {result.name} {self.name} {after is not before}")

    module, results = run_pipeline(stacked(2), "outline,dce", [Log("a"), Log("b")])
    assert events == [
        *("start a", "start b"),
        *("before outline a", "before outline b", "after outline b True", "after outline a True"),
        *("before dce a", "before dce b", "after dce b False", "after dce a False"),
    ]
    assert set(module.functions) == {"forward", "layer"}
    assert [(r.index, r.spec, r.changed) for r in results] == [(1, "outline", True), (2, "dce", False)]
    assert results[0].to_json()["report"]["counts"] == {"calls": 2, "functions": 1}


@pytest.mark.parametrize("model", ["dense-tiny", "moe-tiny"])
def test_normalized_models_compute_bitwise_the_same(model: str) -> None:
    module = capture(model)
    after, results = run_pipeline(module, NORMALIZE, [VerifyEach()])
    assert results[0].report.counts == {"calls": 2, "functions": 1}
    assert results[0].changed and results[1].changed
    inputs = {name: torch.randint(0, 256, (2, 9)) for name in ("tokens", "labels")}
    assert_same_results(module, after, inputs, random_state(module))
    again, _ = run_pipeline(after, "canonicalize,constant-fold,cse,dce")
    assert again is after
