"""A module whose layers were traced once a kind equals the module whose layers were traced each: the same text.

What keeps layers from being copied is tested with the probe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgraph import models
from mgraph.capture import CaptureReport, ModelSpec, capture_with_report
from mgraph.ir.printer import print_module
from mgraph.ir.types import DType
from tests.families.configs import CONFIGS, write_config
from tests.sampling import sampled

LAYERED = Path(__file__).parent / "layered.py"
KINDS = {"sliding": "sliding_attention", "full": "full_attention"}


def replayed(spec: ModelSpec) -> CaptureReport:
    """The report of a capture whose module was compared with that of the full trace."""
    module, report, _ = capture_with_report(spec)
    full, whole, _ = capture_with_report(spec, replay=False)
    assert print_module(module) == print_module(full)
    assert (report.dropped, report.nodes) == (whole.dropped, whole.nodes)
    return report


TOLD_APART = {
    "by_index": "4 not copied: does what no other layer does",
    "by_length": "1 not copied: does what no other layer does",
    "detached": "1 not copied: does what no other layer does",
    "frozen_layer": "1 not copied: does what no other layer does",
    "constant": "4 not copied: reads a tensor that it is not handed",
    "escaping": "4 not copied: makes a tensor that is read outside without being returned",
    "without_gradient": "none copied: a layer has regions without gradients",
}
ALIKE = ("plain", "dropout", "noise", "tied", "returning", "sequential", "by_pairs")


@pytest.mark.parametrize("model", sampled(ALIKE, 0, always=["plain", "dropout"]))
def test_layers_that_do_the_same(model: str) -> None:
    traced = 2 if model == "by_pairs" else 1
    report = replayed(ModelSpec(f"{LAYERED}:{model}"))
    assert report.layers == (f"layers: 4 layers, {traced} traced, {4 - traced} copied",)


@pytest.mark.parametrize("model", sampled(list(TOLD_APART), 0, always=["detached", "without_gradient"]))
def test_layers_that_do_not(model: str) -> None:
    (line,) = replayed(ModelSpec(f"{LAYERED}:{model}")).layers
    assert line.partition("; ")[2] == TOLD_APART[model]


def _deep(family: str) -> dict[str, Any]:
    """Changes that give a family five layers, or seven, of both kinds where it has two."""
    if family == "gpt2":
        return {"n_layer": 5}
    if family == "gpt-oss":
        return {"num_hidden_layers": 5, "layer_types": [KINDS["sliding"], KINDS["full"]] * 2 + [KINDS["sliding"]]}
    if family == "gemma3":
        return {"num_hidden_layers": 7, "layer_types": [KINDS["sliding"]] * 5 + [KINDS["full"], KINDS["sliding"]]}
    return {"num_hidden_layers": 5, "layer_types": None}


FAMILY_CASES = [(family, training) for family in CONFIGS for training in (True, False)]


@pytest.mark.parametrize(("family", "training"), sampled(FAMILY_CASES, 0, always=[("bert", True)]))
def test_families(family: str, training: bool, tmp_path: Path) -> None:
    spec = ModelSpec(write_config(family, tmp_path, **_deep(family)), DType.BF16, training)
    traced = 2 if family in ("gpt-oss", "gemma3") else 1
    count = 7 if family == "gemma3" else 5
    assert f": {count} layers, {traced} traced, {count - traced} copied" in replayed(spec).layers[0]


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_packed_rows(family: str, tmp_path: Path) -> None:
    spec = ModelSpec(write_config(family, tmp_path, **_deep(family)), packed=True)
    assert ", 0 copied" not in replayed(spec).layers[0]


@pytest.mark.full
@pytest.mark.parametrize("size", [f"{family}-tiny" for family in models.SIZES if "tiny" in models.SIZES[family]])
def test_zoo(size: str, tmp_path: Path) -> None:
    family = size.removesuffix("-tiny")
    file = tmp_path / "deep.py"
    file.write_text(
        f"from mgraph import models\ndef deep():\n    return models.get('{family}', 'tiny', num_layers=5)\n"
    )
    assert ", 0 copied" not in replayed(ModelSpec(f"{file}:deep")).layers[0]
