"""The order of collectives of spread models: as proved, as ranks of the interpreter issue it, and as step.py does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from mgraph.codegen.step import step_text
from mgraph.codegen.step_check import check_step
from mgraph.ir.collective_proof import prove
from mgraph.ir.collectives import CollectiveOrder, Issued, is_collective, kind_of
from mgraph.ir.graph import Function, Module, Node
from mgraph.ir.interpreter import run_ranks
from mgraph.ir.local import part
from mgraph.passes.pipeline import run_pipeline
from mgraph.passes.samples import Shapes, random_inputs, random_state
from tests.passes import spread as models
from tests.sampling import sampled

PIPELINE = "tensor-parallel{{axis=tp,size={tp}}},data-parallel{{axis=dp,size={dp}}},cse,dce,in-place"
trained = functools.cache(models.trained)
HAVE = frozenset({"microbatch", "finish", "derived"})


def spread(model: Module, dp: int, tp: int) -> Module:
    """The model over a mesh."""
    module, _ = run_pipeline(model, PIPELINE.format(dp=dp, tp=tp), have=HAVE)
    return module


def issued_by_ranks(module: Module, entry: str) -> list[tuple[str, str]]:
    """Kind and axis of every collective that two ranks of tp issue, in the order in which they do."""
    found: list[tuple[str, str]] = []

    def note(function: Function, node: Node, operands: Any, results: Any) -> None:
        if is_collective(node):
            found.append((kind_of(node.op), str(node.attrs["axis"])))

    sizes = {"tp": 2, "dp": 1}
    state = random_state(module, 0)
    parts = [{n: part(t, module.state[n].type, sizes, {"tp": r, "dp": 0}) for n, t in state.items()} for r in range(2)]
    batch = random_inputs(module.entry_function("microbatch"), Shapes.of(module), 0)
    names = [p.name for p in module.entry_function(entry).params]
    inputs = {name: torch.tensor(0.01) if name == "lr" else batch[name] for name in names}
    run_ranks(module, entry, [inputs] * 2, parts, sizes, hook=note)
    return found


def written_out(order: CollectiveOrder, function: str) -> list[tuple[str, str]]:
    """The sequence of a function, one collective after the other."""
    found = []
    for item in order.items.get(function, ()):
        found += [(item.kind, item.axis)] if isinstance(item, Issued) else written_out(order, item)
    return found


CASES = [("dense-tiny", "none"), ("dense-tiny", "full"), ("moe-tiny", "none")]


@pytest.mark.parametrize(("model", "recompute"), sampled(CASES, 1))
def test_proof_ranks_and_text_agree(model: str, recompute: str) -> None:
    module = spread(trained(model, recompute=recompute), dp=1, tp=2)
    order = prove(module)
    for entry in module.entries.values():
        expected = issued_by_ranks(module, entry.name)
        assert expected and written_out(order, entry.function) == expected
        assert order.length(entry.name) == len(expected)
    check_step(module, step_text(module))


@pytest.mark.full
def test_recomputation_repeats_the_collectives_of_the_forward() -> None:
    plain, again = (prove(spread(trained("dense-tiny", recompute=r), 2, 2)) for r in ("none", "full"))
    assert again.length("microbatch") > plain.length("microbatch")
    assert [again.length(e) for e in ("evaluate", "finish")] == [plain.length(e) for e in ("evaluate", "finish")]


def test_the_order_does_not_depend_on_the_number_of_ranks() -> None:
    model = trained("dense-tiny")
    few, many = (prove(spread(model, dp, 2)) for dp in (32, 512))
    for entry in few.module.entries.values():
        assert written_out(few, entry.function) == written_out(many, entry.function)
