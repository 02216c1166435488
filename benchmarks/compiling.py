"""`mgraph compile` as a person runs it: a process of its own, kernels included, none of them cached; timed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_TIMES = re.compile(r"^(  )?(\S.*?) +(\d+\.\d+) s\b", re.MULTILINE)
"""A line of what the command says of its time: of a stage, or indented of a pass."""


@dataclass
class Compiled:
    """One compilation: wall seconds as a whole, of its stages, and of its passes by name; peak resident bytes."""

    seconds: float
    stages: dict[str, float]
    passes: dict[str, float]
    peak_bytes: int
    step_lines: int


def compile_model(model: str) -> Compiled:
    """Compile a model in bf16 to a train package, which is thrown away. Ends the program where that fails."""
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "package"
        environment = {**os.environ, "TRITON_CACHE_DIR": f"{directory}/cache"}
        command = [sys.executable, "-m", "mgraph", "compile", model, "--precision", "bf16", "-o", str(package)]
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
        assert process.stderr is not None
        said = process.stderr.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        if status:
            raise SystemExit(f"mgraph compile {model} failed:\n{said}")
        stages: dict[str, float] = {}
        passes: dict[str, float] = {}
        for indent, name, spent in _TIMES.findall(said):
            table = passes if indent else stages
            table[name] = table.get(name, 0.0) + float(spent)
        lines = len((package / "step.py").read_text().splitlines())
    return Compiled(seconds, stages, passes, usage.ru_maxrss * 1024, lines)
