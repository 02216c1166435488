"""Losses of a user's own that take something of all tokens: ranks' sums against those of one device with all tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mgraph.compiler import Compilation, build_module
from mgraph.errors import PassError
from mgraph.ir.graph import StateKind
from mgraph.recipe import Recipe
from tests.all_ranks import difference
from tests.end_to_end.meshes import Batch, Ranks, initial_state, steps_of

FILE = """
import torch
import torch.nn.functional as F
from torch import nn
from types import SimpleNamespace


class Model(nn.Module):
    def __init__(self, aux):
        super().__init__()
        self.embed, self.gate, self.head = nn.Embedding(32, 8), nn.Linear(8, 4), nn.Linear(8, 32)
        self.aux = aux

    def forward(self, tokens):
        x = self.embed(tokens)
        logits = self.gate(x).flatten(0, 1)
        probabilities = logits.softmax(-1)
        own = self.aux(logits, probabilities, probabilities.topk(2).indices)
        used = torch.tanh(logits.sum(-1)).view_as(tokens)[..., None]
        return SimpleNamespace(logits=self.head(x * used), aux_loss=own)


def published(logits, p, chosen):  # as transformers has it
    mask = F.one_hot(chosen, 4).float()
    return 4 * (mask.mean(0) * p.mean(0)[None]).sum()


def by_number(logits, p, chosen):
    counts = torch.zeros(4, dtype=p.dtype).index_add(0, chosen.flatten(), torch.ones_like(chosen.flatten()).to(p.dtype))
    return (counts / chosen.numel() * p.sum(0) / p.shape[0]).sum() * 4 + 0.1


def squared(logits, p, chosen):  # a gradient flows to both factors, and to what is not linear
    return (p.mean(0) ** 2).sum() + 0.1 * p.sum(0).std() / p.sum() - p.mean(0).log().mean()


def largest(logits, p, chosen):
    return p.mean(0).sum() * logits.amax()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        made = torch.tanh(self.up(x))
        return x + self.down(made), made.square().sum()


class Layered(nn.Module):  # sums of layers, by Python's sum, over a size
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, tokens):
        x, losses = self.embed(tokens), []
        for layer in self.layers:
            x, loss = layer(x)
            losses.append(loss)
        return SimpleNamespace(logits=self.head(x), aux_loss=sum(losses) / tokens.numel())


def of_layers():
    return Layered()


def of_published():
    return Model(published)


def of_by_number():
    return Model(by_number)


def of_squared():
    return Model(squared)


def of_largest():
    return Model(largest)
"""
MEAN = '''
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))


def loss(outputs, batch):
    """The mean of a microbatch, which counts as one."""
    losses = nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return losses.mean(), torch.ones((), dtype=torch.int64)
'''


def compiled(directory: Path, factory: str, mesh: str, text: str = FILE, counts: str = "global") -> Compilation:
    (directory / "losses.py").write_text(text)
    model = f"{directory}/losses.py:{factory}"
    return build_module(Recipe(model=model, mesh=mesh, arch="none", router_loss_counts=counts))


def together(ranks: Ranks, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """The sum of the ranks' losses, and the gradients of a microbatch."""
    outputs = ranks.run_batches("microbatch", 0, batches)
    return {"loss_sum": torch.stack([o["loss_sum"] for o in outputs]).sum(), **ranks.whole(StateKind.GRAD)}


@pytest.mark.parametrize(
    ("loss", "mesh"),
    [("published", "dp=2"), ("by_number", "fsdp=2"), ("squared", "dp=2"), ("layers", "dp=2"), ("layers", "fsdp=2")],
)
def test_ranks_add_up_to_one_device_with_all_tokens(loss: str, mesh: str, tmp_path: Path) -> None:
    alone, module = (compiled(tmp_path, f"of_{loss}", each).module for each in ("dp=1", mesh))
    state = initial_state(alone)
    ranks = Ranks(module, {mesh[:-2]: 2}, state)
    batches = steps_of(alone, 2, 1)[0][0]
    found = together(ranks, batches)
    joint = {name: torch.cat([batch.inputs[name] for batch in batches]) for name in batches[0].inputs}
    expected = together(Ranks(alone, {"dp": 1}, state), [Batch(joint, 0)])
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert difference(tensor, found[name], 1e-6) <= 1e-9, name


@pytest.mark.parametrize(("factory", "text"), [("of_largest", FILE), ("model", MEAN)])
def test_what_is_no_sum_over_tokens_stays_of_each_rank(factory: str, text: str, tmp_path: Path) -> None:
    done = compiled(tmp_path, factory, "dp=2", text)
    assert not {"joint_sum", "axis_share"} & {node.op for _, node in done.module.walk()}
    (report,) = (result.report for result in done.results if result.name == "joint-losses")
    assert not report.matches and [miss.guard for miss in report.near_misses] == ["sums over tokens"]


@pytest.mark.parametrize("factory", ["of_published", "of_largest"])
def test_losses_may_stay_those_of_each_rank(factory: str, tmp_path: Path) -> None:
    """Whether ranks' sums could be put together or not."""
    done = compiled(tmp_path, factory, "dp=2", counts="local")
    assert not {"joint_sum", "axis_share"} & {node.op for _, node in done.module.walk()}
    (report,) = (result.report for result in done.results if result.name == "joint-losses")
    assert not report.matches and not report.near_misses


@pytest.mark.parametrize("mesh", ["dp=*", "tp=2", "dp=1"])
def test_where_no_loss_is_none_stays(mesh: str) -> None:
    recipe = Recipe(model="dense-tiny", mesh=mesh, arch="none", router_loss_counts="local")
    with pytest.raises(PassError, match="no experts were found in the model, and no loss of its own") as caught:
        build_module(recipe)
    assert caught.value.where == "--router-loss-counts" and caught.value.hint


def test_experts_without_a_loss_take_either_count() -> None:
    assert build_module(Recipe(model="moe-tiny", mesh="dp=2", arch="none", router_loss_counts="local"))
