"""Emitted optimizer entries: groups against torch, fp16 with dynamic loss scaling, masters that begin unrounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.runtime.checkpoint import latest, load
from mgraph.runtime.mesh import current
from mgraph.runtime.options import parse
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from mgraph.runtime.train import run
from tests.end_to_end.builds import ZOO, batches, build, fill, loss_of

LR = torch.tensor(1e-2)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_groups_equal_torch_over_twenty_steps(optimizer: str, tmp_path: Path) -> None:
    rules = ("embed.*: frozen", "*.attn.*: lr=0.1, weight_decay=0", "*norm*: weight_decay=2")
    built = build("dense-tiny", tmp_path, optimizer=optimizer, groups=rules, weight_decay=0.1)
    package = load_package(built.path, "cpu")
    state = create_state(package.state_specs, 0, "cpu")
    assert not any(n.startswith("embed.weight.") for n in state)
    model = ZOO["dense-tiny"]()
    fill(model, state)
    groups: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        attention, norm = ".attn." in name, "norm" in name
        decay = 0.0 if attention else 0.2 if norm else 0.1
        parameter.requires_grad_(name != "embed.weight")
        groups.append({"params": [parameter], "lr": 1e-3 if attention else 1e-2, "weight_decay": decay})
    groups = [g for g in groups if g["params"][0].requires_grad]
    reference = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer](groups)
    trained = [p for p in model.parameters() if p.requires_grad]
    for tokens, labels in batches(20, seed=5):
        reference.zero_grad()
        (loss_of(model, tokens, labels) / (labels != -100).sum()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        reference.step()
        package.call("microbatch", state, tokens, labels)
        package.call("finish", state, LR)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=2e-3, atol=2e-4)
    # Adam's first steps are as large as the rate whatever the gradient: only the later ones tell rounding from error.
    drift = sum(float((state[n] - p.detach()).norm()) for n, p in model.named_parameters())
    moved = sum(float(p.detach().norm()) for p in model.parameters())
    assert drift < 1e-4 * moved


def test_fp16_scales_the_loss_until_its_gradients_fit(tmp_path: Path) -> None:
    """The scale follows torch's own update from what overflowed, skipped steps change nothing, and the loss falls."""
    built = build("dense-tiny", tmp_path, precision="fp16", loss_scale=2.0**24, loss_scale_interval=4)
    package = load_package(built.path, "cpu")
    state = create_state(package.state_specs, 0, "cpu")
    assert state["embed.weight"].dtype is torch.float16 and state["embed.weight.master"].dtype is torch.float32
    scale, clean = torch.full((1,), 2.0**24), torch.zeros(1, dtype=torch.int32)
    ((tokens, labels),) = batches(1)
    losses, skipped = [], 0
    for _ in range(30):
        before = {n: t.clone() for n, t in state.items()}
        package.call("microbatch", state, tokens, labels)
        gradients = [t for n, t in state.items() if n.endswith(".grad")]
        overflow = not all(bool(torch.isfinite(t).all()) for t in gradients)
        out = {n: t.clone() for n, t in package.call("finish", state, LR).items()}
        assert float(out["loss_scale"]) == float(scale)
        torch._amp_update_scale_(scale, clean, torch.tensor([float(overflow)]), 2.0, 0.5, 4)
        assert float(state["loss_scale"]) == float(scale) and int(state["clean_steps"]) == int(clean)
        skipped += overflow
        assert int(out["skipped"]) == skipped
        unchanged = all(torch.equal(state[n], before[n]) for n in state if n.endswith((".weight", ".master", ".m")))
        assert unchanged is overflow
        losses.append(float(out["loss"]))
    assert skipped >= 3 and losses[-1] < losses[0] - 1.0


def test_fp16_gradients_equal_those_of_fp32(tmp_path: Path) -> None:
    """At a scale that fits, unscaled fp16 gradients are those of fp32 up to fp16's rounding."""
    gradients = []
    for precision in ("fp32", "fp16"):
        package = load_package(build("dense-tiny", tmp_path / precision, precision=precision).path, "cpu")
        state = create_state(package.state_specs, 0, "cpu")
        if precision == "fp16":
            state["loss_scale"].fill_(64.0)
        for tokens, labels in batches(2):
            package.call("microbatch", state, tokens, labels)
        factor = float(state.get("loss_scale", torch.tensor(1.0)))
        gradients.append({n: t / factor for n, t in state.items() if n.endswith(".grad")})
    for name, expected in gradients[0].items():
        assert float((gradients[1][name] - expected).norm() / expected.norm()) < 1e-2, name


def test_masters_begin_as_drawn_and_parameters_as_their_rounding(tmp_path: Path) -> None:
    low = create_state(load_package(build("dense-tiny", tmp_path, precision="bf16").path, "cpu").state_specs, 3, "cpu")
    full = create_state(load_package(build("dense-tiny", tmp_path / "f").path, "cpu").state_specs, 3, "cpu")
    for name in (n.removesuffix(".master") for n in low if n.endswith(".master")):
        assert torch.equal(low[f"{name}.master"], full[name]), name
        assert torch.equal(low[name], full[name].bfloat16()), name


def test_the_loss_scale_goes_on_in_a_resumed_run(tmp_path: Path) -> None:
    """8 steps, the first ones skipped, against 5 and then 3: the same state, bit for bit."""
    built = build("dense-tiny", tmp_path, precision="fp16", loss_scale=2.0**20, loss_scale_interval=2)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n}: the quick brown fox jumps over {n * n % 97} lazy dogs\n" for n in range(200)))

    def train(out: str, steps: int, *arguments: str) -> dict[str, torch.Tensor]:
        common = ["--batch-size", "2", "--seq-len", "16", "--decay", "constant", "--sample-length", "0"]
        common += ["--eval-batches", "1", "--data", str(text), "--out", str(tmp_path / out), "--steps", str(steps)]
        run(parse([*common, *arguments], "train.py"), built.path)
        package, found = load_package(built.path, "cpu"), latest(tmp_path / out / "checkpoints")
        assert found is not None
        state = create_state(package.state_specs, 0, "cpu")
        load(found, state, package.state_specs, current())
        return state

    whole = train("whole", 8)
    train("parts", 5)
    parts = train("parts", 8, "--resume")
    assert 0 < int(whole["skipped"]) < 8 and float(whole["loss_scale"]) != 2.0**20
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
