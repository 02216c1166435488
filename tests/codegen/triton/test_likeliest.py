"""The likeliest tokens of rows: kernels in Triton's interpreter and twins against float64, and what is refused."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgraph.codegen.triton import likeliest, reference_text
from mgraph.codegen.triton.likeliest import PART, Likeliest
from mgraph.ir.graph import Node
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, interpret
from tests.passes.raising import module_of

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
PROBLEMS = {
    "tiny": Likeliest(7, "f32"),
    "even": Likeliest(2 * PART, "f16"),
    "odd": Likeliest(2 * PART + 5, "f32"),
    "brain": Likeliest(3 * PART - 8, "bf16"),
}


def draw(problem: Likeliest, rows: int) -> tuple[Tensor, Tensor]:
    """Logits with equals, with what is masked away, and rows that ask for a token of their own."""
    logits = (4 * torch.randn(rows, problem.classes, generator=torch.Generator().manual_seed(rows))).to(
        DTYPES[problem.dtype]
    )
    targets = torch.full((rows,), -1)
    logits[0, problem.classes // 2 :] = -torch.inf
    if rows > 4:
        logits[4] = -torch.inf  # nothing is likely: the first, with a log-probability of no number
    if rows > 1:
        logits[1, [1, problem.classes - 1]] = 40.0
        targets[2:4] = torch.arange(2, rows)[:2] * 31 % problem.classes
    return logits, targets


def exact(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor([int((row == row.max()).nonzero()[0]) for row in logits]).where(targets < 0, targets)
    return tokens, logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """Every row alone has the bits that it has among others."""
    specs = [likeliest.build(name, problem) for name, problem in PROBLEMS.items()]
    cases = [(name, draw(problem, 5)) for name, problem in PROBLEMS.items()]
    alone = [(name, (logits[3:4], targets[3:4])) for name, (logits, targets) in cases]
    results = interpret(specs, cases + alone, tmp_path)
    for (name, given), (made, _) in zip(cases, results, strict=False):
        tokens, logprobs = exact(*given)
        assert torch.equal(made[0], tokens), name
        torch.testing.assert_close(made[1].double(), logprobs, rtol=1e-6, atol=1e-5, equal_nan=True, msg=name)
    for (together, _), (one, _) in zip(results[: len(cases)], results[len(cases) :], strict=True):
        assert torch.equal(together[0][3:4], one[0]) and torch.equal(together[1][3:4], one[1])


@pytest.mark.parametrize("name", ["tiny", "odd"])
def test_twin(name: str) -> None:
    twins = types.ModuleType("twins")
    exec(reference_text([likeliest.build("found", PROBLEMS[name])]), twins.__dict__)
    given = draw(PROBLEMS[name], 4)
    tokens, logprobs = twins.found(*given)
    assert torch.equal(tokens, exact(*given)[0])
    torch.testing.assert_close(logprobs.double(), exact(*given)[1], rtol=1e-6, atol=1e-5)


def node(dtype: str) -> Node:
    head = f"func @f(%x: {dtype}[B, 50257], %t: i64[B]) {{\n"
    text = head + "  %y: i64[B], %z: f32[B] = likeliest(%x, %t)\n  return %y, %z\n}"
    return module_of(text).functions["f"].nodes[0]


def test_problem_of_a_node() -> None:
    assert likeliest.problem_of(node("f32")) == Likeliest(50257, "f32")
    assert "the logits are f64" in str(likeliest.problem_of(node("f64")))
