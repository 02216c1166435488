"""Packages of `transformers` classes serve what the classes compute: greedy tokens, and log-probabilities.

Requests come and go: prompts whole and in chunks of one token and more, mixed with single tokens of others, blocks in
any order, and everything that nothing may read filled with NaN.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mgraph.compiler import compile_package
from mgraph.recipe import Recipe
from mgraph.runtime.serving.package_stepper import PackageStepper
from mgraph.runtime.serving.step import Batch, Sampling
from tests.families.configs import eager, write_config
from tests.sampling import sampled

LENGTH = 40
CASES = [(family, size) for family in ("llama", "qwen3", "qwen3-moe", "gpt-oss") for size in (1, 16)]
MORE = [(family, 4) for family in ("llama3", "mixtral", "gemma3", "gpt2")]


@dataclass
class Served:
    """One request: the tokens that are known, how many of them are in the cache, and its blocks in each group."""

    tokens: list[int]
    blocks: list[list[int]]
    done: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)


def greedy_sampling(targets: list[int]) -> Sampling:
    rows = len(targets)
    zero, one = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    none = np.zeros(rows, np.int64)
    wanted = np.array(targets, np.int64)
    return Sampling(zero, none.astype(np.int32), one, zero, none, none, wanted, one, zero, zero, None, None, None, 3)


def batch_of(work: list[tuple[Served, int]], stepper: PackageStepper, rows: list[int]) -> Batch:
    size, width = stepper.block_size, -(-stepper.max_length // stepper.block_size)
    places = [np.arange(r.done, r.done + new) for r, new in work]
    groups = range(len(stepper.windows))
    tables = [[np.array((r.blocks[g] + [0] * width)[:width], np.int32) for r, _ in work] for g in groups]
    slots = [
        [t[p // size].astype(np.int64) * size + p % size for t, p in zip(of, places, strict=True)] for of in tables
    ]
    return Batch(
        tokens=np.concatenate([np.array(r.tokens[r.done : r.done + new], np.int64) for r, new in work]),
        positions=np.concatenate(places),
        slots=tuple(map(np.concatenate, slots)),
        starts=np.cumsum([0, *(new for _, new in work)]).astype(np.int32),
        lengths=np.array([r.done + new for r, new in work], np.int32),
        blocks=tuple(map(np.stack, tables)),
        rows=np.array(rows, np.int64),
        requests=tuple(range(len(work))),
    )


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made: dict[tuple[str, int], tuple[PackageStepper, torch.nn.Module]] = {}

    def open_(family: str, block_size: int) -> tuple[PackageStepper, torch.nn.Module]:
        if (family, block_size) not in made:
            directory: Path = tmp_path_factory.mktemp("family")
            model = eager(family, seed=3).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.dim() > 1 and "norm" not in name:
                        parameter.mul_(4)
            recipe = Recipe(
                model=write_config(family, directory / "model"),
                purpose="serve",
                output=str(directory / "package"),
                arch="none",
                max_length=LENGTH,
                block_size=block_size,
            )
            package = compile_package(recipe).package
            assert package is not None
            tied = getattr(model.config, "tie_word_embeddings", False)
            tensors = {n: t.contiguous() for n, t in model.state_dict().items() if not (tied and "lm_head" in n)}
            save_file(tensors, directory / "model.safetensors")
            stepper = PackageStepper(package, directory / "model.safetensors", 24 * LENGTH + 1)
            made[family, block_size] = stepper, model
        return made[family, block_size]

    yield open_


@pytest.mark.parametrize(("family", "block_size"), sampled([*CASES, *MORE], 0, always=[("gpt-oss", 16)]))
def test_log_probabilities_and_greedy_tokens(opened: Any, family: str, block_size: int) -> None:
    stepper, model = opened(family, block_size)
    for name, tensor in stepper.state.items():
        if name.startswith("cache."):
            tensor.fill_(float("nan"))
    source = random.Random(f"{family} {block_size}")
    free = list(range(1, stepper.num_blocks))
    source.shuffle(free)
    requests = []
    for length in (21, 1, 9, 30):
        blocks = [[free.pop() for _ in range(-(-LENGTH // stepper.block_size))] for _ in stepper.windows]
        requests.append(Served([source.randrange(256) for _ in range(length)], blocks))
    written = {id(r): 0 for r in requests}
    while waiting := [r for r in requests if written[id(r)] < 6]:
        work = []
        for request in source.sample(waiting, source.randint(1, len(waiting))):
            left = len(request.tokens) - request.done
            work.append((request, source.choice([1, left, source.randint(1, left)])))
        ends = np.cumsum([new for _, new in work]).tolist()
        finished = [i for i, (r, new) in enumerate(work) if r.done + new == len(r.tokens)]
        sampling = greedy_sampling([-1] * len(finished))
        sampled_now = stepper.run(batch_of(work, stepper, [ends[i] - 1 for i in finished]), sampling).get()
        for request, new in work:
            request.done += new
        for row, index in enumerate(finished):
            request = work[index][0]
            request.tokens.append(int(sampled_now.tokens[row]))
            request.logits[len(request.tokens) - 1] = torch.from_numpy(sampled_now.top_logprobs[row])
            written[id(request)] += 1
    worst = 0.0
    for request in requests:
        with torch.no_grad():
            exact = model(torch.tensor([request.tokens])).logits[0].log_softmax(-1)
        for place, top in request.logits.items():
            best = exact[place - 1].topk(3)
            worst = max(worst, float((best.values - top).abs().max()))
            if float(best.values[0] - best.values[1]) > 1e-3:
                assert request.tokens[place] == int(best.indices[0])
    assert worst < 1e-4, worst


def test_log_probabilities_of_a_whole_prompt(opened: Any) -> None:
    stepper, model = opened("gpt-oss", 16)
    tokens = torch.randint(256, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    request = Served(tokens, [[5, 2, 9], [1, 7, 3]])
    found = []
    for new in (5, 1, 6):
        batch = batch_of([(request, new)], stepper, list(range(new)))
        targets = [*tokens[1:], 7][request.done : request.done + new]
        got = stepper.run(batch, greedy_sampling(targets)).get()
        assert got.tokens.tolist() == targets
        found += got.logprobs.tolist()
        request.done += new
    with torch.no_grad():
        exact = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    wanted = exact.gather(1, torch.tensor([*tokens[1:], 7])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=1e-4)
