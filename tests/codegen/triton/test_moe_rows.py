"""Rows of a mixture of experts: kernels in Triton's interpreter and twins against float64, what they load, refusals."""

from __future__ import annotations

import re
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgraph.codegen.kernel_sites import kernel_sites
from mgraph.codegen.triton import KernelSpec, kernels_text, moe_rows, reference_text
from mgraph.codegen.triton.moe_rows import MoeRows, Tuning
from mgraph.ir.graph import Module
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.codegen.triton.ptx_of import ptx_of
from tests.passes.raising import module_of

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BOUNDS = {"f32": 2e-6, "f16": 1e-3, "bf16": 8e-3}
"""Largest errors, relative, of what is rounded to a dtype: the interpreter cuts to bf16 where a GPU rounds."""

PROBLEMS: dict[str, tuple[MoeRows, Tuning | None]] = {
    "even": (MoeRows(64, 8, "f32", "f32"), Tuning(32, 1)),
    "ragged": (MoeRows(37, 2, "f32", "f32"), Tuning(16, 1)),
    "one": (MoeRows(1, 1, "f32", "f32"), None),
    "odd": (MoeRows(129, 3, "f32", "f32"), None),
    "half": (MoeRows(24, 2, "f16", "f16", "f16"), Tuning(16, 1)),
    "half_single": (MoeRows(70, 1, "f16", "f32"), None),
    "rounded": (MoeRows(37, 2, "f32", "f32", "f16"), Tuning(16, 1)),
    "brain": (MoeRows(100, 8, "bf16", "bf16", "bf16"), Tuning(64, 1)),
    "brain_wide": (MoeRows(48, 5, "bf16", "f32", "f32"), None),
    "others": (MoeRows(37, 2, "f32", "f32", experts=3), Tuning(16, 1)),
    "others_even": (MoeRows(64, 3, "bf16", "f32", "f32", experts=4), None),
}
TOKENS = {"odd": (1,), "half_single": (1, 7), "half": (130,)}
"""Tokens of a case; 7 where not named. 130 of 2 rows are more than one program of the small launch takes."""


def specs_of(name: str, problem: MoeRows, cut: Tuning | None) -> list[KernelSpec]:
    plain = MoeRows(problem.width, problem.choices, problem.dtype, experts=problem.experts)
    return [
        moe_rows.combine(f"{name}_combine", problem, cut),
        moe_rows.combine_grad(f"{name}_combine_grad", problem, cut),
        moe_rows.dispatch_grad(f"{name}_dispatch_grad", plain, cut),
        moe_rows.dispatch_grad(f"{name}_dispatch_grad_more", replace(plain, more=True), cut),
    ]


def draw(problem: MoeRows, tokens: int) -> dict[str, Tensor]:
    """Rows, weights, a cotangent, and the order of a router that prefers one expert of five; of which the first are
    here, where some are not: then other rows are no numbers."""
    generator = torch.Generator().manual_seed(tokens)
    indices = (torch.rand(tokens * problem.choices, generator=generator) ** 4 * 5).long()
    random = {
        "rows": torch.randn(tokens * problem.choices, problem.width, generator=generator),
        "dy": torch.randn(tokens, problem.width, generator=generator),
        "weights": torch.rand(tokens, problem.choices, generator=generator) + 0.1,
    }
    dtypes = {"rows": problem.dtype, "dy": problem.dtype, "weights": problem.weights}
    offsets = (indices[None] <= torch.arange(problem.experts)[:, None]).sum(1).int()
    if problem.experts:
        random["rows"][offsets[-1] :] = torch.nan
    return {
        "offsets": offsets,
        **{name: value.to(DTYPES[dtypes[name]]) for name, value in random.items()},
        "order": indices.sort(stable=True).indices,
    }


