"""Kernels built by a process of their own: the same files and entries, the same errors, and no process left behind."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mgraph.codegen.triton import KernelSpec, aot, build_kernels, rms_norm
from mgraph.codegen.triton.builder import KernelBuilder, num_workers
from mgraph.codegen.triton.triton_cache import check_elf
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


def test_binaries_are_the_same_wherever_they_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a cache of its own, and in a process of its own; one prepared elsewhere, as a compilation does."""
    made = []
    for name in ("here", "there"):
        directory = tmp_path / name
        directory.mkdir()
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / f"cache-{name}"))
        with KernelBuilder(["sm_90a"]) as builder:
            builder.prepare([spec()] if name == "there" else [])
            builder.start([spec()], directory)
            builder.result()
        made.append(files(directory))
    assert made[0] == made[1]
    binaries = [data for name, data in made[0].items() if name.endswith(".cubin")]
    assert binaries and all(b"kernels.py" in data for data in binaries)
    for data in binaries:
        assert str(tmp_path).encode() not in data and sys.prefix.encode() not in data
        assert tempfile.gettempdir().encode() + b"/" not in data


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


def group(leader: int) -> set[int]:
    """The processes of a group that live."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
            found |= {int(path.parent.name)} if int(of) == leader and state != "Z" else set()
    return found


def workers(leader: int) -> set[int]:
    """The processes beside the leader of a group, as soon as there are some."""
    for _ in range(1000):
        if found := group(leader) - {leader}:
            return found
        time.sleep(0.02)
    raise AssertionError("no worker was started")


def test_leaving_ends_all_processes() -> None:
    with KernelBuilder(["sm_80"]) as builder:
        assert builder.process is not None and builder.process.poll() is None
        builder.prepare([spec()])
        assert workers(builder.process.pid) and os.getpgid(builder.process.pid) != os.getpgid(0)
    assert builder.process.poll() is not None
    for _ in range(100):
        if not group(builder.process.pid):
            return
        time.sleep(0.02)
    raise AssertionError("workers are left")


def test_a_worker_that_is_killed_is_an_error(tmp_path: Path) -> None:
    with KernelBuilder(["sm_80"]) as builder:
        assert builder.process is not None
        builder.prepare([spec()])
        for worker in workers(builder.process.pid):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        builder.start([spec()], tmp_path)
        with pytest.raises(MgraphError, match="ended before it was done"):
            builder.result()


def test_workers_are_as_many_as_cpus_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for kilobytes, expected in ((100 << 20, 16), (2 << 20, 6), (1024, 1)):
        text = f"MemTotal: 1 kB\nMemAvailable:   {kilobytes} kB\n"
        monkeypatch.setattr(Path, "read_text", lambda *_, text=text, **__: text)
        assert num_workers() == expected


def test_processes_make_what_one_makes(tmp_path: Path) -> None:
    specs = [rms_norm.forward(f"n{n}", rms_norm.RmsNorm(n, "f32", "f32", 1e-6, "normed", 0.0)) for n in (33, 64)]
    directories = [tmp_path / name for name in ("here", "there")]
    for directory in directories:
        directory.mkdir()
    archs = ["sm_80", "sm_100a"]
    made = [build_kernels(specs, directories[0], archs)]
    with KernelBuilder(archs) as builder:
        builder.start(specs, directories[1])
        made.append(builder.result())
    assert made[0] == made[1] and files(directories[0]) == files(directories[1])
    binaries = [binary for entry in made[0] for launch in entry["launches"] for binary in launch["binaries"]]
    assert [binary["arch"] for binary in binaries] == ["sm_80", "sm_100a", "sm_80", "sm_80", "sm_100a", "sm_100a"]
    for binary in binaries:
        cubin = (directories[0] / binary["file"]).read_bytes()
        check_elf(cubin)
        # The architecture stands in an ELF file's flags: in the second byte from CUDA 13 on, in the first before.
        assert int(binary["arch"][3:].rstrip("a")) in cubin[48:50]
