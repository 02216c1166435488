"""Steps that several ranks run: what is sent, and how ranks end, with threads for processes."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from mgraph.runtime.serving import local_ranks
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.llm import LLM
from mgraph.runtime.serving.parameters import SamplingParams
from mgraph.runtime.serving.ranks import Leader, follow
from mgraph.runtime.serving.step import Batch, Pending, Sampling
from tests.runtime.serving.fake_stepper import FakeStepper, alone

ROOT = Path(__file__).parents[3]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


class Noting(FakeStepper):
    """Notes its steps; the step with number `wrong` fails before anything is computed."""

    def __init__(self, wrong: int = 0) -> None:
        super().__init__()
        self.noted: list[tuple[Batch, Sampling]] = []
        self.wrong = wrong

    def run(self, batch: Batch, sampling: Sampling) -> Pending:
        self.noted.append((batch, sampling))
        if len(self.noted) == self.wrong:
            raise MemoryError("no memory is left")
        return super().run(batch, sampling)


def pairs(count: int) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Connections of rank 0 and of its followers, by rank."""
    made = {rank: socket.socketpair() for rank in range(1, count)}
    return {rank: pair[0] for rank, pair in made.items()}, {rank: pair[1] for rank, pair in made.items()}


def followed(stepper: FakeStepper, connection: socket.socket, rank: int, ended: queue.Queue[int]) -> None:
    follow(stepper, connection, rank)
    ended.put(rank)


def same(a: object, b: object) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b  # type: ignore[arg-type]


def test_followers_run_the_steps_of_rank_0() -> None:
    own, theirs = pairs(3)
    lead, followers = Noting(), [Noting(), Noting()]
    ended: queue.Queue[int] = queue.Queue()
    for rank, stepper in enumerate(followers, 1):
        threading.Thread(target=followed, args=(stepper, theirs[rank], rank, ended), daemon=True).start()
    leader = Leader(lead, own, pytest.fail)
    llm = LLM.over(Engine(leader, prefix_cache=False))
    params = SamplingParams(temperature=0, max_tokens=6, frequency_penalty=1.0, logit_bias={5: -10.0}, logprobs=2)
    made = llm.generate([PROMPT, PROMPT[:3]], params)
    plain = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=6))
    assert list(plain[0].outputs[0].token_ids) == alone(lead.logits, PROMPT, SamplingParams(temperature=0), 6)[0]
    leader.close()
    assert {ended.get(timeout=10) for _ in followers} == {1, 2}
    assert len(lead.noted) > 8 and len(made[1].outputs[0].token_ids) == 6
    for follower in followers:
        assert len(follower.noted) == len(lead.noted)
        for mine, its in zip(lead.noted, follower.noted, strict=True):
            assert all(same(getattr(mine[0], f.name), getattr(its[0], f.name)) for f in fields(Batch))
            assert all(same(getattr(mine[1], f.name), getattr(its[1], f.name)) for f in fields(Sampling))
        assert (follower.cache == lead.cache).all()


@pytest.mark.parametrize("words", [b"", b"OutOfMemoryError: CUDA"])
def test_the_rank_that_ends_is_named(words: bytes) -> None:
    """What a follower says before it ends is told. Another that ends of it, as its connection breaks, is not blamed."""
    own, theirs = pairs(4)
    told: queue.Queue[str] = queue.Queue()
    Leader(Noting(), own, told.put)
    if not words:
        theirs[3].sendall(b"RuntimeError: connection closed by peer")
        theirs[3].close()
    theirs[2].sendall(words)
    theirs[2].close()
    expected = "a step failed on rank 2: OutOfMemoryError: CUDA" if words else "rank 2 has died: nothing can be served"
    assert told.get(timeout=10).startswith(expected)


def test_a_step_that_fails_on_rank_0_ends_all() -> None:
    own, _ = pairs(2)
    told: queue.Queue[str] = queue.Queue()
    engine = Engine(Leader(Noting(wrong=2), own, told.put))
    engine.submit(PROMPT, SamplingParams(temperature=0, max_tokens=4))
    deltas = [delta for _ in range(3) for delta in engine.step()]
    assert told.get(timeout=10) == "a step failed on rank 0: MemoryError: no memory is left"
    assert deltas[-1].finish_reason == "error"


