"""`mgraph opt`: passes as a filter over IR text. stdout gets the last graph only, so that filters can be chained."""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path

from mgraph.errors import OptionError
from mgraph.ir.graph import Module
from mgraph.ir.parser import parse_module
from mgraph.ir.printer import print_module
from mgraph.ir.verifier import verify
from mgraph.passes.instrument import Instrument, OpCounts, Timer, VerifyEach, op_count_lines
from mgraph.passes.pipeline import PassResult, parse_pipeline, run_pipeline


class PrintAfter(Instrument):
    """Prints the graph after passes whose name is in a comma-separated list of patterns, to stderr."""

    def __init__(self, patterns: str) -> None:
        self.patterns = [part.strip() for part in patterns.split(",") if part.strip()]

    def after(self, result: PassResult, before: Module, after: Module) -> None:
        """Print it, under a line that says which pass it was."""
        if any(fnmatch.fnmatchcase(result.name, pattern) for pattern in self.patterns):
            print(f"# after {result.spec}\n{print_module(after)}", file=sys.stderr, end="")


def run(file: str, passes: str, have: str, print_after: str, *, verify_each: bool, time: bool) -> None:
    """Read, verify, run, write. Raises GraphError for wrong text or a wrong graph, PassError for a wrong pipeline."""
    pipeline = parse_pipeline(passes)
    text, name = _read(file)
    module = parse_module(text, name)
    verify(module)
    instruments: list[Instrument] = [PrintAfter(print_after)]
    instruments += [VerifyEach()] if verify_each else []
    instruments += [OpCounts(), Timer()] if time else []
    properties = frozenset(part.strip() for part in have.split(",") if part.strip())
    module, results = run_pipeline(module, pipeline, instruments, have=properties)
    if time:
        for result in results:
            print(f"{result.measured['seconds']:8.3f} s  {result.spec}", file=sys.stderr)
            for line in op_count_lines(result.measured["ops"]):
                print(f"            {line}", file=sys.stderr)
    sys.stdout.write(print_module(module))


def _read(file: str) -> tuple[str, str]:
    """The text and how to name it in errors."""
    try:
        return (sys.stdin.read(), "<stdin>") if file == "-" else (Path(file).read_text(encoding="utf-8"), file)
    except OSError as error:
        raise OptionError(f"cannot read the graph: {error.strerror}", file, "give a file of IR text, or -") from error
    except UnicodeDecodeError as error:
        hint = "a package's graphs are compressed: mgraph dump PKG PASS prints them"
        raise OptionError("not a text file", file, hint) from error
