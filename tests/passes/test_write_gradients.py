"""write-gradients: whole steps are equal, each guard broken once, and two steps of the emitted package."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from mgraph.compiler import compile_package
from mgraph.errors import OptionError, PassError
from mgraph.ir.graph import Module, Node, Value
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.data_parallel import DataParallel
from mgraph.passes.equivalence import Mismatch, check
from mgraph.passes.fully_shard import FullyShard
from mgraph.passes.overlap_gradients import OverlapGradients
from mgraph.passes.samples import Shapes
from mgraph.passes.write_gradients import WriteGradients
from mgraph.recipe import Recipe
from mgraph.runtime.package import Package, load_package
from mgraph.runtime.state import create_state
from tests.passes.spread import trained


@cache
def before(model: str = "dense-tiny") -> Module:
    return trained(model)


def written(module: Module) -> tuple[Module, Report]:
    report = Report()
    after = WriteGradients().run(module, report)
    verify(after)
    return after, report


def missed(report: Report) -> dict[str, str]:
    return {miss.node: miss.detail for miss in report.near_misses}


@pytest.mark.parametrize("model", ["dense-tiny", pytest.param("moe-tiny", marks=pytest.mark.full)])
def test_whole_steps_are_equal(model: str) -> None:
    module = before(model)
    after, report = written(module)
    evidence = check(WriteGradients(), module, after, Shapes.of(module))
    assert "whole steps of one microbatch" in {e.method for e in evidence} and max(e.error for e in evidence) == 0.0
    grads = {name for name in module.state if name.endswith(".grad")}
    kept = grads & set(after.entries["finish"].updates)
    assert kept == set(missed(report)) and report.counts == {"gradients": len(grads - kept)}
    assert all("adds to parts of it" in why for why in missed(report).values())
    (zero,) = [node for node in after.entry_function("finish").nodes if node.op == "zero"]
    assert {v.name for v in zero.operands} == {"acc.loss_sum", "acc.count", *kept}


def test_a_sum_that_is_left_would_be_seen() -> None:
    """The check begins from what the step before left: a reset that is missing shows."""
    module = before()
    after, _ = written(module)

    def summed(node: Node) -> Node:
        return replace(node, attrs={k: v for k, v in node.attrs.items() if k != "fresh"})

    functions = {n: replace(f, nodes=tuple(map(summed, f.nodes))) for n, f in after.functions.items()}
    with pytest.raises(Mismatch):
        check(WriteGradients(), module, replace(after, functions=functions), Shapes.of(module))


def test_what_is_summed_twice_keeps_its_zeros() -> None:
    """Of a tied matrix the head's product and the embedding's rows are summed."""
    after, report = written(before("gemma3-tiny"))
    assert any("is read" in why for why in missed(report).values()), missed(report)
    marked = [node for _, node in after.walk() if node.attrs.get("fresh")]
    assert marked and all(node.op == "accumulate" for node in marked)


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3])
def test_what_comes_from_other_ranks_is_written(level: int) -> None:
    """On two ranks, in steps that meet the gradients of the one before."""
    module = FullyShard(size=2, level=level).run(before(), Report())
    after, report = written(module)
    sums = [node for _, node in after.walk() if node.op == "accumulate_each"]
    assert bool(sums) == (level > 1) and all(node.attrs["fresh"] for node in sums)
    if level > 1:
        assert report.counts["gradients"] == sum(name.endswith(".grad") for name in module.state)
    evidence = check(WriteGradients(), module, after, Shapes.of(module))
    assert "whole steps of one microbatch" in {e.method for e in evidence} and max(e.error for e in evidence) == 0.0


def test_sums_of_one_node_are_written_all_or_none() -> None:
    module = FullyShard(size=2).run(before(), Report())
    entry, name = module.entry_function("microbatch"), "layers.0.attn.q.weight.grad"
    total = next(s.value for s in module.state.values() if s.name == name)
    again = next(n for n in entry.nodes if n.op == "accumulate_each" and total in n.operands)
    part = again.operands[len(again.results) + again.operands.index(total)]
    result = Value("twice", total.type)
    twice = replace(again, op="accumulate", operands=(total, part), results=(result,))
    place = entry.nodes.index(again)
    module = module.with_function(replace(entry, nodes=(*entry.nodes[:place], twice, *entry.nodes[place:])))
    after, report = written(module)
    assert "is read 2 times" in missed(report)[name]
    assert "adds to others" in missed(report)["layers.0.attn.k.weight.grad"]
    left = next(n for n in after.entry_function("microbatch").nodes if again.results[0] in n.results)
    assert not left.attrs.get("fresh")


def test_another_entry_that_sums_is_refused() -> None:
    module = OverlapGradients().run(DataParallel(size=2).run(before(), Report()), Report())
    with pytest.raises(PassError, match="summed by another entry"):
        WriteGradients().run(module, Report())
    with pytest.raises(OptionError, match="do not go together"):
        Recipe(model="dense-tiny", overlap=True, one_microbatch=True)
    with pytest.raises(OptionError, match="is for training"):
        Recipe(model="dense-tiny", purpose="serve", one_microbatch=True)


@pytest.mark.parametrize(
    ("model", "grad_dtype"),
    [
        pytest.param("dense-tiny", "fp32", marks=pytest.mark.full),
        ("dense-tiny", "param"),
        pytest.param("moe-tiny", "fp32", marks=pytest.mark.full),
        ("moe-tiny", "param"),
    ],
)
def test_steps_of_a_package(model: str, grad_dtype: str, tmp_path: Path) -> None:
    """Two steps, so that the second meets what the first left: all is bitwise as in a package that sums."""
    made: list[list[torch.Tensor]] = []
    for one in (False, True):
        recipe = Recipe(
            model=model,
            arch="none",
            mesh="dp=1",
            precision="bf16",
            grad_dtype=grad_dtype,
            one_microbatch=one,
            output=str(tmp_path / str(one)),
        )
        compile_package(recipe)
        package = load_package(tmp_path / str(one), "cpu")
        assert package.one_microbatch is one
        made.append(after_two_steps(package))
    text = (tmp_path / "True" / "step.py").read_text()
    assert "rt.mm_(" in text and "rt.addmm_(" not in text
    assert text.count("rt.grouped_outer_(") == text.count(", fresh=True)") == (3 if model == "moe-tiny" else 0)
    assert len(made[0]) == len(made[1])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def after_two_steps(package: Package) -> list[torch.Tensor]:
    """Losses, norms, parameters and moments."""
    state = create_state(package.state_specs, 0, "cpu")
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2):
        tokens = torch.randint(0, package.vocab_size, (2, 17), generator=generator)
        package.call("microbatch", state, tokens[:, :-1], tokens[:, 1:])
        ended = package.call("finish", state, torch.tensor(1e-2))
        found += [ended["loss"], ended["grad_norm"]]
    return found + [state[s.name] for s in package.state_specs if s.kind in ("param", "master", "moment")]
