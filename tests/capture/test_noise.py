"""Random numbers of a forward become ops with a place; what draws them is eager torch or a written definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mgraph.capture import ModelSpec, capture
from mgraph.ir.graph import Module, Node
from mgraph.ir.interpreter import run

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Layer(nn.Module):
    def forward(self, x):
        {layer}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x
"""


def captured(tmp_path: Path, layer: str) -> Module:
    file = tmp_path / "noisy.py"
    file.write_text(MODEL.format(layer=layer))
    return capture(ModelSpec(f"{file}:Model"))


def nodes(module: Module, op: str) -> list[Node]:
    return [n for n in module.functions["forward"].nodes if n.op == op]


def test_every_place_has_a_name_and_the_number_of_its_layer(tmp_path: Path) -> None:
    module = captured(tmp_path, "return F.dropout(F.dropout(x, 0.1, self.training), 0.2, self.training)")
    found = [(n.attrs["site"], n.attrs["call"], n.attrs["p"]) for n in nodes(module, "dropout")]
    assert found == [
        ("layers.*", 0, 0.1),
        ("layers.*#1", 0, 0.2),
        ("layers.*", 1, 0.1),
        ("layers.*#1", 1, 0.2),
    ]
    assert {"rng.seed", "rng.step", "rng.sample"} <= set(module.state)
    assert not any(module.state[n].persist for n in ("rng.seed", "rng.step", "rng.sample"))


@pytest.mark.parametrize(
    ("layer", "low", "high"),
    [
        ("return x + torch.rand_like(x) if self.training else x", 0.0, 1.0),
        ("return x + torch.empty_like(x).uniform_(0.5, 1.5) if self.training else x", 0.5, 1.5),
    ],
)
def test_uniform_noise(tmp_path: Path, layer: str, low: float, high: float) -> None:
    module = captured(tmp_path, layer)
    tokens = torch.randint(11, (40, 30))
    embed = torch.randn(11, 8)
    state = {"embed.weight": embed, **{f"rng.{n}": torch.tensor(3) for n in ("seed", "step", "sample")}}
    inputs = {"tokens": tokens, "labels": torch.zeros_like(tokens)}
    noise = run(module, "forward", inputs, state)[0]["logits"] - F.embedding(tokens, embed)
    assert 2 * low - 1e-5 <= float(noise.min()) and float(noise.max()) <= 2 * high + 1e-5
    assert abs(float(noise.mean()) - (low + high)) < 0.03
    assert abs(float(noise.var()) - 2 / 12) < 0.01, "two independent draws"
    evaluated = run(module, "evaluation", inputs, state)[0]["logits"]
    assert torch.equal(evaluated, F.embedding(tokens, embed))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_whose_dropout_drops_next_to_nothing_is_attention(tmp_path: Path, causal: bool) -> None:
    call = f"F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], None, 1e-9, {causal}, scale=0.7, enable_gqa=True)"
    module = captured(
        tmp_path, f"q = x.unflatten(-1, (2, 4)).transpose(1, 2); return {call}.transpose(1, 2).flatten(2)"
    )
    assert len(nodes(module, "dropout")) == 2
    tokens, embed = torch.randint(11, (2, 5)), torch.randn(11, 8)
    state = {"embed.weight": embed, **{f"rng.{n}": torch.tensor(3) for n in ("seed", "step", "sample")}}
    found = run(module, "forward", {"tokens": tokens, "labels": torch.zeros_like(tokens)}, state)[0]["logits"]
    x = nn.functional.embedding(tokens, embed)
    for _ in range(2):
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        x = F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], is_causal=causal, scale=0.7, enable_gqa=True)
        x = x.transpose(1, 2).flatten(2)
    torch.testing.assert_close(found, x, rtol=1e-5, atol=1e-6)
