"""In batch-invariant mode a request of a real package gets the bits that it gets alone, whatever else is served."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.errors import OptionError, PackageError
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.package_stepper import PackageStepper
from mgraph.runtime.serving.parameters import SamplingParams
from tests.end_to_end.builds import build
from tests.sampling import sampled

LENGTH = 96
PACKAGES = [("dense-tiny", "fp32"), ("moe-tiny", "bf16"), ("moe-tiny", "fp32"), ("dense-tiny-geglu", "bf16")]
CASES = [(name, dtype, seed) for name, dtype in PACKAGES for seed in range(4)]
Bits = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A stepper of a package, in the mode or not; packages are compiled once."""
    made: dict[tuple[str, str], Path] = {}

    def open_(name: str, dtype: str, invariant: bool) -> PackageStepper:
        if (name, dtype) not in made:
            directory = tmp_path_factory.mktemp(name)
            made[name, dtype] = build(name, directory, purpose="serve", max_length=LENGTH, precision=dtype).path
        return PackageStepper(made[name, dtype], num_blocks=40, batch_invariant=invariant)

    return open_


def served(engine: Engine, plan: list[tuple[int, list[int], SamplingParams, int | None]]) -> list[tuple[Bits, bool]]:
    """Tokens, their log-probabilities and those of the prompt for each of (step of arrival, prompt, parameters, steps
    until it is aborted), and whether it was aborted."""
    found: dict[int, tuple[list[int], list[float], list[float]]] = {}
    groups: list[int] = [-1] * len(plan)
    aborted = set()
    for step in range(3000):
        for at, (arrival, prompt, params, end) in enumerate(plan):
            if arrival == step:
                groups[at] = engine.submit(prompt, params)
                found[groups[at]] = ([], [], [])
            deltas = engine.abort(groups[at]) if end is not None and arrival + end == step else []
            aborted |= {delta.group for delta in deltas}
        for delta in engine.step():
            assert delta.error is None
            tokens, scores, prompt_scores = found[delta.group]
            tokens += delta.tokens
            scores += [score.logprob for score in delta.scores]
            prompt_scores += [score.logprob for score in delta.prompt_scores]
        engine.scheduler.check()
        if not engine.unfinished and step > max(arrival for arrival, *_ in plan):
            break
    return [((tuple(a), tuple(b), tuple(c)), group in aborted) for group in groups for a, b, c in [found[group]]]


def arrivals(source: random.Random) -> list[tuple[int, list[int], SamplingParams, int | None]]:
    common = [source.randrange(200) for _ in range(40)]
    plan = []
    for at in range(4):
        own = [source.randrange(200) for _ in range(source.randint(1, 20))]
        prompt = common[: source.choice([0, 0, 16, 33, 40])] + own
        params = SamplingParams(
            temperature=source.choice([0.0, 1.0]),
            top_p=source.choice([1.0, 0.9]),
            seed=at,
            max_tokens=source.randint(1, 7),
            logprobs=source.choice([0, 2]),
            prompt_logprobs=source.choice([None, 0]),
            ignore_eos=True,
        )
        plan.append((source.randint(0, 4), prompt, params, source.choice([None, None, None, 3])))
    return plan


@pytest.mark.parametrize(("name", "dtype", "seed"), sampled(CASES, 0, always=[("moe-tiny", "fp32", 1)]))
def test_each_request_gets_the_bits_that_it_gets_alone(opened: Any, name: str, dtype: str, seed: int) -> None:
    """Random arrivals, lengths and aborts, in large caches and in such that stop requests and compute them anew."""
    source = random.Random(f"{name} {dtype} {seed}")
    stepper = opened(name, dtype, True)
    plan = arrivals(source)
    alone = [
        served(Engine(stepper, prefix_cache=False), [(0, prompt, params, None)])[0][0] for _, prompt, params, _ in plan
    ]
    stepper.resize(source.choice([7, 8, 40]))
    engine = Engine(stepper, prefix_cache=source.random() < 0.7, max_requests=3, max_tokens=source.choice([11, 40]))
    for (bits, aborted), expected in zip(served(engine, plan), alone, strict=True):
        for one, other in zip(bits, expected, strict=True):
            assert one == (other[: len(one)] if aborted else other)


def test_without_the_mode_some_request_gets_other_bits(opened: Any) -> None:
    """Else the test above would prove nothing."""
    stepper = opened("moe-tiny", "fp32", False)
    plan = arrivals(random.Random(0))
    alone = [
        served(Engine(stepper, prefix_cache=False), [(0, prompt, params, None)])[0][0] for _, prompt, params, _ in plan
    ]
    assert [bits for bits, _ in served(Engine(stepper, max_tokens=11, max_requests=5), plan)] != alone


def test_ops_that_may_depend_on_the_batch_are_refused_with_their_lines(opened: Any, tmp_path: Path) -> None:
    """Of all entries at once; the lines are those of step.py, and of the model."""
    path = tmp_path / "package"
    shutil.copytree(opened("moe-tiny", "fp32", False).package.path, path)
    text = (path / "step.py").read_text()
    for place in ("    logits = ", "    token, logprob = "):
        text = text.replace(place, f"    torch.linalg.qr(torch.ones(2, 2))\n{place}", 1)
    (path / "step.py").write_text(text)
    with pytest.raises(PackageError) as refused:
        PackageStepper(path, num_blocks=40, batch_invariant=True)
    number = text[: text.index("torch.linalg.qr")].count("\n") + 1
    assert str(refused.value).count("aten.linalg_qr.default: what it gives for a row may depend") == 2
    assert f"step.py:{number}, head models/decoder.py:" in str(refused.value)
    assert "; likeliest: aten" in str(refused.value)


def test_where_it_cannot_be_kept_it_is_refused(opened: Any) -> None:
    stepper = opened("moe-tiny", "fp32", False)
    stepper._batch_invariant, stepper.device = True, torch.device("cuda")
    with pytest.raises(OptionError, match="kernels for a GPU divide work"):
        stepper._prove_invariant()
