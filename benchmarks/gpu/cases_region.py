"""Cases of regions: capped logits and their gradient, sums of three, rows normalised as models write it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import region
from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.dims import NamedDim, symbol
from mgraph.ir.graph import Module, Value
from mgraph.ir.types import DType, TensorType
from mgraph.passes.base import Report
from mgraph.passes.fuse_regions import FuseRegions
from mgraph.runtime.kernels import DTYPES

Body = Callable[[FunctionBuilder, list[Value]], Value]
Make = Callable[..., Tensor]
CAP = 30.0


def problem_of(dtype: str, shapes: list[tuple[int, ...]], body: Body) -> region.Region:
    """The region that the pass makes of a body over operands [T, ...shape], or [...shape] of weights."""
    builder = FunctionBuilder("f", "capture")
    tokens = symbol("T")
    types = [TensorType(DType.parse(dtype), (tokens, *shape[1:]) if shape[0] else shape[1:]) for shape in shapes]
    result = body(builder, [builder.param(f"x{i}", type_) for i, type_ in enumerate(types)])
    module = Module("case", dims={"T": NamedDim("T")}, functions={"f": builder.build([result])})
    (node,) = FuseRegions().run(module, Report()).functions["f"].nodes
    problem = region.problem_of(node)
    assert isinstance(problem, region.Region), problem
    return problem


def case(name: str, dtype: str, tokens: int, shapes: list[tuple[int, ...]], body: Body, make: Make) -> Case:
    """A case; the first extent of a shape says whether it has one row for each token."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        whole = [(tokens, *shape[1:]) if shape[0] else shape[1:] for shape in shapes]
        return tuple(torch.randn(shape, device=device).to(DTYPES[dtype]) for shape in whole)

    item = DTYPES[dtype].itemsize
    elements = [(tokens if shape[0] else 1) * shape[1] for shape in shapes]
    return Case(
        id=name,
        workload=f"{name.removeprefix('region-')}: {tokens} x {shapes[0][1]} {dtype}",
        spec=region.forward(name.replace("-", "_"), problem_of(dtype, shapes, body)),
        inputs=inputs,
        reference=lambda *given: (make(*given),),
        peers={"eager": make, "compile": make},
        bytes=item * (sum(elements) + tokens * shapes[0][1]),
        bound=1e-6 if dtype == "f32" else 6e-3,
    )


def _capped(b: FunctionBuilder, x: list[Value]) -> Value:
    bent = b.one("aten.tanh.default", b.one("aten.div.Tensor", x[0], other=CAP))
    return b.one("aten.mul.Tensor", bent, other=CAP)


def _capped_gradient(b: FunctionBuilder, x: list[Value]) -> Value:
    bent = b.one("aten.tanh_backward.default", b.one("aten.mul.Scalar", x[0], other=CAP), x[1])
    return b.one("aten.div.Scalar", bent, other=CAP)


def _three(b: FunctionBuilder, x: list[Value]) -> Value:
    return b.one("aten.add.Tensor", b.one("aten.add.Tensor", x[0], x[1]), x[2])


def _softmax(b: FunctionBuilder, x: list[Value]) -> Value:
    return b.one("aten.softmax.int", b.one("aten.mul.Scalar", x[0], other=0.125), dim=-1)


def _layer_norm(b: FunctionBuilder, x: list[Value]) -> Value:
    wide = b.one("cast", x[0], dtype=DType.F32)
    low = b.one("aten.sub.Tensor", wide, b.one("aten.mean.dim", wide, dim=(-1,), keepdim=True))
    spread = b.one("aten.mean.dim", b.one("aten.square.default", low), dim=(-1,), keepdim=True)
    rstd = b.one("aten.rsqrt.default", b.one("aten.add.Scalar", spread, other=1e-5))
    normed = b.one("cast", b.one("aten.mul.Tensor", low, rstd), dtype=x[0].tensor.dtype)
    return b.one("aten.add.Tensor", b.one("aten.mul.Tensor", normed, x[1]), x[2])


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As models write it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    low = x.to(wide) - x.to(wide).mean(-1, keepdim=True)
    rstd = torch.rsqrt(low.square().mean(-1, keepdim=True) + 1e-5)
    return (low * rstd).to(x.dtype) * weight + bias


CASES = [
    case("region-cap", "bf16", 8192, [(1, 32768)], _capped, lambda x: torch.tanh(x / CAP) * CAP),
    case(
        "region-cap-grad",
        "bf16",
        8192,
        [(1, 32768), (1, 32768)],
        _capped_gradient,
        lambda dy, y: (dy * CAP) * (1 - y * y) / CAP,
    ),
    case("region-three", "bf16", 16384, [(1, 4096)] * 3, _three, lambda x, y, z: x + y + z),
    case("region-softmax", "f32", 8192, [(1, 8192)], _softmax, lambda x: torch.softmax(x * 0.125, -1)),
    case("region-softmax-narrow", "f32", 131072, [(1, 128)], _softmax, lambda x: torch.softmax(x * 0.125, -1)),
    case("region-layer-norm", "bf16", 16384, [(1, 4096), (0, 4096), (0, 4096)], _layer_norm, layer_norm),
]
