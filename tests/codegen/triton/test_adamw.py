"""AdamW over lists: kernels in Triton's interpreter and twins against torch's optimizers in float64, and refusals."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.codegen.kernel_sites import kernel_sites
from mgraph.codegen.step import step_text
from mgraph.codegen.triton import adamw, build_kernels, kernels_text, reference_text
from mgraph.codegen.triton.adamw import AdamW, Tuning
from mgraph.ir.graph import Node
from mgraph.passes.base import Report
from mgraph.passes.in_place import InPlace
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, interpret
from tests.codegen.triton.ptx_of import ptx_of
from tests.passes.models import random_batch, random_state
from tests.passes.raising import module_of
from tests.passes.test_adamw import trainer

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SHAPES = [(3, 5), (), (16, 4), (0, 3), (129,), (7,), (32, 8), (1, 1)]
"""Some of sizes that are multiples of 16, some not; one without elements."""

ONE, SEVERAL = ((0.1, 1.0, 8),), ((0.1, 1.0, 3), (0.0, 1.0, 4), (0.1, 0.5, 1))
PROBLEMS = {
    "plain": AdamW(ONE, "f32", "f32", "", 0.9, 0.95, 1e-8),
    "groups": AdamW(SEVERAL, "f32", "f32", "", 0.9, 0.999, 1e-8),
    "adam": AdamW(SEVERAL, "f32", "f32", "", 0.9, 0.999, 1e-6, decoupled=False),
    "masters": AdamW(SEVERAL, "f32", "f32", "bf16", 0.9, 0.95, 1e-8),
    "low_gradients": AdamW(ONE, "f32", "bf16", "bf16", 0.9, 0.95, 1e-8),
    "half": AdamW(SEVERAL, "f32", "f16", "f16", 0.8, 0.95, 1e-8),
    "no_masters": AdamW(ONE, "bf16", "f32", "", 0.9, 0.95, 1e-8),
    "no_momentum": AdamW(ONE, "f32", "f32", "", 0.0, 0.99, 1e-8),
    "norm": AdamW(ONE, "f32", "bf16", "bf16", 0.9, 0.95, 1e-8, sums=(0,)),
    "parts": AdamW(SEVERAL, "f32", "f32", "", 0.9, 0.999, 1e-6, decoupled=False, sums=(1, -1, 0)),
}
CUT = Tuning(chunk=64, tile=32, vector=4, num_warps=1)
LR, SCALE = 0.02, 0.3


def draw(problem: AdamW, step: int, *, finite: bool = True) -> tuple[Any, ...]:
    """The arguments of a site: each list is cut out of one tensor, in which some places are even and some odd."""
    generator = torch.Generator().manual_seed(step)
    arguments: list[Any] = []
    for role, dtype in problem.lists.items():
        whole = torch.randn(2304, generator=generator)
        whole = whole.square() if role == "seconds" else whole
        whole = whole.to(DTYPES[dtype])
        sizes = [torch.Size(shape).numel() for shape in SHAPES]
        starts = [288 * i + (i == 6) for i in range(len(SHAPES))]
        arguments.append([whole[a : a + n].view(s) for a, n, s in zip(starts, sizes, SHAPES, strict=True)])
    if problem.param:
        low = arguments[list(problem.lists).index("params")]
        for param, master in zip(low, arguments[0], strict=True):
            param.copy_(master)
    scale = torch.tensor(SCALE if finite else torch.nan)
    return *arguments, torch.tensor(LR), scale, torch.tensor(step), torch.tensor(finite)


def with_gaps(tensor: Tensor) -> Tensor:
    """The tensor as part of one with a longer last dim, which a kernel has to leave alone."""
    if not tensor.dim():
        return tensor
    return torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3)[..., : tensor.shape[-1]].copy_(tensor)


def exact(problem: AdamW, arguments: tuple[Any, ...], step: int) -> dict[str, list[Tensor]]:
    """Weights and moments after one step of torch's optimizer in float64."""
    lists = {r: [t.to(torch.float64, copy=True) for t in a] for r, a in zip(problem.lists, arguments, strict=False)}
    groups: list[dict[str, Any]] = []
    start = 0
    for decay, rate, count in problem.groups:
        params = lists["weights"][start : start + count]
        groups.append({"params": params, "weight_decay": decay, "lr": LR * rate})
        start += count
    kind = torch.optim.AdamW if problem.decoupled else torch.optim.Adam
    optimizer = kind(groups, betas=(problem.beta1, problem.beta2), eps=problem.eps, foreach=False)
    rows = zip(*(lists[role] for role in ("weights", "firsts", "seconds", "grads")), strict=True)
    for weight, first, second, grad in rows:
        weight.grad = grad * SCALE
        optimizer.state[weight] = {"step": torch.tensor(step - 1.0), "exp_avg": first, "exp_avg_sq": second}
    optimizer.step()
    return {role: lists[role] for role in ("weights", "firsts", "seconds")}


