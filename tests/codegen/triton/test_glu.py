"""Gated units: the kernels in Triton's interpreter against autograd in float64, what they load, what is refused."""

from __future__ import annotations

import itertools
import re
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from mgraph.codegen.triton import KernelSpec, glu, kernels_text, reference_text
from mgraph.codegen.triton.glu import Glu, Tuning
from mgraph.ir.graph import Node
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.codegen.triton.ptx_of import ptx_of
from tests.passes.raising import module_of

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

PROBLEMS: dict[str, tuple[Glu, Tuning | None]] = {
    "silu": (Glu(64, 1, "f32", "silu"), None),
    "silu_ragged": (Glu(129, 2, "f32", "silu"), Tuning(4, 64)),
    "silu_offset": (Glu(7, 3, "f32", "silu", offset=1.0), Tuning(8, 8)),
    "silu_limit": (Glu(40, 2, "f32", "silu", limit=0.75), Tuning(1, 32)),
    "tanh": (Glu(33, 2, "f32", "gelu_tanh"), Tuning(4, 16)),
    "erf": (Glu(1, 1, "f32", "gelu_erf"), None),
    "erf_wide": (Glu(100, 3, "f32", "gelu_erf", limit=1.0), Tuning(2, 128)),
    "quick": (Glu(48, 2, "f32", "quick_gelu", alpha=1.5, limit=0.75, offset=1.0), Tuning(2, 32)),
    "relu": (Glu(129, 2, "f32", "squared_relu"), Tuning(4, 64)),
    "vector": (Glu(70, 0, "f32", "silu"), None),
    "vector_relu": (Glu(5, 0, "f32", "squared_relu"), None),
    "half": (Glu(64, 2, "f16", "silu"), None),
    "half_tanh": (Glu(130, 1, "f16", "gelu_tanh"), Tuning(4, 64)),
    "brain": (Glu(96, 2, "bf16", "silu"), Tuning(2, 64)),
    "brain_quick": (Glu(65, 1, "bf16", "quick_gelu", alpha=1.702, limit=1.0, offset=1.0), None),
    "joined": (Glu(40, 2, "f32", "silu", joined=True), Tuning(2, 32)),
    "joined_brain": (Glu(64, 2, "bf16", "gelu_tanh", joined=True), None),
    "swapped": (Glu(40, 2, "f32", "silu", joined=True, layout="swapped"), Tuning(2, 32)),
    "turns": (Glu(40, 2, "f32", "silu", joined=True, layout="interleaved", spaced=True), Tuning(2, 32)),
    "turns_odd": (Glu(33, 1, "f16", "gelu_tanh", joined=True, layout="interleaved", spaced=True), None),
    "turns_vector": (Glu(70, 0, "f32", "silu", limit=0.75, joined=True, layout="interleaved", spaced=True), None),
    "turns_brain": (Glu(64, 3, "bf16", "silu", joined=True, layout="interleaved", spaced=True), Tuning(4, 16)),
    "brain_relu": (Glu(64, 2, "bf16", "squared_relu"), None),
}
LEADING = [(1, 1, 1), (3, 5, 2), (7, 1, 3)]
LAYOUTS = ("interleaved", "packed", "turned")


def draw(problem: Glu, leading: tuple[int, ...], layout: str, number: int) -> list[torch.Tensor]:
    """Random dy and operands: columns in turns (contiguous where the kernel takes no such), or the operands as parts of
    one packed tensor, or its leading dims turned."""
    generator = torch.Generator().manual_seed(problem.size)
    shape = leading[: problem.leading]
    whole = 2 * torch.randn(*shape, number * problem.size, generator=generator).to(DTYPES[problem.dtype])
    parts = list(whole.split(problem.size, -1))
    if problem.spaced:  # any others between the columns, as in the first layout
        parts = [whole[..., i::number] for i in range(number)] if layout == "interleaved" else parts
    elif layout == "interleaved":
        parts = [part.contiguous() for part in parts]
    if layout == "turned":
        parts = [part.transpose(0, -2).contiguous().transpose(0, -2) for part in parts] if shape else parts
    return parts


