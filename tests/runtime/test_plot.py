"""The loss curve is a picture of some size; the smoothing is an exact mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgraph.runtime.plot import save_loss_curve, smooth


def test_writes_a_picture(tmp_path: Path) -> None:
    train = [(step, 5.0 / step**0.3) for step in range(1, 200)]
    save_loss_curve(tmp_path / "loss.png", train, [(100, 1.9), (199, 1.7)], 3.2, "name")
    content = (tmp_path / "loss.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000
    assert int.from_bytes(content[16:20], "big") == 960  # width in pixels
    save_loss_curve(tmp_path / "empty.png", [], [], 3.2, "a run without a step")
    assert (tmp_path / "empty.png").stat().st_size > 1000


def test_smoothing() -> None:
    assert smooth([]) == []
    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smooth([1.0, 3.0])[1] == pytest.approx((0.9 * 1.0 + 3.0) / 1.9)
