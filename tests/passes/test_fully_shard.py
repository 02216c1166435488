"""What is sharded, gathered and scattered, and when; that the numbers stay is what the table of meshes shows."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from mgraph.errors import PassError
from mgraph.ir.collective_proof import prove
from mgraph.ir.graph import Function, Module, Node, StateKind
from mgraph.ir.types import DType, PendingType, Shard, TensorType
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.data_parallel import DataParallel
from mgraph.passes.equivalence import check
from mgraph.passes.fully_shard import FullyShard, shard_of
from mgraph.passes.samples import Shapes
from mgraph.passes.tensor_parallel import TensorParallel
from tests.passes.spread import trained

KINDS = (StateKind.PARAM, StateKind.GRAD, StateKind.MOMENT)
trained_once = cache(trained)


def sharded(model: str = "dense-tiny", *, over: Module | None = None, **options: object) -> Module:
    module = FullyShard(**options).run(over or trained_once(model), Report())  # type: ignore[arg-type]
    verify(module)
    prove(module)
    return module


def events(function: Function) -> list[str]:
    """Collectives and calls in order, each with the layer or the states that it is about."""
    found = []
    for node in function.nodes:
        if node.op == "call":
            found.append(f"{node.attrs['callee']} {layer(node.origin.path)}")
        elif node.op.endswith("_start") and node.attrs["axis"] == "fsdp":
            found.append(f"{node.op.removesuffix('_start')} {subject(node)}")
        elif node.op == "wait":
            found.append("wait")
    return found


def layer(path: str) -> str:
    match = re.match(r"layers\.(\d+)", path)
    return match[1] if match else path


def subject(node: Node) -> str:
    names = node.operands if node.operands[0].is_state else node.results
    short = [re.sub(r"layers[._](\d+)[._].*", r"\1", v.name).removesuffix("_grad_pending") for v in names]
    return "+".join(dict.fromkeys(short))


def test_units_are_gathered_ahead_and_gradients_scattered_behind() -> None:
    module = sharded()
    assert events(module.entry_function("microbatch")) == [
        "all_gather embed.weight",
        "wait",
        "all_gather 0",
        "wait",
        "all_gather 1",
        "layer.fwd 0",
        "wait",
        "all_gather norm.weight+head.weight",
        "layer.fwd 1",
        "wait",
        "all_gather 0",  # the last layer is whole still
        "reduce_scatter head_weight+norm_weight",
        "layer.bwd 1",
        "wait",
        "reduce_scatter 1",
        "wait",
        "layer.bwd 0",
        "wait",
        "reduce_scatter 0",
        "wait",
        "reduce_scatter embed_weight",
        "wait",
    ]


def test_the_last_layer_is_not_gathered_again_for_a_backward_that_needs_less() -> None:
    """The backward does not read biases."""
    function = sharded("dense-tiny-sinks").entry_function("microbatch")
    gathered = [subject(node) for node in function.nodes if node.op == "all_gather_start"]
    assert [name for name in gathered if name.isdigit()] == ["0", "1", "0"]


def test_what_is_kept_gathered_is_gathered_once() -> None:
    gathered = [e for e in events(sharded(reshard=False).entry_function("microbatch")) if e.startswith("all_gather")]
    names = ["embed.weight", "0", "1", "norm.weight+head.weight"]
    assert gathered == [f"all_gather {name}" for name in names]


@pytest.mark.parametrize(("level", "kinds"), [(1, KINDS[2:]), (2, KINDS[1:]), (3, KINDS)])
def test_levels_shard_one_kind_of_state_after_the_other(level: int, kinds: tuple[StateKind, ...]) -> None:
    module = sharded(level=level)
    for state in module.state.values():
        if state.kind in KINDS:
            assert state.type.on("fsdp") == (Shard(0) if state.kind in kinds else state.type.on("fsdp"))
            assert isinstance(state.type.on("fsdp"), Shard) == (state.kind in kinds), state.name
    ops = {node.op for node in module.entry_function("finish").nodes}
    assert ("reduce_scatter_start" in ops) == (level == 1) and ("all_gather_start" in ops) == (level < 3)
    data = {node.op for node in module.entry_function("microbatch").nodes}
    assert ("reduce_scatter_start" in data) == (level > 1) and ("all_gather_start" in data) == (level == 3)


def test_functions_below_get_whole_tensors_and_give_gradients() -> None:
    before, after = trained_once("dense-tiny"), sharded()
    old, new = before.functions["layer.bwd"], after.functions["layer.bwd"]
    assert len(old.slots) == 18 and not new.slots
    assert len(new.params) == len(old.params) + 9 and len(new.results) == len(old.results)
    assert not any(node.op == "accumulate" for node in new.nodes)


def test_shards_of_replicas_and_of_what_a_layer_is_divided_into() -> None:
    spread = TensorParallel(size=2).run(DataParallel(size=2).run(trained_once("dense-tiny"), Report()), Report())
    module = sharded(over=spread)
    assert [axis.name for axis in module.mesh] == ["dp", "fsdp", "tp"]
    assert str(module.state["layers.0.ffn.up.weight"].type) == "f32[176, 64]{tp=S(0), fsdp=S(0)}"
    assert str(module.state["layers.0.ffn.down.weight"].type) == "f32[64, 176]{tp=S(1), fsdp=S(0)}"
    squares = [n for n in module.entry_function("finish").nodes if n.op == "all_reduce"]
    assert {n.attrs["axis"] for n in squares} == {"tp", "fsdp"}, "the norm is over all shards"


def test_the_first_dim_that_divides() -> None:
    type_ = TensorType(DType.F32, (6, 8))
    assert shard_of(type_, {}, 2) == Shard(0) and shard_of(type_, {}, 4) == Shard(1) and shard_of(type_, {}, 5) is None
    assert shard_of(type_.place("tp", Shard(0)), {"tp": 2}, 2) == Shard(1)
    assert shard_of(type_.place("tp", Shard(0)), {"tp": 2}, 3) == Shard(0)
    assert shard_of(TensorType(DType.F32, ()), {}, 2) is None


def test_an_axis_that_divides_next_to_nothing_is_refused() -> None:
    with pytest.raises(PassError, match=r"fsdp=3 divides no dim of \d+ parameters"):
        FullyShard(size=3).run(trained_once("dense-tiny"), Report())


def test_a_small_tensor_that_does_not_divide_stays_whole() -> None:
    report = Report()
    module = FullyShard(size=64).run(trained_once("dense-tiny-sinks"), report)
    verify(module)
    assert {miss.node.rpartition(".")[2] for miss in report.near_misses} == {"bias"}
    bias = module.state["layers.0.attn.k.bias.grad"]
    assert str(bias.type.on("fsdp")) == "P(sum)", "its gradient is summed in `finish`"


def test_the_twin_is_sharded_as_the_model_is() -> None:
    """Two ranks divide biases that 64 do not."""
    model = trained_once("dense-tiny-sinks")
    real = FullyShard(size=64)
    states, twins = (p.run(model, Report()).state for p in (real, real.on_twin(model)))
    assert {n: s.type.placement for n, s in twins.items()} == {n: s.type.placement for n, s in states.items()}


PENALISED = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, tokens):
        return self.head(self.embed(tokens)), self.head.weight.square().sum()


def inputs(B, S):
    return {"tokens": (torch.int64, (B, S)), "labels": (torch.int64, (B, S))}


def loss(outputs, batch):
    logits, penalty = outputs
    labels = batch["labels"].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") + penalty, (labels != -100).sum()
"""


