"""Serving derived from the forward: chunks of several sequences over the cache give the logits of each whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mgraph.capture import capture
from mgraph.compiler import build_module
from mgraph.errors import PassError
from mgraph.ir.dims import evaluate
from mgraph.ir.graph import Module, State, StateKind
from mgraph.ir.interpreter import run
from mgraph.passes.cache_groups import cache_groups
from mgraph.passes.pipeline import run_pipeline
from mgraph.passes.serve_samples import step_inputs
from mgraph.passes.verify import TwinCheck
from mgraph.recipe import Recipe
from tests.passes.build import B, S, f32, i64, module_of, started
from tests.passes.models import mlp_module
from tests.sampling import sampled

RAISED = "outline,canonicalize,constant-fold,cse,dce,raise-norm,raise-rope,raise-attention,raise-glu,raise-moe,cse,dce"
LENGTH, BLOCKS = 24, 64
ZOO = [
    "dense-tiny",
    "dense-tiny-capped",
    "dense-tiny-sinks",
    "moe-tiny",
    "moe-tiny-grouped",
    "moe-tiny-losses",
    "gpt-oss-tiny",
    "gemma3-tiny",
    "qwen3-moe-tiny",
]


def state_of(module: Module) -> dict[str, torch.Tensor]:
    """Random parameters; caches full of NaN, which nothing may read."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, state in module.state.items():
        if state.kind is StateKind.CACHE:
            made[name] = torch.full([evaluate(d, {"P": BLOCKS}) for d in state.type.shape], float("nan"))
            continue
        shape = [int(d) for d in state.type.shape]
        if state.kind is StateKind.PARAM:
            made[name] = torch.randn(shape, generator=generator) * (0.2 if len(shape) > 1 else 1)
        elif state.init[0][0] == "copy_":
            made[name] = torch.tensor(state.init[0][1]).reshape(shape)
        else:
            call, *arguments = state.init[0]
            filled: Any = arguments
            made[name] = torch.zeros(shape) if call == "zeros_" else torch.full(shape, *filled)
    return made


