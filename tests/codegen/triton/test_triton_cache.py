"""What Triton's cache gives: damaged entries are compiled again, and compilers share a directory."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mgraph.codegen.triton import KernelSpec, build_kernels, rms_norm
from mgraph.codegen.triton.triton_cache import check_elf, compile_whole, read_ptx
from mgraph.errors import MgraphError, StorageError

pytest.importorskip("triton", reason="there is no Triton to compile with on this platform")

TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry add_one(
    .param .u64 .ptr .global .align 1 add_one_param_0,
    .param .u32 add_one_param_1
)
.reqntid 128
{ ret; }
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache; the tests of the kernels may run in Triton's interpreter, these compile."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def spec(width: int = 64) -> KernelSpec:
    """A small kernel site."""
    return rms_norm.forward("norm", rms_norm.RmsNorm(width, "f32", "f32", 1e-6, "normed", 0.0))


def code(cubin: bytes) -> bytes:
    """The instructions of a binary; line tables around them name the source file and its time."""
    start, count = struct.unpack_from("<40xQ12xH", cubin)
    sections = [struct.unpack_from("<4x4xQ8xQQ24x", cubin, start + 64 * index) for index in range(count)]
    found = b"".join(cubin[offset : offset + size] for flags, offset, size in sections if flags & 4)
    assert found
    return found


def built(directory: Path) -> dict[str, bytes]:
    """The instructions of the binaries of one build, by name."""
    directory.mkdir(exist_ok=True)
    build_kernels([spec()], directory, ["sm_80"])
    return {file.name: code(file.read_bytes()) for file in directory.rglob("*.cubin")}


def test_read_ptx() -> None:
    abi = read_ptx(TEXT)
    assert (abi.symbol, abi.arch, abi.cuda, abi.threads, abi.num_parameters) == ("add_one", "sm_90a", 12, 128, 2)
    with pytest.raises(ValueError, match="no entry"):
        read_ptx("")


def test_entries_that_are_damaged_are_compiled_again(tmp_path: Path, cache: Path) -> None:
    whole = built(tmp_path / "package")
    assert whole
    data = next((tmp_path / "package").rglob("*.cubin")).read_bytes()
    for cut in (0, 30, 100, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError, match="its cubin"):
            check_elf(data[:cut])
    for kind, size in (("cubin", 100), ("ptx", 0), ("ptx", 300), ("json", 0)):
        for file in cache.rglob(f"norm.{kind}"):
            os.truncate(file, size)
        assert built(tmp_path / "package") == whole, f"{kind} of {size} bytes"
        assert all(file.stat().st_size > size for file in cache.rglob(f"norm.{kind}"))
    for file in cache.rglob("norm.ptx"):
        file.unlink()
    assert built(tmp_path / "package") == whole
    groups = list(cache.rglob("__grp__norm*.json"))
    for text in ("", "{", "{}", "[]"):
        for file in groups:
            file.write_text(text, encoding="utf-8")
        assert built(tmp_path / "package") == whole, text


def test_damage_that_stays_is_told_of(cache: Path) -> None:
    compiled = SimpleNamespace(asm={"ptx": TEXT, "cubin": b"\x7fELF"})
    with pytest.raises(MgraphError, match=r"kernel add_one is damaged.*4 bytes is no 64-bit ELF") as caught:
        compile_whole(lambda: compiled, "add_one")
    assert caught.value.where == str(cache) and "TRITON_CACHE_DIR" in str(caught.value.hint)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, cache: Path) -> None:
    cache.write_text("not a directory")
    with pytest.raises(StorageError, match="Triton cannot keep what it compiles") as caught:
        built(tmp_path / "package")
    assert str(caught.value.where).startswith(str(cache)) and "set TRITON_CACHE_DIR" in str(caught.value.hint)


SHARE = """
import sys
from pathlib import Path
from mgraph.codegen.triton import build_kernels, rms_norm
specs = [rms_norm.forward(f"norm_{n}", rms_norm.RmsNorm(n, "f32", "f32", 1e-6, "normed", 0.0)) for n in (33, 40)]
print("ready", flush=True)
sys.stdin.readline()
build_kernels(specs, Path(sys.argv[1]), ["sm_80"])
"""

COMPILERS = 8


def test_compilers_share_a_cache(tmp_path: Path, cache: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    directories = [tmp_path / str(index) for index in range(COMPILERS)]
    running, pipe = [], subprocess.PIPE
    for directory in directories:
        directory.mkdir()
        command = [sys.executable, "-c", SHARE, str(directory)]
        running.append(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True))
    assert [process.stdout and process.stdout.readline() for process in running] == ["ready\n"] * COMPILERS
    for process in running:  # all are let go at once
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(timeout=120) for process in running] == [0] * COMPILERS
    made = [{file.name: code(file.read_bytes()) for file in each.rglob("*.cubin")} for each in directories]
    assert len(made[0]) == 3 and made == [made[0]] * COMPILERS
    assert not list(cache.rglob("tmp.pid_*")), "files under temporary names are left"
    for file in cache.rglob("*.cubin"):
        check_elf(file.read_bytes())
