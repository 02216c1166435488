"""Kernels on a GPU: right first, then their time beside others'.

    python3 -m benchmarks.gpu.kernels RESULTS.jsonl [CASE ...] [--no-peers]

CASE is a beginning of an id (K5), all without one. Each kernel is compiled as a package has it, launched through the
package's own runtime and compared with its reference in float64: `error` may be as large as `bound`. Then it and its
peers are captured in CUDA graphs of several calls, on inputs that do not fit in the L2 cache together, if each has 2 MB
or more, and the median time of a call is taken. `fraction` is of what this card reaches in this run: the least bytes
that the work moves over what a copy moves, or operations over those of a bf16 product of 8192^3 where these take
longer; `reading_seconds` is what a kernel takes that reads as many bytes and does nothing else, where these are few;
`peak_bytes` are those that a call has beside its inputs, and `kept_bytes`, of work with a gradient, those that its
first half leaves for the second, its result not among them; of peers in `of_peers`, with the `error` of those that give
the same tensors: one that is wrong is not timed. A kernel that is wrong has no row. Exit status 1 on any complaint.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import rows
from benchmarks.gpu.kernel_case import Case, Halves
from benchmarks.gpu.reading import BELOW, reading_seconds
from mgraph.codegen.triton.aot import Binaries, build_kernels
from mgraph.runtime import kernels as runtime

FAMILIES = (
    "adamw",
    "append",
    "attention",
    "embedding",
    "exchange",
    "experts",
    "few_rows",
    "glu",
    "loss",
    "moe",
    "norm",
    "paged",
    "region",
    "rope",
    "sampling",
)
MOST_OF_PEERS = 4
"""Times what a kernel may be wrong by, a peer may: they round elsewhere."""
L2_BYTES = 50e6
CALLS, SHORT_CALLS = 10, 50
"""Calls of a graph, and of one of works of few bytes, which are short: the graph's own start is some 4 us."""
MADE: Binaries = {}
"""What was compiled for cases before: those of one kernel, of other sizes, take it from there."""


def wide(value: Any) -> Any:
    """Floats as float64, in lists too; fresh tensors in any case."""
    if isinstance(value, list | tuple):
        return [wide(v) for v in value]
    return value.double() if value.is_floating_point() else value.clone()


def flat(values: Any) -> list[Tensor]:
    """All tensors of nested lists."""
    if isinstance(values, Tensor):
        return [values]
    return [] if values is None else [tensor for value in values for tensor in flat(value)]


def result_of(run: Callable[..., Any], inputs: Sequence[Any], written: Sequence[int]) -> list[Any]:
    """What a call gives, and then those of its inputs that it writes."""
    return [run(*inputs), *(inputs[place] for place in written)]


def error_of(found: Any, expected: Any) -> float:
    """The largest error of a result, in the Frobenius norm, relative to what it should be."""
    worst = 0.0
    for got, want in zip(flat(found), flat(expected), strict=True):
        norm = float(want.double().norm())
        off = float((got.double() - want.double()).norm()) / (norm or 1.0)
        worst = max(worst, off if off == off else float("inf"))
    return worst


def peer_error(found: Any, known: Sequence[Tensor]) -> float | None:
    """As `error_of`, of what a peer gives; None where those are other tensors than a kernel gives, as of one that gives
    a part."""
    tensors = [tensor.cpu() for tensor in flat(found)]
    return error_of(tensors, known) if [t.shape for t in tensors] == [t.shape for t in known] else None


def seconds_of(
    run: Callable[..., Any], sets: Sequence[tuple[Any, ...]], in_graph: bool = True, calls: int = CALLS
) -> float:
    """Median seconds of a call, in a graph of calls that take the sets of inputs by turns; or of as many launches."""

    def all_calls() -> None:
        for index in range(calls):
            run(*sets[index % len(sets)])

    for inputs in sets:
        run(*inputs)
    torch.cuda.synchronize()
    again = all_calls
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_calls()
        again = graph.replay
    taken = []
    for _ in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        again()
        end.record()
        torch.cuda.synchronize()
        taken.append(float(begin.elapsed_time(end)) / 1e3 / calls)
    return statistics.median(taken[3:])


