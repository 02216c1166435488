"""Recorded decisions of routers through packages: replayed, they decide alone, in forward and backward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mgraph import models
from mgraph.errors import MgraphError
from mgraph.models.router import Router
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from mgraph.runtime.train import main
from tests.end_to_end.builds import build, fill, loss_of
from tests.end_to_end.processes import RUN
from tests.end_to_end.test_runs import command, run

OPTIONS = (
    "--steps 3 --batch-size 2 --seq-len 12 --accumulate 2 --eval-batches 1 --sample-length 0 --lr 1e-2 --device cpu "
    "--log-every 1 --save-every 0"
)


def trained(package: Path, out: Path, *options: str) -> list[float]:
    """The losses of a run in this process."""
    with pytest.raises(SystemExit) as end:
        main(package, [*OPTIONS.split(), "--out", str(out), *options])
    assert end.value.code == 0
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.full), "full"])
def test_replayed_decisions_make_noise_of_no_account(recompute: str, tmp_path: Path) -> None:
    package = build("moe-tiny-choice-jitter", tmp_path, replayable_routing=True, recompute=recompute).path
    kept = str(tmp_path / "decisions")
    recorded = trained(package, tmp_path / "a", "--noise-seed", "1", "--record-routing", kept)
    other = trained(package, tmp_path / "b", "--noise-seed", "2")
    replayed = trained(package, tmp_path / "c", "--noise-seed", "2", "--replay-routing", kept)
    assert len(recorded) == 3 and other != recorded
    assert replayed == recorded


def test_given_decisions_have_the_loss_and_gradients_of_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = load_package(build("moe-tiny", tmp_path, replayable_routing=True).path, "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    model = models.get("moe", "tiny").train()
    fill(model, state)
    tokens, labels = torch.randint(0, 256, (2, 2, 7))
    # Half of the tokens are given experts that no router would choose so, the others are free.
    free = package.call("evaluate", state, tokens, labels, torch.full((2, 7, 2, 2), -1, dtype=torch.int16))["routing"]
    wanted = (free + 3) % 8
    wanted[0] = free[0]
    given = wanted.clone()
    given[0] = -1
    queue = [wanted[:, :, layer].flatten(0, 1).long() for layer in range(2)]

    def choose(router: Router, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = queue.pop(0)
        return scores.gather(1, chosen), chosen

    monkeypatch.setattr(Router, "choose", choose)
    loss = loss_of(model, tokens, labels)
    loss.backward()
    made = package.call("microbatch", state, tokens, labels, given)
    assert torch.equal(made["routing"], wanted)
    torch.testing.assert_close(made["loss_sum"], loss.detach(), rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(state[f"{name}.grad"], parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["dp=2", "ep=2"])
def test_each_rank_records_its_own(mesh: str, tmp_path: Path) -> None:
    package = build("moe-tiny-choice-jitter", tmp_path, replayable_routing=True, mesh=mesh).path
    kept = str(tmp_path / "decisions")
    options = [*RUN.split(), "--seed", "0"]
    found = []
    for name, more in (
        ("a", ["--noise-seed", "1", "--record-routing", kept]),
        ("b", ["--noise-seed", "2", "--replay-routing", kept]),
    ):
        done = run(*command(package, tmp_path / name, 2, *options, *more))
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        found.append([line["loss"] for line in lines if "loss" in line])
    assert found[0] == found[1]
    assert len(list(Path(kept).rglob("*.safetensors"))) == 3 * 4


@pytest.mark.full
def test_what_two_ranks_recorded_one_replays(tmp_path: Path) -> None:
    package = build("moe-tiny-choice-jitter", tmp_path, replayable_routing=True).path
    kept = str(tmp_path / "decisions")
    found = []
    for processes, more in ((2, ["--record-routing", kept]), (1, ["--noise-seed", "2", "--replay-routing", kept])):
        out = tmp_path / f"run-{processes}"
        done = run(*command(package, out, processes, *RUN.split(), *more))
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        found.append([line["loss"] for line in lines if "loss" in line])
    assert len(found[0]) == 3
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("model", [pytest.param("moe-tiny-grouped", marks=pytest.mark.full), "moe-tiny-capacity"])
def test_the_load_is_that_of_what_is_replayed(model: str, tmp_path: Path) -> None:
    package = load_package(build(model, tmp_path, replayable_routing=True, expert_load=True).path, "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    tokens, labels = torch.randint(0, 256, (2, 2, 8))
    given = torch.tensor([0, 3], dtype=torch.int16).expand(2, 8, 2, 2)
    made = package.call("microbatch", state, tokens, labels, given)
    assert torch.equal(made["routing"], given)
    loads = [t for n, t in state.items() if n.endswith(".load")]
    kept = 4 if model.endswith("capacity") else 16
    assert [t.tolist() for t in loads] == [[kept, 0, 0, kept, 0, 0, 0, 0]] * 2


def test_a_package_without_decisions_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = build("moe-tiny", tmp_path).path
    with pytest.raises(SystemExit) as end:
        main(package, [*OPTIONS.split(), "--out", str(tmp_path / "out"), "--record-routing", str(tmp_path / "d")])
    assert end.value.code == 2
    assert "mgraph compile MODEL --replayable-routing" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_a_model_without_routers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MgraphError, match="has no routers"):
        build("dense-tiny", tmp_path, replayable_routing=True)
