"""Recipes: names, axes, architectures, files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mgraph.codegen.profile import committed_profiles
from mgraph.errors import OptionError
from mgraph.recipe import OF_PURPOSE, Recipe, flag_of, read_recipe


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
    path.write_text("model: dense-tiny\neps: 1e-6\nmax-norm: 2\nverify: true\nfor: train\n")
    found = read_recipe(path, {"eps": 1e-5})
    assert found == Recipe(model="dense-tiny", eps=1e-5, max_norm=2.0, verify=True, purpose="train")
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


COMMON = [
    "model",
    "purpose",
    "mesh",
    "precision",
    "target",
    "arch",
    "profile",
    "provider",
    "output",
    "memory_budget",
    "lora",
    "max_length",
    "disable",
    "verify",
]
OTHER = {
    "groups": ("*: lr=2",),
    "place": ("*: R@tp",),
    "lora_train": "*.bias",
    "activation_budget": "1GiB",
    "chunk_loss": "1MiB",
    "offload": "optimizer",
    "pad": "heads",
    "graph_workload": "w.json",
}
"""Values of fields whose texts are read, other than the default."""


def other_value(field: dataclasses.Field[Any]) -> Any:
    """A value that a field may have, and that is not its default."""
    if field.name in OTHER:
        return OTHER[field.name]
    choices, within, default = field.metadata["choices"], field.metadata["within"], field.default
    if choices:
        return next(choice for choice in choices if choice != default)
    if isinstance(default, bool):
        return not default
    return next(
        v for v in (2, 1, 0.5, 0.25) if v != default and isinstance(default, type(v) | float) and v <= within[1]
    )


def test_every_field_is_for_both_purposes_or_for_one() -> None:
    names = [*COMMON, *OF_PURPOSE["train"], *OF_PURPOSE["serve"]]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(Recipe)), "a new field is of which?"


@pytest.mark.parametrize("field", [f for f in dataclasses.fields(Recipe) if f.name not in COMMON], ids=lambda f: f.name)
def test_what_is_for_one_purpose_is_refused_for_the_other(field: dataclasses.Field[Any]) -> None:
    given = {"model": "dense-tiny", field.name: other_value(field)}
    training = field.name in OF_PURPOSE["train"]
    said = f"{field.name} is for {'training' if training else 'serving'}"
    with pytest.raises(OptionError, match=said) as caught:
        Recipe(**given, purpose="serve" if training else "train")
    assert caught.value.where == flag_of(field.name) and caught.value.hint
    try:  # some go only with others, which is told otherwise
        Recipe(**given, purpose="train" if training else "serve")
    except OptionError as error:
        assert "is for" not in error.message


def test_graphs_of_layers_are_for_training_on_a_gpu() -> None:
    assert Recipe(model="m", cuda_graphs="layers").cuda_graphs == "layers"
    with pytest.raises(OptionError, match="cuda_graphs is layers, and the package has no kernels for a GPU"):
        Recipe(model="m", cuda_graphs="layers", arch="none")
    with pytest.raises(OptionError, match="cuda_graphs is for training"):
        Recipe(model="m", cuda_graphs="off", purpose="serve")
    with pytest.raises(OptionError, match="cuda_graphs is 'layer'"):
        Recipe(model="m", cuda_graphs="layer")


def test_rules_of_providers_are_separate_or_between_commas() -> None:
    rules = ("rope=torch", "glu=torch", "attention=flash")
    assert Recipe(model="m", provider=("rope=torch, glu=torch", "attention=flash")).provider == rules
    assert Recipe(model="m", provider=("rope=torch,glu=torch,attention=flash",)) == Recipe(model="m", provider=rules)


def test_the_times_of_another_machine_are_a_profile() -> None:
    with pytest.raises(OptionError, match="target is 'h200'") as caught:
        Recipe(model="m", target="h200")
    assert caught.value.hint == "did you mean 'h100'?; for an H200, --target h100 --profile h200"
    assert Recipe(model="m", target="h100", profile="h200").profile_name in committed_profiles()


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


def test_a_file_may_have_what_yaml_makes_of_a_value(tmp_path: Path) -> None:
    """YAML reads off as false and a number as one; what has several parts may be a list or a text."""
    file = tmp_path / "r.yaml"
    file.write_text(
        "model: m\ncuda-graphs: off\narch: [sm_90a, sm_100a]\noffload: [optimizer]\nprovider: rope=torch, glu=torch\n"
        "disable: [raise-glu, 'fuse-*']\n",
        encoding="utf-8",
    )
    found = read_recipe(file, {})
    assert (found.cuda_graphs, found.archs, found.offload) == ("off", ("sm_90a", "sm_100a"), "optimizer")
    assert found.provider == ("rope=torch", "glu=torch") and found.patterns() == ("raise-glu", "fuse-*")
    file.write_text("model: m\nmemory_budget: 40\n", encoding="utf-8")
    with pytest.raises(OptionError, match="memory_budget is '40'") as caught:
        read_recipe(file, {})
    assert "e.g. 40GiB" in str(caught.value.hint)


def test_what_waits_on_the_host_is_named_once() -> None:
    with pytest.raises(OptionError, match="offload is 'activations,activations=1MiB'"):
        Recipe(model="m", offload="activations,activations=1MiB")