def exact(problem: Glu, dy: torch.Tensor, *operands: torch.Tensor) -> list[torch.Tensor]:
    """y and the gradients, by autograd in float64."""
    leaves = [operand.to(torch.float64, copy=True).requires_grad_() for operand in operands]
    if problem.act == "squared_relu":
        y = functional.relu(leaves[0]).square()
    else:
        gate, up = leaves
        if problem.limit:
            gate, up = gate.clamp(max=problem.limit), up.clamp(-problem.limit, problem.limit)
        acts = {
            "silu": lambda x: x * torch.sigmoid(x),
            "quick_gelu": lambda x: x * torch.sigmoid(problem.alpha * x),
            "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
            "gelu_erf": lambda x: x * torch.special.ndtr(x),
        }
        y = acts[problem.act](gate) * (up + problem.offset)
    gradients = torch.autograd.grad(y, leaves, dy.double())
    if problem.joined and problem.layout == "interleaved":
        return [y.detach(), torch.stack(gradients, -1).flatten(-2)]
    order = -1 if problem.layout == "swapped" else 1
    return [y.detach(), *([torch.cat(gradients[::order], -1)] if problem.joined else gradients)]


def both(name: str, problem: Glu, cut: Tuning | None) -> list[KernelSpec]:
    return [glu.forward(f"{name}_fwd", problem, cut), glu.backward(f"{name}_bwd", problem, cut)]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want).norm() / want.norm())


def edges() -> torch.Tensor:
    """Gates so large that a careless formula overflows, and one that is no number."""
    return torch.tensor([[-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, float("nan")]])


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """All acts, ragged rows and tiles, halves of a packed tensor and turned leading dims; and extreme gates."""
    problems = dict(PROBLEMS)
    for act, limit in itertools.product(("silu", "quick_gelu", "gelu_tanh", "gelu_erf"), (0.0, 2.0)):
        problems[f"edge_{act}_{limit:.0f}"] = Glu(8, 1, "f32", act, limit=limit), None
    specs = [spec for name, (problem, cut) in problems.items() for spec in both(name, problem, cut)]
    cases: list[Case] = []
    wanted: list[tuple[Glu, list[torch.Tensor]]] = []
    for name, (problem, _) in problems.items():
        number = len(problem.operands)
        for leading, layout in zip(LEADING[: 1 if name.startswith("edge") else 3], LAYOUTS, strict=False):
            operands = draw(problem, leading, layout, number)
            dy = draw(replace(problem, spaced=False), leading, layout, number + 1)[0]
            if name.startswith("edge"):
                dy, operands = torch.ones(1, 8), [edges(), torch.ones(1, 8)]
            want = exact(problem, dy, *operands)
            cases += [(f"{name}_fwd", tuple(operands)), (f"{name}_bwd", (dy, *operands))]
            wanted += [(problem, want[:1]), (problem, want[1:])]
    for (name, inputs), (problem, want), (got, _) in zip(cases, wanted, interpret(specs, cases, tmp_path), strict=True):
        # The interpreter cuts to bf16 where a GPU rounds, so the rounding costs twice as much here.
        bound = {"f32": 2e-6, "f16": 1e-3, "bf16": 8e-3}[problem.dtype]
        for result, ideal in zip(got, want, strict=True):
            assert result.dtype is inputs[0].dtype and result.is_contiguous()
            if not name.startswith("edge"):
                assert error(result, ideal) <= bound, name
                continue
            # Of a gate that is no number, torch gives the gradient past a limit as 0.
            shown = slice(-1) if problem.limit and name.endswith("bwd") else slice(None)
            pair = result.double()[:, shown], ideal[:, shown]
            torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", [name for name, (problem, _) in PROBLEMS.items() if problem.act != "gelu_erf"])
def test_twin(name: str) -> None:
    problem = PROBLEMS[name][0]
    module = types.ModuleType("twins")
    exec(reference_text(both("glu", problem, None)), module.__dict__)
    operands = draw(problem, LEADING[1], "packed", len(problem.operands))
    dy = draw(replace(problem, spaced=False), LEADING[1], "packed", len(problem.operands) + 1)[0]
    gradients = module.glu_bwd(dy, *operands)
    got = [module.glu_fwd(*operands), *(gradients if isinstance(gradients, tuple) else [gradients])]
    for result, want in zip(got, exact(problem, dy, *operands), strict=True):
        assert error(result, want) <= {"f32": 1e-6, "f16": 2e-3, "bf16": 1e-2}[problem.dtype]


