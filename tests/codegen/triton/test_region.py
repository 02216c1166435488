"""Regions: bodies written by hand and drawn at random, in Triton's interpreter against the lifted (float64) graph."""

from __future__ import annotations

import random
import re
import types
from pathlib import Path

import pytest
import torch

from mgraph.codegen.triton import KernelSpec, reference_text, region
from mgraph.codegen.triton.region_forms import FORMS, OF_ROWS
from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.dims import NamedDim, evaluate, symbol
from mgraph.ir.graph import Entry, Module, Node, Value
from mgraph.ir.interpreter import run
from mgraph.ir.ops.region import STEPS
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.types import DType, TensorType
from mgraph.passes.base import Report
from mgraph.passes.fuse_regions import FuseRegions
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.codegen.triton.ptx_of import ptx_of
from tests.passes.raising import module_of

B, S, H = symbol("B"), symbol("S"), symbol("H")
ALL = FuseRegions(tensors=99, values=99, held=2**30, rows=0, saved=0)
"""The pass without limits."""

CAPPED = """
func @f(%x: bf16[B, S, 200]) {
  %a: bf16[B, S, 200] = aten.div.Tensor(%x) {other = 4.0}
  %b: bf16[B, S, 200] = aten.tanh.default(%a)
  %c: bf16[B, S, 200] = aten.mul.Tensor(%b) {other = 4.0}
  return %c, %b
}
"""
OPERANDS = """
func @f(%x: f32[B, S, 48], %w: f32[48], %m: f32[B, S, 1], %c: f32[], %p: f32[S, 48], %q: f32[B, 1, 1]) {
  %a: f32[B, S, 48] = aten.mul.Tensor(%x, %w)
  %b: f32[B, S, 48] = aten.add.Tensor(%a, %m) {alpha = 0.5}
  %d: f32[B, S, 48] = aten.mul.Tensor(%b, %c)
  %e: f32[B, S, 48] = aten.sub.Tensor(%d, %p)
  %g: f32[B, S, 48] = aten.div.Tensor(%e, %q)
  return %g
}
"""
LAYER_NORM = """
func @f(%x: f16[B, S, 129], %w: f16[129], %b: f16[129]) {
  %y: f32[B, S, 129] = cast(%x) {dtype = f32}
  %m: f32[B, S, 1] = aten.mean.dim(%y) {dim = [-1], keepdim = true}
  %d: f32[B, S, 129] = aten.sub.Tensor(%y, %m)
  %q: f32[B, S, 129] = aten.square.default(%d)
  %v: f32[B, S] = aten.mean.dim(%q) {dim = [2]}
  %e: f32[B, S] = aten.add.Scalar(%v) {other = 1e-05}
  %r: f32[B, S] = aten.rsqrt.default(%e)
  %u: f32[B, S, 1] = aten.unsqueeze.default(%r) {dim = 2}
  %n: f32[B, S, 129] = aten.mul.Tensor(%d, %u)
  %h: f16[B, S, 129] = cast(%n) {dtype = f16}
  %s: f16[B, S, 129] = aten.mul.Tensor(%h, %w)
  %t: f16[B, S, 129] = aten.add.Tensor(%s, %b)
  return %t, %r, %m
}
"""
MASKED = """
func @f(%x: bf16[B, S, 33], %k: i64[B, S, 33], %y: bf16[B, S, 33]) {
  %a: bf16[B, S, 33] = aten.mul.Tensor(%x, %y)
  %m: bf16[B, S, 1] = aten.amax.default(%a) {dim = [-1], keepdim = true}
  %t: bool[B, S, 33] = aten.eq.Tensor(%a, %m)
  %n: bool[B, S, 33] = aten.ne.Scalar(%k) {other = -100}
  %o: bool[B, S, 33] = aten.logical_and.default(%t, %n)
  %z: bf16[B, S, 33] = aten.masked_fill.Scalar(%y, %o) {value = -inf}
  %c: i64[B, S] = aten.sum.dim_IntList(%o) {dim = [-1]}
  %j: i64[B, S, 33] = aten.add.Scalar(%k) {other = 3}
  %l: i64[B, S, 33] = aten.where.self(%o, %j, %k)
  return %z, %c, %l, %n
}
"""
SOFTMAX = """
func @f(%x: f32[B, S, 70], %g: f32[B, S, 70]) {
  %a: f32[B, S, 70] = aten.mul.Scalar(%x) {other = 3.0}
  %s: f32[B, S, 70] = aten.softmax.int(%a) {dim = -1}
  %l: f32[B, S, 70] = aten.log_softmax.int(%a) {dim = 2}
  %e: f32[B, S] = aten.logsumexp.default(%a) {dim = [-1]}
  %d: f32[B, S, 70] = aten._softmax_backward_data.default(%g, %s) {dim = -1, input_dtype = f32}
  %m: f32[B, S, 1] = aten.amin.default(%d) {dim = [-1], keepdim = true}
  %y: f32[B, S, 70] = aten.sub.Tensor(%d, %m)
  return %y, %l, %e
}
"""
GRADIENTS = """
func @f(%x: f16[B, 64], %g: f16[B, 64]) {
  %a: f16[B, 64] = aten.gelu_backward.default(%g, %x) {approximate = "tanh"}
  %b: f16[B, 64] = aten.silu_backward.default(%a, %x)
  %s: f16[B, 64] = aten.sigmoid.default(%x)
  %c: f16[B, 64] = aten.sigmoid_backward.default(%b, %s)
  %t: f16[B, 64] = aten.tanh.default(%x)
  %d: f16[B, 64] = aten.tanh_backward.default(%c, %t)
  %e: f16[B, 64] = aten.threshold_backward.default(%d, %x) {threshold = 0}
  return %e, %b
}
"""
VECTOR = """
func @f(%x: f32[77], %y: f32[77]) {
  %a: f32[77] = aten.clamp.default(%x) {max = 0.5, min = -0.25}
  %b: f32[77] = aten.maximum.default(%a, %y)
  %c: f32[77] = aten.rsub.Scalar(%b) {other = 1.0}
  %d: f32[77] = aten.pow.Tensor_Scalar(%c) {exponent = 3}
  %s: f32[] = aten.sum.dim_IntList(%d) {dim = [0]}
  return %s, %d
}
"""
ROUNDED = """
func @f(%x: f32[B, S, 16], %y: f32[B, S, 16]) {
  %a: f32[B, S, 16] = aten.mul.Tensor(%x, %y)
  %b: f16[B, S, 16] = cast(%a) {dtype = f16}
  %c: f32[B, S, 16] = cast(%b) {dtype = f32}
  %d: f32[B, S, 16] = aten.sub.Tensor(%c, %a)
  return %d
}
"""
ONES = """
func @f(%x: f32[1, S, 1, 24], %y: f32[1, S, 1, 1], %z: f32[S, 1, 24]) {
  %a: f32[1, S, 1, 24] = aten.cos.default(%x)
  %b: f32[1, S, 1, 24] = aten.mul.Tensor(%a, %y)
  %c: f32[1, S, 1, 24] = aten.add.Tensor(%b, %z)
  return %c
}
"""
BENT = """
func @f(%x: f32[B, S, 50], %g: f32[B, S, 50]) {
  %a: f32[B, S, 50] = aten.softplus.default(%x) {beta = 2.0}
  %b: f32[B, S, 50] = aten.log1p.default(%a)
  %c: f32[B, S, 50] = aten.elu.default(%x)
  %d: f32[B, S, 50] = aten.expm1.default(%x)
  %e: f32[B, S, 50] = aten.softplus_backward.default(%g, %x) {beta = 2.0, threshold = 20}
  %h: f32[B, S, 50] = aten.leaky_relu_backward.default(%e, %x) {negative_slope = 0.1, self_is_result = false}
  %i: f32[B, S, 50] = aten.addcmul.default(%h, %b, %c) {value = 0.5}
  %j: f32[B, S, 1] = aten.var.correction(%i) {correction = 0, dim = [-1], keepdim = true}
  %k: f32[B, S, 50] = aten.log_softmax.int(%d) {dim = -1}
  %l: f32[B, S, 50] = aten._log_softmax_backward_data.default(%i, %k) {dim = -1, input_dtype = f32}
  %m: f32[B, S, 50] = aten.clamp_min.default(%l) {min = -1.5}
  %n: f32[B, S, 50] = aten.leaky_relu.default(%m)
  return %n, %j, %b, %c, %d
}
"""
STEEP = """
func @f(%x: f16[B, S, 50], %y: f16[B, S, 50]) {
  %a: f16[B, S, 50] = aten.mul.Tensor(%x, %y)
  %b: f16[B, S, 50] = aten.mul.Scalar(%a) {other = 300}
  %c: f16[B, S, 50] = aten.floor.default(%b)
  %d: bool[B, S, 50] = aten.isnan.default(%c)
  %e: i32[B, S, 50] = cast(%a) {dtype = i32}
  %f: bool[B, S, 50] = aten.ge.Scalar(%a) {other = 0.5}
  return %d, %e, %f
}
"""
TAKEN = """
func @f(%p: bf16[B, S, 24], %w: bf16[24, 40]) {
  %x: bf16[B, S, 40] = aten.matmul.default(%p, %w)
  %a: bf16[B, S, 40] = aten.sigmoid.default(%x)
  %m: bf16[B, S, 1] = aten.mean.dim(%a) {dim = [-1], keepdim = true}
  %y: bf16[B, S, 40] = aten.mul.Tensor(%a, %x)
  %z: bf16[B, S, 40] = aten.sub.Tensor(%y, %m)
  return %z, %m
}
"""
TEXTS = {
    "ones": ONES,
    "bent": BENT,
    "steep": STEEP,
    "taken": TAKEN,
    "capped": CAPPED,
    "operands": OPERANDS,
    "layer_norm": LAYER_NORM,
    "masked": MASKED,
    "softmax": SOFTMAX,
    "gradients": GRADIENTS,
    "vector": VECTOR,
    "rounded": ROUNDED,
}
SIZES = ({"B": 1, "S": 1, "H": 1}, {"B": 3, "S": 5, "H": 2}, {"B": 2, "S": 13, "H": 3})


