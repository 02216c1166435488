"""Weights whose files hold other tensors than the state: read in either form, written in the file's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mgraph.errors import CheckpointError
from mgraph.runtime.export import Weights, export_weights
from mgraph.runtime.mesh import Mesh
from mgraph.runtime.package import State, StateSpec
from mgraph.runtime.shards import Split
from mgraph.runtime.state import create_state
from mgraph.runtime.weights import load_weights

E, N, F = 3, 5, 4
EXPERTS = StateSpec("experts", "param", torch.bfloat16, (E, 2 * F, N), True, True, (("zeros_",),), "experts")
GATE = replace(EXPERTS, name="gate", shape=(E, N, F))
SPECS = [
    EXPERTS,
    replace(EXPERTS, name="experts.master", kind="master", dtype=torch.float32, init=(("copy_from", "experts"),)),
    GATE,
    replace(GATE, name="up", dtype=torch.float32),
    replace(EXPERTS, name="norm", dtype=torch.float32, shape=(N,)),
]


def _part(state: str, shape: list[int], inside: list[int], place: list[int]) -> dict[str, Any]:
    return {"state": state, "shape": shape, "from": inside, "to": place}


LAYOUT: list[dict[str, Any]] = [
    *(
        {
            "tensor": f"{half}.{expert}",
            "shape": [F, N],
            "parts": [_part("experts", [F, N], [(2 * expert + index) * F * N, N, 1], [0, N, 1])],
        }
        for expert in range(E)
        for index, half in enumerate(("first", "second"))
    ),
    {
        "tensor": "by_turns",
        "shape": [E, N, 2 * F],
        "parts": [
            _part(name, [E, N, F], [0, N * F, F, 1], [index, 2 * N * F, 2 * F, 2])
            for index, name in enumerate(("gate", "up"))
        ],
    },
]


def files_of(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a file has of values of the state, by slices instead of strides."""
    experts = values["experts"]
    made = {f"first.{e}": experts[e, :F].clone() for e in range(E)}
    made |= {f"second.{e}": experts[e, F:].clone() for e in range(E)}
    by_turns = torch.empty(E, N, 2 * F)
    by_turns[..., ::2], by_turns[..., 1::2] = values["gate"], values["up"]
    return made | {"by_turns": by_turns, "norm": values["norm"]}


@pytest.fixture
def values() -> dict[str, Tensor]:
    shapes = {spec.name: spec.shape for spec in SPECS if spec.kind == "param"}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture
def state() -> State:
    return create_state(SPECS, 0, "cpu")


def test_files_are_read_in_either_form(tmp_path: Path, values: dict[str, Tensor], state: State) -> None:
    other = files_of(values)
    mixed = {n: t for n, t in other.items() if n != "by_turns"} | {n: values[n] for n in ("gate", "up")}
    for number, tensors in enumerate((other, values, mixed)):
        file = tmp_path / f"{number}.safetensors"
        save_file(tensors, file)
        state = create_state(SPECS, 0, "cpu")
        assert load_weights(file, state, SPECS, LAYOUT) == len(tensors)
        for name, value in values.items():
            assert torch.equal(state[name], value.to(state[name].dtype)), name
        assert torch.equal(state["experts.master"], values["experts"])  # not rounded through bf16


class Placed(Mesh):
    """A mesh without processes: `rank` is its place along tp, and along fsdp behind that."""

    def index(self, axis: str) -> int:
        """The rank's coordinate."""
        return divmod(self.rank, 2)[axis == "tp"]


