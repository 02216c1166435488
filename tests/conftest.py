"""Set-up of every test: reproducible, and without the network."""

from __future__ import annotations

import os

import pytest
import torch

# Before any import of transformers: its configurations must never be looked up online.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test draws the same numbers, whatever ran before it."""
    torch.manual_seed(0)