def calls(problem: MoeRows, tokens: int) -> dict[str, tuple[tuple[Tensor, ...], list[Tensor]]]:
    """The arguments of each site and its results: one row after the other, in float64 but for products that are
    rounded, which shows in f32 alone."""
    drawn = draw(problem, tokens)
    dy, rows, weights, order = (drawn[name] for name in ("dy", "rows", "weights", "order"))
    end = int(drawn["offsets"][-1]) if problem.experts else len(order)
    also = (drawn["offsets"],) if problem.experts else ()
    y, dx = torch.zeros(2, tokens, problem.width, dtype=torch.float64)
    drows, dweights = torch.zeros_like(rows, dtype=torch.float64), torch.zeros_like(weights, dtype=torch.float64)
    for row, pair in enumerate(order[:end].tolist()):
        token, choice = divmod(pair, problem.choices)
        weight = weights[token, choice].double()
        y[token] += (weights[token, choice].float() * rows[row].float()).to(DTYPES[problem.products]).double()
        dx[token] += rows[row].double()
        drows[row] = weight * dy[token].double()
        dweights[token, choice] = dy[token].double() @ rows[row].double()
    return {
        "combine": ((rows, weights, order, *also), [y]),
        "combine_grad": ((dy, rows, weights, order, *also), [drows[:end], dweights]),
        "dispatch_grad": ((rows, order, *also), [dx]),
        "dispatch_grad_more": ((rows, order, *also, rows.flip(1).contiguous()), [dx + dx.flip(1)]),
    }


def check(name: str, dtypes: tuple[str, ...], got: tuple[Tensor, ...], want: list[Tensor]) -> None:
    """Errors of results, relative to what they should be."""
    for dtype, result, ideal in zip(dtypes, got, want, strict=True):
        result = result[: len(ideal)]  # without rows of no expert
        assert result.dtype is DTYPES[dtype] and result.shape == ideal.shape, name
        assert (result.double() - ideal).norm() <= BOUNDS[dtype] * ideal.norm() + 1e-6, name


def results_of(problem: MoeRows, op: str) -> tuple[str, ...]:
    """The dtypes of the results of a site."""
    return (problem.dtype, problem.weights) if op == "combine_grad" else (problem.dtype,)


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """One token and many, one tile a row and several, as many choices as a power of two and not."""
    specs = [spec for name, (problem, cut) in PROBLEMS.items() for spec in specs_of(name, problem, cut)]
    cases: list[Case] = []
    wanted = []
    for name, (problem, _) in PROBLEMS.items():
        for tokens in TOKENS.get(name, (7,)):
            for op, (inputs, want) in calls(problem, tokens).items():
                cases.append((f"{name}_{op}", inputs))
                wanted.append((results_of(problem, op), want))
    for (name, inputs), (dtypes, want), (got, after) in zip(
        cases, wanted, interpret(specs, cases, tmp_path), strict=True
    ):
        check(name, dtypes, got, want)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(inputs, after, strict=True))


@pytest.mark.parametrize("name", PROBLEMS)
def test_twin(name: str) -> None:
    problem = PROBLEMS[name][0]
    twins = types.ModuleType("twins")
    exec(reference_text(specs_of("of", problem, None)), twins.__dict__)
    for op, (inputs, want) in calls(problem, 7).items():
        got = getattr(twins, f"of_{op}")(*inputs)
        check(op, results_of(problem, op), got if isinstance(got, tuple) else (got,), want)


def test_sixteen_bytes_at_a_time(tmp_path: Path) -> None:
    """The aligned variants move rows in vectors only, and read all rows of a token before they write; the
    gradient's read 8 places and 8 weights in three vectors more."""
    specs = specs_of("wide", MoeRows(2048, 8, "bf16", "bf16", "bf16"), None)
    texts = ptx_of(specs, tmp_path)
    for spec, loads, stores in zip(specs, (8, 12, 8, 16), (1, 8, 1, 1), strict=True):
        text = texts[f"{spec.name}_tokens.aligned"]
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", text)) == loads, spec.name
        assert len(re.findall(r"st\.global\S*\.v4\.b32", text)) == stores, spec.name
        last_load = text.rindex("ld.global.v4.b32")
        assert "st.global" not in text[:last_load], spec.name