def bytes_of(run: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, Any]:
    """Bytes that a call has beside its inputs at most, with what it gives; of one in halves also what is kept."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*inputs)
    found: dict[str, Any] = {"peak_bytes": torch.cuda.max_memory_allocated() - before}
    if isinstance(run, Halves):
        result, kept = run.forward(*inputs[: run.taken])
        found["kept_bytes"] = torch.cuda.memory_allocated() - before - result.numel() * result.element_size()
        kept.clear()
    return found


def sets_for(size: float, calls: int) -> int:
    """How many inputs of so many bytes each do not fit in the cache together, as far as there are calls for them."""
    return min(calls, int(2 * L2_BYTES / max(1, size)) + 1)


def sets_of(case: Case, device: torch.device, calls: int) -> list[tuple[Any, ...]]:
    """Inputs several times over, so that they do not stay in the cache."""
    first = case.inputs(device)
    # Of large tensors a call may read a part only, which must not stay there either.
    size = min(case.bytes or L2_BYTES, sum(t.numel() * t.element_size() for t in flat(first)))
    return [first, *(case.inputs(device) for _ in range(sets_for(size, calls) - 1))]


def measure(
    case: Case, device: torch.device, rates: Mapping[str, float], with_peers: bool
) -> tuple[dict[str, Any], list[str]]:
    """The row of a case, empty where the kernel is wrong, and complaints."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        entries = build_kernels([case.spec, *case.more], directory, ["sm_90a"], MADE)
        (directory / "manifest.json").write_text(json.dumps({"kernels": entries}), encoding="utf-8")
        runtime.set_device(device, strict=True)
        bound = runtime.kernels(directory / "step.py")
        site = case.joined(bound) if case.joined else getattr(bound, case.spec.name)
    inputs = case.inputs(device)
    expected = result_of(case.reference, inputs if case.narrow else wide(inputs), case.written)
    worst = error_of(result_of(site, inputs, case.written), expected)
    if not worst <= case.bound:
        return {}, [f"{case.id}: error {worst:.1e}, allowed {case.bound:.1e}"]
    known = [tensor.cpu() for tensor in flat(expected)]  # where they take no memory that is measured
    del inputs, expected
    complaints = []
    calls = SHORT_CALLS if case.bytes < BELOW else CALLS
    sets = sets_of(case, device, calls)
    ours = seconds_of(site, sets, calls=calls)
    more: dict[str, Any] = {"flops_per_second": case.flops / ours} if case.flops else {}
    least = {"copy": case.bytes / rates["copy"], "matmul": case.flops / rates["matmul"]}
    limit = max(least, key=least.__getitem__)
    more |= {"fraction": least[limit] / ours, "limit": limit, **rates}
    if limit == "copy" and case.bytes < BELOW:
        more["reading_seconds"] = reading_seconds(case.bytes, device)
    more |= bytes_of(site, sets[0])
    times: dict[str, float] = {}
    of_peers: dict[str, dict[str, Any]] = {}
    for name, peer in case.peers.items() if with_peers else ():
        try:
            torch._dynamo.reset()
            run = torch.compile(peer, dynamic=False) if name.startswith("compile") else peer
            torch.manual_seed(0)
            off = peer_error(result_of(run, case.inputs(device), case.written), known)
            if off is not None and not off <= MOST_OF_PEERS * case.bound:
                complaints.append(f"{case.id}, {name}: error {off:.1e}, it is not timed")
                continue
            times[name] = seconds_of(run, sets, name not in case.launched, calls)
            of_peers[name] = bytes_of(run, sets[0]) | ({} if off is None else {"error": off})
        except Exception as error:  # a peer that does not run is a result, and the others go on
            complaints.append(f"{case.id}, {name}: {type(error).__name__}: {str(error).splitlines()[:1]}")
    more |= {"error": worst, "bound": case.bound}
    return rows.row(case.id, case.workload, ours, "seconds", times, of_peers, **more), complaints


def said(row: dict[str, Any]) -> str:
    """A row in a line."""
    speed = f"{row['flops_per_second'] / 1e12:5.0f} TFLOP/s  " if "flops_per_second" in row else ""
    others = " ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in row.get("peers", {}).items())
    time = f"{row['ours'] * 1e6:9.1f} us {row['fraction']:5.2f} of {row['limit']}"
    if "reading_seconds" in row:
        speed += f"reading {row['reading_seconds'] * 1e6:.1f}  "
    return f"{row['id']:28} {time}  {speed}error {row['error']:.1e}  {others}"


def main() -> int:
    """Measure the cases asked for; one line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--tunings", action="store_true", help="other tunings of the kernels, in place of the cases")
    options = parser.parse_intermixed_args()
    device = rows.gpu()
    rates = {"copy": rows.copy_rate(device), "matmul": rows.matmul_rate(device)}
    print(
        f"{rows.card()}: copy {rates['copy'] / 1e12:.2f} TB/s, matmul {rates['matmul'] / 1e12:.0f} TFLOP/s", flush=True
    )
    complaints: list[str] = []
    for family in FAMILIES:
        module = importlib.import_module(f"benchmarks.gpu.cases_{family}")
        for case in getattr(module, "TUNINGS", []) if options.tunings else module.CASES:
            if options.cases and not case.id.startswith(tuple(options.cases)):
                continue
            try:
                row, more = measure(case, device, rates, not options.no_peers)
            except Exception as error:  # the others go on
                complaints.append(f"{case.id}: {type(error).__name__}: {str(error).splitlines()[:1]}")
                continue
            complaints += more
            if row:
                rows.append(options.results, row)
                print(said(row), flush=True)
            torch.cuda.empty_cache()
    print("\n".join(complaints) or "all kernels are right", flush=True)
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
