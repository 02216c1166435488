"""Costs of ops as expressions over named dims."""

from __future__ import annotations

import pytest

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.dims import evaluate, symbol
from mgraph.ir.graph import Node
from mgraph.ir.opdef import op_def
from mgraph.ir.types import DType, TensorType

B, S = symbol("B"), symbol("S")


def _node(op: str, *types: TensorType, **attrs: object) -> Node:
    builder = FunctionBuilder("test", "test")
    builder.emit(op, [builder.param("x", t) for t in types], attrs)
    return builder.nodes[-1]


def test_traffic_counts_each_operand_and_result_once() -> None:
    node = _node("rms_norm", TensorType(DType.BF16, (B, S, 64)), TensorType(DType.F32, (64,)), eps=1e-5)
    cost = op_def("rms_norm").bytes
    assert cost is not None
    assert cost(node) == 2 * B * S * 64 * 2 + 64 * 4 + B * S * 4


def test_heads_that_do_not_turn_are_not_moved() -> None:
    x, table = TensorType(DType.BF16, (B, S, 8 * 16)), TensorType(DType.F32, (1, S, 16))
    cost = op_def("rope_joined").bytes
    assert cost is not None
    assert cost(_node("rope_joined", x, table, table, heads=6, width=16)) == 2 * B * S * 6 * 16 * 2 + 2 * S * 16 * 4


def test_causal_attention_is_half_of_full() -> None:
    q, kv = TensorType(DType.F32, (B, 4, S, 8)), TensorType(DType.F32, (B, 2, S, 8))
    cost = op_def("attention").flops
    assert cost is not None
    assert cost(_node("attention", q, kv, kv, scale=1.0)) == 2 * 2 * B * 4 * S * S * 8
    assert cost(_node("attention", q, kv, kv, scale=1.0, causal=True)) == 2 * B * 4 * S * S * 8


@pytest.mark.parametrize("op", ["attention", "attention_grad"])
@pytest.mark.parametrize(("length", "seen"), [(6, 3), (10, 5), (13, 5), (100, 5)])
def test_a_window_bounds_what_causal_attention_sees(op: str, length: int, seen: int) -> None:
    """Also where heads and widths are odd, and half of what is seen is no whole number."""
    q, kv, v = (TensorType(DType.F32, (B, 3, S, width)) for width in (7, 7, 4))
    lse = TensorType(DType.F32, (B, 3, S))
    operands = (q, kv, v) if op == "attention" else (v, q, kv, v, v, lse)
    cost = op_def(op).flops
    assert cost is not None
    found = evaluate(cost(_node(op, *operands, scale=1.0, causal=True, window=5)), {"B": 1, "S": length})
    products = 2 if op == "attention" else 5
    assert found == products * 3 * length * min(length, 10) * 11 // 2
    assert abs(found - products * 3 * length * seen * 11) <= products * 3 * length * 11 // 2


def test_grouped_products_do_not_depend_on_the_split() -> None:
    rows, w = TensorType(DType.F32, (B, 6)), TensorType(DType.F32, (3, 6, 5))
    offsets, grad = TensorType(DType.I32, (3,)), TensorType(DType.F32, (B, 5))
    for op, operands in (("grouped_matmul", (rows, w, offsets)), ("grouped_outer", (rows, grad, offsets))):
        cost = op_def(op).flops
        assert cost is not None
        assert cost(_node(op, *operands)) == 2 * B * 6 * 5