def test_sixteen_bytes_at_a_time(tmp_path: Path) -> None:
    """The aligned variants load and store vectors only, of halves of a packed tensor with leading dims too, and of its
    columns in turns."""
    problems = {
        "wide": Glu(14336, 2, "bf16", "silu"),
        "odd": Glu(176, 2, "f32", "gelu_erf", limit=7.0),
        "turns": Glu(5632, 2, "bf16", "silu", joined=True, layout="interleaved", spaced=True),
    }
    texts = ptx_of([spec for name, problem in problems.items() for spec in both(name, problem, None)], tmp_path)
    ways = [f"{name}_{way}" for name in problems for way in ("fwd", "bwd")]
    whole = {way: f"{way}{'_whole' * way.startswith('turns')}.aligned" for way in ways}
    assert set(texts) == {*ways, *whole.values()}
    for name in (name for name in texts if name.endswith(".aligned")):
        accesses = re.findall(r"(?:ld|st)\.global\S*", texts[name])
        assert len(accesses) >= 3 and all(".v4.b32" in access for access in accesses), (name, accesses)


NODE = """
func @f(%dy: bf16[B, S, 176], %gate: bf16[B, S, 176], %up: bf16[B, S, 176]) {
  %dgate: bf16[B, S, 176], %dup: bf16[B, S, 176] = glu_grad(%dy, %gate, %up) {act = "quick_gelu", limit = 7.0}
  return %dgate, %dup
}
"""
RELU = """
func @f(%x: f16[B, 96]) {
  %y: f16[B, 96] = squared_relu(%x)
  return %y
}
"""


def node(text: str, *changes: tuple[str, str]) -> Node:
    for old, new in changes:
        text = text.replace(old, new)
    return module_of(text).functions["f"].nodes[0]


def test_problem_of_a_node() -> None:
    assert glu.problem_of(node(NODE)) == Glu(176, 2, "bf16", "quick_gelu", limit=7.0)
    silu = glu.problem_of(node(NODE, ('"quick_gelu", limit = 7.0', '"silu", alpha = 2.0, offset = 1.0')))
    assert silu == Glu(176, 2, "bf16", "silu", offset=1.0), "alpha means nothing to silu"
    turns = node(
        NODE,
        ("%dgate: bf16[B, S, 176], %dup: bf16[B, S, 176] = glu_grad(", "%dgate: bf16[B, S, 352] = glu_grad_joined("),
        ("return %dgate, %dup", "return %dgate"),
        ("limit = 7.0", 'layout = "interleaved"'),
    )
    assert glu.problem_of(turns) == Glu(176, 2, "bf16", "quick_gelu", joined=True, layout="interleaved", spaced=True)
    assert glu.problem_of(node(RELU)) == Glu(96, 1, "f16", "squared_relu")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([("176", "4*S")], "the last dim 4*S is not a known number"),
        ([("bf16", "f64")], "the operands are f64"),
        (
            [("%dy: bf16", "%dy: f32"), ("%dgate: bf16", "%dgate: f32"), ("%dup: bf16", "%dup: f32")],
            "the operands are bf16 and f32; the kernel takes one dtype",
        ),
        ([("[B, S, 176]", "[B, S, 2, 3, 176]")], "the operands have 5 dims"),
    ],
)
def test_refusals_name_the_reason(changes: list[tuple[str, str]], reason: str) -> None:
    assert reason in str(glu.problem_of(node(NODE, *changes)))


@pytest.mark.parametrize(("size", "columns"), [(14336, 2048), (11008, 1024), (5632, 512), (176, 64), (7, 64)])
def test_rows_are_cut_with_few_idle_lanes(size: int, columns: int) -> None:
    cut = glu.forward_tuning(Glu(size, 1, "bf16", "silu"))
    assert cut.columns == columns and cut.rows * cut.columns == 2048


def test_source_says_what_it_computes() -> None:
    text = kernels_text([glu.forward("unit", Glu(8, 1, "bf16", "quick_gelu", limit=7.0, offset=1.0))])
    assert "y = gate * sigmoid(1.702 * gate) * (up + 1.0), gate at most 7.0, up within +-7.0" in text
