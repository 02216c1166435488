"""Sums over ranks to come and shares of them: the identity on one rank, and its own gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mgraph.ir.graph import Axis
from mgraph.ir.interpreter import run_ranks
from mgraph.ir.types import Partial
from mgraph.runtime import v1
from tests.passes.build import f32, module_of, started


@pytest.mark.parametrize("op", ["joint_sum", "axis_share"])
def test_on_one_rank_nothing_happens(check_op: Any, op: str) -> None:
    check_op(op, (torch.randn(3, requires_grad=True),), {"axis": "dp"}, lambda x: x.clone())


def test_shares_add_up() -> None:
    """On the ranks of a mesh, and in a step of one process, where every axis has one rank."""
    builder = started()
    x = builder.param("x", f32(3))
    share = builder.one("axis_share", x, axis="dp")
    (part,) = builder.emit("axis_share", (x,), {"axis": "dp"}, types=[share.tensor.place("dp", Partial("sum"))])
    module = replace(module_of(builder.build([builder.one("all_reduce", part, axis="dp")])), mesh=(Axis("dp", 4),))
    given = torch.tensor([1.0, -2.0, 3.0])
    outputs, _ = run_ranks(module, "forward", [{"x": given}] * 4, [{}] * 4, {"dp": 4})
    assert all(torch.equal(out["out0"], given) for out in outputs)
    alone = v1.axis_share(given, "dp")
    assert torch.equal(alone, given) and alone is not given
