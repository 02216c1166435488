"""The order of collectives against one that is written out by hand, and the parts that ranks hold."""

from __future__ import annotations

import pytest

from mgraph.ir.collectives import CollectiveOrder, Issued, Overlap, message_bytes, overlap
from mgraph.ir.dims import dim_text, substitute
from mgraph.ir.graph import Module
from mgraph.ir.parser import parse_module
from tests.ir.layers import layers


def written_out(module: Module, function: str) -> list[tuple[str, str]]:
    """Kind and axis of every collective that a function issues, one after the other."""
    found = []
    for node in module.functions[function].nodes:
        if node.op == "call":
            found += written_out(module, str(node.attrs["callee"]))
        elif node.op.partition("_start")[0] in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter"):
            found.append((node.op.removesuffix("_start"), str(node.attrs["axis"])))
    return found


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_runs_have_the_places_of_the_sequence(depth: int) -> None:
    module = layers(depth)
    order, expected = CollectiveOrder(module), written_out(module, "main")
    assert order.length("main") == len(expected) == 2 * depth + 2
    kinds = [(run.issued.kind, run.issued.axis) for run in order.runs("main")]
    assert kinds == [("all_gather", "tp"), ("reduce_scatter", "tp"), ("all_to_all", "tp"), ("all_reduce", "all")]
    for run in order.runs("main"):
        places = [i for i, found in enumerate(expected, 1) if found == (run.issued.kind, run.issued.axis)]
        assert (run.first, run.last, run.times) == (places[0], places[-1], len(places))


def test_functions_without_collectives_are_absent() -> None:
    order = CollectiveOrder(layers())
    assert list(order.items) == ["ahead", "layer", "main"]
    assert [i.node.op if isinstance(i, Issued) else i for i in order.items["main"]][:3] == ["ahead", "layer", "ahead"]


@pytest.mark.parametrize(("dp", "tp"), [(2, 4), ("*", 2), (8, 1)])
def test_elements_of_a_rank(dp: int | str, tp: int) -> None:
    order = CollectiveOrder(layers(dp=dp, tp=tp))
    elements = {}
    for issued in order.issued:
        counts = [order.shares.elements(v.type) for v in (*issued.node.operands, *issued.node.results)]
        elements[issued.kind] = [substitute(c, {"B": 3, "S": 24}) for c in counts]
    # B is bound by each rank to its own part, S is divided.
    whole = 3 * 24 * 16
    assert elements["all_gather"] == [whole // tp, whole]
    assert elements["reduce_scatter"] == [whole, whole // tp]
    assert elements["all_to_all"] == [whole // tp, whole // tp]
    assert elements["all_reduce"] == [1, 1]
    assert order.shares.size("all") == (None if dp == "*" else int(dp) * tp)


def test_a_share_is_written_in_the_dims() -> None:
    order = CollectiveOrder(layers())
    scattered = next(i for i in order.issued if i.kind == "reduce_scatter").node.result
    assert dim_text(order.shares.elements(scattered.type)) == "4*B*S"


def test_bytes_are_of_the_larger_side() -> None:
    order = CollectiveOrder(layers())
    found = {issued.kind: message_bytes(order, issued) for issued in order.issued}
    assert {kind: dim_text(size) for kind, size in found.items()} == {
        "all_gather": "64*B*S",
        "reduce_scatter": "64*B*S",
        "all_to_all": "16*B*S",
        "all_reduce": "4",
    }


AHEAD = """\
mgraph-ir 1
module "ahead"
axis dp = 2
state @x: f32[6]{dp=P(sum)} = grad transient init [["zeros_"]]

func @start(%a: f32[6]{dp=P(sum)}) {
  %p: pending<f32[6]> = all_reduce_start(%a) {axis = "dp"} forward at "" "model.py":1 by test
  %b: f32[6] = aten.neg.default(%a) forward at "" "model.py":2 by test
  return %b, %p
}

func @work(%a: f32[6]) {
  %b: f32[6] = aten.tanh.default(%a) forward at "" "model.py":3 by test
  %c: f32[6] = aten.tanh.default(%b) forward at "" "model.py":3 by test
  return %c
}

func @end(%a: f32[6], %p: pending<f32[6]>) {
  %b: f32[6] = aten.exp.default(%a) forward at "" "model.py":4 by test
  %c: f32[6] = wait(%p) forward at "" "model.py":5 by test
  %d: f32[6] = aten.mul.Tensor(%b, %c) forward at "" "model.py":6 by test
  return %d
}

func @main() {
  %b, %p = call @start(@x) forward at "" "model.py":7 by test
  %c = call @work(%b) forward at "" "model.py":8 by test
  %d = call @work(%c) forward at "" "model.py":8 by test
  %e = call @end(%d, %p) forward at "" "model.py":9 by test
  return %e
}

entry main = @main -> (e)
"""


def test_a_window_reaches_through_functions() -> None:
    """One negation, two calls of two tanh, one exp, of six elements each; the product waits."""
    order = CollectiveOrder(parse_module(AHEAD))
    (issued,) = order.issued
    assert overlap(order, issued) == Overlap(nodes=4, flops=6 * (1 + 2 * 2 + 1))
