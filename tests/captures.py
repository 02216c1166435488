"""Captures that all tests of a process share: most of them compile one of a few small models, and of that the trace
takes the most time. Graphs are immutable: what one test does with a capture no other sees."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

from mgraph.capture import Captured, ModelSpec
from mgraph.capture import capture_with_report as capture
from mgraph.capture.source import resolve

_seen: dict[Hashable, Captured] = {}


def shared(spec: ModelSpec | str, replay: bool = True) -> Captured:
    """As `capture_with_report`, run once for models of the same text. Errors are raised by it each time."""
    spec = ModelSpec(spec) if isinstance(spec, str) else spec
    key = (*_named(spec), replay)
    if key not in _seen:
        _seen[key] = capture(spec, replay)
    return _seen[key]


def _named(spec: ModelSpec) -> tuple[ModelSpec, str]:
    """What decides on the capture: a transformers model is its name and its configuration, wherever that lies; a file
    of Python is its path and its text."""
    if spec.text.startswith("hf:"):
        source = resolve(spec)
        return replace(spec, text=f"hf:{source.name}"), source.configuration or ""
    file = Path(spec.text.rpartition(":")[0])
    return (
        (replace(spec, text=str(file.resolve()) + spec.text), file.read_text("utf-8")) if file.is_file() else (spec, "")
    )
