"""Loops found in a function, and those that must not be."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.cli.snapshots import open_package
from mgraph.codegen import function_text
from mgraph.codegen.loops import Carried, Outside, Slot, Stacked, find_loops, template
from mgraph.codegen.memory import RankMemory
from mgraph.codegen.prepare import prepare
from mgraph.codegen.step import step_text
from mgraph.compiler import build_module, compile_package
from mgraph.ir.graph import Function
from mgraph.ir.parser import parse_module
from mgraph.passes.activations import extents
from mgraph.recipe import Recipe
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from tests.codegen.mlp import module
from tests.codegen.name_flow import unbound
from tests.codegen.test_memory import LiveBytes
from tests.sampling import sampled

VIEWS = """mgraph-ir 1
module "m"
state @layers.{0..1}.w: f32[4, 4] = param trainable init [["zeros_"]]

func @layer(%x: f32[4, 4]; %w: f32[4, 4]) {
  %y: f32[4, 4] = aten.mm.default(%x, %w) forward at "layers.*" "m.py":1 by capture
  return %y
}

func @f(%x: f32[4, 4]) {
  %a: f32[4, 4] = call @layer(%x; @layers.0.w) forward at "layers.0" "m.py":2 by capture
  %t: f32[4, 4] = aten.t.default(%a) forward at "" "m.py":3 by capture
  %b: f32[4, 4] = aten.exp.default(%t) forward at "" "m.py":3 by capture
  %a_1: f32[4, 4] = call @layer(%b; @layers.1.w) forward at "layers.1" "m.py":2 by capture
  %t_1: f32[4, 4] = aten.t.default(%a_1) forward at "" "m.py":3 by capture
  %b_1: f32[4, 4] = aten.exp.default(%t_1) forward at "" "m.py":3 by capture
  %y: f32[4, 4] = aten.mm.default(%t_1, %b_1) forward at "" "m.py":3 by capture
  return %y
}

