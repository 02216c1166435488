"""`mgraph memory` on a package: text and data say the same, sizes and ranks count, and what is wrong is said."""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mgraph.passes.recompute import size_text

from .conftest import Mgraph

WIDTH = {"f32": 4, "i64": 8}
SVG = "{http://www.w3.org/2000/svg}"
BOTTOM = 400
"""Where the pictures have no memory, in pixels."""


@pytest.fixture
def forecast(mgraph: Mgraph, compiled: Path) -> Any:
    """The forecast as data, for options."""

    def run(*options: str) -> Any:
        return json.loads(mgraph("memory", compiled, "--format", "json", *options).out)

    return run


def test_state_is_that_of_the_manifest(forecast: Any, compiled: Path) -> None:
    kinds = {"param": "parameters", "grad": "gradients", "moment": "optimizer state"}
    expected: dict[str, int] = {}
    for state in json.loads((compiled / "manifest.json").read_text())["state"]:
        kind = kinds.get(state["kind"], "buffers and scalars")
        expected[kind] = expected.get(kind, 0) + WIDTH[state["dtype"]] * math.prod(state["shape"])
    assert forecast()["state"] == expected


def test_sizes_are_the_recipe_s_or_as_given(forecast: Any) -> None:
    own, given = forecast(), forecast("--batch-size", "3", "--seq-len", "65")
    assert own["sizes"] == {"B": 8, "S": 2048} and given["sizes"] == {"B": 3, "S": 65}
    assert own["entries"]["microbatch"]["peak"] > 3 * given["entries"]["microbatch"]["peak"]
    assert own["state"] == given["state"]
    for found in (own, given):
        peaks = {name: entry["peak"] for name, entry in found["entries"].items()}
        assert found["total"] == sum(found["state"].values()) + max(peaks.values())
        assert found["alive"]["entry"] == "microbatch"
        assert sum(tensor["bytes"] for tensor in found["alive"]["tensors"]) == peaks["microbatch"]


def test_tensors_with_their_lines(mgraph: Mgraph, forecast: Any, compiled: Path) -> None:
    found = forecast("--entry", "predict")
    assert found["alive"]["entry"] == "predict"
    text = mgraph("memory", compiled, "--entry", "predict", "--limit", "2").out
    peak = found["entries"]["predict"]["peak"]
    section = text[text.index(f"at the peak of predict, {size_text(peak)}") :].splitlines()
    first = found["alive"]["tensors"][0]
    assert f"@{first['function']} %{first['value']}" in section[2] and first["type"] in section[2]
    assert section[2].startswith(size_text(first["bytes"])) and section[2].endswith(first["source"])
    assert first["source"].startswith("models/")
    assert section[4] == f"… and {len(found['alive']['tensors']) - 2} more (--limit)"
    assert "one rank of dp=1; B=8, S=2048" in text


def test_functions_keep_what_the_backward_needs(forecast: Any) -> None:
    functions = forecast()["functions"]
    assert functions["layer.fwd"]["calls"] == functions["layer.bwd"]["calls"] == 2
    assert functions["layer.fwd"]["kept"] > functions["layer"]["kept"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seq-len", "1"), "S is 1, and from 2 to"),
        (("--entry", "predikt"), "has no entry 'predikt'"),
        (("--format", "png"), "png"),
    ],
)
def test_mistakes(mgraph: Mgraph, compiled: Path, options: tuple[str, ...], message: str) -> None:
    run = mgraph("memory", compiled, *options)
    assert run.code == 2 and message in run.err and not run.out


def test_ranks(forecast: Any) -> None:
    assert forecast("--ranks", "4")["mesh"] == {"dp": 4}


def _bands(picture: str) -> tuple[ElementTree.Element, dict[str, list[float]]]:
    """A picture, and by band the heights above the bottom of its upper edge, from left to right, in pixels."""
    drawn = ElementTree.fromstring(picture)
    found = {}
    for shape in drawn.iter(f"{SVG}polygon"):
        points = [tuple(map(float, point.split(","))) for point in shape.attrib["points"].split()]
        label = shape.find(f"{SVG}title")
        assert label is not None and label.text is not None
        found[label.text] = [BOTTOM - y for _, y in points[: len(points) // 2]]
    return drawn, found


def test_the_picture_is_to_scale(mgraph: Mgraph, forecast: Any, compiled: Path) -> None:
    """The state is at the bottom, the peak at the top, and the columns say what there is."""
    data = forecast()
    drawn, bands = _bands(mgraph("memory", compiled, "--format", "svg").out)
    scale = max(map(max, bands.values())) / data["total"]
    assert bands["parameters"] == pytest.approx(
        [data["state"]["parameters"] * scale] * len(bands["parameters"]), abs=0.1
    )
    state = sum(data["state"].values())
    assert max(bands["buffers and scalars"]) == pytest.approx(state * scale, abs=0.1)
    assert set(bands) >= {"optimizer state", "gradients of parameters", "activations", "gradients"}
    columns = [rect.findtext(f"{SVG}title", "") for rect in drawn.iter(f"{SVG}rect") if rect.get("class") == "column"]
    assert any(c.startswith("microbatch: @layer.bwd") for c in columns) and any(c.startswith("finish") for c in columns)
    peak = data["entries"]["microbatch"]
    label = f"{size_text(data['total'])} at @{peak['function']} %{peak['node']}"
    assert label in [text.text for text in drawn.iter(f"{SVG}text")]


def test_the_page_has_picture_and_tables(mgraph: Mgraph, compiled: Path) -> None:
    page = mgraph("memory", compiled, "--format", "html", "--entry", "predict").out
    text = mgraph("memory", compiled, "--entry", "predict").out
    _, bands = _bands(page[page.index("<svg") : page.index("</svg>") + 6])
    assert "activations" in bands and "gradients" not in bands
    assert escape(text.splitlines()[-2]) in page and "predict: @" in page and "microbatch: @" not in page
