"""Two processes that save together, one of which is killed (SIGKILL) meanwhile; after each, the newest is loaded.

python -m tests.runtime.killed_pairs COUNT DIRECTORY

Of the COUNT saves the two ranks are killed in turn, at accesses to a file of the checkpoints, from the first of a
whole save to its last. The other one must end by itself. Prints a JSON list of [rank that was killed, step that was
whole before, step that is loaded]; at the end both save once more.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from mgraph.runtime.saving import Saver
from tests.runtime.killed_saves import SPECS, accesses, loaded, state_of
from tests.runtime.resharding import Part

RANKS = (0, 1)
PATIENCE = 60
"""Seconds after which a process that still waits for the other is ended."""

Access = Callable[[int, int], None]
"""What happens at an access: given the rank and the number of the access."""


def save(rank: int, directory: Path, step: int, then: Access) -> None:
    """One of the two: both have the whole state, and each writes half of it."""
    store = directory.with_name(f"store{step}")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(RANKS))
    mesh = Part(rank, len(RANKS), torch.device("cpu"), {"dp": len(RANKS)}, host=dist.group.WORLD)
    accesses(directory, partial(then, rank))
    with Saver(directory, SPECS, mesh, 2) as saver:
        saver.save(step, state_of(step), {})


def together(directory: Path, step: int, then: Access) -> list[int]:
    """Save in two processes; how each ended."""
    directory.with_name(f"store{step}").unlink(missing_ok=True)
    processes = []
    for rank in RANKS:
        process = os.fork()
        if process == 0:
            signal.alarm(PATIENCE)
            try:
                save(rank, directory, step, then)
                os._exit(0)
            finally:
                os._exit(1)
        processes.append(process)
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


def main(count: int, directory: Path) -> None:
    """Count the accesses of a whole save, then kill one rank in `count` of them."""

    def note(rank: int, number: int) -> None:
        directory.with_name(f"accesses{rank}").write_text(str(number))

    torch.set_num_threads(1)  # a fork of a process with more would wait for threads that it lacks
    assert together(directory, 1, note) == [0, 0]
    numbers = [int(directory.with_name(f"accesses{rank}").read_text()) for rank in RANKS]
    results = []
    for index in range(count):
        before, doomed = loaded(directory), index % 2
        at = 1 + (numbers[doomed] - 1) * (index // 2) // max(-(-count // 2) - 1, 1)

        def kill(rank: int, number: int, doomed: int = doomed, at: int = at) -> None:
            if (rank, number) == (doomed, at):
                os.kill(os.getpid(), signal.SIGKILL)

        ends = together(directory, before + 1, kill)
        assert ends[doomed] in (0, -signal.SIGKILL), "a save failed"  # 0: it had fewer accesses
        assert ends[1 - doomed] in (0, 1), "the other one waits for ever"
        results.append([doomed, before, loaded(directory)])
    last = loaded(directory) + 1
    assert together(directory, last, lambda rank, number: None) == [0, 0] and loaded(directory) == last
    print(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
