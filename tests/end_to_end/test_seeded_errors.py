"""Mistakes in a parallel plan, put in on purpose: each is caught before anything could hang.

| mistake | caught by | here or in |
|---|---|---|
| a collective over the wrong group | the proof, at compile time | here |
| a reduction that is missing | `--verify`, at compile time | here |
| collectives that the emission moves | the check of step.py, at compile time | here |
| collectives swapped, dropped or added in step.py on one rank | the handshake | tests/runtime/test_handshake.py |
| a collective under a condition in step.py | the reader of step.py, at start-up | tests/runtime/test_package.py |
| a stale package on one rank | the handshake | tests/runtime/test_handshake.py |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mgraph import compiler
from mgraph.codegen import package, step
from mgraph.codegen.kernel_sites import KernelSites
from mgraph.errors import MgraphError, PackageError, PassError
from mgraph.ir.collective_proof import CollectiveOrderError
from mgraph.ir.graph import Axis, Module, Value
from mgraph.ir.types import PendingType
from mgraph.passes.data_parallel import DataParallel
from mgraph.recipe import Recipe

Seed = Callable[[Module], Module]


def wrong_group(module: Module) -> Module:
    """The reduction runs over another axis of the mesh, and what it gives is typed as such a reduction gives it."""
    finish = module.functions["finish"]
    (start,) = (n for n in finish.nodes if n.op == "all_reduce_start")
    (wait,) = (n for n in finish.nodes if n.op == "wait")
    new = {v: Value(v.name, PendingType(o.tensor)) for v, o in zip(start.results, start.operands, strict=True)}
    new |= {v: Value(v.name, o.tensor) for v, o in zip(wait.results, start.operands, strict=True)}
    nodes = []
    for node in finish.nodes:
        operands, results = (tuple(new.get(v, v) for v in values) for values in (node.operands, node.results))
        node = replace(node, operands=operands, results=results)
        nodes.append(replace(node, attrs={"axis": "tp"}) if node.op == "all_reduce_start" else node)
    return replace(module, mesh=(*module.mesh, Axis("tp", 2))).with_function(replace(finish, nodes=tuple(nodes)))


def missing_reduce(module: Module) -> Module:
    """Each rank goes on with its own gradients."""
    finish = module.functions["finish"]
    (start,) = (n for n in finish.nodes if n.op == "all_reduce_start")
    (wait,) = (n for n in finish.nodes if n.op == "wait")
    own = dict(zip(wait.results, start.operands, strict=True))
    nodes = [n.with_values(tuple(own.get(v, v) for v in n.operands), n.results) for n in finish.nodes]
    return module.with_function(
        replace(finish, nodes=tuple(n for n in nodes if n.op not in ("all_reduce_start", "wait")))
    )


def compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: Seed | None = None, *, verify: bool = False
) -> MgraphError:
    """The error of a compilation in which a mistake follows the insertion of collectives; nothing may be written."""
    run = DataParallel.run
    if seed is not None:
        monkeypatch.setattr(DataParallel, "run", lambda self, module, report: seed(run(self, module, report)))
    recipe = Recipe(model="dense-tiny", mesh="dp=2", arch="none", output=str(tmp_path / "pkg"), verify=verify)
    with pytest.raises(MgraphError) as caught:
        compiler.compile_package(recipe)
    assert caught.value.exit_code == 2 and list(tmp_path.iterdir()) == []
    return caught.value


def test_a_wrong_group_is_caught_by_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = compiled(tmp_path, monkeypatch, wrong_group)
    assert isinstance(error, CollectiveOrderError) and "all_reduce_start over tp takes what is partial" in error.message
    assert error.where is not None and "function @finish, node %sum_embed_weight_grad_pending, from" in error.where


@pytest.mark.full
def test_a_missing_reduction_is_caught_by_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = compiled(tmp_path, monkeypatch, missing_reduce, verify=True)
    assert isinstance(error, PassError) and "pass 'data-parallel' changes the numbers: entry 'finish'" in error.message


def test_a_reduction_that_moved_is_caught_by_the_check_of_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(module: Module, sites: KernelSites, lines: step.Lines) -> str:
        text = step.step_text(module, sites, lines)
        return text.replace("def finish(", "def other(").replace("def evaluate(", "def finish(")

    monkeypatch.setattr(package, "step_text", moved)
    error = compiled(tmp_path, monkeypatch)
    assert isinstance(error, PackageError) and "in @finish the graph has all_reduce_start over dp" in error.message
