"""Kernels built by a process of their own: the same files and entries, the same errors, and no process left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mgraph.codegen.triton import KernelSpec, aot, build_kernels, rms_norm
from mgraph.codegen.triton.builder import KernelBuilder
from mgraph.errors import MgraphError, OptionError

pytest.importorskip("triton", reason="there is no Triton to compile with on this platform")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of the kernels may run in Triton's interpreter; these compile."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def spec() -> KernelSpec:
    """A small kernel site."""
    return rms_norm.forward("norm", rms_norm.RmsNorm(64, "f32", "f32", 1e-6, "normed", 0.0))


def files(directory: Path) -> dict[str, bytes]:
    """What a directory holds, by relative path."""
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_builds_what_build_kernels_builds(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    with KernelBuilder(["sm_80"]) as builder:
        builder.start([spec()], there)
        made = builder.result()
    assert made[0]["launches"][0]["binaries"]
    assert {name for name in files(there) if name.endswith(".cubin")} == {
        binary["file"] for launch in made[0]["launches"] for binary in launch["binaries"]
    }
    with KernelBuilder([]) as builder:
        builder.start([spec()], here)
        texts = builder.result()
    assert texts == build_kernels([spec()], here, [])
    assert files(here) == {name: text for name, text in files(there).items() if name.endswith(".py")}


def test_what_was_prepared_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: aot.Binaries = {}
    first = build_kernels([spec()], tmp_path, ["sm_80"], made)
    monkeypatch.setattr(aot, "compile_launch", None)
    assert build_kernels([spec()], tmp_path, ["sm_80"], made) == first
    with pytest.raises(TypeError, match="not callable"):
        build_kernels([spec()], tmp_path, ["sm_90a"], made)
    with KernelBuilder(["sm_80"]) as builder:
        builder.prepare([spec()])
        builder.prepare([spec()])
        builder.start([spec()], tmp_path)
        assert builder.result() == first


def test_errors_cross_over(tmp_path: Path) -> None:
    with KernelBuilder(["gfx942"]) as builder:
        builder.prepare([spec()])
        builder.start([spec()], tmp_path)
        with pytest.raises(OptionError, match="unknown GPU architecture 'gfx942'") as caught:
            builder.result()
    assert caught.value.where == "--arch"
    with KernelBuilder(["sm_80"]) as builder:
        builder.start([spec()], tmp_path / "nowhere")
        with pytest.raises(FileNotFoundError, match="nowhere"):
            builder.result()


def test_a_process_that_is_killed_is_an_error(tmp_path: Path) -> None:
    with KernelBuilder(["sm_80"]) as builder:
        assert builder.process is not None
        os.kill(builder.process.pid, signal.SIGKILL)
        builder.process.wait()
        builder.start([spec()], tmp_path)
        with pytest.raises(MgraphError, match="ended with status -9"):
            builder.result()


def test_leaving_ends_the_process() -> None:
    with KernelBuilder(["sm_80"]) as builder:
        assert builder.process is not None and builder.process.poll() is None
    assert builder.process.poll() is not None
