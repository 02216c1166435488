"""All raise passes on captured models: what they find, and that nothing changes but rounding."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgraph.capture import ModelSpec, capture
from mgraph.ir.graph import Module
from mgraph.ir.interpreter import run
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.types import DType
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.pipeline import parse_pipeline

NORMALIZE = "outline,canonicalize,constant-fold,cse,dce"
RAISE = "raise-norm,raise-rope,raise-attention,raise-glu,raise-moe,raise-loss,dce"
DENSE = {"rms_norm": 2, "rope": 2, "attention": 1, "glu": 1}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


def _run(module: Module, text: str) -> tuple[Module, Report]:
    report = Report()
    for pass_ in parse_pipeline(text):
        module = pass_.run(module, report)
        verify(module)
    return module, report


def _semantic(module: Module, function: str) -> dict[str, int]:
    found = Counter(n.op for n in module.functions[function].nodes)
    return {op: n for op, n in found.items() if "." not in op and op not in ("reshape", "cast", "call")}


def _state(module: Module) -> dict[str, Tensor]:
    """Random parameters; the rotary frequencies are those of the definition."""
    made = {}
    for name, state in module.state.items():
        shape = [int(d) for d in state.type.shape]
        exact = state.init and state.init[0][0] == "copy_"
        values = torch.tensor(state.init[0][1]) if exact else 0.3 * torch.randn(shape)
        made[name] = values.reshape(shape).to(to_torch_dtype(state.type.dtype))
    return made


@pytest.mark.parametrize(
    ("model", "dtype", "layer"),
    [
        ("dense-tiny", None, DENSE),
        ("moe-tiny", None, {**DENSE, "moe_route": 1, "moe_dispatch": 1, "grouped_matmul": 3, "moe_combine": 1}),
        ("hf", DType.F32, DENSE),
        ("hf", DType.BF16, DENSE),
    ],
)
def test_models(tmp_path: Path, model: str, dtype: DType | None, layer: dict[str, int]) -> None:
    if model == "hf":
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        model = f"hf:{tmp_path / 'config.json'}"
    before, _ = _run(capture(ModelSpec(model, dtype=dtype)), NORMALIZE)
    after, report = _run(before, RAISE)
    assert _semantic(after, "layer") == layer
    assert _semantic(after, "forward") == {"rms_norm": 1, "cross_entropy": 1}
    assert report.near_misses == []
    assert [p.name for p in after.functions["layer"].params[:1]] == ["x"]
    assert len(after.functions["layer"].params) == 3, "the mask is gone, cos and sin stay"

    state = _state(before)
    vocabulary = int(next(v for n, v in before.state.items() if "embed" in n).type.shape[0])
    tokens, labels = torch.randint(vocabulary, (2, 3, 7)).unbind()
    labels[0, 2] = -100
    inputs = {"tokens": tokens, "labels": labels}
    exact, _ = run(before, "forward", inputs, state, lifted=True)
    lifted, _ = run(after, "forward", inputs, state, lifted=True)
    first, _ = run(before, "forward", inputs, state)
    native, _ = run(after, "forward", inputs, state)
    assert torch.equal(lifted["count"], exact["count"])
    for name in ("loss_sum", "logits"):
        torch.testing.assert_close(lifted[name], exact[name], rtol=1e-12, atol=1e-12)
    errors = [float((r["logits"].double() - exact["logits"]).norm()) for r in (first, native)]
    assert errors[1] <= 1.5 * errors[0] + 1e-6 * float(exact["logits"].norm())
    torch.testing.assert_close(native["loss_sum"].double(), exact["loss_sum"], rtol=1e-3, atol=0.0)
