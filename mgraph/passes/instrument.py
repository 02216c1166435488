"""What the runner can do around every pass: time it, verify its result, count ops, keep snapshots.

An instrument writes what it measured into `result.measured`, under its own key, as JSON data.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mgraph.errors import GraphError
from mgraph.ir.graph import Module

if TYPE_CHECKING:
    from mgraph.ir.printer import Printed
    from mgraph.passes.base import Pass
    from mgraph.passes.pipeline import PassResult


class Instrument:
    """Base of instruments: hooks that do nothing."""

    def start(self, module: Module) -> None:
        """Before the first pass, with the input module."""

    def passing(self, pass_: Pass) -> None:
        """The pass that is about to run, before `before`."""

    def before(self, result: PassResult, module: Module) -> None:
        """Before a pass."""

    def after(self, result: PassResult, before: Module, after: Module) -> None:
        """After a pass, with its report in `result`; called in reverse order of the instruments."""

    def failed(self) -> None:
        """A pass raised, and its error is about to leave the runner."""


class Timer(Instrument):
    """`measured["seconds"]`: wall time of the pass. List it last to measure the pass alone."""

    def before(self, result: PassResult, module: Module) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def after(self, result: PassResult, before: Module, after: Module) -> None:
        """Stop the clock."""
        result.measured["seconds"] = time.perf_counter() - self._started


def op_counts(module: Module) -> Counter[str]:
    """How many nodes of each op the functions hold, each body once."""
    return Counter(node.op for _, node in module.walk())


class OpCounts(Instrument):
    """`measured["ops"]`: `{op: [before, after]}` for the ops whose count changed."""

    def after(self, result: PassResult, before: Module, after: Module) -> None:
        """Compare the counts."""
        old, new = op_counts(before), op_counts(after)
        result.measured["ops"] = {op: [old[op], new[op]] for op in sorted(old | new) if old[op] != new[op]}


def op_count_lines(ops: dict[str, list[int]]) -> list[str]:
    """Readable lines of `measured["ops"]`: `aten.mul.Tensor: 12 -> 8 (-4)`."""
    return [f"{op}: {before} -> {after} ({after - before:+d})" for op, (before, after) in ops.items()]


class VerifyEach(Instrument):
    """Run the verifier on the input module, and after every pass on what it changed."""

    def start(self, module: Module) -> None:
        """A wrong input is the caller's mistake: GraphError passes through."""
        from mgraph.ir.verifier import verify

        verify(module)

    def after(self, result: PassResult, before: Module, after: Module) -> None:
        """A wrong result is the pass's mistake."""
        from mgraph.ir.verifier import verify

        if after is before:
            return
        try:
            verify(after, known=before)
        except GraphError as error:
            raise AssertionError(f"pass '{result.spec}' broke the graph\n{error}") from error


class VerifyLater(VerifyEach):
    """As `VerifyEach`, but what passes made is checked by `check`: the compiler calls it while kernels are built.

    Where a pass fails, the passes before it are checked first: the first wrong one is to blame.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[PassResult, Module, Module]] = []

    def after(self, result: PassResult, before: Module, after: Module) -> None:
        """Keep what there is to check."""
        self._waiting.append((result, before, after))

    def failed(self) -> None:
        """See the class."""
        self.check()

    def check(self) -> None:
        """Check every pass's result, in order."""
        waiting, self._waiting = self._waiting, []
        for result, before, after in waiting:
            super().after(result, before, after)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The graph after one pass (index 0: the input); `result` is the pass's."""

    index: int
    name: str
    module: Module
    result: PassResult | None

    @property
    def stem(self) -> str:
        """File name without ending: `003_cse`."""
        return f"{self.index:03d}_{self.name}"


class Snapshots(Instrument):
    """Keeps the graph and the result after every pass; the input is snapshot 0, named `capture`.

    Modules share what a pass did not change, so keeping all of them costs little. They are printed when they are
    written, each from the one before: only what a pass changed is made anew, and kernels can be built meanwhile.
    """

    _input: Printed

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []

    def start(self, module: Module) -> None:
        """Keep the input, and print it: the last work done once per layer belongs to the capture."""
        from mgraph.ir.printer import print_parts

        self._input = print_parts(module)
        self.snapshots.append(Snapshot(0, "capture", module, None))

    def after(self, result: PassResult, before: Module, after: Module) -> None:
        """Keep the graph after the pass."""
        self.snapshots.append(Snapshot(result.index, result.name, after, result))

    def texts(self) -> list[str]:
        """The text of every snapshot, in order; an unchanged graph shares the text of the one before."""
        from mgraph.ir.printer import print_parts

        printed = self._input
        texts = [printed.text]
        for snapshot in self.snapshots[1:]:
            if printed.module is snapshot.module:
                texts.append(texts[-1])
                continue
            printed = print_parts(snapshot.module, printed)
            texts.append(printed.text)
        return texts

    def write(self, directory: Path) -> str:
        """Write `NNN_<pass>.mg.gz` and `NNN_<pass>.json` per snapshot into a directory (made if needed).

        Returns the text of the last graph.
        """
        directory.mkdir(parents=True, exist_ok=True)
        texts = self.texts()
        # A fixed time makes equal graphs equal files; a low level is four times as fast for half more bytes.
        packed = {text: gzip.compress(text.encode(), compresslevel=3, mtime=0) for text in dict.fromkeys(texts)}
        for snapshot, text in zip(self.snapshots, texts, strict=True):
            (directory / f"{snapshot.stem}.mg.gz").write_bytes(packed[text])
            report = snapshot.result.to_json() if snapshot.result else {}
            (directory / f"{snapshot.stem}.json").write_text(json.dumps(report, indent=1) + "\n")
        return texts[-1]
