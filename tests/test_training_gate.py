"""The gate of the training benchmarks: what trains as eager bf16 passes, what does not fails by what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import training_gate, training_models
from benchmarks.gpu.training import Packaged, drawn
from benchmarks.gpu.training_models import SHAPES, Batch
from mgraph.compiler import compile_package
from mgraph.recipe import Recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small dense model, as the benchmarks compile theirs, but for the CPU alone."""
    directory = tmp_path_factory.mktemp("gate") / "package"
    recipe = Recipe(
        model=f"{training_models.__file__}:small_dense",
        precision="bf16",
        max_norm=0.0,
        weight_decay=0.0,
        grad_dtype="param",
        one_microbatch=True,
        output=str(directory),
    )
    compile_package(recipe)
    return directory


@pytest.fixture(scope="module")
def reference(package: Path) -> training_gate.Reference:
    """What eager gives."""
    return training_gate.reference(SHAPES["small-dense"], drawn(package, CPU), CPU)


def test_a_package_passes(package: Path, reference: training_gate.Reference) -> None:
    assert 1e-6 < reference.noise < 1e-3 and 1e-4 < reference.gradient_noise < 3e-2, "bf16 rounds, and no more"
    ours, weights = Packaged(package, CPU), drawn(package, CPU)
    judged = reference.judge(ours, weights)
    assert judged["is_near"], judged
    ours.restart(weights)
    again = reference.judge(ours, weights)
    assert again == judged, "what was trained before is forgotten"


def doubled(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """One of them is wrong."""
    return {name: grad * (2 if name == "norm.weight" else 1) for name, grad in gradients.items()}


@pytest.mark.parametrize("wrong", ["gradients", "update", "loss"])
def test_what_is_wrong_fails(wrong: str, package: Path, reference: training_gate.Reference) -> None:
    ours = Packaged(package, CPU)
    if wrong == "update":  # three per cent too large
        ours._lr *= 1.03

    def called(self: Packaged, batch: Batch, step: Callable[[Packaged, Batch], Tensor] = Packaged.__call__) -> Tensor:
        return step(self, batch) * (1.001 if wrong == "loss" else 1.0)

    def found(
        self: Packaged, batch: Batch, of: Callable[[Packaged, Batch], dict[str, Tensor]] = Packaged.gradients
    ) -> dict[str, Tensor]:
        return doubled(of(self, batch)) if wrong == "gradients" else of(self, batch)

    with mock.patch.multiple(Packaged, __call__=called, gradients=found):
        judged = reference.judge(ours, drawn(package, CPU))
    assert not judged["is_near"], judged
    loss_is_near = judged["distance_from_f32"] <= training_gate.MOST_NOISE * reference.noise
    assert loss_is_near == (wrong == "gradients")
