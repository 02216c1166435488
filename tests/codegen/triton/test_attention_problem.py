"""Which nodes our kernels of attention take, and what is said of the others."""

from __future__ import annotations

import pytest

from mgraph.codegen.triton.attention_problem import Attention, problem_of
from mgraph.ir.graph import Node
from tests.passes.raising import module_of

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
    want = Attention("bf16", 64, 64, 0.125, True, 128, None, (("segments", "i64"), ("sinks", "bf16")), share=4)
    assert problem_of(node()) == want
    fused = problem_of(node(*ALONE, (", window = 128", ""), ("64]", "72]")))
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
        ([("%ids: i64", "%ids: u8")], "segments is u8"),
        ([("%ids: i64[B, S]", "%ids: i64[]"), ('"segments"', '"start"')], "start somewhere"),
    ],
)
def test_refusals_name_the_reason(changes: list[tuple[str, str]], reason: str) -> None:
    assert reason in str(problem_of(node(*changes)))
