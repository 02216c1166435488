"""Ahead-of-time compilation on a machine without a GPU: cubins, their ABI, and what users can get wrong.

Compiling happens in one process of its own, since interpreted and compiled kernels cannot share one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mgraph.codegen.triton import build_kernels, rms_norm
from mgraph.codegen.triton.aot import variants
from mgraph.codegen.triton.kernel import Launch
from mgraph.codegen.triton.rms_norm import RmsNorm
from mgraph.errors import MgraphError, OptionError

COMPILE = """
import json, sys
from pathlib import Path
from mgraph.codegen.triton import build_kernels, rms_norm
from mgraph.codegen.triton.rms_norm import RmsNorm
aligned, ragged = RmsNorm(256, "bf16", "bf16", 1e-5, round="normed"), RmsNorm(33, "f32", "f32", 1e-6, round="product")
specs = [
    rms_norm.forward("rms_norm_fwd_0", aligned), rms_norm.backward("rms_norm_bwd_0", aligned),
    rms_norm.forward("rms_norm_fwd_1", ragged), rms_norm.backward("rms_norm_bwd_1", ragged),
]
json.dump(build_kernels(specs, Path(sys.argv[1]), ["sm_90a", "sm_80"]), sys.stdout)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A package directory with cubins for two architectures, and its manifest entries by name."""
    directory = tmp_path_factory.mktemp("package")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(directory)],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return directory, {entry["name"]: entry for entry in json.loads(done.stdout)}


def test_every_launch_has_cubins(built: tuple[Path, dict[str, Any]]) -> None:
    directory, entries = built
    for entry in entries.values():
        for launch in entry["launches"]:
            assert {binary["arch"] for binary in launch["binaries"]} == {"sm_90a", "sm_80"}
            for binary in launch["binaries"]:
                cubin = (directory / binary["file"]).read_bytes()
                assert cubin[:4] == b"\x7fELF" and binary["symbol"].encode() in cubin
                assert cubin[18:20] == (190).to_bytes(2, "little"), "not an ELF file for CUDA"


def test_launch_abi(built: tuple[Path, dict[str, Any]]) -> None:
    _, entries = built
    (launch,) = entries["rms_norm_fwd_0"]["launches"]
    assert launch["args"] == ["x", "weight", "y", "rstd", "rows"] and launch["grid"] == [["cdiv", "rows", 8]]
    for binary in launch["binaries"]:
        assert binary["symbol"] == launch["function"] == "rms_norm_fwd_0"
        assert binary["threads"] == 32 * launch["num_warps"] and binary["hidden"] == [0, 0]
        assert binary["cuda"] >= 12 and 0 <= binary["shared"] <= 227 * 1024


def test_aligned_variants_only_where_rows_keep_the_boundary(built: tuple[Path, dict[str, Any]]) -> None:
    _, entries = built
    for name, alignments in (("rms_norm_fwd_0", {1, 16}), ("rms_norm_fwd_1", {1}), ("rms_norm_bwd_1", {1})):
        for launch in entries[name]["launches"]:
            assert {binary["alignment"] for binary in launch["binaries"]} == alignments


@pytest.mark.parametrize(
    ("aligned", "takes", "compiled"),
    [(True, "all", (True, False)), (False, "all", (False,)), (True, "aligned", (True,)), (False, "others", (False,))],
)
def test_variants_are_those_of_the_calls_that_a_launch_takes(
    aligned: bool, takes: str, compiled: tuple[bool, ...]
) -> None:
    assert variants(Launch("f", (), (1,), 4, 1, aligned, takes=takes)) == compiled


def test_unknown_architecture(tmp_path: Path) -> None:
    spec = rms_norm.forward("rms_norm_fwd_0", RmsNorm(64, "f32", "f32", 1e-5, round="normed"))
    with pytest.raises(OptionError, match="gfx942"):
        build_kernels([spec], tmp_path, ["gfx942"])


def test_missing_triton_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = rms_norm.forward("rms_norm_fwd_0", RmsNorm(64, "f32", "f32", 1e-5, round="normed"))
    assert build_kernels([spec], tmp_path, [])[0]["launches"][0]["binaries"] == []
    with pytest.raises(MgraphError, match="triton, which is not installed"):
        build_kernels([spec], tmp_path, ["sm_90a"])
