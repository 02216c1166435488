"""Products with their unit or sum: where they are found, that they compute the same, and what is left as it is."""

from __future__ import annotations

from mgraph.capture import capture
from mgraph.ir.graph import Module
from mgraph.passes.pipeline import PassResult, run_pipeline
from mgraph.passes.verify import TwinCheck
from tests.passes.test_derive_serve import RAISED

SERVE = f"{RAISED},derive-serve{{max_length=24,block_size=4}},canonicalize,cse,dce"


def fused(model: str) -> tuple[Module, PassResult]:
    """The module after the pass, verified on the twin, and the pass's result."""
    module, results = run_pipeline(capture(model), f"{SERVE},fuse-norm,fuse-linear,dce,in-place", [TwinCheck()])
    (result,) = (r for r in results if r.name == "fuse-linear")
    assert result.measured["verify"]["status"] == "verified"
    return module, result


def test_a_decoder_has_all_its_products_in_the_new_ops() -> None:
    module, result = fused("dense-tiny")
    nodes = [node for _, node in module.walk()]
    assert "aten.linear.default" not in {node.op for node in nodes}
    assert sum(node.op == "linear_glu" for node in nodes) == 1
    linears = [node for node in nodes if node.op == "linear"]
    # q, k, v and o of the layer that all share, its down, and the head; the sum after o is that of a norm.
    assert [node.attrs.get("extra") for node in linears].count(("residual",)) == 1 and len(linears) == 6
    assert result.report.counts == {"linear_glu": 1, "linear_residual": 1, "linear": 5}
