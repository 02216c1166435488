"""Runs kernel sites of a package on given tensors: in Triton's interpreter, or on a GPU.

A program of its own, since interpreted and compiled kernels cannot share a process: `python interpret_cases.py PKG`
with TRITON_INTERPRET=1, where PKG holds the manifest, `kernels.py`, `reference.py` and `cases.pt`, a list of (site,
inputs). The sites run through the runtime's own call path, launched by the JIT launcher. Results go to `results.pt`:
for each case the outputs, and the inputs as they are afterwards. Without PKG it imports torch and Triton once, and
runs each directory that it reads a line of in a fork.

Where the environment has MGRAPH_KERNELS_ON=sm_90a the same tests run binaries for that GPU on it. Each tensor is then
an allocation of its own that ends with it, so that reads past an end are seen where MGRAPH_SANITIZER names a tool of
compute-sanitizer (memcheck, racecheck), under which the program then runs.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from mgraph.runtime import kernels as runtime

Case = tuple[str, tuple[torch.Tensor, ...]]
PROGRAM = (sys.executable, str(Path(__file__)))
SAID = "said.txt"
SECONDS = 120
"""What a run may take."""


def release(library: str) -> tuple[int, ...]:
    """Major and minor version of what is installed."""
    return tuple(map(int, version(library).split(".")[:2]))


BROKEN_INTERPRETER = (
    release("triton") < (3, 7) and release("numpy") >= (2, 4) and not os.environ.get("MGRAPH_KERNELS_ON")
)
"""The interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.4 no longer does."""


class Interpreter:
    """A device of three multiprocessors whose launches all go through Triton's interpreter."""

    torch_device = torch.device("cpu")
    capability = (9, 0)
    cuda = 13
    multiprocessors = 3

    def load(self, cubin: bytes, symbol: str, shared: int) -> Any:
        raise AssertionError("the interpreter loads no binaries")

    def room(self, kernel: Any, threads: int, shared: int) -> int:
        raise AssertionError("the interpreter has no multiprocessors")

    def launch(
        self, kernel: Any, grid: tuple[int, ...], threads: int, shared: int, parameters: int, early: bool
    ) -> None:
        raise AssertionError("the interpreter launches no binaries")


def interpret(
    specs: Sequence[Any], cases: Sequence[Case], directory: Path
) -> list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    """Outputs and inputs of each case, run by a process of its own in `directory`."""
    from benchmarks.gpu.sanitizer import under
    from mgraph.codegen.triton import build_kernels

    arch, sanitizer = os.environ.get("MGRAPH_KERNELS_ON", ""), os.environ.get("MGRAPH_SANITIZER", "")
    entries = build_kernels(specs, directory, archs=(arch,) if arch else ())
    (directory / "manifest.json").write_text(json.dumps({"kernels": entries}))
    torch.save(list(cases), directory / "cases.pt")
    if arch:
        done = subprocess.run(
            [*(under(sanitizer) if sanitizer else []), *PROGRAM, str(directory)],
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=300 if sanitizer else SECONDS,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    else:
        server = interpreter()
        assert server.stdin is not None and server.stdout is not None
        print(directory, file=server.stdin, flush=True)
        assert server.stdout.readline() == "0\n", (directory / SAID).read_text()[-4000:]
    results: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = torch.load(directory / "results.pt")
    return results


@functools.cache
def interpreter() -> subprocess.Popen[str]:
    """The program that serves this process: it ends when its input does."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen(PROGRAM, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # closes its input
    return server


def serve() -> None:
    """Run each directory of the input in a fork, and write its exit code. What it says goes to a file beside."""
    from triton.runtime import interpreter

    assert interpreter
    gc.disable()  # a run ends before it would matter
    for line in sys.stdin:
        directory = Path(line.removesuffix("\n"))
        child = os.fork()
        if child == 0:
            with (directory / SAID).open("w") as said:
                os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
            signal.alarm(SECONDS)
            try:
                main(directory)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def multiply_bf16() -> None:
    """Products of bf16 by their values: the interpreter keeps bf16 as 16-bit words, and multiplies those."""
    import numpy
    from triton import language
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar is not language.bfloat16:
            return handle
        words = handle.data.astype(numpy.uint32) << 16
        return interpreter.TensorHandle(words.view(numpy.float32), language.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def moved(value: Any, device: torch.device) -> Any:
    """Tensors, in lists too, on a device, with the strides and the place in memory that they have."""
    if isinstance(value, list | tuple):
        return type(value)(moved(v, device) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
    return whole.to(device).as_strided(value.shape, value.stride(), value.storage_offset())


def sites_of(directory: Path) -> tuple[runtime.Kernels, torch.device]:
    """The sites of a package, and where their tensors are to lie."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        device = torch.device("cuda", 0)
        runtime.set_device(device, strict=True)
        return runtime.kernels(directory / "step.py"), device
    multiply_bf16()
    entries = json.loads((directory / "manifest.json").read_text())["kernels"]
    twins = runtime._import_file(directory / "reference.py")
    sites = runtime.bind(entries, directory, twins, Interpreter(), strict=True, jit=True)
    assert set(sites.providers.values()) == {"jit"}, sites.providers
    return sites, torch.device("cpu")


def main(directory: Path) -> None:
    sites, device = sites_of(directory)
    results = []
    for name, given in torch.load(directory / "cases.pt"):
        inputs = moved(given, device)
        made: Any = getattr(sites, name)(*inputs)
        results.append(moved((made if isinstance(made, tuple) else (made,), inputs), torch.device("cpu")))
    torch.save(results, directory / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1])) if sys.argv[1:] else serve()
