"""Packages on disk: whole or absent, edited files kept, errors a person can act on."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mgraph.codegen import package
from mgraph.codegen.package import PackageInfo, emit_package
from mgraph.codegen.step import step_text
from mgraph.errors import PackageError, StorageError
from mgraph.runtime.package import load_package
from tests.codegen.mlp import module
from tests.codegen.test_step_check import module as reduced


@dataclass(frozen=True)
class Options:
    level: int = 1


def info(**changes: Any) -> PackageInfo:
    return PackageInfo("train", Options(), "dce,in-place", **changes)


def test_package_is_whole_and_loads(tmp_path: Path) -> None:
    def write_graphs(directory: Path) -> str:
        directory.mkdir()
        (directory / "000_capture.json").write_text("{}")
        return "the text of the graph"

    made = emit_package(module(), info(write_graphs=write_graphs), tmp_path / "deep" / "pkg")
    manifest = json.loads((made / "manifest.json").read_text())
    assert list(manifest["files"]) == ["graphs/000_capture.json", "kernels.py", "reference.py", "step.py", "train.py"]
    assert manifest["fingerprint"]["options"] == {"level": 1}
    assert manifest["dims"] == {"B": [1, None], "S": [1, 64]}
    assert manifest["inputs"] == [{"name": "tokens", "dtype": "i64", "shape": ["B", "S"]}]
    assert manifest["entries"]["microbatch"] == {"inputs": ["tokens"], "outputs": ["loss_sum"]}
    compile((made / "train.py").read_text(), "train.py", "exec")
    assert [p.name for p in made.parent.iterdir()] == ["pkg"]
    loaded = load_package(made, "cpu")
    assert loaded.edited == [] and set(loaded.entries) == {"microbatch", "advance"}
    assert {spec.name for spec in loaded.state_specs} == set(module().state)


def test_edited_files_are_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "pkg"
    emit_package(module(), info(), target)
    emit_package(module(), info(), target)
    (target / "step.py").write_text("# mine\n")
    with pytest.raises(PackageError, match=r"edited: step\.py") as caught:
        emit_package(module(), info(), target)
    assert caught.value.exit_code == 2
    assert (target / "step.py").read_text() == "# mine\n"
    for _ in range(2):
        emit_package(module(), info(), target, force=True)
        assert (target / "step.py.edited").read_text() == "# mine\n"
    assert "def microbatch" in (target / "step.py").read_text()


def test_what_lies_beside_a_package_stays(tmp_path: Path) -> None:
    """Runs, notes, choices of products; what has the name of one of the new files, too."""
    target = tmp_path / "pkg"
    emit_package(module(), info(), target)
    (target / "run" / "checkpoints").mkdir(parents=True)
    mine = {"run/checkpoints/5": "weights", "notes.txt": "mine", "products.json": "{}", "serve.py": "no driver"}
    for name, text in mine.items():
        (target / name).write_text(text)
    emit_package(module(), info(), target)
    assert {name: (target / name).read_text() for name in mine} == mine
    emit_package(module(), replace(info(), kind="serve"), target)
    mine["serve.py.edited"] = mine.pop("serve.py")
    assert {name: (target / name).read_text() for name in mine} == mine
    assert "def main" in (target / "serve.py").read_text() or "mgraph" in (target / "serve.py").read_text()
    assert not (target / "train.py").exists() and [p.name for p in tmp_path.iterdir()] == ["pkg"]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("step", ["file_digests", "_move_into_place", "step_text"])
def test_a_failure_leaves_nothing_behind(
    step: str, existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "pkg"
    if existing:
        emit_package(module(), info(), target)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(package, step if not (existing and step == "file_digests") else "driver_text", full)
        with pytest.raises(StorageError, match="the disk is full"):
            emit_package(module(), info(), target)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert len(list(tmp_path.iterdir())) == int(existing)


def test_a_failed_rename_brings_the_old_package_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "pkg"
    emit_package(module(), info(), target)
    rename, calls = os.rename, []

    def failing(source: Any, to: Any) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError(errno.EACCES, "Permission denied")
        rename(source, to)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        with pytest.raises(StorageError, match="Permission denied"):
            emit_package(module(), info(), target)
    assert load_package(target, "cpu").edited == []
    assert [p.name for p in tmp_path.iterdir()] == ["pkg"]


def test_targets_that_are_no_packages_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(PackageError, match="is a file"):
        emit_package(module(), info(), tmp_path / "file")
    with pytest.raises(PackageError, match="not empty and not a whole step package"):
        emit_package(module(), info(), tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    with pytest.raises(PackageError, match="cannot be read"):
        emit_package(module(), info(), tmp_path / "broken")
    with pytest.raises(PackageError, match=r"would be in .*file, a file"):
        emit_package(module(), info(), tmp_path / "file" / "below")


def test_a_step_with_other_collectives_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "step_text", lambda *given: step_text(*given).replace('"dp")', '"tp")'))
    with pytest.raises(PackageError, match="other collectives than the graph: in @main the graph has all_reduce_start"):
        emit_package(reduced(), info(), tmp_path / "pkg")
    assert list(tmp_path.iterdir()) == []
