"""Drawings of a module: Graphviz text, SVG, and one HTML page with search and details. No library or program needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from mgraph.ir.graph import Function, Module, Phase
from mgraph.ir.layered import GAP_X, GAP_Y, Box, layout
from mgraph.ir.printer import callee_of, header_text, node_text, reference

COLOURS = {
    Phase.FORWARD: "#e3f0ff",
    Phase.BACKWARD: "#ffe9dc",
    Phase.OPTIMIZER: "#e6f6e1",
    Phase.PREFILL: "#f1e8fb",
    Phase.DECODE: "#fdf3c8",
}
_INPUT_COLOUR = "#ffffff"
_CHARACTER, _LINE, _PADDING = 7.0, 16.0, 8.0
_MAX_LABEL = 40


@dataclass(frozen=True, slots=True)
class _Vertex:
    """A box of a drawing: a param, or a node."""

    key: str
    lines: tuple[str, ...]
    details: str
    colour: str


def to_dot(module: Module, function: str | None = None) -> str:
    """Graphviz text of one function, or of all, each in its cluster."""
    lines = ["digraph {", "  node [shape=box, style=filled, fontname=monospace];"]
    for index, drawn in enumerate(_chosen(module, function)):
        lines += [f"  subgraph cluster_{index} {{", f"    label={_dot('@' + drawn.name)};"]
        for vertex in _vertices(module, drawn):
            label, tip = _dot("\n".join(vertex.lines)), _dot(vertex.details)
            lines.append(
                f'    {_dot(f"{index} {vertex.key}")} [label={label}, tooltip={tip}, fillcolor="{vertex.colour}"];'
            )
        for start, end in _edges(drawn):
            lines.append(f"    {_dot(f'{index} {start}')} -> {_dot(f'{index} {end}')};")
        lines.append("  }")
    return "\n".join([*lines, "}"]) + "\n"


def to_svg(module: Module, function: str) -> str:
    """One function as an SVG picture; hovering over a box shows its whole text."""
    return _svg(module, module.functions[function])


def to_html(module: Module) -> str:
    """One self-contained page: the list of functions, a search box over all nodes, and every function's picture."""
    functions = list(module.functions.values())
    links = "".join(
        f'<li><a href="#f{i}">@{_xml(f.name)}</a> <small>{len(f.nodes)}</small></li>' for i, f in enumerate(functions)
    )
    sections = "".join(
        f'<section id="f{i}"><h2>{_xml(header_text(f))}</h2>{_svg(module, f)}</section>'
        for i, f in enumerate(functions)
    )
    title = _xml(module.name)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{title}</title><style>{_STYLE}</style></head>"
        f'<body><nav><h1>{title}</h1><input id="search" type="search" placeholder="name, op, path or file"/>'
        f'<p id="found"></p><ul>{links}</ul></nav><main>{sections}</main><pre id="details"></pre>'
        f"<script>//<![CDATA[{_SCRIPT}//]]></script></body></html>\n"
    )


def _chosen(module: Module, function: str | None) -> list[Function]:
    return list(module.functions.values()) if function is None else [module.functions[function]]


def _vertices(module: Module, function: Function) -> Iterator[_Vertex]:
    for value in function.params:
        text = f"{reference(value)}: {value.type}"
        yield _Vertex(repr(value), (_cut(reference(value)), _cut(str(value.type))), text, _INPUT_COLOUR)
    returned = set(function.results)
    for node in function.nodes:
        callee = callee_of(node)
        op = node.op if callee is None else f"call @{callee}"
        mark = " ↵" if returned & set(node.results) else ""
        lines = (_cut(op) + mark, *(_cut(f"%{v.name}: {v.type}") for v in node.results[:3]))
        yield _Vertex(f"%{node.id}", lines, node_text(node, module.functions), COLOURS[node.phase])


