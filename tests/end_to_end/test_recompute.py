"""Recomputation in emitted packages: bitwise the same gradients, and saved tensors as small as was asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.compiler import compile_package
from mgraph.recipe import Recipe
from mgraph.runtime.package import Package, load_package
from mgraph.runtime.state import create_state
from tests.end_to_end.builds import batches, build

BATCH, SEQ = 3, 21


def gradients(package: Package) -> dict[str, torch.Tensor]:
    """The gradients of two microbatches."""
    state = create_state(package.state_specs, 3, "cpu")
    for tokens, labels in batches(2, BATCH, SEQ):
        package.call("microbatch", state, tokens, labels)
    return {n: t for n, t in state.items() if n.endswith(".grad")}


def saved_bytes(package: Package) -> int:
    """The bytes of all tensors that the layers' forward functions hand to the backward in one microbatch, with the
    inputs of the layers."""
    functions: dict[str, Any] = inspect.unwrap(package.entries["microbatch"]).__globals__
    found: dict[int, torch.Tensor] = {}

    def watched(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: torch.Tensor, *rest: torch.Tensor) -> Any:
            out = forward(x, *rest)
            kept = out[1] if isinstance(out, tuple) else []
            found.update({t.untyped_storage().data_ptr(): t for t in (x, *kept)})
            return out

        return call

    for name in [n for n in functions if n.endswith("_fwd")]:
        functions[name] = watched(functions[name])
    state = create_state(package.state_specs, 3, "cpu")
    ((tokens, labels),) = batches(1, BATCH, SEQ)
    package.call("microbatch", state, tokens, labels)
    return sum(t.untyped_storage().nbytes() for t in found.values())


@pytest.mark.parametrize("name", ["dense-tiny", "moe-tiny"])
def test_every_mode_gives_the_same_gradients_and_keeps_to_its_budget(name: str, tmp_path: Path) -> None:
    none = load_package(build(name, tmp_path / "none").path, "cpu")
    expected, everything = gradients(none), saved_bytes(none)
    sizes = [everything]
    for budget in (400, 0):
        options: dict[str, Any] = {"recompute": "full"}
        if budget:
            options = {"recompute": "selective", "activation_budget": f"{budget}KiB", "batch": BATCH, "seq": SEQ}
        package = load_package(build(name, tmp_path / str(budget), **options).path, "cpu")
        found = gradients(package)
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, found[n]) for n, tensor in expected.items()), budget
        sizes.append(saved_bytes(package))
        assert not budget or sizes[-1] <= budget * 1024
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)


NESTED = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.gate = nn.ModuleList(Block() for _ in range(2)), nn.Linear(12, 12)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x + torch.sigmoid(self.gate(x)) * x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 12), nn.Linear(12, 256)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""


def test_layers_within_layers(tmp_path: Path) -> None:
    """A call within a layer runs again as a whole."""
    (tmp_path / "model.py").write_text(NESTED)
    found = []
    for name, budget in (("none", ""), ("full", ""), ("selective", "120KiB")):
        output, model = str(tmp_path / name), f"{tmp_path / 'model.py'}:Model"
        recipe = Recipe(
            model=model, target="cpu", output=output, recompute=name, activation_budget=budget, batch=BATCH, seq=SEQ
        )
        done = compile_package(recipe)
        assert {"layer.bwd", "block.bwd"} <= set(done.module.functions)
        package = load_package(Path(output), "cpu")
        found.append((gradients(package), saved_bytes(package)))
    (expected, most), (full, least), (selective, some) = found
    assert all(torch.equal(tensor, full[n]) and torch.equal(tensor, selective[n]) for n, tensor in expected.items())
    assert least < some < most and some <= 120 * 1024
