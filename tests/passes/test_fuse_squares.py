"""fuse-squares: the norm that updates give against torch's in float64, on one rank and on meshes; each guard once."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.codegen.kernel_sites import kernel_sites
from mgraph.codegen.step import step_text
from mgraph.codegen.triton import build_kernels
from mgraph.compiler import build_module
from mgraph.errors import OptionError, PassError
from mgraph.ir.graph import Module, Node
from mgraph.ir.interpreter import run
from mgraph.ir.parser import parse_module
from mgraph.ir.printer import print_module
from mgraph.ir.verifier import verify
from mgraph.passes.adamw import AdamW
from mgraph.passes.base import Report
from mgraph.passes.data_parallel import DataParallel
from mgraph.passes.equivalence import check
from mgraph.passes.fuse_squares import FuseSquares
from mgraph.passes.in_place import InPlace
from mgraph.passes.offload import Offload
from mgraph.passes.samples import Shapes
from mgraph.recipe import Recipe
from tests.passes.models import random_batch, random_state
from tests.passes.spread import trained
from tests.passes.test_adamw import step, trainer
from tests.sampling import sampled

OPTIONS: dict[str, Any] = {"max_norm": 0.0, "check": "loss"}
GROUPS = ("embed: lr=0.1, weight_decay=0", "layers.1.*: lr=3")


def fused(module: Module) -> tuple[Module, Report]:
    report = Report()
    after = FuseSquares().run(module, report)
    verify(after)
    return after, report


def ops(module: Module) -> list[str]:
    return [node.op for node in module.entry_function("finish").nodes]


def total_norm(state: dict[str, torch.Tensor], count: torch.Tensor) -> torch.Tensor:
    grads = [tensor.double() for name, tensor in state.items() if name.endswith(".grad")]
    return torch.nn.utils.get_total_norm(grads) / count


def test_the_update_gives_the_norm() -> None:
    """In float64 over five steps with two microbatches each: everything else is the same, bit for bit."""
    before = trainer(groups=GROUPS, **OPTIONS)
    after, report = fused(before)
    assert "global_norm" not in ops(after) and [match.node for match in report.matches] == ["norm"]
    assert print_module(parse_module(print_module(after))) == print_module(after)
    states = [random_state(before, dtype=torch.float64)] * 2
    for index in range(5):
        batches = [random_batch(seed=2 * index), random_batch(seed=2 * index + 1)]
        summed = states[0]
        for batch in batches:
            summed = summed | run(before, "microbatch", batch, summed, lifted=True)[1]
        made = [step(module, state, batches, 0.01) for module, state in zip((before, after), states, strict=True)]
        states = [state for _, state in made]
        wanted = total_norm(summed, made[0][0]["count"])
        torch.testing.assert_close(made[1][0]["grad_norm"], wanted, rtol=1e-12, atol=0)
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_step_whose_loss_is_not_finite_changes_nothing() -> None:
    module = InPlace().run(fused(DataParallel().run(trainer(**OPTIONS), Report()))[0], Report())
    _, state = step(module, random_state(module), [random_batch()], 0.1)
    _, new = run(module, "microbatch", random_batch(seed=5), state)
    broken = {name: tensor.clone() for name, tensor in (state | new).items()}
    broken["acc.loss_sum"].fill_(torch.inf)
    wanted = total_norm(broken, broken["acc.count"])
    out, after = run(module, "finish", {"lr": torch.tensor(0.1)}, broken)
    kept = [name for name, declared in module.state.items() if declared.persist and name != "skipped"]
    assert all(torch.equal(after.get(name, broken[name]), state[name]) for name in kept) and int(out["skipped"]) == 1
    torch.testing.assert_close(out["grad_norm"].double(), wanted, rtol=1e-6, atol=0)


MESHES = sampled(
    [
        ("dense-tiny", "fsdp=2,tp=2", {}),
        ("dense-tiny", "fsdp=2", {"zero": 1}),
        ("dense-tiny", "dp=2", {"overlap": True, "precision": "bf16"}),
        ("dense-tiny", "dp=2", {"offload": "optimizer"}),
        ("dense-tiny", "dp=2", {"one_microbatch": True, "precision": "bf16", "grad_dtype": "param"}),
        ("moe-tiny", "dp=2,ep=2", {}),
        ("moe-tiny", "ep=2", {"expert_load": True, "groups": ("embed*: frozen", "*norm*: lr=2")}),
    ],
    0,
    always=[("dense-tiny", "fsdp=2,tp=2", {})],
)


@pytest.mark.parametrize(("model", "mesh", "options"), MESHES)
def test_meshes_are_equal_on_all_ranks(model: str, mesh: str, options: dict[str, Any]) -> None:
    recipe = Recipe(model, mesh=mesh, target="h100", max_norm=0.0, check_finite="loss", **options)
    done = build_module(recipe)
    place = [result.name for result in done.results].index("fuse-squares")
    before, after = (done.snapshots.snapshots[place + i].module for i in (0, 1))
    evidence = check(FuseSquares(), before, after, Shapes.of(before))
    assert any("ranks" in found.method for found in evidence) and max(found.error for found in evidence) <= 1e-12
    assert done.results[place].report.matches and not done.results[place].report.near_misses
    assert not {"global_norm", "square_sum"} & {node.op for _, node in after.walk()}


def test_sums_of_several_updates_are_added() -> None:
    """The updates of state on the host are cut into parts, each of which gives what it reads."""
    module = Offload(optimizer=True, chunk=2**15).run(
        trained("dense-tiny", max_norm=0.0, check_finite="loss"), Report()
    )
    after, _ = fused(module)
    updates = [node for node in after.entry_function("finish").nodes if node.op == "adamw"]
    assert len(updates) > 2 and all(node.attrs["sums"] == (0,) * int(str(node.attrs["n"])) for node in updates)
    assert ops(after).count("aten.sqrt.default") == 1 and "global_norm" not in ops(after)


def missed(module: Module) -> dict[str, tuple[str, str]]:
    after, report = fused(module)
    assert after is module and not report.matches
    return {miss.node: (miss.guard, miss.detail) for miss in report.near_misses}


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"max_norm": 0.0}])
def test_a_norm_that_the_update_needs_stays_before_it(options: dict[str, float]) -> None:
    assert missed(trainer(**options))["norm"][0] == "waits"


def test_sums_of_anything_else_stay() -> None:
    def changed(node: Node) -> Node:
        return replace(node, operands=(*node.operands, node.operands[0])) if node.op == "global_norm" else node

    module = trainer(**OPTIONS)
    finish = module.entry_function("finish")
    twice = module.with_function(replace(finish, nodes=tuple(map(changed, finish.nodes))))
    guard, detail = missed(twice)["norm"]
    assert guard == "gradients" and "embed.grad" in detail


def test_wrong_options_are_refused() -> None:
    with pytest.raises(OptionError, match="the update clips gradients"):
        Recipe("dense-tiny", check_finite="loss")
    with pytest.raises(OptionError, match="scales the loss"):
        Recipe("dense-tiny", check_finite="loss", max_norm=0.0, precision="fp16")
    with pytest.raises(PassError, match="check is 'los'"):
        AdamW(check="los")


def test_the_emitted_step_does_the_same(tmp_path: Path) -> None:
    """`finish` with the calls of the runtime, and with the site (run by its twin), against the norm apart."""
    plain = trainer(groups=GROUPS, **OPTIONS)
    states, outs = [], []
    for name, module, gpu in (
        ("plain", plain, False),
        ("torch", fused(plain)[0], False),
        ("site", fused(plain)[0], True),
    ):
        module = InPlace().run(module, Report())
        sites = kernel_sites(module, gpu=gpu)
        directory = tmp_path / name
        directory.mkdir()
        text = step_text(module, sites)
        assert ("[-1][0]" in text and "global_norm" not in text) is gpu and max(map(len, text.splitlines())) <= 120
        (directory / "step.py").write_text(text)
        (directory / "manifest.json").write_text(json.dumps({"kernels": build_kernels(sites.specs, directory, ())}))
        made = runpy.run_path(str(directory / "step.py"))
        state = random_state(module)
        for seed in range(2):
            made["microbatch"](state, *random_batch(seed=seed).values())
            out = made["finish"](state, torch.tensor(0.01))
        states.append(state)
        outs.append(out)
    for state, out in zip(states[1:], outs[1:], strict=True):
        assert all(torch.equal(value, state[name]) for name, value in states[0].items())
        torch.testing.assert_close(out, outs[0], rtol=1e-6, atol=0)