@pytest.mark.parametrize("level", [2, 3])
def test_a_gradient_that_no_batch_is_in_counts_on_each_rank(level: int, tmp_path: Path) -> None:
    """That of a penalty on weights is a term of each microbatch, and so of each rank's."""
    (tmp_path / "penalised.py").write_text(PENALISED)
    before = trained(f"{tmp_path}/penalised.py:Model")
    after = sharded(over=before, level=level)
    assert all(found.error <= 1e-12 for found in check(FullyShard(), before, after, Shapes.of(before)))


@pytest.mark.parametrize("level", [1, 2])
def test_parts_along_another_dim_than_the_first(level: int, tmp_path: Path) -> None:
    """Two ranks do not divide the 31 rows, but their columns: where parameters are whole, `finish` updates those."""
    (tmp_path / "odd.py").write_text(PENALISED.replace("32", "31"))
    before = trained(f"{tmp_path}/odd.py:Model")
    after = sharded(over=before, level=level)
    parts = [n.attrs["dim"] for n in after.entry_function("finish").nodes if n.op == "part_of"]
    assert parts == [1, 1], "of the embedding and of the head"
    assert all(found.error <= 1e-12 for found in check(FullyShard(), before, after, Shapes.of(before)))


TWICE = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return x + self.turn(torch.relu(self.turn(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def inputs(B, S):
    return {"tokens": (torch.int64, (B, S)), "labels": (torch.int64, (B, S))}


def loss(logits, batch):
    labels = batch["labels"].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), (labels != -100).sum()
"""


def test_a_layer_that_uses_a_weight_twice_gives_the_sum_of_its_gradients(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    before = trained(f"{tmp_path}/twice.py:Model")
    backward = before.functions["layer.bwd"]
    assert [n.op for n in backward.nodes].count("accumulate") == 2 and len(backward.results) == 2
    after = sharded(over=before)
    assert all(found.error <= 1e-12 for found in check(FullyShard(), before, after, Shapes.of(before)))


def test_wide_sums_are_of_narrow_gradients() -> None:
    module = sharded("dense-tiny", over=trained("dense-tiny", precision="bf16"), wide=True)
    started = [n for n in module.entry_function("microbatch").nodes if n.op == "reduce_scatter_start"]
    assert started and all(n.attrs["wide"] for n in started)
    types = {v.type.value.dtype for n in started for v in n.results if isinstance(v.type, PendingType)}
    assert types == {DType.F32}


def test_wide_sums_at_the_end_of_a_step() -> None:
    module = sharded("dense-tiny", over=trained("dense-tiny", precision="bf16", grad_dtype="param"), level=1, wide=True)
    verify(module)
    started = [n for n in module.entry_function("finish").nodes if n.op == "reduce_scatter_start"]
    assert started and all(n.attrs["wide"] for n in started)
    assert {n.operands[0].tensor.dtype for n in started} == {DType.BF16}
    assert {v.type.value.dtype for n in started for v in n.results if isinstance(v.type, PendingType)} == {DType.F32}


def test_wrong_options() -> None:
    with pytest.raises(PassError, match="size 0"):
        FullyShard(size=0)
    with pytest.raises(PassError, match="level 4"):
        FullyShard(level=4)
