"""Adapters merged, and in PEFT's form: what its settings say where modules differ, and what has no place in it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mgraph.errors import OptionError
from mgraph.runtime.export import Weights
from mgraph.runtime.lora import check_adapters, merged, write_adapter
from mgraph.runtime.package import Adapter, State, StateSpec
from mgraph.runtime.state import create_state
from mgraph.runtime.weights import masters, model_tensors

PLAIN = Adapter(rank=2, alpha=4.0, dropout=0.0, rslora=False, scale=2.0, transposed=False)
DRAWN = (("normal_", 0.0, 1.0),)


def param(name: str, *shape: int, dtype: torch.dtype = torch.float32, trainable: bool = False) -> StateSpec:
    return StateSpec(name, "param", dtype, shape, trainable, True, DRAWN, name)


def with_adapter(weight: StateSpec, adapter: Adapter) -> list[StateSpec]:
    outs, ins = weight.shape[::-1] if adapter.transposed else weight.shape
    stem = weight.name.removesuffix(".weight")
    a = param(f"{stem}.lora_A.weight", adapter.rank, ins, dtype=weight.dtype, trainable=True)
    b = param(f"{stem}.lora_B.weight", outs, adapter.rank, dtype=weight.dtype, trainable=True)
    return [replace(weight, adapter=adapter), a, b]


def written(directory: Path, specs: Sequence[StateSpec], state: State | None = None) -> tuple[dict[str, Any], State]:
    directory.mkdir(exist_ok=True)
    check_adapters(specs, "package")
    write_adapter(directory, state or create_state(specs, 0, "cpu"), specs, {}, {"task_type": None})
    settings = json.loads((directory / "adapter_config.json").read_text())
    return settings, load_file(directory / "adapter_model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_merged_weights_are_rounded_once(dtype: torch.dtype, transposed: bool) -> None:
    adapter = replace(PLAIN, transposed=transposed)
    specs = [*with_adapter(param("q.weight", 5, 7, dtype=dtype), adapter), param("norm.weight", 7, dtype=dtype)]
    state = create_state(specs, 1, "cpu")
    w, a, b = (state[f"q.{name}weight"].double() for name in ("", "lora_A.", "lora_B."))
    exact = w + 2.0 * ((b @ a).T if transposed else b @ a)
    weights = Weights(state, specs, [])
    assert [t.name for t in weights.tensors] == [s.name for s in model_tensors(specs)] == ["q.weight", "norm.weight"]
    found, norm = weights.values(weights.tensors)
    assert found.dtype is dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(norm, state["norm.weight"])


def test_full_precision_takes_the_masters_of_adapters() -> None:
    base = param("q.weight", 5, 7, dtype=torch.bfloat16)
    specs = with_adapter(base, PLAIN)
    specs += [replace(s, name=f"{s.name}.master", kind="master", dtype=torch.float32) for s in specs[1:]]
    state = create_state(specs, 1, "cpu")
    a, b = (state[f"q.lora_{side}.weight.master"] for side in "AB")
    assert not torch.equal(a, state["q.lora_A.weight"].float())
    (tensor,) = Weights(state, specs, [], full=True).tensors
    (found,) = Weights(state, specs, [], full=True).values([tensor])
    torch.testing.assert_close(found, state["q.weight"].float() + 2.0 * b @ a)
    assert set(masters(specs)) == {"q.lora_A.weight", "q.lora_B.weight"}


def test_an_adapted_part_of_a_tensor_of_a_file() -> None:
    """Files may hold two weights in one tensor, of which only the second has an adapter."""
    q = param("q.weight", 3, 7, dtype=torch.bfloat16)
    specs = [q, *with_adapter(param("v.weight", 2, 7, dtype=torch.bfloat16), PLAIN)]
    parts = [
        {"state": name, "shape": [rows, 7], "from": [0, 7, 1], "to": [7 * first, 7, 1]}
        for name, rows, first in (("q.weight", 3, 0), ("v.weight", 2, 3))
    ]
    layout = [{"tensor": "qv", "shape": [5, 7], "parts": parts}]
    state = create_state(specs, 1, "cpu")
    weights = Weights(state, specs, layout, full=True)
    (tensor,) = weights.tensors
    v, a, b = (state[f"v.{name}weight"].float() for name in ("", "lora_A.", "lora_B."))
    torch.testing.assert_close(next(weights.values([tensor])), torch.cat([state["q.weight"].float(), v + 2.0 * b @ a]))


def test_an_update_of_zero_leaves_the_weight() -> None:
    base = torch.randn(5, 7, dtype=torch.bfloat16)
    found = merged(base, torch.randn(2, 7), torch.zeros(5, 2), PLAIN)
    assert torch.equal(found.to(base.dtype), base)


def test_one_kind_of_adapter(tmp_path: Path) -> None:
    specs = [s for layer in range(2) for s in with_adapter(param(f"layers.{layer}.q.weight", 5, 7), PLAIN)]
    specs += [param("layers.0.k.weight", 5, 7), param("embed.weight", 11, 7)]
    state = create_state(specs, 0, "cpu")
    settings, tensors = written(tmp_path, specs, state)
    assert settings == {
        "task_type": None,
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "lora_dropout": 0.0,
        "target_modules": ["q"],
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "bias": "none",
        "inference_mode": True,
    }
    expected = [f"layers.{layer}.q.lora_{side}.weight" for layer in range(2) for side in "AB"]
    assert sorted(tensors) == [f"base_model.model.{name}" for name in expected]
    assert all(torch.equal(tensors[f"base_model.model.{name}"], state[name]) for name in expected)


def test_modules_that_differ_are_named_in_full(tmp_path: Path) -> None:
    rooted = Adapter(rank=4, alpha=4.0, dropout=0.1, rslora=True, scale=2.0, transposed=False)
    specs = [
        *with_adapter(param("layers.0.q.weight", 5, 7), PLAIN),
        *with_adapter(param("layers.0.v.weight", 5, 7), PLAIN),
        *with_adapter(param("layers.1.q.weight", 5, 7), rooted),
        param("layers.1.v.weight", 5, 7),
    ]
    settings, _ = written(tmp_path, specs)
    assert settings["target_modules"] == ["layers.0.v", "q"]
    assert (settings["r"], settings["rank_pattern"]) == (2, {"layers.1.q": 4})
    assert (settings["lora_alpha"], settings["alpha_pattern"]) == (4.0, {"layers.1.q": 8.0})
    assert settings["use_rslora"] is False and settings["lora_dropout"] == 0.1
    settings, _ = written(tmp_path / "rooted", specs[6:])
    assert settings["use_rslora"] is True and settings["lora_alpha"] == 4.0
    assert settings["lora_alpha"] / math.sqrt(settings["r"]) == rooted.scale


def test_what_is_trained_besides_is_saved_with_its_module(tmp_path: Path) -> None:
    specs = with_adapter(param("q.weight", 5, 7), replace(PLAIN, transposed=True))
    specs += [param("norm.weight", 7, trainable=True), param("norm.bias", 7)]
    settings, tensors = written(tmp_path, specs)
    assert settings["modules_to_save"] == ["norm"] and settings["fan_in_fan_out"] is True
    assert {n for n in tensors if "lora" not in n} == {
        "base_model.model.norm.weight",
        "base_model.model.norm.bias",
    }
    with pytest.raises(OptionError, match=r"q\.bias is trained, and its module has an adapter too"):
        check_adapters([*specs, param("q.bias", 5, trainable=True)], "package")
    with pytest.raises(OptionError, match="the package has no adapters"):
        check_adapters(specs[3:], "package")
