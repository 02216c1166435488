"""Initialisers replayed: values against torch and against the generator's definition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mgraph import philox
from mgraph.errors import PackageError
from mgraph.runtime.mesh import Mesh
from mgraph.runtime.package import StateSpec
from mgraph.runtime.shards import Split
from mgraph.runtime.state import _DRAWS, create_state


def spec(
    name: str, *init: tuple[Any, ...], shape: tuple[int, ...] = (5, 3), dtype: torch.dtype = torch.float32
) -> StateSpec:
    return StateSpec(name, "param", dtype, shape, True, True, init, name)


def test_random_calls_are_keyed_by_seed_name_and_call_index() -> None:
    state = create_state([spec("w", ("normal_", 0.5, 2.0), shape=(7, 31))], 3, "cpu")
    expected = philox.normal((7, 31), philox.key_from(3, "w", 0)) * 2.0 + 0.5
    assert torch.equal(state["w"], expected)
    other_seed = create_state([spec("w", ("normal_", 0.5, 2.0), shape=(7, 31))], 4, "cpu")
    assert not torch.equal(state["w"], other_seed["w"])


def test_distribution() -> None:
    state = create_state(
        [spec("n", ("normal_", 1.0, 0.02), shape=(100_003,)), spec("u", ("uniform_", -3.0, 1.0), shape=(100_003,))],
        0,
        "cpu",
    )
    assert abs(float(state["n"].mean()) - 1.0) < 5e-4 and abs(float(state["n"].std()) - 0.02) < 5e-4
    assert state["u"].min() >= -3.0 and state["u"].max() < 1.0 and abs(float(state["u"].mean()) + 1.0) < 0.02


def test_truncated_normal_program() -> None:
    """The calls that torch's trunc_normal_ makes, on the same uniform numbers."""
    program = (("uniform_", -0.9, 0.9), ("erfinv_",), ("mul_", 0.02 * 2**0.5), ("add_", 0.1), ("clamp_", 0.08, 0.12))
    value = create_state([spec("w", *program, shape=(1001,))], 0, "cpu")["w"].double()
    draw = philox.uniform((1001,), philox.key_from(0, "w", 0)).mul(1.8).add(-0.9)
    expected = torch.erfinv(draw.double()).mul(0.02 * 2**0.5).add(0.1).clamp(0.08, 0.12)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)


def test_values_constants_and_integers() -> None:
    state = create_state(
        [
            spec("values", ("copy_", [1.5, -2.0, 3.0, 0.0]), shape=(2, 2)),
            spec("fill", ("fill_", 7), shape=(), dtype=torch.int64),
            spec("zeros", ("zeros_",), dtype=torch.bfloat16),
            spec("index", ("copy_", [3, 1, 2**40]), shape=(3,), dtype=torch.int64),
        ],
        0,
        "cpu",
    )
    assert state["values"].tolist() == [[1.5, -2.0], [3.0, 0.0]]
    assert int(state["fill"]) == 7 and state["zeros"].dtype == torch.bfloat16 and not state["zeros"].any()
    assert state["index"].tolist() == [3, 1, 2**40]


def test_low_precision_is_rounded_once_and_masters_copy_it() -> None:
    """A copy may stand before what it copies."""
    specs = [
        spec("w.master", ("copy_from", "w")),
        spec("w", ("normal_", 0.0, 0.02), ("mul_", 3.0), dtype=torch.bfloat16),
        spec("tied", ("copy_from", "w.master"), ("mul_", 2.0)),
    ]
    state = create_state(specs, 0, "cpu")
    wide = philox.normal((5, 3), philox.key_from(0, "w", 0)).mul_(0.02).add_(0.0).mul_(3.0)
    assert list(state) == ["w.master", "w", "tied"]
    assert torch.equal(state["w"], wide.bfloat16())
    assert state["w.master"].dtype == torch.float32 and torch.equal(state["w.master"], state["w"].float())
    assert torch.equal(state["tied"], state["w"].float() * 2)


