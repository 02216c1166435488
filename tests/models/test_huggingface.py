"""The transformers form of the zoo: classes, names and shapes of every named size. Values: test_decoder.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mgraph import models
from mgraph.models import huggingface
from tests.sampling import sampled

EQUAL = {
    "dense": "LlamaForCausalLM",
    "moe": "MixtralForCausalLM",
    "tinyllama": "LlamaForCausalLM",
    "llama2": "LlamaForCausalLM",
    "llama3": "LlamaForCausalLM",
    "llama3.1": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
OWN = [
    ("dense", "tiny-capped"),
    ("dense", "tiny-sinks"),
    ("moe", "tiny-grouped"),
    ("moe", "tiny-losses"),
    ("moe", "tiny-capacity"),
]
"""Sizes with options that no class of transformers has together."""

NAMED = [(name, size) for name, sizes in models.SIZES.items() for size in sizes if (name, size) not in OWN]


@pytest.mark.parametrize(("name", "size"), sampled(NAMED, 4, [("gpt-oss", "20b"), ("llama3", "8b")]))
def test_checkpoints_have_the_tensors_of_transformers(name: str, size: str) -> None:
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = models.get(name, size)
        settings = huggingface.configuration(model.config)
        assert settings is not None
        library: Any = transformers
        configuration = library.CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
        reference = library.AutoModelForCausalLM.from_config(configuration)
    expected = EQUAL[name].replace("For", "MoeFor") if model.config.num_experts and name == "qwen3" else EQUAL[name]
    assert type(reference).__name__ == expected == settings["architectures"][0]
    theirs = revert_weight_conversion(reference, dict(reference.named_parameters()))
    ours = huggingface.checkpoint(model.config, model.state_dict())
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}


@pytest.mark.parametrize(("name", "size"), OWN)
def test_where_no_class_is_equal_names_stay(name: str, size: str) -> None:
    with torch.device("meta"):
        model = models.get(name, size)
    assert huggingface.configuration(model.config) is None
    given = model.state_dict()
    found = huggingface.checkpoint(model.config, given)
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in given.items()}


@pytest.mark.parametrize(
    "changes",
    [{"output_bias": True}, {"act": "quick_gelu"}, {"norm_offset": 1.0}, {"logit_softcap": 4.0}, {"qk_norm": True}],
)
def test_an_option_more_is_another_class_or_none(changes: dict[str, Any]) -> None:
    settings = huggingface.configuration(replace(models.SIZES["dense"]["tiny"], **changes))
    assert settings is None or (changes == {"qk_norm": True} and settings["model_type"] == "qwen3")


def test_a_scale_that_is_no_root_of_a_whole_number_has_no_class() -> None:
    assert huggingface.configuration(replace(models.SIZES["gemma3"]["tiny"], attention_scale=0.3)) is None