NODES = """
func @f(%rows: bf16[2*S, 48], %weights: f32[S, 2], %order: i64[2*S], %dy: bf16[S, 48], %ends: i32[4]) {
  %y: bf16[S, 48] = moe_combine(%rows, %weights, %order) {dtype = bf16}
  %drows: bf16[2*S, 48], %dweights: f32[S, 2] = moe_combine_grad(%dy, %rows, %weights, %order)
  %dx: bf16[S, 48] = moe_dispatch_grad(%drows, %order) {top_k = 2}
  %dx2: bf16[S, 48] = moe_dispatch_grad(%drows, %order, %rows) {top_k = 2}
  %y2: bf16[S, 48] = moe_combine(%rows, %weights, %order, %ends) {dtype = bf16}
  %dx3: bf16[S, 48] = moe_dispatch_grad(%drows, %order, %ends) {top_k = 2, others = true}
  %dx4: bf16[S, 48] = moe_dispatch_grad(%drows, %order, %ends, %rows) {top_k = 2, others = true}
  return %y, %dweights, %dx, %dx2, %y2, %dx3, %dx4
}
"""


def changed(*changes: tuple[str, str]) -> Module:
    text = NODES
    for old, new in changes:
        text = text.replace(old, new)
    return module_of(text)


def test_problem_of_a_node() -> None:
    combine, combine_grad, dispatch_grad, with_more, *others = changed().functions["f"].nodes
    assert [moe_rows.problem_of(node) for node in others] == [
        MoeRows(48, 2, "bf16", "f32", "bf16", experts=4),
        MoeRows(48, 2, "bf16", experts=4),
        MoeRows(48, 2, "bf16", more=True, experts=4),
    ]
    assert moe_rows.problem_of(combine) == MoeRows(48, 2, "bf16", "f32", "bf16")
    assert moe_rows.problem_of(combine_grad) == MoeRows(48, 2, "bf16", "f32")
    assert moe_rows.problem_of(dispatch_grad) == MoeRows(48, 2, "bf16")
    assert moe_rows.problem_of(with_more) == MoeRows(48, 2, "bf16", more=True)


def test_sites_in_packages_for_a_gpu() -> None:
    assert [spec.name for spec in kernel_sites(changed(), gpu=True).specs] == [
        "moe_combine_fwd_0",
        "moe_combine_bwd_0",
        "moe_dispatch_bwd_0",
        "moe_dispatch_bwd_1",
        "moe_combine_fwd_1",
        "moe_dispatch_bwd_2",
        "moe_dispatch_bwd_3",
    ]
    assert not kernel_sites(changed()).specs


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([("48", "B")], "the width B of a row is not a known number"),
        ([("bf16", "f64")], "rows is f64"),
        ([("f32", "f64")], "weights is f64"),
        ([("dtype = bf16", "dtype = f64")], "the products are f64"),
        ([("S, 2]", "S, 33]"), ("2*S", "33*S"), ("= 2", "= 33")], "a token has 33 rows"),
    ],
)
def test_refusals_name_the_reason(changes: list[tuple[str, str]], reason: str) -> None:
    assert reason in str(moe_rows.problem_of(changed(*changes).functions["f"].nodes[0]))


@pytest.mark.parametrize(
    ("width", "choices", "sums", "gradient"),
    [
        (2048, 8, (2048, 8), (2048, 8)),
        (2880, 4, (1024, 4), (4096, 8)),
        (7168, 8, (1024, 4), (4096, 8)),
        (1536, 1, (512, 2), (2048, 1)),
        (100, 2, (128, 1), (128, 1)),
    ],
)
def test_cuts(width: int, choices: int, sums: tuple[int, int], gradient: tuple[int, int]) -> None:
    problem = MoeRows(width, choices, "bf16", "bf16")
    assert moe_rows.sum_tuning(problem) == Tuning(*sums)
    assert moe_rows.gradient_tuning(problem) == Tuning(*gradient)


def test_emitted_lines_fit() -> None:
    specs = [spec for name, (problem, cut) in PROBLEMS.items() for spec in specs_of(name, problem, cut)]
    specs += specs_of("longest", MoeRows(16383, 31, "bf16", "bf16", "bf16"), None)
    for text in (kernels_text(specs), reference_text(specs)):
        assert max(map(len, text.splitlines())) <= 120