def drawn(seed: int) -> Module:
    """A random body of up to eight steps: some dtype, some last extent, operands that broadcast in all ways."""
    choose = random.Random(seed)
    dtype = choose.choice([DType.F32, DType.F16, DType.BF16])
    size = choose.choice([1, 7, 33, 64, 129, 1000])
    lead = choose.choice([(), (B,), (B, S), (B, S, H)])
    builder = FunctionBuilder("f", "capture")
    shapes = [(*lead, size), (*lead, size), (size,), (*lead, 1), (*lead[1:], size), (*lead[:1], *(1,) * len(lead))]
    values = [
        builder.param(f"p{i}", TensorType(dtype, shape))
        for i, shape in enumerate(shapes[: choose.randint(2, 6)])
        if shape
    ]
    full = [v for v in values if v.tensor.shape == shapes[0]]
    unary = ["tanh", "sigmoid", "silu", "gelu", "neg", "relu", "erf", "abs", "square"]
    for _ in range(choose.randint(2, 8)):
        kind = choose.randrange(6)
        value = choose.choice(full)
        if kind <= 1:
            made = builder.one(f"aten.{choose.choice(unary)}.default", value)
        elif kind <= 3:
            other = choose.choice(values)
            made = builder.one(f"aten.{choose.choice(['add', 'sub', 'mul'])}.Tensor", value, other)
        elif kind == 4:
            mean = builder.one("aten.mean.dim", value, dim=(-1,), keepdim=True)
            made = builder.one("aten.sub.Tensor", value, mean)
        else:
            soft = builder.one("aten.softmax.int", value, dim=-1)
            made = builder.one("aten.add.Tensor", soft, choose.choice(full))
        full.append(made)
        values.append(made)
    results = [full[-1], *choose.sample(full[2:-1], min(1, len(full) - 3))]
    read = {v for node in builder.nodes for v in node.operands}
    results += [n.results[0] for n in builder.nodes if n.results[0] not in read and n.results[0] not in results]
    function = builder.build(results)
    dims = {name: NamedDim(name) for name in ("B", "S", "H")}
    entry = Entry("forward", "f", tuple(f"out{i}" for i in range(len(results))))
    return Module("drawn", dims=dims, functions={"f": function}, entries={"forward": entry})


