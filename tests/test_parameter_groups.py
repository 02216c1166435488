"""Rules for parameters: their text, their order, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mgraph.errors import OptionError
from mgraph.parameter_groups import Group, assign, parse_group
from mgraph.recipe import Recipe, read_recipe

NAMES = ("embed.weight", "layers.0.norm.weight", "layers.0.up.weight", "layers.0.up.bias")


@pytest.mark.parametrize(
    ("rule", "group"),
    [
        ("*.norm*|*.bias: weight_decay=0, lr=0.1", Group(("*.norm*", "*.bias"), 0.1, 0.0)),
        ("embed.*:frozen", Group(("embed.*",), frozen=True)),
        ({"match": "*", "weight_decay": 2}, Group(("*",), weight_decay=2.0)),
        ({"match": "a|b", "frozen": True, "lr": 1.5}, Group(("a", "b"), 1.5, None, True)),
    ],
)
def test_text_and_mapping(rule: Any, group: Group) -> None:
    assert parse_group(rule) == group
    assert parse_group(group.text) == group


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("*: lr=-1", "lr is '-1'"),
        ("*: lr=nan", "lr is 'nan'"),
        ("*: weight_decay", "weight_decay is True"),
        ("*: wieght_decay=0", "did you mean 'weight_decay'"),
        ("*", "names no effect"),
        (": lr=2", "names no parameters"),
        ({"match": "*", "frozen": "yes"}, "frozen is 'yes'"),
    ],
)
def test_wrong_rules(rule: Any, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_group(rule)
    assert says in str(caught.value)


def test_the_first_rule_that_fits_is_taken() -> None:
    found = assign(("*.bias: lr=2", "layers.*: lr=3, weight_decay=1"), NAMES)
    assert [found[n].lr for n in NAMES] == [1.0, 3.0, 3.0, 2.0]
    assert [found[n].decay(0.1, dims) for n, dims in zip(NAMES, (2, 1, 2, 1), strict=True)] == [0.1, 0.1, 0.1, 0.0]


def test_a_rule_without_parameters_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"matches no parameter") as caught:
        assign(("layers.*.up.wieght: lr=2",), NAMES)
    assert "did you mean 'layers.0.up.weight'" in str(caught.value)
    with pytest.raises(OptionError, match=r"has no parameters left"):
        assign(("*.weight: lr=2", "embed.*: frozen"), NAMES)


def test_recipes_hold_rules_in_one_spelling(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text('model: m\ngroups:\n- {match: "*.norm*|*.bias", weight_decay: 0}\n- "embed.*:frozen"\n')
    found = read_recipe(path, {})
    assert found.groups == ("*.norm*|*.bias: weight_decay=0", "embed.*: frozen")
    assert found == Recipe(model="m", groups=found.groups)
    path.write_text("model: m\ngroups: embed\n")
    with pytest.raises(OptionError, match="the group 'embed' names no effect"):
        read_recipe(path, {})
