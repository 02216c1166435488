"""The embedding's gradient: kernels in Triton's interpreter and twins against float64, repeatability, and refusals."""

from __future__ import annotations

import json
import runpy
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgraph.codegen.kernel_sites import kernel_sites
from mgraph.codegen.step import step_text
from mgraph.codegen.triton import build_kernels, embedding_grad, kernels_text, reference_text
from mgraph.codegen.triton.embedding_grad import EmbeddingGrad, Tuning
from mgraph.ir.graph import Node, Value
from mgraph.runtime import v1 as rt
from tests.codegen.mlp import copied, module, state
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.passes.raising import module_of

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
PROBLEMS = {
    "even": (EmbeddingGrad(32, "f32"), Tuning(4, 16, 8, 1)),
    "ragged": (EmbeddingGrad(37, "f32"), Tuning(2, 32, 4, 1)),
    "one": (EmbeddingGrad(1, "f32"), None),
    "half": (EmbeddingGrad(24, "f16"), Tuning(2, 32, 2, 1)),
    "brain": (EmbeddingGrad(129, "bf16"), None),
    "low total": (EmbeddingGrad(24, "f16", "f16"), Tuning(2, 32, 2, 1)),
}


def draw(problem: EmbeddingGrad, tokens: Tensor, **part: int) -> tuple[Tensor, ...]:
    """The arguments of a site: a total that is not zero, a gradient, and sorted tokens."""
    generator = torch.Generator().manual_seed(problem.width)
    total = torch.randn(11, problem.width, generator=generator).to(DTYPES[problem.total])
    grad = torch.randn(*tokens.shape, problem.width, generator=generator).to(DTYPES[problem.grad])
    return total, grad, *rt.by_token(tokens, **part)


def exact(inputs: tuple[Tensor, ...]) -> Tensor:
    """One row after the other, in float64."""
    total, grad, ids, order = inputs
    sums, rows = total.double(), grad.double().reshape(-1, grad.shape[-1])
    for row, place in zip(ids.tolist(), order.tolist(), strict=True):
        if row < len(sums):
            sums[row] += rows[place]
    return sums


def batches() -> list[Tensor]:
    """Tokens with short runs, long ones, all alike, one, and all different."""
    generator = torch.Generator().manual_seed(0)
    short, long = (torch.randint(0, n, (3, 7), generator=generator) for n in (11, 2))
    return [short, long, torch.full((3, 6), 4), torch.tensor([[10]]), torch.randperm(11, generator=generator)]


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """Runs longer and shorter than a tile, and a part of a vocabulary with a token for padding."""
    specs = [embedding_grad.build(name.replace(" ", "_"), problem, cut) for name, (problem, cut) in PROBLEMS.items()]
    cases: list[Case] = [
        (name.replace(" ", "_"), draw(p, tokens)) for name, (p, _) in PROBLEMS.items() for tokens in batches()
    ]
    part = torch.tensor([3, 25, 12, 21, 12, 11, 0, 40, 13, 12])
    cases.append(("even", draw(PROBLEMS["even"][0], part, index=1, rows=11, padding_idx=13)))
    for (name, inputs), ((made,), after) in zip(cases, interpret(specs, cases, tmp_path), strict=True):
        allowed = {"f32": 1e-6, "f16": 4e-3}[
            PROBLEMS[name.replace("_", " ")][0].total
        ]  # a total in f16 is rounded up to twice
        torch.testing.assert_close(made.double(), exact(inputs), rtol=allowed, atol=2 * allowed, msg=name)
        assert torch.equal(made, after[0])


@pytest.mark.parametrize("name", PROBLEMS)
def test_twin(name: str) -> None:
    problem = PROBLEMS[name][0]
    twins = types.ModuleType("twins")
    exec(reference_text([embedding_grad.build("add", problem)]), twins.__dict__)
    for tokens in batches():
        inputs = draw(problem, tokens)
        want = exact(inputs)
        assert twins.add(*inputs) is inputs[0]
        if problem.total != "f32":
            continue  # torch rounds after every row
        torch.testing.assert_close(inputs[0].double(), want, rtol=1e-6, atol=2e-6)


NODE = """
func @f(%total: f32[11, 6], %dy: bf16[B, S, 6], %tokens: i64[B, S]) {
  %d: bf16[11, 6] = aten.embedding_dense_backward.default(%dy, %tokens) {num_weights = 11, padding_idx = -1}
  %sum: f32[11, 6] = accumulate_(%total, %d)
  return %sum
}
"""


def sum_of(*changes: tuple[str, str]) -> tuple[Node, Value]:
    """The node of a gradient of such types, and the total that it is added to."""
    text = NODE
    for old, new in changes:
        text = text.replace(old, new)
    part, accumulate = module_of(text).functions["f"].nodes
    return part, accumulate.operands[0]


def test_problem_of_a_sum() -> None:
    assert embedding_grad.problem_of(*sum_of()) == EmbeddingGrad(6, "bf16")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("bf16", "f64"), "the gradient is f64"),
        (("f32[11", "f64[11"), "the total is f64"),
        (("6]", "S]"), "the width S of a row is not a known number"),
    ],
)
def test_refusals_name_the_reason(change: tuple[str, str], reason: str) -> None:
    assert reason in str(embedding_grad.problem_of(*sum_of(change)))


def test_a_step_adds_by_token(tmp_path: Path) -> None:
    """The entry with the site, run by its twin, adds what the one without does, and the same each time."""
    of = module((0.5,) * 4)
    tokens = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(3))
    start, totals = state(of), []
    for name in ("cpu", "gpu", "again"):
        directory = tmp_path / name
        directory.mkdir()
        sites = kernel_sites(of, gpu=name != "cpu")
        text = step_text(of, sites)
        assert ("*rt.by_token(tokens))" in text) == (name != "cpu")
        (directory / "step.py").write_text(text)
        (directory / "manifest.json").write_text(json.dumps({"kernels": build_kernels(sites.specs, directory, ())}))
        tensors = copied(start)
        runpy.run_path(str(directory / "step.py"))["microbatch"](tensors, tokens)
        totals.append(tensors["embed.grad"])
    torch.testing.assert_close(totals[0], totals[1], rtol=1e-6, atol=1e-6)
    assert torch.equal(totals[1], totals[2])


def test_emitted_lines_fit() -> None:
    specs = [embedding_grad.build(name.replace(" ", "_"), problem) for name, (problem, _) in PROBLEMS.items()]
    for text in (kernels_text(specs), reference_text(specs)):
        assert max(map(len, text.splitlines())) <= 120
