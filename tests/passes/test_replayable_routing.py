"""Decisions as inputs and outputs: with none given all results are bitwise those of before."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgraph.capture import ModelSpec, capture
from mgraph.errors import PassError
from mgraph.ir.graph import Module
from mgraph.passes.pipeline import run_pipeline
from mgraph.passes.verify import verify_pipeline

RAISED = (
    "outline,canonicalize,constant-fold,cse,dce,raise-norm,raise-rope,raise-attention,raise-glu,raise-moe,raise-loss,"
    "cse,dce"
)


def moe(size: str) -> Module:
    return capture(ModelSpec(f"moe-{size}"))


@pytest.mark.parametrize("size", ["tiny", "tiny-grouped", "tiny-capacity"])
def test_every_pass_keeps_the_numbers(size: str) -> None:
    results = verify_pipeline(moe(size), f"{RAISED},replayable-routing,autodiff,recompute{{mode=full}}")
    assert [r.name for r in results if r.measured["verify"]["status"] != "verified"] == []


def test_routers_have_the_names_of_their_layers() -> None:
    module, _ = run_pipeline(moe("tiny-capacity"), f"{RAISED},replayable-routing")
    (node,) = (n for n in module.entry_function("forward").nodes if n.op == "stack_choices")
    assert node.attrs["layers"] == ("layers.0.ffn.router", "layers.1.ffn.router")
    assert node.attrs["experts"] == (8, 8)
    assert module.entries["forward"].outputs == ("loss_sum", "count", "logits", "routing")
    (layer,) = (f for f in module.functions.values() if any(n.op == "moe_dispatch" for n in f.nodes))
    chosen = next(n for n in layer.nodes if n.op == "replay_choice").result
    assert {"moe_weigh", "cast", "moe_capacity"} <= {n.op for n in layer.nodes if chosen in n.operands}


ROUTERS = """
import torch
from torch import nn
from mgraph import models
from mgraph.models.custom_router import use_router


class Base(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.d_model, config.num_experts, bias=False)


class Sorted(Base):
    def forward(self, tokens):
        values, indices = self.proj(tokens).softmax(-1).sort(-1, descending=True)
        return values[:, :2], indices[:, :2]


class Part(Base):
    def forward(self, tokens):
        values, indices = self.proj(tokens).softmax(-1).topk(3, -1)
        return values[:, :2], indices[:, :2]


class Shared(Base):
    def forward(self, tokens):
        scores = self.proj(tokens).sigmoid()
        values, indices = scores[:, 1:].topk(1, -1)
        return torch.cat([scores[:, :1], values], 1), torch.cat([torch.zeros_like(indices), indices + 1], 1)


class Dropping(Base):
    def forward(self, tokens):
        values, indices = self.proj(tokens).softmax(-1).topk(2, -1)
        return values, torch.where(values < 0.13, 8, indices)


class Best(Base):
    def forward(self, tokens):
        return self.proj(tokens).softmax(-1).max(-1, keepdim=True)


class Gathered(Base):
    def forward(self, tokens):
        scores = self.proj(tokens).softmax(-1)
        indices = scores.argsort(-1)[:, -2:]
        return scores.gather(1, indices), indices


class Numbered(Base):
    def forward(self, tokens):
        scores = self.proj(tokens).softmax(-1)
        numbers = torch.arange(8).expand(tokens.shape[0], -1)
        indices = numbers.gather(1, scores.topk(2, -1).indices)
        return (scores + numbers.float() * 0.01).gather(1, indices), indices


def model():
    return use_router(models.get("moe", "tiny"), NAME)
"""


def own_router(name: str, directory: Path) -> Module:
    file = directory / f"{name}.py"
    file.write_text(ROUTERS.replace("NAME", name))
    return capture(ModelSpec(f"{file}:model"))


@pytest.mark.parametrize("name", ["Sorted", "Part", "Shared", "Dropping"])
def test_weights_past_the_indices_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PassError, match="weights of experts come from the choice that") as caught:
        run_pipeline(own_router(name, tmp_path), f"{RAISED},replayable-routing")
    assert f"{name}.py:" in str(caught.value.where) and "scores.gather(-1, experts)" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["Best", "Gathered", "Numbered"])
def test_weights_at_the_indices_follow_what_is_given(name: str, tmp_path: Path) -> None:
    module, _ = run_pipeline(own_router(name, tmp_path), f"{RAISED},replayable-routing")
    (layer,) = (f for f in module.functions.values() if any(n.op == "moe_dispatch" for n in f.nodes))
    made = layer.producers()
    (combine,) = (n for n in layer.nodes if n.op == "moe_combine")
    ahead = [made[combine.operands[1]]]
    for node in ahead:
        ahead += [made[v] for v in node.operands if v in made and made[v] not in ahead]
    gathers = [n for n in ahead if n.op == "aten.gather.default"]
    assert made[gathers[0].operands[1]].op == "replay_choice"
