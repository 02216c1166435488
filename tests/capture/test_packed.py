"""Documents in one row of a transformers model: equal to each alone, and refused where they would mix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mgraph.capture import ModelSpec, capture
from mgraph.capture.packed import check_layers, is_transformers, own_segments
from mgraph.errors import ModelError
from tests.capture.models import write_model
from tests.families.configs import CONFIGS, eager

LENGTHS = (1, 11, 2, 9)
CASES = [(name, kind) for name in CONFIGS for kind in ("sdpa", "eager") if (name, kind) != ("gpt-oss", "sdpa")]
"""All that the classes have: that of gpt-oss knows no fused attention."""


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_logits_equal_those_of_each_document_alone(name: str, implementation: str) -> None:
    """Documents are longer and shorter than the windows of 8."""
    model = eager(name, _attn_implementation=implementation, _experts_implementation="eager").eval()
    check_layers(model, name)
    documents = torch.randint(256, (1, sum(LENGTHS))).split(LENGTHS, dim=1)
    position_ids = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    segment_ids = torch.repeat_interleave(torch.tensor((3, 1, 2, 1)), torch.tensor(LENGTHS))[None]
    segment_ids[0, -LENGTHS[3] :] = 4
    row: Any = torch.cat(documents, dim=1)
    with torch.no_grad():
        with own_segments(model, segment_ids, name):
            packed = model(row, position_ids=position_ids).logits
        alone = torch.cat([model(document).logits for document in documents], dim=1)
        together = model(row).logits
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(together[:, LENGTHS[0] :], alone[:, LENGTHS[0] :], atol=1e-3)


def test_masks_are_whole_again_afterwards() -> None:
    model, row = eager("llama").eval(), torch.arange(7)[None]
    with torch.no_grad():
        before = model(row).logits
        with own_segments(model, torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), "llama"):
            parted = model(row).logits
        assert torch.equal(model(row).logits, before) and not torch.equal(parted, before)


def _tiny(name: str, **changes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**changes)
    model: nn.Module = getattr(transformers, f"{name}Model")(config)
    return model


T5: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
LFM: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "vocab_size": 9,
}


def test_layers_that_mix_documents_are_refused() -> None:
    with pytest.raises(ModelError, match="T5Model reads two rows, of an encoder and a decoder"):
        check_layers(_tiny("T5", **T5), "here")
    with pytest.raises(ModelError, match=r"conv layers of Lfm2Model would mix(?s:.*)leave --packed out"):
        check_layers(_tiny("Lfm2", **LFM), "here")
    model = eager("llama")
    model.register_module("mixer", nn.Conv1d(4, 4, 3))
    with pytest.raises(ModelError, match="the convolution 'mixer' of LlamaForCausalLM would mix"):
        check_layers(model, "here")


def test_a_class_that_makes_its_masks_itself_is_refused() -> None:
    model = _tiny("OpenAIGPT", n_embd=8, n_layer=1, n_head=2, vocab_size=9, n_positions=16)
    with (
        pytest.raises(ModelError, match="OpenAIGPTModel makes its masks itself: the documents of a row would see"),
        own_segments(model, torch.zeros(1, 4, dtype=torch.int64), "here"),
    ):
        model(torch.arange(4)[None])


def test_other_models_take_segment_ids(tmp_path: Any) -> None:
    assert is_transformers(eager("llama")) and not is_transformers(nn.Linear(2, 2))
    text = write_model(tmp_path, "return self.head(x)")
    tail = "\ndef inputs(B, S):\n    return {'tokens': (torch.int64, (B, S)), 'labels': (torch.int64, (B, S))}\n"
    with (tmp_path / "user.py").open("a") as file:
        file.write(tail)
    with pytest.raises(ModelError, match=r"inputs\(B, S\) has no 'position_ids'(?s:.*)or leave --packed out"):
        capture(ModelSpec(text, packed=True))
    with pytest.raises(ModelError, match=r"inputs\(B, S\) has no 'loss_mask'(?s:.*)or leave --loss-mask out"):
        capture(ModelSpec(text, loss_mask=True))