def test_a_rank_reads_its_shares(tmp_path: Path, values: dict[str, Tensor]) -> None:
    """In either form of the files, of a layout whose parts are split across; a tied copy is known by its share."""
    placements: dict[str, tuple[Split, ...]] = {
        "experts": (Split("tp", 1, 1), Split("fsdp", 2)),
        "gate": (Split("tp", 1), Split("fsdp", 1)),
        "up": (Split("fsdp", 2),),
        "norm": (Split("tp", 0), Split("fsdp", 0)),
    }
    named = {spec.name: spec for spec in SPECS}
    factors = {"experts": ((1, (2, F)),)}
    specs = [
        replace(s, placement=placements[s.name.removesuffix(".master")], factors=factors.get(s.name[:7], ()))
        for s in named.values()
    ]
    whole = create_state(SPECS, 0, "cpu")
    for number, tensors in enumerate((files_of(values), {**values, "tied": values["norm"].clone()})):
        save_file(tensors, tmp_path / f"{number}.safetensors")
        load_weights(tmp_path / f"{number}.safetensors", whole, SPECS, LAYOUT)
        for rank in range(4):
            mesh = Placed(rank, 4, torch.device("cpu"), {"fsdp": 2, "tp": 2})
            state = create_state(specs, 0, "cpu", [spec.name for spec in specs], mesh)
            load_weights(tmp_path / f"{number}.safetensors", state, specs, LAYOUT, mesh=mesh)
            for spec in specs:
                expected = torch.zeros_like(state[spec.name])
                for piece in spec.share(mesh).pieces:
                    piece.of(expected).copy_(piece.of_whole(whole[spec.name]))
                assert torch.equal(state[spec.name], expected), (spec.name, rank)
    save_file({**values, "tied": values["norm"] + 1}, tmp_path / "other.safetensors")
    mesh = Placed(0, 4, torch.device("cpu"), {"fsdp": 2, "tp": 2})  # of 5 elements over 4 ranks the last one has none
    state = create_state(specs, 0, "cpu", mesh=mesh)
    with pytest.raises(CheckpointError, match=r"1 not in the package \(tied\)"):
        load_weights(tmp_path / "other.safetensors", state, specs, LAYOUT, mesh=mesh)


def test_what_is_missing_is_named_as_files_have_it(tmp_path: Path, values: dict[str, Tensor], state: State) -> None:
    tensors = files_of(values)
    del tensors["second.1"], tensors["by_turns"]
    save_file(tensors | {"up": values["up"], "first.0": torch.zeros(N, F)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path, state, SPECS, LAYOUT)
    assert "2 missing (second.1, by_turns)" in str(caught.value)
    assert f"first.0 is [{N}, {F}], not [{F}, {N}]" in str(caught.value)


@pytest.mark.parametrize("full", [False, True], ids=["param", "f32"])
def test_exports_have_the_form_of_files(tmp_path: Path, values: dict[str, Tensor], state: State, full: bool) -> None:
    save_file(values, tmp_path / "own.safetensors")
    load_weights(tmp_path / "own.safetensors", state, SPECS, LAYOUT)
    (tmp_path / "config.json").write_text("{}")
    export_weights(tmp_path / "out", Weights(state, SPECS, LAYOUT, full=full), tmp_path / "config.json", 100)
    found = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    rounded = values | {"gate": values["gate"].bfloat16().float()}
    expected = files_of(rounded)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        exact = full or name == "norm"
        assert tensor.dtype == (torch.float32 if exact else torch.bfloat16), name
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    dtype = json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
    assert dtype == ("float32" if full else "bfloat16")


def test_buffers_that_the_package_makes_may_be_there_under_any_layer(
    tmp_path: Path, values: dict[str, Tensor], state: State
) -> None:
    made = replace(EXPERTS, name="rope.inv_freq", kind="buffer", persist=False, trainable=False, shape=(2,))
    save_file(values | {"layers.0.rope.inv_freq": torch.zeros(3)}, tmp_path / "x.safetensors")
    load_weights(tmp_path, state, [*SPECS, made], LAYOUT)
    with pytest.raises(CheckpointError, match=r"1 not in the package \(layers\.0\.rope\.inv_freq\)"):
        load_weights(tmp_path, state, SPECS, LAYOUT)
