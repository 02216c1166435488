"""QK-norm and RoPE in one: twins and kernels in Triton's interpreter against float64 autograd, and what is refused."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from mgraph.codegen.triton import RmsNorm, kernels_text, norm_rope, reference_text
from mgraph.codegen.triton.norm_rope import NormRope
from mgraph.codegen.triton.rope import Rope, Tuning
from tests.codegen.triton import test_rope
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.passes.raising import module_of

BHS, BSH = ("B", "H", "S"), ("B", "S", "H")
Tensors = tuple[torch.Tensor, ...]


def problem(rope: Rope, weight: str = "f32", round_: str = "normed", offset: float = 0.0) -> NormRope:
    """A rotation, and the norm of its rows."""
    return NormRope(RmsNorm(rope.width, rope.x, weight, 1e-5, round_, offset), rope)


PROBLEMS: dict[str, tuple[NormRope, Tuning | None]] = {
    "plain": (problem(Rope("f32", "f32", 16, 16, BSH, ("", "S", ""), 4)), None),
    "narrow": (problem(Rope("f32", "f32", 16, 8, BHS, ("S",), 3), round_="product", offset=1.0), Tuning(2, 2)),
    "ragged": (problem(Rope("f32", "f32", 10, 10, BSH, ("B", "S", ""), 5)), Tuning(4, 2)),
    "ragged_pairs": (problem(Rope("f32", "f32", 10, 5, BSH, ("S", ""), 7, "interleaved")), Tuning(1, 8)),
    "neighbours": (problem(Rope("f32", "f32", 6, 6, BHS, ("S",), 4, "interleaved"), offset=1.0), Tuning(2, 4)),
    "packed": (problem(Rope("f32", "f32", 12, 12, ("S", "H"), ("S", ""), 0)), None),
    "half": (problem(Rope("f16", "f32", 16, 16, BSH, ("S", ""), 4), "f16"), Tuning(4, 4)),
    "brain": (problem(Rope("bf16", "bf16", 32, 16, BSH, ("", "S", ""), 2), "bf16"), Tuning(4, 2)),
}
CASES = [
    ("contiguous", {"B": 1, "S": 1, "H": 1}),
    ("permuted", {"B": 2, "S": 3, "H": 3}),
    ("part", {"B": 1, "S": 5, "H": 9}),
]


def draw(case: NormRope, sizes: dict[str, int], layout: str) -> Tensors:
    """dy, x, weight, cos, sin and rstd."""
    rope, norm = case.rope, case.norm
    dy, *_ = test_rope.draw(rope, {**sizes, "S": sizes["S"]}, "contiguous")
    x, cos, sin = test_rope.draw(rope, sizes, layout)
    x = x * 2 if layout != "part" else x
    weight = (1 + 0.5 * torch.randn(rope.width, generator=torch.Generator().manual_seed(3))).to(
        test_rope.DTYPES[norm.weight]
    )
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.eps)
    return dy.flip(-1).contiguous(), x, weight, cos, sin, rstd


def errors(case: NormRope, given: Tensors, forward: Tensors, backward: Tensors) -> dict[str, float]:
    """Relative errors in the Frobenius norm, of dx relative to the first of its terms."""
    rope, norm = case.rope, case.norm
    dy, x, weight, cos, sin = (t.to(torch.float64, copy=True) for t in given[:5])
    x.requires_grad_()
    weight.requires_grad_()
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    y = test_rope.exact(rope, (weight + norm.offset) * (x * rstd), cos, sin)
    dx, dweight = torch.autograd.grad(y, [x, weight], dy)
    want = {"y": y.detach(), "rstd": rstd.detach(), "dx": dx, "dweight": dweight}
    scales = {**want, "dx": dy * (weight.detach().abs().max() + norm.offset) * rstd.detach()}
    got = dict(zip(want, (*forward, *backward), strict=True))
    for name, tensor in got.items():
        assert tensor.shape == want[name].shape, name
        dtype = {"rstd": "f32", "dweight": norm.weight}.get(name, norm.x)
        assert tensor.dtype is test_rope.DTYPES[dtype], name
    return {n: float((t.double() - want[n]).norm() / scales[n].norm()) for n, t in got.items()}


@pytest.mark.parametrize("name", PROBLEMS)
def test_twins(name: str) -> None:
    case = PROBLEMS[name][0]
    twins = types.ModuleType("twins")
    exec(reference_text([norm_rope.forward("fwd", case), norm_rope.backward("bwd", case)]), twins.__dict__)
    for layout, sizes in CASES:
        given = draw(case, sizes, layout)
        found = errors(case, given, twins.fwd(*given[1:5]), twins.bwd(*given))
        bound = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3}[case.norm.x]
        assert all(value <= bound for value in found.values()), (sizes, found)


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """Both styles, all table forms, ragged sizes and layouts of x, through the runtime's call path."""
    specs, cases, inputs = [], list[Case](), []
    for name, (case, cut) in PROBLEMS.items():
        specs += [norm_rope.forward(f"fwd_{name}", case, cut), norm_rope.backward(f"bwd_{name}", case, cut)]
        for layout, sizes in CASES[1:]:
            given = draw(case, sizes, layout)
            inputs.append((case, given))
            cases += [(f"fwd_{name}", given[1:5]), (f"bwd_{name}", given)]
    results = [made for made, _ in interpret(specs, cases, tmp_path)]
    for (case, given), forward, backward in zip(inputs, results[::2], results[1::2], strict=True):
        found = errors(case, given, forward, backward)
        # The interpreter cuts to bf16 where a GPU rounds: each of the up to three roundings costs twice as much here.
        bound = {"f32": 1e-6, "f16": 1.5e-3, "bf16": 2e-2}[case.norm.x]
        assert all(value <= bound for value in found.values()), (case, found)
        for made in (forward[0], backward[0]):
            assert made.stride() == torch.empty_like(given[1]).stride()


