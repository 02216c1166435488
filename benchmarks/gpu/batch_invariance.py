"""Whether requests get the same bits in any batch on a GPU, and what that costs (`mgraph serve --batch-invariant`).

    python3 -m benchmarks.gpu.batch_invariance check PACKAGE [--rounds 3]
    python3 -m benchmarks.gpu.batch_invariance speed PACKAGE... [--requests 1 16 128] [--results RESULTS.jsonl]

PACKAGE is a serve package for GPUs; its parameters are drawn anew. `check` serves random requests (arrivals, lengths,
shared beginnings, temperatures, log-probabilities of prompts, aborts, chunks, tight caches) and each one alone, and
compares tokens and log-probabilities bit by bit. `speed` measures output tokens a second of so many requests that
write, and tokens a second of long prompts, a row each; packages that were not compiled with --batch-invariant are
served as they are, and those that follow them are compared with them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import rows
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.package_stepper import PackageStepper
from mgraph.runtime.serving.parameters import SamplingParams

PLAIN = "not batch-invariant"


@dataclass(frozen=True)
class Asked:
    """A request: the step that it comes in, and in how many steps it is aborted."""

    arrival: int
    prompt: list[int]
    params: SamplingParams
    end: int | None = None


@dataclass
class Got:
    """What a request got: tokens, their log-probabilities, and those of its prompt."""

    tokens: list[int] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    prompt_scores: list[Any] = field(default_factory=list)
    aborted: bool = False

    def agrees(self, alone: Got) -> bool:
        """Whether it is what it got alone, up to where it was aborted."""
        pairs = [(getattr(self, name), getattr(alone, name)) for name in ("tokens", "scores", "prompt_scores")]
        return all(mine == (other[: len(mine)] if self.aborted else other) for mine, other in pairs)


def plan(source: random.Random, vocab: int, longest: int, count: int) -> list[Asked]:
    """Random requests, some of which begin alike."""
    common = [source.randrange(vocab) for _ in range(longest // 2)]
    made = []
    for at in range(count):
        own = [source.randrange(vocab) for _ in range(source.randint(1, longest // 4))]
        shared = source.choice([0, 0, 16, longest // 4, longest // 2])
        params = SamplingParams(
            temperature=source.choice([0.0, 1.0]),
            top_p=source.choice([1.0, 0.9]),
            top_k=source.choice([0, 40]),
            frequency_penalty=source.choice([0.0, 0.0, 0.5]),
            seed=at,
            max_tokens=source.randint(1, 24),
            logprobs=source.choice([0, 2]),
            prompt_logprobs=source.choice([None, None, 0]),
            ignore_eos=True,
        )
        made.append(Asked(source.randint(0, 12), common[:shared] + own, params, source.choice([None] * 5 + [4])))
    return made


def serve(engine: Engine, asked: list[Asked]) -> list[Got]:
    """Serve requests until all have ended."""
    got: dict[int, Got] = {}
    groups = [-1] * len(asked)
    last = max(one.arrival for one in asked)
    step = 0
    while step <= last or engine.unfinished:
        for at, one in enumerate(asked):
            if one.arrival == step:
                groups[at] = engine.submit(one.prompt, one.params)
                got[groups[at]] = Got()
            if one.end is not None and one.arrival + one.end == step:
                for delta in engine.abort(groups[at]):
                    got[delta.group].aborted = True
        for delta in engine.step():
            assert delta.error is None, delta.error
            found = got[delta.group]
            found.tokens += delta.tokens
            found.scores += [(score.logprob, str(score.top)) for score in delta.scores]
            found.prompt_scores += [score.logprob for score in delta.prompt_scores]
        step += 1
    return [got[group] for group in groups]


def check(path: str, rounds: int, requests: int) -> bool:
    """Print what agrees; whether all does."""
    stepper = PackageStepper(path, None, 0, "cuda", batch_invariant=_made_for_it(path))
    blocks, good = stepper.num_blocks, True
    for seed in range(rounds):
        source = random.Random(seed)
        asked = plan(source, stepper.vocab_size, min(stepper.max_length, 700), requests)
        stepper.resize(blocks)
        alone = [serve(Engine(stepper, prefix_cache=False), [Asked(0, a.prompt, a.params)])[0] for a in asked]
        tight = 1 + max(-(-(len(a.prompt) + 24) // stepper.block_size) for a in asked) * 2
        stepper.resize(source.choice([tight, blocks]))
        tokens = source.choice([64, 300, 2048])
        engine = Engine(stepper, prefix_cache=seed % 3 != 2, max_requests=source.choice([4, 32]), max_tokens=tokens)
        agree = [one.agrees(other) for one, other in zip(serve(engine, asked), alone, strict=True)]
        written = sum(len(one.tokens) for one in alone)
        print(
            f"{path}: {sum(agree)}/{len(agree)} requests the same ({written} tokens, {stepper.num_blocks} blocks, "
            f"steps of {tokens}): {dict(stepper.launches)}",
            flush=True,
        )
        good &= all(agree)
    return good


def speed(path: str, counts: list[int]) -> tuple[dict[str, float], dict[str, int]]:
    """Output tokens a second with so many requests, and tokens a second of prompts, by workload; how steps ran."""
    stepper = PackageStepper(path, None, 0, "cuda", batch_invariant=_made_for_it(path))
    found: dict[str, float] = {}
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    for count in counts:
        engine = Engine(stepper, max_requests=count, prefix_cache=False)
        for seed in range(count):
            engine.submit([(seed * 31 + i) % stepper.vocab_size for i in range(500)], params)
        while any(not r.sampled for r in engine.scheduler.running) or not engine.scheduler.running:
            engine.step()
        found[f"{count} requests that write after prompts of 500 tokens"] = round(_rate(engine, 60, 20), 1)
        engine.end_all("abort")
    engine = Engine(stepper, prefix_cache=False)
    for seed in range(12):
        engine.submit([(seed * 17 + i) % stepper.vocab_size for i in range(2048 - 100)], params)
    for _ in range(3):
        engine.step()
    torch.cuda.synchronize()
    begun, before = time.perf_counter(), sum(r.computed for r in engine.scheduler.running)
    for _ in range(6):
        engine.step()
    torch.cuda.synchronize()
    done = sum(r.computed for r in engine.scheduler.running) - before
    found["prompts of 1948 tokens"] = round(done / (time.perf_counter() - begun), 1)
    return found, dict(stepper.launches)


def _rate(engine: Engine, count: int, warm: int) -> float:
    for _ in range(warm):
        engine.step()
    torch.cuda.synchronize()
    begun, before = time.perf_counter(), engine.generated
    for _ in range(count):
        engine.step()
    torch.cuda.synchronize()
    return (engine.generated - before) / (time.perf_counter() - begun)


def _made_for_it(path: str) -> bool:
    with open(f"{path}/manifest.json", encoding="utf-8") as file:
        return bool(json.load(file).get("batch_invariant"))


def main() -> None:
    """Check or measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("check", "speed"))
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    rows.gpu()
    if options.what == "speed":
        plain: dict[str, float] = {}
        for path in options.packages:
            found, launches = speed(path, options.requests)
            variant = "batch-invariant" if _made_for_it(path) else PLAIN
            for workload, rate in found.items():
                peers = {PLAIN: plain[workload]} if plain and variant != PLAIN else None
                more: dict[str, Any] = {"variant": variant, "package": Path(path).name, "launches": launches}
                row = rows.row("batch-invariance", workload, rate, "tokens/s", peers, **more)
                print(json.dumps(row), flush=True)
                if options.results:
                    rows.append(options.results, row)
            plain = found if variant == PLAIN else plain
        return
    agreed = [check(path, options.rounds, options.requests[-1]) for path in options.packages]
    sys.exit(not all(agreed))


if __name__ == "__main__":
    main()
