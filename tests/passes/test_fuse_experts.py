"""fuse-experts: layers forward and backward, in two functions and in one, each guard broken once, and a whole model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mgraph.compiler import build_module
from mgraph.ir.graph import Function, Module, StateKind
from mgraph.ir.interpreter import run
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.types import DType
from mgraph.passes.fuse_experts import FuseExperts
from mgraph.recipe import Recipe
from tests.passes.raising import inputs_of, ops, raised

MATRICES = "%wg: bf16[4, 6, 5], %wu: bf16[4, 6, 5], %wd: bf16[4, 5, 6]"

FORWARD = """
  %x: bf16[S, 6] = reshape(%h) {shape = [S, 6]}
  %weights: f32[S, 2], %indices: i64[S, 2] = moe_route(%logits) {top_k = 2, renormalize = true}
  %rows: bf16[2*S, 6], %order: i64[2*S], %offsets: i32[4] = moe_dispatch(%x, %indices) {num_experts = 4}
  %gate: bf16[2*S, 5] = grouped_matmul(%rows, %wg, %offsets)
  %up: bf16[2*S, 5] = grouped_matmul(%rows, %wu, %offsets)
  %y: bf16[2*S, 5] = glu(%gate, %up) {act = "quick_gelu", alpha = 1.7, limit = 1.5}
  %out: bf16[2*S, 6] = grouped_matmul(%y, %wd, %offsets)
  %sum: bf16[S, 6] = moe_combine(%out, %weights, %order) {dtype = f32}
"""

BACKWARD = """
  %drows: bf16[2*S, 6], %dweights: f32[S, 2] = moe_combine_grad(%dy, %out, %weights, %order)
  %dh: bf16[2*S, 5] = grouped_matmul(%drows, %wd, %offsets) {transpose_w = true}
  %dwd: bf16[4, 5, 6] = grouped_outer(%y, %drows, %offsets)
  %dgate: bf16[2*S, 5], %dup: bf16[2*S, 5] = glu_grad(%dh, %gate, %up) {act = "quick_gelu", alpha = 1.7, limit = 1.5}
  %b: bf16[2*S, 6] = grouped_matmul(%dup, %wu, %offsets) {transpose_w = true}
  %dwu: bf16[4, 6, 5] = grouped_outer(%rows, %dup, %offsets)
  %a: bf16[2*S, 6] = grouped_matmul(%dgate, %wg, %offsets) {transpose_w = true}
  %dwg: bf16[4, 6, 5] = grouped_outer(%rows, %dgate, %offsets)
  %both: bf16[2*S, 6] = aten.add.Tensor(%b, %a)
  %dx: bf16[S, 6] = moe_dispatch_grad(%both, %order) {top_k = 2}
"""

_TYPES = {
    "h": "bf16[1, S, 6]",
    "logits": "f32[S, 4]",
    "dy": "bf16[S, 6]",
    "weights": "f32[S, 2]",
    "rows": "bf16[2*S, 6]",
    "order": "i64[2*S]",
    "offsets": "i32[4]",
    "out": "bf16[2*S, 6]",
    **dict.fromkeys(("gate", "up", "y"), "bf16[2*S, 5]"),
}
_INPUTS = f"%h: {_TYPES['h']}, %logits: {_TYPES['logits']}, %dy: {_TYPES['dy']}, {MATRICES}"
_GRADS = "%dx, %dwg, %dwu, %dwd, %dweights"
_KEPT = ("weights", "rows", "order", "offsets", "gate", "up", "y", "out")

ONE = f"func @f({_INPUTS}) {{{FORWARD}{BACKWARD}  return %sum, {_GRADS}\n}}"


def _call(layer: int) -> tuple[str, str]:
    """The calls of a layer forward and backward; the second layer's are the first ones backward."""
    made = ", ".join(f"%{name}{layer}: {_TYPES[name]}" for name in _KEPT)
    source = "%h" if layer == 1 else "%h2"
    forward = f'  %sum{layer}: bf16[S, 6], {made} = call @fwd({source}, %logits, %wg, %wu, %wd) {{callee = "fwd"}}\n'
    grads = [
        "%dx: bf16[S, 6]",
        "%dwg: bf16[4, 6, 5]",
        "%dwu: bf16[4, 6, 5]",
        "%dwd: bf16[4, 5, 6]",
        "%dweights: f32[S, 2]",
    ]
    results = ", ".join(grad.replace(":", f"{layer}:") for grad in grads)
    passed = ", ".join(f"%{name}{layer}" for name in _KEPT)
    cotangent = "%dy" if layer == 2 else "%dx2"
    return forward, f'  {results} = call @bwd({source}, {cotangent}, {passed}, %wg, %wu, %wd) {{callee = "bwd"}}\n'


