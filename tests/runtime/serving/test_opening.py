"""The settings of `LLM` and of the server: one table, one check, the same words at both doors."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mgraph.errors import CheckpointError, OptionError, PackageError
from mgraph.runtime.options import flag, read
from mgraph.runtime.serving import opening, package_stepper
from mgraph.runtime.serving.llm import LLM
from mgraph.runtime.serving.opening import Settings, open_engine
from mgraph.runtime.serving.program import ServeOptions

WRONG: list[tuple[str, Any, str]] = [
    ("max_requests", -1, "-1: must be at least 0"),
    ("step_tokens", -4, "-4: must be at least 0"),
    ("cache_memory", -1.0, "-1.0: must be at least 0"),
    ("cache_memory", float("nan"), "nan: must be at least 0"),
    ("cache_memory", float("inf"), "inf: must be at most 1048576"),
    ("cache_memory", "1GiB", "'1GiB': must be a number"),
    ("num_blocks", "6four", "'6four': must be a whole number"),
    ("num_blocks", 2.5, "2.5.*: must be a whole number"),
    ("seed", -1, "-1: must be at least 0"),
    ("device", "gpu", "gpu"),
]
ONLY_IN_PYTHON: list[tuple[str, Any, str]] = [
    ("num_blocks", "64", "'64': must be a whole number"),
    ("num_blocks", True, "True: must be a whole number"),
    ("num_blocks", None, "None: must be a whole number"),
    ("prefix_cache", 1, "1: must be true or false"),
    ("device", None, "None: must be one of auto, cpu, cuda"),
    ("tokenizer", 5, "5: must be a path"),
    ("weights", 5, "5: must be a path"),
    ("cache_memory", "9" * 10**6, "'9999.*: must be a number"),
]


@pytest.mark.parametrize(("name", "value", "message"), [*WRONG, *ONLY_IN_PYTHON])
def test_wrong_keywords(name: str, value: Any, message: str) -> None:
    settings = {"weights": "w", name: value}
    with pytest.raises(OptionError, match=f"{name} .*{message}") as caught:
        LLM("nowhere", **settings)
    assert len(str(caught.value)) < 500 and caught.value.hint is not None


@pytest.mark.parametrize("name", ["prefix_cache", "cuda_graphs"])
def test_a_keyword_is_told_as_one_where_the_flag_says_the_opposite(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} 'no': must be true or false") as caught:
        open_engine("nowhere", "weights", **{name: "no"})
    assert caught.value.hint is not None and caught.value.hint.startswith(f"{name} is whether ")


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_flags(name: str, value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=f"{flag(name)}.*{message}"):
        read(ServeOptions, ["--weights", "w", f"{flag(name)}={value}"], "serve", "")


@pytest.mark.parametrize(
    ("name", "value"), [("max-body", "inf"), ("max-body", "1e300"), ("max-body", "nan"), ("drain-timeout", "inf")]
)
def test_wrong_flags_of_a_server(name: str, value: str) -> None:
    with pytest.raises(OptionError, match=f"--{name} .*: must be "):
        read(ServeOptions, ["--weights", "w", f"--{name}", value], "serve", "")


@pytest.mark.parametrize("package", [None, 5])
def test_a_package_that_is_no_path(package: Any) -> None:
    with pytest.raises(OptionError, match=f"the package is {package}: must be a path"):
        LLM(package, "w")


def test_what_excludes_what() -> None:
    with pytest.raises(OptionError, match="no weights to serve"):
        LLM("nowhere")
    with pytest.raises(OptionError, match="weights and random_init exclude"):
        open_engine("nowhere", "weights", random_init=True)
    with pytest.raises(OptionError, match="num_blocks and cache_memory exclude"):
        open_engine("nowhere", "weights", num_blocks=3, cache_memory=1)
    with pytest.raises(OptionError, match="--num-blocks and --cache-memory exclude"):
        read(ServeOptions, ["--weights", "w", "--num-blocks", "3", "--cache-memory", "1"], "serve", "")
    with pytest.raises(OptionError, match="no setting 'num_block'"):
        open_engine("nowhere", "weights", num_block=3)
    with pytest.raises(OptionError, match="step_tokens 3 is less than max_requests 8"):
        open_engine("nowhere", "weights", step_tokens=3, max_requests=8)


def test_both_doors_give_the_same_settings() -> None:
    flags = ["--weights", "w", "--num-blocks", "9", "--no-prefix-cache", "--no-cuda-graphs"]
    given = read(ServeOptions, flags, "serve", "").opening()
    assert list(given) == [item.name for item in fields(Settings)]
    count: Any = np.int64(9)
    assert Settings(**given) == Settings(weights=Path("w"), num_blocks=count, prefix_cache=False, cuda_graphs=False)


@pytest.mark.parametrize("graphs", [True, False])
def test_what_is_asked_of_the_stepper(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there are CUDA graphs is the user's choice."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(opening, "ranks_of", lambda package: 1)
    monkeypatch.setattr(package_stepper, "PackageStepper", lambda *args, **more: asked.update(more))
    opening.open_stepper(Path("nowhere"), Settings(random_init=True, device="cpu", cuda_graphs=graphs))
    assert asked["cuda_graphs"] is graphs


def test_a_package_without_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = SimpleNamespace(path=Path("p"), manifest={"kind": "serve", "mesh": {}}, entries={})
    monkeypatch.setattr(package_stepper, "load_package", lambda *_, **__: damaged)
    with pytest.raises(PackageError, match="no entry 'step'") as caught:
        package_stepper.load_serving("p", torch.device("cpu"))
    assert (caught.value.where, caught.value.hint) == ("p", "mgraph compile MODEL --for serve")


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    fine = {"w": torch.tensor([1.0, torch.inf]), "none": torch.empty(0), "ids": torch.tensor([1])}
    package_stepper._check_numbers(tmp_path, fine)
    with pytest.raises(CheckpointError, match=r"no numbers \(NaN\) are in b"):
        package_stepper._check_numbers(tmp_path, {**fine, "b": torch.tensor([0.0, torch.nan], dtype=torch.bfloat16)})
