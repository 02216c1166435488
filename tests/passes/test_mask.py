"""Reading masks. The judge is the interpreter: the condition, at every (b, q, k), is what the mask tensor holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Value
from mgraph.ir.interpreter import run
from mgraph.ir.types import DType, TensorType
from mgraph.passes.mask import BATCH, KEY, QUERY, Predicate, mask_predicate
from mgraph.passes.pipeline import run_pipeline
from tests.passes.build import B, S, f32, i64, module_of, started

SIZES = {"B": 2, "S": 7}
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 0, 1]])
Build = Callable[[FunctionBuilder, Value], Value]


def read(build: Build, inputs: torch.Tensor = POSITIONS, dtype: DType = DType.I64) -> Predicate | None:
    """The predicate of `build(builder, x[B, S])` after canonicalize, compared with the tensor itself."""
    builder = started()
    x = builder.param("x", TensorType(dtype, (B, S)))
    module = module_of(builder.build([build(builder, x), x]))
    after, _ = run_pipeline(module, "canonicalize,constant-fold,cse")
    function = after.functions["forward"]
    predicate = mask_predicate(function, function.results[0])
    if predicate is not None:
        tensor = run(module, "forward", {"x": inputs}, {})[0]["out0"]
        visible = tensor > -1e4 if predicate.additive else tensor
        visible = visible.expand(SIZES["B"], 1, SIZES["S"], SIZES["S"])[:, 0]
        assert torch.equal(_evaluated(predicate.condition, function, {"x": inputs}), visible)
    return predicate


def _evaluated(condition: Any, function: Function, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The condition at every (b, q, k); functions in it are looked up in the values of the graph."""
    applied = condition.atoms(sympy.core.function.AppliedUndef)
    names = {f.func.__name__ for f in applied}
    values = {n.result.name: n.result for n in function.nodes if len(n.results) == 1 and n.result.name in names}
    module = module_of(Function("forward", function.params, (), function.nodes, tuple(values.values())))
    tables = inputs | dict(zip(values, run(module, "forward", inputs, {})[0].values(), strict=True))
    table = torch.zeros(SIZES["B"], SIZES["S"], SIZES["S"], dtype=torch.bool)
    for b, q, k in itertools.product(*map(range, table.shape)):
        at = {BATCH: b, QUERY: q, KEY: k, B: SIZES["B"], S: SIZES["S"]}
        numbers = {f: int(tables[f.func.__name__][tuple(int(a.subs(at)) for a in f.args)]) for f in applied}
        table[b, q, k] = bool(condition.subs(numbers).subs(at))
    return table


def index(builder: FunctionBuilder) -> Value:
    return builder.one("aten.arange.default", end=S)


def row(builder: FunctionBuilder, x: Value) -> Value:
    """[.., S] as [.., S, 1]: the query's."""
    return builder.one("aten.unsqueeze.default", x, dim=-1)


def column(builder: FunctionBuilder, x: Value) -> Value:
    """[.., S] as [.., 1, S]: the key's."""
    return builder.one("aten.unsqueeze.default", x, dim=-2)


def heads(builder: FunctionBuilder, mask: Value) -> Value:
    """[B, S, S] as [B, 1, S, S]."""
    return builder.one("aten.unsqueeze.default", mask, dim=1)


def causal(builder: FunctionBuilder, x: Value) -> Value:
    i = index(builder)
    return builder.one("aten.le.Tensor", column(builder, i), row(builder, i))


def windowed(builder: FunctionBuilder, x: Value) -> Value:
    i = index(builder)
    bound = builder.one("aten.sub.Tensor", row(builder, i), other=3)
    near = builder.one("aten.gt.Tensor", column(builder, i), bound)
    return builder.one("aten.logical_and.default", near, causal(builder, x))


def lower_triangle(builder: FunctionBuilder, x: Value) -> Value:
    ones = builder.one("aten.ones.default", size=(S, S), dtype=DType.BOOL)
    return builder.one("aten.tril.default", ones)


def upper_triangle_added(builder: FunctionBuilder, x: Value) -> Value:
    low = builder.one("aten.full.default", size=(S, S), fill_value=float("-inf"), dtype=DType.F32)
    return builder.one("aten.triu.default", low, diagonal=1)


def filled(builder: FunctionBuilder, x: Value) -> Value:
    """The plain form: `zeros.masked_fill(tril(ones) == 0, -inf)`."""
    ones = builder.one("aten.ones.default", size=(S, S), dtype=DType.F32)
    hidden = builder.one("aten.eq.Scalar", builder.one("aten.tril.default", ones), other=0)
    zeros = builder.one("aten.zeros.default", size=(S, S), dtype=DType.F32)
    return builder.one("aten.masked_fill.Scalar", zeros, hidden, value=float("-inf"))


def selected(builder: FunctionBuilder, x: Value) -> Value:
    """The additive form of a bool mask: `where(mask, 0, finfo.min)`."""
    zero = builder.one("aten.scalar_tensor.default", s=0.0, dtype=DType.F32)
    return builder.one("aten.where.ScalarOther", windowed(builder, x), zero, other=-3.3895e38)


