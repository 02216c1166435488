"""What the nodes of a package take, measured: a few steps under torch.profiler, joined to the lines of step.py.

The runtime puts a range around each statement (`runtime/ranges.py`). On a GPU the time of a kernel belongs to the
innermost range in which it was launched; on the CPU, that of an op of torch to the innermost range that it ran in. CUDA
graphs are off, since a replay launches everything at once. On the CPU no kernel of a GPU runs, whoever was chosen: a
statement that calls a kernel site runs its twin, all else are ops of torch.
"""

from __future__ import annotations

import ast
import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgraph.cli.snapshots import Compiled
from mgraph.errors import OptionError

_RANGE, _WORK = "user_annotation", "cpu_op"
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Times:
    """Microseconds a step by function and node; "" and the line where it is of no node. `twins` are the nodes whose
    twin ran; None on a GPU, where those ran that the package says."""

    device: str
    microseconds: Mapping[tuple[str, str], float]
    twins: frozenset[tuple[str, str]] | None


def step_times(package: Compiled, sizes: Mapping[str, int], device: str, steps: int, entry: str = "") -> Times:
    """Run steps of a train package (or calls of one `entry`) with random tokens, and say what its nodes took."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from mgraph.runtime.mesh import choose_device
    from mgraph.runtime.package import load_package
    from mgraph.runtime.state import create_state

    listed = package.manifest.get("lines")
    if not listed:
        raise OptionError("the package does not say which line is of which node", str(package.path), "compile it again")
    if math.prod(s for s in package.manifest["mesh"].values() if isinstance(s, int)) > 1:
        raise OptionError(
            "--profile runs one process, and the mesh has more ranks", str(package.path), "compile with --mesh dp=1"
        )
    if package.manifest["kind"] != "train":
        raise OptionError("--profile runs steps of training", str(package.path), "compile it with --for train")
    where = choose_device(device)
    loaded = load_package(package.path, where, ranges="record")
    state = create_state(loaded.state_specs, 0, where)
    given = _inputs(package.manifest, sizes, where)
    rate = torch.zeros((), device=where)  # The parameters stay as they are drawn.

    def step() -> None:
        for name in [entry] if entry else ("microbatch", "finish"):
            inputs = [rate if n == "lr" else given[n] for n in package.manifest["entries"][name]["inputs"]]
            loaded.call(name, state, *inputs)

    step()  # what libraries set up at first use
    on_gpu = where.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=activities) as run:
            for _ in range(steps):
                step()
            if on_gpu:
                torch.cuda.synchronize()
        file = Path(folder) / "trace.json"
        run.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    nodes = {int(line): (function, node) for function, of in listed.items() for line, node in of.items()}
    found: dict[tuple[str, str], float] = {}
    for line, time in line_times(events, on_gpu).items():
        place = nodes.get(line, ("", str(line)))
        found[place] = found.get(place, 0.0) + time / steps
    if on_gpu:
        return Times(torch.cuda.get_device_name(where), found, None)
    twins = site_lines((package.path / "step.py").read_text(encoding="utf-8"))
    return Times("the CPU", found, frozenset(place for line, place in nodes.items() if line in twins))


def site_lines(step: str) -> set[int]:
    """The lines of step.py on which statements begin that call a kernel site."""
    statements = (s for s in ast.walk(ast.parse(step)) if isinstance(s, ast.stmt) and not hasattr(s, "body"))
    return {
        statement.lineno
        for statement in statements
        for part in ast.walk(statement)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "K"
    }


def line_times(events: Iterable[Mapping[str, Any]], on_gpu: bool) -> dict[int, float]:
    """Microseconds by line of step.py, of the events of a trace; line 0 is what ran outside of all ranges."""
    from mgraph.runtime.ranges import NAME

    whole = [e for e in events if e.get("ph") == "X"]
    durations: dict[Any, float] = {}
    for event in whole:
        if event.get("cat") in _ON_DEVICE:
            launch = event["args"].get("correlation")
            durations[launch] = durations.get(launch, 0.0) + float(event["dur"])
    kinds = _LAUNCHES if on_gpu else (_WORK,)
    wanted = [e for e in whole if e.get("cat") in kinds or (e.get("cat") == _RANGE and NAME.fullmatch(e["name"]))]
    # Of two that begin together the longer one is around the other, and a range around an op.
    wanted.sort(key=lambda e: (e["tid"], float(e["ts"]), -float(e["dur"]), e["cat"] != _RANGE))
    found: dict[int, float] = {}
    open_: list[Mapping[str, Any]] = []
    for event in wanted:
        while open_ and (open_[-1]["tid"] != event["tid"] or _end(open_[-1]) <= float(event["ts"])):
            open_.pop()
        if event["cat"] == _RANGE:
            open_.append(event)
            continue
        inner = open_[-1] if open_ else None
        if inner is not None and inner["cat"] == _WORK:
            continue  # an op that another one calls
        match = NAME.fullmatch(inner["name"]) if inner is not None else None
        line = int(match[2]) if match else 0
        time = durations.pop(event["args"].get("correlation"), 0.0) if on_gpu else float(event["dur"])
        found[line] = found.get(line, 0.0) + time
        if event["cat"] == _WORK:
            open_.append(event)
    if on_gpu and durations:  # whose launches the profiler did not see
        found[0] = found.get(0, 0.0) + sum(durations.values())
    return found


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _inputs(manifest: Mapping[str, Any], sizes: Mapping[str, int], device: Any) -> dict[str, Any]:
    """Random tokens and labels, one document a row. Raises OptionError for an input of another name."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (sizes["B"], sizes["S"])
    tokens = torch.randint(manifest["vocab_size"] or 2, shape, generator=generator)
    known = {
        "tokens": tokens,
        "labels": tokens.roll(-1, 1),
        "position_ids": torch.arange(shape[1]).expand(shape),
        "segment_ids": torch.ones(shape, dtype=torch.int64),
        "loss_mask": torch.ones(shape),
    }
    for item in manifest["inputs"]:
        if item["name"] not in known:
            raise OptionError(f"no values are known for the input {item['name']}", "--profile", "leave it out")
    return {name: value.contiguous().to(device) for name, value in known.items()}
