"""Routers: kernels in Triton's interpreter and twins against one token after the other in float64, and refusals."""

from __future__ import annotations

import math
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgraph.codegen.triton import KernelSpec, kernels_text, moe_route, reference_text
from mgraph.codegen.triton.moe_order import Tuning
from mgraph.codegen.triton.moe_route import Router
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.passes.raising import module_of

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BOUNDS = {"f32": 3e-6, "f16": 1e-3, "bf16": 8e-3}

PROBLEMS: dict[str, tuple[Router, int, Tuning | None]] = {
    "plain": (Router(8, 2, "f32"), 9, Tuning(4, 1, 1)),
    "qwen": (Router(16, 4, "bf16", renormalize=True), 33, Tuning(4, 1, 1)),
    "mixtral_odd": (Router(6, 2, "f32", renormalize=True), 5, None),
    "gpt": (Router(12, 3, "f32", score="softmax_chosen"), 7, Tuning(2, 2, 1)),
    "gpt_biased": (Router(8, 4, "f32", "f32", "f32", score="softmax_chosen"), 3, None),
    "sigmoid": (Router(8, 2, "f16", "f16", score="sigmoid", renormalize=True, epsilon=1e-20), 8, Tuning(2, 1, 1)),
    "deepseek": (
        Router(16, 3, "f32", "f32", "f32", "sigmoid", True, 1e-20, 2.5, groups=4, top_groups=2, group_best=2),
        13,
        Tuning(4, 1, 1),
    ),
    "low": (Router(6, 3, "bf16", "bf16", scale=2.0), 5, Tuning(2, 1, 1)),
    "low_chosen": (Router(12, 3, "f16", score="softmax_chosen"), 7, Tuning(2, 2, 1)),
    "one": (Router(4, 1, "f32", renormalize=False, scale=0.5), 1, None),
    "all": (Router(4, 4, "f32", renormalize=True, epsilon=0.1), 6, None),
    "ended": (Router(16, 4, "bf16", renormalize=True, ended=True), 33, Tuning(4, 1, 1)),
    "ended_biased": (Router(8, 2, "f32", bias="f32", score="sigmoid", ended=True), 5, None),
    "many": (Router(128, 6, "bf16", renormalize=True), 103, Tuning(32, 1, 4)),
    "many_odd": (Router(90, 3, "f16", scale=2.0), 40, Tuning(32, 1, 4)),
    "many_wide": (Router(128, 8, "f32", renormalize=True), 33, Tuning(32, 1, 4)),
}
"""Instance, tokens, tuning. The interpreter has three multiprocessors, so some programs have several tiles."""


def draw(problem: Router, tokens: int, levels: int = 0) -> tuple[Tensor, ...]:
    """Logits, of which those of a row are not equal, or are of a few levels, biases, and where requests begin and end,
    three tokens before the last."""
    generator = torch.Generator().manual_seed(problem.experts * 100 + tokens)
    ranks = torch.rand(tokens, problem.experts, generator=generator).argsort(1)
    logits = (ranks.double() / problem.experts - 0.5) * 4
    if levels:
        logits = (logits * levels).round() / levels
    bias = torch.randn(problem.experts, generator=generator) * 0.05
    starts = torch.tensor([0, 1, tokens - 3], dtype=torch.int32)
    more = [bias.to(DTYPES[problem.bias])] if problem.bias else []
    return (logits.to(DTYPES[problem.logits]), *more, *([starts] if problem.ended else []))