def keys_and_causal(builder: FunctionBuilder, x: Value) -> Value:
    seen = builder.one("aten.to.dtype", x, dtype=DType.BOOL)
    return heads(builder, builder.one("aten.bitwise_and.Tensor", column(builder, seen), causal(builder, x)))


def same_segment(builder: FunctionBuilder, x: Value) -> Value:
    same = builder.one("aten.eq.Tensor", row(builder, x), column(builder, x))
    return heads(builder, builder.one("aten.bitwise_and.Tensor", same, causal(builder, x)))


def segments_alone(builder: FunctionBuilder, x: Value) -> Value:
    """Both directions, asked the other way round and negated."""
    other = builder.one("aten.ne.Tensor", column(builder, x), row(builder, x))
    return heads(builder, builder.one("aten.logical_not.default", other))


def segments_in_a_window(builder: FunctionBuilder, x: Value) -> Value:
    return builder.one("aten.logical_and.default", windowed(builder, x), same_segment(builder, x))


def segments_without_padding(builder: FunctionBuilder, x: Value) -> Value:
    """Segment 0 is padding, which no query sees."""
    seen = builder.one("aten.ne.Scalar", column(builder, x), other=0)
    return builder.one("aten.bitwise_and.Tensor", heads(builder, seen), same_segment(builder, x))


def segments_added(builder: FunctionBuilder, x: Value) -> Value:
    zero = builder.one("aten.scalar_tensor.default", s=0.0, dtype=DType.F32)
    return builder.one("aten.where.ScalarOther", same_segment(builder, x), zero, other=float("-inf"))


def packed(builder: FunctionBuilder, positions: Value) -> Value:
    """What transformers computes from position ids: positions compared within runs that they count up by one."""
    first = builder.one("aten.slice.Tensor", positions, dim=1, start=0, end=1)
    before = builder.one("aten.sub.Tensor", first, other=1)
    step = builder.one("aten.diff.default", positions, before, n=1, dim=-1)
    runs = builder.one("aten.cumsum.default", builder.one("aten.ne.Scalar", step, other=1), dim=-1)
    batch = builder.one("aten.arange.default", end=B)
    for _ in range(3):
        batch = row(builder, batch)
    names = {"args": ("self", "indices.0", "indices.1")}
    at = [row(builder, index(builder)), column(builder, index(builder))]
    at = [builder.one("aten.unsqueeze.default", builder.one("aten.unsqueeze.default", a, dim=0), dim=0) for a in at]

    def pick(values: Value, where: Value) -> Value:
        return builder.emit("aten.index.Tensor", [values, batch, where], names)[0]

    order = builder.one("aten.le.Tensor", pick(positions, at[1]), pick(positions, at[0]))
    same = builder.one("aten.eq.Tensor", pick(runs, at[0]), pick(runs, at[1]))
    everything = builder.one("aten.new_ones.default", order, size=(), dtype=DType.BOOL)
    mask = builder.one("aten.__and__.Tensor", builder.one("aten.__and__.Tensor", everything, order), same)
    return builder.one("aten.expand.default", mask, size=(B, -1, S, S))


def packed_from_index(builder: FunctionBuilder, x: Value) -> Value:
    """The same with no position ids given: they are the index."""
    i = builder.one("aten.unsqueeze.default", builder.one("aten.add.Tensor", index(builder), other=0), dim=0)
    return packed(builder, builder.one("aten.expand.default", i, size=(B, -1)))


def packed_window(builder: FunctionBuilder, positions: Value) -> Value:
    far = builder.one("aten.sub.Tensor", row(builder, positions), other=2)
    near = builder.one("aten.gt.Tensor", column(builder, positions), far)
    return builder.one("aten.bitwise_and.Tensor", packed(builder, positions), heads(builder, near))


def everything(builder: FunctionBuilder, x: Value) -> Value:
    return builder.one("aten.ge.Scalar", column(builder, index(builder)), other=0)


@pytest.mark.parametrize(
    ("build", "facts"),
    [
        (causal, {"causal": True}),
        (lower_triangle, {"causal": True}),
        (packed_from_index, {"causal": True}),
        (upper_triangle_added, {"causal": True, "additive": True}),
        (filled, {"causal": True, "additive": True}),
        (windowed, {"causal": True, "window": 3}),
        (selected, {"causal": True, "window": 3, "additive": True}),
        (keys_and_causal, {"causal": True, "keys": "x"}),
        (same_segment, {"causal": True, "segments": "x"}),
        (segments_alone, {"segments": "x"}),
        (segments_in_a_window, {"causal": True, "window": 3, "segments": "x"}),
        (segments_without_padding, {"causal": True, "segments": "x", "keys": "x"}),
        (segments_added, {"causal": True, "segments": "x", "additive": True}),
        (packed, {"causal": True, "segments": "cumsum"}),
        (packed_window, {"causal": True, "window": 2, "segments": "cumsum"}),
        (everything, {}),
    ],
)
def test_masks_are_named(build: Build, facts: dict[str, Any]) -> None:
    predicate = read(build)
    assert predicate is not None and predicate.remainder == ()
    found = {
        "causal": predicate.causal,
        "window": predicate.window,
        "additive": predicate.additive,
        "segments": predicate.segments and predicate.segments.name,
        "keys": predicate.keys and predicate.keys.name,
    }
    assert {name: value for name, value in found.items() if value} == facts
    assert predicate.everything == (not facts)


