"""Recipes: names, axes, architectures, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgraph.errors import OptionError
from mgraph.recipe import Recipe, flag_of, read_recipe


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("dense-tiny", "dense-tiny"),
        ("some/file.py:build", "build"),
        ("hf:models/llama/config.json", "llama"),
        ("hf:models/llama.json", "llama"),
    ],
)
def test_directory_follows_the_model(model: str, name: str) -> None:
    assert Recipe(model=model).directory == Path("build") / f"{name}-train"
    assert Recipe(model=model, purpose="serve").directory == Path("build") / f"{name}-serve"
    assert Recipe(model=model, output="here").directory == Path("here")


@pytest.mark.parametrize(
    ("fields", "archs"),
    [
        ({}, ("sm_90a",)),
        ({"target": "cpu"}, ()),
        ({"arch": "none"}, ()),
        ({"arch": "sm_80, sm_90a"}, ("sm_80", "sm_90a")),
        ({"target": "cpu", "arch": "sm_80"}, ("sm_80",)),
    ],
)
def test_architectures(fields: dict[str, str], archs: tuple[str, ...]) -> None:
    assert Recipe(**fields).archs == archs  # type: ignore[arg-type]


def test_mesh() -> None:
    assert Recipe().mesh_axes() == {"dp": None}
    assert Recipe(mesh="dp=4").mesh_axes() == {"dp": 4}
    assert Recipe(mesh="dp=*,tp=2").mesh_axes() == {"dp": None, "tp": 2}
    assert list(Recipe(mesh="tp=2,dp=2").mesh_axes()) == ["dp", "tp"]  # one order of ranks
    for wrong in ("dp", "dp=", "dp=-1", "dp=0", "dp=x", "pp=2", "tp=*", "dp=2,dp=2"):
        with pytest.raises(OptionError, match="mesh axis"):
            Recipe(mesh=wrong).mesh_axes()


def test_values_are_checked() -> None:
    for field, value in (("beta2", 1.5), ("eps", float("nan")), ("max_norm", -1.0), ("max_length", -1)):
        with pytest.raises(OptionError) as caught:
            Recipe(**{field: value})  # type: ignore[arg-type]
        assert caught.value.where == flag_of(field)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: dense-tiny\neps: 1e-6\nmax-norm: 2\nverify: true\nfor: serve\n")
    found = read_recipe(path, {"eps": 1e-5})
    assert found == Recipe(model="dense-tiny", eps=1e-5, max_norm=2.0, verify=True, purpose="serve")
    assert read_recipe(None, {"model": "dense-tiny"}) == Recipe(model="dense-tiny")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("arch", "sm_999", "unknown GPU architecture 'sm_999'"),
        ("arch", "sm90", "unknown GPU architecture 'sm90'"),
        ("mesh", "", "the mesh is empty"),
        ("max_length", 1, "max_length is 1"),
    ],
)
def test_values_that_later_stages_cannot_take_are_refused_at_once(field: str, value: object, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Recipe(**{"model": "dense-tiny", field: value})  # type: ignore[arg-type]


def test_what_is_served_is_not_packed() -> None:
    assert Recipe(model="dense-tiny", packed=True).packed
    with pytest.raises(OptionError, match="packed is for training"):
        Recipe(model="dense-tiny", purpose="serve", packed=True)


SERVING = [("graph_policy", "linear"), ("graph_workload", "w.json"), ("graphs", 3), ("batch_invariant", True)]


@pytest.mark.parametrize(("name", "value"), SERVING)
def test_graphs_are_chosen_for_serving(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"{name} is for serving"):
        Recipe(**{"model": "dense-tiny", name: value})  # type: ignore[arg-type]


def test_graphs_of_layers_are_for_training_on_a_gpu() -> None:
    assert Recipe(model="m", cuda_graphs="layers").cuda_graphs == "layers"
    with pytest.raises(OptionError, match="cuda_graphs is layers, and there is no GPU"):
        Recipe(model="m", cuda_graphs="layers", arch="none")
    with pytest.raises(OptionError, match="cuda_graphs is for training"):
        Recipe(model="m", cuda_graphs="off", purpose="serve")
    with pytest.raises(OptionError, match="cuda_graphs is 'layer'"):
        Recipe(model="m", cuda_graphs="layer")


def test_batch_invariance_is_for_our_kernels_on_one_rank() -> None:
    given: dict[str, Any] = {"model": "m", "purpose": "serve", "batch_invariant": True}
    assert Recipe(**given).batch_invariant
    with pytest.raises(OptionError, match="batch_invariant has our kernels alone"):
        Recipe(**given, provider=("rope=torch",))
    with pytest.raises(OptionError, match="batch_invariant is for one rank"):
        Recipe(**given, mesh="tp=2")


@pytest.mark.parametrize("zero", [1, 2])
def test_nothing_is_gathered_that_could_be_kept(zero: int) -> None:
    with pytest.raises(OptionError, match=f"with --zero {zero} parameters are whole"):
        Recipe(model="m", mesh="fsdp=2", zero=zero, keep_gathered=True)
