"""Experts that ranks share train as on one device however tokens are routed: few tokens, a hot expert, idle ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.ir.graph import Module, StateKind
from tests.all_ranks import Tensors
from tests.end_to_end import meshes
from tests.end_to_end.meshes import Row, Table
from tests.sampling import sampled

MODELS = ["moe-tiny-grouped", "limited-weight", "limited-position"]
"""Their router adds a bias to the scores that experts are chosen by, so that a test may choose; experts of the last two
drop what they have no room for."""
FAVOURED = {
    "as drawn": [],
    "one hot expert": [0],
    "experts of one rank alone": [0, 1, 2, 3],
    "experts of the other rank alone": [4, 5, 6, 7],
}
TOKENS = {"1 token": (1, 1), "fewer tokens than experts": (1, 3), "many tokens": (2, 12)}
WAYS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "allgather": {"dispatch": "allgather"},
    "host": {"expert_extent": "host"},
    "padded": {"pad_to_capacity": True},
}
MESHES = [("ep=2", way) for way in WAYS]
MESHES += [(mesh, way) for mesh in ("ep=4", "fsdp=2,ep=fsdp", "ep=2,tp=2") for way in WAYS if way != "allgather"]
CASES = [
    (model, mesh, way, favoured, tokens)
    for model in MODELS
    for mesh, way in MESHES
    if way != "padded" or model.startswith("limited")  # the others have no capacity
    for favoured in FAVOURED
    for tokens in TOKENS
]


@pytest.mark.parametrize(
    ("model", "mesh", "way", "favoured", "tokens"),
    sampled(
        CASES,
        1,
        always=[
            (MODELS[0], "ep=2", "alltoall", "experts of the other rank alone", "1 token"),
            (MODELS[1], "ep=2", "alltoall", "one hot expert", "many tokens"),
            (MODELS[1], "ep=2", "host", "experts of the other rank alone", "1 token"),
            (MODELS[1], "ep=2,tp=2", "padded", "one hot expert", "many tokens"),
        ],
    ),
)
def test_routing(
    model: str, mesh: str, way: str, favoured: str, tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def skewed(module: Module) -> Tensors:
        state = drawn(module)
        for name, declared in module.state.items():
            if declared.kind is StateKind.BUFFER and declared.type.shape == (8,):
                # Distinct, as equal scores may be ordered otherwise.
                state[name] = torch.linspace(0, 0.1, 8, dtype=torch.float64)
                state[name][FAVOURED[favoured]] += 10
        return state

    drawn = meshes.initial_state
    monkeypatch.setattr(meshes, "initial_state", skewed)
    for name, value in zip(("BATCH", "SEQUENCE", "IGNORED"), (*TOKENS[tokens], 0), strict=True):
        monkeypatch.setattr(meshes, name, value)
    table = Table(tmp_path)
    row = Row(model, mesh, tuple(WAYS[way].items()))
    biases = [n for n, s in table.alone(row).state.items() if s.kind is StateKind.BUFFER and s.type.shape == (8,)]
    assert biases
    assert table.worst(row) <= 1e-9
