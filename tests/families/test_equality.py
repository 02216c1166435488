"""Every family, raised and in torch's own ops, in f32 and bf16: loss and all gradients equal eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mgraph.ir.interpreter import run
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from tests.end_to_end.builds import Lift, adamw, batches, eager_step, fill, loss_of, relative
from tests.families.builds import Family, compile_family, masks, prepared, replayed
from tests.families.configs import CONFIGS
from tests.sampling import sampled

MODES = {"raised": "", "aten": "raise-*"}
PRECISIONS = ("fp32", "bf16")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = [(name, mode, precision) for name in CONFIGS for mode in MODES for precision in PRECISIONS]
ALWAYS = [("gpt2", "raised", "fp32")]
LONG = [case for case in CASES if case[:2] == ("gpt-oss", "aten")]


def gradients(family: Family, dtype: torch.dtype, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss and gradients of the eager model in a dtype, under the masks of the package's dropout."""
    model = family.eager(dtype=dtype)
    if dtype is torch.float64:
        model.double()  # some weights of routers are float32 in a model of any dtype
    fill(model, state)
    # Torch's grouped product takes no float64; a loop over the experts is the same.
    model.config._experts_implementation = "eager"  # type: ignore[union-attr]
    (tokens, labels), *_ = batches(1)
    with replayed(masks(family.compilation.module, state, tokens)):
        if dtype is torch.float64:
            with Lift():  # type: ignore[no-untyped-call]
                loss = loss_of(model, tokens, labels)
                loss.backward()
        else:
            loss = loss_of(model, tokens, labels)
            loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize(("name", "mode", "precision"), sampled(CASES, 3, ALWAYS, LONG))
def test_loss_and_every_gradient_equal_eager(name: str, mode: str, precision: str, tmp_path: Path) -> None:
    family = compile_family(name, tmp_path, disable=MODES[mode], precision=precision)
    package = load_package(family.path, "cpu")
    state = prepared(family, create_state(package.state_specs, 3, "cpu"))
    eager = gradients(family, _DTYPES[precision], state)
    exact = gradients(family, torch.float64, state)
    (tokens, labels), *_ = batches(1)
    out, new = run(family.compilation.module, "microbatch", {"tokens": tokens, "labels": labels}, state, lifted=True)
    emitted = package.call("microbatch", state, tokens, labels)
    assert relative(out["loss_sum"], exact["loss"]) <= 1e-10
    slack = 1e-5 if precision == "fp32" else 4e-3
    assert relative(emitted["loss_sum"], exact["loss"]) <= 1.5 * relative(eager["loss"], exact["loss"]) + slack
    # Some gradients are zero but for rounding (softmax forgets a bias of the keys).
    least = 1e-6 * max(float(t.norm()) for n, t in exact.items() if n != "loss")
    for parameter in exact.keys() - {"loss"}:
        wanted, own = exact[parameter], relative(eager[parameter], exact[parameter], least)
        assert relative(new[f"{parameter}.grad"], wanted, least) <= 1e-10, parameter
        assert relative(state[f"{parameter}.grad"], wanted, least) <= 1.5 * own + slack, parameter


class Masters:
    """AdamW over f32 copies of a model's parameters, which become the copies rounded."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.masters = nn.ParameterList([p.detach().float() for p in self.parameters])
        self.optimizer = adamw(self.masters)

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.copy_(master)


@pytest.mark.parametrize(("name", "mode", "precision"), sampled(CASES, 1, ALWAYS, LONG))
def test_a_short_run_gives_the_curve_of_eager(name: str, mode: str, precision: str, tmp_path: Path) -> None:
    """In bf16, eager too has an optimizer over copies of the parameters in f32."""
    family = compile_family(name, tmp_path, disable=MODES[mode], precision=precision)
    package = load_package(family.path, "cpu")
    state = create_state(package.state_specs, 0, "cpu")
    model = family.eager(dtype=_DTYPES[precision])
    fill(model, state)
    optimizer = Masters(model) if precision == "bf16" else adamw(model)
    curve, expected = [], []
    for step, (tokens, labels) in enumerate(batches(1, seed=7) * 8):
        if "rng.step" in state:
            state["rng.step"].fill_(step)
        with replayed(masks(family.compilation.module, state, tokens)):
            expected.append(eager_step(model, optimizer, tokens, labels).item())
        package.call("microbatch", state, tokens, labels)
        curve.append(float(package.call("finish", state, torch.tensor(1e-3))["loss"]))
    assert expected[-1] < expected[0]
    torch.testing.assert_close(
        torch.tensor(curve), torch.tensor(expected), rtol=1e-4 if precision == "fp32" else 1e-2, atol=0
    )
