"""How nodes are written: collectives in two halves, and sums of many tensors into state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.codegen.step import step_text
from mgraph.ir.parser import parse_module
from mgraph.runtime import v1
from mgraph.step_order import order_text, read_step_order

BY = 'forward at "" "model.py":1 by test'
PART = "bf16[4, 6]{fsdp=P(sum)}"
COLLECTIVES = f"""\
mgraph-ir 1
module "m"
axis fsdp = 1
state @a: bf16[4, 6]{{fsdp=S(0)}} = param trainable init [["zeros_"]]
state @b: f32[6, 2]{{fsdp=S(0)}} = param trainable init [["zeros_"]]

func @main(%g: {PART}, %h: {PART}) {{
  %p: pending<bf16[4, 6]>, %q: pending<f32[6, 2]> = all_gather_start(@a, @b) {{axis = "fsdp", dim = 0}} {BY}
  %s: pending<f32[4, 6]{{fsdp=S(1)}}> = reduce_scatter_start(%g) {{axis = "fsdp", dim = 1, wide = true}} {BY}
  %a: bf16[4, 6], %b: f32[6, 2] = wait(%p, %q) {BY}
  %t: f32[4, 6]{{fsdp=S(1)}} = wait(%s) {BY}
  %u: bf16[4, 6]{{fsdp=S(0)}} = reduce_scatter(%h) {{axis = "fsdp", dim = 0}} {BY}
  %x: f32[6, 2] = aten.mul.Tensor(%b, %b) {BY}
  %y: bf16[6, 4] = aten.t.default(%a) {BY}
  %z: bf16[6, 4] = aten.exp.default(%y) {BY}
  %v: bf16[4, 6]{{fsdp=S(0)}} = aten.exp.default(%u) {BY}
  return %t, %v, %x, %z
}}

entry main = @main -> (t, v, x, z)
"""


def test_collectives_in_two_halves() -> None:
    text = step_text(parse_module(COLLECTIVES))
    for line in (
        'pending = rt.all_gather_start([state["a"], state["b"]], "fsdp", 0)',
        'pending_1 = rt.reduce_scatter_start([g], "fsdp", 1, wide=True)',
        "a, b = rt.wait(pending)",
        "t = rt.wait(pending_1)[0]",
        'rt.reduce_scatter([h], "fsdp", 0)[0]',
        "a.t().exp()",
    ):
        assert line in text, text
    order = "all_gather@fsdp reduce_scatter@fsdp reduce_scatter@fsdp"
    assert order_text(read_step_order(text)) == {"main": order}


def test_over_one_rank_nothing_of_the_caller_is_written_over() -> None:
    """There a gathered tensor is the state itself, so no result may take its memory."""
    scope: dict[str, Any] = {}
    exec(step_text(parse_module(COLLECTIVES)), scope)
    state = {"a": torch.randn(4, 6).bfloat16(), "b": torch.randn(6, 2)}
    inputs = [torch.randn(4, 6).bfloat16() for _ in range(2)]
    kept = [tensor.clone() for tensor in (*state.values(), *inputs)]
    t, v, x, z = scope["main"](state, *inputs)
    assert all(torch.equal(a, b) for a, b in zip((*state.values(), *inputs), kept, strict=True))
    expected = inputs[0].float(), inputs[1].exp(), state["b"].square(), state["a"].t().exp()
    for found, wanted in zip((t, v, x, z), expected, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_what_is_sent_dies_at_the_start_and_what_is_gathered_at_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle holds what it needs, so a large gradient that was copied into a message is freed at once."""
    large = COLLECTIVES.replace("4, 6", "640, 64").replace("6, 4", "64, 640").replace("6, 2", "64, 2")
    made = f"  %m: {PART} = aten.cos.default(%g) {BY}\n  %s:".replace("4, 6", "640, 64")
    text = step_text(parse_module(large.replace("  %s:", made).replace("start(%g)", "start(%m)")))
    lines = [line.strip() for line in text.splitlines()]
    start = next(i for i, line in enumerate(lines) if "reduce_scatter_start" in line)
    assert (
        lines[start] == 'pending_1 = rt.reduce_scatter_start([m], "fsdp", 1, wide=True)' and lines[start + 1] == "del m"
    )


TOTALS = f"""\
mgraph-ir 1
module "m"
state @a: f32[4] = grad transient init [["zeros_"]]
state @b: f32[2, 3] = grad transient init [["zeros_"]]

func @main(%x: bf16[4], %y: f32[2, 3]) {{
  %new_a: f32[4], %new_b: f32[2, 3] = accumulate_each_(@a, @b, %x, %y) {BY}
  return %new_a, %new_b
}}

entry main = @main -> () updates (@a, @b)
"""


def test_sums_into_many_states() -> None:
    text = step_text(parse_module(TOTALS))
    assert 'rt.accumulate_each_([state["a"], state["b"]], [x, y])' in text and "copy_" not in text
    fresh = step_text(parse_module(TOTALS.replace(BY, "{fresh = true} " + BY)))
    assert 'rt.copy_([state["a"], state["b"]], [x, y])' in fresh and "accumulate_each_" not in fresh
    scope: dict[str, Any] = {"rt": v1}
    exec(text, scope)
    state = {"a": torch.ones(4), "b": torch.ones(2, 3)}
    x: Tensor = torch.full((4,), 2**-9, dtype=torch.bfloat16)
    assert scope["main"](state, x, torch.ones(2, 3)) == ()
    assert torch.equal(state["a"], torch.full((4,), 1 + 2**-9)) and torch.equal(state["b"], torch.full((2, 3), 2.0))
