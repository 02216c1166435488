"""Every written form of a torch op means what the op means: its text is evaluated and compared bitwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mgraph.codegen.dim_text import DimScope
from mgraph.codegen.kernel_sites import KernelSites
from mgraph.codegen.torch_forms import _FORMS, OVERWRITING
from mgraph.codegen.torch_provider import Site, overwritable, write
from mgraph.ir.graph import Node, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.torch_bridge import from_torch_dtype
from mgraph.ir.types import DType, TensorType

UNARY = """
    abs ceil clone contiguous cos detach exp floor isfinite isnan round sigmoid sin square squeeze sum mean tanh relu
    silu ones_like zeros_like tril triu diagonal gelu softplus prod argsort sort
"""

EXAMPLES: list[tuple[str, str, dict[str, Any]]] = [
    *((f"aten.{op}.Tensor", "x y", {}) for op in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")),
    *((f"aten.{op}.Scalar", "x", {"other": -1.5}) for op in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le")),
    *((f"aten.{op}.Scalar", "x", {"other": 2}) for op in ("gt", "ge", "remainder", "rsub")),
    ("aten.add.Tensor", "x y", {"alpha": 3}),
    ("aten.floor_divide.default", "x y", {}),
    ("aten.pow.Tensor_Tensor", "p y", {}),
    ("aten.pow.Tensor_Scalar", "x", {"exponent": 3}),
    ("aten.mm.default", "s s", {}),
    ("aten.bmm.default", "b c", {}),
    ("aten.matmul.default", "b c", {}),
    *((f"aten.{op}.Tensor", "m m", {}) for op in ("bitwise_and", "bitwise_or", "__and__", "__or__")),
    ("aten.neg.default", "x", {}),
    *((f"aten.{op}.default", "m", {}) for op in ("bitwise_not", "logical_not")),
    ("aten.logical_and.default", "m m", {}),
    *((f"aten.{op}.default", "x", {}) for op in UNARY.split()),
    *((f"aten.{op}.default", "p", {}) for op in ("log", "sqrt", "rsqrt", "reciprocal")),
    ("aten.amax.default", "x", {"dim": (-1,), "keepdim": True}),
    ("aten.amin.default", "x", {"dim": (0,)}),
    ("aten.argmax.default", "x", {"dim": 1, "keepdim": True}),
    ("aten.chunk.default", "x", {"chunks": 2, "dim": 1}),
    ("aten.clamp.default", "x", {"min": -0.5}),
    ("aten.clamp.default", "x", {"max": 0.5}),
    ("aten.clamp.default", "x", {"min": -0.5, "max": 0.5}),
    ("aten.clamp_min.default", "x", {"min": 0.1}),
    ("aten.cumsum.default", "x", {"dim": 1}),
    ("aten.flatten.using_ints", "b", {"start_dim": 1}),
    ("aten.flip.default", "x", {"dims": (0,)}),
    ("aten.gather.default", "x i", {"dim": 1}),
    ("aten.index_select.default", "x v", {"dim": 0}),
    ("aten.logsumexp.default", "x", {"dim": (-1,)}),
    ("aten.masked_fill.Scalar", "x m", {"value": float("-inf")}),
    ("aten.masked_fill.Tensor", "x m n", {}),
    ("aten.max.dim", "x", {"dim": 1}),
    ("aten.min.dim", "x", {"dim": 1, "keepdim": True}),
    ("aten.mean.dim", "x", {"dim": (-1,), "keepdim": True}),
    ("aten.narrow.default", "x", {"dim": 1, "start": 1, "length": 2}),
    ("aten.repeat_interleave.self_int", "x", {"repeats": 2, "dim": 0}),
    ("aten.scatter.src", "x i y", {"dim": 1}),
    ("aten.scatter.value", "x i", {"dim": 1, "value": 2.0}),
    ("aten.scatter_add.default", "x i y", {"dim": 1}),
    ("aten.softmax.int", "x", {"dim": -1, "dtype": DType.F64}),
    ("aten.log_softmax.int", "x", {"dim": -1}),
    ("aten.split.Tensor", "x", {"split_size": 2, "dim": 1}),
    ("aten.split_with_sizes.default", "x", {"split_sizes": (1, 3), "dim": 1}),
    ("aten.squeeze.dim", "u", {"dim": 0}),
    ("aten.squeeze.dims", "u", {"dim": (0,)}),
    ("aten.std.correction", "x", {"dim": (1,), "correction": 1, "keepdim": True}),
    ("aten.var.correction", "x", {"dim": (1,), "correction": 0}),
    ("aten.sum.dim_IntList", "x", {"dim": (0,), "keepdim": True}),
    ("aten.t.default", "x", {}),
    ("aten.topk.default", "x", {"k": 2}),
    ("aten.transpose.int", "b", {"dim0": 1, "dim1": 2}),
    ("aten.unbind.int", "x", {}),
    ("aten.unflatten.int", "x", {"dim": 1, "sizes": (2, 2)}),
    ("aten.unsqueeze.default", "x", {"dim": -1}),
    ("aten.expand.default", "u", {"size": (3, 3, 4)}),
    ("aten.permute.default", "b", {"dims": (2, 0, 1)}),
    ("aten.repeat.default", "x", {"repeats": (2, 1)}),
    ("aten.view.default", "x", {"size": (2, 6)}),
    ("aten.view.default", "n", {"size": ()}),
    ("aten.reshape.default", "x", {"shape": (12,)}),
    ("aten.addmm.default", "s s s", {}),
    ("aten.baddbmm.default", "d b c", {}),
    ("aten.arange.default", "", {"end": 5}),
    ("aten.arange.start", "", {"start": 1, "end": 5, "dtype": DType.F32}),
    ("aten.arange.start_step", "", {"start": 1, "end": 9, "step": 2}),
    ("aten.cat.default", "x y", {"dim": -1, "args": ("tensors.0", "tensors.1")}),
    ("aten.stack.default", "x y", {"args": ("tensors.0", "tensors.1")}),
    ("aten.dropout.default", "x", {"p": 0.5, "train": False}),
    ("aten.einsum.default", "b c", {"equation": "abc,acd->abd", "args": ("tensors.0", "tensors.1")}),
    ("aten.full.default", "", {"size": (2, 3), "fill_value": 1.5, "dtype": DType.F64}),
    ("aten.full_like.default", "x", {"fill_value": 2}),
    ("aten.linear.default", "x y", {}),
    ("aten.maximum.default", "x y", {}),
    ("aten.minimum.default", "x y", {}),
    ("aten.ones.default", "", {"size": (), "dtype": DType.F32}),
    ("aten.zeros.default", "", {"size": (2, 3)}),
    ("aten.outer.default", "r r", {}),
    ("aten.scalar_tensor.default", "", {"s": 2.5}),
    ("aten.scaled_dot_product_attention.default", "q q q", {"is_causal": True, "scale": 0.5}),
    ("aten.searchsorted.Tensor", "w r", {"right": True}),
    ("aten.where.self", "m x y", {}),
    ("aten.slice.Tensor", "x", {"dim": 1, "start": 1, "end": 2**63 - 1}),
    ("aten.slice.Tensor", "b", {"dim": 2, "start": 0, "end": -1}),
    ("aten.slice.Tensor", "b", {"dim": 1, "start": 0, "end": 3, "step": 2}),
    ("aten.select.int", "b", {"dim": 1, "index": -1}),
    ("aten.index.Tensor", "x v", {"args": ("self", "indices.0")}),
    ("aten.index.Tensor", "x v", {"args": ("self", "indices.1")}),
    ("aten.index.Tensor", "x v v", {"args": ("self", "indices.0", "indices.1")}),
    ("aten.embedding.default", "x i", {"padding_idx": 0}),
    ("aten.to.dtype", "x", {"dtype": DType.BF16}),
    ("aten.layer_norm.default", "x r r", {"normalized_shape": (4,)}),
    ("aten.silu_backward.default", "x y", {}),
]
UNTESTED = {"aten.bernoulli.p", "aten.empty.memory_format", "aten.fill_.Scalar"}
"""Random, undefined, or in place."""


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    return {
        "x": x, "y": torch.randn(3, 4), "p": x.abs() + 0.1, "r": torch.randn(4), "i": torch.randint(3, (3, 4)),
        "m": x > 0, "s": torch.randn(4, 4), "b": torch.randn(2, 3, 4), "c": torch.randn(2, 4, 3),
        "d": torch.randn(2, 3, 3), "v": torch.tensor([2, 0, 1]), "n": torch.tensor(3.0), "u": torch.randn(1, 3, 4),
        "q": torch.randn(2, 2, 3, 4), "w": torch.tensor([-1.0, 0.0, 1.0]),
    }  # fmt: skip


def site(op: str, names: Sequence[str], attrs: dict[str, Any], overwrite: int | None = None) -> Site:
    values = tensors()
    operands = tuple(Value(n, TensorType(from_torch_dtype(values[n].dtype), tuple(values[n].shape))) for n in names)
    types = op_def(op).result_types([v.tensor for v in operands], attrs)
    results = tuple(Value(f"result{i}", t) for i, t in enumerate(types))
    node = Node(op, operands, results, attrs)
    return Site(node, names, DimScope(operands), KernelSites(), lambda: '"cpu"', lambda vs, _: "", overwrite)


def evaluate(text: str, values: dict[str, Tensor]) -> list[Tensor]:
    made = eval(text, {"torch": torch, "F": F}, values)
    return list(made) if isinstance(made, tuple | list) else [made]


@pytest.mark.parametrize(("op", "names", "attrs"), EXAMPLES, ids=lambda v: v if isinstance(v, str) else "")
def test_form(op: str, names: str, attrs: dict[str, Any]) -> None:
    values = tensors()
    expected = op_def(op).body(*(values[n] for n in names.split()), **attrs)
    made = evaluate(write(site(op, names.split(), attrs)).text, tensors())
    for ours, theirs in zip(made, expected if isinstance(expected, tuple | list) else [expected], strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize(("op", "names", "attrs"), [e for e in EXAMPLES if e[0] in OVERWRITING])
def test_overwriting_form(op: str, names: str, attrs: dict[str, Any]) -> None:
    """The same result, in the memory of the operand it says."""
    listed = names.split()
    for position in overwritable(site(op, listed, attrs).node):
        values, distinct = tensors(), tensors()
        expected = op_def(op).body(*(values[n] for n in listed), **attrs)
        written = write(site(op, listed, attrs, position))
        (made,) = evaluate(written.text, distinct)
        assert written.results == {0: position}
        assert made is distinct[listed[position]]
        assert torch.equal(made.nan_to_num(), expected.nan_to_num())


def test_every_form_has_an_example() -> None:
    assert set(_FORMS) - {op for op, _, _ in EXAMPLES} == UNTESTED
    assert set(OVERWRITING) <= {op for op, _, _ in EXAMPLES}
