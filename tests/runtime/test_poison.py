"""A poisoned run changes nothing, and finds what reads memory that has ended or was never written."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.compiler import compile_package
from mgraph.errors import PackageError
from mgraph.recipe import Recipe
from mgraph.runtime import offload
from mgraph.runtime.package import Package, load_package
from mgraph.runtime.poison import Poison
from mgraph.runtime.state import create_state
from tests.sampling import sampled

SIZES = (2, 32)


def _compiled(path: Path, model: str, **settings: Any) -> Path:
    compile_package(Recipe(model, output=str(path), arch="none", batch=SIZES[0], seq=SIZES[1], **settings))
    return path


def _steps(package: Package) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    state = create_state(package.state_specs, 0, "cpu")
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(2):
        inputs = [torch.randint(256, SIZES, generator=generator) for _ in range(2)]
        found.append(package.call("microbatch", state, *inputs))
        found.append(package.call("finish", state, torch.tensor(1e-2)))
    found.append(package.call("evaluate", state, *inputs))
    return state, found


@pytest.mark.parametrize(
    ("model", "settings"),
    sampled(
        [
            (model, settings)
            for model in ("dense-tiny", "moe-tiny", "gemma3-tiny", "gpt-oss-tiny", "dense-tiny-capped")
            for settings in (
                (("offload", "activations,optimizer"), ("precision", "bf16")),
                (("recompute", "full"), ("offload", "activations")),
                (("chunk_loss", "16KiB"),),
                (("precision", "fp16"), ("offload", "optimizer")),
            )
        ],
        0,
        always=[("moe-tiny", (("offload", "activations,optimizer"), ("precision", "bf16")))],
    ),
)
def test_nothing_changes(tmp_path: Path, model: str, settings: tuple[tuple[str, str], ...]) -> None:
    path = _compiled(tmp_path / "p", model, **dict(settings))
    plain, poisoned = _steps(load_package(path, "cpu")), _steps(load_package(path, "cpu", poisoned=True))
    for left, right in zip((plain[0], *plain[1]), (poisoned[0], *poisoned[1]), strict=True):
        for name, tensor in left.items():  # in fp16 a first norm may be infinite
            assert torch.equal(tensor.nan_to_num(), right[name].nan_to_num()), name


def test_memory_that_ends_and_memory_that_begins() -> None:
    with Poison():
        unwritten = torch.empty(3)
        made = torch.ones(4)
        view, raw = made[1:], offload._unowned(made)
        del made
        _ = torch.ones(1)
        assert raw.tolist() == [1.0] * 4, "a view keeps it alive"
        del view
        _ = torch.ones(1)
        assert raw.isnan().all() and unwritten.isnan().all()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _compiled(tmp_path_factory.mktemp("poison") / "p", "dense-tiny", offload="activations,optimizer")


def _is_found(path: Path, entry: str) -> None:
    """The error does not show in a run as ever, and does in a poisoned one."""
    _, found = _steps(load_package(path, "cpu"))
    assert all(tensor.isfinite().all() for given in found for tensor in given.values())
    with pytest.raises(PackageError, match=f"{entry} gives NaN with --poison: .* memory that had ended"):
        _steps(load_package(path, "cpu", poisoned=True))


def test_a_copy_whose_source_is_not_held(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded: the handle forgets what is copied, so that its memory may be taken while the copy is under way."""
    real: Callable[..., Any] = offload._copies

    def forgetful(targets: Any, sources: Sequence[Tensor], device: Any, held: Any, *rest: Any) -> Any:
        return real(targets, sources, device, (), *rest)

    monkeypatch.setattr(offload, "_copies", forgetful)
    _is_found(package, "microbatch")


def test_a_copy_that_is_not_waited_for(package: Path, tmp_path: Path) -> None:
    """Seeded: the backward reads what has come back before it has."""
    text = (package / "step.py").read_text()
    line = next(found for found in re.findall(r"\n    (\w+_back = rt\.wait\(\w+\)\[0\])", text))
    name, handle = re.fullmatch(r"(\w+) = rt\.wait\((\w+)\)\[0\]", line).groups()  # type: ignore[union-attr]
    broken = text.replace(line, f"{name} = {handle}.messages[0][1].results()[0]")
    _is_found(_edited(package, tmp_path, broken), "microbatch")


def test_memory_that_is_read_before_it_is_written(package: Path, tmp_path: Path) -> None:
    """Seeded: a buffer that was to begin as ones."""
    text = (package / "step.py").read_text()
    assert "torch.ones([]," in text
    with pytest.raises(PackageError, match="never written"):
        _steps(
            load_package(
                _edited(package, tmp_path, text.replace("torch.ones([],", "torch.empty([],")), "cpu", poisoned=True
            )
        )


def _edited(package: Path, directory: Path, text: str) -> Path:
    copy = directory / "edited"
    copy.mkdir()
    for file in package.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    for file in (package / "graphs").iterdir():
        (copy / "graphs").mkdir(exist_ok=True)
        (copy / "graphs" / file.name).write_bytes(file.read_bytes())
    (copy / "step.py").write_text(text)
    return copy
