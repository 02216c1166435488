"""What a forward hands its backward, exchanged for another value of it, or not, where others read it."""

from __future__ import annotations

import pytest
import torch

from mgraph.ir.graph import Value
from mgraph.ir.interpreter import run
from mgraph.ir.verifier import verify
from mgraph.passes.handed import Exchange, exchanged, obstacle
from mgraph.passes.sources import Sources
from tests.passes.raising import inputs_of, module_of

TEXT = """
func @main(%x: f32[4]) {
  %y1: f32[4], %k1: f32[8] = call @fwd(%x) {callee = "fwd"}
  %y2: f32[4], %k2: f32[8] = call @fwd(%y1) {callee = "fwd"}
  %d2: f32[4] = call @bwd(%y2, %k2) {callee = "bwd"}
  %d1: f32[4] = call @bwd(%d2, %k1) {callee = "bwd"}
  return %d1
}
func @fwd(%a: f32[4]) {
  %u: f32[4] = aten.neg.default(%a)
  %w: f32[8] = aten.repeat.default(%u) {repeats = [2]}
  return %u, %w
}
func @bwd(%d: f32[4], %kept: f32[8]) {
  %g: f32[4] = aten.slice.Tensor(%kept) {end = 4}
  %h: f32[4] = aten.add.Tensor(%d, %g)
  return %h
}
"""


def test_another_value_is_handed() -> None:
    """Here the backward adds the first half of what it is handed; after, another one that adds all of it."""
    module = module_of(TEXT)
    forward, backward = module.functions["fwd"], module.functions["bwd"]
    d, kept = backward.params
    made = Sources(module, backward).made(kept)
    assert made is not None and obstacle(module, backward, kept, made) == ""
    new = Value("whole", forward.params[0].type)
    add = backward.nodes[1].with_values((d, new), backward.results)
    taking = module.with_function(type(backward)("bwd", backward.params, (), (add,), backward.results))
    after = exchanged(taking, "bwd", [Exchange(kept, made, forward.params[0], new)])
    verify(after)
    x = inputs_of(module, {})["x"]
    assert [v.name for v in after.functions["bwd"].params] == ["d", "whole"]
    # x, then -x: both layers' inputs are added to the last result, which is x again.
    (found,) = run(after, "forward", {"x": x}, {})[0].values()
    torch.testing.assert_close(found, x + x - x)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return %d1", "return %d1, %k1", "a result of main"),
        ("call @bwd(%d2, %k1)", "call @bwd(%x2, %k1)", "read by aten.slice.Tensor, too"),
    ],
)
def test_what_others_read_stays(old: str, new: str, expected: str) -> None:
    text = TEXT.replace(old, new)
    text = text.replace("  %d1:", "  %x2: f32[4] = aten.slice.Tensor(%k1) {end = 4}\n  %d1:") if "%x2" in new else text
    module = module_of(text)
    backward = module.functions["bwd"]
    made = Sources(module, backward).made(backward.params[1])
    assert made is not None and expected in obstacle(module, backward, backward.params[1], made)
