"""Small functions as text, raised by one pass, and run before and after."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mgraph.ir.dims import evaluate
from mgraph.ir.graph import Function, Module
from mgraph.ir.interpreter import run
from mgraph.ir.parser import parse_module
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.verifier import verify
from mgraph.passes.base import Pass, Report

DIMS = {"B": 3, "S": 5}


def module_of(text: str, ragged: str = "") -> Module:
    """A module of functions whose lines lack origins; the first is the entry. Lines get numbers from 1. `ragged`
    declares one more dim."""
    lines = ["mgraph-ir 1", 'module "test"', "dim B 1..", "dim S 2..", *([f"dim {ragged}"] if ragged else []), ""]
    number = 0
    for line in text.strip().splitlines():
        if " = " in line and not line.startswith(("func", "state")):
            number += 1
            line = f'{line} forward at "layers.*.part" "model.py":{number} by capture'
        lines.append(line)
    name = re.search(r"func @(\w+)", text)
    returned = re.search(r"return (.*)", text)
    assert name is not None
    assert returned is not None
    outputs = [f"out{i}" for i in range(returned.group(1).count("%"))]
    lines += ["", f"entry forward = @{name.group(1)} -> ({', '.join(outputs)})", ""]
    module = parse_module("\n".join(lines))
    verify(module)
    return module


def raised(pass_: Pass, text: str) -> tuple[Module, Module, Report]:
    """The module of a text, what the pass makes of it, and the report."""
    before, report = module_of(text), Report()
    after = pass_.run(before, report)
    verify(after)
    return before, after, report


def ops(function: Function) -> Counter[str]:
    """How many nodes of each op."""
    return Counter(node.op for node in function.nodes)


def inputs_of(module: Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Random inputs of the entry; `given` where the numbers matter."""
    made = {}
    for value in module.entry_function("forward").params:
        shape = [int(evaluate(d, DIMS)) for d in value.tensor.shape]
        made[value.name] = given[value.name] if value.name in given else torch.randn(shape)
        if value.tensor.dtype.is_float:
            made[value.name] = made[value.name].to(to_torch_dtype(value.tensor.dtype))
    return made


def assert_same(before: Module, after: Module, **given: Tensor) -> None:
    """Equal to 1e-12 in float64; in its own dtypes the raised one errs at most 1.5 times as much."""
    inputs = inputs_of(before, given)
    runs: dict[tuple[str, bool], Any] = {}
    for name, module in (("before", before), ("after", after)):
        for lifted in (False, True):
            runs[name, lifted] = run(module, "forward", inputs, {}, lifted=lifted)[0]
    for output, exact in runs["before", True].items():
        torch.testing.assert_close(runs["after", True][output], exact, rtol=1e-12, atol=1e-12)
        native = runs["before", False][output], runs["after", False][output]
        assert native[0].dtype == native[1].dtype
        if native[0].is_floating_point():
            errors = [float((t.double() - exact).abs().max()) for t in native]
            assert errors[1] <= 1.5 * errors[0] + 1e-6 * float(exact.abs().max())


def near_misses(pass_: Pass, text: str) -> list[str]:
    """The details of the near misses, with the place taken off its front."""
    before, after, report = raised(pass_, text)
    assert after is before, "the pass applied"
    return [re.sub(r" at layers\.\*\.part \(model\.py:\d+\)", "", miss.detail) for miss in report.near_misses]
