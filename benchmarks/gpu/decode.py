"""Milliseconds per token of one request through `LLM.generate` (E3).

    python3 -m benchmarks.gpu.decode PACKAGE RESULTS.jsonl

PACKAGE is a serve package for GPUs; its parameters are drawn anew. The prompt has 512 tokens. The time of a token is
the difference between long and short continuations over their difference in length, so that the prompt's own time is
not in it. That graphs give what steps give is what tests/runtime/serving/test_gpu.py shows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path

import torch

from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.llm import LLM
from mgraph.runtime.serving.package_stepper import PackageStepper
from mgraph.runtime.serving.parameters import SamplingParams

CONTEXT, SHORT, LONG = 512, 33, 289


def main() -> None:
    """Measure, print, and add a row to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    begun = time.perf_counter()
    stepper = PackageStepper(options.package, None, 300, "cuda", seed=0, max_tokens=1024, max_requests=8)
    llm = LLM.over(Engine(stepper, None))
    ready = time.perf_counter() - begun
    prompt = torch.randint(1, stepper.vocab_size - 1, (CONTEXT,)).tolist()

    def seconds(count: int) -> float:
        start = time.perf_counter()
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        return time.perf_counter() - start

    seconds(SHORT)
    short, long = seconds(SHORT), seconds(LONG)
    row = {
        "id": "E3",
        "package": options.package.name,
        "context": CONTEXT,
        "ms_per_token": (long - short) / (LONG - SHORT) * 1e3,
        "ready_seconds": ready,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    print(json.dumps(row), flush=True)
    with options.results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
