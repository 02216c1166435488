"""join-products where ranks gather the weights: the same numbers, and gathers whose results lie together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from mgraph.compiler import compile_package
from mgraph.ir.graph import Function, Module, Node
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.dce import DeadCode
from mgraph.passes.equivalence import check
from mgraph.passes.fully_shard import FullyShard
from mgraph.passes.fuse_products import FuseProducts
from mgraph.passes.gathered import gathered_states
from mgraph.passes.join_products import JoinProducts
from mgraph.passes.joining import joined_states
from mgraph.passes.samples import Shapes
from mgraph.recipe import Recipe
from mgraph.runtime.package import load_package
from tests.passes.spread import trained
from tests.passes.test_write_gradients import after_two_steps

GATHER = "all_gather_start"


@cache
def sharded(level: int = 3, reshard: bool = True) -> Module:
    return FuseProducts().run(FullyShard(level=level, reshard=reshard).run(trained("dense-tiny"), Report()), Report())


def joined(module: Module) -> tuple[Module, Report]:
    report = Report()
    after = DeadCode().run(JoinProducts().run(module, report), Report())
    verify(after)
    return after, report


def off(module: Module) -> float:
    """How far two ranks are from one."""
    one = trained("dense-tiny")
    return max(found.error for found in check(FullyShard(), one, module, Shapes.of(one)))


def count(function: Function) -> Counter[str]:
    return Counter(node.op for node in function.nodes)


@pytest.mark.parametrize("reshard", [True, False])
def test_ranks_that_gather_weights(reshard: bool) -> None:
    before = sharded(reshard=reshard)
    after, report = joined(before)
    assert not report.near_misses and joined_states(after) == {}
    forward, backward = after.functions["layer.fwd"], after.functions["layer.bwd"]
    assert [count(f)["joined"] for f in (forward, after.functions["layer"], backward)] == [2, 2, 2]
    assert count(backward)["aten.mm.default"] == 4 and count(backward)["aten.slice.Tensor"] == 5
    for function in after.functions.values():
        for node in function.nodes:
            if node.op == GATHER:
                of_layer = any(v.name.startswith("layers.") for v in node.operands)
                assert node.attrs.get("together", False) == of_layer
    evidence = check(JoinProducts(), before, after, Shapes.of(before))
    assert evidence and max(e.error for e in evidence) < 1e-9
    assert off(after) < 1e-9


@pytest.mark.parametrize("level", [1, 2])
def test_ranks_that_hold_weights_whole(level: int) -> None:
    """Weights are state that lies together; gradients are too, or are given to the caller."""
    after, report = joined(sharded(level))
    assert not report.near_misses and joined_states(after)
    assert count(after.functions["layer.bwd"])["accumulate_joined"] == (2 if level == 1 else 0)
    assert off(after) < 1e-9


def test_one_rank_gathers_nothing(tmp_path: Path) -> None:
    """Its states are what it would be given, which do not lie together."""
    losses = []
    for name, more in (("joined", ""), ("apart", "join-products")):
        recipe = Recipe(model="dense-tiny", mesh="fsdp=1", output=str(tmp_path / name), disable=more)
        compile_package(recipe)
        losses.append(after_two_steps(load_package(tmp_path / name, "cpu")))
    assert "rt.joined(" in (tmp_path / "joined" / "step.py").read_text()
    assert "rt.joined(" not in (tmp_path / "apart" / "step.py").read_text()
    for one, other in zip(*losses, strict=True):  # AdamW makes whole steps of gradients that are nothing but rounding
        assert float((one.double() - other.double()).norm()) <= 1e-4 * float(other.double().norm()) + 1e-9


def changed(module: Module, change: Callable[[Node], Node]) -> Module:
    entry = module.entry_function("microbatch")
    return module.with_function(replace(entry, nodes=tuple(map(change, entry.nodes))))


def misses(module: Module) -> set[str]:
    report = Report()
    JoinProducts().run(module, report)
    return {miss.guard for miss in report.near_misses}


def test_weights_that_are_gathered_in_another_order_stay() -> None:
    def change(node: Node) -> Node:
        turned = node.op == GATHER and len(node.operands) > 2
        return node.with_values(node.operands[::-1], node.results[::-1]) if turned else node

    assert misses(changed(sharded(), change)) == {"order"}


def test_weights_that_are_gathered_along_columns_stay() -> None:
    def change(node: Node) -> Node:
        return replace(node, attrs={**node.attrs, "dim": 1}) if node.op == GATHER else node

    assert misses(changed(sharded(), change)) == {"placement"}


def test_what_else_a_layer_is_handed_is_not_gathered() -> None:
    """One call of several gets another tensor."""
    module = sharded()
    entry = module.entry_function("microbatch")
    call = next(node for node in entry.nodes if node.op == "call" and node.attrs["callee"] == "layer.bwd")
    place = next(i for i, v in enumerate(call.operands) if v in gathered_states(module) and "gate" in v.name)
    made = Node("aten.neg.default", (call.operands[place],), (replace(call.operands[place], name="other"),), {})
    operands = (*call.operands[:place], made.result, *call.operands[place + 1 :])
    nodes = [
        n
        for node in entry.nodes
        for n in ((made, node.with_values(operands, node.results)) if node is call else (node,))
    ]
    assert misses(module.with_function(replace(entry, nodes=tuple(nodes)))) == {"state"}
