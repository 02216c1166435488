"""Emitted steps: the text (golden), its format, and what it computes, against the interpreter.

`MGRAPH_ACCEPT=1 pytest tests/codegen/test_step.py` writes the golden file anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.codegen.step import step_text
from mgraph.errors import PassError
from mgraph.ir.graph import Module
from mgraph.ir.interpreter import run
from mgraph.ir.parser import parse_module
from tests.codegen.mlp import copied, module, state

GOLDEN = Path(__file__).parent / "golden" / "mlp_step.py.txt"


def load(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__file__": "step.py", "__name__": "step"}
    exec(compile(text, "step.py", "exec"), names)
    return names


def check_entry(of: Module, entry: str, inputs: dict[str, Tensor]) -> None:
    """Twice, so that what is updated in place is read again."""
    ours = state(of)
    theirs = copied(ours)
    function = load(step_text(of))[entry]
    for _ in range(2):
        made = function(ours, *inputs.values())
        outputs, updates = run(of, entry, inputs, theirs)
        theirs |= updates
        for value, expected in zip(made, outputs.values(), strict=True):
            torch.testing.assert_close(value, expected)
        for name, expected in theirs.items():
            torch.testing.assert_close(ours[name], expected, msg=name)


def test_golden() -> None:
    text = step_text(module())
    if os.environ.get("MGRAPH_ACCEPT") == "1":
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8"), (
        "if this is right: MGRAPH_ACCEPT=1 pytest tests/codegen/test_step.py"
    )


@pytest.mark.parametrize("scales", [(0.5,) * 4, (0.5, 1.0, 2.0, 0.25)])
def test_microbatch(scales: tuple[float, ...]) -> None:
    of = module(scales)
    assert "for i in reversed(range(4)):" in step_text(of)
    check_entry(of, "microbatch", {"tokens": torch.randint(11, (3, 5))})


def test_state_without_in_place_op_is_copied() -> None:
    check_entry(module(), "advance", {"by": torch.tensor(2)})


def test_saved_tensors_die_when_consumed() -> None:
    """What the forward saved is freed layer by layer: the backward ends with none of it."""
    names = load(step_text(module()))
    saved_sizes: list[int] = []
    backward = names["layer_bwd"]

    def spy(saved: list[Tensor], *rest: Any, **statics: Any) -> Any:
        saved_sizes.append(len(saved))
        result = backward(saved, *rest, **statics)
        assert saved == []
        return result

    names["layer_bwd"] = spy
    names["microbatch"](state(module()), torch.randint(11, (2, 3)))
    assert saved_sizes == [2] * 4


@pytest.mark.parametrize("scales", [(0.5,) * 4, (0.5, 1.0, 2.0, 0.25)])
def test_text_is_formatted(scales: tuple[float, ...], tmp_path: Path) -> None:
    file = tmp_path / "step.py"
    file.write_text(step_text(module(scales)), encoding="utf-8")
    for command in (["check", "--select", "E,F,W,I"], ["format", "--diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "120", str(file)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_text_is_deterministic() -> None:
    assert step_text(module()) == step_text(module())


def test_an_op_without_a_form_is_an_error() -> None:
    """What a pass has to replace, and did not."""
    text = """mgraph-ir 1
module "m"
dim R 0.. ragged <= 4 by bound

func @f(%x: f32[4, 2], %indices: i64[4, 1]) {
  %y: f32[R, 2] = expert_send(%x, %indices) {num_experts = 2, rows = "R"} forward at "a" "m.py":3 by capture
  return %y
}

entry f = @f -> (y)
"""
    with pytest.raises(PassError, match="no torch form of the op 'expert_send'"):
        step_text(parse_module(text))


OVERWRITE = """mgraph-ir 1
module "m"
dim B 1..

func @f(%x: f32[B, 4], %z: f32[B, 4]) {
  %a: f32[B, 4] = aten.exp.default(%x) forward at "" "m.py":1 by capture
  %v: f32[4, B] = aten.t.default(%a) forward at "" "m.py":2 by capture
  %b: f32[B, 4] = aten.mul.Tensor(%a, %z) forward at "" "m.py":3 by capture
  %c: f32[B, 4] = aten.sin.default(%b) forward at "" "m.py":4 by capture
  %d: f32[B, 4] = aten.add.Tensor(%x, %c) forward at "" "m.py":5 by capture
  %w: f32[4, B] = aten.cos.default(%v) forward at "" "m.py":6 by capture
  %e: f32[4, B] = aten.add.Tensor(%v, %w) forward at "" "m.py":7 by capture
  return %d, %e, %v
}

entry f = @f -> (d, e, v)
"""


def test_only_dead_tensors_of_its_own_are_overwritten() -> None:
    """`a` lives on in its view `v`, `x` and `z` belong to the caller; `b` and `c` may be overwritten."""
    of = parse_module(OVERWRITE)
    text = step_text(of)
    assert "b.sin_()" in text and "b.add_(x)" in text
    assert "a.mul_" not in text and "x.exp_" not in text
    x, z = torch.randn(3, 4), torch.randn(3, 4)
    before = x.clone(), z.clone()
    made = load(text)["f"]({}, x, z)
    expected, _ = run(of, "f", {"x": x, "z": z}, {})
    assert torch.equal(x, before[0]) and torch.equal(z, before[1])
    for ours, theirs in zip(made, expected.values(), strict=True):
        assert torch.equal(ours, theirs)


def test_operators_of_the_zoo_are_imported(tmp_path: Path) -> None:
    """Where no pass raised them: a process of its own has no model that registers them."""
    text = """mgraph-ir 1
module "m"

func @f(%rows: f32[4, 2], %ends: i32[2]) {
  %kept: f32[4, 2] = zoo.clear_tail.default(%rows, %ends) forward at "a" "m.py":3 by capture
  return %kept
}

entry f = @f -> (kept)
"""
    (tmp_path / "step.py").write_text(step_text(parse_module(text)), encoding="utf-8")
    code = "import step, torch; print(step.f({}, torch.ones(4, 2), torch.tensor([1, 3], dtype=torch.int32))[0].sum())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "6." in done.stdout, done.stderr
