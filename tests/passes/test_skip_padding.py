"""skip-padding: tokens of no request choose no expert, guards, and a step of a model with padding and without."""

from __future__ import annotations

import pytest
import torch

from mgraph.ir.interpreter import run
from mgraph.passes.fuse_experts import FuseExperts
from mgraph.passes.skip_padding import SkipPadding
from tests.passes.raising import inputs_of, ops, raised

_MATRICES = ", ".join(f"%{name}: bf16[4, 8, 8]" for name in ("wg", "wu", "wd"))
_STEP = "%keys: bf16[16, 1, 8], %starts: i32[4], %lengths: i32[3], %blocks: i32[3, 1]"
_MIXED = "paged_attention(%q, %keys, %keys, %starts, %lengths, %blocks) {block_size = 16, scale = 1.0}"
LAYER = f"""
func @f(%x: bf16[S, 8], %logits: f32[S, 4], {_STEP}, {_MATRICES}) {{
  %q: bf16[S, 1, 8] = reshape(%x) {{shape = [S, 1, 8]}}
  %mixed: bf16[S, 1, 8] = {_MIXED}
  %weights: f32[S, 2], %indices: i64[S, 2] = moe_route(%logits) {{top_k = 2, renormalize = true}}
  %rows: bf16[2*S, 8], %order: i64[2*S], %offsets: i32[4] = moe_dispatch(%x, %indices) {{num_experts = 4}}
  %gate: bf16[2*S, 8] = grouped_matmul(%rows, %wg, %offsets)
  %up: bf16[2*S, 8] = grouped_matmul(%rows, %wu, %offsets)
  %y: bf16[2*S, 8] = glu(%gate, %up) {{act = "silu"}}
  %out: bf16[2*S, 8] = grouped_matmul(%y, %wd, %offsets)
  %sum: bf16[S, 8] = moe_combine(%out, %weights, %order) {{dtype = f32}}
  return %sum, %mixed, %offsets
}}
"""
STEP = {
    "starts": torch.tensor([0, 2, 3, 3], dtype=torch.int32),
    "lengths": torch.tensor([2, 1, 0], dtype=torch.int32),
    "blocks": torch.zeros(3, 1, dtype=torch.int32),
}
"""Two requests of two tokens and one, a third that is padding, and tokens behind them."""


@pytest.mark.parametrize("fused", [False, True])
def test_padding_chooses_no_expert(fused: bool) -> None:
    """Tokens of requests get what they got; of what is behind them no expert has a row, and the sum is 0."""
    before, after, report = raised(SkipPadding(), LAYER)
    assert len(report.matches) == 1 and not report.near_misses
    if fused:
        after = FuseExperts(sums=True).run(after, report)
        found = ops(after.functions["f"])
        assert not {"real_choice", "moe_dispatch", "moe_combine"} & set(found), found
        assert found["moe_route_order"] == found["expert_glu"] == found["expert_sum"] == 1
    torch.manual_seed(0)
    inputs = inputs_of(before, STEP)
    want, got = (list(run(module, "forward", inputs, {}, lifted=True)[0].values()) for module in (before, after))
    torch.testing.assert_close(got[0][:3], want[0][:3], rtol=1e-12, atol=1e-12)
    assert bool((got[0][3:] == 0).all()) and int(got[2][-1]) == 6 < int(want[2][-1])


def test_an_order_that_others_read() -> None:
    text = LAYER.replace("return %sum", "%twice: i64[2*S] = aten.neg.default(%order)\n  return %twice, %sum")
    before, after, report = raised(SkipPadding(), text)
    assert after is before and "%order is read by aten.neg.default" in report.near_misses[0].detail


def test_experts_without_attention() -> None:
    before, after, report = raised(SkipPadding(), LAYER.replace(_MIXED, "aten.neg.default(%q)"))
    assert after is before and "no attention says where all end" in report.near_misses[0].detail
