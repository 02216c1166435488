"""Losses of routers count the tokens of all data ranks: a microbatch over a mesh against the model on the joint batch.

The reference is the model itself in float64, on the ranks' sequences as one batch. Ranks have unequally many targets.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mgraph import models
from mgraph.compiler import build_module
from mgraph.ir.graph import StateKind
from mgraph.recipe import Recipe
from tests.all_ranks import difference
from tests.end_to_end.builds import Lift
from tests.end_to_end.meshes import Batch, Ranks, Row, initial_state, steps_of
from tests.end_to_end.processes import Runs, assert_close
from tests.sampling import sampled

MESHES = [
    ("ep=2", {}),
    ("dp=2", {}),
    ("fsdp=2", {}),
    ("dp=2,ep=2", {}),
    ("fsdp=2,ep=fsdp", {"recompute": "full"}),
    ("dp=2,tp=2", {"sequence_parallel": True}),
    ("dp=2,fsdp=2", {"zero": 2}),
    ("ep=4", {"dispatch": "allgather"}),
    ("ep=2", {"ep_chunks": 2}),
    ("ep=2", {"arch": "sm_90a", "precision": "bf16"}),
    ("dp=2", {"arch": "sm_90a", "overlap": True, "recompute": "full"}),
]


def joint_gradients(state: dict[str, torch.Tensor], batches: list[Batch]) -> dict[str, torch.Tensor]:
    """The loss sum, and the gradient of each parameter, of the model on all ranks' sequences as one batch."""
    model = models.get("moe", "tiny-losses").double().train()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(state[name])
    tokens, labels = (torch.cat([batch.inputs[name] for batch in batches]) for name in ("tokens", "labels"))
    with Lift():  # type: ignore[no-untyped-call]
        out = model(tokens)
    loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = loss + out.aux_loss * (labels != -100).sum()
    loss.backward()
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss_sum": loss.detach(), **gradients}


@pytest.mark.parametrize(("mesh", "options"), sampled(MESHES, 4))
def test_ranks_add_up_to_the_joint_batch(mesh: str, options: dict[str, object]) -> None:
    module = build_module(Recipe(model="moe-tiny-losses", mesh=mesh, **{"arch": "none", **options})).module  # type: ignore[arg-type]
    sizes = {axis.name: axis.size or 1 for axis in module.mesh if not axis.of}
    ranks = Ranks(module, sizes, initial_state(module))
    counted = [node.op for node in module.functions["layer.fwd"].nodes if node.op.startswith("all_reduce")]
    assert mesh != "ep=2" or counted == ["all_reduce_start"]  # while tokens are on their way
    data_ranks = max(ranks.data_rank(at) for at in ranks.at) + 1
    batches = steps_of(module, data_ranks, 1)[0][0]
    expected = joint_gradients(ranks.whole(StateKind.PARAM, StateKind.BUFFER), batches)
    outputs = ranks.run_batches("microbatch", 0, batches)
    found = {"loss_sum": sum(out["loss_sum"] for out in outputs), **ranks.whole(StateKind.GRAD)}
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert difference(tensor, found[name], 1e-6) <= 1e-9, name


def test_local_counts_are_those_of_each_rank() -> None:
    """Then nothing is added up in a microbatch, and the loss of the joint batch is another."""
    module = build_module(Recipe(model="moe-tiny-losses", mesh="dp=2", arch="none", router_loss_counts="local")).module
    assert not {"joint_sum", "axis_share"} & {node.op for _, node in module.walk()}
    ranks = Ranks(module, {"dp": 2}, initial_state(module))
    batches = steps_of(module, 2, 1)[0][0]
    expected = joint_gradients(ranks.whole(StateKind.PARAM, StateKind.BUFFER), batches)
    total = sum(out["loss_sum"] for out in ranks.run_batches("microbatch", 0, batches))
    assert difference(expected["loss_sum"], torch.as_tensor(total)) > 1e-7


@pytest.mark.full
def test_processes_train_as_one_with_the_joint_microbatch(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    row = Row("moe-tiny-losses", "ep=2", (("router_loss_counts", "global"),))
    alone = runs.train(row.alone, "--batch-size", "6", "--accumulate", "2")
    assert_close(alone, runs.train(row))
