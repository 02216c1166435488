"""expert-bias: which functions count, what is handed through calls, and which biases it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mgraph.errors import PassError
from mgraph.ir.graph import Module, StateKind
from mgraph.ir.parser import parse_module
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.counting import count_states
from mgraph.passes.expert_bias import ExpertBias

TEXT = """mgraph-ir 1
module "m"
dim B 1..
state @a.bias: f32[4] = buffer
state @b.bias: f32[4] = buffer
state @acc: f32[] = scalar transient
func @microbatch(%x: f32[B, 4]) {
  %y: f32[B, 4] = call @outer(%x; @a.bias) AT
  %z: f32[B, 4] = call @outer(%y; @b.bias) AT
  %s: f32[] = aten.sum.default(%z) AT
  %t: f32[] = accumulate(@acc, %s) AT
  return %s, %t
}
func @outer(%x: f32[B, 4]; %bias: f32[4]) {
  %y: f32[B, 4] = call @inner(%x; %bias) AT
  return %y
}
func @inner(%x: f32[B, 4]; %bias: f32[4]) {
  %w: f32[B, 2], %i: i64[B, 2] = moe_route(%x, %bias) {score = "sigmoid", top_k = 2} AT
  %r: f32[2*B, 4], %o: i64[2*B], %e: i32[4] = moe_dispatch(%x, %i) {num_experts = 4, others = true} AT
  %v: f32[B, 2], %j: i64[B, 2] = moe_route(%x, %bias) {score = "sigmoid", top_k = 2} BACK
  %n: f32[B, 4] = aten.cat.default(%w, %v) {args = ["tensors.0", "tensors.1"], dim = 1} AT
  return %n
}
func @finish(%lr: f32[]) {
  %f: bool[] = all_finite(@acc) AT
  %r: f32[] = zero(@acc) AT
  return %f, %r
}
entry microbatch = @microbatch -> (loss_sum) updates (@acc)
entry finish = @finish -> (finite) updates (@acc)
"""


ROUTE = '  %w: f32[B, 2], %i: i64[B, 2] = moe_route(%x, %bias) {score = "sigmoid", top_k = 2} AT\n'
SCORES = "  %scores: f32[B, 4] = aten.sigmoid.default(%x) AT\n"
CHOICE = "  %w: f32[B, 2], %i: i64[B, 2] = aten.topk.default(%choice) {k = 2} AT\n"
NOISE_OVER_BOTH = f"""{SCORES}  %biased: f32[B, 4] = aten.add.Tensor(%scores, %bias) AT
  %noise: f32[B, 4] = aten.add.Tensor(%x) {{other = 1}} AT
  %choice: f32[B, 4] = aten.mul.Tensor(%biased, %noise) AT
{CHOICE}"""
NOISE_BESIDE_A_VIEW = f"""{SCORES}  %noisy: f32[B, 4] = aten.add.Tensor(%scores, %x) AT
  %row: f32[1, 4] = reshape(%bias) {{shape = [1, 4]}} AT
  %vector: f32[4] = reshape(%row) {{shape = [4]}} AT
  %choice: f32[B, 4] = aten.add.Tensor(%vector, %noisy) AT
{CHOICE}"""
NO_BIAS = f"""{SCORES}  %choice: f32[B, 4] = aten.mul.Tensor(%scores, %x) AT
{CHOICE}"""


def module(text: str = TEXT) -> Module:
    """Two layers, each a function within a function, with a second route as recomputation makes it."""
    at = 'forward at "layers.*" "model.py":3 by capture'
    made = parse_module(text.replace("AT", at).replace("BACK", at.replace("forward", "backward", 1)))
    verify(made)
    return made


def with_kind(before: Module, kind: StateKind) -> Module:
    """The module with the second bias of another kind."""
    other = replace(before.state["b.bias"], kind=kind)
    return replace(before, state={**before.state, "b.bias": other})


def test_loads_go_through_calls_and_only_forward_nodes_count() -> None:
    report = Report()
    after = ExpertBias(rate=0.25).run(module(), report)
    verify(after)
    assert report.counts == {"biases": 2}
    loads = count_states(after.state)
    assert [(s.name, str(s.type), s.init, s.persist) for s in loads] == [
        (f"{name}.bias.load", "i64[4]", (("zeros_",),), False) for name in "ab"
    ]
    inner = after.functions["inner"]
    assert [n.op for n in inner.nodes].count("expert_counts") == 1
    (count,) = (n for n in inner.nodes if n.op == "expert_counts")
    assert count.operands[0].name == "i"
    assert [[v.name for v in after.functions[f].slots] for f in ("inner", "outer")] == [["bias", "bias.load"]] * 2
    passed = [[v.name for v in n.operands] for n in after.functions["microbatch"].nodes if n.op == "call"]
    assert passed == [["x", "a.bias", "a.bias.load"], ["y", "b.bias", "b.bias.load"]]
    assert after.entries["microbatch"].updates == ("acc", "a.bias.load", "b.bias.load")
    assert after.entries["finish"].updates == ("acc", "a.bias.load", "b.bias.load", "a.bias", "b.bias")
    (update,) = (n for n in after.functions["finish"].nodes if n.op == "expert_bias_update")
    assert update.attrs == {"rate": 0.25}
    assert [v.name for v in update.operands] == ["a.bias", "b.bias", "a.bias.load", "b.bias.load", "f"]


def test_a_bias_that_two_layers_share_has_one_load() -> None:
    before = module()
    (first, second, *rest) = before.functions["microbatch"].nodes
    shared = replace(second, operands=(second.operands[0], first.operands[1]))
    function = replace(before.functions["microbatch"], nodes=(first, shared, *rest))
    after = ExpertBias().run(before.with_function(function), Report())
    verify(after)
    calls = [n for n in after.functions["microbatch"].nodes if n.op == "call"]
    assert [s.name for s in count_states(after.state)] == ["a.bias.load"]
    assert calls[1].operands[-1] is calls[0].results[-1], "the second layer adds to what the first gave"


@pytest.mark.parametrize(
    ("kind", "said"), [(StateKind.PARAM, "a parameter of its class"), (StateKind.SCALAR, "no buf")]
)
def test_a_bias_that_is_no_buffer_is_refused(kind: StateKind, said: str) -> None:
    before = with_kind(module(), kind)
    with pytest.raises(PassError, match=f"the router's bias b.bias is {said}.*, which the rate cannot move") as caught:
        ExpertBias().run(before, Report())
    assert caught.value.where == "model.py:3" and caught.value.hint
    after = ExpertBias(rate=0.0, report=True).run(before, Report())
    assert [s.name for s in count_states(after.state)] == ["a.bias.load", "b.bias.load"], "loads are told of any"


def as_rows() -> str:
    """The text with biases [1, 4], as a class has them that squeezes them."""
    routed = ROUTE.replace("%bias", "%vector")
    text = TEXT.replace(ROUTE, f"  %vector: f32[4] = reshape(%bias) {{shape = [4]}} AT\n{routed}")
    return text.replace("moe_route(%x, %bias)", "moe_route(%x, %vector)").replace("bias: f32[4]", "bias: f32[1, 4]")


@pytest.mark.parametrize(
    ("kind", "said"),
    [(StateKind.PARAM, "a.bias is a parameter"), (StateKind.BUFFER, r"a.bias is f32\[1, 4\], and not")],
)
def test_a_bias_in_another_form_is_told_as_what_it_is(kind: StateKind, said: str) -> None:
    before = module(as_rows())
    state = {n: replace(s, kind=kind) if n.endswith(".bias") else s for n, s in before.state.items()}
    with pytest.raises(PassError, match=said):
        ExpertBias().run(replace(before, state=state), Report())


def test_a_bias_that_is_computed_is_refused() -> None:
    made = f"  %made: f32[4] = aten.neg.default(%bias) AT\n{ROUTE.replace('%bias', '%made')}"
    with pytest.raises(PassError, match="the router's bias %made is computed, and no buffer"):
        ExpertBias().run(module(TEXT.replace(ROUTE, made)), Report())


@pytest.mark.parametrize("router", [NOISE_OVER_BOTH, NOISE_BESIDE_A_VIEW])
def test_a_router_that_was_not_raised_has_a_bias_too(router: str) -> None:
    after = ExpertBias(rate=0.25).run(module(TEXT.replace(ROUTE, router)), Report())
    verify(after)
    assert [s.name for s in count_states(after.state)] == ["a.bias.load", "b.bias.load"]
    (update,) = (n for n in after.functions["finish"].nodes if n.op == "expert_bias_update")
    assert [v.name for v in update.operands[:2]] == ["a.bias", "b.bias"]


def test_a_router_without_a_bias_has_none_to_move() -> None:
    with pytest.raises(PassError, match="no router has a bias that its load could move"):
        ExpertBias().run(module(TEXT.replace(ROUTE, NO_BIAS)), Report())


@pytest.mark.parametrize("taken", ["%d", "%i"])
def test_what_goes_to_experts_is_what_counts(taken: str) -> None:
    """A router may drop some of what it chose: with `%d` experts get what is left, else what was chosen."""
    lines = [
        "  %none: i64[B, 2] = aten.full_like.default(%i) {fill_value = 4} AT",
        "  %keep: bool[B, 2] = aten.gt.Scalar(%w) {other = 0.5} AT",
        "  %d: i64[B, 2] = aten.where.self(%keep, %none, %i) AT",
        "  %r: f32[2*B, 4]",
    ]
    text = TEXT.replace(lines[-1], "\n".join(lines)).replace("moe_dispatch(%x, %i)", f"moe_dispatch(%x, {taken})")
    at = 'forward at "layers.*" "model.py":3 by capture'
    back = at.replace("forward", "backward", 1)
    made = parse_module(text.replace("AT", at).replace("BACK", back))
    after = ExpertBias(report=True).run(made, Report())
    (count,) = (n for n in after.functions["inner"].nodes if n.op == "expert_counts")
    assert count.operands[0].name == taken.removeprefix("%")
