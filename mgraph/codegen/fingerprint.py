"""The fingerprint of a package: a hash of its final graph, and every option it was compiled with, by reflection.

A new option is covered as soon as it is a field of the recipe; nothing is listed by hand. An option that names a
profile does not say what is in it, so what it held has a hash, too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any


def fingerprint(ir_text: str, options: Any, profile_text: str = "") -> dict[str, Any]:
    """`ir` (SHA-256 of the final graph's text), `options` (each field of the dataclass as plain data) and `profile`
    (SHA-256 of the text of the profile that providers were chosen by), where there is one."""
    profile = {"profile": _digest(profile_text)} if profile_text else {}
    return {"ir": _digest(ir_text), "options": option_values(options), **profile}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def option_values(options: Any) -> dict[str, Any]:
    """The fields of an options dataclass as JSON data; nested dataclasses become mappings."""
    assert dataclasses.is_dataclass(options) and not isinstance(options, type), f"{options!r} is no dataclass instance"
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(options), sort_keys=True, default=str))
    return values


def explain_mismatch(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line per difference of two fingerprints: which option changed, from what to what; empty where they agree."""
    before, after = _flat(old.get("options", {})), _flat(new.get("options", {}))
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in before:
            lines.append(f"option {name} is new: {after[name]!r}")
        elif name not in after:
            lines.append(f"option {name} is gone: it was {before[name]!r}")
        elif before[name] != after[name]:
            lines.append(f"option {name} changed from {before[name]!r} to {after[name]!r}")
    if old.get("profile") != new.get("profile"):
        lines.append("what the profile holds changed")
    if old.get("ir") != new.get("ir"):
        lines.append(
            "the graph changed" if lines else "the graph changed, with all options equal: the model or mgraph did"
        )
    return lines


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
