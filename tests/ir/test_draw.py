"""Drawings are well-formed, show every node once, and boxes do not overlap."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mgraph.ir.draw import to_dot, to_html, to_svg
from mgraph.ir.graph import Module, Origin
from mgraph.ir.layered import layout

SVG = "{http://www.w3.org/2000/svg}"


def test_svg_is_xml_with_every_node(sample: Module) -> None:
    root = ElementTree.fromstring(to_svg(sample, "main"))
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert len(titles) == 3 + 6
    assert any(t.startswith("%h_2, %r_1 = call @layer(%h_1, @rope.cos; @layers.1.norm.weight)") for t in titles)
    # %h -> h_1, h_1 -> h_2, part -> begun, begun -> sum
    assert len(list(root.iter(f"{SVG}path"))) == 4


def test_html_is_one_well_formed_page(sample: Module) -> None:
    page = to_html(sample)
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert [a.attrib["href"] for a in root.iter("a")] == ["#f0", "#f1"]
    assert [s.attrib["id"] for s in root.iter("section")] == ["f0", "f1"]
    assert [i.attrib["id"] for i in root.iter("input")] == ["search"]
    assert len([g for g in root.iter(f"{SVG}g") if g.attrib.get("class") == "node"]) == 2 + 5 + 3 + 6
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_strange_texts_are_escaped(sample: Module) -> None:
    layer = sample.functions["layer"]
    odd = replace(layer.nodes[1], attrs={"end": '<"&\\\n\x00>'}, origin=Origin("</title>]]>"))
    module = sample.with_function(replace(layer, nodes=(layer.nodes[0], odd, *layer.nodes[2:])))
    ElementTree.fromstring(to_html(module).removeprefix("<!DOCTYPE html>\n"))
    quoted = re.compile(r'"(?:[^"\\\n]|\\.)*"')
    for line in to_dot(module).splitlines():
        assert '"' not in quoted.sub("", line)


def test_dot_has_clusters_nodes_and_edges(sample: Module) -> None:
    text = to_dot(sample)
    assert text.startswith("digraph {") and text.endswith("}\n")
    assert text.count("subgraph cluster_") == 2
    assert '"1 %h_1" -> "1 %h_2";' in text and '"0 %y" -> "0 %cut";' in text
    assert to_dot(sample, "layer").count("subgraph cluster_") == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=30))
def test_boxes_do_not_overlap_and_edges_go_down(pairs: list[tuple[int, int]]) -> None:
    edges = [(str(min(p)), str(max(p))) for p in pairs if p[0] != p[1]]
    boxes = layout({str(i): (20.0 + 5 * i, 10.0 + i) for i in range(12)}, edges)
    assert all(boxes[a].y + boxes[a].height < boxes[b].y for a, b in edges)
    for a, b in itertools.combinations(boxes.values(), 2):
        apart_x = a.x + a.width <= b.x or b.x + b.width <= a.x
        apart_y = a.y + a.height <= b.y or b.y + b.height <= a.y
        assert apart_x or apart_y