def two_functions() -> str:
    """A layer that is called twice; its backward is in a function of its own."""
    (forward, backward), (forward2, backward2) = _call(1), _call(2)
    view = "  %h2: bf16[1, S, 6] = reshape(%sum1) {shape = [1, S, 6]}\n"
    every = ", ".join(_GRADS.replace("%", "").split(", "))
    grads = ", ".join(f"%{name}{layer}" for layer in (1, 2) for name in every.split(", "))
    kept = ", ".join(f"%{name}" for name in _KEPT)
    handed = ", ".join(f"%{name}: {_TYPES[name]}" for name in ("h", "dy", *_KEPT))
    main = f"func @main({_INPUTS}) {{\n{forward}{view}{forward2}{backward2}{backward}  return %sum2, {grads}\n}}\n"
    forward_ = (
        f"func @fwd(%h: {_TYPES['h']}, %logits: {_TYPES['logits']}, {MATRICES}) {{{FORWARD}  return %sum, {kept}\n}}\n"
    )
    return f"{main}{forward_}func @bwd({handed}, {MATRICES}) {{{BACKWARD}  return {_GRADS}\n}}"


def transposed(text: str) -> str:
    """The same with matrices [E, out, in]."""
    text = text.replace("bf16[4, 6, 5]", "bf16[4, -, 6]").replace("bf16[4, 5, 6]", "bf16[4, 6, 5]")
    text = text.replace("bf16[4, -, 6]", "bf16[4, 5, 6]").replace("{transpose_w = true}", "")
    for name in ("gate: bf16[2*S, 5] = grouped_matmul(%rows, %wg", "up: bf16[2*S, 5] = grouped_matmul(%rows, %wu"):
        text = text.replace(f"{name}, %offsets)", f"{name}, %offsets) {{transpose_w = true}}")
    text = text.replace("(%y, %wd, %offsets)", "(%y, %wd, %offsets) {transpose_w = true}")
    for left, right in (("y", "drows"), ("rows", "dup"), ("rows", "dgate")):
        text = text.replace(f"grouped_outer(%{left}, %{right}", f"grouped_outer(%{right}, %{left}")
    return text


def assert_same(before: Module, after: Module, **given: Tensor) -> None:
    """Equal in float64; in bf16, of so few numbers, of errors that are not much larger in the mean."""
    torch.manual_seed(0)
    inputs = inputs_of(before, given)
    exact, fused = (run(module, "forward", inputs, {}, lifted=True)[0] for module in (before, after))
    low = [run(module, "forward", inputs, {}, lifted=False)[0] for module in (before, after)]
    for name, value in exact.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-12, atol=1e-12)
        errors = [float((made[name].double() - value).norm()) for made in low]
        assert errors[1] <= 3 * errors[0] + 1e-6 * float(value.norm()), (name, errors)


_ROWS = ("rows", "grouped_matmul", "grouped_matmul_1", "glu", "grouped_matmul_2")
"""Names of tensors of a row a pair, in the layer of a model."""

FUSED_FORWARD = {"reshape": 1, "moe_route_order": 1, "expert_glu": 1, "grouped_matmul": 1, "moe_combine": 1}
FUSED_BACKWARD = {"expert_glu_grad": 1, "gathered_outer": 3, "grouped_matmul_sum": 1, "moe_dispatch_grad": 1}


def names(function: Function) -> list[str]:
    return [value.name for value in function.results]


