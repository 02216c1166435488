"""Weights into a run and out of it: what is said meanwhile, and a run that was exported and is started again."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file, save_file

from mgraph.errors import CheckpointError, OptionError
from mgraph.runtime import transfer
from mgraph.runtime.options import parse
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from mgraph.runtime.train import run

SMALL = ["--batch-size", "3", "--seq-len", "19", "--sample-length", "0", "--eval-batches", "1", "--steps", "2"]
NAMES = ("embed.weight", "hidden.weight", "head.weight")


class Runs:
    """A run of the bigram package in one directory, started again and again."""

    def __init__(self, package: Path, text: Path, directory: Path) -> None:
        self.package, self.text, self.directory = package, text, directory
        self.exported = directory / "exported"
        self.init = directory / "init.safetensors"
        state = create_state(load_package(package, "cpu").state_specs, 7, "cpu")
        save_file({name: state[name] for name in NAMES}, self.init)

    def start(self, *arguments: str, init: Path | None = None) -> None:
        paths = {"--data": self.text, "--out": self.directory / "run", "--export": self.exported}
        given = [str(word) for pair in paths.items() for word in pair]
        run(parse([*SMALL, *given, "--init", str(init or self.init), *arguments], "train.py"), self.package)


@pytest.fixture
def runs(package_dir: Path, text_file: Path, tmp_path: Path) -> Runs:
    return Runs(package_dir, text_file, tmp_path)


def test_a_run_says_what_went_in_and_out(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.start("--lr", "0", "--min-lr", "0")
    said = capsys.readouterr().err
    assert re.search(rf"loaded 3 tensors, 33.7 kB in \d+\.\d s from {runs.init}\n", said)
    assert re.search(rf"exported the weights, 33.7 kB in \d+\.\d s to {runs.exported}\n", said)
    found, given = load_file(runs.exported / "model.safetensors"), load_file(runs.init)
    assert found.keys() == given.keys() and all(torch.equal(found[name], given[name]) for name in given)


def test_a_whole_run_started_again_has_nothing_to_do(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.start()
    file = runs.exported / "model.safetensors"
    written, before = file.stat().st_mtime_ns, load_file(file)
    runs.start("--resume")
    assert "nothing is left to train" in (said := capsys.readouterr().err)
    assert f"after step 2 is in {runs.exported} already" in said
    assert file.stat().st_mtime_ns == written

    shutil.rmtree(runs.exported)  # what is gone is written again
    runs.start("--resume")
    again = load_file(file)
    assert all(torch.equal(again[name], before[name]) for name in before)

    with pytest.raises(OptionError, match="there is something already"):  # more steps would make it another export
        runs.start("--resume", "--steps", "3")
    (runs.exported.parent / "other").mkdir()
    (runs.exported.parent / "other" / "mine").write_text("mine")
    with pytest.raises(OptionError, match="there is something already"):
        runs.start("--resume", "--export", str(runs.exported.parent / "other"))


def test_the_weights_it_began_with_belong_to_a_run(runs: Runs, tmp_path: Path) -> None:
    runs.start()
    with pytest.raises(CheckpointError, match=r"option '--init' is \S*init\.safetensors in it and \S*other here"):
        runs.start("--resume", init=tmp_path / "other")


def test_a_bar_on_a_terminal(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, the bar ends at the size of the files; on none, there is no bar."""
    made: list[Progress] = []

    class Seen(Progress):
        def __init__(self, *columns: object, **options: object) -> None:
            super().__init__(*columns, **options)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(transfer, "Progress", Seen)
    package = load_package(runs.package, "cpu")
    state = create_state(package.state_specs, 0, "cpu", blank=NAMES)
    transfer.initialise(runs.init, package, state, shown=True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    transfer.initialise(runs.init, package, state, shown=True)
    transfer.initialise(runs.init, package, state, shown=False)
    assert [bar.disable for bar in made] == [True, False, True]
    size = sum(tensor.nbytes for tensor in load_file(runs.init).values())
    assert made[1].tasks[0].completed == size <= (made[1].tasks[0].total or 0) == runs.init.stat().st_size
