"""What is raised from the routers of transformers decides and weighs as their own classes do.

The attributes are those that are found in a compiled model of the family; the classes get the same weights and inputs.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mgraph.capture import capture_with_report
from mgraph.capture.source import ModelSpec
from mgraph.ir.opdef import op_def
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.passes.pipeline import parse_pipeline, run_pipeline
from mgraph.runtime import v1 as rt
from tests.families.configs import CONFIGS, write_config
from tests.sampling import sampled

ROUTERS = {
    "qwen3-moe": ("qwen3_moe", "Qwen3MoeTopKRouter"),
    "mixtral": ("mixtral", "MixtralTopKRouter"),
    "gpt-oss": ("gpt_oss", "GptOssTopKRouter"),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3TopkRouter"),
}
TOKENS = (1, 3, 257)


def raised(name: str, directory: Path) -> dict[str, Any]:
    """The attributes of the routers of a family."""
    module, *_ = capture_with_report(ModelSpec(write_config(name, directory), training=True))
    module, _ = run_pipeline(module, parse_pipeline("canonicalize,raise-moe"))
    found = [dict(node.attrs) for _, node in module.walk() if node.op == "moe_route"]
    assert found and all(attrs == found[0] for attrs in found)
    return found[0]


def theirs(name: str, skew: float) -> Any:
    """The class with random weights; `skew` makes all tokens prefer the same experts."""
    file, cls = ROUTERS[name]
    module = importlib.import_module(f"transformers.models.{file}.modeling_{file}")
    router = getattr(module, cls)(CONFIGS[name]())
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.normal_(std=0.3)
        router.weight[: len(router.weight) // 2, 0] += skew
    return router


def dense(weights: Tensor, indices: Tensor, experts: int) -> Tensor:
    """The weight of every expert [T, E], however the choices are ordered; -1 where it was not chosen."""
    return torch.full((len(indices), experts), -1.0).scatter(1, indices, weights.float())


@pytest.mark.parametrize("name", sampled(list(ROUTERS), 1, always=["deepseek-v3"]))
def test_decisions_and_weights_equal_transformers(name: str, tmp_path: Path) -> None:
    attrs = raised(name, tmp_path)
    torch.manual_seed(0)
    for skew in (0.0, 3.0):
        router = theirs(name, skew)
        for tokens in TOKENS:
            x = torch.randn(tokens, 64)
            x[:, 0] = x[:, 0].abs()
            with torch.no_grad():
                logits, weights, indices = router(x)
            experts = router.weight.shape[0]
            expected = dense(weights, indices, experts)
            bias = getattr(router, "e_score_correction_bias", None)
            operands = (router_logits(router, x, logits), *([] if bias is None else [bias]))
            for made in (
                op_def("moe_route").body(*operands, **attrs),
                rt.moe_route(*operands, **{**attrs, "dtype": to_torch_dtype(attrs["dtype"])}),
            ):
                found = dense(made[0], made[1], experts)
                assert torch.equal(found < 0, expected < 0), "decisions"
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def router_logits(router: Any, x: Tensor, given: Tensor) -> Tensor:
    """The logits, of which some classes give the softmax."""
    logits = nn.functional.linear(x, router.weight, getattr(router, "bias", None)).detach()
    assert given.shape == logits.shape
    return logits
