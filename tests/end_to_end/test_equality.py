"""The emitted step against eager PyTorch autograd and torch.optim.AdamW, with the same weights and batches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mgraph.errors import PackageError
from mgraph.ir.interpreter import run
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from tests.end_to_end.builds import MODELS, Build, Lift, adamw, batches, build, eager_step, fill, loss_of, relative
from tests.sampling import sampled


def test_loss_and_every_gradient_equal_autograd(built: Build) -> None:
    package = load_package(built.path, "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    model = built.eager()
    fill(model, state)
    for tokens, labels in batches(2, batch=3, seq=21) + batches(1, batch=1, seq=64):
        model.zero_grad()
        loss = loss_of(model, tokens, labels)
        loss.backward()
        for name, tensor in state.items():
            if name.endswith(".grad"):
                tensor.zero_()
        out = package.call("microbatch", state, tokens, labels)
        assert relative(out["loss_sum"], loss.detach()) <= 1e-5
        assert int(out["count"]) == int((labels != -100).sum())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert relative(state[f"{name}.grad"], parameter.grad) <= 1e-5, name


def test_lifted_gradients_equal_autograd_in_float64(built: Build) -> None:
    module = built.compilation.module
    package = load_package(built.path, "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    model = built.eager().double()
    fill(model, state)
    (tokens, labels), *_ = batches(1)
    with Lift():  # type: ignore[no-untyped-call]
        loss = loss_of(model, tokens, labels)
        loss.backward()
    out, new = run(module, "microbatch", {"tokens": tokens, "labels": labels}, state, lifted=True)
    assert relative(out["loss_sum"], loss.detach()) <= 1e-10
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert relative(new[f"{name}.grad"], parameter.grad) <= 1e-10, name


@pytest.mark.parametrize("built", sampled(MODELS, 0, always=["dense-tiny", "moe-tiny"]), indirect=True)
def test_fifty_steps_give_the_curve_of_eager(built: Build) -> None:
    package = load_package(built.path, "cpu")
    state = create_state(package.state_specs, 0, "cpu")
    model = built.eager()
    fill(model, state)
    optimizer = adamw(model)
    curve, expected = [], []
    for tokens, labels in batches(50, seed=7):
        expected.append(eager_step(model, optimizer, tokens, labels).item())
        package.call("microbatch", state, tokens, labels)
        curve.append(float(package.call("finish", state, torch.tensor(1e-3))["loss"]))
    assert expected[-1] < expected[0]
    torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), rtol=1e-4, atol=0)


def test_evaluate_and_predict_equal_eager(built: Build) -> None:
    package = load_package(built.path, "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    model = built.eager().eval()
    fill(model, state)
    for tokens, labels in batches(1) + batches(1, batch=1, seq=2):
        with torch.no_grad():
            out = model(tokens)
            loss = loss_of(model, tokens, labels)
        logits = getattr(out, "logits", out)
        torch.testing.assert_close(package.call("predict", state, tokens)["logits"], logits, rtol=1e-4, atol=1e-5)
        assert relative(package.call("evaluate", state, tokens, labels)["loss_sum"], loss) <= 1e-5


@pytest.mark.parametrize("name", ["dense-tiny", "moe-tiny"])
def test_the_all_aten_fallback_trains_the_same(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    built = build(name, tmp_path_factory.mktemp("aten"), disable="raise-*")
    assert not {"rms_norm", "attention", "moe_route"} & {n.op for _, n in built.compilation.module.walk()}
    package = load_package(built.path, "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    model = built.eager()
    fill(model, state)
    (tokens, labels), *_ = batches(1)
    loss_of(model, tokens, labels).backward()
    package.call("microbatch", state, tokens, labels)
    for name_, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert relative(state[f"{name_}.grad"], parameter.grad) <= 1e-5, name_


def test_a_step_edited_into_failure_is_named_with_its_line(built: Build, tmp_path: Path) -> None:
    directory = tmp_path / "package"
    shutil.copytree(built.path, directory)
    lines = (directory / "step.py").read_text().replace("rt.cross_entropy(", "rt.no_such_op(").splitlines()
    (directory / "step.py").write_text("\n".join(lines) + "\n")
    package = load_package(directory, "cpu")
    state = create_state(package.state_specs, 0, "cpu")
    (batch,) = batches(1)
    with pytest.raises(PackageError, match=r"microbatch failed: AttributeError.*no_such_op") as caught:
        package.call("microbatch", state, *batch)
    number = int(str(caught.value.where).rpartition(":")[2])
    assert "no_such_op" in lines[number - 1]
    assert "edited" in str(caught.value)
