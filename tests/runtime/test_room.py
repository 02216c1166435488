"""Memory that cannot be had."""

from __future__ import annotations

import pytest
import torch

from mgraph.errors import OptionError
from mgraph.runtime import room as module
from mgraph.runtime.room import free_bytes, room, size_text

CPU = torch.device("cpu")


def test_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(OptionError, match=r"a table: 8\.389e\+06TiB are needed, and cpu has .*iB"),
        room(CPU, 2**63, "a table", "a smaller one"),
    ):
        raise AssertionError("it was tried")
    # Where the system counts on what it has not, the allocator itself may refuse.
    monkeypatch.setattr(module, "free_bytes", lambda device: 2**62)
    with pytest.raises(OptionError, match="32TiB are needed") as caught, room(CPU, 2**45, "a table", "a smaller one"):
        torch.zeros(2**45, dtype=torch.uint8)
    assert caught.value.hint == "a smaller one"
    with pytest.raises(RuntimeError, match="another"), room(CPU, 1, "a table", "a smaller one"):
        raise RuntimeError("another mistake")


def test_what_is_free() -> None:
    assert 2**20 < free_bytes(CPU) < 2**50
    with room(CPU, 2**10, "a table", ""):
        assert torch.zeros(2**10, dtype=torch.uint8).numel() == 2**10


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0B"), (1023, "1023B"), (1536, "1.5KiB"), (2**31, "2GiB"), (5 * 2**40, "5TiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size_text(count) == text
