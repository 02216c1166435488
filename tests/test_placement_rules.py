"""Rules of placement: their text, which parameters take them, and what is said about wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from mgraph.compiler import pipeline_of, pipeline_text
from mgraph.errors import OptionError
from mgraph.passes.tensor_parallel import TensorParallel
from mgraph.placement_rules import PlacementRule, chosen, parse_placement
from mgraph.recipe import Recipe

NAMES = ("embed.weight", "layers.0.up.weight", "layers.1.up.weight", "norm.weight")


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ("layers.*.ffn.down.weight: S(1)@tp", PlacementRule(("layers.*.ffn.down.weight",), "tp", 1)),
        ("a|b:R @ tp", PlacementRule(("a", "b"), "tp")),
        ({"match": "a", "place": "S( 0 )@tp"}, PlacementRule(("a",), "tp", 0)),
    ],
)
def test_text_and_mapping(rule: Any, found: PlacementRule) -> None:
    assert parse_placement(rule) == found
    assert parse_placement(found.text) == found


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("a: S(-1)@tp", "says 'S(-1)@tp'"),
        ("a: P@tp", "the placement 'a: P@tp' says 'P@tp'"),
        ("a: S(1)", "says 'S(1)'"),
        (": R@tp", "names no parameters"),
        ("a", "names no effect"),
        ({"match": "a", "plaec": "R@tp"}, "did you mean 'place'"),
    ],
)
def test_wrong_rules(rule: Any, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_placement(rule)
    assert says in str(caught.value)


def test_the_first_rule_of_an_axis_is_taken() -> None:
    rules = ("layers.0.*: R@tp", "layers.*: S(1)@tp", "*: S(0)@fsdp")
    assert {n: r.dim for n, r in chosen(rules, "tp", NAMES).items()} == {NAMES[1]: None, NAMES[2]: 1}
    assert chosen(rules, "fsdp", NAMES).keys() == set(NAMES)
    with pytest.raises(OptionError, match=r"layers\.9\.up\.weight: R@tp' matches no parameter"):
        chosen(("layers.9.up.weight: R@tp",), "tp", NAMES)


def test_a_recipe_hands_them_to_the_pass_of_the_axis() -> None:
    recipe = Recipe(model="dense-tiny", mesh="dp=2,tp=2", place=("*.down.weight:R@tp",))
    (made,) = (p for p in pipeline_of(recipe) if isinstance(p, TensorParallel))
    assert made.place == ("*.down.weight: R@tp",)


@pytest.mark.parametrize(
    ("mesh", "says"),
    [("dp=2", "is for an axis that the mesh has not"), ("dp=2,tp=2", "is for an axis that splits no layers")],
)
def test_an_axis_that_takes_none(mesh: str, says: str) -> None:
    axis = "dp" if "tp" in mesh else "tp"
    with pytest.raises(OptionError, match=says) as caught:
        pipeline_text(Recipe(model="dense-tiny", mesh=mesh, place=(f"*: R@{axis}",)))
    assert caught.value.where == "--place"


def test_not_for_serving() -> None:
    with pytest.raises(OptionError, match="place is for training"):
        Recipe(model="dense-tiny", purpose="serve", place=("*: R@tp",))
