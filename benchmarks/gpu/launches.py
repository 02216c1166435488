"""The host's time of a launch: a package's own, Triton's JIT, and an op of torch.

    python3 -m benchmarks.gpu.launches RESULTS.jsonl

Kernels so small that the GPU always waits for the host are compiled as a package has them, launched through the
package's own runtime and compared with their references in float64. Then the host calls each many times in a row and
waits for the GPU only between such loops; `ours` is the median of a call: looking at its tensors, memory for its
results, and its `launches`. What of it these take, with all that known, is `launch_seconds`. `triton jit` is the same
site on the same source, which Triton's JIT compiled before and launches now; `torch op` is the least that a launch from
Python costs, torch.neg of the first tensor into one that is there. `graph_seconds` is what a call takes on the device,
in a CUDA graph of many that follow each other, where kernels of ours come early and those of the others do not.

`behind_seconds` is how long the GPU still worked when the host had made its calls, for each of them. A driver takes
about a thousand launches ahead, then the host waits: where the GPU was not that far behind, it never did. Exit status 1
where it may have, where a graph takes longer than the host does, or where a kernel is wrong, which then has no row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import cases_glu, cases_norm, rows
from benchmarks.gpu.kernel_case import Case
from benchmarks.gpu.kernels import error_of, seconds_of, wide
from mgraph.codegen.triton.aot import build_kernels
from mgraph.codegen.triton.glu import Glu
from mgraph.runtime import kernels as runtime
from mgraph.runtime.launch import CubinLauncher, JitLauncher

ROWS, SIZE = 16, 2048
CASES = (
    cases_norm.case("K1", ROWS, SIZE),
    cases_norm.case("K2", ROWS, SIZE),
    cases_glu.forward_case("few", (ROWS, SIZE), Glu(SIZE, 1, "bf16", "silu")),
)
WARM, CALLS, LOOPS = 100, 2000, 9
IN_GRAPH = 100
MOST_BEHIND = 0.25
"""Of the host's time. With a thousand launches ahead it would be a third where a call has two of them, else more."""


def bound(case: Case, directory: Path, entries: Sequence[Mapping[str, Any]], device: torch.device) -> runtime.Site:
    """The site of a case, launched by its binaries; by Triton's JIT where the entries have none."""
    (directory / "manifest.json").write_text(json.dumps({"kernels": entries}), encoding="utf-8")
    runtime.set_device(device, strict=True, jit=True)
    kernels = runtime.kernels(directory / "step.py")
    wanted = "cubin" if any(launch["binaries"] for entry in entries for launch in entry["launches"]) else "jit"
    assert kernels.providers[case.spec.name] == wanted, f"{case.id} is run by {kernels.providers[case.spec.name]}"
    site: runtime.Site = getattr(kernels, case.spec.name)
    return site


