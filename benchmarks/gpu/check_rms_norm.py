"""Checks and times pre-built RMS norm binaries on a GPU, through the runtime's launcher.

    python3 -m benchmarks.gpu.check_rms_norm DIRECTORY [RESULTS.json]

DIRECTORY comes from `build_rms_norm`. First every kernel is held against float64: its error may be at most 1.1 times
that of the eager written-out formula, plus 5e-7 for sums in another order. Triton must not have been imported by then.
Then the timed problems run beside `F.rms_norm` and `torch.compile` of the written-out formula, in turn (A B C C B A):
medians of CUDA event times over rounds, on random data larger than the L2 cache. Exit status 1 if any check fails.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch.nn import functional

from benchmarks.gpu import rows
from mgraph.runtime import kernels as runtime

GATE_SHAPES: list[tuple[int, ...]] = [(1,), (3,), (2, 5), (1031,)]
TIMED_ELEMENTS = 16384 * 4096
ROUNDS, REPEATS = 11, 10
Tensors = tuple[torch.Tensor, ...]
cuda: Any = torch.cuda


def written_out(problem: dict[str, Any], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The formula in x's dtype, statistics in f32, as models write it."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + problem["eps"])
    scale = weight.float() + problem["offset"]
    if problem["round"] == "normed":
        normed = normed.to(x.dtype).float()
    result: torch.Tensor = (normed * scale).to(x.dtype)
    return result


def exact(problem: dict[str, Any], dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Tensors:
    """y, rstd, dx and dweight in float64, by the formula of the gradient."""
    dy, x, weight = dy.double(), x.double(), weight.double()
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + problem["eps"])
    normed, scale = x * rstd, weight + problem["offset"]
    grad = dy * scale
    dx = (grad - normed * (grad * normed).mean(-1, keepdim=True)) * rstd
    return normed * scale, rstd, dx, (dy * normed).reshape(-1, x.shape[-1]).sum(0)


def draw(problem: dict[str, Any], shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random dy, x and weight of a problem on the GPU."""
    size, dtype = problem["size"], runtime.DTYPES[problem["x"]]
    dy, x = (torch.randn(*shape, size, device="cuda").to(dtype) for _ in range(2))
    weight = (1 - problem["offset"] + 0.3 * torch.randn(size, device="cuda")).to(runtime.DTYPES[problem["weight"]])
    return dy, x, weight


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; not-a-number stays not-a-number."""
    return float((got.double() - want).norm() / want.norm())


def gate(sites: runtime.Kernels, problem: dict[str, Any]) -> list[str]:
    """Complaints about the kernels of one problem, over all shapes and tunings; none if all is well."""
    complaints = []
    for shape in GATE_SHAPES:
        dy, x, weight = draw(problem, shape)
        want = exact(problem, dy, x, weight)
        leaf_x, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = written_out(problem, leaf_x, leaf_weight)
        eager = [y.detach(), None, *torch.autograd.grad(y, [leaf_x, leaf_weight], dy)]
        results: dict[str, list[torch.Tensor | None]] = {}
        for name in problem["forward"]:
            results[name] = [*getattr(sites, name)(x, weight), None, None]
        rstd = next(iter(results.values()))[1]
        for name in problem["backward"]:
            results[name] = [None, None, *getattr(sites, name)(dy, x, weight, rstd)]
        for name, values in results.items():
            for role, got, ideal, peer in zip(("y", "rstd", "dx", "dweight"), values, want, eager, strict=True):
                if got is None:
                    continue
                bound = 5e-7 + (0.0 if peer is None else 1.1 * error(peer, ideal))
                if not error(got, ideal) <= bound:
                    complaints.append(f"{name} {list(shape)} {role}: {error(got, ideal):.2e} > {bound:.2e}")
    return complaints


def gate_launching(sites: runtime.Kernels, problem: dict[str, Any]) -> list[str]:
    """Complaints about ways of calling: unaligned, strided, no rows, on a side stream, in a CUDA graph, repeated."""
    forward, backward = (getattr(sites, next(iter(problem[way]))) for way in ("forward", "backward"))
    dy, x, weight = draw(problem, (300,))
    y, rstd = forward(x, weight)
    dx, dweight = backward(dy, x, weight, rstd)
    complaints = []

    def check(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if not torch.equal(got, want):
            complaints.append(f"{what}: differs from the plain call")

    room = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x)
    room.copy_(x)
    if not torch.allclose(forward(room, weight)[0], y, rtol=1e-2):
        complaints.append("an unaligned tensor: wrong")
    strided = torch.stack([x, x], dim=-1)[..., 0]
    check("a strided tensor", forward(strided, weight)[0], y)
    check("no rows", backward(dy[:0], x[:0], weight, rstd[:0])[1], torch.zeros_like(weight))
    stream = cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        side = forward(x, weight)[0]
    stream.synchronize()
    check("a side stream", side, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = (*forward(x, weight), *backward(dy, x, weight, rstd))
    graph.replay()
    for what, got, want in zip(("y", "rstd", "dx", "dweight"), captured, (y, rstd, dx, dweight), strict=True):
        check(f"{what} in a CUDA graph", got, want)
    check("dweight repeated", backward(dy, x, weight, rstd)[1], dweight)
    return complaints


def median_times(contenders: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds per call of each contender, in rounds that run all of them forth and back."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        for _ in range(3):
            call()
    order = [*contenders, *reversed(contenders)]
    for name in order * ROUNDS:
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPEATS):
            contenders[name]()
        end.record()
        end.synchronize()
        times[name].append(start.elapsed_time(end) / 1e3 / REPEATS)
    return {name: statistics.median(values) for name, values in times.items()}


def time_problem(sites: runtime.Kernels, problem: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per direction: seconds of each kernel and peer, bytes per second, ratio to the best peer."""
    rows = TIMED_ELEMENTS // problem["size"]
    dy, x, weight = draw(problem, (rows,))
    shape, eps = [problem["size"]], problem["eps"]
    leaf_x, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    torch._dynamo.reset()  # problems share code, and recompilation has a limit
    compiled = torch.compile(lambda x, weight: written_out(problem, x, weight), dynamic=False)
    graphs = [functional.rms_norm(leaf_x, shape, leaf_weight, eps), compiled(leaf_x, leaf_weight)]
    rstd = getattr(sites, next(iter(problem["forward"])))(x, weight)[1]

    def grad_of(y: torch.Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(y, [leaf_x, leaf_weight], dy, retain_graph=True)

    def no_grad(call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        return torch.no_grad()(lambda: call(*args))

    forward: dict[str, Callable[[], Any]] = {
        "eager": no_grad(functional.rms_norm, x, shape, weight, eps),
        "compile": no_grad(compiled, x, weight),
    }
    backward: dict[str, Callable[[], Any]] = {"eager": grad_of(graphs[0]), "compile": grad_of(graphs[1])}
    for name in problem["forward"]:
        forward[name] = no_grad(getattr(sites, name), x, weight)
    for name in problem["backward"]:
        backward[name] = no_grad(getattr(sites, name), dy, x, weight, rstd)
    report = []
    for way, contenders, passes in (("forward", forward, 2), ("backward", backward, 3)):
        seconds = median_times(contenders)
        default = next(iter(problem[way]))
        moved = passes * x.numel() * x.element_size()
        peer = min(seconds["eager"], seconds["compile"])
        tunings = {name: {**problem[way][name], "seconds": seconds[name]} for name in problem[way]}
        report.append(
            {
                "problem": f"{way} {rows}x{problem['size']} {problem['x']}",
                "seconds": {name: seconds[name] for name in ("eager", "compile", default)},
                "bytes_per_second": moved / seconds[default],
                "ratio_to_best_peer": peer / seconds[default],
                "best_tuning": min(tunings.values(), key=lambda item: item["seconds"]),
                "tunings": tunings,
            }
        )
    return report


def host_cost(sites: runtime.Kernels, problem: dict[str, Any]) -> dict[str, float]:
    """Seconds of the host per call where the GPU has next to nothing to do: ours and `F.rms_norm`."""
    dy, x, weight = draw(problem, (4,))
    forward, backward = (getattr(sites, next(iter(problem[way]))) for way in ("forward", "backward"))
    rstd = forward(x, weight)[1]
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: forward(x, weight),
        "backward": lambda: backward(dy, x, weight, rstd),
        "F.rms_norm": lambda: functional.rms_norm(x, [problem["size"]], weight, problem["eps"]),
    }
    costs = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(500):
            call()
        costs[name] = (time.perf_counter() - begin) / 500
        torch.cuda.synchronize()
    return costs


def main() -> int:
    """Gate, then time; write the results as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("results", type=Path, nargs="?", help="where to write the results as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    runtime.set_device(rows.gpu(), strict=True)
    begin = time.perf_counter()
    sites = runtime.kernels(options.directory / "step.py")
    print(f"{torch.cuda.get_device_name()}: {len(sites.providers)} sites bound in {time.perf_counter() - begin:.2f} s")
    assert set(sites.providers.values()) == {"cubin"}, "every site must run a pre-built binary"
    problems = json.loads((options.directory / "manifest.json").read_text(encoding="utf-8"))["problems"]
    complaints = [line for problem in problems for line in gate(sites, problem)]
    complaints += [line for problem in problems for line in gate_launching(sites, problem)]
    if "triton" in sys.modules:
        complaints.append("triton was imported")
    print("\n".join(complaints) or f"all {len(problems)} problems pass, without triton")
    timed = [problem for problem in problems if problem["timed"]]
    host = host_cost(sites, timed[0])
    print("host cost per call: " + ", ".join(f"{name} {seconds * 1e6:.1f} µs" for name, seconds in host.items()))
    report: list[dict[str, Any]] = []
    # The compiled backward is run many times over one forward, so it must not take the saved tensors' memory.
    config: Any = importlib.import_module("torch._functorch.config")
    config.donated_buffer = False
    for problem in timed:
        for row in time_problem(sites, problem):
            report.append(row)
            micro = ", ".join(f"{name} {seconds * 1e6:.1f} µs" for name, seconds in row["seconds"].items())
            speed = f"{row['bytes_per_second'] / 1e12:.2f} TB/s, {row['ratio_to_best_peer']:.2f} x best peer"
            print(f"{row['problem']}: {micro}; {speed}; best tuning {row['best_tuning']}")
    if options.results:
        data = {"device": torch.cuda.get_device_name(), "complaints": complaints, "host": host, "timings": report}
        options.results.write_text(json.dumps(data, indent=1), encoding="utf-8")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
