"""Compile time against depth: a Llama-3-8B-shaped model of 2, 8, 32 and 64 layers, in bf16, to a train package.

    python3 -m benchmarks.compile_time [--layers 2,8,32,64] [--repeats 3] [--results FILE]

Each depth runs in a process of its own. Capture is apart: torch.export sees every layer. Everything after it (passes,
verification and a snapshot after each, emission, writing) should cost the same for every depth. It runs `repeats` times
on the captured module: the first time with what a process does once (imports, traced gradients), the best time
without. Times are CPU seconds of the process, which other load on the machine disturbs least; memory is the peak
resident size. Kernels are not built (no `--arch`): their number does not depend on depth.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "compile_time.json"
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


@dataclass
class Row:
    """One depth. Seconds of CPU: `first` and `best` are everything after capture, of which `passes` lists the best run
    by stage and pass; `peak_gib` is the process's largest resident size."""

    layers: int
    capture: float
    first: float
    best: float
    step_lines: int
    peak_gib: float
    passes: dict[str, float] = field(default_factory=dict)


def measure(layers: int, repeats: int) -> Row:
    """Compile one depth in this process."""
    from mgraph.capture import ModelSpec, capture_with_report
    from mgraph.compiler import pipeline_text
    from mgraph.ir.types import DType
    from mgraph.recipe import Recipe

    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.json"
        config.write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
        recipe = Recipe(model=f"hf:{config}", precision="bf16")
        begun = time.process_time()
        module, _, _ = capture_with_report(ModelSpec(recipe.model, dtype=DType.BF16))
        capture = time.process_time() - begun
        runs = [_after_capture(module, recipe, pipeline_text(recipe), Path(directory) / "package")]
        lines = len((Path(directory) / "package" / "step.py").read_text().splitlines())
        for _ in range(1, repeats):
            runs.append(_after_capture(module, recipe, pipeline_text(recipe), Path(directory) / "package"))
    totals = [sum(run.values()) for run in runs]
    best = min(range(len(runs)), key=totals.__getitem__)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Row(layers, capture, totals[0], totals[best], lines, peak, runs[best])


def _after_capture(module: Any, recipe: Any, pipeline: str, directory: Path) -> dict[str, float]:
    """CPU seconds of each pass, of the instruments around them, and of emission and writing."""
    from mgraph.codegen.package import PackageInfo, emit_package
    from mgraph.compiler import collector_spared
    from mgraph.passes.instrument import Instrument, OpCounts, Snapshots, VerifyEach
    from mgraph.passes.pipeline import run_pipeline

    seconds: dict[str, float] = {}

    class Clock(Instrument):
        """The pass alone: listed last, it begins last and ends first."""

        def before(self, result: Any, module: Any) -> None:
            """Start."""
            self.begun = time.process_time()

        def after(self, result: Any, before: Any, after: Any) -> None:
            """Add to the pass of this name."""
            seconds[result.name] = seconds.get(result.name, 0.0) + time.process_time() - self.begun

    snapshots = Snapshots()
    info = PackageInfo(recipe.purpose, recipe, pipeline, (), snapshots.write)
    with collector_spared():
        begun = time.process_time()
        module, _ = run_pipeline(module, pipeline, (VerifyEach(), OpCounts(), snapshots, Clock()))
        passed = time.process_time()
        seconds["verify, print"] = passed - begun - sum(seconds.values())
        emit_package(module, info, directory)
        seconds["emit, write"] = time.process_time() - passed
    return seconds


def table(rows: Sequence[Row]) -> str:
    """Markdown: one line per depth, then the stages of the best run, slowest at the deepest first."""
    lines = ["| layers | capture | after: first | ratio | after: best | ratio | step.py lines | peak GiB |"]
    lines.append("|--:|--:|--:|--:|--:|--:|--:|--:|")
    base = rows[0]
    for row in rows:
        lines.append(
            f"| {row.layers} | {row.capture:.2f} | {row.first:.2f} | {row.first / base.first:.2f} | {row.best:.2f} "
            f"| {row.best / base.best:.2f} | {row.step_lines} | {row.peak_gib:.2f} |"
        )
    names = sorted(rows[-1].passes, key=lambda name: -rows[-1].passes[name])
    lines += ["", "| seconds, best run | " + " | ".join(f"{row.layers} layers" for row in rows) + " |"]
    lines.append("|---|" + "--:|" * len(rows))
    lines += [f"| {n} | " + " | ".join(f"{row.passes[n]:.3f}" for row in rows) + " |" for n in names]
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="2,8,32,64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(asdict(measure(options.child, options.repeats))))
        return
    rows = []
    for layers in map(int, options.layers.split(",")):
        command = [sys.executable, "-m", "benchmarks.compile_time", "--child", str(layers)]
        done = subprocess.run([*command, "--repeats", str(options.repeats)], check=True, stdout=subprocess.PIPE)
        rows.append(Row(**json.loads(done.stdout.splitlines()[-1])))
        print(f"{layers} layers: {rows[-1].capture + rows[-1].first:.1f} s", file=sys.stderr)
    print(table(rows))
    _write(rows, options.results)


def _write(rows: Sequence[Row], path: Path) -> None:
    import torch
    import transformers

    import mgraph

    data = {
        "date": datetime.date.today().isoformat(),
        "load_average": os.getloadavg()[0],  # other work on the machine makes CPU seconds longer, too
        "versions": {
            "mgraph": mgraph.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