def regions(module: Module) -> list[Node]:
    """The regions that the pass makes."""
    after = ALL.run(module, Report())
    return [node for _, node in after.walk() if node.op == "region"]


def tensor_of(value: Value, sizes: dict[str, int], seed: int) -> torch.Tensor:
    """Random numbers of a value's type; those with all columns are part of something wider, or turned."""
    generator = torch.Generator().manual_seed(seed)
    shape = [evaluate(n, sizes) for n in value.tensor.shape]
    dtype = to_torch_dtype(value.tensor.dtype)
    if not value.tensor.dtype.is_float:
        return torch.randint(-101, -98, shape, generator=generator).to(dtype)
    if len(shape) >= 2 and shape[-1] > 1:
        if seed % 3 == 1:
            return torch.randn(*shape[:-1], 2 * shape[-1], generator=generator).to(dtype)[..., : shape[-1]]
        if seed % 3 == 2:
            turned = torch.randn(shape[-2], *shape[:-2], shape[-1], generator=generator).to(dtype)
            return turned.movedim(0, -2)
    return torch.randn(shape, generator=generator).to(dtype)


def as_module(node: Node) -> Module:
    """A module whose entry is the node alone."""
    builder = FunctionBuilder("f", "capture")
    inputs = [builder.param(f"x{i}", v.type) for i, v in enumerate(node.operands)]
    results = builder.emit(node.op, inputs, node.attrs, types=[v.type for v in node.results])
    dims = {name: NamedDim(name) for name in ("B", "S", "H")}
    entry = Entry("forward", "f", tuple(f"out{i}" for i in range(len(results))))
    return Module("one", dims=dims, functions={"f": builder.build(results)}, entries={"forward": entry})