def check(problem: AdamW, before: tuple[Any, ...], after: tuple[Any, ...], step: int, low: float) -> None:
    """Everything that a site wrote against float64, to f32 rounding; `low`: the relative error of a rounded param."""
    wanted = exact(problem, before, step)
    bounds = {"f32": 1e-6, "bf16": low, "f16": low / 4}
    lists = dict(zip(problem.lists, after, strict=False))
    for role, values in wanted.items():
        bound = bounds[problem.lists[role]]
        for got, want in zip(lists[role], values, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound)
    for param, master in zip(lists.get("params", []), lists["weights"], strict=False):
        torch.testing.assert_close(param.float(), master, rtol=bounds[problem.param], atol=1e-6)


def check_sums(problem: AdamW, before: tuple[Any, ...], made: tuple[Any, ...]) -> None:
    """The last result against the squares in float64, where there are sums."""
    grads = before[list(problem.lists).index("grads")]
    numbers = [
        number for number, (_, _, count) in zip(problem.sums, problem.groups, strict=False) for _ in range(count)
    ]
    for place in range(max(numbers, default=-1) + 1):
        counted = [grad for grad, number in zip(grads, numbers, strict=True) if number == place]
        want = torch.nn.utils.get_total_norm([grad.double() for grad in counted]).square()
        torch.testing.assert_close(made[-1][place].double(), want, rtol=5e-7, atol=0)


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """One step from random moments, early and late, of tensors of even and odd places and sizes; one of views with
    gaps; and one that is not finite."""
    specs = [adamw.build(name, problem, CUT) for name, problem in PROBLEMS.items()]
    steps = dict(zip(PROBLEMS, [1, 2, 1, 100_000, 7, 3, 1, 5, 6, 2], strict=True))
    cases: list[tuple[str, Any]] = [(name, draw(problem, steps[name])) for name, problem in PROBLEMS.items()]
    weights, *others = draw(PROBLEMS["groups"], steps["groups"])
    cases += [("groups", ([with_gaps(weight) for weight in weights], *others))]
    cases += [(name, draw(PROBLEMS[name], 1, finite=False)) for name in ("masters", "norm")]
    results = interpret(specs, cases, tmp_path)
    for (name, before), (made, after) in zip(cases[:-2], results[:-2], strict=True):
        problem = PROBLEMS[name]
        # The interpreter cuts to bf16 where a GPU rounds, so the rounding costs twice as much here.
        check(problem, before, after, steps[name], low=8e-3)
        grads = list(problem.lists).index("grads")
        assert len(made) == grads + bool(problem.sums)
        check_sums(problem, before, made)
        assert all(torch.equal(a, b) for a, b in zip(before[grads], after[grads], strict=True))
    shaped = [weight for weight in results[-3][1][0] if weight.dim()]
    gaps = [w.as_strided((*w.shape[:-1], 3), w.stride(), w.shape[-1]) for w in shaped]
    assert not any(gap.any() for gap in gaps), "a kernel wrote into the gaps of a view"
    for place in (-1, -2):
        for old, new in zip(cases[place][1][:5], results[place][1][:5], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    check_sums(PROBLEMS["norm"], cases[-1][1], results[-1][0])


@pytest.mark.parametrize("name", PROBLEMS)
def test_twin(name: str) -> None:
    problem = PROBLEMS[name]
    module = types.ModuleType("twins")
    exec(reference_text([adamw.build("update", problem)]), module.__dict__)
    before, after = draw(problem, 4), draw(problem, 4)
    made = module.update(*after)
    lists = len(problem.lists) - 1
    assert [m is a for m, a in zip(made[:lists], after, strict=False)] == [True] * lists
    check(problem, before, after, 4, low=4e-3)
    check_sums(problem, before, made)


NODE = """
func @f(%w: f32[4, 3], %x: f32[3], %y: f32[5], %m: f32[4, 3], %n: f32[3], %o: f32[5], %v: f32[4, 3], %r: f32[3],
    %s: f32[5], %a: bf16[4, 3], %b: bf16[3], %c: bf16[5], %g: f32[4, 3], %h: f32[3], %i: f32[5], %lr: f32[],
    %scale: f32[], %step: i64[], %finite: bool[]) {
  %w1: f32[4, 3], %x1: f32[3], %y1: f32[5], %m1: f32[4, 3], %n1: f32[3], %o1: f32[5], %v1: f32[4, 3], %r1: f32[3],
    %s1: f32[5], %a1: bf16[4, 3], %b1: bf16[3], %c1: bf16[5] = adamw(%w, %x, %y, %m, %n, %o, %v, %r, %s, %a, %b, %c,
    %g, %h, %i, %lr, %scale, %step, %finite) {n = 3, masters = true, beta2 = 0.95, weight_decays = [0.1, 0.0, 0.1]}
  return %w1
}
"""


SUMS = (("0.0, 0.1]}", "0.0, 0.1], sums = [1, 0, 0]}"),)


def node(*changes: tuple[str, str]) -> Node:
    """The node `adamw` of a function with such types."""
    text = NODE.replace("\n    ", " ")
    for old, new in changes:
        text = text.replace(old, new)
    return module_of(text).functions["f"].nodes[0]


def test_problem_of_a_node() -> None:
    assert adamw.problem_of(node()) == AdamW(
        ((0.1, 1.0, 2), (0.0, 1.0, 1)), "f32", "f32", "bf16", 0.9, 0.95, 1e-8, decoupled=True
    )
    assert adamw.groups(node()) == {(0.1, 1.0, -1): [0, 2], (0.0, 1.0, -1): [1]}
    summed = adamw.problem_of(node(("%c1: bf16[5] =", "%c1: bf16[5], %p: f32[], %q: f32[] ="), *SUMS))
    assert isinstance(summed, AdamW) and summed.groups == ((0.1, 1.0, 1), (0.0, 1.0, 1), (0.1, 1.0, 1))
    assert summed.sums == (1, 0, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([("%b: bf16", "%b: f16"), ("%b1: bf16", "%b1: f16")], "the params are bf16 and f16"),
        ([("%g: f32", "%g: f64")], "the gradients are f32 and f64"),
        ([("%scale: f32", "%scale: f64")], "rate and scale are f32 and f64"),
    ],
)
def test_refusals_name_the_reason(changes: list[tuple[str, str]], reason: str) -> None:
    assert reason in str(adamw.problem_of(node(*changes)))


