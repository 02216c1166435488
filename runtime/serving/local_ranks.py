"""Starts the ranks that share a package on this machine, where nobody else has: this process becomes rank 0.

So a server of several GPUs is one command and one process to signal. Followers have sessions of their own, so that a
Ctrl-C of the terminal reaches rank 0 alone, which says when they end. However rank 0 ends, a pipe that it holds then
ends, and with it followers that were not yet connected. torchrun is for several machines.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mgraph.runtime.serving.ranks import end_all

_PATIENCE = 3.0  # seconds in which a rank hears by itself why another has ended
_PIPE = "MGRAPH_RANK_0"  # names, to a follower, the end of the pipe that it reads


@contextmanager
def local_ranks(package_dir: Path, arguments: Sequence[str], count: int) -> Iterator[None]:
    """Within, `count` ranks run PKG/serve.py with these arguments, of which this process is the first."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in shared.items()})
    command = [sys.executable, str(package_dir / "serve.py"), *arguments]
    reading, _ = os.pipe()  # the other end closes when this process ends: a follower may still be leaving before
    followers = []
    ending = threading.Event()
    for rank in range(1, count):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), _PIPE: str(reading)}
        followers.append(subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=[reading]))
        threading.Thread(target=_watch, args=(followers[-1], rank, ending), daemon=True).start()
    os.close(reading)
    os.environ.update(RANK="0", LOCAL_RANK="0")
    try:
        yield
    finally:
        ending.set()
        for follower in followers:
            follower.terminate()  # of which one that has begun to follow takes no notice


def end_with_rank_0() -> None:
    """In a follower that `local_ranks` has started: end when rank 0 has, in whatever state this process is."""

    def wait(pipe: int) -> None:
        os.read(pipe, 1)
        time.sleep(_PATIENCE)
        os._exit(1)

    if _PIPE in os.environ:
        threading.Thread(target=wait, args=(int(os.environ[_PIPE]),), name="rank 0", daemon=True).start()


def _watch(follower: subprocess.Popen[bytes], rank: int, ending: threading.Event) -> None:
    """A follower that ends before it follows cannot be noticed by its connection."""
    code = follower.wait()
    if code and not ending.is_set() and not ending.wait(_PATIENCE):
        how = f"has ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
        end_all(f"rank {rank} {how}")
