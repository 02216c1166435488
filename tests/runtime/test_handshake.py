"""The start-up handshake: ranks as threads over one store, and a trainer on two machines, with gloo."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from mgraph.errors import DataError, MgraphError
from mgraph.runtime.handshake import disagreement, handshake, rank_text

ROOT = Path(__file__).parents[2]
Prepare = Callable[[], tuple[str, dict[str, str]]]
ARGUMENTS = ["--steps", "2", "--batch-size", "2", "--seq-len", "9", "--sample-length", "0", "--eval-batches", "1"]


def outcomes(prepares: list[Prepare], started: Iterable[int] | None = None) -> list[str]:
    """What each rank of a handshake ends with: what its `prepare` made, or its error. Only ranks `started` come."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in the stubs
    ranks = list(range(len(prepares)) if started is None else started)

    def outcome(rank: int) -> str:
        try:
            return handshake(store, rank, len(prepares), prepares[rank], timedelta(seconds=2))
        except MgraphError as error:
            return f"{error.message} / {error.hint}"

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(outcome, ranks))


def stating(*facts: dict[str, str]) -> list[Prepare]:
    """Ranks that are ready, with a fact each."""
    return [lambda i=i, f=f: (f"made {i}", f) for i, f in enumerate(facts)]  # type: ignore[misc]


def test_equal_ranks_go_on() -> None:
    assert outcomes(stating(*[{"step.py": "a"}] * 3)) == ["made 0", "made 1", "made 2"]


def test_the_ranks_that_differ_are_named_on_all() -> None:
    usual, other, third = {"step.py": "a", "--lr": "1"}, {"step.py": "b", "--lr": "1"}, {"step.py": "a", "--lr": "2"}
    found = outcomes(stating(other, usual, third, usual, other, usual, usual))
    assert len(set(found)) == 1
    assert found[0].split(" / ")[0].splitlines() == [
        "not all ranks run the same; unlike ranks 1, 3, 5-6",
        "  ranks 0, 4: step.py is b, not a",
        "  rank 2: --lr is 2, not 1",
    ]


def test_of_equally_many_the_lowest_rank_is_right() -> None:
    assert (
        disagreement([{"a": "1"}, {"a": "2"}]) == "not all ranks run the same; unlike rank 0\n  rank 1: a is 2, not 1"
    )
    assert disagreement([{"a": "1"}] * 2) is None


def test_few_of_many_differences_are_told() -> None:
    text = disagreement([{}, {**{str(i): "x" for i in range(6)}, "long": "y" * 1000}])
    assert text is not None and "0 is x, not absent" in text and text.endswith("; and 3 more") and len(text) < 300


def test_ranks_in_words() -> None:
    assert [rank_text(r) for r in ([3], [0, 1, 2, 5], [1, 3])] == ["rank 3", "ranks 0-2, 5", "ranks 1, 3"]


def test_an_error_of_one_rank_is_that_of_all() -> None:
    def fail() -> tuple[str, dict[str, str]]:
        raise DataError("file missing here", hint="copy it")

    assert outcomes([*stating({}, {}), fail]) == ["file missing here / copy it"] * 3


def test_a_rank_that_never_comes_is_named() -> None:
    found = outcomes(stating(*[{}] * 4), started=[0, 2])
    assert found == ["ranks 1, 3 did not come within 0.0333333 minutes / look at the output of these processes"] * 2
    assert outcomes(stating({}, {}), started=[1])[0].startswith("rank 0 said nothing")


def machines(packages: list[Path], *more: list[str]) -> list[tuple[int, str]]:
    """Start a trainer on two machines of one process each; exit code and stderr of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank, package in enumerate(packages):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        plain = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(package / "train.py"), *ARGUMENTS, *more[rank]]
        processes.append(
            subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                cwd=package.parent,
                env={**plain, **variables, "MASTER_PORT": str(port)},
            )
        )
    try:
        return [(p.returncode, e) for p, e in [(p, p.communicate(timeout=100)[1]) for p in processes]]
    finally:
        for process in processes:
            process.kill()


def stale(package: Path) -> str:
    manifest = json.loads((package / "manifest.json").read_text())
    manifest["fingerprint"] = {"ir": "1", "options": {"precision": "bf16"}}
    (package / "manifest.json").write_text(json.dumps(manifest))
    return "rank 1: --batch-size is 3, not 2; compiled with precision is bf16, not absent; manifest.json is"


def edited(package: Path) -> str:
    step = package / "step.py"
    text = step.read_text()
    step.write_text(
        text.replace("    rt.all_reduce(", "    rt.all_reduce([state['count'].clone()], \"dp\")\n    rt.all_reduce(")
    )
    assert step.read_text() != text
    return "the order of collectives in finish is all_reduce@dp all_reduce@dp, not all_reduce@dp"


@pytest.mark.parametrize("change", [stale, edited])
def test_one_wrong_machine_ends_both(package_dir: Path, tmp_path: Path, change: Callable[[Path], str]) -> None:
    other = Path(shutil.copytree(package_dir, tmp_path / "other" / "package"))
    said = change(other)
    more = ["--batch-size", "3"] if change is stale else []
    for code, errors in machines([package_dir, other], [], more):
        assert code == 2 and said in errors, errors
        assert errors.count("error: ") == 1 and "Traceback" not in errors
    assert not list(tmp_path.rglob("runs"))


def test_other_data(package_dir: Path, tmp_path: Path, text_file: Path) -> None:
    shorter = tmp_path / "shorter.txt"
    shorter.write_text(text_file.read_text()[:-20])
    for code, errors in machines([package_dir] * 2, ["--data", str(text_file)], ["--data", str(shorter)]):
        assert code == 2 and "  rank 1: --data (SHA-256) is " in errors, errors