entry f = @f -> (y)
"""

LAYERED = Path(__file__).parent / "layered.py"


def microbatch() -> Function:
    return prepare(module())["microbatch"]


def test_template() -> None:
    assert template(["a.0.w", "a.1.w", "a.2.w"]) == ("a.{}.w", range(3))
    assert template(["a.2.w", "a.1.w"]) == ("a.{}.w", range(2, 0, -1))
    assert template(["a.0.w", "a.2.w", "a.4.w"]) == ("a.{}.w", range(0, 6, 2))
    assert template(["a.5.w", "a.2.w"]) == ("a.{}.w", range(5, -1, -3))
    for names in (
        ["a.0.w", "a.2.w", "a.3.w"],
        ["a.0.w", "a.0.w"],
        ["a.0.w", "b.1.w"],
        ["a.w", "a.v"],
        ["a.0", "a.1.w"],
    ):
        assert template(names) is None


def test_forward_and_backward_loops() -> None:
    forward, backward = find_loops(microbatch())
    assert (forward.period, forward.count, forward.layers) == (1, 4, range(4))
    assert isinstance(forward.operands[0, 0], Carried)
    assert forward.operands[0, 1] == Slot("layers.{}.up.weight")
    assert forward.pushed == {(0, 1)}
    assert (backward.count, backward.layers) == (4, range(3, -1, -1))
    assert backward.operands[0, 0] == Stacked(0, 0, 1, False)
    assert isinstance(backward.operands[0, 1], Carried)


def test_a_value_of_a_middle_iteration_prevents_the_loop() -> None:
    function = microbatch()
    second = function.nodes[2].results[0]
    loops = find_loops(replace(function, results=(*function.results, second)))
    assert all(loop.start > 2 or loop.end <= 2 for loop in loops)


def test_invariant_operands_are_outside() -> None:
    function = microbatch()
    same = function.nodes[1].operands[1]
    nodes = [
        replace(n, operands=(n.operands[0], same, *n.operands[2:])) if n.op == "call" else n for n in function.nodes
    ]
    loops = find_loops(replace(function, nodes=tuple(nodes)))
    assert loops[0].operands[0, 1] == Outside()


@pytest.mark.parametrize(
    ("mesh", "lines"),
    [
        ("dp=*", ("torch.stack(add_list)", "x_stack.pop(),", "expand[i],")),
        (
            "fsdp=2",
            ("torch.stack([*add_list, add])", "cos, unsqueeze, expand[i], d_add, *whole)", "expand[5], dx, *whole)"),
        ),
    ],
)
def test_losses_of_layers(mesh: str, lines: tuple[str, ...]) -> None:
    """As a person would write them: a list, and what flows back by the number of the layer."""
    text = step_text(build_module(Recipe(model=f"{LAYERED}:balanced", mesh=mesh, arch="none")).module)
    microbatch = text[text.index("\ndef microbatch(") : text.index("\ndef evaluate(")]
    assert microbatch.count("\n    for i in ") == 2 and "add_list.append(add)\n" in microbatch
    assert all(line in microbatch for line in lines) and "select" not in microbatch


def test_a_view_has_a_name_where_one_of_an_iteration_needs_it() -> None:
    text = step_text(parse_module(VIEWS))
    assert "        t = a.t()\n        x = t.exp()\n    y = t @ x\n" in text


FORMS = [
    ("two", {}, 4),
    ("two_of_one", {}, 0),
    ("summed", {}, 5),
    ("running", {}, 4),
    ("rows", {}, 1),
    ("hidden", {}, 1),
    ("growing", {}, 0),
    ("apart", {}, 4),
    ("scaled", {}, 4),
    ("parts", {}, 4),
    ("turned", {}, 4),
    ("later", {}, 4),
    ("both", {}, 4),
    ("two_become_one", {}, 4),
    ("summing", {}, 4),
    ("asked_twice", {}, 4),
    ("looking", {}, 4),
    ("looking_late", {}, 4),
    ("first_dense", {}, 4),
    ("mixed", {"recompute": "full"}, 4),
    ("mixed", {}, 4),
    ("by_turns", {}, 4),
    ("by_turns_longer", {}, 4),
    ("shared", {"recompute": "selective", "activation_budget": "1200KiB", "seq": 64}, 4),
    ("balanced", {}, 4),
    ("balanced", {"offload": "activations"}, 4),
    ("balanced", {"replayable_routing": True}, 0),
    ("routed", {}, 4),
]
"""A model of layered.py, options, and how many loops its entries have."""

MESHES: list[dict[str, Any]] = [
    {"mesh": "tp=2"},
    {"mesh": "fsdp=2"},
    {"mesh": "dp=2,tp=2", "sequence_parallel": True},
    {"mesh": "fsdp=2,dp=2", "overlap": True},
    {"mesh": "dp=2", "arch": "sm_90a", "precision": "bf16"},
]

QUICK = [
    form
    for form in FORMS
    if form[0] in ("two", "running", "growing", "turned", "later", "looking_late") or form == ("balanced", {}, 4)
]


@pytest.mark.parametrize(
    ("model", "options"),
    sampled(
        [(model, options) for model in dict.fromkeys(form[0] for form in FORMS) for options in MESHES],
        6,
        always=[("summing", MESHES[0])],
    ),
)
def test_names_are_bound_where_they_are_read(model: str, options: dict[str, Any]) -> None:
    done = build_module(Recipe(model=f"{LAYERED}:{model}", **{"arch": "none", **options}))
    assert not unbound(step_text(done.module))


def test_what_is_deleted_is_not_bound() -> None:
    head = "def step(x):\n  for i in range(2):\n    y = f(x)\n    del x\n    "
    assert unbound(head + "x = [z for z in y]") == []
    assert unbound(head + "z = g(x)\n    x = z") == ["step:5 x"]
    assert unbound(head + "z = g(y)") == ["step:3 x", "step:4 x"]  # in the second turn


def measured(path: Path) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """All outputs and states of a package that trains for a step, and the peak of each call: live, predicted."""
    package = load_package(path, "cpu")
    module = open_package(path).snapshots[-1].module
    memory = RankMemory(module, extents(module, {"B": 2, "S": 32}), {})
    state = create_state(package.state_specs, 0, "cpu")
    generator = torch.Generator().manual_seed(1)
    made, peaks = list[Tensor](), []
    for entry in ("microbatch", "evaluate", "predict", "microbatch", "finish"):
        of = {"lr": torch.tensor(0.01), "routing": torch.full((2, 32, 6, 2), -1, dtype=torch.int16)}
        inputs = package.manifest["entries"][entry]["inputs"]
        given = [of[k] if k in of else torch.randint(64, (2, 32), generator=generator) for k in inputs]
        with LiveBytes(given, list(state.values())) as live, torch.no_grad():
            made += package.entries[entry](state, *given)
        peaks.append((live.peak, memory.entry(entry).bytes))
    return [*made, *state.values()], peaks


@pytest.mark.parametrize(("model", "options", "loops"), sampled(FORMS, 0, always=QUICK))
def test_loops_do_what_statements_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, options: dict[str, Any], loops: int
) -> None:
    """Bit for bit, in the memory that is predicted (of what is on the host, in as much)."""
    forms = []
    for name in ("loops", "statements"):
        if name == "statements":
            monkeypatch.setattr(function_text, "find_loops", lambda function: [])
        compile_package(Recipe(model=f"{LAYERED}:{model}", arch="none", output=str(tmp_path / name), **options))
        text = (tmp_path / name / "step.py").read_text()
        assert len(re.findall(r"^    for ", text, re.MULTILINE)) == (loops if name == "loops" else 0)
        forms.append(measured(tmp_path / name))
    (ours, peaks), (theirs, plain) = forms
    assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))
    for (live, predicted), (other, _) in zip(peaks[:3], plain, strict=False):
        assert live <= 1.06 * other and ("offload" in options or abs(predicted - live) <= 0.06 * live)
