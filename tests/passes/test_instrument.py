"""Instruments: op counts, snapshots on disk, verification after each pass."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from mgraph.errors import GraphError
from mgraph.ir.graph import Module
from mgraph.ir.printer import print_module
from mgraph.passes.base import Pass, Report, Stage
from mgraph.passes.instrument import OpCounts, Snapshots, Timer, VerifyEach, VerifyLater, op_count_lines
from mgraph.passes.pipeline import run_pipeline
from tests.passes.build import stacked


@dataclass(frozen=True)
class Break(Pass):
    """Forget the first node, whose value is read later."""

    name: ClassVar[str] = "break"
    stage: ClassVar[Stage] = Stage.NORMALIZE

    def run(self, module: Module, report: Report) -> Module:
        """Break the graph."""
        function = module.functions["forward"]
        return module.with_function(replace(function, nodes=function.nodes[1:]))


def test_op_counts_and_time() -> None:
    _, results = run_pipeline(stacked(3), "outline,dce", [OpCounts(), Timer()])
    ops = results[0].measured["ops"]
    assert op_count_lines(ops) == [
        "aten.add.Tensor: 3 -> 1 (-2)",
        "aten.clamp.default: 3 -> 1 (-2)",
        "aten.linear.default: 6 -> 2 (-4)",
        "aten.mul.Tensor: 3 -> 1 (-2)",
        "call: 0 -> 3 (+3)",
    ]
    assert results[1].measured["ops"] == {}
    assert all(r.measured["seconds"] >= 0 for r in results)


def test_snapshots_are_written(tmp_path: Path) -> None:
    before, snapshots = stacked(2), Snapshots()
    after, _ = run_pipeline(before, "outline,dce", [snapshots])
    last = snapshots.write(tmp_path / "graphs")
    written = sorted((tmp_path / "graphs").iterdir())
    stems = ["000_capture", "001_outline", "002_dce"]
    assert [p.name for p in written] == [f"{s}{e}" for s in stems for e in (".json", ".mg.gz")]
    assert last == print_module(after)
    assert gzip.decompress(written[1].read_bytes()).decode() == print_module(before)
    assert gzip.decompress(written[5].read_bytes()).decode() == print_module(after)
    assert json.loads(written[2].read_text())["report"]["counts"] == {"calls": 2, "functions": 1}
    first = [p.read_bytes() for p in written[1::2]]
    snapshots.write(tmp_path / "graphs")
    assert [p.read_bytes() for p in written[1::2]] == first


def test_verification_blames_the_pass() -> None:
    with pytest.raises(AssertionError, match="pass 'break' broke the graph"):
        run_pipeline(stacked(2), [Break()], [VerifyEach()])


def test_later_verification_blames_the_first_wrong_pass() -> None:
    class Fail(Break):
        def run(self, module: Module, report: Report) -> Module:
            raise RuntimeError("it came to a broken graph")

    later = VerifyLater()
    run_pipeline(stacked(2), [Break()], [later])
    with pytest.raises(AssertionError, match="pass 'break' broke the graph"):
        later.check()
    later.check()
    with pytest.raises(AssertionError, match="pass 'break' broke the graph"):
        run_pipeline(stacked(2), [Break(), Fail()], [VerifyLater()])
    with pytest.raises(RuntimeError, match="it came to"):
        run_pipeline(stacked(2), [Fail()], [VerifyLater()])


def test_verification_of_the_input_blames_the_caller() -> None:
    with pytest.raises(GraphError):
        run_pipeline(Break().run(stacked(2), Report()), "dce", [VerifyEach()])
