"""The built-in corpus is real prose, the same each time, and its absence is explained."""

from __future__ import annotations

import sys

import pytest

from mgraph.errors import DataError
from mgraph.runtime.corpus import builtin_text


def test_is_english_prose() -> None:
    text = builtin_text()
    assert len(text.encode()) > 300_000
    assert text.count(" the ") > 3_000
    assert text == builtin_text()


def test_absence_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match="name a text file") as caught:
        builtin_text()
    assert caught.value.hint
