"""What the file of a profile must hold, as JSON data. All of it is looked at before a time is made of any of it: a rate
of zero or one that is no number would show far from here, as a division by zero or as a provider that always wins.

Each form is a text that completes "must be …", and a function that says whether a value has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mgraph.ir.types import DType

LEAST, MOST = 1e-12, 1e24
"""Numbers beyond these are of no machine, and products of them may be no numbers."""
_SIZE = re.compile(rf"({'|'.join(dtype.text for dtype in DType)})\[(\d{{1,18}}(,\d{{1,18}})*)?\]")


@dataclass(frozen=True)
class Form:
    """What a value must be, in words, and whether it is."""

    words: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


TEXT = Form("a text", lambda value: isinstance(value, str))
# Written so that nan fails too.
POSITIVE = Form(f"a number from {LEAST:g} to {MOST:g}", lambda value: _is_number(value) and LEAST <= value <= MOST)
LAUNCHES = Form("a whole number from 1 to 1000000", lambda value: _is_whole(value) and 1 <= value <= 1_000_000)
AMOUNT = Form("a whole number from 0 to 2**63", lambda value: _is_whole(value) and 0 <= value <= 2**63)
MAPPING = Form("a mapping", lambda value: isinstance(value, Mapping))
LIST = Form("a list", lambda value: isinstance(value, list))
SIZE = Form(
    "a dtype and extents, as in bf16[8,128]", lambda value: isinstance(value, str) and bool(_SIZE.fullmatch(value))
)

_WHOLE = {
    **dict.fromkeys(("name", "card", "arch"), TEXT),
    **dict.fromkeys(("versions", "rates"), MAPPING),
    **dict.fromkeys(("models", "measured"), LIST),
}
_RATES = {
    **dict.fromkeys(("bytes_per_second", "link_bytes_per_second", "launch_seconds"), POSITIVE),
    "flops_per_second": MAPPING,
}
_MODEL = {"op": TEXT, "provider": TEXT}
_MODEL_MORE = {**dict.fromkeys(("memory", "math", "passes"), POSITIVE), "launches": LAUNCHES}
_ROW = {
    **dict.fromkeys(("op", "provider"), TEXT),
    "attrs": MAPPING,
    "sizes": LIST,
    "microseconds": POSITIVE,
    **dict.fromkeys(("bytes", "flops"), AMOUNT),
}
_ROW_MORE = dict.fromkeys(("source", "card", "date"), TEXT)


def check_profile(data: Any) -> None:
    """Raise ValueError, which names the place and what is there, unless `data` are those of a profile."""
    _check("the file", data, MAPPING)
    _check_keys("", data, _WHOLE)
    _check_all("versions", data["versions"], TEXT)
    _check_keys("rates", data["rates"], _RATES)
    flops = data["rates"]["flops_per_second"]
    _check_all("rates.flops_per_second", flops, POSITIVE)
    if "f32" not in flops:  # that of any dtype without its own
        raise ValueError("rates.flops_per_second lacks f32")
    for number, model in enumerate(data["models"]):
        _check_keys(f"models[{number}]", model, _MODEL, _MODEL_MORE)
    for number, row in enumerate(data["measured"]):
        _check_keys(f"measured[{number}]", row, _ROW, _ROW_MORE)
        for index, size in enumerate(row["sizes"]):
            _check(f"measured[{number}].sizes[{index}]", size, SIZE)


def _check_keys(place: str, data: Any, needed: Mapping[str, Form], more: Mapping[str, Form] | None = None) -> None:
    """A mapping of these keys: all that are needed, of the others any."""
    _check(place, data, MAPPING)
    known = {**needed, **(more or {})}
    if unknown := sorted(data.keys() - known.keys()):
        raise ValueError(f"{place or 'the file'} has {unknown[0]!r}, and no more than {', '.join(known)} belongs there")
    if absent := [key for key in needed if key not in data]:
        raise ValueError(f"{place or 'the file'} lacks {', '.join(absent)}")
    for key, value in data.items():
        _check(f"{place}.{key}" if place else key, value, known[key])


def _check_all(place: str, data: Mapping[str, Any], form: Form) -> None:
    """A mapping of any keys to values of one form."""
    for key, value in data.items():
        _check(f"{place}.{key}", value, form)


def _check(place: str, value: Any, form: Form) -> None:
    if not form.fits(value):
        said = repr(value)
        raise ValueError(f"{place} is {said if len(said) <= 60 else said[:60] + '…'}; it must be {form.words}")
