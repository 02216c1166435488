"""Cross entropy: the kernels in Triton's interpreter against log softmax and its autograd in float64; what is loaded,
refused, and how rows are cut."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest
import torch

from mgraph.codegen.triton import KernelSpec, cross_entropy, reference_text
from mgraph.codegen.triton.cross_entropy import CrossEntropy, Tuning
from mgraph.ir.graph import Node
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.codegen.triton.ptx_of import ptx_of
from tests.passes.raising import module_of

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

PROBLEMS: dict[str, tuple[CrossEntropy, Tuning | None]] = {
    "short": (CrossEntropy(7, "f32"), None),
    "one_class": (CrossEntropy(1, "f32"), None),
    "whole_tiles": (CrossEntropy(256, "f32"), Tuning(128, 4, 2)),
    "ragged": (CrossEntropy(129, "f32", ignore_index=3), Tuning(64, 4, 2, together=2)),
    "padding": (CrossEntropy(300, "f32", classes=290), Tuning(64, 4, 3, together=3)),
    "tiles_of_padding": (CrossEntropy(300, "f32", classes=100), Tuning(64, 4, 3, together=2, from_end=True)),
    "padding_from_a_tile_on": (CrossEntropy(300, "f32", classes=64), Tuning(64, 4, 3)),
    "half": (CrossEntropy(264, "f16"), Tuning(128, 4, 2)),
    "brain": (CrossEntropy(520, "bf16", classes=517), Tuning(256, 4, 1)),
    "brain_default": (CrossEntropy(2050, "bf16"), None),
    "edges": (CrossEntropy(529, "bf16"), Tuning(128, 4, 1, together=2)),
    "edges_padded": (CrossEntropy(531, "f16", classes=503), Tuning(128, 4, 1, together=3, from_end=True)),
}
ROWS = (1, 5, 2)
DSUM = (1.0, 0.7, -1.3)


def sites(name: str, problem: CrossEntropy, cut: Tuning | None) -> list[KernelSpec]:
    return [
        cross_entropy.forward(f"{name}_fwd", problem, cut),
        cross_entropy.backward(f"{name}_bwd", problem, cut),
        cross_entropy.forward_backward(f"{name}_both", problem, cut),
    ]


def draw(problem: CrossEntropy, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random logits, some large, and labels, the last and the first class and random ones, of which every third is
    ignored; of two rows all."""
    generator = torch.Generator().manual_seed(problem.size + rows)
    logits = 3 * torch.randn(rows, problem.size, generator=generator)
    logits[rows // 2] *= 20
    labels = torch.randint(problem.real, (rows,), generator=generator)
    labels[0], labels[1:2] = problem.real - 1, 0
    labels[2::3] = problem.ignore_index
    if rows == 2:
        labels[:] = problem.ignore_index
    return logits.to(DTYPES[problem.dtype]), labels


def exact(
    problem: CrossEntropy, logits: torch.Tensor, labels: torch.Tensor, dsum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum, lse and the gradient, by log softmax in float64 and its autograd."""
    leaf = logits.to(torch.float64, copy=True).requires_grad_()
    likely = leaf[:, : problem.real].log_softmax(-1)
    counted = (labels != problem.ignore_index).nonzero()[:, 0]
    total = -likely[counted, labels[counted]].sum()
    (grad,) = torch.autograd.grad(total, leaf, dsum.double())
    lse = torch.logsumexp(leaf.detach()[:, : problem.real], -1)
    return total.detach(), lse, grad


def check(problem: CrossEntropy, got: dict[str, torch.Tensor], want: tuple[torch.Tensor, ...], name: str) -> None:
    """Each within its dtype; an exponential is as wrong as the f32 that its exponent is."""
    lse = want[1].abs()
    scales = {"sum": float(lse.sum()), "lse": float(lse.max()), "dlogits": float(lse.max()) / 8}
    # The interpreter cuts to bf16 where a GPU rounds, so the rounding costs twice as much here.
    bounds = {"sum": 2e-6, "lse": 2e-6, "dlogits": {"f32": 2e-6, "f16": 1e-3, "bf16": 8e-3}[problem.dtype]}
    for (role, bound), ideal in zip(bounds.items(), want, strict=True):
        if role in got:
            assert got[role].shape == ideal.shape, (name, role)
            assert float((got[role].double() - ideal).abs().max()) <= bound * max(1.0, scales[role]), (name, role)


def extremes() -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima far from each other between lanes and tiles, columns that are impossible; and labels."""
    logits = torch.linspace(-2, 2, 24).repeat(5, 1)
    logits[0, 3], logits[0, 20] = 1e4, -1e4
    logits[1, :16] = -float("inf")
    logits[2] = -1e3
    logits[3, 23] = 3e4
    return logits, torch.tensor([20, 23, 4, 0, -100])


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """Rows of one tile and of several, with padding and with edges; gradients over the logits; ignored rows."""
    specs = [spec for name, (problem, cut) in PROBLEMS.items() for spec in sites(name, problem, cut)]
    cases: list[Case] = []
    wanted: list[tuple[CrossEntropy, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = []
    for name, (problem, _) in PROBLEMS.items():
        for rows, dsum in zip(ROWS, map(torch.tensor, DSUM), strict=True):
            logits, labels = draw(problem, rows)
            want = exact(problem, logits, labels, dsum)
            wanted.append((problem, want))
            cases += [
                (f"{name}_fwd", (logits, labels)),
                (f"{name}_bwd", (dsum, logits.clone(), labels, want[1].float())),
                (f"{name}_both", (logits.clone(), labels, dsum)),
            ]
    logits, labels = extremes()
    extreme, one = CrossEntropy(24, "f32"), torch.tensor(1.0)
    specs += sites("extreme", extreme, Tuning(8, 4, 1))
    no_class = torch.tensor([24, -1, 1 << 40, 5, 6])
    cases += [("extreme_both", (logits.clone(), labels, one)), ("extreme_both", (logits.clone(), no_class, one))]
    *made, (both, _), (lost, _) = interpret(specs, cases, tmp_path)
    for got, ideal in zip(both, exact(extreme, logits, labels, one), strict=True):
        torch.testing.assert_close(got.double(), ideal, rtol=2e-6, atol=2e-4)
    assert torch.isfinite(lost[2]).all(), "a label that is no class is not followed out of the row"
    results = iter(zip(cases, made, strict=False))
    for problem, want in wanted:
        ((name, inputs), ((total, lse), left)) = next(results)
        check(problem, {"sum": total, "lse": lse}, want, name)
        assert torch.equal(left[0], inputs[0]), "the loss alone leaves the logits"
        ((name, _), ((grad,), left)) = next(results)
        check(problem, {"dlogits": grad}, want, name)
        assert torch.equal(left[1], grad)
        ((name, _), ((total, lse, grad), left)) = next(results)
        check(problem, {"sum": total, "lse": lse, "dlogits": grad}, want, name)
        assert torch.equal(left[0], grad), "the gradient lies where the logits were"
        assert total.dtype is lse.dtype is torch.float32 and grad.dtype is DTYPES[problem.dtype]


@pytest.mark.parametrize("name", PROBLEMS)
def test_twin(name: str) -> None:
    problem = PROBLEMS[name][0]
    module = types.ModuleType("twins")
    exec(reference_text(sites("site", problem, None)), module.__dict__)
    logits, labels = draw(problem, 7)
    dsum = torch.tensor(0.7)
    want = exact(problem, logits, labels, dsum)
    total, lse = module.site_fwd(logits, labels)
    over = logits.clone()
    grad = module.site_bwd(dsum, over, labels, lse)
    assert grad is over
    check(problem, {"sum": total, "lse": lse, "dlogits": grad}, want, name)
    over = logits.clone()
    total, lse, grad = module.site_both(over, labels, dsum)
    assert grad is over
    check(problem, {"sum": total, "lse": lse, "dlogits": grad}, want, name)


def test_sixteen_bytes_at_a_time(tmp_path: Path) -> None:
    """The aligned variants move rows by vectors; single numbers are labels, lse, losses, labels' columns, edges."""
    even = sites("site", CrossEntropy(12608, "bf16", classes=12569), None)
    edges = sites("edges", CrossEntropy(12571, "bf16", classes=12569), None)
    texts = ptx_of([*even, edges[0], edges[2]], tmp_path)
    single = {"site_fwd_rows": 4, "site_bwd": 4, "site_both_rows": 6, "edges_fwd_rows": 5, "edges_both_rows": 8}
    for name, most in single.items():
        accesses = re.findall(r"(?:ld|st)\.global\S*", texts[f"{name}.aligned"])
        vectors = [access for access in accesses if ".v4.b32" in access]
        copies = re.findall(r"cp\.async\.cg\.shared\.global", texts[f"{name}.aligned"])
        assert len(accesses) - len(vectors) <= most, (name, accesses)
        assert len(vectors) + len(copies) >= 4
    assert ".maxnreg 64" in texts["site_both_rows.aligned"]


@pytest.mark.parametrize(
    ("size", "dtype", "cut"),
    [
        (1 << 20, "bf16", Tuning(65536, 32, 1, together=1, from_end=True)),
        (262144, "bf16", Tuning(16384, 32, 1, together=4, from_end=True)),
        (128256, "f32", Tuning(8192, 32, 1, together=4, from_end=True)),
        (128256, "bf16", Tuning(8192, 32, 1)),
        (65536, "bf16", Tuning(4096, 16, 1)),
        (32768, "f32", Tuning(2048, 16, 1)),
        (16384, "bf16", Tuning(2048, 8, 1)),
        (4096, "f16", Tuning(1024, 4, 1)),
        (7, "f32", Tuning(512, 4, 1)),
    ],
)
def test_how_a_row_is_cut(size: int, dtype: str, cut: Tuning) -> None:
    assert cross_entropy.forward_backward_tuning(CrossEntropy(size, dtype)) == cut


NODE = """
func @f(%dsum: f32[], %logits: bf16[B, 512], %labels: i64[B], %lse: f32[B]) {
  %made: f32[], %lse_1: f32[B], %grad: bf16[B, 512] = cross_entropy_with_grad(%logits, %labels, %dsum) {classes = 500}
  %sum: f32[], %lse_2: f32[B] = cross_entropy(%logits, %labels) {ignore_index = 3, classes = 512}
  %dlogits: bf16[B, 512] = cross_entropy_grad(%dsum, %logits, %labels, %lse)
  return %made, %lse_1, %grad, %sum, %lse_2, %dlogits
}
"""


def nodes(*changes: tuple[str, str]) -> tuple[Node, ...]:
    text = NODE
    for old, new in changes:
        text = text.replace(old, new)
    return module_of(text).functions["f"].nodes


def test_problem_of_a_node() -> None:
    assert [cross_entropy.problem_of(node) for node in nodes()] == [
        CrossEntropy(512, "bf16", classes=500),
        CrossEntropy(512, "bf16", ignore_index=3),
        CrossEntropy(512, "bf16"),
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("512", "S"), "the vocabulary S is not a known number"),
        (("bf16", "f64"), "the logits are f64"),
        (("i64", "i32"), "the labels are i32"),
    ],
)
def test_refusals_name_the_reason(change: tuple[str, str], reason: str) -> None:
    for node in nodes((", classes = 512", ""), change):
        assert reason in str(cross_entropy.problem_of(node))
