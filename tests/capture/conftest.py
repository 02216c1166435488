"""Fixtures of the capture tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import captures
from tests.capture.models import llama_config


@pytest.fixture(autouse=True)
def _captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others captured does not stand in for a capture here."""
    monkeypatch.setattr(captures, "_seen", {})


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """The spec of a small transformers Llama."""
    path = tmp_path / "llama-tiny.json"
    path.write_text(json.dumps(llama_config()))
    return f"hf:{path}"