@pytest.mark.parametrize("turned", [False, True])
def test_a_layer_that_is_called_twice(turned: bool) -> None:
    """Rows, what is activated, and what the experts give are no longer handed to the backward."""
    text = transposed(two_functions()) if turned else two_functions()
    before, after, report = raised(FuseExperts(), text)
    assert ops(after.functions["fwd"]) == FUSED_FORWARD
    assert ops(after.functions["bwd"]) == {**FUSED_BACKWARD, "reshape": 1}
    assert names(after.functions["fwd"]) == ["sum", "weights", "order", "offsets", "gate", "up"]
    assert len(report.matches) == 2 and not report.near_misses
    assert_same(before, after)


@pytest.mark.parametrize("turned", [False, True])
def test_all_in_one_function(turned: bool) -> None:
    before, after, report = raised(FuseExperts(), transposed(ONE) if turned else ONE)
    assert ops(after.functions["f"]) == {**FUSED_FORWARD, **FUSED_BACKWARD}
    sides = [node.attrs["side"] for node in after.functions["f"].nodes if node.op == "gathered_outer"]
    assert sides == (["left", "right", "right"] if turned else ["right", "left", "left"])
    assert len(report.matches) == 2
    assert_same(before, after)


def test_a_forward_alone_keeps_nothing() -> None:
    """Without a router beside it, the order is made of the indices."""
    text = f"func @f(%indices: i64[S, 2], %weights: f32[S, 2], {_INPUTS}) {{{FORWARD}  return %sum\n}}"
    text = "\n".join(line for line in text.split("\n") if "moe_route(" not in line)
    before, after, report = raised(FuseExperts(), text)
    (unit,) = [node for node in after.functions["f"].nodes if node.op == "expert_glu"]
    assert unit.attrs["keep"] is False and len(unit.results) == 1 and len(report.matches) == 1
    assert ops(after.functions["f"])["moe_order"] == 1
    indices = torch.tensor([[0, 1], [3, 1], [3, 0], [1, 3], [0, 3]])
    assert_same(before, after, indices=indices)


def packed(form: str, *, turned: bool, biased: bool) -> str:
    """A layer forward, both matrices in one tensor."""
    halves = ("{dim = 1, end = 5}", "{dim = 1, start = 5}")
    first, second = halves if form == "halves" else ("{dim = 1, step = 2}", "{dim = 1, start = 1, step = 2}")
    params = f"%h: {_TYPES['h']}, %logits: {_TYPES['logits']}, %wd: bf16[4, 5, 6], %w: bf16[4, 6, 10]"
    params = params.replace("[4, 6, 10]", "[4, 10, 6]") if turned else params
    more, bias = (", %b: bf16[4, 10], %bd: bf16[4, 6]", ", %b") if biased else ("", "")
    lines = FORWARD.strip("\n").split("\n")
    lines[3:5] = [
        f"  %both: bf16[2*S, 10] = grouped_matmul(%rows, %w, %offsets{bias}) {{transpose_w = {str(turned).lower()}}}",
        f"  %gate: bf16[2*S, 5] = aten.slice.Tensor(%both) {first}",
        f"  %up: bf16[2*S, 5] = aten.slice.Tensor(%both) {second}",
    ]
    text = "\n".join(lines)
    text = text.replace("(%y, %wd, %offsets)", "(%y, %wd, %offsets, %bd)") if biased else text
    return f"func @f({params}{more}) {{\n{text}\n  return %sum\n}}"


@pytest.mark.parametrize(
    ("form", "turned", "biased"), [("halves", True, False), ("pairs", False, True), ("pairs", True, False)]
)
def test_packed_matrices_and_sums(form: str, turned: bool, biased: bool) -> None:
    before, after, report = raised(FuseExperts(sums=True), packed(form, turned=turned, biased=biased))
    assert ops(after.functions["f"]) == {"reshape": 1, "moe_route_order": 1, "expert_glu": 1, "expert_sum": 1}
    (unit,) = [node for node in after.functions["f"].nodes if node.op == "expert_glu"]
    assert (unit.attrs["packed"], unit.attrs["transpose_w"], len(unit.operands)) == (form, turned, 4 + biased)
    assert len(report.matches) == 2 and not report.near_misses
    assert_same(before, after)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("end = 5}", "end = 5}\n  %z: bf16[2*S, 10] = aten.neg.default(%both)", "%both is read by aten.neg.default"),
        ("glu(%gate, %up)", "glu(%up, %gate)", "neither halves nor pairs"),
        ("return %sum", "return %sum, %gate", "%gate is read by the callers, too"),
        ("return %sum", "return %sum, %out", "%out is read by the callers, too"),
    ],
)
def test_near_misses_of_packed_matrices(old: str, new: str, expected: str) -> None:
    text = packed("halves", turned=True, biased=False).replace(old, new)
    _, _, report = raised(FuseExperts(sums=True), text)
    assert [miss.detail for miss in report.near_misses if expected in miss.detail], report.near_misses


