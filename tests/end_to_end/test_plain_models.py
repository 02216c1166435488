"""Small models of a user's own, with what published code writes: gradients against eager, raised and in torch's ops."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from mgraph.compiler import compile_package
from mgraph.recipe import Recipe
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from tests.end_to_end.builds import fill, loss_of, relative

SOURCE = '''
"""Norm with torch's own epsilon, and rotation of neighbours as complex numbers."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.query = nn.Linear(16, 16, bias=False)

    def forward(self, x, turn):
        batch, length, width = x.shape
        q = self.query(self.norm(x)).view(batch, length, 2, 8)
        pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        turned = torch.view_as_real(pairs * turn[None, :, None]).flatten(3).type_as(q)
        return x + turned.reshape(batch, length, width)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens):
        rates = 100.0 ** -(torch.arange(0, 8, 2).float() / 8)
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), rates)
        turn = torch.polar(torch.ones_like(angles), angles)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, turn)
        return self.head(x)
'''


def _model(file: Path) -> nn.Module:
    spec = importlib.util.spec_from_file_location("plain", file)
    assert spec is not None and spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    model: nn.Module = source.Model()
    return model


@pytest.mark.parametrize("disable", ["", "raise-*"])
def test_complex_rotation_and_norm_without_epsilon(tmp_path: Path, disable: str) -> None:
    file = tmp_path / "plain.py"
    file.write_text(SOURCE)
    output = str(tmp_path / "package")
    made = compile_package(Recipe(model=f"{file}:Model", output=output, arch="none", disable=disable))
    package = load_package(tmp_path / "package", "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    model = _model(file)
    fill(model, state)
    tokens, labels = torch.randint(32, (2, 3, 7), generator=torch.Generator().manual_seed(1))
    loss_of(model, tokens, labels).backward()
    package.call("microbatch", state, tokens, labels)
    for name, weight in model.named_parameters():
        assert weight.grad is not None and float(weight.grad.abs().max()) > 1e-3, name
        assert relative(state[f"{name}.grad"], weight.grad) <= 1e-5, name
    ops = {node.op for _, node in made.module.walk()}
    assert ({"rms_norm", "rope"} <= ops) is (not disable)
    assert ("aten.view_as_complex.default" in ops) is bool(disable)
