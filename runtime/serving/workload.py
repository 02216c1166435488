"""How often a server's steps had so many tokens and requests, as `mgraph compile --graph-workload` reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from mgraph.errors import OptionError

Workload = Mapping[tuple[int, int], int]
"""(tokens, requests) -> how many steps."""


def check_target(path: Path) -> None:
    """Raise OptionError unless a file may be written there."""
    directory = path.resolve().parent
    other = path.exists() and not path.is_file()  # a directory or a device, which a file would replace
    if other or not directory.is_dir() or not os.access(directory, os.W_OK):
        problem = f"--record-workload {path}: no file can be written there"
        raise OptionError(problem, hint="a file in a directory that exists and may be written to")


def write(path: Path, workload: Workload) -> None:
    """Write a JSON list of [tokens, requests, how often], the most frequent first: whole, or not at all.

    Raises OptionError where that fails.
    """
    rows = sorted(([tokens, requests, count] for (tokens, requests), count in workload.items()), key=lambda r: -r[2])
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        unfinished.write_text("[" + ",\n ".join(map(json.dumps, rows)) + "]\n", encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        problem = f"--record-workload {path}: the steps could not be written: {error.strerror or error}"
        raise OptionError(problem, hint="what was served is not affected; give another file next time") from error
