"""Sequence parallelism: the values of one rank, what lies split between the blocks, and what is sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mgraph.compiler import pipeline_text
from mgraph.errors import OptionError, PassError
from mgraph.ir.collective_proof import prove
from mgraph.ir.graph import Axis, Fact, Module, State, StateKind, Value
from mgraph.ir.interpreter import run, run_ranks
from mgraph.ir.local import part
from mgraph.ir.ops.random import STATES
from mgraph.ir.types import Partial, Shard
from mgraph.ir.verifier import verify
from mgraph.passes.adamw import AdamW
from mgraph.passes.autodiff import Autodiff
from mgraph.passes.base import Report
from mgraph.passes.pipeline import run_pipeline
from mgraph.passes.recompute import Recompute
from mgraph.passes.repeat_heads import RepeatHeads
from mgraph.passes.spreading import Spreader
from mgraph.passes.tensor_parallel import TensorParallel
from mgraph.passes.verify import TwinCheck
from mgraph.recipe import Recipe
from tests.families.configs import write_config
from tests.passes.build import B, S, i64, module_of, started
from tests.passes.models import tensor
from tests.passes.spread import trained, worst_difference
from tests.sampling import sampled


@pytest.fixture(scope="module")
def forward() -> Module:
    return trained("dense-tiny", after="raise-loss")


@pytest.fixture(scope="module")
def dense(forward: Module) -> Module:
    return run_pipeline(forward, [Autodiff(), AdamW()])[0]


def spread(before: Module, size: int = 2) -> Module:
    after = TensorParallel(size=size, sequence=True).run(before, Report())
    verify(after)
    prove(after)
    return after


def test_dense(dense: Module) -> None:
    after = spread(dense)
    assert [fact.text for fact in after.facts] == ["S % tp == 0"]
    assert worst_difference(dense, after, "tp", 2, steps=2) <= 1e-9


def test_activations_lie_split_between_the_blocks(dense: Module) -> None:
    after = spread(dense)
    for name, sent in (
        ("layer.fwd", ["all_gather", "reduce_scatter"] * 2),
        ("layer", ["all_gather", "reduce_scatter"] * 2),
    ):
        layer = after.functions[name]
        assert [n.op for n in layer.nodes if n.made_by == "tensor-parallel"] == sent
        wide = [n.results[0] for n in layer.nodes if n.op in ("rms_norm", "aten.add.Tensor")]
        assert len(wide) == 4 and all(v.tensor.on("tp") == Shard(1) for v in (*wide, layer.params[0], layer.results[0]))
    kept = after.functions["layer.fwd"].results
    assert all(v.tensor.on("tp") is not None for v in kept)


def test_what_is_reduced_whole_is_small(dense: Module) -> None:
    """Gradients of norms; activations and their gradients are scattered."""
    nodes = spread(dense).functions["layer.bwd"].nodes
    assert [n.result.tensor.shape for n in nodes if n.op == "all_reduce"] == [(64,)] * 2
    assert sum(n.op == "reduce_scatter" for n in nodes) == 2
    assert sum(n.op == "all_gather" for n in nodes) == 4  # two gradients, and two inputs of linears once more


def test_ranks_that_share_heads(forward: Module, dense: Module) -> None:
    """Four ranks over two key/value heads, everything computed again in the backward."""
    derive = [RepeatHeads(4), Autodiff(), Recompute(mode="full"), AdamW()]
    after = spread(run_pipeline(forward, derive)[0], 4)
    assert worst_difference(dense, after, "tp", 4, steps=1) <= 1e-9


@pytest.mark.parametrize("model", sampled(["moe-tiny", "dense-tiny-geglu", "dense-tiny-sinks"], 1))
def test_zoo(model: str) -> None:
    before = trained(model)
    assert worst_difference(before, spread(before), "tp", 2, steps=1) <= 1e-9


@pytest.mark.parametrize("family", sampled(["gpt2", "bert", "llama3", "gpt-oss", "gemma3"], 0))
def test_families(family: str, tmp_path: Path) -> None:
    """Dropout of shards (gpt2, bert), biases after the sum, norms on both sides of a block."""
    before = trained(write_config(family, tmp_path / family))
    after = spread(before)
    drops = [n for _, n in after.walk() if n.op == "dropout_part"]
    assert bool(drops) == (family in ("gpt2", "bert"))
    assert worst_difference(before, after, "tp", 2, steps=1) <= 1e-9


def test_dropout_of_shards() -> None:
    """What a rank drops of its part of the sequences is what one rank drops there."""
    weights = {"up": tensor(8, 6), "down": tensor(6, 8)}
    state = {n: State.make(n, t, StateKind.PARAM) for n, t in weights.items()}
    numbers = {n: State.make(n, i64(), StateKind.SCALAR, init=init, persist=False) for n, init in STATES.items()}
    builder = started()
    x = builder.param("x", tensor(B, S, 6))
    hidden = builder.one("aten.relu.default", builder.one("aten.linear.default", x, state["up"].value))
    summed = builder.one("aten.linear.default", hidden, state["down"].value)
    drawn = [numbers[n].value for n in STATES]
    dropped = builder.one("dropout", summed, *drawn, p=0.5, site="drop", samples=B)
    before = module_of(builder.build([builder.one("aten.add.Tensor", x, dropped)]), state=state | numbers)
    placed = {"up": Shard(0), "down": Shard(1)}
    mesh, spreader = (Axis("tp", 2),), Spreader(before, "tp", 2, "test", "S")
    moved = {
        n: replace(s, value=Value(n, s.type.place("tp", placed.get(n)), is_state=True)) for n, s in before.state.items()
    }
    spreader.mapping.update({s.value: moved[n].value for n, s in before.state.items()})
    spreader.entry(before.entries["forward"], moved)
    after = replace(before, mesh=mesh, facts=(Fact("S % tp == 0"),), state=moved, functions=spreader.functions)
    verify(after)
    ops = [n.op for n in after.functions["forward"].nodes]
    assert ops[3:7] == ["reduce_scatter", "axis_index", "dropout_part", "part_of"]
    held = {n: torch.randn([int(d) for d in s.type.shape]) for n, s in state.items()}
    held |= {n: torch.tensor(i + 3) for i, n in enumerate(STATES)}
    inputs = {"x": torch.randn(3, 10, 6)}
    expected, _ = run(before, "forward", inputs, held, lifted=True)
    parts = [{n: part(t, moved[n].type, {"tp": 2}, {"tp": r}) for n, t in held.items()} for r in range(2)]
    found, _ = run_ranks(after, "forward", [inputs] * 2, parts, {"tp": 2}, lifted=True)
    for rank in found:
        torch.testing.assert_close(rank["out0"], expected["out0"], rtol=1e-12, atol=1e-12)


def test_verified_on_the_twin(forward: Module) -> None:
    derive = [Autodiff(), AdamW(), TensorParallel(size=2, sequence=True)]
    *_, result = run_pipeline(forward, derive, [TwinCheck(ranks=2, parts=2)])[1]
    assert result.measured["verify"]["status"] == "verified"


def test_recipe(dense: Module) -> None:
    recipe = Recipe(model="dense-tiny", mesh="dp=2,tp=2", sequence_parallel=True)
    assert "sequence=true" in pipeline_text(recipe)
    with pytest.raises(OptionError, match="the mesh dp=2 has no axis tp"):
        pipeline_text(Recipe(model="dense-tiny", mesh="dp=2", sequence_parallel=True))
    lost = Module("m", entries=dense.entries, functions=dense.functions, state=dense.state)
    with pytest.raises(PassError, match="the model has no dim S"):
        TensorParallel(sequence=True).run(lost, Report())


def test_experts_and_shared_experts_are_one_sum() -> None:
    """What both give stays partial, in any shape, until they are added; then it is scattered along the sequence."""
    module = TensorParallel(sequence=True).run(trained("moe-tiny-grouped"), Report())
    layer = module.functions["layer.fwd"]
    ffn = [n for n in layer.nodes if n.op in ("all_reduce", "reduce_scatter")]
    assert [n.op for n in ffn] == ["reduce_scatter", "reduce_scatter"], "of the attention, and of both"
    makers = layer.producers()
    added = makers[ffn[-1].operands[0]]
    assert added.op == "aten.add.Tensor" and all(v.tensor.on("tp") == Partial() for v in added.operands)
