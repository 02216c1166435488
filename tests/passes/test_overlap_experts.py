"""What runs while tokens are on their way: orders of whole models, that they compute the same, and other messages."""

from __future__ import annotations

import functools

import pytest

from mgraph.compiler import build_module
from mgraph.ir.graph import Function, Module, Node
from mgraph.ir.opdef import op_def
from mgraph.ir.parser import parse_module
from mgraph.passes.base import Report
from mgraph.passes.overlap_experts import OverlapExperts
from mgraph.recipe import Recipe


@functools.cache
def compiled(mesh: str = "ep=2", chunks: int = 1, model: str = "moe-tiny-grouped", disable: str = "") -> Module:
    recipe = Recipe(model=model, mesh=mesh, ep_chunks=chunks, arch="sm_90a", precision="bf16", disable=disable)
    return build_module(recipe).module


def between(function: Function, op: str = "all_to_all_start") -> list[list[Node]]:
    """For each message, what runs from its start to its end."""
    found = []
    for index, node in enumerate(function.nodes):
        if node.op == op and node.made_by == OverlapExperts.name:
            end = next(i for i, n in enumerate(function.nodes) if n.op == "wait" and n.operands == node.results)
            found.append(list(function.nodes[index + 1 : end]))
    return found


def ops(nodes: list[Node]) -> set[str]:
    return {node.op for node in nodes}


def test_shared_experts_and_gradients_of_weights_run_meanwhile() -> None:
    module = compiled()
    there, _ = between(module.functions["layer.fwd"])
    assert {"aten.linear.default", "glu"} <= ops(there)
    back, sent = between(module.functions["layer.bwd"])
    assert "glu_grad_joined" in ops(back), "the shared expert's gradient"
    assert [node.op for node in sent].count("gathered_outer") == 3
    assert not {"expert_glu", "expert_glu_grad"} & ops([*there, *back, *sent])


def test_experts_of_one_chunk_run_while_another_is_on_its_way() -> None:
    module = compiled(chunks=2, model="moe-tiny")
    first, second, third, last = between(module.functions["layer.fwd"])
    assert "expert_glu" not in ops(first) and "expert_glu" in ops(second) and "expert_glu" in ops(third)
    assert "expert_glu" not in ops(last)
    messages = between(module.functions["layer.bwd"])
    assert ["expert_glu_grad" in ops(m) for m in messages] == [False, True, True, False]
    assert all("gathered_outer" in ops(m) for m in messages[2:])


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_reordering_of_the_same_nodes(chunks: int) -> None:
    """Each node reads what is made before, and all but the messages is what it was."""
    before = compiled(chunks=chunks, disable="overlap-experts,in-place,cuda-graphs")
    after = OverlapExperts().run(before, Report())
    for name, function in before.functions.items():
        kept = [n for n in after.functions[name].nodes if n.made_by != OverlapExperts.name]
        mine = [n for n in function.nodes if n in kept]
        assert sorted(map(id, kept)) == sorted(map(id, mine))
        known = set(function.inputs())
        for node in after.functions[name].nodes:
            assert all(v in known or v.is_state for v in node.operands), node
            known.update(node.results)
        gone = [n for n in function.nodes if n not in kept]
        starts = [n for n in after.functions[name].nodes if n.op.endswith("_start") and n not in kept]
        assert sorted(n.op + "_start" for n in gone) == sorted(n.op for n in starts)


@pytest.mark.parametrize("model", ["moe-tiny", "moe-tiny-grouped"])
def test_other_communication_stays_in_its_place(model: str) -> None:
    before = compiled(mesh="fsdp=2,tp=2,ep=fsdp", model=model, disable="overlap-experts,in-place,cuda-graphs")
    after = OverlapExperts().run(before, Report())
    for name, function in before.functions.items():
        for module_function in (function, after.functions[name]):
            kept = [n for n in module_function.nodes if n.made_by != "expert-parallel" and _communicates(n)]
            others = [n for n in kept if n.made_by != OverlapExperts.name]
            if module_function is function:
                expected = others
        assert others == expected


BETWEEN = """mgraph-ir 1
module "m"
dim T 1..
axis ep = 2
axis tp = 2
func @main(%x: f32[2*T, 4]{ep=S(0)}, %y: f32[2*T, 4]{ep=S(0)}, %p: f32[4]{tp=P(sum)}, %q: f32[2*T, 4]{tp=P(sum)}) {
  %first: f32[2*T, 4]{ep=S(0)} = all_to_all(%x) {axis = "ep", join_dim = 0, split_dim = 0} AT expert-parallel
  %sum: f32[4] = all_reduce(%p) {axis = "tp", op = "sum"} AT tensor-parallel
  %second: f32[2*T, 4]{ep=S(0)} = all_to_all(%y) {axis = "ep", join_dim = 0, split_dim = 0} AT expert-parallel
  %more: f32[2*T, 4] = all_reduce(%q) {axis = "tp", op = "sum"} AT tensor-parallel
  %third: f32[2*T, 4]{ep=S(0)} = all_to_all(%more) {axis = "ep", join_dim = 0, split_dim = 0} AT expert-parallel
  return %first, %sum, %second, %third
}
entry main = @main -> (first, sum, second, third)
"""


def test_messages_stay_between_other_communication() -> None:
    """Though no value holds them there: the second could start at once, the first sum run before the first wait, and
    the second sum, which leads to a message, before the first sum."""
    module = parse_module(BETWEEN.replace("AT", 'forward at "m" "m.py":1 by'))
    after = OverlapExperts().run(module, Report())
    nodes = after.functions["main"].nodes
    assert [node.op.removesuffix("_start") for node in nodes] == [
        *("all_to_all", "wait", "all_reduce") * 2,
        *("all_to_all", "wait"),
    ]
    assert [v.name for n in nodes if n.op in ("wait", "all_reduce") for v in n.results] == [
        v.name for n in module.functions["main"].nodes for v in n.results
    ]


def _communicates(node: Node) -> bool:
    return node.op == "wait" or op_def(node.op).collective


@pytest.mark.full
def test_chunks_and_their_order_are_verified() -> None:
    """A chunk's products sum in another order; the order of nodes changes nothing."""
    found = build_module(Recipe(model="moe-tiny", mesh="ep=2", ep_chunks=2, arch="none", verify=True)).results
    status = {result.name: result.measured["verify"]["status"] for result in found}
    assert status["expert-dispatch"] == status["expert-parallel"] == status["overlap-experts"] == "verified"