def broken(*changes: tuple[str, str]) -> str:
    text = two_functions()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([("bf16", "f32")], "rows are f32, not bf16 or f16"),
        ([("(%dh, %gate, %up) {act", "(%dh, %up, %gate) {act")], "`%up` is not the `%gate` of the unit"),
        ([("limit = 1.5}\n  %b:", "limit = 2.5}\n  %b:")], "the unit is"),
        ([("aten.add.Tensor(%b, %a)", "aten.add.Tensor(%b, %a) {alpha = 2}")], "the sum is of more"),
        ([("grouped_outer(%y, %drows", "grouped_outer(%gate, %drows")], "is not what the unit gave"),
        ([("grouped_outer(%rows, %dup", "grouped_outer(%out, %dup")], "not of the same rows"),
        ([("(%dup, %wu, %offsets) {transpose_w = true}", "(%dup, %wd, %offsets)")], "one matrix is transposed"),
    ],
)
def test_near_misses_backward(changes: list[tuple[str, str]], expected: str) -> None:
    before, after, report = raised(FuseExperts(), broken(*changes))
    assert any(expected.replace("`", "") in miss.detail for miss in report.near_misses), report.near_misses
    assert "expert_glu_grad" not in ops(after.functions["bwd"])
    assert_same(before, after)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("glu(%gate, %up)", "glu(%gate, %gate)", "2 of glu read %gate, expected 1"),
        ("grouped_matmul(%rows, %wu, %offsets)", "aten.neg.default(%gate)", "0 parts of %gate are taken"),
        ("return %sum", "return %rows, %sum", "%rows is read by the callers, too"),
    ],
)
def test_near_misses_forward(old: str, new: str, expected: str) -> None:
    text = f"func @f({_INPUTS}) {{{FORWARD}  return %sum\n}}".replace(old, new)
    before, after, report = raised(FuseExperts(), text)
    assert after is before and expected in report.near_misses[0].detail


def test_a_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and all gradients of a microbatch in float64, with the pass and without."""
    torch.manual_seed(0)
    recipe = Recipe(model="moe-tiny", precision="bf16", target="h100")
    fused = build_module(recipe)
    monkeypatch.setattr(FuseExperts, "run", lambda self, module, report: module)
    plain = build_module(recipe)
    (result,) = [r for r in fused.results if r.name == "fuse-experts"]
    assert [match.function for match in result.report.matches] == ["layer.bwd", "layer", "layer.fwd"]
    assert not result.report.near_misses
    # Of tensors with a row for each pair of token and expert, a layer keeps gate and up; before, it kept these five.
    kept = [
        [v for v in made.module.functions["layer.fwd"].results if v.tensor.dtype is DType.BF16 and v.name in _ROWS]
        for made in (plain, fused)
    ]
    widths = [sum(int(v.tensor.shape[1]) for v in values) for values in kept]
    assert [len(values) for values in kept] == [5, 2] and widths[1] <= 0.6 * widths[0]
    state = {
        name: (0.2 * torch.randn([int(n) for n in s.type.shape])).to(to_torch_dtype(s.type.dtype))
        if s.kind in (StateKind.PARAM, StateKind.BUFFER)
        else torch.zeros([int(n) for n in s.type.shape], dtype=to_torch_dtype(s.type.dtype))
        for name, s in plain.module.state.items()
    }
    batch = {"tokens": torch.randint(256, (2, 9)), "labels": torch.randint(256, (2, 9))}
    runs = [run(made.module, "microbatch", batch, state, lifted=True) for made in (plain, fused)]
    for want, got in zip(*runs, strict=True):
        assert want.keys() == got.keys()
        for name, exact in want.items():
            torch.testing.assert_close(got[name], exact, rtol=1e-9, atol=1e-12, msg=name)
