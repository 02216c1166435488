"""Every graph after every pass reads back equal from its text."""

from __future__ import annotations

import gzip
import json

from mgraph.ir.equality import equal
from mgraph.ir.parser import parse_module
from mgraph.ir.printer import print_module
from mgraph.ir.verifier import verify
from tests.end_to_end.builds import Build


def test_every_snapshot_parses_back_to_an_equal_graph(built: Build) -> None:
    files = sorted((built.path / "graphs").glob("*.mg.gz"))
    assert len(files) == len(built.compilation.results) + 1, "one before the first pass, one after each"
    for file in files:
        text = gzip.decompress(file.read_bytes()).decode()
        module = parse_module(text, file.name)
        verify(module)
        again = print_module(module)
        assert equal(parse_module(again), module), file.name
        assert [line for line in again.splitlines() if line] == [
            line for line in text.splitlines() if line and not line.startswith("#")
        ], file.name
    assert equal(module, built.compilation.module), "the last snapshot is the module that was emitted"


def test_every_pass_left_a_report(built: Build) -> None:
    for result in built.compilation.results:
        (file,) = (built.path / "graphs").glob(f"{result.index:03d}_*.json")
        assert json.loads(file.read_text())["name"] == result.name
