"""Whole decoders equal the transformers class of their family given the same weights, and export with dynamic dims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.export import Dim, export
from torch.torch_version import TorchVersion

from mgraph import models
from mgraph.models import Decoder, huggingface
from tests.sampling import sampled

EXPORTED = [
    (name, dtype)
    for name in ("dense", "moe", "qwen3", "gpt-oss", "gemma3")
    for dtype in (torch.float32, torch.bfloat16)
]
GEMMA2 = {"qk_norm": False, "local_rope_theta": 0.0, "rope_scaling": None, "attention_softcap": 2.0}


def load_reference(model: Decoder, directory: Path) -> Any:
    """The class of transformers that equals the decoder, from a checkpoint with its weights."""
    from transformers import AutoModelForCausalLM

    settings = huggingface.configuration(model.config)
    (directory / "config.json").write_text(json.dumps(settings))
    tensors = huggingface.checkpoint(model.config, model.state_dict())
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    load: Any = AutoModelForCausalLM.from_pretrained  # typed as if it gave a model alone
    # Capped scores and sinks have no fused form.
    reference, info = load(directory, attn_implementation="eager", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return reference.eval()


@pytest.mark.parametrize(
    ("name", "size", "changes", "architecture"),
    [
        ("dense", "tiny", {}, "Llama"),
        ("dense", "tiny-geglu", {}, "Llama"),
        ("dense", "tiny", {"act": "gelu", "num_kv_heads": 4, "qkv_bias": True, "output_bias": True}, "Llama"),
        ("dense", "tiny", {"mlp_bias": True, "head_width": 24}, "Llama"),
        ("llama3.1", "tiny", {}, "Llama"),
        ("qwen3", "tiny", {}, "Qwen3"),
        ("qwen3", "moe-tiny", {}, "Qwen3Moe"),
        ("qwen3", "moe-tiny", {"renormalize": False}, "Qwen3Moe"),
        ("mixtral", "tiny", {}, "Mixtral"),
        ("gpt-oss", "tiny", {}, "GptOss"),
        ("gemma3", "tiny", {}, "Gemma3"),
        ("gemma3", "tiny", {"logit_softcap": 3.0}, "Gemma3"),
        ("gemma3", "tiny", {**GEMMA2, "logit_softcap": 3.0}, "Gemma2"),
    ],
)
def test_equals_transformers(name: str, size: str, changes: dict[str, Any], architecture: str, tmp_path: Path) -> None:
    model = models.get(name, size, **changes).eval()
    with torch.no_grad():  # far from the initial values: norms are not 1, biases not 0, logits not tiny
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    reference = load_reference(model, tmp_path)
    assert type(reference).__name__ == f"{architecture}ForCausalLM"
    for length in (1, 2, 37):  # the windows are shorter than the last
        tokens = torch.randint(0, 256, (3, length))
        positions = torch.arange(length).expand(3, -1) + torch.tensor([[0], [5], [700]])
        with torch.no_grad():
            for given in ({}, {"position_ids": positions}):
                mask = {"attention_mask": torch.ones_like(tokens)} if given else {}
                expected = reference(tokens, use_cache=False, **given, **mask).logits
                assert expected.abs().max() > 0.3
                got = model(tokens, **given)
                assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("name", "dtype"), sampled(EXPORTED, 2))
def test_exports_with_dynamic_dims(name: str, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = models.get(name).to(dtype)
        tokens = torch.zeros(3, 17, dtype=torch.int64)
    dims = ({0: Dim("B", min=1), 1: Dim("S", min=2)},)
    # Before 2.12 the other mode wrongly compares strides of heads with min(16 S, 32 S).
    strict = TorchVersion(torch.__version__) < "2.12"
    program = export(model, (tokens,), dynamic_shapes=dims, strict=strict)
    (logits,) = (node for node in program.graph.nodes if node.op == "output")
    batch, sequence, vocab = logits.args[0][0].meta["val"].shape
    assert isinstance(batch, torch.SymInt) and isinstance(sequence, torch.SymInt)
    assert vocab == 256


@pytest.mark.parametrize(
    ("name", "size"), [("dense", "tiny"), ("dense", "tiny-sinks"), ("dense", "tiny-capped"), ("gemma3", "tiny")]
)
def test_documents_in_one_row_equal_documents_alone(name: str, size: str) -> None:
    model = models.get(name, size).eval()
    first, second = torch.randint(0, 256, (2, 13)), torch.randint(0, 256, (2, 24))
    positions = torch.cat((torch.arange(13), torch.arange(24))).expand(2, -1)
    segments = torch.cat((torch.zeros(13), torch.ones(24))).long().expand(2, -1)
    packed = model(torch.cat((first, second), 1), positions, segments)
    torch.testing.assert_close(packed, torch.cat((model(first), model(second)), 1), atol=1e-5, rtol=1e-5)
