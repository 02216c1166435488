"""Milliseconds per token of one request through `LLM.generate` (E3).

    python3 -m benchmarks.gpu.decode PACKAGE RESULTS.jsonl [--peers [NAME ...]] [--depths N N]

PACKAGE is a serve package for GPUs; its parameters are drawn anew. With --peers those of decode_peers.py, or the named
ones, are timed in the same run, on the shape that the package's config.json has. `fraction` is the time that reading
all weights once takes at the rate of a copy on this card, over the time of a token. The prompt has 512 tokens. The time
of a token is the difference between a long and a short continuation over their difference in length, so that the
prompt's own time is not in it: the median of several pairs. `bare` is that of the last token's graphs, of the step and
of what samples, replayed one after the other with nothing of `LLM.generate` around them, as the peers' loops are timed.
That graphs give what steps give is what tests/runtime/serving/test_gpu.py shows. Compiling a peer's layers takes its
time, each; with --depths those of two depths are timed (`of_layers`), and the time of all layers follows from the
difference.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import rows
from benchmarks.gpu.decode_peers import PEERS, ms_per_token
from mgraph.runtime.kernels import DTYPES
from mgraph.runtime.serving.choices import Sampler
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.llm import LLM
from mgraph.runtime.serving.package_stepper import PackageStepper
from mgraph.runtime.serving.parameters import SamplingParams

CONTEXT, SHORT, LONG = 512, 33, 289
WARM_UP, ROUNDS = 3, 5
"""Continuations before any is timed: the first capture graphs, and the next ones were seen to be slower still. Pairs of
a short and a long one that are timed, of which the median counts."""
AHEAD = 1
"""Steps that are queued beside the one that runs, as an engine does it."""


def main() -> None:
    """Measure, print, and add a row to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="time others' loops as well; all if none is named")
    parser.add_argument("--depths", nargs=2, type=int, metavar="N", help="time peers of so many layers, not of all")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is measured then is written
    device = rows.gpu()
    copy = rows.copy_rate(device)
    begun = time.perf_counter()
    stepper = PackageStepper(options.package, None, 300, "cuda", seed=0, max_tokens=1024, max_requests=8)
    llm = LLM.over(Engine(stepper, None))
    ready = time.perf_counter() - begun
    prompt = torch.randint(1, stepper.vocab_size - 1, (CONTEXT,)).tolist()

    def seconds(count: int) -> float:
        start = time.perf_counter()
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        seconds(LONG)
    rounds = [(seconds(SHORT), seconds(LONG)) for _ in range(ROUNDS)]
    ours = statistics.median(long - short for short, long in rounds) / (LONG - SHORT) * 1e3
    more: dict[str, Any] = {"bare": bare_ms(stepper, LONG - SHORT), "ready_seconds": ready}
    more |= {"fraction": weight_bytes(options.package) / copy * 1e3 / ours, "limit": "copy", "copy": copy}
    print(f"{options.package.name}: {ours:.3f} ms per token, {more}", flush=True)
    times: dict[str, float] = {}
    of_layers: dict[str, dict[str, Any]] = {}
    try:
        if options.peers is not None:
            del llm
            stepper.release()
            stepper.state.clear()
            torch.cuda.empty_cache()
            config = json.loads((options.package / "config.json").read_text(encoding="utf-8"))
            for name in options.peers or PEERS:
                time_peer(name, config, options.depths, device, times, of_layers)
    finally:
        workload = f"{options.package.name}, one request after {CONTEXT} tokens"
        rows.append(options.results, rows.row("E3", workload, ours, "ms per token", times, of_layers, **more))


def bare_ms(stepper: PackageStepper, steps: int) -> float:
    """Milliseconds of a step of one request that has been replayed before, and of its sampling, as graphs alone."""
    assert stepper.graphs is not None
    bucket = min(bucket for bucket in stepper.graphs.buckets if bucket.writing)
    replays = [stepper.graphs.replay_of(name) for name in (bucket, (bucket.requests, Sampler.LIKELIEST, 0, None))]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    ends[0].record()
    for step, end in enumerate(ends[1:]):
        ends[max(0, step - AHEAD)].synchronize()
        for replay in replays:
            replay()
        end.record()
    torch.cuda.synchronize()
    return float(ends[0].elapsed_time(ends[-1])) / steps


def weight_bytes(package: Path) -> int:
    """Bytes of the parameters that a token of a dense model reads: all but an embedding that is not the head, too."""
    state = json.loads((package / "manifest.json").read_text(encoding="utf-8"))["state"]
    tied = json.loads((package / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings", False)
    params = [item for item in state if item["kind"] == "param" and (tied or "embed" not in item["name"])]
    return sum(math.prod(item["shape"]) * DTYPES[item["dtype"]].itemsize for item in params)


def time_peer(
    name: str,
    config: Mapping[str, Any],
    depths: Sequence[int] | None,
    device: torch.device,
    times: dict[str, float],
    of_layers: dict[str, dict[str, Any]],
) -> None:
    """Put the time of a peer's token into `times`, and those of two depths, where asked for, into `of_layers`. One that
    does not run is told of, and the others go on."""
    layers = config["num_hidden_layers"]
    try:
        taken = [peer_ms(name, {**config, "num_hidden_layers": n}, device) for n in depths or [layers]]
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
        return
    times[name] = taken[0]
    if depths:
        few, many = depths
        times[name] += (layers - few) * (taken[1] - taken[0]) / (many - few)
        of_layers[name] = {"of_layers": dict(zip(depths, taken, strict=True))}
    print(f"{name}: {times[name]:.3f} ms per token", flush=True)


def peer_ms(name: str, config: Mapping[str, Any], device: torch.device) -> float:
    """Milliseconds of a peer's token."""
    torch._dynamo.reset()
    step = PEERS[name](config, 2 * CONTEXT, device, torch.bfloat16)
    taken = ms_per_token(step, CONTEXT, LONG - SHORT, device)
    del step
    torch.cuda.empty_cache()
    return taken


if __name__ == "__main__":
    main()
