"""The dim-signature language: inference, sharding rules, errors."""

from __future__ import annotations

import pytest

from mgraph.ir.dims import Dim, symbol
from mgraph.ir.signature import parse_signature
from mgraph.ir.types import DType, Partial, Shard, TensorType

B, S = symbol("B"), symbol("S")


def f32(*shape: Dim) -> TensorType:
    return TensorType(DType.F32, shape)


def infer(text: str, *types: TensorType, **attrs: object) -> list[str]:
    return [str(t) for t in parse_signature(text).infer(types, attrs)]


def test_inference() -> None:
    assert infer("... k+, n k+ -> ... n", f32(B, S, 64), f32(128, 64)) == ["f32[B, S, 128]"]
    assert infer("... k+, n k+ -> ... n", f32(64), f32(128, 64)) == ["f32[128]"]
    assert infer("m k+, k+ n -> m n", f32(B, 3), f32(3, S)) == ["f32[B, S]"]
    assert infer("... n^, n^ -> ... n, ... 1:f64", f32(B, 4), f32(4)) == ["f32[B, 4]", "f64[B, 1]"]
    assert infer("n v^, n -> :f32, n:i64", TensorType(DType.BF16, (B, 9)), f32(B)) == ["f32[]", "i64[B]"]
    assert infer("t -> t $experts", f32(B), experts=8) == ["f32[B, 8]"]
    assert infer("-> ", f32()) == ["f32[]"]


def test_products_of_dims() -> None:
    assert infer("t k, n -> (t k) n", f32(B, 2), f32(5)) == ["f32[2*B, 5]"]
    assert infer("(h 4) -> h", f32(4 * B)) == ["f32[B]"]
    assert infer("($heads d) -> $heads d", f32(64), heads=8) == ["f32[8, 8]"]
    assert infer("a, (a b) -> b", f32(B), f32(B * S)) == ["f32[S]"]
    with pytest.raises(ValueError, match=r"6 is not \(h 4\)"):
        infer("(h 4) -> h", f32(6))
    with pytest.raises(ValueError, match=r"is not \(a b\)"):
        infer("a, b, (a b) -> a", f32(2), f32(3), f32(7))
    with pytest.raises(ValueError, match=r"is not \(a b\)"):
        infer("(a b) -> a", f32(6))


def test_missing_trailing_operands_are_optional_unless_results_need_them() -> None:
    assert infer("n k+, m k+, m -> n m", f32(2, 3), f32(4, 3)) == ["f32[2, 4]"]


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("m k+, k+ n -> m n", [(2, 3), (4, 5)], "operand 1 of .*k is .4. here but .3. before"),
        ("m k, k -> m", [(2, 3), (4, 5)], "operand 1 of .*rank 2, expected 1"),
        ("... n m -> ... n", [(3,)], "operand 0 of .*rank 1 is too small"),
        ("n 2 -> n", [(3, 4)], "operand 0 of .*extent 4, expected 2"),
        ("... n, ... n -> n", [(2, 3), (5, 3)], "operand 1 of .*is .5. here but .2. before"),
    ],
)
def test_operands_that_do_not_fit(text: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        infer(text, *(f32(*shape) for shape in shapes))


def test_declarations_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="no '->'"):
        parse_signature("m k")
    with pytest.raises(ValueError, match="result dim 'n' is bound by no operand"):
        parse_signature("m -> m n")
    with pytest.raises(ValueError, match=r"result dim '\.\.\.' is bound by no operand"):
        parse_signature("m -> ... m")
    with pytest.raises(ValueError, match="result dim 'n' is bound by no operand"):
        parse_signature("m -> (m n)")


def test_sharding_rules_of_a_product() -> None:
    rules = {r.name: (r.operands, r.results) for r in parse_signature("m k+, k+ n -> m n").sharding_rules()}
    assert rules == {
        "m": ((Shard(0), None), (Shard(0),)),
        "k": ((Shard(1), Shard(0)), (Partial("sum"),)),
        "n": ((None, Shard(1)), (Shard(1),)),
    }


def test_sharding_rules_leave_out_what_must_not_split() -> None:
    rules = parse_signature("a n^, n^ -> a n, a 1").sharding_rules()
    assert [r.name for r in rules] == ["a"]
    # A name that one result lacks, without a sum, cannot be split.
    assert [r.name for r in parse_signature("a b -> a b, a").sharding_rules()] == ["a"]


def test_sharding_rules_after_an_ellipsis_count_from_the_end() -> None:
    rules = {r.name: (r.operands, r.results) for r in parse_signature("... k+, n k+ -> ... n").sharding_rules()}
    assert rules["k"] == ((Shard(-1), Shard(1)), (Partial("sum"),))
    assert rules["n"] == ((None, Shard(0)), (Shard(-1),))


def test_sharding_rules_of_factors() -> None:
    rules = {r.name: r.results for r in parse_signature("t k, n -> (t k) n").sharding_rules()}
    assert rules == {"t": (Shard(0, 0),), "k": (Shard(0, 1),), "n": (Shard(1),)}


def test_sharding_rules_of_leading_dims_sum_where_results_lack_them() -> None:
    rules = parse_signature("... n^, n^ -> ... n, n").sharding_rules(2)
    assert [(r.operands, r.results) for r in rules] == [
        ((Shard(dim), None), (Shard(dim), Partial("sum"))) for dim in (0, 1)
    ]
