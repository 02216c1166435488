"""The program: options, what it says where it cannot start, signals under load."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mgraph.errors import OptionError
from mgraph.runtime.options import read
from mgraph.runtime.serving import llm, opening
from mgraph.runtime.serving import program as server_program
from mgraph.runtime.serving.engine import Engine, EngineDead
from mgraph.runtime.serving.parameters import RequestError
from mgraph.runtime.serving.program import KEY, ServeOptions, address, continuation, listen, needed, record
from mgraph.runtime.tokenizer import ByteTokenizer
from tests.runtime.serving.fake_stepper import FakeStepper

ROOT = Path(__file__).parents[3]
BODY = json.dumps({"prompt": "x", "max_tokens": 80, "ignore_eos": True, "stream": True})


@contextmanager
def program(seconds: float, drain_timeout: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with slow steps in a process of its own, and its host and port."""
    command = [sys.executable, "-m", "tests.runtime.serving.fake_server", str(seconds), str(drain_timeout)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"http://(\S+)", process.stderr.readline())
            assert found is not None
            yield process, found[1]
        finally:
            process.kill()


def streams(place: str, count: int) -> tuple[list[threading.Thread], list[list[str]]]:
    """Streams that are read by threads, after each has begun."""
    lines: list[list[str]] = [[] for _ in range(count)]
    begun = threading.Barrier(count + 1)

    def one(into: list[str]) -> None:
        connection = http.client.HTTPConnection(place, timeout=30)
        connection.request("POST", "/v1/completions", BODY)
        answer = connection.getresponse()
        begun.wait()
        try:
            into.extend(line.decode().strip() for line in answer if line.strip())
        except (OSError, http.client.HTTPException):
            into.append("cut")

    threads = [threading.Thread(target=one, args=[into], daemon=True) for into in lines]
    for thread in threads:
        thread.start()
    begun.wait(20)
    return threads, lines


def status(place: str, method: str, path: str, body: str | None = None) -> int:
    connection = http.client.HTTPConnection(place, timeout=10)
    connection.request(method, path, body)
    return connection.getresponse().status


def half_sent(place: str) -> http.client.HTTPConnection:
    """A request of whose body one byte has come."""
    connection = http.client.HTTPConnection(place, timeout=10)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", "1000")
    connection.endheaders(b"{")
    return connection


