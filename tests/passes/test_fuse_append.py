"""Rotation and append in one op: where it is found, that it computes the same, and what is left as it is."""

from __future__ import annotations

import pytest

from mgraph.capture import capture
from mgraph.ir.graph import Module
from mgraph.passes.pipeline import PassResult, run_pipeline
from mgraph.passes.verify import TwinCheck
from tests.passes.test_derive_serve import RAISED
from tests.sampling import sampled

SERVE = f"{RAISED},derive-serve{{max_length=24,block_size=4}},canonicalize,cse,dce"


def fused(model: str) -> tuple[Module, PassResult]:
    """The module after the pass, verified on the twin, and the pass's result."""
    module, results = run_pipeline(capture(model), f"{SERVE},fuse-append,canonicalize,dce,in-place", [TwinCheck()])
    (result,) = (r for r in results if r.name == "fuse-append")
    assert result.measured["verify"]["status"] == "verified"
    return module, result


@pytest.mark.parametrize(
    ("model", "normed"),
    sampled(
        [("dense-tiny", False), ("gemma3-tiny", True), ("qwen3-tiny", True)],
        1,
        always=[("qwen3-tiny", True)],
    ),
)
def test_every_layer_appends_what_it_turns(model: str, normed: bool) -> None:
    module, result = fused(model)
    ops = [node.op for _, node in module.walk()]
    kinds = sum(op == "paged_attention" for op in ops)
    assert ops.count("rope_kv_append_") == kinds == len(result.report.matches)
    assert {"rope", "kv_append"}.isdisjoint(ops)
    appends = [node for _, node in module.walk() if node.op == "rope_kv_append_"]
    assert {len(node.operands) for node in appends} == {10 if normed else 8}
    layer = next(f for f, node in module.walk() if node in appends)
    assert not any(node.op == "aten.permute.default" for node in layer.nodes), "heads are where they were made"


def test_heads_of_which_a_part_turns_are_left() -> None:
    base, _ = run_pipeline(capture("dense-tiny-sinks"), SERVE)
    module, (result,) = run_pipeline(base, "fuse-append")
    assert any(node.op == "kv_append" for _, node in module.walk()) and not result.report.matches
    assert "aten.cat.default is no rotation" in str(result.report.near_misses[0])
