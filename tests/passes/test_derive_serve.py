"""Serving derived from the forward: chunks over the cache give the logits of the whole sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mgraph.capture import capture
from mgraph.errors import PassError
from mgraph.ir.graph import Module, State, StateKind
from mgraph.ir.interpreter import run
from mgraph.passes.pipeline import run_pipeline
from tests.passes.build import B, S, f32, i64, module_of, started
from tests.passes.models import mlp_module

RAISED = "outline,canonicalize,constant-fold,cse,dce,raise-norm,raise-rope,raise-attention,raise-glu,raise-moe,cse,dce"


def state_of(module: Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, state in module.state.items():
        shape = [int(d) for d in state.type.shape]
        if state.kind is StateKind.PARAM:
            made[name] = torch.randn(shape, generator=generator) * (0.2 if len(shape) > 1 else 1)
        elif state.kind is StateKind.BUFFER:
            made[name] = torch.tensor(state.init[0][1]).reshape(shape)
        else:
            made[name] = torch.zeros(shape)
    return made


@pytest.mark.parametrize("model", ["dense-tiny", "moe-tiny"])
def test_chunks_over_the_cache_equal_the_whole_sequence(model: str) -> None:
    forward, _ = run_pipeline(capture(model), RAISED)
    serve, _ = run_pipeline(forward, "derive-serve{max_length=24},cse,dce,in-place")
    assert serve.entries["step"].updates == ("cache.0.k", "cache.0.v", "cache.1.k", "cache.1.v")
    assert {n.op for _, n in serve.walk()} >= {"kv_append_", "attention"}
    state = {**state_of(forward), **state_of(serve)}
    tokens = torch.randint(256, (1, 20))
    whole, _ = run(forward, "forward", {"tokens": tokens, "labels": tokens}, state)
    position = 0
    for length in (7, 1, 5, 1, 6):
        inputs = {"tokens": tokens[:, position : position + length], "start": torch.tensor(position)}
        out, new = run(serve, "step", inputs, state)
        state, position = {**state, **new}, position + length
        torch.testing.assert_close(out["logits"][0], whole["logits"][0, position - 1], rtol=1e-4, atol=1e-4)


def test_attention_that_was_not_raised_is_refused() -> None:
    with pytest.raises(PassError, match="attention was not recognised"):
        run_pipeline(capture("dense-tiny"), "outline,canonicalize,derive-serve")


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