def chosen(problem: Router, logits: list[float], bias: list[float]) -> tuple[list[float], list[int]]:
    """Weights and experts of one token."""
    exps = [math.exp(x) for x in logits]
    scores = {
        "softmax": [x / sum(exps) for x in exps],
        "sigmoid": [1 / (1 + math.exp(-x)) for x in logits],
        "softmax_chosen": logits,
    }[problem.score]
    steered = [score + more for score, more in zip(scores, bias, strict=True)]
    size = problem.experts // problem.groups
    groups = [steered[g * size : (g + 1) * size] for g in range(problem.groups)]
    best = [sum(sorted(group, reverse=True)[: problem.group_best]) for group in groups]
    kept = sorted(range(problem.groups), key=lambda g: -best[g])[: problem.top_groups]
    open_ = [e for e in range(problem.experts) if problem.groups == 1 or e // size in kept]
    experts = sorted(open_, key=lambda e: -steered[e])[: problem.choices]
    weights = [scores[e] for e in experts]
    if problem.score == "softmax_chosen":
        weights = [math.exp(w) for w in weights]
        weights = [w / sum(weights) for w in weights]
    if problem.renormalize:
        weights = [w / (sum(weights) + problem.epsilon) for w in weights]
    return [w * problem.scale for w in weights], experts


def wanted(problem: Router, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weights, indices, order and offsets, one token after the other."""
    logits = inputs[0].double().tolist()
    bias = inputs[1].double().tolist() if problem.bias else [0.0] * problem.experts
    rows = [chosen(problem, row, bias) for row in logits]
    indices = torch.tensor([experts for _, experts in rows])
    real = indices.clone()
    if problem.ended:
        real[int(inputs[-1][-1]) :] = problem.experts
    order, offsets = placed(problem.experts + 1, real)
    weights = torch.tensor([weights for weights, _ in rows], dtype=torch.float64)
    return weights, indices, order, offsets[: problem.experts]


def placed(experts: int, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Order and offsets of indices."""
    flat = indices.flatten().tolist()
    order = [pair for e in range(experts) for pair, chose in enumerate(flat) if chose == e]
    return torch.tensor(order), torch.tensor([sum(c <= e for c in flat) for e in range(experts)], dtype=torch.int32)


def gradient(problem: Router, logits: Tensor, indices: Tensor, dweights: Tensor) -> Tensor:
    """By torch's autograd in float64, the choice held fixed."""
    wide = logits.double().requires_grad_()
    scores = {"softmax": wide.softmax(1), "sigmoid": wide.sigmoid(), "softmax_chosen": wide}[problem.score]
    weights = scores.gather(1, indices)
    weights = weights.softmax(1) if problem.score == "softmax_chosen" else weights
    if problem.renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + problem.epsilon)
    (weights * problem.scale).backward(dweights.double())
    assert wide.grad is not None
    return wide.grad


def check_weights(problem: Router, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    assert got[0].dtype is DTYPES[problem.weights] and got[1].dtype is torch.int64
    assert torch.equal(got[1], want[1])
    assert (got[0].double() - want[0]).norm() <= BOUNDS[problem.weights] * want[0].norm()
    for found, ideal in zip(got[2:], want[2:], strict=False):
        assert found.dtype is ideal.dtype and torch.equal(found, ideal)


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    specs: list[KernelSpec] = []
    cases: list[Case] = []
    checks: list[tuple[Router, tuple[Tensor, ...]]] = []
    for name, (problem, tokens, cut) in PROBLEMS.items():
        inputs = draw(problem, tokens, levels=8 if name.startswith("many") else 0)
        want = wanted(problem, inputs)
        specs += [moe_route.route_order(name, problem, cut), moe_route.grad(f"{name}_grad", problem, cut)]
        dweights = torch.randn(want[0].shape, generator=torch.Generator().manual_seed(1)).to(DTYPES[problem.weights])
        cases += [(name, inputs), (f"{name}_grad", (dweights, inputs[0], want[1]))]
        checks += [(problem, want), (problem, (gradient(problem, inputs[0], want[1], dweights),))]
    plain = PROBLEMS["plain"][0]
    specs.append(moe_route.route("alone", plain))
    cases.append(("alone", draw(plain, 9)))
    checks.append((plain, wanted(plain, draw(plain, 9))))
    broken = torch.full((3, 8), float("nan"))
    broken[1] = float("-inf")
    specs += [moe_route.route_order("broken", plain), moe_route.route_order("broken_low", Router(8, 2, "bf16"))]
    cases += [("broken_low", (broken.bfloat16(),)), ("broken", (broken,))]
    found = interpret(specs, cases, tmp_path)
    for (name, inputs), (_, after) in zip(cases, found, strict=True):
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(inputs, after, strict=True)), name
    for (problem, ideal), (got, _) in zip(checks, found, strict=False):
        if len(ideal) > 1:
            check_weights(problem, got, ideal)
        else:
            error = (got[0].double() - ideal[0]).norm() / ideal[0].norm()
            assert got[0].dtype is DTYPES[problem.logits] and error <= BOUNDS[problem.logits]
    for (_, indices, order, offsets), _ in found[-2:]:
        # Whatever scores are, a token has as many experts as it should, and each pair has a row.
        assert all(len(set(row)) == 2 and set(row) <= set(range(8)) for row in indices.tolist())
        assert sorted(order.tolist()) == list(range(6)) and offsets[-1] == 6


@pytest.mark.parametrize("name", PROBLEMS)
def test_twin(name: str) -> None:
    problem, tokens, _ = PROBLEMS[name]
    twins = types.ModuleType("twins")
    exec(reference_text([moe_route.route_order("of", problem), moe_route.grad("grad", problem)]), twins.__dict__)
    inputs = draw(problem, tokens)
    want = wanted(problem, inputs)
    check_weights(problem, twins.of(*inputs), want)
    dweights = want[0].flip(1).to(DTYPES[problem.weights])
    got, ideal = twins.grad(dweights, inputs[0], want[1]), gradient(problem, inputs[0], want[1], dweights)
    assert (got.double() - ideal).norm() <= BOUNDS[problem.logits] * ideal.norm() + 1e-7


NODES = """
func @f(%logits: bf16[S, 48], %bias: f32[48], %dweights: f32[S, 2]) {
  %weights: f32[S, 2], %indices: i64[S, 2] = moe_route(%logits, %bias) {top_k = 2, score = "sigmoid", scale = 2.5}
  %dlogits: bf16[S, 48] = moe_route_grad(%dweights, %logits, %indices) {score = "sigmoid", scale = 2.5}
  return %weights, %dlogits
}
"""


def problem_after(*changes: tuple[str, str], node: int = 0) -> Router | str:
    text = NODES
    for old, new in changes:
        text = text.replace(old, new)
    return moe_route.problem_of(module_of(text).functions["f"].nodes[node])


def test_problem_of_a_node() -> None:
    assert problem_after() == Router(48, 2, "bf16", "f32", "f32", "sigmoid", scale=2.5)
    assert problem_after(node=1) == Router(48, 2, "bf16", "f32", score="sigmoid", scale=2.5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([("48", "B")], "there are B experts"),
        ([("48", "2048")], "there are 2048 experts"),
        ([("bf16", "f64")], "logits are f64"),
        ([("f32[48]", "f64[48]")], "the bias are f64"),
        ([("S, 2]", "S, 33]"), ("top_k = 2", "top_k = 33")], "a token has 33 experts"),
        ([("top_k = 2", "top_k = 2, groups = 3")], "48 experts in 3 groups"),
    ],
)
def test_refusals_name_the_reason(changes: list[tuple[str, str]], reason: str) -> None:
    assert reason in str(problem_after(*changes))


def test_emitted_lines_fit() -> None:
    specs = [
        make(f"name_of_{name}_{make.__name__}", problem)
        for name, (problem, _, _) in PROBLEMS.items()
        for make in (moe_route.route, moe_route.route_order, moe_route.grad)
    ]
    for text in (kernels_text(specs), reference_text(specs)):
        assert max(map(len, text.splitlines())) <= 120
