"""Exported weights: what the files hold, how they are cut, and that nothing is written over or left half-written."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from mgraph.errors import OptionError, StorageError
from mgraph.runtime.export import Weights, export_weights
from mgraph.runtime.package import State, StateSpec
from mgraph.runtime.state import create_state
from mgraph.runtime.weight_files import INDEX
from mgraph.runtime.weights import load_weights

WEIGHT = StateSpec("a", "param", torch.bfloat16, (7, 11), True, True, (("normal_", 0.0, 1.0),), "a")
SPECS = [
    WEIGHT,
    replace(WEIGHT, name="a.exp_avg", kind="moment", dtype=torch.float32),
    replace(WEIGHT, name="bias", kind="buffer", dtype=torch.float32, shape=(5,), trainable=False, seed_name="bias"),
    replace(WEIGHT, name="table", kind="buffer", persist=False, trainable=False),
    replace(WEIGHT, name="b", shape=(13,), seed_name="b"),
]
KEPT = ["a", "bias", "b"]


@pytest.fixture
def state() -> State:
    return create_state(SPECS, 3, "cpu")


def test_one_file_and_the_configuration(tmp_path: Path, state: State) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "torch_dtype": "float32"}))
    (tmp_path / "out").mkdir()  # empty: it may be there
    export_weights(tmp_path / "out", Weights(state, SPECS, []), config)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == sorted(KEPT)
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in KEPT)
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "llama", "dtype": "bfloat16"}


@pytest.mark.parametrize(("limit", "files"), [(1, 3), (154 + 20, 2), (154 + 20 + 25, 2), (154 + 20 + 26, 1)])
def test_shards(tmp_path: Path, state: State, limit: int, files: int) -> None:
    """154, 20 and 26 bytes; a limit that none fits into gives each a file of its own."""
    export_weights(tmp_path / "out", Weights(state, SPECS, []), tmp_path / "absent", limit)
    written = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(written) == files
    if files > 1:
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert index["metadata"] == {"total_size": 200}
        assert {name: file.name for file in written for name in load_file(file)} == index["weight_map"]
        assert written[-1].name == f"model-0000{files}-of-0000{files}.safetensors"
    again = create_state(SPECS, 4, "cpu")
    assert not torch.equal(again["a"], state["a"])
    load_weights(tmp_path / "out", again, SPECS, [])
    assert all(torch.equal(again[name], state[name]) for name in KEPT)


def test_what_is_there_is_not_touched(tmp_path: Path, state: State) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    for target in (tmp_path / "out", tmp_path / "out" / "mine"):
        with pytest.raises(OptionError, match="there is something already"):
            export_weights(target, Weights(state, SPECS, []), tmp_path / "absent")
    with pytest.raises(OptionError, match=r"out/mine is no directory that can be written to"):
        export_weights(tmp_path / "out" / "mine" / "a" / "b", Weights(state, SPECS, []), tmp_path / "absent")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "mine"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mgraph.runtime.export.write_file", full)
    with pytest.raises(StorageError, match="No space left on device"):
        export_weights(tmp_path / "out", Weights(state, SPECS, []), tmp_path / "absent")
    assert not list(tmp_path.iterdir())