def test_all_end_once_even_where_nobody_can_be_told() -> None:
    """By the first thread that sees a reason."""
    own, _theirs = pairs(2)
    told: queue.Queue[str] = queue.Queue()
    leader = Leader(Noting(wrong=1), own, told.put)
    telling, go_on = threading.Event(), threading.Event()

    def last_words(what: str) -> None:
        telling.set()
        go_on.wait(10)
        raise ZeroDivisionError("nobody listens")

    def ending() -> None:
        with pytest.raises(ZeroDivisionError):
            leader._end("rank 1 has died")

    leader.last_words = last_words
    first = threading.Thread(target=ending)
    first.start()
    assert telling.wait(10)
    engine = Engine(leader)
    engine.submit(PROMPT, SamplingParams(temperature=0, max_tokens=4))
    assert engine.step()[-1].finish_reason == "error"
    assert told.empty()
    go_on.set()
    first.join(10)
    assert told.get(timeout=10) == "rank 1 has died" and told.empty()


@pytest.mark.parametrize(
    ("ends", "said"),
    [("os.kill(os.getpid(), 9)", "was killed by signal 9"), ("os._exit(3)", "has ended with exit code 3")],
)
def test_a_follower_that_ends_before_it_follows(
    ends: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # such that they are as before afterwards
    told: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(local_ranks, "end_all", told.put)
    monkeypatch.setattr(local_ranks, "_PATIENCE", 0.1)
    (tmp_path / "serve.py").write_text(f"import os; {ends}")
    with local_ranks.local_ranks(tmp_path, [], 2):
        assert told.get(timeout=10) == f"rank 1 {said}"
    (tmp_path / "serve.py").write_text("import time; time.sleep(60)")
    with local_ranks.local_ranks(tmp_path, [], 2):
        pass
    with pytest.raises(queue.Empty):  # whom rank 0 ends is not missed
        told.get(timeout=0.5)


LEFT = """
import os, pathlib, sys, time
from mgraph.runtime.serving import local_ranks
local_ranks._PATIENCE = 0.1
if "RANK" in os.environ:
    local_ranks.end_with_rank_0()
    print(os.getpid(), flush=True)
    time.sleep(60)
with local_ranks.local_ranks(pathlib.Path(sys.argv[1]), [], 2):
    time.sleep(60)
"""


def test_followers_end_with_rank_0_however_it_ends(tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(LEFT)
    command = [sys.executable, str(tmp_path / "serve.py"), str(tmp_path)]
    environment = {n: v for n, v in os.environ.items() if n != "RANK"} | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        assert int(leader.stdout.readline()) != leader.pid
        begun = time.monotonic()
        leader.kill()
        assert leader.stdout.read() == "" and time.monotonic() - begun < 20  # both have closed it


FOLLOWER = """
import socket, sys
from mgraph.runtime.serving.ranks import follow
from tests.runtime.serving.test_ranks import Noting
follow(Noting(wrong=1), socket.create_connection(("127.0.0.1", int(sys.argv[1]))), 1)
"""


@pytest.mark.full
@pytest.mark.parametrize("dies", [False, True])
def test_a_follower_says_why_it_ends(dies: bool) -> None:
    """Of a step that fails it tells rank 0; where that has died while a step failed, it says so instead."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [sys.executable, "-c", FOLLOWER, str(listening.getsockname()[1])]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as follower:
            connection, _ = listening.accept()
            told: queue.Queue[str] = queue.Queue()
            engine = Engine(Leader(Noting(), {1: connection}, told.put))
            engine.submit(PROMPT, SamplingParams(temperature=0, max_tokens=1))
            engine.step()
            if dies:
                connection.shutdown(socket.SHUT_RDWR)
            else:
                assert told.get(timeout=20) == "a step failed on rank 1: MemoryError: no memory is left"
            assert follower.wait(20) == 1 and follower.stderr is not None
            said = follower.stderr.read()
    expected = "error: rank 0 has died" if dies else "error: a step failed on rank 1: MemoryError: no memory is left\n"
    assert said.startswith(expected) and "Traceback" not in said
