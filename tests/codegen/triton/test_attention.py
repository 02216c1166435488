"""Attention: the kernel in Triton's interpreter against the op's body in float64, what is refused, and its binaries."""

from __future__ import annotations

import types
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from mgraph.codegen.triton import attention, kernels_text, reference_text
from mgraph.codegen.triton.attention import Attention, Tuning
from mgraph.ir.graph import Node
from tests.codegen.triton.attention_cases import PROBLEMS, draw, error, results
from tests.codegen.triton.interpret_cases import Case, interpret
from tests.passes.raising import module_of

CUT = Tuning(32, 32, 4, 2)


@pytest.mark.skipif(
    version("triton") < "3.7" and version("numpy") >= "2.5",
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """All masks alone and together, odd sizes, heads that share keys, permuted parts of projections."""
    specs = [attention.forward(name, problem, CUT) for name, problem in PROBLEMS.items()]
    cases: list[Case] = [(name, draw(name)) for name in PROBLEMS]
    for (name, inputs), ((out, lse), _) in zip(cases, interpret(specs, cases, tmp_path), strict=True):
        want, want_lse = results(name, inputs)
        bound = {"f16": 1e-3, "bf16": 1e-2}[PROBLEMS[name].dtype]  # The interpreter cuts to bf16 where a GPU rounds.
        assert out.dtype is inputs[0].dtype and lse.dtype is torch.float32
        assert error(out, want) <= bound, name
        assert error(lse, want_lse) <= 2e-6, name


@pytest.mark.parametrize("name", PROBLEMS)
def test_twin(name: str) -> None:
    module = types.ModuleType("twins")
    exec(reference_text([attention.forward("attend", PROBLEMS[name])]), module.__dict__)
    inputs = draw(name)
    out, lse = module.attend(*inputs)
    want, want_lse = results(name, inputs)
    assert error(out, want) <= {"f16": 1e-3, "bf16": 8e-3}[PROBLEMS[name].dtype]
    assert error(lse, want_lse) <= 1e-2


NODE = """
func @f(%q: bf16[B, 8, S, 64], %k: bf16[B, 2, S, 64], %v: bf16[B, 2, S, 64], %ids: i64[B, S], %sinks: bf16[8]) {
  %out: bf16[B, 8, S, 64], %lse: f32[B, 8, S] = attention(%q, %k, %v, %ids, %sinks) {ATTRS}
  return %out
}
""".replace("ATTRS", 'scale = 0.125, causal = true, window = 128, extra = ["segments", "sinks"]')


def node(*changes: tuple[str, str]) -> Node:
    """The node `attention` of a function with such types and attributes."""
    text = NODE
    for old, new in changes:
        text = text.replace(old, new)
    return module_of(text).functions["f"].nodes[0]


ALONE = ("%v, %ids, %sinks)", "%v)"), ('"segments", "sinks"', "")


def test_problem_of_a_node() -> None:
    want = Attention("bf16", 64, 64, 0.125, True, 128, None, (("segments", "i64"), ("sinks", "bf16")))
    assert attention.problem_of(node()) == want
    fused = attention.problem_of(node(*ALONE, (", window = 128", ""), ("64]", "72]")))
    assert fused == "cuDNN's kernel is faster"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([*ALONE, (", window = 128", "")], "cuDNN's kernel is faster"),
        ([("64]", "4*S]")], "are not known numbers"),
        ([("64]", "512]")], "heads are 512 wide"),
        ([("bf16", "f32")], "q is f32"),
        ([("%k: bf16", "%k: f16")], "k f16"),
        ([("scale = 0.125", "scale = -1.0")], "the scale -1.0 is not positive"),
        ([("%ids: i64[B, S]", "%ids: i64[]"), ('"segments"', '"start"')], "start somewhere"),
    ],
)
def test_refusals_name_the_reason(changes: list[tuple[str, str]], reason: str) -> None:
    assert reason in str(attention.problem_of(node(*changes)))


def test_emitted_lines_fit() -> None:
    specs = [attention.forward(name, problem) for name, problem in PROBLEMS.items()]
    for text in (kernels_text(specs), reference_text(specs)):
        assert max(map(len, text.splitlines())) <= 120
