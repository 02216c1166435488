"""What belongs to one layer stands beside its call: the same numbers bit for bit, one loop of them, no more memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.codegen.memory import RankMemory
from mgraph.compiler import Compilation, compile_package
from mgraph.ir.parser import parse_module
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.by_layer import ByLayer
from mgraph.recipe import Recipe
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from tests.families.configs import write_config

MODELS = """
import torch
from dataclasses import replace
from torch import nn
from mgraph import models
from mgraph.models.decoder import Decoder, Output

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Decoder(replace(models.get("dense", "tiny").config, num_layers=4))
        self.mix = nn.Parameter(torch.rand(4))

    def states(self, tokens):
        inner, found = self.inner, []
        x, angles = inner.embed(tokens), inner.rotary(torch.arange(tokens.shape[1])[None], torch.float32)
        for layer in inner.layers:
            x, _ = layer(x, *angles, None, None)
            found.append(x)
        return found

    def logits(self, x):
        return self.inner.head(self.inner.norm(x))

class Sizes(Base):
    def forward(self, tokens):
        states = self.states(tokens)
        sizes = torch.stack([s.abs().mean(-1).log().mean() for s in states])
        return Output(self.logits(states[-1]), 0.1 * sizes.sum())

class Lens(Base):
    def forward(self, tokens):
        every = [self.logits(s) for s in self.states(tokens)]
        return Output(every[-1], 0.1 * sum(e.log_softmax(-1)[..., 0].mean() for e in every))

class Mixed(Base):
    def forward(self, tokens):
        return self.logits(sum(w * s for w, s in zip(self.mix.softmax(0), self.states(tokens))))
"""
LOOPS = {"Sizes": {"evaluate": 1}, "Lens": {}, "Mixed": {}, "qwen3-moe": {"microbatch": 2, "evaluate": 1}}
"""How many loops entries have: what states give is needed again beside them where the gradient is made of it."""


def compiled(tmp_path: Path, name: str, **options: Any) -> Compilation:
    file = tmp_path / "user.py"
    file.write_text(f"{MODELS}\ndef made():\n    torch.manual_seed(0)\n    return {name}()\n")
    changes: dict[str, Any] = {"output_router_logits": True, "num_hidden_layers": 4}
    model = f"{file}:made" if name[0].isupper() else write_config(name, tmp_path, **changes)
    output = str(tmp_path / ("without" if "disable" in options else "with"))
    return compile_package(Recipe(model=model, arch="none", output=output, **options))


def microbatch(compilation: Compilation) -> dict[str, torch.Tensor]:
    """The results and all gradients of some tokens."""
    assert compilation.package is not None
    package = load_package(compilation.package, "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(1))
    out = package.call("microbatch", state, tokens, tokens.roll(-1, 1))
    return {**out, **{name: t for name, t in state.items() if name.endswith(".grad")}}


@pytest.mark.parametrize("name", list(LOOPS))
def test_the_same_bits_in_fewer_lines(name: str, tmp_path: Path) -> None:
    made = compiled(tmp_path, name)
    plain = compiled(tmp_path, name, disable="by-layer")
    found, expected = microbatch(made), microbatch(plain)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in found)
    assert made.package is not None
    bodies = re.split(r"\ndef (\w+)\(", (made.package / "step.py").read_text())
    loops = {name: body.count("    for i in ") for name, body in zip(bodies[1::2], bodies[2::2], strict=True)}
    assert {entry: loops[entry] for entry in LOOPS[name]} == LOOPS[name]
    peaks = [RankMemory(c.module, {"B": 2, "S": 64}, {"dp": 1}).entry("microbatch").bytes for c in (made, plain)]
    assert peaks[0] <= peaks[1] + 1024  # constants live longer


LAYERS = """\
mgraph-ir 1
module "m"
dim B 1..

func @layer(%x: f32[B, 8], %s: f32[]) {{
  %y: f32[B, 8] = aten.mul.Tensor(%x, %s) forward at "layers.*" "model.py":1 by test
  return %y
}}

func @main(%x: f32[B, 8]) {{
{body}
}}

