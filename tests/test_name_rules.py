"""What rules by name have in common: their two forms as text, and hints for patterns that fit nothing."""

from __future__ import annotations

from typing import Any

import pytest

from mgraph.errors import OptionError
from mgraph.name_rules import nearest, read_rule

NAMES = ["embed.weight", "layers.0.attn.q_proj.weight", "layers.0.norm.weight"]


@pytest.mark.parametrize("text", ["a.*|b: x=1, y", "match=a.*|b, x=1, y", " match = a.* | b , x=1,y"])
def test_forms_of_text(text: str) -> None:
    patterns, values, shown = read_rule(text, ("x", "y"), "rule", "")
    assert (patterns, values, shown) == (("a.*", "b"), {"x": "1", "y": True}, text)


def test_unknown_fields_are_named_with_the_kind_of_rule() -> None:
    with pytest.raises(OptionError, match=r"unknown field 'z' in the adapter 'a: z=2'"):
        read_rule("a: z=2", ("x",), "adapter", "")
    with pytest.raises(OptionError, match=r"(?s)unknown field 'a z' in the adapter 'a z=2'.*write a: z=2"):
        read_rule("a z=2", ("z",), "adapter", "write a: z=2")


@pytest.mark.parametrize("rule", [None, 3, ["a", "b"]])
def test_what_is_neither_text_nor_a_mapping_is_refused(rule: Any) -> None:
    with pytest.raises(OptionError, match=r"(?s)adapter: expected text or a mapping, not .*write a: z=2"):
        read_rule(rule, ("z",), "adapter", "write a: z=2")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("attn.*", "did you mean '*attn.*'?"),
        ("q_proj", "did you mean '*q_proj*'"),
        ("layers.0.attn.q_porj.weight", "did you mean 'layers.0.attn.q_proj.weight"),
        ("zzz", "such as embed"),
    ],
)
def test_hints(pattern: str, says: str) -> None:
    assert says in nearest([pattern], NAMES)