GRAPH = """
func @f(%x: bf16[B, S, 4, 16], %w: f32[16], %cos: f32[S, 1, 8], %sin: f32[S, 1, 8], %dy: bf16[B, S, 4, 16]) {
  %y: bf16[B, S, 4, 16], %rstd: f32[B, S, 4, 1] = norm_rope(%x, %w, %cos, %sin) {eps = 1e-05, offset = 1.0}
  %dx: bf16[B, S, 4, 16], %dw: f32[16] = norm_rope_grad(%dy, %x, %w, %cos, %sin, %rstd) {eps = 1e-05, offset = 1.0}
  return %y, %dx, %dw
}
"""


def test_problem_of_a_node() -> None:
    want = problem(Rope("bf16", "f32", 16, 8, BSH, ("S", ""), 4), "f32", "product", 1.0)
    for node in module_of(GRAPH).functions["f"].nodes:
        assert norm_rope.problem_of(node) == want
    for old, new, reason in [
        ("f32[S, 1, 8]", "f64[S, 1, 8]", "cos is f64"),
        ("[S, 1, 8]", "[S, 4, 8]", "axes"),
        ("f32[16]", "f64[16]", "weight is f64"),
    ]:
        for node in module_of(GRAPH.replace(old, new)).functions["f"].nodes:
            found = norm_rope.problem_of(node)
            # Tables that differ by head are the same in every sequence: these are then what a tile runs over.
            assert reason in str(found) and (reason == "axes") is isinstance(found, NormRope)


def test_emitted_lines_fit() -> None:
    for case, cut in PROBLEMS.values():
        specs = [norm_rope.forward("norm_rope_fwd_0", case, cut), norm_rope.backward("norm_rope_bwd_0", case, cut)]
        for text in (kernels_text(specs), reference_text(specs)):
            assert max(map(len, text.splitlines())) <= 120
