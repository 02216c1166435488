"""Loading a step package: what a whole one gives, and what is said of a broken one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from mgraph.errors import OptionError, PackageError
from mgraph.runtime.package import load_package
from tests.runtime.test_kernels import ENTRY


def test_loads_entries_and_state(package_dir: Path) -> None:
    package = load_package(package_dir, "cpu")
    assert set(package.entries) == {"microbatch", "finish", "evaluate", "predict"}
    assert package.vocab_size == 256
    spec = next(spec for spec in package.state_specs if spec.name == "hidden.weight")
    assert (spec.kind, spec.dtype, spec.shape, spec.persist) == ("param", torch.float32, (20, 12), True)
    assert package.edited == []


def test_call_names_the_outputs(package_dir: Path) -> None:
    package = load_package(package_dir, "cpu")
    state = {
        "embed.weight": torch.zeros(256, 12),
        "hidden.weight": torch.zeros(20, 12),
        "head.weight": torch.zeros(256, 20),
    }
    logits = package.call("predict", state, torch.zeros(2, 3, dtype=torch.int64))["logits"]
    assert logits.shape == (2, 3, 256)


def test_two_packages_do_not_share_a_module(package_dir: Path, make_package: Callable[..., Path]) -> None:
    other = make_package()
    (other / "step.py").write_text((other / "step.py").read_text() + "\nMARK = 1\n")
    first, second = load_package(package_dir, "cpu"), load_package(other, "cpu")
    assert "MARK" in second.entries["finish"].__globals__
    assert "MARK" not in first.entries["finish"].__globals__
    assert second.edited == ["step.py"]


def test_facts_cover_what_runs(package_dir: Path, make_package: Callable[..., Path]) -> None:
    def facts(path: Path = package_dir) -> dict[str, str]:
        return load_package(path, "cpu").facts()

    before = facts()
    assert {"manifest.json", "step.py", "train.py", "torch", "mgraph"} <= before.keys()
    assert before["the order of collectives in finish"] == "all_reduce@dp"
    (package_dir / "notes.txt").write_text("not of the package")
    assert facts() == before
    step = package_dir / "step.py"
    text = step.read_text()
    step.write_text(text + "\n")
    edited = facts()
    assert {n for n in before if before[n] != edited[n]} == {"step.py"} and edited["step.py"].endswith("(edited)")
    step.write_text(text.replace('"dp")', '"tp")'))
    assert facts()["the order of collectives in finish"] == "all_reduce@tp"
    step.write_text(text)
    other = facts(make_package(fingerprint={"ir": "0", "options": {"precision": "bf16"}}))
    assert {n for n in other if before.get(n) != other[n]} == {"manifest.json", "compiled with precision"}


def test_a_collective_that_some_ranks_might_leave_out(package_dir: Path) -> None:
    step = package_dir / "step.py"
    text = step.read_text()
    line = next(line for line in text.splitlines() if "rt.all_reduce(" in line)
    indent = line[: len(line) - len(line.lstrip())]
    step.write_text(text.replace(line, f"{indent}if lr > 0:\n    {line}"))
    with pytest.raises(PackageError, match="all_reduce over dp stands under a condition") as caught:
        load_package(package_dir, "cpu").facts()
    assert caught.value.where is not None and caught.value.where.startswith(f"{step}:")


def test_invalid_python_is_named_with_its_line(package_dir: Path) -> None:
    step = package_dir / "step.py"
    lines = step.read_text().splitlines()
    lines[19] = "def forward(state: State, tokens:"
    step.write_text("\n".join(lines))
    with pytest.raises(PackageError, match=r"step.py is not valid Python") as caught:
        load_package(package_dir, "cpu")
    assert caught.value.where is not None and caught.value.where.startswith(f"{step}:2")


def test_failing_import_is_named_with_its_line(package_dir: Path) -> None:
    step = package_dir / "step.py"
    step.write_text("import torch\nvalue = torch.no_such_name\n")
    with pytest.raises(PackageError, match=r"AttributeError.*no_such_name") as caught:
        load_package(package_dir, "cpu")
    assert caught.value.where == f"{step}:2"


def test_lost_entry(package_dir: Path) -> None:
    step = package_dir / "step.py"
    step.write_text(step.read_text().replace("def finish", "def finnish"))
    with pytest.raises(PackageError, match=r"no function 'finish'"):
        load_package(package_dir, "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 7}, "schema 7; this runtime reads schemas 0 and 1"),
        ({"schema": None}, "schema None"),
        ({"files": {"step.py": "0", "kernels.py": "0"}}, "missing: kernels.py"),
        ({"state": [{"name": "w", "kind": "param", "dtype": "f33", "shape": []}]}, "state 'w'.*'f33'"),
        ({"state": [{"name": "w", "dtype": "f32", "shape": []}]}, "state 'w'.*'kind'"),
    ],
)
def test_wrong_manifest(make_package: Callable[..., Path], changes: dict[str, object], message: str) -> None:
    with pytest.raises(PackageError, match=message):
        load_package(make_package(**changes), "cpu")


@pytest.mark.parametrize(
    ("launch", "binary", "message"),
    [
        ({"args": None}, {}, "'args' of a launch of kernel scale is no list"),
        ({"grid": 4}, {}, "'grid' of a launch of kernel scale is no list"),
        ({"function": None}, {}, "'function' of a launch of kernel scale is no text"),
        ({"binaries": None}, {}, "'binaries' of a launch of kernel scale is no list"),
        ({}, {"symbol": None}, "'symbol' of a binary of kernel scale is no text"),
        ({}, {"shared": None}, "'shared' of a binary of kernel scale is no number"),
        ({}, {"cuda": "12"}, "'cuda' of a binary of kernel scale is no number"),
        ({}, {"hidden": 0}, "'hidden' of a binary of kernel scale is no list"),
        ({}, {"arch": None}, "kernel scale has a binary for 'None'"),
    ],
)
def test_damaged_launches(
    make_package: Callable[..., Path], launch: dict[str, object], binary: dict[str, object], message: str
) -> None:
    """Of two launches with two binaries the last lacks a field (None), or has it in another form."""
    (whole,) = ENTRY["launches"]
    binaries = [whole["binaries"][0], _present({**whole["binaries"][1], **binary})]
    launches = [whole, _present({**whole, "binaries": binaries, **launch})]
    with pytest.raises(PackageError, match=message):
        load_package(make_package(kernels=[{**ENTRY, "launches": launches}]), "cpu")


def _present(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def test_absent_or_damaged_manifest(package_dir: Path) -> None:
    manifest = package_dir / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["dims"], content["mesh"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(PackageError, match=r"lacks mesh, dims"):
        load_package(package_dir, "cpu")
    manifest.write_text('{"schema": 1,\n "kind"')
    with pytest.raises(PackageError, match=r"cannot be read") as caught:
        load_package(package_dir, "cpu")
    assert caught.value.where == f"{manifest}:2"
    manifest.unlink()
    with pytest.raises(PackageError, match=r"manifest.json, which is written last, is missing"):
        load_package(package_dir, "cpu")
    with pytest.raises(PackageError, match=r"not a directory"):
        load_package(package_dir / "nowhere", "cpu")


def test_sizes_are_checked_against_the_dims(make_package: Callable[..., Path]) -> None:
    package = load_package(make_package(dims={"B": [3, 3], "S": [2, 64]}), "cpu")
    package.check_size("B", 3, "--batch-size")
    package.check_size("S", 64, "--seq-len")
    with pytest.raises(OptionError, match=r"--batch-size 4 .* B is exactly 3"):
        package.check_size("B", 4, "--batch-size")
    with pytest.raises(OptionError, match=r"--seq-len 65 .* S is from 2 to 64"):
        package.check_size("S", 65, "--seq-len")


def test_what_is_split_over_the_mesh_must_divide(make_package: Callable[..., Path]) -> None:
    package = load_package(make_package(multiples={"S": 4}), "cpu")
    package.check_size("S", 8, "--seq-len")
    package.check_size("B", 3, "--batch-size")
    with pytest.raises(OptionError, match=r"--seq-len 10 does not divide: this package splits S into 4") as caught:
        package.check_size("S", 10, "--seq-len")
    assert caught.value.hint == "--seq-len 8 or 12, or compile again without --sequence-parallel or --ep-chunks"


def test_runtime_runs_without_the_compiler(package_dir: Path) -> None:
    """Loading, state, data and a step need neither the compiler's parts nor sympy, networkx, triton."""
    script = f"""
import importlib.abc, sys
absent = ("sympy", "networkx", "triton", "mgraph.ir", "mgraph.capture", "mgraph.passes", "mgraph.codegen")
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if any(name == a or name.startswith(a + ".") for a in absent):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch
from mgraph.runtime import train
from mgraph.runtime.package import load_package
from tests.runtime.test_kernels import ENTRY
from mgraph.runtime.state import create_state
package = load_package({str(package_dir)!r}, "cpu")
state = create_state(package.state_specs, 0, "cpu")
tokens = torch.arange(12).view(2, 6)
package.call("microbatch", state, tokens, tokens)
print(float(package.call("finish", state, torch.tensor(0.1))["loss"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert 5.4 < float(done.stdout) < 5.7  # near ln 256
