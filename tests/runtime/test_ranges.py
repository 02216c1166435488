"""Ranges around the statements of a step: nothing else changes, and names say line, iteration and origin."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.errors import PackageError
from mgraph.runtime import ranges
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state

STEP = '''"""A step."""

import torch


def layer(x, w):
    """One layer."""
    # layers.*.up  model.py:7
    y = x @ w
    # layers.*  model.py:8
    z = torch.tanh(
        y,
    )
    del y
    return z


def microbatch(state, x):
    for i in range(2):
        # layers.*  model.py:9
        x = layer(x, state[f"w{i}"])
    if x.shape[0] > 1:
        x.mul_(2.0)
    name = x
    return (name,)
'''


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of ranges as they are entered and left (`/`), of what is loaded meanwhile."""
    heard: list[str] = []

    @contextlib.contextmanager
    def heard_range(name: str) -> Iterator[None]:
        heard.append(name)
        yield
        heard.append("/")

    monkeypatch.setattr(ranges, "range_of", lambda kind: heard_range)
    return heard


def run(file: Path, namespace: dict[str, Any]) -> torch.Tensor:
    exec(ranges.compiled(file), namespace)
    weights = {f"w{i}": torch.full((3, 3), 0.1 * (i + 1)) for i in range(2)}
    made: torch.Tensor = namespace["microbatch"](weights, torch.ones(2, 3))[0]
    return made


def test_names_and_numbers(tmp_path: Path, names: list[str]) -> None:
    file = tmp_path / "step.py"
    file.write_text(STEP)
    found = run(file, {ranges.CALLED: ranges.range_of("record")})
    inner = ["layer:9 layers.*.up  model.py:7", "/", "layer:11 layers.*  model.py:8", "/", "/"]
    loop = [line for i in range(2) for line in (f"microbatch:21 [{i}] layers.*  model.py:9", *inner)]
    assert names == [*loop, "microbatch:23 layers.*  model.py:9", "/"]
    expected = torch.tanh(torch.tanh(torch.full((2, 3), 0.3)) @ torch.full((3, 3), 0.2)) * 2
    assert torch.equal(found, expected)
    matches = [ranges.NAME.fullmatch(name) for name in names if name != "/"]
    assert [m and (m[1], m[2]) for m in matches][:3] == [("microbatch", "21"), ("layer", "9"), ("layer", "11")]


def test_an_error_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "step.py"
    file.write_text(STEP.replace("torch.tanh(\n        y,", "torch.none(\n        y,"))
    with pytest.raises(AttributeError) as caught:
        run(file, {ranges.CALLED: ranges.range_of("record")})
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.lineno for frame in frames if frame.filename == str(file)] == [21, 11]


def test_a_range_of_nvtx_ends_where_an_error_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    open_: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", open_.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", open_.pop)
    with ranges.range_of("nvtx")("outer"), contextlib.suppress(ValueError), ranges.range_of("nvtx")("inner"):
        assert open_ == ["outer", "inner"]
        raise ValueError
    assert open_ == []


def test_a_package_with_ranges_does_the_same(package_dir: Path) -> None:
    plain, ranged = (load_package(package_dir, "cpu", ranges=kind) for kind in (False, "record"))
    made = []
    for package in (plain, ranged):
        state = create_state(package.state_specs, 3, "cpu")
        rows = torch.arange(24).reshape(2, 12) % package.vocab_size
        made.append(package.call("microbatch", state, rows, rows.roll(-1, 1)))
    assert all(torch.equal(tensor, made[1][name]) for name, tensor in made[0].items())


def test_a_step_that_is_no_python(package_dir: Path) -> None:
    file = package_dir / "step.py"
    file.write_text(file.read_text() + "\ndef (:\n")
    with pytest.raises(PackageError, match="not valid Python"):
        load_package(package_dir, "cpu", ranges="record")
