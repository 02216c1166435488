"""Milliseconds per token of one request through `LLM.generate` (E3).

    python3 -m benchmarks.gpu.decode PACKAGE RESULTS.jsonl [--peers [NAME ...]] [--depths N N]

PACKAGE is a serve package for GPUs; its parameters are drawn anew. With --peers those of decode_peers.py, or the named
ones, are timed in the same run, on the shape that the package's config.json has, a row each. `fraction` is the time
that reading all weights once takes at the rate of a copy on this card, over the time of a token. The prompt has 512
tokens. The time of a token is the difference between a long and a short continuation over their difference in length,
so that the prompt's own time is not in it: the median of several pairs. `bare_ms_per_token` is that of the last token's
graphs, of the step and of what samples, replayed one after the other with nothing of `LLM.generate` around them, as the
peers' loops are timed. That graphs give what steps give is what tests/runtime/serving/test_gpu.py shows. Compiling a
peer's layers takes its time, each; with --depths those of two depths are timed, and the time of all layers follows from
the difference.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.decode_peers import PEERS, ms_per_token
from benchmarks.gpu.kernels import copy_rate
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
    device = torch.device("cuda", torch.cuda.current_device())
    copy = copy_rate(device)
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
    weights = weight_bytes(options.package)
    row = {
        "id": "E3",
        "package": options.package.name,
        "context": CONTEXT,
        "ms_per_token": ours,
        "bare_ms_per_token": bare_ms(stepper, LONG - SHORT),
        "fraction": weights / copy * 1e3 / ours,
        "ready_seconds": ready,
        "copy": copy,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    record(row, options.results)
    if options.peers is not None:
        del llm
        stepper.release()
        stepper.state.clear()
        torch.cuda.empty_cache()
        config = json.loads((options.package / "config.json").read_text(encoding="utf-8"))
        compare(row, options.peers or list(PEERS), config, options.depths, options.results, device)


def bare_ms(stepper: PackageStepper, steps: int) -> float:
    """Milliseconds of a step of one request that has been replayed before, and of its sampling, as graphs alone."""
    assert stepper.graphs is not None
    bucket = min(bucket for bucket in stepper.graphs.buckets if bucket.writing)
    replays = [stepper.graphs.replay_of(name) for name in (bucket, (bucket.requests, Sampler.LIKELIEST, 0))]
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


def compare(
    row: Mapping[str, Any],
    peers: Sequence[str],
    config: Mapping[str, Any],
    depths: Sequence[int] | None,
    results: Path,
    device: torch.device,
) -> None:
    """A row for each peer: its time, and over ours. One that does not run is told of, and the others go on."""
    layers = config["num_hidden_layers"]
    for name in peers:
        try:
            times = [peer_ms(name, {**config, "num_hidden_layers": n}, device) for n in depths or [layers]]
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
            continue
        taken, how = times[0], {}
        if depths:
            few, many = depths
            taken += (layers - few) * (times[1] - times[0]) / (many - few)
            how = {"peer_of_layers": dict(zip(depths, times, strict=True))}
        ratio = taken / row["ms_per_token"]
        found = {"peer": name, "peer_ms_per_token": taken, "ratio": ratio, "unit": "ms per token", **how}
        record({**row, **found}, results)


def peer_ms(name: str, config: Mapping[str, Any], device: torch.device) -> float:
    """Milliseconds of a peer's token."""
    torch._dynamo.reset()
    step = PEERS[name](config, 2 * CONTEXT, device, torch.bfloat16)
    taken = ms_per_token(step, CONTEXT, LONG - SHORT, device)
    del step
    torch.cuda.empty_cache()
    return taken


def record(row: Mapping[str, Any], results: Path) -> None:
    """Print a row, and add it to the results."""
    print(json.dumps(row), flush=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