def test_sigterm_finishes_what_is_under_way() -> None:
    with program(0.01, 30) as (process, place):
        threads, lines = streams(place, 10)
        half = half_sent(place)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert half.getresponse().status == 503
        time.sleep(0.2)
        assert status(place, "GET", "/health") == 503
        assert status(place, "POST", "/v1/completions", BODY) == 503
        for thread in threads:
            thread.join(20)
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == "stopping: 10 requests are finished first; a second signal ends at once\n"
    for each in lines:
        assert each[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in each[-2]


@pytest.mark.parametrize("how", ["second", pytest.param("timeout", marks=pytest.mark.full)])
def test_a_second_signal_or_the_time_ends_at_once(how: str) -> None:
    with program(0.15, 30 if how == "second" else 0.3) as (process, place):
        threads, lines = streams(place, 4)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        started = time.monotonic()
        if how == "second":
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
        assert process.wait(10) == 1
        assert time.monotonic() - started < 6, "80 steps of 150 ms take longer"
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[1:] == ["4 requests are cut off"]
    assert not any(each and each[-1] == "data: [DONE]" and '"length"' in each[-2] for each in lines)
    if how == "timeout":
        for thread in threads:
            thread.join(10)
        assert all(any("did not end in time" in line for line in each) for each in lines), lines


@pytest.mark.full
def test_with_nothing_to_do_it_stops_at_once() -> None:
    with program(0, 30) as (process, _):
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert time.monotonic() - started < 6


SLOW_TO_OPEN = """
import sys, time
from mgraph.runtime.serving import opening, program

def open_engine(*_, **__):
    print("opening", file=sys.stderr, flush=True)
    time.sleep(60)

opening.ranks_of, opening.open_engine = lambda _: 1, open_engine
program.main("package", ["--random-init", "--port", "0"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_signal_before_it_serves_ends_at_once(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SLOW_TO_OPEN]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == "opening\n"
            process.send_signal(number)
            assert process.wait(10) == 0
            assert process.stderr.read() == "stopped before it served anything\n"
        finally:
            process.kill()


CANNOT_OPEN = """
import atexit, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from mgraph.errors import OptionError
from mgraph.runtime import mesh
from mgraph.runtime.serving import opening, package_stepper, program

def start(_):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return mesh.Mesh(0, 2, torch.device("cpu"), {}, host=dist.new_group(backend="gloo"))

def threads_of_groups():
    names = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
    return sum("gloo" in name for name in names)

def refuse(*_, **__):
    raise OptionError("no weights")

atexit.register(lambda: print("threads of groups:", threads_of_groups(), file=sys.stderr))
opening.ranks_of, mesh.start, package_stepper.PackageStepper = lambda _: 2, start, refuse
"""
BY_A_SERVER = 'program.main("package", ["--random-init", "--port", "0"])'
BY_A_PROGRAM = 'opening.open_engine("package", random_init=True)'


@pytest.mark.parametrize(("opened", "code"), [(BY_A_SERVER, 2), (BY_A_PROGRAM, 1)])
def test_a_rank_that_cannot_open_leaves_its_process_group(
    opened: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads would otherwise abort the process, now and then, while it ends."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = [sys.executable, "-c", CANNOT_OPEN + opened]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and done.stderr.endswith("error: no weights\nthreads of groups: 0\n")


def test_a_port_that_is_taken() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OptionError, match="cannot listen at 127"),
    ):
        listen("127.0.0.1", taken.getsockname()[1])
    for host in ("no.such.host.invalid", "300.1.1.1", "192.0.2.1", "a..b"):
        with pytest.raises(OptionError, match=f"cannot listen at {host}") as caught:
            listen(host, 0)
        assert caught.value.hint is not None and "--host" in caught.value.hint and "--port" not in caught.value.hint
    with listen("::1", 0) as six:
        assert address(six).startswith("http://[::1]:")


def test_answers_are_sent_at_once() -> None:
    """A connection does not wait for the client's word of the part before."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_prompt_whose_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    options = read(ServeOptions, ["--random-init", "--prompt", "x", "--max-new-tokens", "3"], "serve", "")
    for failing in ((), (1,)):
        engine = Engine(FakeStepper(vocab_size=256, failing=failing), ByteTokenizer())
        monkeypatch.setattr(llm, "open_engine", lambda *_, engine=engine, **__: (engine, None))
        if failing:
            with pytest.raises(EngineDead, match=r"a step failed: .*on fire"):
                continuation(Path("package"), "x", options)
        else:
            assert continuation(Path("package"), "x", options)


def test_a_prompt_that_is_interrupted_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(server_program, "serve", interrupt)
    with pytest.raises(SystemExit) as ended:
        server_program.main("package", ["--prompt", "x"])
    assert ended.value.code == 130 and "interrupted" in capsys.readouterr().err


def test_a_prompt_that_leaves_no_room_is_told_by_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(FakeStepper(vocab_size=256), ByteTokenizer())
    monkeypatch.setattr(llm, "open_engine", lambda *_, **__: (engine, None))
    for prompt, count, named in (("x", "99999", "--max-new-tokens"), ("x" * 99999, "1", "--prompt")):
        options = read(ServeOptions, ["--random-init", "--prompt", prompt, "--max-new-tokens", count], "serve", "")
        with pytest.raises(RequestError, match="maximum context length") as caught:
            continuation(Path("package"), prompt, options)
        assert caught.value.where == named


def test_a_warning_is_a_plain_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of libraries are as ever."""

    def warned(*_: object) -> int:
        warnings.warn("this never comes", RuntimeWarning, stacklevel=1)
        warnings.warn("of a library", UserWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(opening, "ranks_of", lambda _: 1)
    monkeypatch.setattr(server_program, "_serve", warned)
    with pytest.warns(UserWarning, match="of a library"):
        assert server_program.serve(Path("package"), ["--random-init"], "serve.py") == 0
    assert capsys.readouterr().err == "warning: this never comes\n"


def test_a_workload_without_steps_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The compiler would refuse it."""
    record(tmp_path / "steps.json", {})
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err.endswith("steps.json: nothing is written, as there was no step\n")
    record(tmp_path / "steps.json", {(3, 1): 2})
    assert (tmp_path / "steps.json").read_text() == "[[3, 1, 2]]\n"


def test_libraries_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(OptionError, match="needs the library uvicorn") as caught:
        needed()
    assert "mgraph[serve]" in str(caught.value)


def test_options() -> None:
    options = read(ServeOptions, ["--weights", "w", "--num-blocks", "9", "--no-prefix-cache"], "serve", "")
    assert (options.num_blocks, options.prefix_cache, options.port) == (9, False, 8000)
    for wrong in (
        ["--port", "70000"],
        ["--num-blocks", "4", "--cache-memory", "1"],
        ["--num-block", "4"],
        ["--max-queue", "0"],
        ["--prompt", "hi", "--record-workload", "steps.json"],
        ["--prompt", ""],
        ["--api-key", ""],
        ["--api-key", "a\nb"],
    ):
        with pytest.raises(OptionError):
            read(ServeOptions, ["--weights", "w", *wrong], "serve", "")


def test_the_key_that_clients_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag goes before the variable; without either none is asked for."""

    def key(*flags: str) -> str:
        return read(ServeOptions, ["--weights", "w", *flags], "serve", "").key

    monkeypatch.delenv(KEY, raising=False)
    assert (key(), key("--api-key", "mine")) == ("", "mine")
    monkeypatch.setenv(KEY, "theirs")
    assert (key(), key("--api-key", "mine")) == ("theirs", "mine")
    monkeypatch.setenv(KEY, "bad\nkey")
    with pytest.raises(OptionError, match=KEY):
        key()


def test_what_is_cut_off_is_told_though_a_step_takes_long() -> None:
    with program(4, 0.5) as (process, place):
        ended: list[tuple[int, str]] = []

        def whole() -> None:
            connection = http.client.HTTPConnection(place, timeout=30)
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 80}))
            answer = connection.getresponse()
            ended.append((answer.status, answer.read().decode()))

        thread = threading.Thread(target=whole, daemon=True)
        thread.start()
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        thread.join(20)
        assert process.wait(20) == 1
    assert [code for code, _ in ended] == [503] and "did not end in time" in ended[0][1]
