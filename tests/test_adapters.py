"""Rules for adapters: their text, their numbers, what they are about, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgraph.adapters import AdapterRule, adapter_names, parse_adapter
from mgraph.errors import OptionError
from mgraph.recipe import Recipe, read_recipe


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("*.q|*.v: rank=8, alpha=16", AdapterRule(("*.q", "*.v"), 8, 16.0)),
        ("match=*.q|*.v,rank=8,alpha=16", AdapterRule(("*.q", "*.v"), 8, 16.0)),
        ("*: rank=4", AdapterRule(("*",), 4, 4.0)),
        ("*: rank=4, alpha=11.31370849898, dropout=0.05, rslora", AdapterRule(("*",), 4, 11.31370849898, 0.05, True)),
        ({"match": "*.q", "rank": 3, "alpha": 7, "rslora": False}, AdapterRule(("*.q",), 3, 7.0)),
        ("*: rank=2, rslora=true", AdapterRule(("*",), 2, 2.0, rslora=True)),
    ],
)
def test_text_and_mapping(rule: Any, expected: AdapterRule) -> None:
    assert parse_adapter(rule) == expected
    assert parse_adapter(expected.text) == expected


def test_scale() -> None:
    assert parse_adapter("*: rank=16, alpha=8").scale == 0.5
    assert parse_adapter("*: rank=16, alpha=8, rslora").scale == 2.0


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("*: alpha=2", "rank is not given"),
        ("*: rank=0", "rank is '0'"),
        ("*: rank=2.5", "rank is '2.5'"),
        ("*: rank", "rank is True"),
        ("*: rank=2, alpha=inf", "alpha is 'inf'"),
        ("*: rank=2, alpha=0", "alpha is '0'"),
        ("*: rank=2, dropout=1", "dropout is '1'"),
        ("*: rank=2, dropout=nan", "dropout is 'nan'"),
        ("*: rank=2, rslora=maybe", "rslora is 'maybe'"),
        ("*: rnak=2", "did you mean 'rank'"),
        ("*", "names no effect"),
        ("match=,rank=2", "names no parameters"),
    ],
)
def test_wrong_rules(rule: Any, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_adapter(rule)
    assert says in str(caught.value)


def test_the_weight_of_a_name_may_be_left_out() -> None:
    rule = parse_adapter("*.q|head: rank=2")
    assert [rule.fits(n) for n in ("a.q.weight", "a.q", "a.q.bias", "head.weight", "a.head.weight")] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert adapter_names("a.q.weight") == ("a.q.lora_A.weight", "a.q.lora_B.weight")
    assert adapter_names("a.w") == ("a.w.lora_A.weight", "a.w.lora_B.weight")


def test_recipes_hold_rules_in_one_spelling(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text('model: m\nlora:\n- {match: "*.q|*.v", rank: 8, alpha: 16, dropout: 0.0, rslora: false}\n')
    found = read_recipe(path, {})
    assert found.lora == ("*.q|*.v: rank=8, alpha=16",)
    assert found == Recipe(model="m", lora=("match=*.q|*.v,rank=8,alpha=16",))
    with pytest.raises(OptionError, match="there is no adapter"):
        Recipe(model="m", lora_train="*norm*")
