"""The steps of a served trace, without a model: how they fit into CUDA graphs, and what they cost the host.

    python3 -m benchmarks.serve_steps [--results FILE] [--write-traces]

A trace (benchmarks/traces) says how long prompts and outputs are; all of its requests come at once, for 128 slots.
Which tokens of which requests a step has depends on these lengths alone, so shares of steps in graphs and of padding
are exact for any list of buckets, and need no GPU. The host's time is that of the engine alone, for a step's results
that are there at once: planning, arrays, taking results in. `benchmarks/gpu/serve_trace.py` measures the rest.
`--write-traces` makes the traces anew from their seeds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mgraph.codegen.buckets import MOST_TOKENS, POLICIES, by_policy, default_histogram
from mgraph.runtime.serving.blocks import Windows
from mgraph.runtime.serving.choices import Sampler
from mgraph.runtime.serving.dispatch import Bucket, Key, choose
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.parameters import SamplingParams
from mgraph.runtime.serving.step import Batch, Done, Pending, Sampled, Sampling

DIRECTORY = Path(__file__).parent / "traces"
RESULTS = Path(__file__).parent / "results" / "serve_steps.json"
GRAPHS, SLOTS, STEP_TOKENS = 24, 128, 2048
SEED = 20261128
SHAPES = {"long_outputs": ((16, 48), (1536, 2560), 512), "long_prompts": ((1024, 1024), (128, 128), 512)}
"""Name -> least and greatest length of prompts, of outputs, number of requests."""


@dataclass(frozen=True)
class Asked:
    """One request of a trace, perhaps some way on: `done` tokens of its output are there."""

    prompt: int
    output: int
    done: int = 0

    def params(self, **sampling: float) -> SamplingParams:
        """What is left to generate, the likeliest token each time or as `sampling` says."""
        given: dict[str, Any] = {"temperature": 0, **sampling}
        return SamplingParams(max_tokens=self.output - self.done, ignore_eos=True, **given)


@dataclass(frozen=True)
class Shape:
    """How many tokens of how many requests a step had, and how many rows of logits."""

    tokens: int
    requests: int
    rows: int


def write() -> None:
    """All traces, into files."""
    DIRECTORY.mkdir(exist_ok=True)
    for name, (prompts, outputs, count) in SHAPES.items():
        source = random.Random(SEED)
        rows = [[source.randint(*prompts), source.randint(*outputs)] for _ in range(count)]
        text = ",\n".join(json.dumps(row) for row in rows)
        (DIRECTORY / f"{name}.json").write_text(f'{{"seed": {SEED}, "requests": [\n{text}\n]}}\n', "utf-8")


def read(name: str, scale: int = 1) -> list[Asked]:
    """A trace by name; all lengths divided by `scale`, for models that hold less."""
    rows = json.loads((DIRECTORY / f"{name}.json").read_text("utf-8"))["requests"]
    return [Asked(max(1, prompt // scale), max(1, output // scale)) for prompt, output in rows]


def in_the_middle(trace: Sequence[Asked], slots: int) -> list[Asked]:
    """The trace from a moment when its first `slots` requests are under way, each somewhere else in its output."""
    source = random.Random(SEED)
    under_way = [Asked(one.prompt, one.output, source.randrange(one.output)) for one in trace[:slots]]
    return [*under_way, *trace[slots:]]


def submit(engine: Engine, trace: Sequence[Asked], **sampling: float) -> None:
    """All of it at once, sampled so. What is under way has the tokens that it wrote in its prompt: they are computed in
    chunks."""
    source = random.Random(SEED)
    for one in trace:
        prompt = [source.randrange(1, engine.stepper.vocab_size) for _ in range(one.prompt + one.done)]
        engine.submit(prompt, one.params(**sampling))


class Blank:
    """A stepper without a model: its results are there at once and are always token 1."""

    def __init__(self, slots: int, max_tokens: int, max_length: int, block_size: int = 16) -> None:
        self.block_size, self.max_length, self.vocab_size = block_size, max_length, 1000
        self.max_tokens, self.max_requests = max_tokens, slots
        self.num_blocks = 1 + slots * -(-max_length // block_size)
        self.windows: Windows = (None,)
        self.asynchronous = True
        self.shapes: list[Shape] = []

    @property
    def launches(self) -> dict[str, int]:
        """There are none."""
        return {}

    def run(self, batch: Batch, sampling: Sampling) -> Pending:
        """Note the step's shape."""
        self.shapes.append(shape_of(batch))
        count = len(batch.rows)
        none, scores = np.zeros((count, 0), np.int64), np.zeros((count, 0), np.float32)
        return Done(Sampled(np.ones(count, np.int64), np.zeros(count, np.float32), none, scores))


def shape_of(batch: Batch) -> Shape:
    """Of a step."""
    return Shape(len(batch.tokens), len(batch.lengths), len(batch.rows))


def steps_of(trace: Sequence[Asked], slots: int, max_tokens: int) -> tuple[list[Shape], float]:
    """The shapes of all steps that a whole trace takes, and the milliseconds that the engine took for each."""
    longest = max(one.prompt + one.output for one in trace)
    stepper = Blank(slots, max_tokens, longest)
    engine = Engine(stepper, None)
    submit(engine, trace)
    started = time.perf_counter()
    while engine.unfinished:
        engine.step()
    return stepper.shapes, (time.perf_counter() - started) / len(stepper.shapes) * 1e3


def in_graphs(shapes: Sequence[Shape], buckets: Sequence[Bucket]) -> tuple[float, float]:
    """The share of steps that buckets hold, and the share of padding among the tokens of these."""
    keys = [(one, Key(one.tokens, one.requests, one.rows, Sampler.LIKELIEST)) for one in shapes]
    found = [(one, choose(buckets, key).bucket) for one, key in keys]
    held = [(one.tokens, bucket.tokens) for one, bucket in found if bucket is not None]
    padded = sum(size for _, size in held)
    return len(held) / len(shapes), 1 - sum(real for real, _ in held) / padded if padded else 0.0


def buckets_of(policy: str, graphs: int, slots: int) -> list[Bucket]:
    """The buckets of a policy for a workload of which nothing is known, as `mgraph compile` chooses them."""
    found = by_policy(policy, default_histogram(MOST_TOKENS, slots), graphs, MOST_TOKENS, slots)
    return [Bucket(b.tokens, b.requests, b.writing) for b in found.buckets]


def main() -> None:
    """Count over all traces, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write-traces", action="store_true")
    options = parser.parse_args()
    if options.write_traces:
        write()
    rows = []
    for name in SHAPES:
        shapes, host = steps_of(read(name), SLOTS, STEP_TOKENS)
        for policy in POLICIES:
            buckets = buckets_of(policy, GRAPHS, SLOTS)
            share, padding = in_graphs(shapes, buckets)
            rows.append(
                {"trace": name, "policy": policy, "graphs": len(buckets), "in_graphs": share, "padding": padding}
            )
            print(
                f"{name:13} {policy:12} {len(buckets):3} graphs  {share:7.2%} of steps in one  {padding:6.2%} padding"
            )
        rows.append({"trace": name, "steps": len(shapes), "host_ms_per_step": host})
        print(f"{name:13} {len(shapes)} steps, {host:.2f} ms of the host for each")
    about = {"date": datetime.date.today().isoformat(), "python": platform.python_version()}
    options.results.write_text(json.dumps({**about, "results": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
