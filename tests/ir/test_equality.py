"""Three degrees of sameness: equal, same structure, isomorphic."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mgraph.ir.equality import attr_key, equal, isomorphic, structural_hash
from mgraph.ir.graph import Fact, Module, Node, Origin, Phase
from mgraph.ir.parser import parse_module


def with_node(module: Module, function: str, index: int, change: Callable[[Node], Node]) -> Module:
    body = module.functions[function]
    nodes = (*body.nodes[:index], change(body.nodes[index]), *body.nodes[index + 1 :])
    return module.with_function(replace(body, nodes=nodes))


def test_equal_is_by_content_and_ignores_the_order_of_declarations(sample: Module, sample_text: str) -> None:
    assert equal(sample, parse_module(sample_text))
    turned = replace(
        sample,
        functions=dict(list(sample.functions.items())[::-1]),
        state=dict(list(sample.state.items())[::-1]),
        dims=dict(list(sample.dims.items())[::-1]),
    )
    assert equal(sample, turned)


CHANGES: list[Callable[[Module], Module]] = [
    lambda m: replace(m, name="other"),
    lambda m: replace(m, facts=(*m.facts, Fact("B >= 1"))),
    lambda m: replace(m, mesh=m.mesh[:2]),
    lambda m: replace(m, state={**m.state, "step": replace(m.state["step"], persist=False)}),
    lambda m: replace(m, state={**m.state, "step": replace(m.state["step"], init=(("fill_", 0),))}),
    lambda m: replace(m, entries={}),
    lambda m: m.with_function(replace(m.functions["layer"], statics=("window", "more"))),
    lambda m: with_node(m, "layer", 1, lambda n: replace(n, attrs={"dim": 1.0, "end": n.attrs["end"]})),
    lambda m: with_node(m, "layer", 1, lambda n: replace(n, attrs={"dim": True, "end": n.attrs["end"]})),
    lambda m: with_node(m, "layer", 1, lambda n: replace(n, phase=Phase.BACKWARD)),
    lambda m: with_node(m, "layer", 1, lambda n: replace(n, origin=Origin("elsewhere"))),
    lambda m: with_node(m, "layer", 1, lambda n: replace(n, made_by="dce")),
    lambda m: with_node(m, "layer", 1, lambda n: replace(n, op="aten.clone.default")),
    lambda m: with_node(m, "main", 1, lambda n: replace(n, operands=n.operands[::-1])),
]


@pytest.mark.parametrize("change", CHANGES)
def test_any_difference_is_unequal(sample: Module, change: Callable[[Module], Module]) -> None:
    assert not equal(sample, change(sample))


def test_attributes_of_several_kinds_differ() -> None:
    values: list[Any] = [1, 1.0, True, "1", None, (1,), (1.0,), -0.0, 0.0, 0, False, float("nan")]
    assert len({attr_key(v) for v in values}) == len(values)
    assert attr_key(float("nan")) == attr_key(float("nan"))


def test_the_hash_ignores_names_and_origins_and_nothing_else(sample: Module, sample_text: str) -> None:
    layer = sample.functions["layer"]
    renamed = parse_module(sample_text.replace("%y", "%why").replace("%x", "%ex").replace("@layer(", "@layer_2("))
    assert structural_hash(renamed.functions["layer_2"]) == structural_hash(layer)
    elsewhere = with_node(sample, "layer", 1, lambda n: replace(n, origin=Origin("elsewhere"), made_by="dce"))
    assert structural_hash(elsewhere.functions["layer"]) == structural_hash(layer)
    for text in ("eps = 1e-05", "%cut: f32[B, S, 64]", "return %y, %rstd", "static (window)", "reshape(%cut)"):
        new = {"return %y, %rstd": "return %rstd, %y", "reshape(%cut)": "reshape(%y)"}.get(
            text, text.replace("1e-05", "1e-06").replace("f32", "f64").replace("(window)", "(window, more)")
        )
        assert sample_text.count(text) == 1
        changed = parse_module(sample_text.replace(text, new))
        assert structural_hash(changed.functions["layer"]) != structural_hash(layer), text


def test_states_and_callees_count_in_the_hash(sample: Module) -> None:
    main = sample.functions["main"]
    other = with_node(sample, "main", 1, lambda n: replace(n, operands=(*n.operands[:2], main.nodes[0].operands[2])))
    assert structural_hash(other.functions["main"]) != structural_hash(main)
    callee = with_node(sample, "main", 1, lambda n: replace(n, attrs={**n.attrs, "callee": "main"}))
    assert structural_hash(callee.functions["main"]) != structural_hash(main)


def test_a_reduced_twin_is_isomorphic(sample: Module, sample_text: str) -> None:
    twin = parse_module(
        re.sub(r"\b64\b", "16", sample_text).replace("(2 32)", "(2 8)").replace("window = 128", "window = 2")
    )
    assert isomorphic(sample, twin) and not isomorphic(sample, twin, dims=True)
    assert isomorphic(sample, parse_module(sample_text.replace("%y", "%why")), dims=True)
    assert isomorphic(sample.functions["layer"], twin.functions["layer"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("reshape(%cut)", "reshape(%y)"),
        ('{eps = 1e-05, round = "normed"}', "{eps = 1e-05}"),
        ("cast(%flat)", "zero(%flat)"),
        ("return %y, %rstd", "return %rstd, %y"),
        ("%cut: f32[B, S, 64]", "%cut: f32[B*S, 64]"),
        ("%cut: f32[B, S, 64]", "%cut: bf16[B, S, 64]"),
        ("%cut: f32[B, S, 64]", "%cut: f32[B, S, 64]{dp=S(0)}"),
        ("call @layer(%h_1, @rope.cos; @layers.1.norm.weight)", "call @layer(%h_1, @rope.cos; @layers.0.norm.weight)"),
        ("-> (h, total)", "-> (h, sum)"),
    ],
)
def test_other_graphs_are_not_isomorphic(sample: Module, sample_text: str, old: str, new: str) -> None:
    assert sample_text.count(old) == 1
    assert not isomorphic(sample, parse_module(sample_text.replace(old, new)))


def test_other_functions_are_not_isomorphic(sample: Module) -> None:
    assert not isomorphic(sample, replace(sample, entries={}))
    assert not isomorphic(sample, sample.with_function(replace(sample.functions["layer"], name="more")))
