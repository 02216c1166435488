"""overlap-update: updates beside sums of other gradients give what they gave, on all ranks; order, messages, guards."""

from __future__ import annotations

from typing import Any

import pytest

from mgraph.compiler import build_module
from mgraph.ir.collective_proof import prove
from mgraph.ir.collectives import CollectiveOrder, overlap
from mgraph.ir.graph import Module, Node
from mgraph.ir.parser import parse_module
from mgraph.ir.printer import print_module
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.data_parallel import DataParallel
from mgraph.passes.equivalence import check
from mgraph.passes.fuse_squares import FuseSquares
from mgraph.passes.overlap_update import MOST, OverlapUpdate
from mgraph.passes.samples import Shapes
from mgraph.recipe import Recipe
from tests.passes.spread import trained
from tests.sampling import sampled

BUCKET = 2**14
UNCLIPPED: dict[str, Any] = {"max_norm": 0.0, "check_finite": "loss"}


def spread(**options: Any) -> Module:
    return DataParallel(size=2).run(trained("dense-tiny", **(UNCLIPPED | options)), Report())


def overlapped(module: Module, bucket: int = BUCKET) -> tuple[Module, Report]:
    report = Report()
    after = OverlapUpdate(bucket=bucket).run(module, report)
    verify(after)
    prove(after)
    return after, report


def before_the_pass(model: str, mesh: str, **options: Any) -> Module:
    done = build_module(Recipe(model, mesh=mesh, target="h100", **UNCLIPPED, **options))
    return done.snapshots.snapshots[[result.name for result in done.results].index("overlap-update")].module


def steps_of(module: Module) -> list[Node]:
    """Sums and updates of `finish`."""
    found = module.entry_function("finish").nodes
    return [node for node in found if node.op in ("all_reduce_start", "wait", "adamw")]


def test_updates_follow_the_messages_of_their_gradients() -> None:
    after, report = overlapped(spread())
    nodes = steps_of(after)
    starts, waits, updates = ([n for n in nodes if n.op == op] for op in ("all_reduce_start", "wait", "adamw"))
    assert [n.operands[0].name for n in starts[:1]] == ["acc.loss_sum"], "what all updates need is sent first"
    assert [n.operands for n in waits] == [n.results for n in starts], "and waited for in that order"
    assert len(updates) == len(starts) - 1 > 2
    after_scalars = nodes[len(starts) + 1 :]
    assert [n.op for n in after_scalars] == ["wait", "adamw"] * len(updates)
    for wait, update in zip(after_scalars[::2], after_scalars[1::2], strict=True):
        count = int(str(update.attrs["n"]))
        assert update.operands[-4 - count : -4] == wait.results
    assert report.matches[0].detail == f"21 gradients in {len(updates)} messages, 0 that are not summed"
    assert print_module(parse_module(print_module(after))) == print_module(after)


def test_sums_run_beside_updates() -> None:
    order = CollectiveOrder(overlapped(spread())[0])
    windows = [overlap(order, run.issued) for run in order.runs("finish")]
    assert all(window.nodes > 0 for window in windows[2:])


def test_experts_of_a_rank_are_updated_first() -> None:
    nodes = steps_of(overlapped(before_the_pass("moe-tiny", "ep=2"), 2**27)[0])
    ops = [n.op for n in nodes]
    assert ops == ["all_reduce_start", "all_reduce_start", "wait", "adamw", "wait", "adamw"]
    own = {".".join(v.name.split(".")[2:4]) for v in nodes[3].operands if v.name.endswith(".m")}
    others = {".".join(v.name.split(".")[2:4]) for v in nodes[5].operands if v.name.endswith(".m")}
    assert own == {"ffn.gate", "ffn.up", "ffn.down"} and len(others) > 5 and not own & others


MESHES = sampled(
    [
        ("dense-tiny", "dp=2", {"precision": "bf16", "groups": ("embed*: lr=0.1, weight_decay=0", "layers.1.*: lr=3")}),
        ("dense-tiny", "dp=2", {"overlap": True}),
        ("dense-tiny", "fsdp=2", {"zero": 1}),
        ("dense-tiny", "dp=2", {"one_microbatch": True, "precision": "bf16", "grad_dtype": "param"}),
        ("moe-tiny", "ep=2", {"expert_load": True, "groups": ("embed*: frozen", "*norm*: lr=2")}),
        ("moe-tiny", "dp=2,ep=2", {}),
        ("dense-tiny", "dp=2", {"offload": "activations"}),
        ("dense-tiny", "dp=2,tp=2", {}),
    ],
    0,
    always=[("moe-tiny", "ep=2", {"expert_load": True, "groups": ("embed*: frozen", "*norm*: lr=2")})],
)


@pytest.mark.parametrize(("model", "mesh", "options"), MESHES)
def test_meshes_are_equal_on_all_ranks(model: str, mesh: str, options: dict[str, Any]) -> None:
    """With small messages; the updates then give the sums of squares of their gradients, too."""
    before = before_the_pass(model, mesh, **options)
    after, report = overlapped(before)
    assert report.matches and not report.near_misses
    squared = FuseSquares().run(after, Report())
    assert squared is not after
    for tested, a, b in ((OverlapUpdate(bucket=BUCKET), before, after), (FuseSquares(), after, squared)):
        evidence = check(tested, a, b, Shapes.of(before))
        assert any("ranks" in found.method for found in evidence) and max(found.error for found in evidence) <= 1e-12


@pytest.mark.parametrize("options", [{"max_norm": 1.0, "check_finite": "gradients"}, {"check_finite": "gradients"}])
def test_an_update_that_needs_all_gradients_waits(options: dict[str, Any]) -> None:
    before = spread(**options)
    after, report = overlapped(before)
    assert after is before and not report.matches
    assert [(miss.pattern, miss.guard) for miss in report.near_misses] == [("adamw", "waits")]


def test_state_that_comes_from_the_host_part_by_part_stays_in_its_order() -> None:
    """Else all of it were on the device at once."""
    before = before_the_pass("dense-tiny", "dp=2", offload="optimizer")
    after, report = overlapped(before)
    assert after is before and [miss.guard for miss in report.near_misses] == ["offloaded"]


def test_one_message_stays_one() -> None:
    before = spread()
    after, report = overlapped(before, 2**27)
    assert after is before and not report.matches and not report.near_misses


def test_there_are_not_many_messages() -> None:
    after, _ = overlapped(spread(), 1)
    assert MOST // 2 < sum(n.op == "adamw" for n in steps_of(after)) <= MOST


def test_one_rank_has_no_sums() -> None:
    for module in (trained("dense-tiny", **UNCLIPPED), before_the_pass("dense-tiny", "dp=1")):
        assert OverlapUpdate(bucket=1).run(module, Report()) is module