entry main = @main -> (out)
"""


def order(*lines: str) -> tuple[list[str], Report]:
    """The names of what nodes give, after the pass; a line is `name: type = op(…)`, of the source line of its op."""
    places = {
        "call": 10,
        "aten.ones.default": 11,
        "aten.sum.default": 12,
        "aten.exp.default": 13,
        "aten.mul.Tensor": 14,
    }
    body = []
    for line in "\n".join(lines).splitlines():
        place = next((place for op, place in places.items() if f"= {op}" in line), 20)
        body.append(f"  {line}" + (f' forward at "" "model.py":{place} by test' if "=" in line else ""))
    module = parse_module(LAYERS.format(body="\n".join(body)))
    report = Report()
    after = ByLayer().run(module, report)
    verify(after)
    assert (after is module) == (not report.matches)
    return [node.results[0].name for node in after.functions["main"].nodes], report


def test_runs_behind_all_layers_go_behind_each() -> None:
    """Constants that they read go before the first; what reads them all stays."""
    found, report = order(
        "%o: f32[] = aten.ones.default()",
        "%h_1: f32[B, 8] = call @layer(%x, %o)",
        "%h_2: f32[B, 8] = call @layer(%h_1, %o)",
        "%h_3: f32[B, 8] = call @layer(%h_2, %o)",
        "%other: f32[B, 8] = aten.neg.default(%h_3)",
        "%c: f32[] = aten.ones.default()",
        *(f"%s_{i}: f32[] = aten.sum.default(%h_{i})\n%t_{i}: f32[] = aten.mul.Tensor(%s_{i}, %c)" for i in (1, 2, 3)),
        "%u: f32[] = aten.add.Tensor(%t_1, %t_2)",
        "%v: f32[] = aten.add.Tensor(%u, %t_3)",
        "return %v",
    )
    assert found == ["o", "c", "h_1", "s_1", "t_1", "h_2", "s_2", "t_2", "h_3", "s_3", "t_3", "other", "u", "v"]
    assert report.matches[0].detail == "nodes that stand beside their layer: 4"


def test_runs_before_all_layers_go_before_each() -> None:
    found, _ = order(
        "%o: f32[] = aten.ones.default()",
        *(f"%e_{i}: f32[B, 8] = aten.exp.default(%x)\n%s_{i}: f32[] = aten.mul.Tensor(%o, %o)" for i in (1, 2, 3)),
        "%h_1: f32[B, 8] = call @layer(%e_1, %s_1)",
        "%h_2: f32[B, 8] = call @layer(%e_2, %s_2)",
        "%h_3: f32[B, 8] = call @layer(%e_3, %s_3)",
        "%u: f32[B, 8] = aten.add.Tensor(%h_1, %h_2)",
        "%v: f32[B, 8] = aten.add.Tensor(%u, %h_3)",
        "return %v",
    )
    assert found == ["o", "e_1", "s_1", "h_1", "e_2", "s_2", "h_2", "e_3", "s_3", "h_3", "u", "v"]


def test_what_would_keep_more_memory_stays() -> None:
    """Sums before all layers of something large, which would live until the last layer that takes one."""
    lines = [
        "%e: f32[B, 8] = aten.exp.default(%x)",
        *(f"%s_{i}: f32[] = aten.sum.default(%e)" for i in (1, 2, 3)),
        "%h_1: f32[B, 8] = call @layer(%x, %s_1)",
        "%h_2: f32[B, 8] = call @layer(%h_1, %s_2)",
        "%h_3: f32[B, 8] = call @layer(%h_2, %s_3)",
        "return %h_3",
    ]
    found, report = order(*lines)
    assert found == ["e", "s_1", "s_2", "s_3", "h_1", "h_2", "h_3"] and not report.matches


def test_what_one_layer_alone_has_stays() -> None:
    found, report = order(
        "%o: f32[] = aten.ones.default()",
        "%h_1: f32[B, 8] = call @layer(%x, %o)",
        "%h_2: f32[B, 8] = call @layer(%h_1, %o)",
        "%s_1: f32[] = aten.sum.default(%h_1)",
        "%v: f32[B, 8] = aten.mul.Tensor(%h_2, %s_1)",
        "return %v",
    )
    assert found == ["o", "h_1", "h_2", "s_1", "v"] and not report.matches
