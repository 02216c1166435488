"""Repeated key/value heads: ranks that share one give the numbers of one rank, and what cannot be repeated stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgraph.compiler import pipeline_text
from mgraph.errors import PassError
from mgraph.ir.graph import Module
from mgraph.ir.types import Shard
from mgraph.ir.verifier import verify
from mgraph.passes.adamw import AdamW
from mgraph.passes.autodiff import Autodiff
from mgraph.passes.base import Report
from mgraph.passes.pipeline import run_pipeline
from mgraph.passes.recompute import Recompute
from mgraph.passes.repeat_heads import RepeatHeads
from mgraph.passes.tensor_parallel import TensorParallel
from mgraph.passes.verify import TwinCheck
from mgraph.recipe import Recipe
from tests.families.configs import write_config
from tests.passes.build import started
from tests.passes.models import tensor
from tests.passes.spread import trained, worst_difference
from tests.sampling import sampled


@pytest.fixture(scope="module")
def dense() -> Module:
    """Four query heads over two of keys and values."""
    return trained("dense-tiny", after="raise-loss")


def spread(forward: Module, ranks: int, mode: str = "none") -> tuple[Module, Module]:
    """The training graph of one rank, and that over an axis."""
    alone, _ = run_pipeline(forward, [Autodiff(), AdamW()])
    derive = [RepeatHeads(ranks), Autodiff(), Recompute(mode=mode), AdamW(), TensorParallel(size=ranks)]
    after, _ = run_pipeline(forward, derive)
    verify(after)
    return alone, after


def test_dense(dense: Module) -> None:
    alone, after = spread(dense, 4)
    assert {n: s.type.shape for n, s in after.state.items()} == {n: s.type.shape for n, s in alone.state.items()}
    places = {n: after.state[f"layers.0.attn.{n}.weight"].type.on("tp") for n in "qkvo"}
    assert places == {"q": Shard(0), "k": None, "v": None, "o": Shard(1)}
    layer = after.functions["layer.fwd"]
    (attention,) = (n for n in layer.nodes if n.op == "attention")
    assert [v.tensor.shape[1] for v in attention.operands[:3]] == [4, 4, 4]
    assert all(v.tensor.on("tp") == Shard(1) for v in attention.operands[:3])
    assert worst_difference(alone, after, "tp", 4) <= 1e-9


def test_only_weights_and_the_residual_are_reduced(dense: Module) -> None:
    _, after = spread(dense, 4)
    reduced = [n.result.tensor.shape for n in after.functions["layer.bwd"].nodes if n.op == "all_reduce"]
    assert sorted(map(len, reduced)) == [2, 2, 3, 3]
    assert not any(n.op == "all_gather" for n in after.functions["layer.bwd"].nodes)


def test_adapters() -> None:
    """What adapts a weight of keys is repeated with it, and dropout in front of one draws a rank's own numbers."""
    alone, after = spread(trained("dense-tiny", after="lora", lora=("*attn.*: rank=3, dropout=0.2",)), 4)
    assert not any(n.op == "all_gather" for n in after.functions["layer.fwd"].nodes)
    assert any(n.op == "dropout_part" for n in after.functions["layer.fwd"].nodes)
    assert worst_difference(alone, after, "tp", 4, steps=1) <= 1e-9


@pytest.mark.parametrize(
    ("model", "mode"),
    sampled([("moe-tiny", "none"), ("dense-tiny-sinks", "none"), ("dense-tiny-geglu", "full")], 0),
)
def test_zoo(model: str, mode: str) -> None:
    alone, after = spread(trained(model, after="raise-loss"), 4, mode)
    assert worst_difference(alone, after, "tp", 4, steps=2) <= 1e-9


@pytest.mark.parametrize("family", sampled(["qwen3", "llama3", "gpt-oss", "gemma3", "qwen3-moe"], 1))
def test_families(family: str, tmp_path: Path) -> None:
    """Norms of heads, biases, sinks, two kinds of layers."""
    alone, after = spread(trained(write_config(family, tmp_path / family), after="raise-loss"), 4)
    assert any("repeated_part" in n.op for _, n in after.walk())
    assert worst_difference(alone, after, "tp", 4, steps=2) <= 1e-9


@pytest.mark.parametrize("size", [1, 2, 3])
def test_nothing_to_do(dense: Module, size: int) -> None:
    assert RepeatHeads(size).run(dense, Report()) is dense


def test_what_cannot_divide_is_refused(dense: Module) -> None:
    derive = [RepeatHeads(8), Autodiff(), AdamW(), TensorParallel(size=8)]
    with pytest.raises(PassError) as caught:
        run_pipeline(dense, derive)
    assert caught.value.message == "tp=8 does not divide the 4 heads of layers.*.attn"


def test_what_others_read_is_not_repeated() -> None:
    builder = started()
    x = builder.param("x", tensor(2, 3, 16))
    q, k, o = (builder.slot(n, tensor(*s)) for n, s in (("q", (16, 16)), ("k", (8, 16)), ("o", (16, 16))))
    made = [builder.one("aten.linear.default", x, w) for w in (q, k)]
    heads = [builder.one("reshape", v, shape=(2, 3, n, 4)) for v, n in zip(made, (4, 2), strict=True)]
    query, shared = (builder.one("aten.permute.default", v, dims=(0, 2, 1, 3)) for v in heads)
    out = builder.one("attention", query, shared, shared, scale=0.5)
    joined = builder.one("reshape", builder.one("aten.permute.default", out, dims=(0, 2, 1, 3)), shape=(2, 3, 16))
    function = builder.build([builder.one("aten.linear.default", joined, o), made[1]])
    module = Module("test", functions={"forward": function})
    report = Report()
    assert RepeatHeads(4).run(module, report) is module
    assert [m.detail for m in report.near_misses] == ["%linear_1 is read by the caller, too"]


def test_verified_on_the_twin(dense: Module) -> None:
    derive = [RepeatHeads(4), Autodiff(), AdamW(), TensorParallel(size=4)]
    results = run_pipeline(dense, derive, [TwinCheck(ranks=4, parts=2)])[1]
    assert {r.measured["verify"]["status"] for r in results} == {"verified"}


def test_where_it_is_in_the_pipeline() -> None:
    assert "repeat-heads{size=8},autodiff" in pipeline_text(Recipe(model="dense-tiny", mesh="dp=1,tp=8"))
    assert "repeat-heads" not in pipeline_text(Recipe(model="dense-tiny", mesh="dp=2"))
