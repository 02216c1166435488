"""Every mesh trains as one device does: a row is a model, a mesh, and what else the recipe says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.end_to_end.meshes import Row, Table
from tests.end_to_end.processes import Runs, assert_close
from tests.families.configs import CONFIGS
from tests.sampling import sampled

MODELS = ["dense-tiny", "moe-tiny-losses", "hf:llama3"]
MESHES = [
    "dp=2",
    "dp=3",
    "dp=4",
    "tp=2",
    "tp=4",
    "dp=2,tp=2",
    "dp=3,tp=2",
    "dp=4,tp=2",
    "dp=2,tp=4",
    "fsdp=2",
    "fsdp=4",
    "fsdp=8",
    "dp=2,fsdp=2",
    "dp=2,fsdp=4",
    "fsdp=2,tp=2",
    "fsdp=4,tp=2",
    "fsdp=2,tp=4",
    "dp=2,fsdp=2,tp=2",
]
THREES = ["fsdp=3", "tp=3", "tp=6", "dp=2,fsdp=3", "fsdp=2,tp=3", "fsdp=3,tp=2"]
OTHERS = [
    *[f"dense-tiny-{kind}" for kind in ("geglu", "capped", "sinks")],
    *[f"moe-tiny-{kind}" for kind in ("grouped", "jitter")],
    *[f"hf:{family}" for family in CONFIGS if family != "llama3"],
]
OPTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("dense-tiny", "fsdp=4", {"zero": 1}),
    ("dense-tiny", "fsdp=4", {"zero": 2}),
    ("moe-tiny-losses", "dp=2,fsdp=2", {"zero": 1}),
    ("moe-tiny-losses", "fsdp=2,tp=2", {"zero": 2}),
    ("hf:llama3", "fsdp=2,tp=2", {"zero": 1}),
    ("hf:llama3", "dp=2,fsdp=2", {"zero": 2}),
    ("dense-tiny", "fsdp=2", {"keep_gathered": True}),
    ("moe-tiny-losses", "fsdp=2,tp=2", {"keep_gathered": True}),
    ("dense-tiny", "dp=2,tp=2", {"overlap": True}),
    ("moe-tiny-losses", "dp=2,fsdp=2", {"overlap": True, "zero": 1}),
    ("dense-tiny", "tp=4", {"recompute": "full"}),
    ("dense-tiny", "fsdp=4", {"recompute": "full"}),
    ("moe-tiny-losses", "dp=2,fsdp=2,tp=2", {"recompute": "full"}),
    ("hf:llama3", "fsdp=2,tp=2", {"recompute": "full", "keep_gathered": True}),
    ("dense-tiny", "fsdp=2,tp=2", {"recompute": "selective", "activation_budget": "40MiB"}),
    ("dense-tiny", "fsdp=2,tp=2", {"offload": "activations,optimizer"}),
    ("moe-tiny-losses", "dp=2,fsdp=2", {"offload": "activations,optimizer", "zero": 2, "overlap": True}),
    ("hf:llama3", "dp=2,tp=2", {"offload": "activations,optimizer", "overlap": True, "precision": "bf16"}),
    ("dense-tiny", "fsdp=2", {"offload": "activations", "recompute": "full", "keep_gathered": True}),
    ("moe-tiny-losses", "tp=2", {"offload": "activations,optimizer", "sequence_parallel": True}),
    ("dense-tiny", "dp=2,fsdp=2", {"precision": "bf16", "wide_sums": True}),
    ("dense-tiny", "fsdp=4,tp=2", {"precision": "bf16"}),
    ("moe-tiny-losses", "fsdp=2,tp=2", {"precision": "fp16", "zero": 1}),
    ("dense-tiny", "fsdp=2,tp=2", {"optimizer": "adam", "max_norm": 0.0}),
    ("dense-tiny", "fsdp=2,tp=2", {"groups": ("*norm*: weight_decay=0, lr=0.1", "embed.*|layers.0.*: frozen")}),
    ("dense-tiny", "fsdp=2,tp=2", {"lora": ("*.q.*|*.down.*: rank=4, alpha=8",)}),
    ("dense-tiny", "dp=2,tp=2", {"place": ("embed.weight|head.weight: R@tp", "*.down.weight: S(0)@tp")}),
    ("dense-tiny", "fsdp=2,tp=2", {"packed": True}),
    *[("dense-tiny", mesh, {"sequence_parallel": True}) for mesh in ("tp=2", "tp=4", "dp=2,fsdp=2,tp=2")],
    ("moe-tiny-losses", "dp=2,tp=2", {"sequence_parallel": True}),
    ("hf:llama3", "fsdp=2,tp=4", {"sequence_parallel": True, "recompute": "full"}),
    ("hf:gpt2", "dp=2,tp=2", {"sequence_parallel": True}),
    ("threes", "tp=3", {"sequence_parallel": True}),
    ("threes", "fsdp=2,tp=4", {"pad": "heads"}),
    ("odd", "fsdp=2,tp=2", {"pad": "vocab"}),
    *[("odd", mesh, {"pad": "heads,vocab"}) for mesh in ("tp=4", "dp=2,tp=4")],
    ("odd", "dp=2,tp=4", {"pad": "heads,vocab", "sequence_parallel": True, "recompute": "full"}),
    ("odd", "fsdp=2,tp=4", {"pad": "heads,vocab", "precision": "bf16", "zero": 1}),
    ("odd", "tp=4", {"pad": "heads,vocab", "place": ("embed.weight|head.weight: S(1)@tp",)}),
    ("odd", "tp=4", {"pad": "heads,vocab", "lora": ("*.q.*|*.o.*: rank=4, alpha=8",)}),
]
FUSED = {"arch": "sm_90a", "precision": "bf16"}
"""With the fused ops of a GPU."""
EXPERTS: list[tuple[str, str, dict[str, Any]]] = [
    *[
        ("moe-tiny-losses", mesh, {"dispatch": dispatch})
        for mesh in (
            "ep=2",
            "ep=4",
            "fsdp=2,ep=fsdp",
            "ep=2,tp=2",
            "dp=2,ep=2",
            "ep=2,fsdp=2",
            "dp=2,fsdp=2,ep=dp*fsdp",
        )
        for dispatch in ("alltoall", "allgather")
    ],
    ("moe-tiny-losses", "dp=2,fsdp=2,ep=fsdp", {"zero": 1}),
    ("moe-tiny-losses", "dp=2,fsdp=2,ep=dp", {"zero": 2}),
    ("moe-tiny-losses", "fsdp=4,ep=fsdp", {"recompute": "full", "keep_gathered": True}),
    ("moe-tiny-losses", "ep=2", {"recompute": "full", "dispatch": "allgather"}),
    ("moe-tiny-losses", "ep=2,tp=2", {"sequence_parallel": True}),
    ("moe-tiny-losses", "ep=2,tp=2", FUSED),
    ("moe-tiny-losses", "ep=2,tp=2", {"recompute": "full", "sequence_parallel": True}),
    ("moe-tiny-losses", "fsdp=2,tp=2,ep=fsdp", {**FUSED, "sequence_parallel": True}),
    *[("moe-tiny-losses", "ep=2", {"ep_chunks": n, "dispatch": d}) for n in (2, 3) for d in ("alltoall", "allgather")],
    ("moe-tiny-losses", "dp=2,fsdp=2,ep=dp*fsdp", {"ep_chunks": 2, "recompute": "full"}),
    (
        "moe-tiny-grouped",
        "ep=2,tp=2",
        {"ep_chunks": 2, "sequence_parallel": True, **FUSED},
    ),
    ("moe-tiny-losses", "ep=2,tp=4", {"place": ("*.gate.weight|*.up.weight|*.down.weight: R@tp",)}),
    *[("moe-tiny-grouped", mesh, {}) for mesh in ("ep=2", "ep=4", "ep=2,tp=2", "fsdp=2,tp=2,ep=fsdp")],
    ("moe-tiny-grouped", "ep=2,tp=2", {"sequence_parallel": True, **FUSED}),
    ("hf:gpt-oss", "ep=2,tp=2", {}),
    ("moe-tiny-losses", "dp=2,ep=2", {"overlap": True}),
    ("moe-tiny-losses", "ep=8", {"precision": "bf16"}),
    ("moe-tiny-losses", "dp=2,ep=1", {"ep_chunks": 2, "expert_budget": 1.25}),
    ("moe-tiny-losses", "dp=2,fsdp=1,ep=fsdp", {"expert_extent": "host"}),
    *[("moe-tiny-losses", mesh, FUSED) for mesh in ("ep=2", "fsdp=2,ep=fsdp")],
    ("moe-tiny-losses", "ep=2", {**FUSED, "recompute": "full", "dispatch": "allgather"}),
    ("moe-tiny-jitter", "ep=2,fsdp=2,tp=2", {}),
    ("moe-tiny-grouped", "fsdp=2,ep=fsdp", {"expert_bias_rate": 0.01}),
    *[
        (model, mesh, {"dispatch": dispatch})
        for model in ("limited-weight", "limited-position")
        for mesh in ("ep=2", "ep=4", "fsdp=2,ep=fsdp")
        for dispatch in ("alltoall", "allgather")
    ],
    ("limited-weight", "ep=2,tp=2", {"sequence_parallel": True}),
    ("limited-position", "ep=2", {"expert_bias_rate": 0.01, "recompute": "full"}),
    ("limited-weight", "ep=2", {"ep_chunks": 2}),
    ("limited-weight", "ep=2", FUSED),
    ("limited-weight", "fsdp=2,tp=2", {}),
    *[
        (model, mesh, {"expert_budget": 1.9 if mesh == "ep=4" else 0.98})
        for model in ("moe-tiny-losses", "limited-weight")
        for mesh in ("ep=2", "ep=4", "fsdp=2,ep=fsdp")
    ],
    ("moe-tiny-losses", "ep=4,tp=2", {"expert_budget": 1.9, "ep_chunks": 2, "recompute": "full"}),
    *[("many-choices", "ep=2", options) for options in ({}, {"expert_budget": 0.98}, {"expert_extent": "host"})],
    ("many-choices", "ep=4", {"expert_budget": 0.98, "precision": "bf16"}),
    *[
        (model, mesh, options)
        for options in ({"expert_extent": "host"}, {"pad_to_capacity": True})
        for model in ("moe-tiny-losses", "limited-weight", "limited-position")
        for mesh in ("ep=2", "ep=4", "fsdp=2,ep=fsdp", "ep=2,tp=2", "dp=2,fsdp=2,ep=dp*fsdp")
        if model.startswith("limited") or "pad_to_capacity" not in options
    ],
    ("moe-tiny-losses", "dp=2,fsdp=2,ep=fsdp", {"expert_extent": "host", "zero": 1}),
    ("moe-tiny-losses", "ep=2,fsdp=2", {"expert_extent": "host", "ep_chunks": 2, "recompute": "full"}),
    ("moe-tiny-grouped", "ep=2,tp=2", {"expert_extent": "host", "sequence_parallel": True, **FUSED}),
    ("moe-tiny-capacity", "dp=2,ep=2", {"expert_extent": "host", "expert_load": True, "overlap": True}),
    ("hf:deepseek-v3", "ep=2", {"expert_extent": "host", "expert_bias_rate": 0.01}),
    ("hf:gpt-oss", "ep=2", {"expert_extent": "host"}),
    ("hf:gpt-oss", "tp=2", {"sequence_parallel": True}),
    ("hf:gpt-oss", "ep=2,tp=2", {"recompute": "full", **FUSED}),
    ("hf:gpt-oss", "fsdp=2,tp=2,ep=fsdp", {"expert_extent": "host", "sequence_parallel": True}),
    ("limited-weight", "dp=2", {"pad_to_capacity": True}),
    ("limited-weight", "ep=2", {"pad_to_capacity": True, "recompute": "full", **FUSED}),
    (
        "limited-position",
        "fsdp=2,tp=2,ep=fsdp",
        {"pad_to_capacity": True, "sequence_parallel": True, "expert_load": True, "expert_bias_rate": 0.01, "zero": 1},
    ),
    ("moe-tiny-capacity", "ep=2", {}),
    ("moe-tiny-capacity", "dp=2,ep=2", {"expert_load": True, "overlap": True}),
    ("limited-weight", "fsdp=2,tp=2,ep=fsdp", {"expert_load": True, "zero": 1, "expert_bias_rate": 0.01}),
    *[("hf:deepseek-v3", mesh, {}) for mesh in ("ep=2", "fsdp=2,ep=fsdp", "ep=2,tp=2")],
    ("hf:deepseek-v3", "ep=2", {"expert_bias_rate": 0.01, "dispatch": "allgather"}),
    ("hf:qwen3-moe", "ep=2", {}),
    ("hf:mixtral", "fsdp=2,ep=fsdp", {}),
    ("hf:gpt-oss", "ep=2", {}),
]
ROWS = [
    *[Row(model, mesh) for mesh in MESHES for model in MODELS],
    *[Row("threes", mesh) for mesh in THREES],
    *[Row(model, mesh, tuple(options.items())) for model, mesh, options in OPTIONS],
]

EXPERT_ROWS = [Row(model, mesh, tuple(options.items())) for model, mesh, options in EXPERTS]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return Table(tmp_path_factory.mktemp("models"))


CASES = sampled(ROWS, 0, always=[Row("moe-tiny-losses", "dp=2,fsdp=2,tp=2")])
# A capture of each, which takes longer than all else.
CASES += sampled([Row(model, "fsdp=2,tp=2") for model in OTHERS], 0)
# Of gpt-oss experts have biases, whose gradients are sums of their own.
CASES += sampled(
    EXPERT_ROWS, 0, always=[Row("moe-tiny-losses", "ep=2,tp=2", (("dispatch", "alltoall"),)), Row("hf:gpt-oss", "ep=2")]
)


@pytest.mark.parametrize("row", CASES, ids=str)
def test_all_ranks_in_one_process(row: Row, table: Table) -> None:
    assert table.worst(row) <= 1e-9


PROCESSES: list[tuple[str, str, dict[str, Any]]] = [
    ("dense-tiny", "fsdp=2,tp=2", {"sequence_parallel": True}),
    ("dense-tiny", "tp=4", {}),
    ("dense-tiny", "dp=2,tp=2", {"sequence_parallel": True}),
    ("dense-tiny", "fsdp=4", {"zero": 1}),
    ("moe-tiny-losses", "dp=2,fsdp=2", {"zero": 2, "overlap": True}),
    ("moe-tiny-losses", "fsdp=4", {"recompute": "full", "keep_gathered": True}),
    ("moe-tiny-losses", "dp=2,tp=2", {}),
    ("moe-tiny-losses", "ep=2", {}),
    ("moe-tiny-losses", "ep=4", {"dispatch": "allgather"}),
    ("moe-tiny-grouped", "ep=2", {"ep_chunks": 2}),
    ("moe-tiny-losses", "dp=2,fsdp=2,ep=dp*fsdp", {}),
    ("moe-tiny-losses", "ep=2,tp=2", {"recompute": "full"}),
    ("moe-tiny-grouped", "ep=2,tp=2", {"sequence_parallel": True}),
    ("moe-tiny-losses", "fsdp=2,ep=fsdp", {"dispatch": "allgather"}),
    ("moe-tiny-losses", "ep=2", {"expert_extent": "host"}),
    ("limited-weight", "ep=2", {"pad_to_capacity": True}),
    ("hf:gpt-oss", "ep=2", {}),
    ("hf:llama3", "dp=2,fsdp=2", {"overlap": True}),
    ("hf:llama3", "dp=2,fsdp=2,tp=2", {}),
    ("odd", "tp=4", {"pad": "heads,vocab"}),
    ("moe-tiny-losses", "fsdp=2,tp=2", {"offload": "activations,optimizer"}),
]
RUN_ROWS = [Row(model, mesh, tuple(options.items())) for model, mesh, options in PROCESSES]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


OF_EXPERTS = Row("moe-tiny-losses", "ep=2", (("expert_extent", "host"),))
"""Messages of sizes that only processes have; the graph alone has one memory for all."""


@pytest.mark.parametrize("row", sampled(RUN_ROWS, 0, always=[RUN_ROWS[0], OF_EXPERTS]), ids=str)
def test_processes_train_as_one(row: Row, runs: Runs) -> None:
    """Over gloo, in f32."""
    assert_close(runs.alone(row), runs.train(row))


@pytest.mark.full
def test_weights_are_loaded_by_parts(runs: Runs) -> None:
    """Ranks that begin with files of weights go on as the one that wrote them would."""
    row = Row("dense-tiny", "tp=2")
    alone = runs.alone(row)
    one, two = (runs.train(r, "--init", str(alone.weights)) for r in (row.alone, row))
    assert one.numbers("loss")[0] != pytest.approx(alone.numbers("loss")[0], rel=1e-3)
    assert two.numbers("loss") == pytest.approx(one.numbers("loss"), rel=1e-5)
