"""Rows of tokens by each way to send them, against counts of random choices and of what a message has."""

from __future__ import annotations

import math

import pytest
import torch

from mgraph.cli.token_ways import Way, text, way_of
from mgraph.compiler import build_module
from mgraph.recipe import Recipe


@pytest.mark.parametrize(("experts", "choices", "ranks"), [(64, 8, 2), (64, 8, 16), (8, 2, 4), (8, 1, 8)])
def test_rows_in_use_are_those_of_even_routing(experts: int, choices: int, ranks: int) -> None:
    """A token goes once to each rank that has any of its experts."""
    tokens = 20_000
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(tokens, experts, generator=generator).topk(choices, -1).indices // (experts // ranks)
    goes = torch.zeros(tokens, ranks).scatter(1, chosen, 1)
    way = Way("alltoall", ranks, experts, choices, tokens, tokens, 1, 1)
    rows = {name: (sent / tokens, used / tokens) for name, sent, used in way.rows(tokens, tokens)}
    assert rows["alltoall"] == rows["allgather"]
    assert rows["alltoall"][0] == ranks - 1
    assert rows["alltoall"][1] == pytest.approx(float(goes[:, 1:].sum(1).mean()), rel=0.02)
    assert rows["once for each expert"][1] == pytest.approx(float((chosen > 0).sum(1).double().mean()), rel=0.02)


@pytest.mark.parametrize(("dispatch", "chunks"), [("alltoall", 2), ("allgather", 1)])
def test_what_a_graph_sends(dispatch: str, chunks: int) -> None:
    recipe = Recipe(model="moe-tiny", mesh="ep=4", arch="none", dispatch=dispatch, ep_chunks=chunks)
    module = build_module(recipe).module
    way = next(found for f in module.functions.values() if (found := way_of(module, f)) is not None)
    assert (way.dispatch, way.ranks, way.experts, way.choices) == (dispatch, 4, 8, 2)
    assert (way.there, way.back) == (4 * 64 + 2 * (4 + 8), 4 * 64)
    shown = text(module, {"B": 2, "S": 12})
    line = next(line for line in shown.splitlines() if line.startswith(dispatch))
    used = 3 * (1 - math.comb(6, 2) / math.comb(8, 2)) * 24
    assert line.split()[1:3] == ["72", f"{used:.0f}"] and line.endswith("this package")
    assert shown.splitlines()[0].startswith("tokens of a layer, forward: B*S, 2 of 8 experts each, over 4 ranks")
    assert text(module, {}) == "", "no sizes are known"


def test_a_budget_bounds_what_is_sent_alone() -> None:
    """A rank has as many tokens as without one, and sends so many rows to each other at most."""
    recipe = Recipe(model="moe-tiny", mesh="ep=8", arch="none", expert_budget=1.25)
    lines = [line.split() for line in text(build_module(recipe).module, {"B": 8, "S": 512}).splitlines()]
    rows = {line[0]: line[1:3] for line in lines if line[0] in ("alltoall", "allgather", "once")}
    tokens, used = 8 * 512, 7 * 8 * 512 * (1 - math.comb(7, 2) / math.comb(8, 2))
    room = int(rows["alltoall"][0].replace(",", "")) // 7
    assert tokens * 2 / 8 <= room < tokens and room >= 1.25 * used / 7 * 0.99
    assert rows["alltoall"][1] == f"{used:,.0f}"
    assert rows["allgather"] == [f"{7 * tokens:,}", f"{used:,.0f}"]
    assert lines[0][:7] == ["tokens", "of", "a", "layer,", "forward:", "B*S,", "2"]


def test_with_extents_of_the_host_it_is_the_most() -> None:
    shown = []
    for extent in ("bound", "host"):
        recipe = Recipe(model="moe-tiny", mesh="ep=4", arch="none", expert_extent=extent)
        shown.append(text(build_module(recipe).module, {"B": 2, "S": 12}))
    bound, host = ([line.split()[1:3] for line in found.splitlines()[2:]] for found in shown)
    assert bound == host and len(bound) == 3
    assert "sends only these" in shown[1] and "sends only these" not in shown[0]


def test_without_experts_there_is_nothing() -> None:
    assert text(build_module(Recipe(model="dense-tiny", mesh="dp=2", arch="none")).module, {"B": 2, "S": 12}) == ""
