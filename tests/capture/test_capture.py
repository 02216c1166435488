"""A captured module means what the model means: bitwise equal logits and loss, at sizes the trace never saw."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mgraph.capture import ModelSpec, capture, capture_with_report
from mgraph.capture.source import resolve
from mgraph.ir import interpreter
from mgraph.ir.types import DType
from tests.capture.models import eager_state, forward_both

SIZES = ((1, 2), (2, 64), (1, 7), (3, 33))
ROOT = Path(__file__).parents[2]


def check_bitwise(spec: ModelSpec) -> None:
    for outputs, eager, inputs in forward_both(spec, *SIZES):
        logits: Tensor = getattr(eager, "logits", eager)
        labels = inputs["labels"].flatten()
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels, reduction="sum", ignore_index=-100)
        assert outputs["logits"].dtype == logits.dtype
        assert torch.equal(outputs["logits"], logits)
        assert torch.equal(outputs["loss_sum"], loss)
        assert outputs["count"].item() == int((labels != -100).sum())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("dense-tiny", None),
        ("dense-tiny", DType.BF16),
        ("dense-tiny-geglu", None),
        ("moe-tiny", None),
        ("moe-tiny", DType.BF16),
    ],
)
def test_zoo(name: str, dtype: DType | None) -> None:
    check_bitwise(ModelSpec(name, dtype=dtype))


@pytest.mark.parametrize("cap", [2.0, None])
def test_capped_scores_are_never_computed_without_the_cap(
    cap: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers before 5.21 chooses torch's attention for Gemma 2, which has no cap."""
    from transformers import Gemma2Config, Gemma2PreTrainedModel

    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "layer_types": None}
    settings = {**Gemma2Config().to_dict(), **sizes, "attn_logit_softcapping": cap}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model = resolve(ModelSpec(f"hf:{tmp_path}")).factory()
    assert model.config._attn_implementation == ("eager" if cap else "sdpa")


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_transformers_llama(llama: str, dtype: DType) -> None:
    check_bitwise(ModelSpec(llama, dtype=dtype))


def test_report_and_module_of_llama(llama: str) -> None:
    module, report, _ = capture_with_report(llama)
    function = module.functions["forward"]
    assert module.name == "llama-tiny"
    assert [p.name for p in function.params] == ["tokens", "labels"]
    assert module.entries["forward"].outputs == ("loss_sum", "count", "logits")
    assert (module.dims["B"].minimum, module.dims["B"].maximum) == (1, None)
    assert (module.dims["S"].minimum, module.dims["S"].maximum) == (2, 128)
    assert report.nodes == len(function.nodes) < report.traced_nodes
    assert set(report.seconds) == {"build", "export", "import"}
    assert report.dropped["aten._assert_tensor_metadata.default"] > 0
    per_layer = [n for n in function.nodes if n.origin.path.startswith("model.layers.1")]
    assert 40 <= len(per_layer) <= 60
    assert all(n.origin.line > 0 for n in function.nodes)
    assert {n.origin.file for n in per_layer} <= {
        "transformers/models/llama/modeling_llama.py",
        "transformers/activations.py",
        "transformers/integrations/sdpa_attention.py",
    }


def test_zoo_moe_keeps_the_custom_op() -> None:
    nodes = capture("moe-tiny").functions["forward"].nodes
    grouped = [n for n in nodes if n.op == "zoo.grouped_linear.default"]
    assert len(grouped) == 6
    assert {n.origin.file for n in grouped} == {"models/experts.py"}
    paths = {f"layers.{layer}.ffn.{name}" for layer in (0, 1) for name in ("gate", "up", "down")}
    assert {n.origin.path for n in grouped} == paths


def test_user_model_with_own_inputs_and_loss() -> None:
    spec = ModelSpec(f"{ROOT / 'examples/user_model.py'}:tiny")
    source = resolve(spec)
    assert source.loss is not None
    module = capture(spec)
    assert module.dims["S"].maximum == 128, "the position table bounds the length"
    assert "embed.weight" in module.state
    assert "head.weight" not in module.state, "a tied parameter is one state"
    for outputs, logits, inputs in forward_both(spec, *SIZES):
        total, count = source.loss(logits, inputs)
        assert torch.equal(outputs["logits"], logits)
        assert torch.equal(outputs["loss_sum"], total)
        assert torch.equal(outputs["count"], count)


def test_loss_mask_positions_and_segments_are_inputs_on_demand() -> None:
    spec = ModelSpec("dense-tiny", loss_mask=True, packed=True)
    module, model = capture(spec), resolve(spec).factory()
    inputs = {n: torch.randint(0, 256, (2, 9)) for n in ("tokens", "labels")}
    inputs["loss_mask"] = torch.randint(0, 2, (2, 9))
    inputs["position_ids"] = torch.arange(9).flip(0).expand(2, 9).contiguous()
    inputs["segment_ids"] = torch.tensor([[1, 1, 1, 2, 3, 3, 3, 0, 0], [5, 5, 5, 5, 5, 5, 5, 5, 4]])
    outputs, _ = interpreter.run(module, "forward", inputs, eager_state(model, module))
    with torch.no_grad():
        logits = model(inputs["tokens"], inputs["position_ids"], inputs["segment_ids"])
    each = F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="none")
    assert torch.equal(outputs["logits"], logits)
    assert outputs["count"].item() == int(inputs["loss_mask"].sum())
    expected = (each * inputs["loss_mask"].flatten()).sum()
    torch.testing.assert_close(outputs["loss_sum"], expected, rtol=1e-6, atol=0)


def test_frozen_parameters_are_not_trainable(tmp_path: Path) -> None:
    (tmp_path / "frozen.py").write_text(
        "from mgraph import models\n"
        "def frozen():\n"
        "    model = models.get('dense', 'tiny')\n"
        "    model.embed.weight.requires_grad_(False)\n"
        "    return model\n"
    )
    state = capture(f"{tmp_path / 'frozen.py'}:frozen").state
    assert not state["embed.weight"].trainable
    assert state["head.weight"].trainable
    assert not state["rotary.inv_freq"].trainable
    assert not state["rotary.inv_freq"].persist


def test_a_shorter_maximum_length_is_kept() -> None:
    assert capture(dataclasses.replace(ModelSpec("dense-tiny"), max_length=77)).dims["S"].maximum == 77
