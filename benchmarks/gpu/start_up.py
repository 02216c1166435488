"""From the start of a process to the end of its first training step, by phases.

    python3 -m benchmarks.gpu.start_up PACKAGE RESULTS.jsonl [--batch-size 1] [--seq-len 8192] [--cold]
                                       [--plain | --compiled | --tuned]

Runs the package's own trainer in a process of its own, on the text that comes with Python, until the loss of the first
step has been read, and says how long each phase took on the host; nothing waits for the GPU between them but where the
trainer does. `--cold` first lets the system forget the files of torch and of the CUDA libraries that it has read;
`--plain` leaves out what the trainer does ahead in threads. `--tuned` has the trainer tune products: `choosing` or by
choices that were kept. `--compiled` starts the same model of `training_models`,
drawn on the GPU, under torch.compile instead; `--cold` then empties that one's cache, too.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

STARTED, REPORT = "START_UP_STARTED", "START_UP_REPORT"
"""In the environment of the process that is measured: seconds of the clock at its start, and where it writes to."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"
PRODUCTS = "products.json"
"""The choices of a package, as `kept_products.py` names them, which would import torch."""


class Phases:
    """Seconds of each phase of this process, in order."""

    def __init__(self, before: float) -> None:
        self._last = before
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """What was done since the last call was `name`."""
        now = time.time()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, as a phase of its own."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            self.end("between")
            try:
                return function(*args, **kwargs)
            finally:
                self.end(name)

        return measured

    def leave(self) -> None:
        """Write the report, and end the process without its last checkpoint."""
        Path(os.environ[REPORT]).write_text(json.dumps(self.seconds), encoding="utf-8")
        os._exit(0)


def train_package(package: Path, options: list[str], *, plain: bool) -> None:
    """The trainer, up to the loss of its first step."""
    phases = Phases(float(os.environ[STARTED]))
    phases.end("python")
    from mgraph.runtime import start

    if plain:
        mock.patch.object(start, "use_libraries").start()
    else:
        start.ahead(options)
    import torch

    assert torch.__version__
    phases.end("import torch")
    from mgraph.runtime import train
    from mgraph.runtime.package import Package, load_package
    from mgraph.runtime.state import create_state

    phases.end("import the trainer")
    steps, step, call = train.Trainer.train, train.Trainer.train_step, Package.call

    def all_steps(self: train.Trainer, stop: train.StopSignal) -> bool:
        phases.end("wait for libraries")
        return steps(self, stop)

    def first_step(self: train.Trainer) -> None:
        step(self)
        phases.end("finish")
        [[_, _, outputs]] = self.unread
        print(f"loss {float(outputs['loss']):.4f}", flush=True)
        phases.end("wait for the GPU")
        phases.leave()

    def called(self: Package, entry: str, *args: Any) -> dict[str, Any]:
        return dict(phases.around(entry, call)(self, entry, *args))

    mock.patch.object(train, "load_package", phases.around("load the package", load_package)).start()
    mock.patch.object(train, "create_state", phases.around("draw the state", create_state)).start()
    mock.patch.multiple(train.Trainer, train=all_steps, train_step=first_step).start()
    mock.patch.object(Package, "call", called).start()
    train.main(package, options)


def train_compiled(name: str, batch: int, length: int) -> None:
    """The same model under torch.compile, up to the loss of its first step."""
    phases = Phases(float(os.environ[STARTED]))
    phases.end("python")
    import torch

    phases.end("import torch")
    from benchmarks.gpu import peers
    from benchmarks.gpu.training_models import SHAPES

    shape, device = replace(SHAPES[name], batch=batch, length=length), torch.device("cuda")
    phases.end("import the model")
    with device:
        model = shape.make()
    step = peers.Trained(model, torch.bfloat16, device, "default")
    phases.end("draw the state")
    loss = step(shape.batches(0, 1, device)[0])
    phases.end("compile, and the step")
    print(f"loss {float(loss):.4f}", flush=True)
    phases.end("wait for the GPU")
    phases.leave()


def has_gpu() -> bool:
    """Whether the driver finds a GPU; without torch, since files in use cannot be forgotten."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


def forget() -> None:
    """Let the system forget what it has read of torch and of the CUDA libraries; files in use stay."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    site = Path(spec.submodule_search_locations[0]).parent
    os.sync()
    for folder in ("torch", "nvidia", "triton", "cuda"):
        for file in (site / folder).rglob("*"):
            if file.is_file():
                number = os.open(file, os.O_RDONLY)
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(number)


def kept_in(package: Path) -> str:
    """The choices that a package keeps."""
    file = package / PRODUCTS
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def cache_of(report: Path) -> Path:
    """Where torch.compile keeps what it has compiled."""
    return report.with_suffix(".cache")


def measured(arguments: list[str], report: Path) -> dict[str, float]:
    """Phases of a process of this module."""
    environment = {**os.environ, STARTED: str(time.time()), REPORT: str(report), CACHE: str(cache_of(report))}
    ended = subprocess.run([sys.executable, "-m", "benchmarks.gpu.start_up", *arguments], env=environment, check=False)
    if ended.returncode:
        raise SystemExit(ended.returncode)
    seconds: dict[str, float] = json.loads(report.read_text(encoding="utf-8"))
    return seconds


def main() -> None:
    """One row of results; or, where the environment says so, the process that is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--batch-size", default="1")
    parser.add_argument("--seq-len", default="8192")
    parser.add_argument("--cold", action="store_true")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--plain", action="store_true")
    how.add_argument("--compiled", action="store_true")
    how.add_argument("--tuned", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("/tmp/start_up"))
    options = parser.parse_args()
    sizes = ["--batch-size", options.batch_size, "--seq-len", options.seq_len]
    if REPORT in os.environ and options.compiled:
        train_compiled(options.package.name, int(options.batch_size), int(options.seq_len))
    elif REPORT in os.environ:
        given = [*sizes, "--steps", "2", "--out", str(options.out), *["--tune-products"] * options.tuned]
        train_package(options.package, given, plain=options.plain)
    if not has_gpu():
        raise SystemExit("error: this measures on a GPU, and there is none\n  try: the machine with the GPU")
    report = options.out.with_suffix(".json")
    if options.cold:
        forget()
        shutil.rmtree(cache_of(report), ignore_errors=True)
    same = [
        *sizes,
        "--out",
        str(options.out),
        *(f"--{way}" for way in ("plain", "compiled", "tuned") if getattr(options, way)),
    ]
    before = kept_in(options.package)
    seconds = measured([str(options.package), str(options.results), *same], report)
    workload = f"{options.package.name} B{options.batch_size} S{options.seq_len}"
    variant = ("cold" if options.cold else "warm") + ", plain" * options.plain + ", torch.compile" * options.compiled
    variant += f", tuned, {'kept' if kept_in(options.package) == before else 'choosing'}" * options.tuned
    from benchmarks.gpu import rows  # not before: torch is among what is measured

    total = sum(seconds.values())
    rows.append(options.results, rows.row("start-up", workload, total, "seconds", variant=variant, phases=seconds))
    for name, value in {**seconds, "in all": total}.items():
        print(f"{name:20} {value:7.2f} s", flush=True)


if __name__ == "__main__":
    main()
