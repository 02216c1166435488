"""Compile time against depth: a Llama-3-8B-shaped model of 2, 8, 32 and 64 layers, in bf16, to a train package.

    python3 -m benchmarks.compile_time [--layers 2,8,32,64] [--repeats 5] [--results FILE]

Capture is apart: torch.export sees every layer. Everything after it (passes, checks, kernels, graphs, step) should cost
the same for every depth. The depths take turns, `repeats` rounds of them; the table has the median of the seconds after
capture, and its ratio to that of the first depth within a round, which other load on the machine disturbs least. Exit
status 1 where the deepest costs more than 1.1 times the shallowest, or 32 layers more than 40 s or 2 GB.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from benchmarks.compiling import Compiled, compile_model

RESULTS = Path(__file__).parent / "results" / "compile_time.json"
MOST_RATIO = 1.1
PUBLISHED_LAYERS, MOST_SECONDS, MOST_BYTES = 32, 40.0, 2e9
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
Rounds = Mapping[int, Sequence[Compiled]]
"""The compilations of each depth, one a round."""


def measure(layers: int) -> Compiled:
    """Compile one depth."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.json"
        config.write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
        return compile_model(f"hf:{config}")


def after_capture(run: Compiled) -> float:
    """Seconds of all stages but the capture."""
    return sum(seconds for stage, seconds in run.stages.items() if stage != "capture")


def ratio(rounds: Rounds, layers: int) -> float:
    """Median over the rounds of what a depth costs after capture, relative to the first depth."""
    first = next(iter(rounds.values()))
    return statistics.median(
        after_capture(run) / after_capture(base) for run, base in zip(rounds[layers], first, strict=True)
    )


def table(rounds: Rounds) -> str:
    """Markdown: one line per depth, then the stages and passes, slowest at the deepest first."""
    lines = ["| layers | whole | capture | after capture | ratio | step.py lines | peak GB |", "|--:" * 7 + "|"]
    for layers, runs in rounds.items():
        whole, capture, after = (
            statistics.median(of(run) for run in runs)
            for of in (lambda run: run.seconds, lambda run: run.stages["capture"], after_capture)
        )
        peak = max(run.peak_bytes for run in runs) / 1e9
        lines.append(
            f"| {layers} | {whole:.1f} | {capture:.1f} | {after:.2f} | {ratio(rounds, layers):.2f} "
            f"| {runs[0].step_lines} | {peak:.2f} |"
        )
    spent = {
        layers: {
            name: statistics.median({**run.stages, **run.passes}[name] for run in runs)
            for name in (*runs[0].stages, *runs[0].passes)
        }
        for layers, runs in rounds.items()
    }
    deepest = spent[max(spent)]
    lines += ["", "| seconds | " + " | ".join(f"{layers} layers" for layers in rounds) + " |"]
    lines.append("|---|" + "--:|" * len(rounds))
    for name in sorted(deepest, key=lambda name: -deepest[name]):
        lines.append(f"| {name} | " + " | ".join(f"{spent[layers][name]:.3f}" for layers in rounds) + " |")
    return "\n".join(lines)


def failures(rounds: Rounds) -> list[str]:
    """Which of the limits were not kept."""
    found = []
    deepest = max(rounds)
    if ratio(rounds, deepest) > MOST_RATIO:
        found.append(f"{deepest} layers cost {ratio(rounds, deepest):.2f} times the least depth, above {MOST_RATIO}")
    for run in rounds.get(PUBLISHED_LAYERS, ()):
        if run.seconds > MOST_SECONDS or run.peak_bytes > MOST_BYTES:
            found.append(f"{PUBLISHED_LAYERS} layers took {run.seconds:.1f} s and {run.peak_bytes / 1e9:.2f} GB")
    return found


def main() -> int:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="2,8,32,64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rounds: dict[int, list[Compiled]] = {int(layers): [] for layers in options.layers.split(",")}
    loads = []
    for number in range(options.repeats):
        for layers, runs in rounds.items():
            runs.append(measure(layers))
            loads.append(os.getloadavg()[0])
            said = f"round {number + 1}, {layers} layers: {runs[-1].seconds:.1f} s, {after_capture(runs[-1]):.2f} after"
            print(f"{said} capture", file=sys.stderr)
    print(table(rounds))
    data = {
        "date": datetime.date.today().isoformat(),
        "load_averages": loads,  # about 1 where nothing else runs
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("mgraph", "torch", "transformers", "triton")},
        "ratios": {layers: ratio(rounds, layers) for layers in rounds},
        "runs": {layers: [asdict(run) for run in runs] for layers, runs in rounds.items()},
    }
    options.results.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(*failures(rounds), sep="\n", file=sys.stderr)
    return bool(failures(rounds))


if __name__ == "__main__":
    sys.exit(main())
