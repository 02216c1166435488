"""The order of the rows of experts: kernels in Triton's interpreter against one pair after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgraph.codegen.triton import moe_order
from mgraph.codegen.triton.moe_order import Order, Tuning
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, interpret
from tests.passes.raising import module_of

TWICE = torch.tensor([[2, 2], [0, 2], [1, 0], [2, 1], [3, 3]])
WRONG = torch.tensor([[2, -7], [0, 90000], [1, 2**33], [2, 3], [4, 3]])
MANY = torch.randint(91, (75, 4), generator=torch.Generator().manual_seed(0))

CASES: dict[str, tuple[Order, Tensor, Tuning | None]] = {
    "twice": (Order(5, 2), TWICE, Tuning(2, 1, 1)),
    "others_2": (Order(2, 2, others=True), TWICE.clamp(max=2), Tuning(2, 1, 1)),
    "others_3": (Order(3, 2, others=True), TWICE, Tuning(2, 1, 1)),
    "wrong": (Order(3, 2, others=True), WRONG, Tuning(2, 1, 1)),
    "many": (Order(91, 4), MANY, None),
    "many_others": (Order(90, 4, others=True), MANY, Tuning(32, 1, 1)),
    "one": (Order(1, 1), torch.zeros(3, 1, dtype=torch.int64), None),
}
"""Instance, choices, tuning. The interpreter has three multiprocessors, so some programs have several tiles."""


def placed(problem: Order, indices: Tensor) -> tuple[list[int], list[int]]:
    """Order and offsets; a number of no expert is that of those that come last."""
    flat = [choice if 0 <= choice < problem.experts else problem.experts for choice in indices.flatten().tolist()]
    order = [pair for e in range(problem.experts + 1) for pair, chose in enumerate(flat) if chose == e]
    return order, [sum(chose <= e for chose in flat) for e in range(problem.experts)]


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter cannot run with this NumPy")
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    specs = [moe_order.order(name, problem, cut) for name, (problem, _, cut) in CASES.items()]
    found = interpret(specs, [(name, (indices,)) for name, (_, indices, _) in CASES.items()], tmp_path)
    for (name, (problem, indices, _)), ((order, offsets), (after,)) in zip(CASES.items(), found, strict=True):
        assert order.dtype is torch.int64 and offsets.dtype is torch.int32 and torch.equal(after, indices), name
        assert (order.tolist(), offsets.tolist()) == placed(problem, indices), name


NODE = """
func @f(%indices: i64[S, 2]) {
  %order: i64[2*S], %offsets: i32[48] = moe_order(%indices) {num_experts = 48}
  return %order, %offsets
}
"""


@pytest.mark.parametrize(
    ("experts", "wanted"), [("48", Order(48, 2)), ("2048", "there are 2048 experts; the kernel takes a known number")]
)
def test_problem_of_a_node(experts: str, wanted: Order | str) -> None:
    node = module_of(NODE.replace("48", experts)).functions["f"].nodes[0]
    found = moe_order.order_problem_of(node)
    assert found == wanted or (isinstance(wanted, str) and str(found).startswith(wanted))
