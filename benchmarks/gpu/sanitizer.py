"""The command line of compute-sanitizer, under which a program that launches kernels runs."""

from __future__ import annotations

import shutil
from pathlib import Path

from mgraph.errors import MgraphError

PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")
TOOLS = ("memcheck", "racecheck")
FOUND = 9
"""The exit code of a program in which the tool found something."""


def under(tool: str, *options: str) -> list[str]:
    """What stands before a command that is to run under a tool, with options of compute-sanitizer.

    Raises MgraphError where there is no such tool or no compute-sanitizer.
    """
    if tool not in TOOLS:
        raise MgraphError(f"compute-sanitizer is not used with {tool!r}", hint=f"one of {', '.join(TOOLS)}")
    program = shutil.which("compute-sanitizer") or next((place for place in PLACES if Path(place).is_file()), None)
    if program is None:
        raise MgraphError("compute-sanitizer is not on this machine", hint="it comes with the CUDA toolkit")
    # cuda-python asks for functions that a driver may not have: memcheck takes that for errors.
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return [program, "--tool", tool, *options, *quiet, "--error-exitcode", str(FOUND)]
