"""Gradients that are made while the next tokens are sent: which, when, and that runs are the same to the bit."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.compiler import build_module, compile_package
from mgraph.ir.graph import Module, Node
from mgraph.recipe import Recipe
from mgraph.runtime import later
from mgraph.runtime.graphs import EntryGraphs


@functools.cache
def compiled(mesh: str = "ep=2", model: str = "moe-tiny", **more: Any) -> Module:
    return build_module(Recipe(model=model, mesh=mesh, arch="sm_90a", precision="bf16", **more)).module


def late(module: Module) -> list[tuple[str, Node]]:
    return [(function.name, node) for function, node in module.walk() if node.attrs.get("late")]


@pytest.mark.parametrize("written", [False, True])
def test_the_last_product_of_a_layer_is_late(written: bool) -> None:
    module = compiled(one_microbatch=written)
    ((name, node),) = late(module)
    function = module.functions[name]
    assert name == "layer.bwd" and node.op == "accumulate_joined_"
    assert [value.name for value in node.operands[:-1]] == [f"grad.attn.{part}.weight" for part in "qkv"]
    behind = function.nodes[function.nodes.index(node) + 1 :]
    assert not any(n.op == "wait" or (n.op.startswith("accumulate_") and n.attrs.get("late")) for n in behind)


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("fsdp=2,ep=fsdp", {}),  # each layer's gradients go to other ranks at once
        ("dp=2,ep=dp", {"overlap": True}),  # as in the entry `last`
        ("ep=2", {"disable": "overlap-experts"}),
        ("dp=2", {}),
    ],
)
def test_what_the_entry_reads_is_not(mesh: str, more: dict[str, Any]) -> None:
    module = compiled(mesh, **more)
    entries = {entry.name: module.functions[entry.function] for entry in module.entries.values()}
    for name, _ in late(module):
        callers = {e for e, f in entries.items() for n in f.nodes if n.op == "call" and n.attrs["callee"] == name}
        assert callers == {"microbatch"}, "the gradients of `last` are summed while it runs"
        assert more.get("overlap")
    if not more.get("overlap"):
        assert not late(module)


def test_work_is_done_at_the_next_message_in_its_order() -> None:
    done: list[int] = []
    for number in range(3):
        later.later(done.append, number)
    assert not done
    later.catch_up()
    assert done == [0, 1, 2]
    with later.at_once():
        later.later(done.append, 3)
    assert done == [0, 1, 2, 3]
    later.later(done.append, 4)
    later.forget()
    later.catch_up()
    assert done == [0, 1, 2, 3]


def test_a_failed_capture_leaves_nothing_for_later() -> None:
    """The entry then runs as it is: each gradient is added once."""

    class Fails:
        def record(self, function: Callable[[], Any]) -> Any:
            function()
            raise RuntimeError("out of memory")

    graphs = EntryGraphs(["microbatch"], new_pool=Fails)  # type: ignore[arg-type]
    total = torch.zeros(1)

    def microbatch(state: dict[str, torch.Tensor], tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        later.later(total.add_, 1)
        if len(calls) != 1:  # what is captured does not get to the end
            later.catch_up()
        calls.append(1)
        return (total,)

    calls: list[int] = []
    graphs.call("microbatch", microbatch, {}, [torch.zeros(1)])
    with pytest.warns(RuntimeWarning, match="out of memory"):
        graphs.call("microbatch", microbatch, {}, [torch.zeros(1)])
    assert len(calls) == 3 and total.item() == 2


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
def test_runs_are_the_same_to_the_bit(precision: str, tmp_path: Path) -> None:
    """Two processes train a package with kernels, by their twins, with late gradients and without."""
    losses = []
    for disabled in ("", "late-gradients"):
        recipe = Recipe(
            model="moe-tiny",
            mesh="ep=2",
            arch="sm_90a",
            precision=precision,
            disable=disabled,
            output=str(tmp_path / f"package{disabled}"),
        )
        package = compile_package(recipe).package
        assert package is not None
        assert ("rt.later(" in (package / "step.py").read_text()) == (not disabled and precision == "bf16")
        out = tmp_path / f"run{disabled}"
        options = ["--device", "cpu", "--batch-size", "2", "--seq-len", "32", "--steps", "4", "--log-every", "1"]
        options += ["--eval-every", "0", "--eval-batches", "1", "--sample-length", "0", "--save-every", "0"]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        run = subprocess.run(
            [*launch, str(package / "train.py"), "--out", str(out), *options],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert run.returncode == 0, run.stderr
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        losses.append([(line["loss"], line["grad_norm"]) for line in lines if "loss" in line])
    assert len(losses[0]) == 4 and losses[0] == losses[1]
    assert torch.tensor(losses[0]).isfinite().all()
