"""Balance by selection bias: a package moves the biases of its routers as `models.balance` does in eager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mgraph import models
from mgraph.compiler import compile_package
from mgraph.errors import PassError
from mgraph.models.balance import Balancer
from mgraph.recipe import Recipe
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from tests.end_to_end.builds import Build, adamw, batches, build, eager_step, fill
from tests.end_to_end.test_runs import command, run

RATE = 0.05
MODEL = "moe-tiny-grouped"
BIASES = [f"layers.{i}.ffn.router.selection_bias" for i in range(2)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The package of a mixture whose sigmoid router has a selection bias."""
    return build(MODEL, tmp_path_factory.mktemp("balance"), expert_bias_rate=RATE)


def _follows_eager(built: Build) -> None:
    package = load_package(built.path, "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    model = models.get("moe", "tiny-grouped").train()
    fill(model, state)
    optimizer, balancer = adamw(model), Balancer(model, RATE)
    buffers = dict(model.named_buffers())
    for tokens, labels in batches(5, batch=4):
        eager_step(model, optimizer, tokens, labels)
        balancer.step()
        for half in (slice(0, 1), slice(1, 4)):
            package.call("microbatch", state, tokens[half], labels[half])
            package.call("evaluate", state, tokens, labels)
        chosen = tokens.numel() * model.config.top_k
        assert [int(state[f"{name}.load"].sum()) for name in BIASES] == [chosen] * 2
        package.call("finish", state, torch.tensor(1e-3))
        for name in BIASES:
            torch.testing.assert_close(state[name], buffers[name], rtol=0, atol=1e-6)
            assert not state[f"{name}.load"].any()
    assert all(state[name].any() for name in BIASES)


def test_five_steps_equal_eager(built: Build) -> None:
    _follows_eager(built)


def test_recomputation_counts_once(tmp_path: Path) -> None:
    _follows_eager(build(MODEL, tmp_path, expert_bias_rate=RATE, recompute="full"))


@pytest.mark.parametrize("groups", [1, 4])
def test_noise_in_the_choice_keeps_no_bias_from_moving(groups: int, tmp_path: Path) -> None:
    """Such routers are not raised; what noise chose counts."""
    file = tmp_path / "noisy.py"
    options = f"choice_jitter=0.3, num_groups={groups}, top_groups={min(groups, 2)}"
    file.write_text(f'from mgraph import models\n\nmodel = lambda: models.get("moe", "tiny-grouped", {options})\n')
    out = tmp_path / "out"
    compile_package(Recipe(model=f"{file}:model", output=str(out), arch="none", expert_bias_rate=RATE))
    package = load_package(out, "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    for tokens, labels in batches(2, batch=4):
        package.call("microbatch", state, tokens, labels)
        before = [(state[name].clone(), state[f"{name}.load"].clone()) for name in BIASES]
        package.call("finish", state, torch.tensor(1e-3))
        for name, (bias, load) in zip(BIASES, before, strict=True):
            assert int(load.sum()) == 2 * tokens.numel()
            moved = bias + RATE * torch.sign(load.double().mean() - load).to(bias)
            torch.testing.assert_close(state[name], moved, rtol=0, atol=1e-6)


def test_a_step_that_is_not_finite_moves_no_bias(built: Build) -> None:
    package = load_package(built.path, "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    ((tokens, labels),) = batches(1)
    state["head.weight"].fill_(float("inf"))
    package.call("microbatch", state, tokens, labels)
    assert state[f"{BIASES[0]}.load"].any()
    assert int(package.call("finish", state, torch.tensor(1e-3))["skipped"]) == 1
    assert not any(state[name].any() or state[f"{name}.load"].any() for name in BIASES)


@pytest.mark.full
def test_two_processes_equal_one_with_both_microbatches(built: Build, tmp_path: Path) -> None:
    weights = []
    for processes, name in ((1, "one"), (2, "two")):
        options = ["--steps", "5", "--accumulate", "2", "--export", str(tmp_path / f"{name}-weights")]
        ended = run(*command(built.path, tmp_path / name, processes, *options))
        assert ended.returncode == 0, ended.stderr
        (file,) = (tmp_path / f"{name}-weights").glob("*.safetensors")
        weights.append(load_file(file))
    for name in BIASES:
        assert weights[0][name].any()
        torch.testing.assert_close(weights[1][name], weights[0][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("model", "disable"), [("moe-tiny", ""), (MODEL, "raise-moe")])
def test_no_bias_to_move_is_an_error(model: str, disable: str, tmp_path: Path) -> None:
    recipe = Recipe(model=model, output=str(tmp_path / "out"), arch="none", expert_bias_rate=RATE, disable=disable)
    with pytest.raises(PassError, match="no router has a bias that its load could move"):
        compile_package(recipe)
    assert not (tmp_path / "out").exists()


def test_every_pass_keeps_the_numbers_on_two_ranks(tmp_path: Path) -> None:
    recipe = Recipe(model=MODEL, output=str(tmp_path / "out"), arch="none", expert_bias_rate=RATE, verify=True)
    made = compile_package(recipe)
    found = {result.name: result.measured["verify"] for result in made.results}
    assert found["data-parallel"]["status"] == "verified", "two ranks against one with the microbatches of both"
    assert found["expert-bias"]["status"] == "unverified"
    assert "selection_bias' is updated besides" in found["expert-bias"]["why"]
