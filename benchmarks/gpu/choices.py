"""A1: whether the provider that a profile chooses for plain attention is the fastest there is, over a sweep of shapes.

    python3 -m benchmarks.gpu.choices RESULTS.jsonl [--profile h100]

Each provider that takes an attention, forward and backward, first has its results compared with the others', then is
timed. `ratio` is the fastest provider's time over that of the chosen one: 1 where the choice is right.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from mgraph import models
from mgraph.cli.candidates import candidates, instances, largest_error
from mgraph.cli.candidates import inputs as random_operands  # `inputs` would be those of the models here
from mgraph.cli.tune import MOST_ERROR, opened, seconds_on_gpu
from mgraph.codegen.profile import Profile, read_profile
from mgraph.codegen.providers import TORCH, Providers
from mgraph.passes.activations import extents

HEADS = {
    "h32_g8_d128": (32, 8, 128),
    "h32_g8_d64": (32, 8, 64),
    "h16_g16_d128": (16, 16, 128),
    "h8_g4_d256": (8, 4, 256),
}
SIZES = ((16, 256), (4, 1024), (4, 4096), (1, 8192), (4, 8192))
"""Sequences, tokens of each."""
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


def measure(name: str, sizes: tuple[int, int], profile: Profile, device: torch.device) -> list[dict[str, Any]]:
    """A row for the attention of a model, and one for its gradient."""
    module, given = opened(f"{__file__}:{name}", {"B": sizes[0], "S": sizes[1]}, "bf16")
    found, _ = instances(Providers(module, profile, extents(module, given)))
    plain = [(choice, node) for choice, node in found if node.op in ("attention", "attention_grad")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for candidate in candidates(plain, Path(folder), profile.arch, device):
            runs = {k: v for k, v in candidate.runs.items() if k != TORCH or sizes[1] <= MOST_MATH}
            drawn, microseconds, errors = random_operands(candidate.node, device), {}, {}
            expected = next(iter(runs.values()))(*drawn)
            for provider, call in runs.items():
                errors[provider] = largest_error(call(*drawn), expected)
                if errors[provider] <= MOST_ERROR["bf16"]:
                    microseconds[provider] = 1e6 * seconds_on_gpu(call, [drawn])
            chosen, best = candidate.choice.chosen.provider, min(microseconds, key=microseconds.__getitem__)
            rows.append(
                {
                    "id": "A1",
                    "workload": f"{candidate.node.op} causal bf16 {name} B{sizes[0]} S{sizes[1]}",
                    "chosen": chosen,
                    "best": best,
                    "ratio": microseconds[best] / microseconds[chosen] if chosen in microseconds else 0.0,
                    "microseconds": microseconds,
                    "errors": errors,
                }
            )
            torch.cuda.empty_cache()
    return rows


def main() -> int:
    """Sweep; one line of JSON a shape and direction. Exit status 1 where a choice is not the fastest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--profile", default="h100")
    options = parser.parse_args()
    device, profile = torch.device("cuda", torch.cuda.current_device()), read_profile(options.profile)
    card = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    wrong = 0
    for name in HEADS:
        for sizes in SIZES:
            rows = measure(name, sizes, profile, device)
            with options.results.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({**row, **card}) + "\n" for row in rows)
            for row in rows:
                wrong += row["ratio"] < SLACK
                times = " ".join(f"{k} {v:.0f}" for k, v in sorted(row["microseconds"].items(), key=lambda p: p[1]))
                print(f"{row['workload']:55} {row['chosen']:9} {row['ratio']:.3f}  us: {times}", flush=True)
    print(f"{wrong} choices are not the fastest", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
