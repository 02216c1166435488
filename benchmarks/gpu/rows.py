"""Rows of results: one measurement each, a line of JSON that every benchmark on a GPU writes alike.

    pandas.read_json("benchmarks/results/kernels_h200.jsonl", lines=True)

Every row has

id        the target that it is measured for (K5-..., E1a), or what is measured
workload  model, shapes and dtypes in words
ours      what was measured of ours
unit      of ours and of peers: one of UNITS
card      the GPU
versions  of torch, and of cuda, triton, mgraph, transformers, liger_kernel and the driver where known
date      of the measurement

and, where there is more to say,

variant   which of ours, where there are several: a mesh, a budget, a policy
peers     what was measured of others in the same run, by name
peer, peer_name, ratio   the best of them, its name, and how many times as good ours is (above 1: ours is ahead)
fraction, limit          the share of a limit that ours reaches, and which: `copy`, `matmul`, or as the benchmark says
copy, matmul             bytes per second that a copy reads and writes, operations per second of a product in bf16; both
                         of this card in this run
of_peers  what else was measured of peers, by name, in fields named as ours

Other fields are a benchmark's own. Names that end in `bytes`, `seconds` or `per_second` say their unit.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mgraph import __version__

ALWAYS = ("id", "workload", "ours", "unit", "card", "versions", "date")
"""Fields that every row has."""
UNITS = {"seconds": "less", "microseconds": "less", "ms per token": "less", "findings": "less", "tokens/s": "more"}
"""What is measured, and whether less or more of it is better."""


def row(
    id: str,
    workload: str,
    ours: float,
    unit: str,
    peers: Mapping[str, float] | None = None,
    of_peers: Mapping[str, Mapping[str, Any]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A measurement beside the best of its peers; `more` are further fields. `append` adds card, versions and date."""
    made: dict[str, Any] = {"id": id, "workload": workload, "ours": ours, "unit": unit, **more}
    if peers:
        less = UNITS[unit] == "less"
        best = (min if less else max)(peers, key=peers.__getitem__)
        ratio = peers[best] / ours if less else ours / peers[best]
        made |= {"peers": dict(peers), "peer": peers[best], "peer_name": best, "ratio": ratio}
    if of_peers:
        made["of_peers"] = dict(of_peers)
    return made


def gpu() -> torch.device:
    """The current GPU. Ends the process, with what is missing, where torch sees none."""
    if not torch.cuda.is_available():
        raise SystemExit("error: this measures on a GPU, and torch sees none\n  try: the machine with the GPU")
    return torch.device("cuda", torch.cuda.current_device())


def append(results: Path, made: Mapping[str, Any]) -> None:
    """Add a row to a file, with the card, the versions and the date of now."""
    about = {"card": card(), "versions": versions(), "date": datetime.date.today().isoformat()}
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**made, **about}) + "\n")


def card() -> str:
    """The GPU's name; `CPU` where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def versions() -> dict[str, str]:
    """Versions of what takes part in a measurement; of peers' libraries those that were imported."""
    found = {"mgraph": __version__, "torch": torch.__version__}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    for name in ("triton", "transformers", "liger_kernel"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if name in sys.modules:
                found[name] = importlib.metadata.version(name.replace("_", "-"))
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists() and (number := re.search(r"\b\d+\.\d+(\.\d+)?\b", driver.read_text(encoding="utf-8"))):
        found["driver"] = number.group()
    return found


def copy_rate(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.randn(2**28, device=device)
    target = torch.empty_like(source)
    return 8 * source.numel() / _seconds(lambda: target.copy_(source))


def matmul_rate(device: torch.device) -> float:
    """Floating-point operations per second of a product of 8192^3 in bf16, in a short burst of them: in a long one the
    card comes to its limit of power, and is slower by a seventh."""
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    return 2 * 8192**3 / _seconds(lambda: left @ right, rounds=1, calls=20)


def _seconds(run: Callable[[], Any], rounds: int = 15, calls: int = 10) -> float:
    """Median seconds of a call; not in a graph, where a copy would be of another kind, and slower."""
    taken = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        taken.append(float(begin.elapsed_time(end)) / 1e3 / calls)
    return statistics.median(taken[rounds // 5 :])