def test_named_facts_say_the_same_as_the_condition() -> None:
    """What a caller builds from `causal`, `window` and `segments` is the mask, also for packed positions."""
    builder = started()
    x = builder.param("x", i64(B, S))
    module = module_of(builder.build([packed_window(builder, x)]))
    after, _ = run_pipeline(module, "canonicalize,constant-fold,cse")
    function = after.functions["forward"]
    predicate = mask_predicate(function, function.results[0])
    assert predicate is not None and predicate.segments is not None and predicate.window is not None
    runs = module_of(Function("forward", function.params, (), function.nodes, (predicate.segments,)))
    segments = run(runs, "forward", {"x": POSITIONS}, {})[0]["out0"]
    q, k = torch.arange(7)[:, None], torch.arange(7)
    built = (k <= q) & (k > q - predicate.window) & (segments[:, :, None] == segments[:, None, :])
    assert torch.equal(built[:, None], run(module, "forward", {"x": POSITIONS}, {})[0]["out0"])


def _positions_without_segments(builder: FunctionBuilder, x: Value) -> Value:
    return heads(builder, builder.one("aten.le.Tensor", column(builder, x), row(builder, x)))


def _every_second(builder: FunctionBuilder, x: Value) -> Value:
    half = builder.one("aten.floor_divide.Scalar", index(builder), other=2)
    return builder.one("aten.eq.Tensor", row(builder, half), column(builder, half))


def _banded(builder: FunctionBuilder, x: Value) -> Value:
    return builder.one("aten.logical_or.default", causal(builder, x), everything(builder, x))


def _either_segment_or_earlier(builder: FunctionBuilder, x: Value) -> Value:
    same = builder.one("aten.eq.Tensor", row(builder, x), column(builder, x))
    return heads(builder, builder.one("aten.bitwise_or.Tensor", same, causal(builder, x)))


def _next_segment(builder: FunctionBuilder, x: Value) -> Value:
    return heads(
        builder,
        builder.one("aten.eq.Tensor", row(builder, builder.one("aten.add.Tensor", x, other=1)), column(builder, x)),
    )


def _rows_instead_of_keys(builder: FunctionBuilder, x: Value) -> Value:
    seen = builder.one("aten.ne.Scalar", row(builder, x), other=0)
    return heads(builder, builder.one("aten.expand.default", seen, size=(B, S, S)))


@pytest.mark.parametrize(
    "build",
    [_positions_without_segments, _every_second, _either_segment_or_earlier, _next_segment, _rows_instead_of_keys],
)
def test_what_has_no_name_is_left_over(build: Build) -> None:
    predicate = read(build)
    assert predicate is not None
    assert predicate.remainder and predicate.segments is None and predicate.keys is None
    assert not predicate.causal and not predicate.everything


def test_or_with_everything_is_everything() -> None:
    predicate = read(_banded)
    assert predicate is not None and predicate.everything


def test_look_ahead_is_not_causal() -> None:
    """A diagonal of one shows the next key too."""

    def build(builder: FunctionBuilder, x: Value) -> Value:
        ones = builder.one("aten.ones.default", size=(S, S), dtype=DType.BOOL)
        return builder.one("aten.tril.default", ones, diagonal=1)

    predicate = read(build)
    assert predicate is not None and not predicate.causal and predicate.remainder


def test_a_bias_is_no_mask() -> None:
    builder = started()
    x = builder.param("x", f32(S, S))
    function = builder.build([builder.one("aten.mul.Tensor", x, other=2.0)])
    assert mask_predicate(function, function.results[0]) is None
    low = builder.one("aten.full.default", size=(S, S), fill_value=-1.0, dtype=DType.F32)
    soft = builder.build([builder.one("aten.triu.default", low, diagonal=1)])
    assert mask_predicate(soft, soft.results[0]) is None


def test_parameters_of_layers_are_followed() -> None:
    layer = started("layer")
    q, mask = layer.param("q", f32(B, S)), layer.param("mask", TensorType(DType.BOOL, (S, S)))
    inner = layer.build([layer.one("aten.where.self", mask, *[layer.one("aten.unsqueeze.default", q, dim=1)] * 2)])
    builder = started()
    x = builder.param("x", f32(B, S))
    made = causal(builder, x)
    (y,) = builder.emit("call", [x, made], {"callee": "layer"}, types=[inner.results[0].type], names=["y"])
    module, _ = run_pipeline(module_of(builder.build([y]), inner), "canonicalize")
    function = module.functions["layer"]
    found = mask_predicate(function, function.params[1], module)
    assert found is not None and found.causal and found.function == "forward" and found.remainder == ()
    alone = mask_predicate(function, function.params[1])
    assert alone is not None and not alone.causal and alone.remainder
