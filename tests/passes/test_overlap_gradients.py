"""The entry `last`: a microbatch and the end of its step, with reductions that begin during the backward."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from mgraph.ir.collective_proof import prove
from mgraph.ir.collectives import CollectiveOrder, overlap
from mgraph.ir.graph import Module
from mgraph.ir.types import Partial
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.data_parallel import DataParallel
from mgraph.passes.equivalence import Mismatch, check
from mgraph.passes.fully_shard import FullyShard
from mgraph.passes.overlap_gradients import LAST, OverlapGradients
from mgraph.passes.samples import Shapes
from tests.passes.spread import trained


@cache
def spread(fsdp: bool = False) -> Module:
    module = DataParallel(size=2).run(trained("dense-tiny"), Report())
    return FullyShard().run(module, Report()) if fsdp else module


def overlapped(module: Module) -> Module:
    after = OverlapGradients().run(module, Report())
    verify(after)
    prove(after)
    return after


@pytest.mark.parametrize("fsdp", [False, True])
def test_last_is_a_microbatch_and_the_end_of_the_step(fsdp: bool) -> None:
    before = spread(fsdp)
    after = overlapped(before)
    (evidence,) = [e for e in check(OverlapGradients(), before, after, Shapes.of(before)) if "then the end" in e.method]
    assert evidence.error <= 1e-12
    assert {n: after.entries[n] for n in before.entries} == before.entries, "steps may still be taken apart"
    entry = after.entries[LAST]
    assert entry.outputs == before.entries["finish"].outputs
    assert set(entry.updates) == {*before.entries["finish"].updates, *before.entries["microbatch"].updates}


def test_messages_begin_where_their_gradients_are_whole() -> None:
    after = overlapped(spread())
    nodes = after.entry_function(LAST).nodes
    order = []
    for node in nodes:
        if node.op == "call" and node.attrs["callee"] == "layer.bwd":
            order.append(f"backward of {node.origin.path}")
        elif node.op == "all_reduce_start":
            order.append(f"{len(node.operands)} tensors")
    assert order == [
        "2 tensors",  # norm and head
        "backward of layers.1",
        "9 tensors",
        "backward of layers.0",
        "9 tensors",
        "3 tensors",  # embedding, loss and count
    ]
    waits = [node for node in nodes if node.op == "wait"]
    assert [len(node.operands) for node in waits] == [3, 9, 9, 2], "the last one first"


def test_reductions_run_beside_the_backward() -> None:
    order = CollectiveOrder(overlapped(spread()))
    windows = [overlap(order, run.issued) for run in order.runs(LAST)]
    assert [window.nodes > 0 for window in windows] == [True, True, True, False]
    assert windows[0].flops.subs({"B": 1, "S": 8}) > windows[1].flops.subs({"B": 1, "S": 8})  # type: ignore[union-attr]


def test_what_is_not_a_direct_sum_is_reduced_at_the_end() -> None:
    """With shards inside replicas, loss and count are first summed over the shards."""
    nodes = overlapped(spread(True)).entry_function(LAST).nodes
    scalars = [node for node in nodes if node.op == "all_reduce_start" and not node.operands[0].tensor.shape]
    assert [node.attrs["axis"] for node in scalars] == ["fsdp", "dp"]
    assert all(isinstance(v.tensor.on("dp"), Partial) for v in scalars[1].operands)


def test_a_message_too_few_is_seen() -> None:
    before = spread()
    after = overlapped(before)
    function = after.entry_function(LAST)
    start = next(node for node in function.nodes if node.op == "all_reduce_start")
    wait = next(node for node in function.nodes if node.op == "wait" and node.operands == start.results)
    raw = dict(zip(wait.results, start.operands, strict=True))
    nodes = tuple(
        node.with_values(tuple(raw.get(v, v) for v in node.operands), node.results)
        for node in function.nodes
        if node not in (start, wait)
    )
    broken = after.with_function(replace(function, nodes=nodes))
    with pytest.raises(Mismatch) as caught:
        check(OverlapGradients(), before, broken, Shapes.of(before))
    assert caught.value.entry == LAST
