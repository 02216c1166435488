"""Types: text, placement, local shapes."""

from __future__ import annotations

import pytest

from mgraph.ir.dims import symbol
from mgraph.ir.types import DType, Partial, PendingType, Physical, Shard, TensorType

B, S = symbol("B"), symbol("S")


def test_text_says_everything() -> None:
    plain = TensorType(DType.F32, (B, S, 64))
    assert str(plain) == "f32[B, S, 64]" and str(TensorType(DType.I64)) == "i64[]"
    full = TensorType(
        DType.BF16,
        (2 * B, 64),
        (("dp", Shard(0, 1, zigzag=True)), ("tp", Partial("max"))),
        ((0, (2, B)),),
        Physical((2 * B, 128), DType.F8E4M3, DType.F8E8M0, (1, 32)),
    )
    placed = "{dp=S(0.1, zigzag), tp=P(max)}"
    assert str(full) == f"bf16[(2 B), 64]{placed}<pad[2*B, 128] as f8e4m3 scale f8e8m0[1, 32]>"
    assert str(PendingType(plain)) == "pending<f32[B, S, 64]>"


def test_placement_over_one_axis() -> None:
    type_ = TensorType(DType.F32, (8, 6)).place("dp", Shard(0)).place("tp", Partial())
    assert type_.on("dp") == Shard(0) and type_.on("tp") == Partial("sum") and type_.on("cp") is None
    moved = type_.place("dp", Shard(1))
    assert moved.on("dp") == Shard(1) and len(moved.placement) == 2
    assert type_.place("dp", None).place("tp", None) == TensorType(DType.F32, (8, 6))


def test_local_shape() -> None:
    type_ = TensorType(DType.F32, (8, B * 6)).place("dp", Shard(0)).place("tp", Shard(1)).place("pp", Partial())
    assert type_.local_shape({"dp": 2, "tp": 3, "pp": 5}) == (4, 2 * B)
    both = TensorType(DType.F32, (8,)).place("dp", Shard(0)).place("tp", Shard(0))
    assert both.local_shape({"dp": 2, "tp": 4}) == (1,)
    with pytest.raises(ValueError, match=r"dim 0 of .* does not divide over dp=3"):
        type_.local_shape({"dp": 3, "tp": 3})


def test_derived_types() -> None:
    type_ = TensorType(DType.F32, (B, 3), (("dp", Shard(0)),), (), Physical((B, 4)))
    assert type_.numel == 3 * B
    assert type_.with_dtype(DType.BF16) == TensorType(DType.BF16, (B, 3), (("dp", Shard(0)),))
    assert type_.with_shape(B + B, 5) == TensorType(DType.F32, (2 * B, 5))
    assert hash(type_.place("tp", None)) == hash(type_) and str(type_) == str(type_.place("tp", None))


def test_the_text_of_a_changed_type_is_its_own() -> None:
    type_ = TensorType(DType.F32, (4,))
    assert str(type_) == "f32[4]" and str(type_.place("dp", Shard(0))) == "f32[4]{dp=S(0)}"
    assert str(type_.with_dtype(DType.I8)) == "i8[4]"


def test_dtypes() -> None:
    assert all(DType.parse(d.text) is d and repr(d) == d.text for d in DType)
    floats = {d.text for d in DType if d.is_float}
    assert floats == {"f64", "f32", "bf16", "f16", "f8e4m3", "f8e5m2", "f8e8m0", "f4e2m1"}
    assert (DType.F64.bits, DType.BF16.bits, DType.F4E2M1.bits, DType.BOOL.bits) == (64, 16, 4, 8)
    with pytest.raises(KeyError):
        DType.parse("float32")