def outputs(node: Node, inputs: list[torch.Tensor], lifted: bool) -> list[torch.Tensor]:
    """What the node means."""
    given = {f"x{i}": x for i, x in enumerate(inputs)}
    return list(run(as_module(node), "forward", given, {}, lifted=lifted)[0].values())


def spec_of(name: str, node: Node) -> KernelSpec:
    problem = region.problem_of(node)
    assert not isinstance(problem, str), problem
    return region.forward(name, problem)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-6))


def check(name: str, got: torch.Tensor, want: torch.Tensor, native: torch.Tensor) -> None:
    """Whole numbers are equal. Others are as near to the lifted ones as the graph's own, which rounds at each op."""
    assert got.dtype is native.dtype and got.shape == native.shape, name
    if not got.is_floating_point():
        assert torch.equal(got, native), name
        return
    finite = torch.isfinite(native)
    assert torch.equal(finite, torch.isfinite(got)), name
    # The interpreter cuts to bf16 where a GPU rounds, so a rounding costs twice as much here.
    cut = 2 if got.dtype is torch.bfloat16 else 1
    floor = torch.finfo(got.dtype).eps * (1 if got.dtype is not torch.float32 else 4)
    apart, own = (error(x[finite], want[finite]) for x in (got, native))
    assert apart <= max(1.5 * cut * own, cut * floor), (name, apart, own)


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 80), marks=pytest.mark.full)], ids=["few", "many"])
def test_kernels_in_the_interpreter(seeds: range, tmp_path: Path) -> None:
    """All bodies, of strided and broadcast operands; the error is within 1.5 times that of the graph itself."""
    nodes: dict[str, Node] = {}
    for name, text in TEXTS.items():
        (nodes[name],) = regions(module_of(text))
    for seed in seeds:
        nodes |= {f"drawn_{seed}_{i}": node for i, node in enumerate(regions(drawn(seed)))}
    specs = [spec_of(name, node) for name, node in nodes.items()]
    cases: list[Case] = []
    for number, (name, node) in enumerate(nodes.items()):
        for sizes in SIZES if name in TEXTS else SIZES[1 + number % 2 :][:1]:
            drawn_ones = [tensor_of(value, sizes, 7 * number + i) for i, value in enumerate(node.operands)]
            cases.append((name, tuple(drawn_ones)))
    for (name, inputs), (got, left) in zip(cases, interpret(specs, cases, tmp_path), strict=True):
        wanted, native = (outputs(nodes[name], list(inputs), lifted) for lifted in (True, False))
        if name == "rounded":  # the lifted graph has no rounding, which is all that this one is about
            assert torch.equal(got[0], native[0])
            continue
        if name == "taken":  # in place, whatever the strides
            assert torch.equal(got[1], left[0]) and got[1].stride() == inputs[0].stride()
        else:
            assert all(torch.equal(now, given) for now, given in zip(left, inputs, strict=True))
        for result, want, own in zip(got, wanted, native, strict=True):
            check(name, result, want, own)