def test_a_parameter_and_its_master_are_one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is declared first; neither shares memory with the other."""
    draws: list[philox.Key] = []

    def counted(shape: Sequence[int], key: philox.Key, *rest: Any, **named: Any) -> torch.Tensor:
        draws.append(key)
        return philox.normal(shape, key, *rest, **named)

    monkeypatch.setitem(_DRAWS, "normal_", counted)
    param = spec("w", ("normal_", 0.5, 0.02), dtype=torch.bfloat16)
    master = replace(spec("w", ("normal_", 0.5, 0.02)), name="w.master", kind="master")
    other = spec("v", ("normal_", 0.5, 0.02))
    for specs in ([param, master, other], [master, other, param]):
        draws.clear()
        state = create_state(specs, 3, "cpu")
        assert list(state) == [s.name for s in specs] and len(draws) == 2
        wide = philox.normal((5, 3), philox.key_from(3, "w", 0)).mul_(0.02).add_(0.5)
        assert torch.equal(state["w.master"], wide) and torch.equal(state["w"], wide.bfloat16())


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([spec("w")], "state 'w' has no initialiser"),
        ([spec("w", ("dirac_",))], "state 'w' is initialised by 'dirac_'"),
        ([spec("w", ("copy_", [1.0, 2.0]))], r"2 initial values for shape \[5, 3\]"),
        ([spec("w", ("copy_from", "v"))], "copies 'v', which does not exist"),
        ([spec("w", ("copy_from", "v")), spec("v", ("copy_from", "w"))], "copies itself"),
        ([spec("w", ("copy_from", "v")), spec("v", ("zeros_",), shape=(3, 5))], r"whose shape is \[3, 5\]"),
    ],
)
def test_errors(specs: list[StateSpec], message: str) -> None:
    with pytest.raises(PackageError, match=message):
        create_state(specs, 0, "cpu")


def test_blank_tensors_and_copies_of_them_are_left_to_who_fills_them() -> None:
    """The others are the same as without; nothing is drawn for a blank one, whatever its initialiser."""
    weight = spec("w", ("unknown_",), dtype=torch.bfloat16)
    specs = [weight, spec("w.master", ("copy_from", "w")), spec("other", ("normal_", 0.0, 1.0))]
    state = create_state(specs, 3, "cpu", blank={"w"})
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()} == {
        spec.name: (spec.dtype, spec.shape) for spec in specs
    }
    assert torch.equal(state["other"], create_state(specs[2:], 3, "cpu")["other"])
    with pytest.raises(PackageError, match="unknown_"):
        create_state(specs, 3, "cpu")


class Placed(Mesh):
    """A mesh without processes: the place of a rank follows from its number."""

    def index(self, axis: str) -> int:
        """The rank's coordinate; axes are major first."""
        after = list(self.axes)[list(self.axes).index(axis) + 1 :]
        return self.rank // math.prod(self.axes[name] for name in after) % self.axes[axis]


PROGRAMS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "normal": (("normal_", 0.1, 2.0),),
    "truncated": (("uniform_", -0.9, 0.9), ("erfinv_",), ("mul_", 0.03), ("clamp_", -0.02, 0.02)),
    "padded": (("normal_", 0.0, 1.0), ("fill_range_", 11, 23, 7.0), ("fill_range_", 40, 41, 8.0)),
    "values": (("copy_", [float(n) for n in range(48)]),),
    "seed": (("seed_",), ("add_", 0.5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("program", PROGRAMS)
def test_ranks_make_their_shares_of_what_one_rank_has(program: str, dtype: torch.dtype) -> None:
    """Split along a dim by two axes in turn, along another, packed, and padded; copies may be split otherwise."""
    whole = spec("w", *PROGRAMS[program], shape=(8, 6), dtype=dtype)
    both = replace(whole, placement=(Split("tp", 0), Split("fsdp", 0)))
    across = replace(whole, name="across", init=(("copy_from", "w"),), placement=(Split("tp", 1),))
    packed = replace(whole, name="packed", placement=(Split("fsdp", 0, 1),), factors=((0, (2, 4)),))
    uneven = replace(whole, name="uneven", placement=(Split("fsdp", 1), Split("tp", 1)))
    specs = [across, both, packed, uneven, spec("b", ("uniform_", 0.0, 1.0), shape=(5,))]
    made = create_state([replace(s, placement=()) for s in specs], 3, "cpu")
    for rank, (fsdp, tp) in enumerate((f, t) for f in range(2) for t in range(2)):
        mesh = Placed(rank, 4, torch.device("cpu"), {"fsdp": 2, "tp": 2})
        state = create_state(specs, 3, "cpu", mesh=mesh)
        assert torch.equal(state["w"], made["w"].chunk(2)[tp].chunk(2)[fsdp])
        assert torch.equal(state["across"], made["w"].chunk(2, 1)[tp])
        assert torch.equal(state["packed"], made["packed"].view(2, 4, 6)[:, 2 * fsdp : 2 * fsdp + 2].reshape(4, 6))
        columns = 3 * fsdp + 2 * tp, min(3 * fsdp + 2 * tp + 2, 3 * fsdp + 3)
        expected = torch.zeros(8, 2, dtype=dtype)
        expected[:, : columns[1] - columns[0]] = made["uneven"][:, slice(*columns)]
        assert torch.equal(state["uneven"], expected), "padding is 0"
        assert torch.equal(state["b"], made["b"])


def test_of_a_split_tensor_nothing_whole_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, ...]] = []

    def normal(shape: tuple[int, ...], *arguments: Any, **options: Any) -> torch.Tensor:
        drawn.append(tuple(shape))
        return philox.normal(shape, *arguments, **options)

    monkeypatch.setitem(_DRAWS, "normal_", normal)
    split = replace(spec("w", ("normal_", 0.0, 1.0), shape=(8, 6)), placement=(Split("tp", 1), Split("fsdp", 0)))
    mesh = Placed(1, 4, torch.device("cpu"), {"fsdp": 2, "tp": 2})
    create_state([split, replace(split, name="w.copy", init=(("copy_from", "w"),))], 3, "cpu", mesh=mesh)
    assert drawn == [(4, 3)] * 2
