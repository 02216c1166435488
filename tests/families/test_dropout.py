"""Dropout in whole packages: the same on one and two processes, under recompute, after resume; none in evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from tests.end_to_end.builds import batches, fill, loss_of
from tests.end_to_end.test_runs import command, losses, run
from tests.families.builds import Family, compile_family, prepared


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """GPT-2, whose dropout is 0.1."""
    return compile_family("gpt2", tmp_path_factory.mktemp("gpt2"))


def gradients(family: Family, **places: int) -> dict[str, torch.Tensor]:
    package = load_package(family.path, "cpu")
    state = prepared(family, create_state(package.state_specs, 3, "cpu"))
    for name, value in places.items():
        state[f"rng.{name}"].fill_(value)
    (tokens, labels), *_ = batches(1)
    package.call("microbatch", state, tokens, labels)
    return {n: t for n, t in state.items() if n.endswith(".grad")}


def test_recompute_drops_the_same(gpt2: Family, tmp_path: Path) -> None:
    again = gradients(compile_family("gpt2", tmp_path, recompute="full"))
    assert all(torch.equal(again[n], t) for n, t in gradients(gpt2).items())


def test_each_step_and_sequence_drops_otherwise(gpt2: Family) -> None:
    made = [gradients(gpt2, **place)["transformer.wpe.weight.grad"] for place in ({}, {"step": 4}, {"sample": 5})]
    assert not torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def test_evaluation_drops_nothing(gpt2: Family) -> None:
    package = load_package(gpt2.path, "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    model = gpt2.eager().eval()
    fill(model, state)
    (tokens, labels), *_ = batches(1)
    with torch.no_grad():
        expected, loss = model(tokens).logits, loss_of(model, tokens, labels)
    torch.testing.assert_close(package.call("predict", state, tokens)["logits"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(package.call("evaluate", state, tokens, labels)["loss_sum"], loss, rtol=1e-5, atol=0)


@pytest.mark.full
def test_two_processes_drop_what_one_drops(gpt2: Family, tmp_path: Path) -> None:
    one = run(*command(gpt2.path, tmp_path / "one", 1, "--accumulate", "2"))
    two = run(*command(gpt2.path, tmp_path / "two", 2))
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    first, second = losses(tmp_path / "one"), losses(tmp_path / "two")
    for step, loss in first.items():
        assert second[step] == pytest.approx(loss, rel=1e-6), step


@pytest.mark.full
def test_a_resumed_run_drops_the_same(gpt2: Family, tmp_path: Path) -> None:
    whole = run(*command(gpt2.path, tmp_path / "whole", 1, "--save-every", "5", "--keep", "9"))
    assert whole.returncode == 0, whole.stderr
    expected = losses(tmp_path / "whole")
    for saved in sorted((tmp_path / "whole" / "checkpoints").iterdir())[1:]:
        for file in saved.iterdir():
            file.unlink()
        saved.rmdir()
    resumed = run(*command(gpt2.path, tmp_path / "whole", 1, "--resume"))
    assert resumed.returncode == 0, resumed.stderr
    assert losses(tmp_path / "whole") == expected
