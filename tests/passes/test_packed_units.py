"""Packed gated units: each layout's gradient in one kernel, each guard broken once, and a package against autograd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mgraph.compiler import compile_package
from mgraph.passes.base import Report
from mgraph.passes.join_products import JoinProducts
from mgraph.recipe import Recipe
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from tests.passes.raising import assert_same, module_of

UP, GATE = "end = 12, input_sizes = [B, S, 12], start = 6", "end = 6, input_sizes = [B, S, 12], start = 0"
TEXT = f"""
func @f(%dy: f32[B, S, 6], %gate: f32[B, S, 6], %up: f32[B, S, 6]) {{
  %dgate: f32[B, S, 6], %dup: f32[B, S, 6] = glu_grad(%dy, %gate, %up) {{act = "silu"}}
  %a: f32[B, S, 12] = aten.slice_backward.default(%dup) {{dim = 2, {UP}, step = 1}}
  %b: f32[B, S, 12] = aten.slice_backward.default(%dgate) {{dim = 2, {GATE}, step = 1}}
  %dh: f32[B, S, 12] = aten.add.Tensor(%a, %b)
  return %dh
}}
"""
TURNS = (
    (f"{UP}, step = 1", "end = 12, input_sizes = [B, S, 12], start = 1, step = 2"),
    (f"{GATE}, step = 1", "end = 12, input_sizes = [B, S, 12], start = 0, step = 2"),
)
SWAPPED = ((UP, "X"), (GATE, UP), ("X", GATE))


def changed(*changes: tuple[str, str]) -> str:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    ("changes", "layout"), [((), "halves"), (SWAPPED, "swapped"), (TURNS, "interleaved")], ids=lambda p: str(p)[:11]
)
def test_both_gradients_are_made_at_once(changes: tuple[tuple[str, str], ...], layout: str) -> None:
    module, report = module_of(changed(*changes)), Report()
    after = JoinProducts().run(module, report)
    (node,) = after.functions["f"].nodes
    assert node.op == "glu_grad_joined" and node.attrs.get("layout", "halves") == layout
    assert len(report.matches) == 1 and layout in report.matches[0].detail
    assert_same(module, after)


UNIT = """
func @f(%h: f32[B, S, 12]) {
  %gate: f32[B, S, 6] = aten.slice.Tensor(%h) {dim = 2, step = 2}
  %up: f32[B, S, 6] = aten.slice.Tensor(%h) {dim = 2, start = 1, step = 2}
  %y: f32[B, S, 6] = glu(%gate, %up) {act = "silu"}
  return %y
}
"""


def test_units_of_columns_in_turns_are_marked() -> None:
    module = module_of(UNIT)
    after = JoinProducts().run(module, Report())
    assert after.functions["f"].nodes[-1].attrs == {"act": "silu", "spaced": True}
    assert_same(module, after)
    assert JoinProducts().run(after, Report()) is after
    halves = module_of(
        UNIT.replace("dim = 2, step = 2", "dim = 2, end = 6").replace("start = 1, step = 2", "start = 6")
    )
    assert JoinProducts().run(halves, Report()) is halves


@pytest.mark.parametrize(
    ("changes", "guard"),
    [
        (((UP, "end = 11, input_sizes = [B, S, 12], start = 5"),), "layout"),
        ((("(%a, %b)", "(%a, %b) {alpha = 2}"),), "sum"),
        ((("return %dh", "return %dh, %a"),), "sum"),
        ((("return %dh", "return %dh, %dup"),), "users"),
    ],
)
def test_what_almost_is_one_says_why(changes: tuple[tuple[str, str], ...], guard: str) -> None:
    module, report = module_of(changed(*changes)), Report()
    assert JoinProducts().run(module, report) is module
    assert [miss.guard for miss in report.near_misses] == [guard]


MODEL = """
import torch, torch.nn as nn, torch.nn.functional as F
class Packed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.emb, self.head = nn.Embedding(64, 24), nn.Linear(24, 64, bias=False)
        self.up = nn.ModuleList([nn.Linear(24, 2 * 36, bias=False) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(36, 24, bias=False) for _ in range(2)])
    def forward(self, tokens):
        x = self.emb(tokens)
        for up, down in zip(self.up, self.down):
            h = up(x)
            if self.kind == "turns":
                gate, value = h[..., ::2], h[..., 1::2]
            else:
                gate, value = h.chunk(2, -1) if self.kind == "halves" else h.chunk(2, -1)[::-1]
            x = x + down(F.silu(gate) * value)
        return self.head(x)
def halves(): return Packed("halves")
def swapped(): return Packed("swapped")
def turns(): return Packed("turns")
"""


@pytest.mark.parametrize("kind", ["halves", "swapped", "turns"])
def test_a_package_has_the_gradients_of_autograd(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "packed.py"
    file.write_text(MODEL)
    compile_package(Recipe(model=f"{file}:{kind}", arch="sm_80", output=str(tmp_path / "package")))
    text = (tmp_path / "package" / "step.py").read_text()
    assert "slice_backward" not in text and text.count("K.glu_bwd_0(") == 2
    sites = {site["name"]: site for site in json.loads((tmp_path / "package" / "manifest.json").read_text())["kernels"]}
    for name in ("glu_fwd_0", "glu_bwd_0"):
        *whole, launch = sites[name]["launches"]
        assert ["up" in way["args"] for way in whole] == [False] * (kind == "turns")
        assert ("gate_stride_2" in launch["args"]) == (kind == "turns")
    package = load_package(tmp_path / "package", "cpu")
    state = create_state(package.state_specs, 0, "cpu")
    tokens = torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    package.call("microbatch", state, tokens, labels)
    scope: dict[str, object] = {}
    exec(MODEL, scope)
    model = scope[kind]()  # type: ignore[operator]
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state[f"{name}.grad"], parameter.grad, rtol=1e-4, atol=1e-5)