def without_binaries(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a kernel that has only its source."""
    return {**entry, "launches": [{**launch, "binaries": []} for launch in entry["launches"]]}


def launches_of(site: runtime.Site, inputs: tuple[Any, ...]) -> list[Callable[[], None]]:
    """The launches of a call of a site, with what it hands them."""
    with contextlib.ExitStack() as stack:
        kinds = (CubinLauncher, JitLauncher)
        noted = [stack.enter_context(mock.patch.object(kind, "launch", autospec=True)) for kind in kinds]
        site(*inputs)
    calls = [call.args for launch in noted for call in launch.call_args_list]
    return [partial(launcher.launch, *given) for launcher, *given in calls]


def host_seconds(run: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[float, float]:
    """Seconds that the host takes for a call, and those that the GPU worked on then; medians of several loops."""
    for _ in range(WARM):
        run(*inputs)
    taken, behind = [], []
    for _ in range(LOOPS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(CALLS):
            run(*inputs)
        ended = time.perf_counter()
        torch.cuda.synchronize()
        behind.append((time.perf_counter() - ended) / CALLS)
        taken.append((ended - begun) / CALLS)
    return statistics.median(taken), statistics.median(behind)


def measured(run: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, float]:
    """The times of a call: of the host, of the GPU behind it, and of the GPU in a graph."""
    seconds, behind = host_seconds(run, inputs)
    in_graph = seconds_of(run, [inputs], calls=IN_GRAPH)
    return {"seconds": seconds, "behind_seconds": behind, "graph_seconds": in_graph}


def measured_site(
    case: Case, site: runtime.Site, inputs: tuple[Any, ...], expected: tuple[Any, ...]
) -> dict[str, float]:
    """The times of a call of a site, how many launches it has, and the time of these; of one that is wrong its error
    alone."""
    error = error_of(site(*inputs), expected)
    if not error <= case.bound:
        return {"error": error}
    launches = launches_of(site, inputs)

    def launch() -> None:
        for one in launches:
            one()

    times = measured(site, inputs)
    alone, _ = host_seconds(launch, ())
    return {**times, "launch_seconds": alone, "launches": len(launches), "error": error}


def limited(name: str, times: Mapping[str, float]) -> list[str]:
    """A complaint where the GPU may have held up the host."""
    host, behind, graph = (times[field] * 1e6 for field in ("seconds", "behind_seconds", "graph_seconds"))
    if graph < host and behind <= MOST_BEHIND * host:
        return []
    return [f"{name}: the GPU is the limit: a call {host:.2f} us, in a graph {graph:.2f}, {behind:.2f} behind"]


def measure(case: Case, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """The row of a case, empty where the kernel is wrong, and complaints."""
    torch.manual_seed(0)
    inputs = case.inputs(device)
    expected = case.reference(*wide(inputs))
    found: dict[str, dict[str, float]] = {}
    complaints = []
    with tempfile.TemporaryDirectory() as folder:  # of which the JIT reads at its first launch
        directory = Path(folder)
        entries = build_kernels([case.spec], directory, ["sm_90a"])
        ways = {"ours": entries, "triton jit": [without_binaries(entry) for entry in entries]}
        for name, listed in ways.items():
            try:
                found[name] = measured_site(case, bound(case, directory, listed, device), inputs, expected)
            except Exception as error:  # a peer that does not run is a result, and the others go on
                if name == "ours":
                    raise
                complaints.append(f"{case.id}, {name}: {type(error).__name__}: {str(error).splitlines()[:1]}")
    found["torch op"] = measured(partial(torch.neg, inputs[0], out=torch.empty_like(inputs[0])), ())
    for name in [name for name, times in found.items() if "seconds" not in times]:
        complaints.append(f"{case.id}, {name}: error {found.pop(name)['error']:.1e}, allowed {case.bound:.1e}")
    if "ours" not in found:
        return {}, complaints
    complaints += [said for name, times in found.items() for said in limited(f"{case.id}, {name}", times)]
    seconds = {name: times.pop("seconds") for name, times in found.items()}
    ours, more = seconds.pop("ours"), found.pop("ours")
    return rows.row("launch", case.workload, ours, "seconds", seconds, found, **more, bound=case.bound), complaints


def said(row: Mapping[str, Any]) -> str:
    """A row in lines: microseconds of the host, of launches alone, and in a graph."""
    lines = [row["workload"]]
    for name, seconds in {"ours": row["ours"], **row["peers"]}.items():
        more = row if name == "ours" else row["of_peers"][name]
        alone = f"launches alone {more['launch_seconds'] * 1e6:6.2f}" if "launch_seconds" in more else ""
        lines.append(f"  {name:12} {seconds * 1e6:6.2f} us  {alone:21}  in a graph {more['graph_seconds'] * 1e6:6.2f}")
    return "\n".join(lines)


def main() -> int:
    """A row for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    device = rows.gpu()
    complaints: list[str] = []
    for case in CASES:
        row, more = measure(case, device)
        complaints += more
        if row:
            rows.append(options.results, row)
            print(said(row), flush=True)
    print("\n".join(complaints) or "the host is the limit everywhere", flush=True)
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
