"""Decisions as inputs and outputs: with none given all results are bitwise those of before."""

from __future__ import annotations

import pytest

from mgraph.capture import ModelSpec, capture
from mgraph.ir.graph import Module
from mgraph.passes.pipeline import run_pipeline
from mgraph.passes.verify import verify_pipeline

RAISED = (
    "outline,canonicalize,constant-fold,cse,dce,raise-norm,raise-rope,raise-attention,raise-glu,raise-moe,raise-loss,"
    "cse,dce"
)


def moe(size: str) -> Module:
    return capture(ModelSpec(f"moe-{size}"))


@pytest.mark.parametrize("size", ["tiny", "tiny-grouped", "tiny-capacity"])
def test_every_pass_keeps_the_numbers(size: str) -> None:
    results = verify_pipeline(moe(size), f"{RAISED},replayable-routing,autodiff,recompute{{mode=full}}")
    assert [r.name for r in results if r.measured["verify"]["status"] != "verified"] == []


def test_routers_have_the_names_of_their_layers() -> None:
    module, _ = run_pipeline(moe("tiny-capacity"), f"{RAISED},replayable-routing")
    (node,) = (n for n in module.entry_function("forward").nodes if n.op == "stack_choices")
    assert node.attrs["layers"] == ("layers.0.ffn.router", "layers.1.ffn.router")
    assert node.attrs["experts"] == (8, 8)
    assert module.entries["forward"].outputs == ("loss_sum", "count", "logits", "routing")
    (layer,) = (f for f in module.functions.values() if any(n.op == "moe_dispatch" for n in f.nodes))
    chosen = next(n for n in layer.nodes if n.op == "replay_choice").result
    assert {"moe_weigh", "cast", "moe_capacity"} <= {n.op for n in layer.nodes if chosen in n.operands}
