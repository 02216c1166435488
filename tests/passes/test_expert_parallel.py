"""Where experts and tokens lie under expert parallelism, and how many bytes go over the axis.

That training goes on as on one device is in tests/end_to_end/test_mesh_table.py.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mgraph.codegen.manifest import manifest
from mgraph.compiler import build_module
from mgraph.errors import PassError
from mgraph.ir.collective_proof import prove
from mgraph.ir.collectives import message_bytes
from mgraph.ir.dims import Extent, evaluate
from mgraph.ir.graph import Module, StateKind
from mgraph.ir.parser import parse_module
from mgraph.ir.types import Shard
from mgraph.passes.activations import extents
from mgraph.passes.base import Report
from mgraph.passes.expert_parallel import ExpertParallel
from mgraph.passes.expert_weights import expert_states
from mgraph.recipe import Recipe

BATCH, SEQUENCE = 2, 12
TOKENS = BATCH * SEQUENCE


@functools.cache
def compiled(mesh: str, dispatch: str = "alltoall", model: str = "moe-tiny") -> Module:
    return build_module(Recipe(model=model, mesh=mesh, arch="none", dispatch=dispatch)).module


@pytest.mark.parametrize(
    ("mesh", "axes"), [("ep=2", ["ep"]), ("fsdp=2,ep=fsdp", ["fsdp"]), ("dp=2,fsdp=2,ep=dp*fsdp", ["dp", "fsdp"])]
)
def test_experts_lie_over_their_axes_with_all_that_is_theirs(mesh: str, axes: list[str]) -> None:
    module = compiled(mesh)
    experts = expert_states(module)
    assert {module.state[name].kind for name in experts} == {StateKind.PARAM, StateKind.GRAD, StateKind.MOMENT}
    for name in experts:
        assert module.state[name].type.placement == tuple((axis, Shard(0)) for axis in axes), name
    reduced = {v.name for n in module.entry_function("finish").nodes if n.op == "all_reduce_start" for v in n.operands}
    assert reduced, "what is no expert's is reduced"
    assert not reduced & experts


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dispatch", ["alltoall", "allgather"])
def test_bytes_are_those_of_each_token_once_a_rank(ranks: int, dispatch: str) -> None:
    """Not once an expert: a message has room for a row for each token and rank, whatever the number of experts a token
    has. That no rank gets tokens that have no expert there is counted in tests/runtime/test_traffic.py."""
    module = compiled(f"ep={ranks}", dispatch)
    order = prove(module)
    sizes = extents(module, {"B": BATCH, "S": SEQUENCE})
    layer = next(f for f in order.items if f.endswith(".fwd"))
    sent = [i for i in order.issued if i.function.name == layer and i.axis == "ep"]
    there, back = ("all_to_all", "all_to_all") if dispatch == "alltoall" else ("all_gather", "reduce_scatter")
    assert [i.kind for i in sent] == [there, back]
    width, choices = 64, int(str(next(n for _, n in module.walk() if n.op == "moe_route").attrs["top_k"]))
    found = [evaluate(message_bytes(order, i), sizes) for i in sent]
    assert found == [ranks * TOKENS * (4 * width + 4 * choices + 8 * choices), ranks * TOKENS * 4 * width]


def test_rows_have_room_for_all_tokens_of_all_ranks() -> None:
    assert extents(compiled("ep=4"), {"B": BATCH, "S": SEQUENCE})["R"] == 4 * TOKENS
    assert extents(compiled("fsdp=2,ep=fsdp"), {"B": BATCH, "S": SEQUENCE})["R"] == 2 * TOKENS


WAYS = """mgraph-ir 1
module "m"
dim T 1..
dim R 0.. ragged <= T by bound
axis ep = RANKS
func @main(%x: f32[T, 4]{ep=S(0)}, %indices: i64[T, CHOICES]{ep=S(0)}) {
  %sent: f32[R, 4]{ep=S(0)} = expert_send(%x, %indices) {num_experts = 8, rows = "R"} AT
  %y: f32[T, 4]{ep=S(0)} = expert_return(%sent, %indices) {num_experts = 8, rows = "R"} AT
  return %y
}
entry main = @main -> (y)
"""


@pytest.mark.parametrize(
    ("ranks", "choices", "budget", "part"),
    [(4, 2, 1.0, 0.5), (4, 1, 1.5, 0.375), (2, 4, 0.5, 0.5), (2, 8, 0.75, 0.75), (4, 8, 0.25, 0.25), (2, 4, 1.5, 1.0)],
)
def test_a_budget_is_of_the_ranks_that_a_token_may_go_to(ranks: int, choices: int, budget: float, part: float) -> None:
    """Which are no more than there are, however many experts it has: more of them make no more room."""
    at = 'forward at "m" "m.py":1 by expert-dispatch'
    text = WAYS.replace("RANKS", str(ranks)).replace("CHOICES", str(choices)).replace("AT", at)
    after = ExpertParallel(budget=budget).run(parse_module(text), Report())
    assert evaluate(after.dims["R"].bound, {"T": 40}) == ranks * part * 40
    placed = [node for _, node in after.walk() if node.op in ("pack_rows", "within_room", "unpack_rows")]
    assert placed and {node.attrs.get("part", 1.0) for node in placed} == {part}


def test_the_host_reads_sizes_once_in_a_forward() -> None:
    """So no entry that sends tokens is one CUDA graph, which is said; the manifest counts how often each waits."""
    recipe = Recipe(model="moe-tiny", mesh="ep=2", precision="bf16", expert_extent="host")
    done = build_module(recipe)
    reads = [function.name for function, node in done.module.walk() if node.op == "read_sizes"]
    assert sorted(reads) == ["layer", "layer.fwd"]
    assert {d.extent for d in done.module.dims.values() if d.ragged} == {Extent.HOST}
    missed = [m for r in done.results if r.name == "cuda-graphs" for m in r.report.near_misses]
    told = "microbatch is no single graph, but calls of 2 functions are graphs: read_sizes at"
    assert any(told in m.detail for m in missed)
    assert not done.module.entries["microbatch"].captured and done.module.entries["finish"].captured
    written = manifest(done.module, "train", "", {}, {}, [], {})
    assert written["host_reads"] == {"microbatch": 2, "evaluate": 2, "predict": 2}


def test_one_rank_sends_nothing() -> None:
    module = compiled("ep=1")
    kinds = {i.kind for i in prove(module).issued}
    assert kinds == {"all_reduce"}  # of what finish sums over the axis


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dispatch": "allgather"}, "all ranks get all tokens: there are no sizes to read"),
        ({"expert_budget": 1.5}, "rows have room for a budget, or for exactly what there is"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], said: str) -> None:
    recipe = Recipe(model="moe-tiny", mesh="ep=2", arch="none", expert_extent="host", **options)
    with pytest.raises(PassError, match=said) as caught:
        build_module(recipe)
    assert caught.value.hint


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(PassError, match="no experts that ranks could share"):
        compiled("ep=2", model="dense-tiny")


def test_an_axis_that_does_not_divide_the_experts_is_refused() -> None:
    with pytest.raises(PassError, match="ep=3 does not divide the 8 experts of layers"):
        compiled("ep=3")


def test_splitting_and_sending_are_verified_as_one() -> None:
    results = build_module(Recipe(model="moe-tiny", mesh="ep=2", arch="none", verify=True)).results
    found = {r.name: r.measured["verify"] for r in results}
    assert "checked with expert-parallel" in found.pop("data-parallel")["why"]
    assert {measured["status"] for measured in found.values()} == {"verified"}
    assert found["expert-parallel"]["method"] == "one rank with the microbatches of 2"
    assert found["expert-parallel"]["error"] <= 1e-9