@pytest.mark.parametrize("name", TEXTS)
def test_twin(name: str) -> None:
    """The twin is what the node means, bit for bit."""
    (node,) = regions(module_of(TEXTS[name]))
    module = types.ModuleType("twins")
    exec(reference_text([spec_of("twin", node)]), module.__dict__)
    inputs = [tensor_of(value, SIZES[1], i) for i, value in enumerate(node.operands)]
    got = module.twin(*inputs)
    for result, want in zip(got if isinstance(got, tuple) else (got,), outputs(node, inputs, False), strict=True):
        assert torch.equal(result, want)


def test_every_step_has_one_form() -> None:
    assert FORMS.keys() | OF_ROWS.keys() | {"cast"} == STEPS and not FORMS.keys() & OF_ROWS.keys()


def test_sixteen_bytes_at_a_time(tmp_path: Path) -> None:
    """Compiled for a GPU, the aligned variants load and store vectors only."""
    wide = CAPPED.replace("200", "4096")
    rows = LAYER_NORM.replace("129", "4096").replace("f16", "bf16")
    specs = [spec_of(name, regions(module_of(text))[0]) for name, text in (("capped", wide), ("rows", rows))]
    texts = ptx_of(specs, tmp_path)
    assert set(texts) == {"capped", "capped.aligned", "rows", "rows.aligned"}
    assert all(".v4.b32" in access for access in re.findall(r"(?:ld|st)\.global\S*", texts["capped.aligned"]))
    assert len(re.findall(r"(?:ld|st)\.global\S*\.v4\.b32", texts["rows.aligned"])) >= 4


def test_source_says_what_it_computes() -> None:
    (node,) = regions(module_of(CAPPED))
    spec = spec_of("capped", node)
    for text in (spec.source, spec.twin):
        assert "v1 = x0 / 4.0\n    v2 = v1.tanh()\n    v3 = v2 * 4.0\n" in text
    assert KernelSpec.from_data(spec.to_data()) == spec


def test_equal_bodies_are_one_problem() -> None:
    """Layers share a kernel, whatever their values are called."""
    first, second = (regions(module_of(text))[0] for text in (CAPPED, CAPPED.replace("%b", "%other")))
    assert region.problem_of(first) == region.problem_of(second)
