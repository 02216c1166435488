"""What is refused before a package is served such that bits do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mgraph.errors import OptionError, PackageError
from mgraph.runtime.mesh import ALONE, Mesh
from mgraph.runtime.serving.choices import Sampler, sampler_of
from mgraph.runtime.serving.proof import check_entries, check_place, rows_of_each_kind

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_where_it_can_be_kept() -> None:
    for device, manifest in ((CPU, {}), (GPU, {"batch_invariant": True})):
        check_place(manifest, device, ALONE)
    with pytest.raises(OptionError, match="kernels for a GPU divide work") as refused:
        check_place({}, GPU, ALONE)
    assert "compile it with --batch-invariant" in str(refused.value)
    with pytest.raises(OptionError, match="order of sums of several ranks"):
        check_place({"batch_invariant": True}, CPU, Mesh(0, 2, CPU, {"tp": 2}))


def test_all_refusals_are_one_message() -> None:
    def refuse(op: str) -> Callable[[], Any]:
        def run() -> None:
            raise PackageError(f"{op}: it depends", where=f"step.py:{len(op)}, model.layers.* model.py:7")

        return run

    check_entries({"step": lambda: None})
    with pytest.raises(PackageError) as refused:
        check_entries({"step": refuse("aten.mm"), "likeliest": lambda: None, "sample": refuse("aten.sum")})
    assert str(refused.value).splitlines() == [
        "error: batch invariance cannot be kept; step: aten.mm: it depends (step.py:7, model.layers.* model.py:7); "
        "sample: aten.sum: it depends (step.py:8, model.layers.* model.py:7)",
        "  try: serve this package without --batch-invariant",
    ]


def test_what_no_draw_needs_costs_nothing() -> None:
    """Cuts of rows that are greedy, or are given their token, and cuts that cut nothing."""
    rows = rows_of_each_kind(256)
    greedy, cut = rows[Sampler.LIKELIEST], rows[Sampler.CUT]
    assert sampler_of(replace(cut, temperature=greedy.temperature)) is Sampler.LIKELIEST
    assert sampler_of(replace(cut, targets=cut.targets + 5)) is Sampler.LIKELIEST
    assert sampler_of(replace(cut, top_k=cut.top_k * 0 - 1)) is Sampler.DRAW
    for name, value in (("top_k", 3), ("top_p", 0.5), ("min_p", 0.1)):  # each cuts by itself
        none: dict[str, Any] = {"top_k": cut.top_k * 0, "top_p": cut.top_p * 0 + 1, "min_p": cut.min_p * 0}
        assert sampler_of(replace(cut, **none)) is Sampler.DRAW
        assert sampler_of(replace(cut, **{**none, name: none[name] * 0 + value})) is Sampler.CUT, name
    two: dict[str, Any] = {name: np.concatenate([getattr(cut, name)] * 2) for name in ("targets", "min_p", "top_p")}
    temperature, top_k = np.array([0, 1], np.float32), np.array([5, 0], np.int32)
    assert sampler_of(replace(cut, **two, temperature=temperature, top_k=top_k)) is Sampler.DRAW


def test_there_is_a_row_for_each_entry_that_samples() -> None:
    rows = rows_of_each_kind(7)
    assert [sampler_of(row) for row in rows.values()] == list(rows)
    assert set(rows) == set(Sampler) - {Sampler.NONE}
