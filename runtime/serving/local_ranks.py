"""Starts the ranks that share a package on this machine, where nobody else has: this process becomes rank 0.

So a server of several GPUs is one command and one process to signal. Followers have sessions of their own, so that a
Ctrl-C of the terminal reaches rank 0 alone, which says when they end. torchrun is for several machines.
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

_PATIENCE = 3.0  # seconds in which rank 0 hears by itself why another has ended


@contextmanager
def local_ranks(package_dir: Path, arguments: Sequence[str], count: int) -> Iterator[None]:
    """Within, `count` ranks run PKG/serve.py with these arguments, of which this process is the first."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in shared.items()})
    command = [sys.executable, str(package_dir / "serve.py"), *arguments]
    followers = []
    for rank in range(1, count):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        followers.append(subprocess.Popen(command, env=environment, start_new_session=True))
        threading.Thread(target=_watch, args=(followers[-1], rank), daemon=True).start()
    os.environ.update(RANK="0", LOCAL_RANK="0")
    try:
        yield
    finally:
        for follower in followers:
            follower.terminate()  # of which one that has begun to follow takes no notice


def _watch(follower: subprocess.Popen[bytes], rank: int) -> None:
    """A follower that ends before it follows cannot be noticed by its connection."""
    code = follower.wait()
    time.sleep(_PATIENCE)
    if code > 0:
        end_all(f"rank {rank} has ended with exit code {code}")
