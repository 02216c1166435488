"""Checkpoints: what is read is what was written, and damage is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.errors import CheckpointError, StorageError
from mgraph.runtime import checkpoint
from mgraph.runtime.mesh import Mesh
from mgraph.runtime.package import Adapter, State, StateSpec
from mgraph.runtime.saving import Saver

ALONE = Mesh(0, 1, torch.device("cpu"), {"dp": 1})


def specs_of(state: State, transient: str = "grad") -> tuple[StateSpec, ...]:
    return tuple(
        StateSpec(name, "param", value.dtype, tuple(value.shape), True, name != transient, (), name)
        for name, value in state.items()
    )


def make_state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.w": torch.randn(7, 5, generator=generator),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "step": torch.tensor(seed),
        "empty": torch.zeros(0, 4),
        "grad": torch.randn(7, 5, generator=generator),
    }


def save(directory: Path, step: int, keep: int = 2, **run: Any) -> State:
    state = make_state(step)
    with Saver(directory, specs_of(state), ALONE, keep) as saver:
        saver.save(step, state, run)
    return state


def test_round_trip_of_persistent_state(tmp_path: Path) -> None:
    saved = save(tmp_path, 12, position=[1, 30])
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 12 and found.run == {"position": [1, 30]}
    state = make_state(99)
    transient = state["grad"].clone()
    checkpoint.load(found, state, specs_of(state), ALONE)
    assert all(torch.equal(state[name], saved[name]) for name in state if name != "grad")
    assert torch.equal(state["grad"], transient)


def test_keeps_the_last_and_finds_the_newest_whole_one(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    for step in (9, 10, 100, 123456789):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000100", "step_123456789"]
    (tmp_path / "step_999999999.unfinished").mkdir()
    (tmp_path / "step_notes").mkdir()
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 123456789
    save(tmp_path, 123456789, again=True)  # the same step, after a resume
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 123456789 and found.run == {"again": True}


def test_mismatch_names_the_first_field(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    state = make_state(1)
    state["half"] = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"state 'half' is bf16\[3\] in it and bf16\[4\] here"):
        checkpoint.load(found, state, specs_of(state), ALONE)
    state["half"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"state 'half' is bf16\[3\] in it and f32\[3\] here"):
        checkpoint.load(found, state, specs_of(state), ALONE)
    del state["half"]
    with pytest.raises(CheckpointError, match=r"state 'half' is bf16\[3\] in it and absent here"):
        checkpoint.load(found, state, specs_of(state), ALONE)
    state["half"], state["new"] = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"state 'new' is absent in it and f32\[1\] here"):
        checkpoint.load(found, state, specs_of(state), ALONE)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    file = next(found.path.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[:-20])
    state = make_state(1)
    with pytest.raises(
        CheckpointError, match=rf"the checkpoint is damaged: {file.name} is (not what was written|missing)"
    ) as caught:
        checkpoint.load(found, state, specs_of(state), ALONE)
    assert caught.value.hint == "remove this directory, and the checkpoint before it is taken", "to resume or to serve"


def test_parameters_of_another_model_are_named(tmp_path: Path) -> None:
    save(tmp_path, 3)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    wider = {"layers.0.w": torch.zeros(7, 6), "norm": torch.zeros(4)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_parameters(found, wider, specs_of(wider))
    assert "'layers.0.w' is f32[7, 5] in it and f32[7, 6] here" in caught.value.message
    assert "'norm' is absent in it and f32[4] here" in caught.value.message and "half" not in caught.value.message
    assert "package was compiled from" in str(caught.value.hint)


def test_another_precision_is_told_as_such(tmp_path: Path) -> None:
    save(tmp_path, 3)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    state = {"layers.0.w": torch.zeros(7, 5, dtype=torch.bfloat16), "half": torch.zeros(3, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match=r"'layers\.0\.w' is f32\[7, 5\] in it and bf16\[7, 5\] here") as caught:
        checkpoint.load_parameters(found, state, specs_of(state))
    assert "--precision of the run" in str(caught.value.hint)


def test_adapters_of_another_factor_are_others(tmp_path: Path) -> None:
    """Their tensors look alike, and mean something else."""
    state = {"q.weight": torch.randn(5, 3), "q.lora_A.weight": torch.randn(2, 3), "q.lora_B.weight": torch.randn(5, 2)}

    def specs(alpha: float) -> tuple[StateSpec, ...]:
        adapter = Adapter(2, alpha, 0.0, False, alpha / 2, False)
        return tuple(replace(s, adapter=adapter if s.name == "q.weight" else None) for s in specs_of(state))

    with Saver(tmp_path, specs(4.0), ALONE, 1) as saver:
        saver.save(1, state, {})
    found = checkpoint.latest(tmp_path)
    assert found is not None
    checkpoint.load_parameters(found, state, specs(4.0))
    for load in (checkpoint.load, checkpoint.load_parameters):
        with pytest.raises(
            CheckpointError, match=r"q\.lora_B\.weight' is f32\[5, 2\] times 2 in it and .* times 3 here"
        ):
            load(found, state, specs(6.0), ALONE)
    older = replace(found, layout={name: text.partition(" times ")[0] for name, text in found.layout.items()})
    for load in (checkpoint.load, checkpoint.load_parameters):
        load(older, state, specs(4.0), ALONE)


def test_weights_that_a_package_has_not_are_named(tmp_path: Path) -> None:
    """Adapters of a run are no part of a package without them; what an optimizer keeps is of no concern."""
    shapes = {"q.weight": (5, 3), "q.lora_A.weight": (2, 3), "q.lora_B.weight": (5, 2)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    kept = {f"{name}{end}": tensor.clone() for name, tensor in weights.items() for end in (".m", ".v", ".master")}
    run = {**weights, **kept, "step": torch.tensor(3)}
    with Saver(tmp_path, specs_of(run), ALONE, 1) as saver:
        saver.save(3, run, {})
    found = checkpoint.latest(tmp_path)
    assert found is not None
    state = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    checkpoint.load_parameters(found, state, specs_of(state))
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    plain = {"q.weight": torch.zeros(5, 3)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_parameters(found, plain, specs_of(plain))
    assert caught.value.message.endswith("this package has not: q.lora_A.weight, q.lora_B.weight")
    assert "--lora" in str(caught.value.hint) and "--export" in str(caught.value.hint) and not plain["q.weight"].any()


def test_damaged_run_file(tmp_path: Path) -> None:
    save(tmp_path, 1)
    file = tmp_path / "step_00000001" / "run.json"
    content = json.loads(file.read_text())
    del content["layout"]
    for text in (json.dumps(content), file.read_text()[:-30], "[]"):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"the checkpoint is damaged: run.json"):
            checkpoint.latest(tmp_path)


def test_a_write_that_was_cut_short() -> None:
    """torch's writer tells of positions; a person is told of the disk."""

    def cut() -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    with pytest.raises(StorageError, match="not all of it could be written, as on a disk that is full"):
        checkpoint.storage(Path("here"), cut)
