"""A1: whether the provider that a profile chooses for plain attention is the fastest there is, over a sweep of shapes.

    python3 -m benchmarks.gpu.choices RESULTS.jsonl [--profile h200] [--heads h32_g8_d128,...] [--into PROFILE.json]

Each provider that takes an attention, forward and backward, first has its results compared with the others', then is
timed. `variant` is the one that was chosen, and the others are its peers: `ratio` is above 1 where the choice is right.
With `--into` the times of `SIZES` become rows of a profile, and those of `BETWEEN`, which it has no rows for, show
whether it chooses rightly from the rows beside them.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import rows
from mgraph import models
from mgraph.cli.candidates import candidates, instances, largest_error
from mgraph.cli.candidates import inputs as random_operands  # `inputs` would be those of the models here
from mgraph.cli.tune import MOST_ERROR, opened, seconds_on_gpu
from mgraph.codegen.profile import Profile, Row, read_profile
from mgraph.codegen.providers import TORCH, Providers
from mgraph.ir.graph import Module
from mgraph.passes.activations import extents

HEADS = {
    "h32_g8_d128": (32, 8, 128),
    "h32_g8_d64": (32, 8, 64),
    "h16_g16_d128": (16, 16, 128),
    "h8_g4_d256": (8, 4, 256),
}
SIZES = ((16, 256), (4, 1024), (2, 2048), (4, 4096), (1, 8192), (4, 8192))
"""Sequences, tokens of each."""
BETWEEN = ((8, 512), (3, 1500), (3, 3000), (2, 16384))
"""Others, for which a profile has no rows."""
FAR = 4.0
"""A provider whose one call takes as many times as long as the fastest is not timed further."""
SLACK = 0.97
"""Two times of one thing are as far apart."""
MOST_MATH = 256
"""Tokens of a sequence up to which attention by products of matrices, which keeps all scores, is run."""


def one_layer(heads: int, groups: int, width: int) -> models.Decoder:
    """A decoder whose attention has these heads; causal."""
    return models.get("dense", "tiny", num_layers=1, num_heads=heads, num_kv_heads=groups, head_width=width)


def h32_g8_d128() -> models.Decoder:
    """As `mgraph compile` takes it, like those below."""
    return one_layer(*HEADS["h32_g8_d128"])


def h32_g8_d64() -> models.Decoder:
    """Narrow heads."""
    return one_layer(*HEADS["h32_g8_d64"])


def h16_g16_d128() -> models.Decoder:
    """Keys and values of each head its own."""
    return one_layer(*HEADS["h16_g16_d128"])


def h8_g4_d256() -> models.Decoder:
    """Wide heads."""
    return one_layer(*HEADS["h8_g4_d256"])


def once(call: Callable[..., Any], drawn: Sequence[Tensor]) -> float:
    """Microseconds of one call."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    call(*drawn)
    ended.record()
    ended.synchronize()
    return float(1e3 * begun.elapsed_time(ended))


@functools.cache
def graph(name: str) -> Module:
    """The final graph of a model above, for any sequences."""
    return opened(f"{__file__}:{name}", {"B": 1, "S": 256}, "bf16")[0]


def measure(
    name: str, sizes: tuple[int, int], profile: Profile, device: torch.device
) -> tuple[list[dict[str, Any]], list[Row]]:
    """A row of results for the attention of a model, and one for its gradient; and rows of a profile."""
    module = graph(name)
    found, _ = instances(Providers(module, profile, extents(module, {"B": sizes[0], "S": sizes[1]})))
    plain = [(choice, node) for choice, node in found if node.op in ("attention", "attention_grad")]
    results: list[dict[str, Any]] = []
    timed: list[Row] = []
    source = f"benchmarks/gpu/choices.py B={sizes[0]}, S={sizes[1]}"
    with tempfile.TemporaryDirectory() as folder:
        for candidate in candidates(plain, Path(folder), profile.arch, device):
            runs = {k: v for k, v in candidate.runs.items() if k != TORCH or sizes[1] <= MOST_MATH}
            drawn = random_operands(candidate.node, device)
            expected = next(iter(runs.values()))(*drawn)
            errors = {provider: largest_error(call(*drawn), expected) for provider, call in runs.items()}
            roughly = {k: once(call, drawn) for k, call in runs.items() if errors[k] <= MOST_ERROR["bf16"]}
            del expected
            microseconds = {
                provider: 1e6 * seconds_on_gpu(runs[provider], [drawn]) if time < FAR * min(roughly.values()) else time
                for provider, time in roughly.items()
            }
            chosen = candidate.choice.chosen.provider
            for provider, time in microseconds.items():
                row = Row(**vars(candidate.instance), provider=provider, microseconds=round(time, 3), source=source)
                timed.append(replace(row, card=profile.card, date=datetime.date.today().isoformat()))
            workload = f"{candidate.node.op} causal bf16 {name} B{sizes[0]} S{sizes[1]}"
            others = {k: v for k, v in microseconds.items() if k != chosen}
            # One that is wrong, or too much for this machine, is never the right choice.
            ours = microseconds.get(chosen, float("inf"))
            results.append(rows.row("A1", workload, ours, "microseconds", others, variant=chosen, errors=errors))
            torch.cuda.empty_cache()
    return results, timed


def main() -> int:
    """Sweep; one line of JSON a shape and direction. Exit status 1 where a choice is not the fastest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--profile", default="h200", help="whose choices are looked at")
    parser.add_argument("--heads", default=",".join(HEADS), help="which of the attentions")
    parser.add_argument("--into", type=Path, help="write the profile with the times as rows")
    options = parser.parse_args()
    device, profile = rows.gpu(), read_profile(options.profile)
    wrong = 0
    for sizes, name in itertools.product((*SIZES, *BETWEEN), options.heads.split(",")):
        results, measured = measure(name, sizes, profile, device)
        if options.into and sizes in SIZES:
            profile = profile.with_rows(measured)
            options.into.write_text(profile.text(), encoding="utf-8")
        for row in results:
            ratio = row.get("ratio", 1.0)
            ran = math.isfinite(row["ours"])
            wrong += not ran or ratio < SLACK
            if ran:
                rows.append(options.results, row)
            times = " ".join(f"{k} {v:.0f}" for k, v in sorted(row.get("peers", {}).items(), key=lambda p: p[1]))
            print(f"{row['workload']:55} {row['variant']} {row['ours']:.0f} {ratio:.3f}  us: {times}", flush=True)
    print(f"{wrong} choices are not the fastest", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
