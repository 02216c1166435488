"""Identifiers and the pool of names in use."""

from __future__ import annotations

from mgraph.codegen.names import NamePool, base_name, identifier, slot_names


def test_identifiers() -> None:
    assert [identifier(n) for n in ("a.b", "0x", "for", "sum", "torch", "match", "", "x_1")] == [
        "a_b", "v0x", "for_", "sum_", "torch_", "match_", "value", "x_1",
    ]  # fmt: skip
    assert base_name("mul_12") == "mul"


def test_slot_names_are_short_and_unique() -> None:
    assert slot_names(["attn.q.weight", "attn.k.weight", "norm.weight"]) == {
        "attn.q.weight": "q_weight", "attn.k.weight": "k_weight", "norm.weight": "norm_weight",
    }  # fmt: skip
    names = slot_names(["q.weight", "grad.q.weight", "a.q.weight"])
    assert len(set(names.values())) == 3


def test_pool() -> None:
    pool = NamePool(["B"])
    assert [pool.take("x"), pool.take("x"), pool.take("B")] == ["x", "x_1", "B_1"]
    assert pool.share("x") == "x" and not pool.alone("x")
    assert not pool.release("x") and pool.release("x")
    assert pool.take("x") == "x"
