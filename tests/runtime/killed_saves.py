"""Processes that are killed (SIGKILL) while they save; after each, the newest checkpoint is loaded.

python -m tests.runtime.killed_saves COUNT DIRECTORY

Half of the COUNT processes end at an access to a file of the checkpoints, the others after a time; the moments are
spread evenly over those of a whole save. Prints a JSON list of [step that was whole before, step that is loaded].
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mgraph.runtime import checkpoint
from mgraph.runtime.mesh import Mesh
from mgraph.runtime.package import State, StateSpec
from mgraph.runtime.saving import Saver

ALONE = Mesh(0, 1, torch.device("cpu"), {})
SPECS = tuple(StateSpec(f"w{i}", "param", torch.float32, (300, 300), True, True, (), f"w{i}") for i in range(8))


def state_of(step: int) -> State:
    """A state that tells the step."""
    return {spec.name: torch.full(spec.shape, float(step)) for spec in SPECS}


def loaded(directory: Path) -> int:
    """The step of the newest checkpoint, whose tensors must be those of this step."""
    found = checkpoint.latest(directory)
    assert found is not None, "no checkpoint is left"
    state = state_of(-1)
    checkpoint.load(found, state, SPECS, ALONE)
    assert all(bool((value == found.step).all()) for value in state.values()), f"step {found.step} holds another"
    return found.step


def save(directory: Path, step: int) -> None:
    """Write the checkpoint of a step."""
    with Saver(directory, SPECS, ALONE, 2) as saver:
        saver.save(step, state_of(step), {})


def accesses(directory: Path, then: Callable[[int], None]) -> None:
    """From here on call `then` with the number of each access to a file of the directory."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if any(isinstance(a, str | os.PathLike) and str(directory) in str(a) for a in arguments):
            count += 1
            then(count)

    sys.addaudithook(hook)


def in_process(action: Callable[[], None], delay: float | None) -> None:
    """Run an action in a process of its own, killed after a delay in seconds, if it has not killed itself."""
    process = os.fork()
    if process == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    if delay is not None:
        time.sleep(delay)
        os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status in (0, -signal.SIGKILL), "a save failed"


def killed(directory: Path, step: int, access: int) -> None:
    """Save, and die at the access of this number (0: at none)."""
    accesses(directory, lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == access else None)
    save(directory, step)


def main(count: int, directory: Path) -> None:
    """Measure a whole save, then kill `count` of them."""
    report = directory.with_name("accesses")

    def measured() -> None:
        last = 0

        def then(number: int) -> None:
            nonlocal last
            last = number

        accesses(directory, then)
        save(directory, 2)
        report.write_text(str(last))

    save(directory, 1)
    start = time.perf_counter()
    in_process(measured, None)
    seconds, number_of_accesses = time.perf_counter() - start, int(report.read_text())
    results = []
    for index in range(count):
        before = loaded(directory)
        moment = (index // 2 + 0.5) / -(-count // 2)

        at = 1 + int(moment * number_of_accesses) if index % 2 == 0 else 0
        in_process(partial(killed, directory, before + 1, at), None if at else moment * seconds)
        results.append([before, loaded(directory)])
    print(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
