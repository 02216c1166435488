"""Every way to split an op: on parts it gives the parts of what it gives on whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Axis, Entry, Function, Module, Node, Origin, Value
from mgraph.ir.interpreter import run_ranks
from mgraph.ir.local import part
from mgraph.ir.signature import ShardingRule
from mgraph.ir.types import DType, Partial, Shard, TensorType
from mgraph.passes.placing import rules_of
from tests.passes.spread import whole

CASES: list[tuple[str, list[tuple[int, ...]], dict[str, Any], int]] = [
    ("aten.linear.default", [(2, 4, 6), (8, 6)], {}, 4),
    ("aten.linear.default", [(4, 6), (8, 6), (8,)], {}, 3),
    ("aten.mm.default", [(4, 6), (6, 8)], {}, 3),
    ("aten.bmm.default", [(2, 4, 6), (2, 6, 8)], {}, 4),
    ("aten.matmul.default", [(2, 4, 6), (6, 8)], {}, 4),
    ("aten.matmul.default", [(2, 2, 4, 6), (2, 2, 6, 8)], {}, 5),
    ("aten.t.default", [(4, 6)], {}, 2),
    ("aten.add.Tensor", [(4, 6), (6,)], {}, 3),
    ("aten.mul.Tensor", [(4, 1, 6), (2, 6)], {}, 3),
    ("aten.permute.default", [(2, 4, 6)], {"dims": (2, 0, -2)}, 3),
    ("aten.transpose.int", [(2, 4, 6)], {"dim0": 0, "dim1": -1}, 3),
    ("aten.expand.default", [(4, 1)], {"size": (2, 4, 6)}, 1),
    ("aten.slice.Tensor", [(4, 6)], {"dim": 1, "start": 1, "end": 3}, 1),
    ("aten.slice.Tensor", [(4, 8)], {"dim": 1, "start": 1, "step": 2}, 2),
    (
        "aten.slice_backward.default",
        [(4, 4)],
        {"input_sizes": (4, 8), "dim": 1, "start": 1, "end": 8, "step": 2},
        2,
    ),
    ("aten.cat.default", [(4, 6), (4, 2)], {"dim": -1, "args": ("tensors.0", "tensors.1")}, 1),
    ("aten.sum.dim_IntList", [(4, 6)], {"dim": (0,)}, 2),
    ("aten.sum.dim_IntList", [(4, 6)], {"dim": (-1,), "keepdim": True}, 2),
    ("aten.sum.default", [(4, 6)], {}, 2),
    ("reshape", [(2, 8, 6)], {"shape": (2, 4, 2, 6)}, 3),
    ("reshape", [(2, 4, 3, 2)], {"shape": (8, 1, 6)}, 1),
    ("cast", [(4, 6)], {"dtype": DType.F64}, 2),
    ("rope", [(2, 4, 6, 8), (6, 8), (6, 8)], {"style": "half"}, 3),
    ("glu", [(4, 6), (4, 6)], {"act": "silu"}, 2),
    ("rms_norm", [(4, 6, 5), (5,)], {"eps": 1e-6, "offset": 0.0, "round": "product"}, 2),
    ("rms_norm_grad", [(4, 6, 5), (4, 6, 5), (5,), (4, 6, 1)], {"eps": 1e-6, "offset": 0.0, "round": "product"}, 2),
    ("attention", [(2, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 6), (4,)], {"scale": 0.3, "extra": ("sinks",)}, 1),
    ("aten.full.default", [], {"size": (4, 6), "fill_value": 2.0, "dtype": DType.F64}, 2),
    ("aten.cumsum.default", [(4, 6)], {"dim": 0}, 0),
]


@pytest.mark.parametrize(("op", "shapes", "attrs", "count"), CASES)
def test_parts_give_parts(op: str, shapes: list[tuple[int, ...]], attrs: Mapping[str, Any], count: int) -> None:
    node = _node(op, shapes, attrs)
    rules = rules_of(node, 2)
    # As many ways as the op has, of those whose extents two ranks divide.
    assert len(rules) == count, [r.name for r in rules]
    for rule in rules:
        _check(node, rule)


def test_what_the_axis_does_not_divide_is_no_way() -> None:
    node = _node("aten.mm.default", [(4, 6), (6, 9)], {})
    assert [r.name for r in rules_of(node, 3)] == ["k", "n"]
    assert [r.name for r in rules_of(node, 4)] == ["m"]


def _node(op: str, shapes: list[tuple[int, ...]], attrs: Mapping[str, Any]) -> Node:
    builder = FunctionBuilder("f", "test")
    builder.origin = Origin("f", "f.py", 1)
    builder.emit(op, [builder.param(f"x{i}", TensorType(DType.F64, s)) for i, s in enumerate(shapes)], attrs)
    return builder.nodes[0]


def _check(node: Node, rule: ShardingRule) -> None:
    """The node alone on two ranks: results put together, or summed, are those of one rank."""
    tensors = [torch.randn([int(d) for d in v.tensor.shape], dtype=torch.float64) for v in node.operands]
    biased = node.op == "aten.linear.default" and len(tensors) == 3 and rule.results == (Partial(),)
    tensors = [*tensors[:2], torch.zeros_like(tensors[2])] if biased else tensors  # it is added after the sum
    operands, results = (
        [v if p is None else Value(v.name, v.tensor.place("tp", p)) for v, p in zip(vs, ps, strict=True)]
        for vs, ps in ((node.operands, rule.operands), (node.results, rule.results))
    )
    outputs = tuple(f"out{i}" for i in range(len(results)))

    def ranks(operands: Any, results: Any, size: int) -> list[dict[str, Any]]:
        # Params are whole in types: an axis that splits inputs would bind dims.
        params = tuple(Value(v.name, TensorType(v.tensor.dtype, v.tensor.shape)) for v in operands)
        function = Function("f", params, (), (node.with_values(params, tuple(results)),), tuple(results))
        module = Module("m", mesh=(Axis("tp", 2),), functions={"f": function}, entries={"f": Entry("f", "f", outputs)})
        inputs = [
            {v.name: _part(v.tensor, t, size, r) for v, t in zip(operands, tensors, strict=True)} for r in range(size)
        ]
        return run_ranks(module, "f", inputs, [{}] * size, {"tp": size})[0]

    (expected,) = ranks(node.operands, node.results, 1)
    found = ranks(operands, results, 2)
    for name, value in zip(outputs, results, strict=True):
        parts = [rank[name] for rank in found]
        place = value.tensor.on("tp")
        total = sum(parts) if isinstance(place, Partial) else whole(parts, value.tensor, "tp")
        assert isinstance(place, Partial | Shard) or place is None
        torch.testing.assert_close(total, expected[name], rtol=1e-12, atol=1e-12)


def _part(type_: TensorType, tensor: Any, size: int, rank: int) -> Any:
    """What a rank holds; of a partial sum an uneven share."""
    share = (0.25, 0.75)[rank] if isinstance(type_.on("tp"), Partial) else 1.0
    return part(tensor, type_, {"tp": size}, {"tp": rank}) * share
