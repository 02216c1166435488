"""Weights into a run before its first step, and out after its last, with what a person sees of it meanwhile.

That a run has been exported is noted in its directory, so that one that is whole may be started again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mgraph.runtime.export import CONFIG, Weights, export_weights, new_directory
from mgraph.runtime.lora import adapter_states, write_adapter
from mgraph.runtime.mesh import ALONE, Mesh
from mgraph.runtime.package import Package, State
from mgraph.runtime.state import Wholes
from mgraph.runtime.weights import load_weights, masters

NOTES = {"export": "exported.json", "export_adapter": "exported_adapter.json"}
"""The files in a run's directory that say where its weights, and its adapters, were exported to, and after which step;
by option."""

FULL = "f32"
"""The choice of --export-dtype that is not the dtype of the parameters."""

_CAUSAL = ("ForCausalLM", "LMHeadModel")


def initialise(source: Path, package: Package, state: State, shown: bool, mesh: Mesh = ALONE) -> None:
    """Fill the weights of a state, or this rank's shares of them, from files; a bar on a terminal and a line, where
    `shown`. Raises CheckpointError."""
    with _Transfer("loading weights", shown) as transfer:
        number = load_weights(source, state, package.state_specs, package.weight_layout, transfer.advance, mesh)
    if shown:
        transfer.say(f"loaded {number} tensors, {transfer.summary} from {source}")


def export(
    target: Path, dtype: str, package: Package, state: State, beside: Mapping[str, Path], mesh: Mesh = ALONE
) -> None:
    """Write the weights to a directory, and copies of the files `beside` by name; all ranks call it. `dtype` is FULL,
    or anything else for that of the parameters. Raises OptionError, StorageError, on the first rank."""
    weights = Weights(state, package.state_specs, package.weight_layout, full=dtype == FULL, mesh=mesh)
    with _Transfer("exporting weights", mesh.is_first) as transfer:
        export_weights(target, weights, package.path / CONFIG, advance=transfer.advance, beside=beside)
    if mesh.is_first:
        transfer.say(f"exported the weights, {transfer.summary} to {target}")


def export_adapter(
    target: Path, dtype: str, package: Package, state: State, base: Path | None, mesh: Mesh = ALONE
) -> None:
    """Write the adapters to a directory, in PEFT's form, as `export` does; `base` is where the weights came from that
    they are for."""
    names = masters(package.state_specs) if dtype == FULL else {}
    written = [names.get(spec.name, spec.name) for spec in adapter_states(package.state_specs)]
    whole = Wholes(state, package.state_specs, mesh).of(written)
    if not mesh.is_first:
        return
    config = package.path / CONFIG
    classes = json.loads(config.read_text(encoding="utf-8")).get("architectures") if config.is_file() else None
    causal = any(name.endswith(_CAUSAL) for name in classes or ())
    about = {"base_model_name_or_path": base and str(base), "task_type": "CAUSAL_LM" if causal else None}
    with new_directory(target, "--export-adapter") as directory, _Transfer("exporting adapters", True) as transfer:
        size = write_adapter(directory, whole, package.state_specs, names, about)
        transfer.advance(size, size)
    transfer.say(f"exported the adapters, {transfer.summary} to {target}")


def note_export(option: str, target: Path, out: Path, step: int) -> None:
    """Note in a run's directory that what `option` asks for was written to `target` after this step."""
    record = {"directory": str(target.absolute()), "step": step}
    (out / NOTES[option]).write_text(json.dumps(record) + "\n", encoding="utf-8")


def is_exported(option: str, target: Path, out: Path, step: int) -> bool:
    """Whether the run in the directory `out` noted this, and `target` still is there."""
    try:
        record = json.loads((out / NOTES[option]).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return record == {"directory": str(target.absolute()), "step": step} and target.is_dir() and any(target.iterdir())


class _Transfer:
    """A bar while it is entered, on a terminal; afterwards, how much was moved and in which time."""

    def __init__(self, what: str, shown: bool) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._progress = Progress(
            *columns, console=self._console, disable=not (shown and self._console.is_terminal), transient=True
        )
        self._task = self._progress.add_task("")
        self._bytes, self._begun, self._seconds = 0, time.perf_counter(), 0.0

    def __enter__(self) -> _Transfer:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._seconds = time.perf_counter() - self._begun

    def advance(self, done: int, total: int) -> None:
        """So many more bytes are done, of so many in all."""
        self._bytes += done
        self._progress.update(self._task, advance=done, total=total)

    def say(self, text: str) -> None:
        """A line."""
        self._console.print(text, markup=False)

    @property
    def summary(self) -> str:
        """`1.6 GB in 2.1 s`."""
        return f"{decimal(self._bytes)} in {self._seconds:.1f} s"
