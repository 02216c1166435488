"""Tensor parallelism: all ranks in one process against one rank, where weights lie, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgraph.errors import OptionError, PassError
from mgraph.ir.builder import rebuild
from mgraph.ir.graph import Module, StateKind
from mgraph.ir.types import Partial, Shard
from mgraph.ir.verifier import verify
from mgraph.passes.adamw import AdamW
from mgraph.passes.autodiff import Autodiff
from mgraph.passes.base import Report
from mgraph.passes.pipeline import run_pipeline
from mgraph.passes.tensor_parallel import TensorParallel
from mgraph.passes.verify import TwinCheck
from mgraph.placement_rules import chosen
from tests.families.configs import write_config
from tests.passes.spread import trained, worst_difference
from tests.sampling import sampled

PLACES = {
    "embed.weight": Shard(0),
    "layers.0.attn_norm.weight": None,
    "layers.0.attn.q.weight": Shard(0),
    "layers.0.attn.k.weight": Shard(0),
    "layers.1.attn.v.weight": Shard(0),
    "layers.1.attn.o.weight": Shard(1),
    "layers.1.ffn.gate.weight": Shard(0),
    "layers.0.ffn.up.weight": Shard(0),
    "layers.0.ffn.down.weight": Shard(1),
    "norm.weight": None,
    "head.weight": Shard(0),
}


@pytest.fixture(scope="module")
def dense() -> Module:
    return trained("dense-tiny")


def test_dense(dense: Module) -> None:
    report = Report()
    after = TensorParallel().run(dense, report)
    verify(after)
    assert {n: after.state[n].type.on("tp") for n in PLACES} == PLACES
    for name, place in PLACES.items():
        assert all(after.state[f"{name}.{end}"].type.on("tp") == place for end in ("grad", "m", "v"))
    assert not report.near_misses
    assert worst_difference(dense, after, "tp", 2) <= 1e-9


def test_a_layer_communicates_twice_in_each_direction(dense: Module) -> None:
    after = TensorParallel().run(dense, Report())
    for name in ("layer.fwd", "layer.bwd"):
        made = [n for n in after.functions[name].nodes if n.made_by == "tensor-parallel"]
        assert [n.op for n in made] == ["all_reduce", "all_reduce"]
        assert all(n.origin.path.startswith("layers.*") for n in made)
    head = [n.op for n in after.functions["microbatch"].nodes if n.op in ("all_reduce", "all_gather")]
    assert head == ["all_reduce", "all_gather", "all_reduce"]  # embedding, loss, gradient of the head's input


def test_one_rank_needs_no_collective(dense: Module) -> None:
    after = TensorParallel(size=1).run(dense, Report())
    assert not any(n.made_by == "tensor-parallel" for _, n in after.walk())


@pytest.mark.parametrize("model", sampled(["dense-tiny-geglu", "dense-tiny-sinks", "moe-tiny-grouped"], 1))
def test_zoo(model: str) -> None:
    """A tied head; sinks, biases and a part of each head rotated; experts, with a shared one."""
    before = trained(model)
    after = TensorParallel().run(before, Report())
    verify(after)
    assert worst_difference(before, after, "tp", 2) <= 1e-9


def test_biases_are_added_once(tmp_path: Path) -> None:
    """Llama 3 with biases everywhere: that of a row-parallel product is added to the sum."""
    before = trained(write_config("llama3", tmp_path / "llama3"))
    after = TensorParallel().run(before, Report())
    verify(after)
    assert after.state["model.layers.0.self_attn.o_proj.bias"].type.on("tp") is None
    assert after.state["model.layers.0.self_attn.q_proj.bias"].type.on("tp") == Shard(0)
    assert worst_difference(before, after, "tp", 2) <= 1e-9


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (4, "tp=4 does not divide the 2 key/value heads of layers.*.attn"),
        (3, "tp=3 does not divide the 256 entries of the vocabulary of embed"),
    ],
)
def test_what_the_axis_does_not_divide_is_refused(dense: Module, size: int, message: str) -> None:
    with pytest.raises(PassError) as caught:
        TensorParallel(size=size).run(dense, Report())
    assert caught.value.message == message
    assert "models/" in str(caught.value.where)


def test_experts_are_split_along_their_inner_width() -> None:
    """Each rank has a part of every expert; what they give is a partial sum until it is back with its token."""
    report = Report()
    after = TensorParallel().run(trained("moe-tiny"), report)
    assert not report.near_misses
    for name, dim in (("gate", 2), ("up", 2), ("down", 1)):
        assert after.state[f"layers.0.ffn.{name}.weight"].type.on("tp") == Shard(dim)
        assert after.state[f"layers.0.ffn.{name}.weight.grad"].type.on("tp") == Shard(dim)
    forward = after.functions["layer.fwd"]
    combine = next(node for node in forward.nodes if node.op == "moe_combine")
    assert [v.tensor.on("tp") for v in (*combine.operands, combine.result)] == [Partial(), None, None, Partial()]
    reduced = [node.operands[0] for node in forward.nodes if node.op == "all_reduce"]
    assert len(reduced) == 2 and all(len(v.tensor.shape) == 2 or v.tensor.shape[-1] == 64 for v in reduced)


def test_a_bias_of_experts_is_added_by_one_rank(tmp_path: Path) -> None:
    """gpt-oss: gates and units are columns that alternate, and what is summed over the axis has a bias."""
    before, report = trained(write_config("gpt-oss", tmp_path / "gpt-oss")), Report()
    after = TensorParallel().run(before, report)
    verify(after)
    assert not report.near_misses
    places = {"gate_up_proj": Shard(2), "gate_up_proj_bias": Shard(1), "down_proj": Shard(1), "down_proj_bias": None}
    for name, place in places.items():
        assert after.state[f"model.layers.0.mlp.experts.{name}"].type.on("tp") == place
    biases = [n.operands[3] for _, n in after.walk() if n.op == "grouped_matmul" and len(n.operands) == 4]
    assert {v.tensor.on("tp") for v in biases} == {Shard(1), Partial()}
    assert worst_difference(before, after, "tp", 2) <= 1e-9


class Forgetful(TensorParallel):
    """Leaves out the reduction behind the attention."""

    def run(self, module: Module, report: Report) -> Module:
        """Spread, and then drop the first all_reduce of the layer."""
        after = super().run(module, report)
        layer = after.functions["layer"]
        builder, dropped = rebuild(layer, self.name), False
        for node in layer.nodes:
            if node.op == "all_reduce" and not dropped:
                builder.replace(node.result, node.operands[0])
                dropped = True
            else:
                builder.keep(node)
        return after.with_function(builder.build(layer.results))


def test_verify_measures_the_plan_on_the_twin() -> None:
    forward = trained("dense-tiny", after="raise-loss")
    derive = [Autodiff(), AdamW()]
    *_, result = run_pipeline(forward, [*derive, TensorParallel(size=2)], [TwinCheck(ranks=2, parts=2)])[1]
    found = result.measured["verify"]
    assert found["status"] == "verified"
    assert found["method"] == "the same step without tp"
    with pytest.raises(PassError, match="pass 'tensor-parallel' changes the numbers"):
        run_pipeline(forward, [*derive, Forgetful(size=2)], [TwinCheck(ranks=2, parts=2)])


RULES = [
    ("layers.*.ffn.down.weight: S(0)@tp", "embed.weight: S(1)@tp", "norm.weight: S(0)@tp"),
    ("layers.1.attn.*.weight: R@tp", "layers.0.attn.o.weight: S(0)@tp", "layers.0.ffn.gate.weight: S(1)@tp"),
]


@pytest.mark.parametrize("rules", RULES)
def test_rules_place_weights_elsewhere(dense: Module, rules: tuple[str, ...]) -> None:
    report = Report()
    after = TensorParallel(place=rules).run(dense, report)
    verify(after)
    params = [n for n, s in dense.state.items() if s.kind is StateKind.PARAM]
    assert report.counts["placed by rule"] == len(chosen(rules, "tp", params))
    for name, rule in chosen(rules, "tp", params).items():
        place = None if rule.dim is None else Shard(rule.dim)
        assert all(after.state[f"{name}{end}"].type.on("tp") == place for end in ("", ".grad", ".m"))
    assert worst_difference(dense, after, "tp", 2, steps=2) <= 1e-9


@pytest.mark.parametrize(
    ("model", "rule"),
    sampled(
        [
            ("moe-tiny", "*.ffn.gate.weight|*.router.*: S(0)@tp"),
            ("qwen3", "*q_norm.weight|*.down_proj.weight: S(0)@tp"),
        ],
        1,
    ),
)
def test_rules_for_experts_and_another_library(model: str, rule: str, tmp_path: Path) -> None:
    before = trained(model if "-" in model else write_config(model, tmp_path / model))
    after = TensorParallel(place=(rule,)).run(before, Report())
    verify(after)
    assert after.state != TensorParallel().run(before, Report()).state
    assert worst_difference(before, after, "tp", 2, steps=1) <= 1e-9


def test_what_does_not_divide_may_be_left_whole(dense: Module) -> None:
    """256 entries of the vocabulary, 4 heads and 176 columns over 3 ranks: no weight is split."""
    after = TensorParallel(size=3, place=("*: R@tp",)).run(dense, Report())
    assert all(not s.type.placement for s in after.state.values())
    with pytest.raises(PassError, match="tp=3 does not divide the 4 heads"):
        TensorParallel(size=3, place=("embed.weight|head.weight: R@tp",)).run(dense, Report())


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("norm.weight: S(1)@tp", "splits dim 1 of norm.weight f32[64], which has 1"),
        ("embed.weight: S(0)@tp", "splits dim 0 of embed.weight f32[256, 64], which tp=3 does not divide"),
        ("nrom.weight: R@tp", "matches no parameter"),
    ],
)
def test_rules_that_cannot_be(dense: Module, rule: str, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        TensorParallel(size=3, place=(rule, "*: R@tp")).run(dense, Report())
    assert says in str(caught.value) and caught.value.where == "--place"
