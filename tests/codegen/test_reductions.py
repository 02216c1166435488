"""Reductions in place never change what is read again: emitted steps, where a sum over ranks is the double."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mgraph.codegen.step import step_text
from mgraph.ir.parser import parse_module
from mgraph.runtime import v1

BY = 'forward at "" "model.py":1 by test'
PART = "f32[6]{dp=P(sum)}"
HEAD = f"""\
mgraph-ir 1
module "m"
axis dp = 2
state @grad: {PART} = grad transient init [["zeros_"]]

func @inner(%x: {PART}) {{
  %y: f32[6] = all_reduce(%x) {{axis = "dp"}} {BY}
  return %y
}}

"""
REDUCED = f'%y: f32[6] = all_reduce(%u) {{axis = "dp"}} {BY}'
STARTED = f'%p: pending<f32[6]> = all_reduce_start(%u) {{axis = "dp"}} {BY}'
MADE = f"%u: {PART} = aten.cos.default(%x) {BY}"
BODIES = {
    "not read again": ([MADE, REDUCED], 0),
    "read again": ([MADE, REDUCED, f"%z: {PART} = aten.sin.default(%u) {BY}"], 1),
    "read while under way": (
        [MADE, STARTED, f"%z: {PART} = aten.sin.default(%u) {BY}", f"%y: f32[6] = wait(%p) {BY}"],
        1,
    ),
    "read by a view made before": (
        [
            MADE,
            f"%v: f32[2, 3]{{dp=P(sum)}} = reshape(%u) {{shape = [2, 3]}} {BY}",
            REDUCED,
            f"%z: f32[2, 3]{{dp=P(sum)}} = aten.sin.default(%v) {BY}",
        ],
        1,
    ),
    "returned": ([f"%z: {PART} = aten.cos.default(%x) {BY}", REDUCED.replace("%u", "%z")], 1),
    "of the caller": ([REDUCED.replace("%u", "%x"), f"%z: {PART} = aten.sin.default(%x) {BY}"], 1),
    "param of a callee": ([MADE, f"%y = call @inner(%u) {BY}", f"%z: {PART} = aten.sin.default(%u) {BY}"], 1),
    "state that is read again": (
        [REDUCED.replace("%u", "@grad"), f"%z: {PART} = aten.sin.default(@grad) {BY}"],
        1,
    ),
    "state that is reset": ([REDUCED.replace("%u", "@grad"), f"%z: {PART} = zero_(@grad) {BY}"], 0),
}


def emitted(lines: Sequence[str]) -> str:
    """A step that returns y, and z where there is one."""
    results = ["y", *(["z"] if any(line.startswith("%z") for line in lines) else [])]
    body = "\n  ".join([*lines, f"return {', '.join('%' + r for r in results)}"])
    text = f"{HEAD}func @main(%x: {PART}) {{\n  {body}\n}}\n\nentry main = @main -> ({', '.join(results)})\n"
    return step_text(parse_module(text))


@pytest.mark.parametrize("case", BODIES)
def test_what_is_read_again_is_as_it_was(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, copies = BODIES[case]
    text = emitted(lines)
    assert text.count(".clone()") == copies, text

    def doubled(tensors: list[Any], axis: str) -> list[Any]:
        return [tensor.mul_(2) for tensor in tensors]

    monkeypatch.setattr(v1, "all_reduce", doubled)
    monkeypatch.setattr(v1, "all_reduce_start", doubled)
    monkeypatch.setattr(v1, "wait", lambda tensors: tensors)
    scope: dict[str, Any] = {}
    exec(text, scope)
    x, grad = torch.randn(6), torch.randn(6)
    found = scope["main"]({"grad": grad.clone()}, x.clone())
    of_state, of_caller = "state" in case, case == "of the caller"
    reduced = grad if of_state else x if of_caller else x.cos()
    if case != "state that is reset":  # the total is then in the accumulator, which is zeroed when it has been read
        torch.testing.assert_close(found[0], 2 * reduced)
    if len(found) > 1 and case != "state that is reset":
        expected = reduced if case == "returned" else reduced.sin()
        torch.testing.assert_close(found[1].flatten(), expected)
