"""`mgraph opt` as a filter."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from mgraph.ir.parser import parse_module

from .conftest import Mgraph


@pytest.fixture
def graph(mgraph: Mgraph, compiled: Path, tmp_path: Path) -> Path:
    """The normalised forward graph, as a file."""
    path = tmp_path / "graph.mg"
    path.write_text(mgraph("dump", compiled, "5").out)
    return path


def test_no_pass_gives_the_text_back(mgraph: Mgraph, graph: Path) -> None:
    assert mgraph("opt", graph).out == graph.read_text()


def test_passes_and_views(mgraph: Mgraph, graph: Path) -> None:
    command = ("opt", graph, "-p", "raise-norm,dce", "--have", "canonical,outlined")
    run = mgraph(*command, "--print-after", "raise-*", "--verify-each", "--time")
    assert run.out == mgraph(*command).out
    assert sum(node.op == "rms_norm" for _, node in parse_module(run.out).walk()) == 3
    assert "# after raise-norm\nmgraph-ir 1\n" in run.err
    assert " s  dce\n" in run.err
    assert "rms_norm: 0 -> 3 (+3)" in run.err


def test_stdin(mgraph: Mgraph, graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(graph.read_text()))
    assert mgraph("opt", "-", "-p", "dce").out == graph.read_text()


def test_broken_text_is_a_diagnostic(mgraph: Mgraph, graph: Path) -> None:
    lines = graph.read_text().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if "= reshape(%linear)" in line)
    lines[number] = lines[number].replace("(%linear)", "(%linaer)")
    graph.write_text("".join(lines))
    run = mgraph("opt", graph, "-p", "dce")
    assert (run.code, run.out) == (1, "")
    assert f"{graph}, line {number + 1}" in run.err
    assert "did you mean 'linear'?" in run.err


def test_wrong_graph_is_a_diagnostic(mgraph: Mgraph, graph: Path) -> None:
    graph.write_text(
        graph.read_text().replace('rms = "normed"', "").replace("{shape = [B, S, 4, 16]}", "{shape = [B, 4]}", 1)
    )
    run = mgraph("opt", graph)
    assert (run.code, run.out) == (1, "")
    assert "models/attention.py" in run.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-p", "dcee"], "did you mean 'dce'?"),
        (["-p", "dce{a=1}"], "it takes no options"),
        (["-p", "outline{min_nods=1}"], "did you mean 'min_nodes'?"),
        (["-p", "dce,,cse"], "column 5"),
        (["-p", "raise-norm"], "put 'canonicalize' before it"),
        (["--pass", "dce"], "did you mean '--passes'?"),
    ],
)
def test_wrong_pipeline(mgraph: Mgraph, graph: Path, arguments: list[str], said: str) -> None:
    run = mgraph("opt", graph, *arguments)
    assert (run.code, run.out) == (2, "")
    assert said in run.err


def test_unreadable_file(mgraph: Mgraph, compiled: Path, tmp_path: Path) -> None:
    run = mgraph("opt", tmp_path / "nothing.mg")
    assert run.code == 2 and "No such file" in run.err
    run = mgraph("opt", compiled / "graphs" / "005_dce.mg.gz")
    assert run.code == 2 and "mgraph dump" in run.err
