"""What a run begins in threads, and what it imports before its first step."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.runtime import attention, start

HEAVY = {
    "matplotlib",
    "networkx",
    "sympy",
    "tensorboard",
    "tokenizers",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.fx.experimental.symbolic_shapes",
    "transformers",
    "triton",
}
"""What takes long to import, and is for other things than a step."""

FIRST_STEP = """
import json, os, sys
from pathlib import Path
from mgraph.runtime import start
assert "torch" not in sys.modules, "the driver begins before torch does"
start.ahead(sys.argv[3:])
from mgraph.runtime import train
step = train.Trainer.train_step
def first(self):
    step(self)
    Path(sys.argv[2]).write_text(json.dumps(sorted(sys.modules)))
    os._exit(0)
train.Trainer.train_step = first
train.main(sys.argv[1], sys.argv[3:])
"""


IMPORTING = """
import builtins, sys, time
from mgraph.runtime import start
load = builtins.__import__
def importing(name, globals=None, locals=None, fromlist=(), level=0):
    if name.startswith("mgraph.runtime") and ("train" in fromlist or "program" in fromlist):
        print("importing", flush=True)
        try:
            time.sleep(20)
        except BaseException:
            pass  # as libraries do with what they do not expect
    return load(name, globals, locals, fromlist, level)
builtins.__import__ = importing
if sys.argv[1].startswith("mgraph serve"):
    from mgraph.cli import main
    sys.argv = ["mgraph", "serve", sys.argv[2], "--random-init", *sys.argv[1].split()[2:]]
    main()
getattr(start, sys.argv[1])(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("program", "number", "code", "said"),
    [
        ("main", signal.SIGINT, 130, "interrupted"),
        ("serve", signal.SIGINT, 0, "stopped before"),
        ("serve", signal.SIGTERM, 0, "stopped before"),
        ("mgraph serve", signal.SIGINT, 0, "stopped before"),
        ("mgraph serve", signal.SIGTERM, 0, "stopped before"),
        ("mgraph serve --prompt x", signal.SIGINT, 130, "interrupted"),
    ],
)
def test_a_signal_while_something_is_imported(
    program: str, number: signal.Signals, code: int, said: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", IMPORTING, program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == code and said in errors and "Traceback" not in errors


def test_a_follower_that_is_ended_before_it_follows_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    command = [sys.executable, "-c", IMPORTING, "serve", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.terminate()
        _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (-signal.SIGTERM, "")


def test_what_is_no_server_ends_of_signals_as_ever() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        start.stop_at_signals()
        assert signal.default_int_handler not in map(signal.getsignal, numbers)
        start.signals_as_ever()
        assert [*map(signal.getsignal, numbers)] == [signal.default_int_handler, signal.SIG_DFL]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_first_step_imports_nothing_heavy(package_dir: Path, tmp_path: Path) -> None:
    found = tmp_path / "modules.json"
    options = ["--batch-size", "2", "--seq-len", "8", "--steps", "2", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-c", FIRST_STEP, str(package_dir), str(found), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    modules = set(json.loads(found.read_text()))
    assert "torch" in modules
    assert not HEAVY & modules, HEAVY & modules


class Driver:
    """The library of a machine with so many GPUs."""

    def __init__(self, gpus: int, broken: bool = False) -> None:
        self.gpus, self.broken = gpus, broken
        self.held: list[int] = []

    def cuInit(self, flags: int) -> int:
        return 100 if self.broken else 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        if ordinal >= self.gpus:
            return 101
        device._obj.value = ordinal + 40
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        self.held.append(device.value)
        return 0


@pytest.mark.parametrize(("driver", "held"), [(Driver(2), [41]), (Driver(1), []), (Driver(2, broken=True), [])])
def test_the_context_is_that_of_this_process(driver: Driver, held: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setenv("LOCAL_RANK", "1")
    start.make_context()
    assert driver.held == held


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    start.make_context()


@pytest.mark.parametrize(
    ("arguments", "begun"),
    [
        ([], True),
        (["--device", "cuda"], True),
        (["--device", "cpu"], False),
        (["--device=cpu"], False),
        (["--steps", "3", "--help"], False),
    ],
    ids=str,
)
def test_a_run_on_the_cpu_makes_no_context(arguments: list[str], begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(start, "make_context", lambda: made.append(1))
    monkeypatch.setattr(threading, "Thread", Immediate)
    start.ahead(arguments)
    assert made == [1] * begun


class Immediate:
    """A thread that does its work when it is started."""

    def __init__(self, target: Any, args: tuple[Any, ...] = (), **_: Any) -> None:
        self._work: Callable[[], object] = lambda: target(*args)

    def start(self) -> None:
        self._work()


@pytest.mark.parametrize("with_attention", [False, True])
def test_libraries_are_used_as_the_step_will(with_attention: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("attention", "attention_grad"):
        function = getattr(attention, name)

        def noted(*args: Any, name: str = name, function: Any = function, **kwargs: Any) -> Any:
            called.append(name)
            assert args[0].dtype == torch.bfloat16 and not torch.is_grad_enabled()
            return function(*args, **kwargs)

        monkeypatch.setattr(attention, name, noted)
    start.bring_up(torch.device("cpu"), attention=with_attention).join()
    assert called == ["attention", "attention_grad"] * with_attention


def test_what_fails_there_is_left_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such engine")

    monkeypatch.setattr(attention, "attention", fail)
    start.use_libraries(torch.device("cpu"), True)
