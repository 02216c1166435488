"""The derived optimizer entry against torch.optim.AdamW with clipping, and data parallelism on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from mgraph.errors import OptionError, PassError
from mgraph.ir.graph import Module
from mgraph.ir.interpreter import run, run_ranks
from mgraph.passes.adamw import AdamW
from mgraph.passes.autodiff import Autodiff
from mgraph.passes.base import Report
from mgraph.passes.data_parallel import DataParallel
from mgraph.passes.freeze import Freeze
from mgraph.passes.in_place import InPlace
from tests.passes.models import mlp_module, random_batch, random_state

Tensors = dict[str, torch.Tensor]


def trainer(loss_scale: float = 0.0, **options: Any) -> Module:
    return AdamW(**options).run(Autodiff(loss_scale).run(mlp_module(), Report()), Report())


def step(module: Module, state: Tensors, batches: list[Tensors], lr: float) -> tuple[Tensors, Tensors]:
    """One optimizer step over microbatches; in float64 where the state is."""
    lifted = state["embed"].dtype == torch.float64
    for batch in batches:
        _, new = run(module, "microbatch", batch, state, lifted=lifted)
        state = {**state, **new}
    out, new = run(module, "finish", {"lr": torch.tensor(lr, dtype=state["embed"].dtype)}, state, lifted=lifted)
    return out, {**state, **new}


@pytest.mark.parametrize("max_norm", [0.0, 0.3])
def test_equals_torch_adamw(max_norm: float) -> None:
    module = trainer(weight_decay=0.1, max_norm=max_norm)
    state = random_state(module, dtype=torch.float64)
    forward = mlp_module()
    leaves = {n: state[n].clone().requires_grad_() for n in forward.state}
    optimizer = torch.optim.AdamW(leaves.values(), weight_decay=0.1)
    for index in range(5):
        batches = [random_batch(seed=10 * index), random_batch(seed=10 * index + 1)]
        lr = 0.01 / (index + 1)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        outs = [run(forward, "forward", batch, leaves)[0] for batch in batches]
        loss = sum(o["loss_sum"] for o in outs) / sum(o["count"] for o in outs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), max_norm or 1e9)
        optimizer.step()
        out, state = step(module, state, batches, lr)
        torch.testing.assert_close(out["loss"], loss.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(out["grad_norm"], norm, rtol=1e-10, atol=0)
        for name, leaf in leaves.items():
            torch.testing.assert_close(state[name], leaf.detach(), rtol=1e-10, atol=1e-12)
            assert not state[f"{name}.grad"].any()
    assert state["step"].item() == 5


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_data_parallel_ranks_equal_one_rank_with_all_microbatches(ranks: int) -> None:
    single = trainer()
    parallel = DataParallel().run(single, Report())
    batches = [random_batch(seed=i) for i in range(ranks)]
    lr = torch.tensor(0.01)
    _, expected = step(single, random_state(single), batches, 0.01)
    states = [random_state(parallel) for _ in range(ranks)]
    for entry, inputs in (("microbatch", batches), ("finish", [{"lr": lr}] * ranks)):
        outputs, new = run_ranks(parallel, entry, inputs, states, {"dp": ranks})
        states = [{**s, **n} for s, n in zip(states, new, strict=True)]
    assert len({float(o["loss"]) for o in outputs}) == 1
    for state in states:
        for name in expected:
            torch.testing.assert_close(state[name], expected[name], rtol=1e-5, atol=1e-7)


def test_updates_are_made_in_place() -> None:
    report = Report()
    before = DataParallel().run(trainer(), Report())
    module = InPlace().run(before, report)
    ops = [n.op for _, n in module.walk()]
    assert not {"accumulate", "adamw", "zero"} & set(ops), report.near_misses
    assert "accumulate_" in ops and "adamw_" in ops and "zero_" in ops
    state = random_state(before)
    for entry, batch in (("microbatch", random_batch()), ("finish", {"lr": torch.tensor(0.1)})):
        for a, b in zip(run(before, entry, batch, state), run(module, entry, batch, state), strict=True):
            assert all(torch.equal(a[n], b[n]) for n in a)


GROUPS = ("embed: lr=0.1, weight_decay=0", "*.down: weight_decay=2.5", "layers.1.*: lr=3")


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_groups_equal_torch_param_groups_over_twenty_steps(optimizer: str) -> None:
    """The first rule that fits is taken: layers.1.down decays more, at the plain rate."""
    module = trainer(optimizer=optimizer, groups=GROUPS, weight_decay=0.1, max_norm=0.0)
    state = random_state(module, dtype=torch.float64)
    forward = mlp_module()
    leaves = {n: state[n].clone().requires_grad_() for n in forward.state}
    settings = {"embed": (0.1, 0.0), "layers.1.up": (3.0, 0.1)}
    settings |= {f"layers.{i}.down": (1.0, 0.25) for i in (0, 1)}
    groups = [
        {"params": [leaf], "rate": settings.get(n, (1.0, 0.1))[0], "weight_decay": settings.get(n, (1.0, 0.1))[1]}
        for n, leaf in leaves.items()
    ]
    reference = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer](groups)
    for index in range(20):
        batch = random_batch(seed=index)
        for group in reference.param_groups:
            group["lr"] = 0.01 * group["rate"]
        reference.zero_grad()
        out, _ = run(forward, "forward", batch, leaves)
        (out["loss_sum"] / out["count"]).backward()
        reference.step()
        _, state = step(module, state, [batch], 0.01)
        for name, leaf in leaves.items():
            torch.testing.assert_close(state[name], leaf.detach(), rtol=1e-10, atol=1e-12)


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    groups = ("embed|layers.0.*: frozen",)
    module = AdamW(groups=groups).run(Autodiff().run(Freeze(groups).run(mlp_module(), Report()), Report()), Report())
    kept = {n for n, s in module.state.items() if s.kind.value in ("grad", "moment")}
    assert kept == {f"layers.1.{p}.{k}" for p in ("up", "down") for k in ("grad", "m", "v")}
    # Nothing in front of the first trained layer is differentiated.
    backward = [n for n in module.functions["microbatch"].nodes if n.phase.value == "backward"]
    assert [n.attrs["callee"] for n in backward if n.op == "call"] == ["layer.bwd"]
    assert not any("embedding" in n.op for n in backward)
    state = random_state(module)
    _, after = step(module, state, [random_batch()], 0.1)
    assert torch.equal(after["embed"], state["embed"]) and torch.equal(after["layers.0.up"], state["layers.0.up"])
    assert not torch.equal(after["layers.1.up"], state["layers.1.up"])
    with pytest.raises(PassError, match="every parameter is frozen"):
        Freeze(("*: frozen",)).run(mlp_module(), Report())
    assert Freeze(("*: lr=2",)).run(module, Report()) is module


def test_wrong_options_are_refused() -> None:
    with pytest.raises(OptionError, match="matches no parameter") as caught:
        trainer(groups=("layers.0.upp: lr=2",))
    assert "did you mean 'layers.0.up'" in str(caught.value)
    with pytest.raises(OptionError, match="no parameters left"):
        trainer(groups=("*: lr=2", "embed: lr=3"))
    with pytest.raises(PassError, match="beta2 is 1"):
        AdamW(beta2=1.0)
    with pytest.raises(PassError, match="'sgd' is unknown"):
        AdamW(optimizer="sgd")


@pytest.mark.parametrize("place", ["acc.loss_sum", "layers.0.up.grad"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(place: str, value: float) -> None:
    module = InPlace().run(DataParallel().run(trainer(), Report()), Report())
    state = random_state(module)
    _, state = step(module, state, [random_batch()], 0.1)
    _, new = run(module, "microbatch", random_batch(seed=5), state)
    broken = {**state, **new}
    broken[place] = broken[place].clone()
    broken[place].view(-1)[0] = value
    out, after = run(module, "finish", {"lr": torch.tensor(0.1)}, copy.deepcopy(broken))
    for name, declared in module.state.items():
        if declared.persist and name != "skipped":
            assert torch.equal(after.get(name, broken[name]), state[name]), name
        elif name != "skipped":
            assert not after[name].any(), name
    assert int(out["skipped"]) == 1 == int(after["skipped"])


def test_the_loss_scale_follows_torch_grad_scaler() -> None:
    """Overflows at chosen steps: the same trajectory of the scale, and the updates of unscaled gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, growth_factor=2.0, backoff_factor=0.5)
    module = trainer(loss_scale=1024.0, interval=3, weight_decay=0.0, max_norm=0.5)
    state = {**random_state(module), "loss_scale": torch.tensor(1024.0)}
    forward = mlp_module()
    leaves = {n: state[n].clone().requires_grad_() for n in forward.state}
    optimizer = torch.optim.AdamW(leaves.values(), lr=0.01, weight_decay=0.0)
    scales = []
    for index in range(14):
        batch = random_batch(seed=index)
        _, new = run(module, "microbatch", batch, state)
        state = {**state, **new}
        optimizer.zero_grad()
        out, _ = run(forward, "forward", batch, leaves)
        scaler.scale(out["loss_sum"] / out["count"]).backward()
        if index in (0, 1, 6, 9):
            for gradient in (leaves["embed"].grad, state["embed.grad"]):
                assert gradient is not None
                gradient[3, 1] = float("inf")
        scales.append(scaler.get_scale())
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        made, new = run(module, "finish", {"lr": torch.tensor(0.01)}, state)
        state = {**state, **new}
        assert float(made["loss_scale"]) == scales[-1] and float(state["loss_scale"]) == scaler.get_scale()
        torch.testing.assert_close(made["grad_norm"], norm, rtol=1e-5, atol=0)
        for name, leaf in leaves.items():
            torch.testing.assert_close(state[name], leaf.detach(), rtol=1e-5, atol=1e-6)
    assert scales[:6] == [1024.0, 512.0, 256.0, 256.0, 256.0, 512.0]
    assert int(state["step"]) == 10 and int(state["skipped"]) == 4
