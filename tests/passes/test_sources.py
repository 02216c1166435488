"""Sources: what the parameters of a function stand for, by the calls of it and of another."""

from __future__ import annotations

from mgraph.passes.sources import Sources
from tests.passes.raising import module_of

TEXT = """
func @main(%x: f32[S], %z: f32[S]) {
  %y1: f32[S], %k1: f32[S] = call @fwd(%x, %z) {callee = "fwd"}
  %y2: f32[S], %k2: f32[S] = call @fwd(%y1, %z) {callee = "fwd"}
  %d2: f32[S] = call @bwd(%k2, %y1, %z) {callee = "bwd"}
  %d1: f32[S] = call @bwd(%k1, %x, %d2) {callee = "bwd"}
  return %d1
}
func @fwd(%a: f32[S], %b: f32[S]) {
  %v: f32[S, 1] = reshape(%a) {shape = [S, 1]}
  %u: f32[S] = aten.neg.default(%a)
  %w: f32[S] = aten.add.Tensor(%u, %b)
  return %w, %u
}
func @bwd(%kept: f32[S], %input: f32[S], %other: f32[S]) {
  %g: f32[S] = aten.add.Tensor(%kept, %input)
  %h: f32[S] = aten.add.Tensor(%g, %other)
  return %h
}
"""


def test_a_parameter_is_the_result_that_all_calls_pass() -> None:
    module = module_of(TEXT)
    forward, backward = module.functions["fwd"], module.functions["bwd"]
    kept, given, other = backward.params
    sources = Sources(module, backward)
    made = sources.made(kept)
    assert made is not None and made.value is forward.results[1] and len(made.calls) == 2
    assert made.node is not None and made.node.op == "aten.neg.default"
    assert sources.made(other) is None
    own = sources.made(backward.nodes[0].result)
    assert own is not None and own.calls == () and own.function is backward
    assert sources.is_same(kept, made, forward.results[1]) and not sources.is_same(kept, made, forward.results[0])
    # What both calls are passed by their caller, and a view of it.
    a, b = forward.params
    assert sources.here(made, a) == (given, [])
    assert sources.here(made, forward.nodes[0].result) == (given, [forward.nodes[0]])
    assert sources.here(made, b) is None and sources.here(made, forward.results[0]) is None
