"""Weights from files: one or several, dtypes, masters, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mgraph.errors import CheckpointError
from mgraph.runtime.package import StateSpec
from mgraph.runtime.state import create_state
from mgraph.runtime.weight_files import INDEX
from mgraph.runtime.weights import load_weights


def _spec(name: str, kind: str, dtype: torch.dtype, init: tuple[tuple[object, ...], ...]) -> StateSpec:
    return StateSpec(
        name=name,
        kind=kind,
        dtype=dtype,
        shape=(3, 5),
        trainable=kind == "param",
        persist=True,
        init=init,
        seed_name=name,
    )


SPECS = [
    _spec("a", "param", torch.bfloat16, (("zeros_",),)),
    _spec("a.master", "master", torch.float32, (("copy_from", "a"),)),
    _spec("b", "param", torch.float32, (("zeros_",),)),
]


def _shards(path: Path) -> dict[str, torch.Tensor]:
    values = {"a": torch.randn(3, 5), "b": torch.randn(3, 5).bfloat16()}
    for name, value in values.items():
        save_file({name: value}, path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in values}}
    (path / INDEX).write_text(json.dumps(index))
    return values


def test_shards_dtypes_and_masters(tmp_path: Path) -> None:
    values, state = _shards(tmp_path), create_state(SPECS, 0, "cpu")
    load_weights(tmp_path, state, SPECS, [])
    assert torch.equal(state["a"], values["a"].bfloat16())
    assert torch.equal(state["a.master"], values["a"])  # not rounded through bf16
    assert torch.equal(state["b"], values["b"].float())


def test_all_misfits_are_in_one_error(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(5, 3), "c": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_weights(tmp_path, create_state(SPECS, 0, "cpu"), SPECS, [])
    for words in ("1 missing (b)", "a is [5, 3], not [3, 5]", "1 not in the package (c)"):
        assert words in str(error.value)


def test_adapters_are_no_weights(tmp_path: Path) -> None:
    adapters = {f"base_model.model.{name}.weight": torch.zeros(1, 1) for name in ("a.lora_A", "a.lora_B", "b")}
    save_file(adapters, tmp_path / "adapter_model.safetensors")
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        with pytest.raises(CheckpointError, match="these are adapters, without the weights that they change") as caught:
            load_weights(path, create_state(SPECS, 0, "cpu"), SPECS, [])
        assert "--export DIR" in str(caught.value.hint)


def test_absent_and_broken_files(tmp_path: Path) -> None:
    state = create_state(SPECS, 0, "cpu")
    with pytest.raises(CheckpointError, match="no weights"):
        load_weights(tmp_path / "nowhere", state, SPECS, [])
    _shards(tmp_path)
    whole = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_weights(tmp_path, state, SPECS, [])
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors is absent"):
        load_weights(tmp_path, state, SPECS, [])
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match="not an index"):
        load_weights(tmp_path, state, SPECS, [])