@pytest.mark.parametrize("groups", [(), ("embed: lr=0.1, weight_decay=0", "layers.1.*: lr=3")])
def test_a_step_calls_one_site(groups: tuple[str, ...], tmp_path: Path) -> None:
    """`finish` with the site, run by its twin, does bit for bit what calls by weight decay and rate do."""
    module = InPlace().run(trainer(groups=groups, weight_decay=0.1), Report())
    states, texts = [], []
    for gpu in (False, True):
        sites = kernel_sites(module, gpu=gpu)
        directory = tmp_path / str(gpu)
        directory.mkdir()
        texts.append(step_text(module, sites))
        (directory / "step.py").write_text(texts[-1])
        (directory / "manifest.json").write_text(json.dumps({"kernels": build_kernels(sites.specs, directory, ())}))
        step = runpy.run_path(str(directory / "step.py"))
        state = random_state(module)
        for i in range(2):
            step["microbatch"](state, *random_batch(seed=i).values())
            step["finish"](state, torch.tensor(0.01))
        states.append(state)
    assert texts[0].count("rt.adamw_(") == (3 if groups else 1) and "K.adamw" not in texts[0]
    assert texts[1].count("K.adamw_0(") == 1 and "rt.adamw_(" not in texts[1]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_full_lines_are_moved(tmp_path: Path) -> None:
    """Compiled for sm_90a, the aligned variant moves all f32 by 16 bytes and what has 16 bits by 8, and nothing goes
    through shared memory."""
    texts = ptx_of([adamw.build("update", PROBLEMS["low_gradients"])], tmp_path)
    moves = Counter(re.findall(r"(?:ld|st)\.(?:global|shared)\.v[24]\.b32", texts["update.aligned"]))
    assert moves["ld.global.v4.b32"] == moves["st.global.v4.b32"] == 6 and not re.search(
        r"(?:ld|st)\.shared", texts["update.aligned"]
    )
    assert moves["ld.global.v2.b32"] == moves["st.global.v2.b32"] == 2
    assert ".v4" not in texts["update"]


def rounded(ptx: str) -> str:
    """How the first weight that the kernel stores is computed: its operations and their order, factors sorted."""
    found = re.findall(r"^\s*((?:fma|mul|add|sub|div|sqrt|neg|cvt)\S*)\s+(%\w+), (.*);", ptx, re.MULTILINE)
    made = {result: (op, operands.split(", ")) for op, result, operands in found}

    def text(register: str) -> str:
        if register not in made:
            return "loaded" if register.startswith("%") else register
        op, operands = made[register]
        parts = [text(operand) for operand in operands]
        factors = 2 if op.startswith(("fma", "mul")) else 0
        return f"{op}({', '.join([*sorted(parts[:factors]), *parts[factors:]])})"

    quotient = next(result for result, (op, _) in made.items() if op == "div.rn.f32")
    return text(
        next(result for result, (op, operands) in made.items() if op.startswith("fma") and quotient in operands)
    )


@pytest.mark.parametrize("decoupled", [True, pytest.param(False, marks=pytest.mark.full)])
def test_sums_leave_the_roundings_of_the_update_as_they_are(decoupled: bool, tmp_path: Path) -> None:
    plain = AdamW(ONE, "f32", "bf16", "bf16", 0.9, 0.95, 1e-8, decoupled=decoupled)
    specs = [adamw.build("plain", plain), adamw.build("summed", dataclasses.replace(plain, sums=(0,)))]
    texts = ptx_of(specs, tmp_path)
    assert "fma.rn.f32(" in rounded(texts["plain.aligned"])
    assert rounded(texts["summed.aligned"]) == rounded(texts["plain.aligned"])


def test_emitted_lines_fit() -> None:
    specs: list[Any] = [adamw.build(name, problem) for name, problem in PROBLEMS.items()]
    for text in (kernels_text(specs), reference_text(specs)):
        assert max(map(len, text.splitlines())) <= 120