@pytest.mark.parametrize(
    ("model", "block_size"),
    sampled([(m, b) for m in ZOO for b in (1, 4, 16)], 1, always=[("gpt-oss-tiny", 4), ("moe-tiny-losses", 4)]),
)
def test_chunks_over_the_cache_equal_whole_sequences(model: str, block_size: int) -> None:
    forward, _ = run_pipeline(capture(model), RAISED)
    options = f"max_length={LENGTH},block_size={block_size}"
    serve, _ = run_pipeline(forward, f"derive-serve{{{options}}},canonicalize,cse,dce,in-place")
    assert {n.op for _, n in serve.walk()} >= {"kv_append_", "paged_attention"}
    assert {"attention", "aten.arange.default"}.isdisjoint({n.op for _, n in serve.walk()})
    state = {**state_of(forward), **state_of(serve)}
    tokens = torch.randint(256, (2, LENGTH))
    whole, _ = run(forward, "forward", {"tokens": tokens, "labels": tokens}, state, lifted=True)
    # New tokens of the two requests in each step: prompts whole and in chunks, single tokens, a step alone.
    steps, begun = [(0, 7), (1, 4), (1, 1), (5, 0), (1, 11), (1, 1)], [0, 0]
    width = -(-LENGTH // block_size)
    for step in steps:
        rows = [tokens[r, begun[r] : begun[r] + new].tolist() for r, new in enumerate(step)]
        inputs = step_inputs(rows, begun, width, block_size, padding=2, groups=len(cache_groups(serve)))
        out, new_state = run(serve, "step", inputs, state, lifted=True)
        state, begun = {**state, **new_state}, [b + n for b, n in zip(begun, step, strict=True)]
        wanted = [whole["logits"][r, begun[r] - 1] for r, new in enumerate(step) if new]
        torch.testing.assert_close(out["logits"], torch.stack(wanted), rtol=1e-9, atol=1e-9)


def test_ranks_share_the_heads_of_the_cache() -> None:
    """Tensor parallelism of a step, on both ranks in lockstep, is the step without: checked on the reduced twin."""
    pipeline = f"{RAISED},repeat-heads{{size=2}},derive-serve{{max_length=24,block_size=4}},canonicalize,cse,dce"
    twin = TwinCheck(ranks=2, parts=2)
    spread = "tensor-parallel{axis=tp,size=2},in-place"
    module, results = run_pipeline(capture("dense-tiny"), f"{pipeline},{spread}", [twin])
    assert all(r.measured["verify"]["status"] == "verified" for r in results)
    assert str(module.state["cache.1.v"].type) == "f32[4*P, 2, 16]{tp=S(1)}"
    assert str(module.state["layers.0.attn.o.weight"].type) == "f32[64, 64]{tp=S(1)}"
    assert str(module.state["head.weight"].type) == "f32[256, 64]{tp=S(0)}"
    assert sum(node.op == "all_reduce" for _, node in module.walk()) == 3, "the embedding, and two of a layer"
    (gathered,) = (node for _, node in module.walk() if node.op == "all_gather")
    assert str(gathered.result.tensor.shape) == "(N, 256)" and gathered.operands[0].name == "logits", "wanted rows"


def test_only_wanted_rows_go_through_the_head() -> None:
    serve, _ = run_pipeline(capture("dense-tiny"), f"{RAISED},derive-serve{{max_length=8}},canonicalize,cse,dce")
    step = serve.entry_function("step")
    head = next(n for n in reversed(step.nodes) if n.op == "aten.linear.default")
    assert [str(d) for d in head.result.tensor.shape] == ["1", "N", "256"]
    assert {p.name: str(p.tensor) for p in step.params} == {
        "tokens": "i64[T]",
        "positions": "i64[T]",
        "slots": "i64[T]",
        "starts": "i32[R+1]",
        "lengths": "i32[R]",
        "blocks": "i32[R, 1]",
        "rows": "i64[N]",
    }
    assert str(serve.state["cache.1.v"].type) == "f32[16*P, 2, 16]"
    assert serve.dims["S"].maximum == 8


def test_attention_that_was_not_raised_is_refused_with_its_line() -> None:
    with pytest.raises(PassError, match="has no form over a cache") as error:
        run_pipeline(capture("dense-tiny"), "outline,canonicalize,derive-serve")
    assert "models/attention.py:" in str(error.value)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(PassError, match="nothing can be cached"):
        run_pipeline(mlp_module(), "derive-serve")


def test_attention_over_segments_is_refused_by_name() -> None:
    """Packed documents are for training: a cache holds one sequence."""
    builder = started()
    tokens = builder.param("tokens", i64(B, S))
    table = State.make("embed", f32(11, 8), StateKind.PARAM)
    x = builder.one("reshape", builder.one("aten.embedding.default", table.value, tokens), shape=(B, 1, S, 8))
    attrs = {"scale": 1.0, "causal": True, "extra": ("segments",)}
    mixed = builder.emit("attention", (x, x, x, tokens), attrs)[0]
    module = module_of(builder.build([builder.one("reshape", mixed, shape=(B, S, 8))]), state={"embed": table})
    entries = {"forward": replace(module.entries["forward"], outputs=("logits",))}
    with pytest.raises(PassError, match="attention with segments cannot be served"):
        run_pipeline(replace(module, entries=entries), "derive-serve")


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("aten.roll.default", {"shifts": (1,), "dims": (1,)}),
        ("aten.cumsum.default", {"dim": 1}),
        ("aten.flip.default", {"dims": (1,)}),
        ("aten.mean.dim", {"dim": (1,), "keepdim": True}),
        ("aten.slice.Tensor", {"dim": 1, "end": 1}),
        ("aten.div.Tensor", {"other": S}),
        ("aten.rsub.Scalar", {"other": S - 1}),
        ("aten.clamp.default", {"min": 0, "max": S}),
    ],
)
def test_ops_across_positions_are_refused(op: str, attrs: dict[str, Any]) -> None:
    builder = started()
    tokens = builder.param("tokens", i64(B, S))
    table = State.make("embed", f32(11, 8), StateKind.PARAM)
    x = builder.one("aten.embedding.default", table.value, tokens)
    moved = builder.one(op, x, **attrs)
    module = module_of(builder.build([builder.one("aten.add.Tensor", x, moved)]), state={"embed": table})
    entries = {"forward": replace(module.entries["forward"], outputs=("logits",))}
    with pytest.raises(PassError, match=f"cannot serve: {op}"):
        run_pipeline(replace(module, entries=entries), "derive-serve")


def test_a_capacity_is_named_as_the_cause() -> None:
    recipe = Recipe(model="moe-tiny-capacity", purpose="serve", arch="none")
    with pytest.raises(PassError, match="cannot serve: moe_capacity") as caught:
        build_module(recipe)
    assert "without capacity_factor" in str(caught.value.hint) and "attention" not in str(caught.value.hint)
