"""Processes of their own that compile the kernels of a package while the rest of it is made.

Triton holds the interpreter's lock for most of a compilation, so a thread would only take turns with the passes and the
printing; a process overlaps them. It imports Triton while the model is captured, then splits into as many workers as
there are CPUs, each for a binary at a time, and compiles what the graph has after each pass: what is there to the end
is ready when the package asks for it. Specs and manifest entries are plain data, so they cross the border as they are,
and so do errors. All are one process group, which is not the terminal's: who started them ends them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from mgraph.codegen.triton.aot import Binaries, build_kernels
from mgraph.codegen.triton.kernel import KernelSpec
from mgraph.errors import MgraphError

WORKER_BYTES = 300 << 20
"""Memory for each worker: it has 55 MB of its own, and the assembler that it runs up to 200 MB."""


class KernelBuilder:
    """`build_kernels` in another process: `prepare` what may be needed, `start` it once, take its `result`.

    Without architectures there is no process. Use it in a `with`: leaving it ends the process, whatever it is at.
    """

    def __init__(self, archs: Sequence[str]) -> None:
        self._archs = tuple(archs)
        self._prepared: list[KernelSpec] = []
        self._asked: tuple[Sequence[KernelSpec], Path] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        if self._archs:
            self._connection, theirs = Pipe()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                process_group=0,
            )
            theirs.close()

    def prepare(self, specs: Sequence[KernelSpec]) -> None:
        """Compile kernels that a package will probably have. What fails here is told of if it is built."""
        if new := [spec for spec in specs if spec not in self._prepared]:
            self._prepared += new
            self._send(new, None)

    def start(self, specs: Sequence[KernelSpec], directory: Path) -> None:
        """Begin to build the kernels of a package into its directory."""
        assert self._asked is None, "a builder builds once"
        self._asked = specs, directory
        self._send(specs, directory)

    def _send(self, specs: Sequence[KernelSpec], directory: Path | None) -> None:
        if self.process is not None:
            with suppress(ConnectionError):  # a process that has died is told of by `result`
                self._connection.send((specs, directory, self._archs))

    def result(self) -> list[dict[str, Any]]:
        """The manifest's `kernels` list, as soon as it is there. Raises what `build_kernels` raises."""
        assert self._asked is not None, "nothing was started"
        if self.process is None:
            return build_kernels(*self._asked, archs=())
        try:
            made = self._connection.recv()
        except (EOFError, ConnectionError):
            status = self.process.wait()
            self._end()
            raise MgraphError(
                f"the process that compiles the GPU kernels ended with status {status}",
                hint="see what it wrote above; where memory was short, compile on a larger machine",
            ) from None
        if isinstance(made, BaseException):
            raise made
        built: list[dict[str, Any]] = made
        return built

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            if self.process.returncode is None:
                self._end()
            self._connection.close()

    def _end(self) -> None:
        """End the process and its workers, whatever they are at."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def num_workers() -> int:
    """How many processes compile at once: one for each CPU that this process may use, as far as there is memory."""
    usable = len(os.sched_getaffinity(0))
    with suppress(OSError, AttributeError):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        usable = min(usable, available // WORKER_BYTES)
    return max(usable, 1)


def serve(connection: Connection) -> None:
    """Compile what is asked for until the other side has gone; answer what names a directory."""
    with suppress(ImportError):  # `build_kernels` says so where it needs it
        import triton.compiler  # noqa: F401  (before the request comes, not after)
    made: Binaries = {}
    # Forked, so that workers share what is imported; this process has no threads yet.
    with ProcessPoolExecutor(num_workers(), get_context("fork")) as pool, suppress(EOFError):
        while True:
            specs, directory, archs = connection.recv()
            if directory is None:
                with TemporaryDirectory() as scratch, suppress(MgraphError, OSError, BrokenProcessPool):
                    build_kernels(specs, Path(scratch), archs, made, pool)
                continue
            try:
                answer: Any = build_kernels(specs, directory, archs, made, pool)
            except (MgraphError, OSError) as error:
                answer = error
            except BrokenProcessPool:
                hint = "see what it wrote above; where memory was short, compile on a larger machine"
                answer = MgraphError("a process that compiles GPU kernels ended before it was done", hint=hint)
            connection.send(answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
