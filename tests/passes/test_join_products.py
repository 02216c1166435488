"""join-products: whole steps are equal, what is made, each guard broken once, and two steps of an emitted package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from mgraph import compiler
from mgraph.codegen.memory import RankMemory
from mgraph.compiler import compile_package
from mgraph.ir.graph import Function, Module, Node
from mgraph.ir.types import Shard
from mgraph.ir.verifier import verify
from mgraph.passes import joining
from mgraph.passes.base import Report
from mgraph.passes.dce import DeadCode
from mgraph.passes.equivalence import check
from mgraph.passes.fuse_products import FuseProducts
from mgraph.passes.in_place import InPlace
from mgraph.passes.join_products import JoinProducts
from mgraph.passes.joining import joined_states
from mgraph.passes.samples import Shapes
from mgraph.recipe import Recipe
from mgraph.runtime.package import load_package
from tests.passes.spread import trained
from tests.passes.test_write_gradients import after_two_steps

HEADS = ("attn.q.weight", "attn.k.weight", "attn.v.weight")
LATER = "cse,dce,in-place", "fuse-products,join-products,cse,dce,in-place"
UNIT = ("ffn.gate.weight", "ffn.up.weight")


@cache
def before(model: str = "dense-tiny") -> Module:
    return FuseProducts().run(trained(model), Report())


def joined(module: Module) -> tuple[Module, Report]:
    report = Report()
    after = DeadCode().run(JoinProducts().run(module, report), Report())
    verify(after)
    return after, report


def count(function: Function) -> Counter[str]:
    return Counter(node.op for node in function.nodes)


def test_whole_steps_are_equal() -> None:
    module = before()
    after, report = joined(module)
    evidence = check(JoinProducts(), module, after, Shapes.of(module))
    assert evidence and max(e.error for e in evidence) < 1e-9
    assert not report.near_misses
    backward, forward = after.functions["layer.bwd"], after.functions["layer.fwd"]
    assert count(backward)["joined"] == 2 and count(backward)["accumulate_joined"] == 2
    assert [count(f)["rope_joined"] for f in (forward, after.functions["layer"])] == [1, 1] and not count(forward)[
        "rope"
    ]
    assert count(backward)["matmul_add"] == 0 and count(backward)["rope"] == 0
    # q, k, v with one product, o, gate and up with one, down
    assert [count(f)["aten.linear.default"] for f in (forward, after.functions["layer"])] == [4, 4]
    assert count(backward)["aten.matmul.default"] == count(backward)["aten.mm.default"] == 4


def test_states_lie_in_one_order() -> None:
    """Of weights and of gradients, in every layer; in-place forms keep it."""
    after = InPlace().run(joined(before())[0], Report())
    wanted = {}
    for layer in range(2):
        for names in (HEADS, UNIT):
            for first, second in pairwise(names):
                for end in ("", ".grad"):
                    wanted[f"layers.{layer}.{second}{end}"] = f"layers.{layer}.{first}{end}"
    assert {name: first for name, first in joined_states(after).items() if name in wanted} == wanted
    assert joined_states(before()) == {}
    assert sum(count(f)["accumulate_joined_"] for f in after.functions.values()) == 2


def test_memory_is_that_of_a_view() -> None:
    """No copy of a weight is counted, and what is kept for the backward is what was kept before."""
    module, after = before(), joined(before())[0]
    sizes = {"B": 2, "S": 64}, {"dp": 1}
    peaks = [RankMemory(InPlace().run(m, Report()), *sizes).entry("microbatch").bytes for m in (module, after)]
    assert peaks[1] <= 1.02 * peaks[0], peaks


def changed(module: Module, name: str, change: Callable[[Node], Node]) -> Module:
    function = module.functions[name]
    return module.with_function(replace(function, nodes=tuple(map(change, function.nodes))))


def misses(module: Module) -> list[tuple[str, str]]:
    report = Report()
    JoinProducts().run(module, report)
    return sorted({(miss.guard, miss.detail.partition(" ")[2]) for miss in report.near_misses})


def test_what_turns_differently_stays() -> None:
    turned = iter((True, False))

    def change(node: Node) -> Node:
        return replace(node, attrs={**node.attrs, "style": "interleaved"}) if _turns(node) and next(turned) else node

    def _turns(node: Node) -> bool:
        return node.op == "rope"

    assert misses(changed(before(), "layer.bwd", change)) == [("rope", "and k turn differently")]


def test_what_comes_from_elsewhere_stays() -> None:
    """As where queries and keys have norms of their own."""

    def change(node: Node) -> Node:
        turns = node.op == "rope"
        return replace(node, op="aten.neg.default", operands=node.operands[:1], attrs={}) if turns else node

    ((guard, detail),) = misses(changed(before(), "layer.bwd", change))
    assert guard == "parts" and "two of them turned" in detail


def test_what_is_read_elsewhere_stays() -> None:
    module = before()
    function = module.functions["layer.bwd"]
    unit = next(node for node in function.nodes if node.op == "glu_grad")
    given = replace(function, results=(*function.results, unit.results[0]))
    assert misses(module.with_function(given)) == [("users", "is a result of the function")]


def test_a_state_that_is_split_or_elsewhere_stays() -> None:
    module = before()
    name = f"layers.0.{UNIT[0]}"
    states = dict(module.state)
    states[name] = replace(states[name], host=True)
    assert misses(replace(module, state=states)) == [("place", "lies in the memory of the host")]
    states[name] = module.state[name].placed("dp", Shard(0))
    assert misses(replace(module, state=states)) == [("placement", "is split over ranks")]


def test_what_would_begin_anywhere_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "ALIGNMENT", 2**20)
    found = {(guard, detail.partition(" ")[0]) for guard, detail in misses(before())}
    assert found == {("alignment", "has")}


def test_what_is_no_state_stays() -> None:
    """A function that is handed a tensor which the entry made."""
    module = before()
    entry = module.entry_function("microbatch")
    made = Node("cast", (module.state[f"layers.0.{UNIT[0]}"].value,), (), {"dtype": entry.params[0].tensor.dtype})
    value = replace(made.operands[0], name="other", is_state=False)
    made = replace(made, op="aten.neg.default", attrs={}, results=(value,))

    def change(node: Node) -> Node:
        operands = tuple(value if v is made.operands[0] else v for v in node.operands)
        return node.with_values(operands, node.results)

    nodes = (made, *map(change, entry.nodes))
    assert misses(module.with_function(replace(entry, nodes=nodes))) == [("state", "is no state in every call")]


def test_frozen_weights_are_joined_without_gradients() -> None:
    module = FuseProducts().run(trained("dense-tiny", groups=("layers.*:frozen",)), Report())
    module = DeadCode().run(module, Report())
    after, report = joined(module)
    assert not report.near_misses and report.matches
    assert count(after.functions["layer.bwd"])["accumulate_joined"] == 0
    assert count(after.functions["layer.bwd"])["joined"] == 2


@pytest.mark.parametrize("one", [pytest.param(False, marks=pytest.mark.full), True])
def test_steps_of_a_package(one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps give what a package gives whose products are apart."""
    made: list[list[torch.Tensor]] = []
    text = compiler.pipeline_text
    for name in ("apart", "joined"):
        if name == "joined":
            monkeypatch.setattr(compiler, "pipeline_text", lambda r: text(r).replace(*LATER))
        recipe = Recipe(model="dense-tiny", arch="none", mesh="dp=1", one_microbatch=one, output=str(tmp_path / name))
        compile_package(recipe)
        package = load_package(tmp_path / name, "cpu")
        made.append(after_two_steps(package))
    step = (tmp_path / "joined" / "step.py").read_text()
    assert step.count("rt.joined(") == 2 * 3 + 2, step
    for a, b in zip(*made, strict=True):
        # By the norm: where a gradient is next to nothing, AdamW makes a step of its rounding.
        assert float((b.double() - a.double()).norm()) <= 1e-5 * float(a.double().norm()) + 1e-9
