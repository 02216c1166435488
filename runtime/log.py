"""What a run reports while it goes: JSON lines, TensorBoard events, a progress bar or plain lines, and a picture.

`log.jsonl` is the record from which everything else can be made: one object per step (`step`, `loss`, `grad_norm`,
`learning_rate`, `tokens_per_second`, ..., `expert_load` by layer in packages that count it; what is not finite is
left out) and one per evaluation (`step`,
`validation_loss`). A resumed run first cuts the lines that lie after its checkpoint, so the file reads as if the run
had never been interrupted.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mgraph.errors import StorageError, storage_hint
from mgraph.runtime.expert_load import load_text
from mgraph.runtime.plot import Points, save_loss_curve

LOG_FILE = "log.jsonl"

Record = dict[str, Any]


class Log:
    """The reports of rank 0 of a run in `directory`, until `close`.

    Raises `StorageError` where a file cannot be written. Losses are in nats per token.
    """

    def __init__(self, directory: Path, first_step: int, steps: int) -> None:
        self.directory = directory
        self.records = _read(directory / LOG_FILE, first_step)
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps, completed=first_step)
        self._write("".join(json.dumps(record) + "\n" for record in self.records), "w")
        self._first_step = first_step
        self._progress.start()

    def close(self) -> None:
        """Take the progress bar away and finish the files."""
        self._progress.stop()
        if "_events" in vars(self) and self._events is not None:
            self._events.close()

    def end_of_steps(self) -> None:
        """Take the progress bar away: there can be one at a time, and another is to come."""
        self._progress.stop()

    def message(self, text: str) -> None:
        """A line for the person, above the progress bar."""
        self._console.print(text, markup=False)

    def train(self, records: list[Record]) -> None:
        """Add the records of some steps, and show the last of them; a step that was skipped may have no loss."""
        skipped = self._skipped()
        self._add(records, "train")
        last = records[-1]
        loss = f"{last['loss']:.4f}" if "loss" in last else "not finite"
        text = f"loss {loss}  lr {last['learning_rate']:.2e}  {last['tokens_per_second']:,.0f} tokens/s"
        text += load_text(last)
        more = self._skipped() - skipped
        if more:
            steps = f"{more} step{'s' * (more > 1)}"
            self.message(f"step {last['step']}  {steps} skipped, not finite ({skipped + more} in all)")
        self._progress.update(self._task, completed=last["step"], description=text)
        if not self._console.is_terminal:
            self.message(f"step {last['step']}/{int(self._progress.tasks[0].total or 0)}  {text}")

    def _skipped(self) -> int:
        """The steps that were skipped, up to the last record that says so."""
        return next((int(record["skipped"]) for record in reversed(self.records) if "skipped" in record), 0)

    def validation(self, step: int, loss: float) -> None:
        """Add the result of an evaluation."""
        self._add([{"step": step, "validation_loss": loss}], "validation")
        self.message(f"step {step}  validation loss {loss:.4f}")

    def points(self, name: str) -> Points:
        """The curve of a record field over the whole run, what was before a resume included."""
        return [(record["step"], record[name]) for record in self.records if name in record]

    def picture(self, unigram: float, title: str) -> Path | None:
        """Write loss.png; None, after a warning, where matplotlib is not installed."""
        path = self.directory / "loss.png"
        try:
            save_loss_curve(path, self.points("loss"), self.points("validation_loss"), unigram, title)
        except ImportError:
            self.message("warning: no loss curve: matplotlib is not installed (pip install matplotlib)")
            return None
        except OSError as error:
            raise _storage_error(path, error) from error
        return path

    def write(self, name: str, text: str) -> None:
        """Write a text file into the directory of the run."""
        path = self.directory / name
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise _storage_error(path, error) from error

    def _add(self, records: list[Record], tag: str) -> None:
        self.records += records
        self._write("".join(json.dumps(record) + "\n" for record in records), "a")
        if self._events is None:
            return
        for record in records:
            for name, value in record.items():
                if name != "step" and not isinstance(value, dict):
                    self._events.add_scalar(f"{tag}/{name.removeprefix('validation_')}", value, record["step"])
        self._events.flush()

    def _write(self, text: str, mode: str) -> None:
        path = self.directory / LOG_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(mode, encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            raise _storage_error(path, error) from error

    @functools.cached_property
    def _events(self) -> Any:
        """TensorBoard's writer (untyped), or None after a warning; made at the first report, so that its import does
        not delay the first step."""
        try:
            from torch.utils.tensorboard.writer import SummaryWriter  # slow to import
        except ImportError:
            self.message("warning: no TensorBoard files: tensorboard is not installed (pip install tensorboard)")
            return None
        try:
            # Points of an earlier run after the checkpoint are to be forgotten.
            return SummaryWriter(str(self.directory / "tensorboard"), purge_step=self._first_step + 1)
        except OSError as error:
            raise _storage_error(self.directory, error) from error


def _read(file: Path, last_step: int) -> list[Record]:
    """The records up to and with `last_step`; a line that a crash cut off is not among them."""
    if last_step == 0 or not file.is_file():
        return []
    records = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if record["step"] > last_step:
            break
        records.append(record)
    return records


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"the log of the run cannot be written: {error.strerror or error}",
        where=str(path),
        hint=f"{storage_hint(error)} --out",
    )
