"""The derived optimizer entry against torch.optim.AdamW with clipping, and data parallelism on all ranks."""

from __future__ import annotations

import pytest
import torch

from mgraph.ir.graph import Module
from mgraph.ir.interpreter import run, run_ranks
from mgraph.passes.adamw import AdamW
from mgraph.passes.autodiff import Autodiff
from mgraph.passes.base import Report
from mgraph.passes.data_parallel import DataParallel
from mgraph.passes.in_place import InPlace
from tests.passes.models import mlp_module, random_batch, random_state

Tensors = dict[str, torch.Tensor]


def trainer(**options: float) -> Module:
    return AdamW(**options).run(Autodiff().run(mlp_module(), Report()), Report())


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