def _edges(function: Function) -> list[tuple[str, str]]:
    """Edges between params and nodes; slots and states are named in the details, not drawn."""
    made: dict[object, str] = {v: repr(v) for v in function.params}
    edges: dict[tuple[str, str], None] = {}
    for node in function.nodes:
        for value in node.operands:
            if value in made:
                edges[made[value], f"%{node.id}"] = None
        made.update(dict.fromkeys(node.results, f"%{node.id}"))
    return list(edges)


def _svg(module: Module, function: Function) -> str:
    vertices = list(_vertices(module, function))
    edges = _edges(function)
    boxes = layout({v.key: _size(v) for v in vertices}, edges)
    width = max((b.x + b.width for b in boxes.values()), default=0) + GAP_X
    height = max((b.y + b.height for b in boxes.values()), default=0) + GAP_Y
    paths = "".join(_path(boxes[start], boxes[end]) for start, end in edges)
    drawn = "".join(_box(vertex, boxes[vertex.key]) for vertex in vertices)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="monospace" font-size="12">'
        f'<g fill="none" stroke="#999">{paths}</g>{drawn}</svg>'
    )


def _size(vertex: _Vertex) -> tuple[float, float]:
    return max(map(len, vertex.lines)) * _CHARACTER + 2 * _PADDING, len(vertex.lines) * _LINE + _PADDING


def _path(start: Box, end: Box) -> str:
    x1, y1, x2, y2 = start.x + start.width / 2, start.y + start.height, end.x + end.width / 2, end.y
    middle = (y1 + y2) / 2
    return f'<path d="M{x1:.0f} {y1:.0f}C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}"/>'


def _box(vertex: _Vertex, box: Box) -> str:
    rows = "".join(
        f'<text x="{box.x + _PADDING:.0f}" y="{box.y + _LINE * (index + 1):.0f}">{_xml(line)}</text>'
        for index, line in enumerate(vertex.lines)
    )
    return (
        f'<g class="node" data-text="{_xml(vertex.details)}"><title>{_xml(vertex.details)}</title>'
        f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{box.height:.0f}" rx="4" '
        f'fill="{vertex.colour}" stroke="#666"/>{rows}</g>'
    )


def _xml(text: str) -> str:
    """Escaped, with characters that XML forbids replaced by a sign that shows."""
    return escape("".join(c if c.isprintable() else "�" for c in text))


def _dot(text: str) -> str:
    """A quoted Graphviz string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_LABEL else text[: _MAX_LABEL - 1] + "…"


_STYLE = """
body { margin: 0; display: grid; grid-template-columns: 260px 1fr; height: 100vh; font: 14px sans-serif }
nav { overflow: auto; padding: 12px; border-right: 1px solid #ccc } main { overflow: auto; padding: 0 12px 120px }
h1 { font-size: 18px } h2 { font: 13px monospace } ul { padding-left: 16px } input { width: 100% }
#details { position: fixed; bottom: 0; left: 260px; right: 0; margin: 0; padding: 8px; background: #fffd;
  border-top: 1px solid #ccc; white-space: pre-wrap; max-height: 110px; overflow: auto }
.node.hit rect { stroke: #d00; stroke-width: 3 } .node:hover rect { stroke-width: 2 }
"""
_SCRIPT = """
const nodes = [...document.querySelectorAll(".node")];
const show = node => document.getElementById("details").textContent = node.dataset.text;
nodes.forEach(node => node.addEventListener("mouseenter", () => show(node)));
document.getElementById("search").addEventListener("input", event => {
  const wanted = event.target.value.toLowerCase();
  const hits = nodes.filter(node => {
    const hit = wanted !== "" && node.dataset.text.toLowerCase().includes(wanted);
    node.classList.toggle("hit", hit);
    return hit;
  });
  document.getElementById("found").textContent = wanted === "" ? "" : hits.length + " found";
  if (hits.length) { hits[0].scrollIntoView({block: "center", inline: "center"}); show(hits[0]); }
});
"""
