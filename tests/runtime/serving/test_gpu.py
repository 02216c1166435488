"""A serve package on a GPU: its CUDA graphs give what its steps give launched op by op, and what the CPU gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mgraph.compiler import compile_package
from mgraph.recipe import Recipe
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.llm import LLM
from mgraph.runtime.serving.package_stepper import PackageStepper
from mgraph.runtime.serving.parameters import SamplingParams

MODELS = ("dense-tiny", "moe-tiny", "gpt-oss-tiny")
LENGTHS = (1, 2, 7, 16, 17, 40, 3, 5)
MARGIN = 1e-3
"""Between the two likeliest tokens; where it is less, rounding may choose."""

Scores = list[list[tuple[int, float, float]]]
"""Of each prompt's tokens: the token, its log-probability, and by how much the likeliest leads."""


def generate(package: Path, device: str, *, graphs: bool) -> tuple[Scores, PackageStepper]:
    """Greedy tokens of prompts that are served together, in few tokens a step: long prompts come in chunks."""
    stepper = PackageStepper(package, None, 40, device, seed=3, max_tokens=24, max_requests=4, cuda_graphs=graphs)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 250, (length,), generator=generator).tolist() for length in LENGTHS]
    wanted = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
    scores: Scores = []
    for output in LLM.over(Engine(stepper, None)).generate(prompts, wanted):
        (choice,) = output.outputs
        assert len(choice.token_ids) == 12 and choice.logprobs is not None
        scores.append([(score.token, score.logprob, score.top[0][2] - score.top[1][2]) for score in choice.logprobs])
    return scores, stepper


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_graphs_and_steps(model: str, precision: str, tmp_path: Path) -> None:
    recipe = Recipe(model=model, purpose="serve", precision=precision, max_length=64, output=str(tmp_path / "pkg"))
    package = compile_package(recipe).package
    assert package is not None
    replayed, stepper = generate(package, "cuda", graphs=True)
    assert stepper.graphs is not None
    launched, _ = generate(package, "cuda", graphs=False)
    assert replayed == launched, "bit for bit"
    on_cpu, _ = generate(package, "cpu", graphs=False)
    bound = {"fp32": 1e-4, "bf16": 0.05}[precision]
    for mine, theirs in zip(launched, on_cpu, strict=True):
        for (token, score, _), (other, wanted, lead) in zip(mine, theirs, strict=True):
            if token != other:
                assert lead < max(MARGIN, bound), f"{token} in place of {other}, which leads by {lead}"
                break
            assert abs(score - wanted) <= bound
