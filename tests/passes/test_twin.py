"""Reduced twins: relations of extents hold, layers shrink, types are inferred anew."""

from __future__ import annotations

import pytest

from mgraph.capture import capture
from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.dims import symbol
from mgraph.ir.equality import isomorphic
from mgraph.ir.graph import Module, Origin, StateKind
from mgraph.ir.verifier import verify
from mgraph.passes.extents import assign, map_dim, relations, static_extents
from mgraph.passes.pipeline import run_pipeline
from mgraph.passes.twin import NoTwin, reduce, shorten, shortest_walk
from tests.passes.build import f32, module_of, stacked

B, S = symbol("B"), symbol("S")


def test_dims_keep_their_named_part() -> None:
    new = {2: 2, 4096: 24, 7: 5}
    assert map_dim(4096, new) == 24
    assert map_dim(-4096, new) == -24
    assert map_dim(4096 * B * S, new) == 24 * B * S
    assert map_dim(S + 7, new) == S + 7
    assert map_dim(9, new) == 9


def attention_like() -> Module:
    """[B, S, 4096] as 32 heads of 128, halves of 64 swapped, packed back."""
    builder = FunctionBuilder("forward", "capture")
    builder.origin = Origin("attn", "model.py", 1)
    x = builder.param("x", f32(B, S, 4096))
    heads = builder.one("reshape", x, shape=(B, S, 32, 128))
    left = builder.one("aten.slice.Tensor", heads, dim=3, end=64)
    right = builder.one("aten.slice.Tensor", heads, dim=3, start=64)
    swapped = builder.one("aten.cat.default", right, left, args=("tensors.0", "tensors.1"), dim=-1)
    return module_of(builder.build([builder.one("reshape", swapped, shape=(B, S, 4096))]))


def test_products_and_sums_stay() -> None:
    module = attention_like()
    assert static_extents(module) == {32, 64, 128, 4096}
    new = assign(static_extents(module), relations(module), {})
    assert new is not None
    assert new[4096] == new[32] * new[128]
    assert new[128] == 2 * new[64]
    assert len(set(new.values())) == len(new)
    assert max(new.values()) < 50
    twin, reduction = reduce(module)
    verify(twin)
    assert isomorphic(twin, module)
    assert twin.functions["forward"].nodes[2].attrs == {"dim": 3, "start": new[64]}
    assert "4096 -> " in str(reduction)


def test_every_other_element() -> None:
    """Interleaved halves of gate and up stay halves."""
    builder = FunctionBuilder("forward", "capture")
    builder.origin = Origin("mlp", "model.py", 1)
    x = builder.param("x", f32(B, S, 96))
    gate = builder.one("aten.slice.Tensor", x, dim=2, step=2)
    up = builder.one("aten.slice.Tensor", x, dim=2, start=1, step=2)
    module = module_of(builder.build([builder.one("aten.mul.Tensor", gate, up)]))
    new = assign(static_extents(module), relations(module), {})
    assert new is not None and new[96] == 2 * new[48] < 96
    verify(reduce(module)[0])


def test_lower_bounds_hold() -> None:
    new = assign({5, 100, 2048}, [], {2048: 16})
    assert new == {1: 1, 5: 3, 100: 4, 2048: 16}


@pytest.mark.parametrize(
    ("kinds", "walk"),
    [
        ("AA", "AA"),
        ("A" * 32, "AAAA"),
        ("DD" + "M" * 20, "DDMM" + "M"),
        ("AB" * 8, "ABABAB"),
        ("AAAB" * 4, "AAABAAAB"),
        ("ABC", "ABC"),
    ],
)
def test_shortest_walks(kinds: str, walk: str) -> None:
    found = shortest_walk(kinds)
    assert found == sorted(found)
    assert "".join(kinds[i] for i in found) == walk


def test_layers_are_dropped_with_their_state() -> None:
    short, layers = shorten(stacked(9))
    assert layers == (9, 4)
    assert len(short.state) == 4 * 2
    assert len(short.functions["forward"].nodes) == 4 * 5
    verify(short)


def test_layers_of_several_windows_all_stay() -> None:
    short, _ = shorten(stacked(12, windows=(1, 2)))
    windows = [n.attrs["max"] for n in short.functions["forward"].nodes if n.op == "aten.clamp.default"]
    assert windows == [1.0, 2.0] * 3


@pytest.mark.parametrize("model", ["dense-tiny", "moe-tiny", "dense-tiny-geglu"])
def test_models_reduce(model: str) -> None:
    module = capture(model)
    twin, reduction = reduce(module)
    verify(twin)
    assert isomorphic(twin, module)
    assert not reduction.shortened
    assert reduction.names[64] == "d_model"
    assert reduction.extents[64] < 30
    assert reduction.extents[64] == 4 * reduction.extents[16]
    buffer = next(s for s in twin.state.values() if s.kind is StateKind.BUFFER)
    assert len(buffer.init[0][1]) == buffer.type.shape[0]  # type: ignore[arg-type]


def test_a_large_module_that_does_not_reduce_has_no_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    module = stacked(2)
    monkeypatch.setattr("mgraph.passes.twin.assign", lambda *_: None)
    same, reduction = reduce(module)
    assert same is module
    assert str(reduction).startswith("not reduced")
    wide = stacked(2, width=2000)
    with pytest.raises(NoTwin, match="16000000 state elements"):
        reduce(wide)


@pytest.mark.full
def test_the_shape_of_llama_3_8b_reduces() -> None:
    module = capture("llama3-8b")
    twin, reduction = reduce(module)
    assert reduction.layers == (32, 4)
    assert reduction.extents[4096] == reduction.extents[32] * reduction.extents[128]
    assert reduction.names[128256] == "vocab"
    real, _ = run_pipeline(module, "outline")
    small, _ = run_pipeline(twin, "outline")
    assert isomorphic(real.functions["layer"], small.functions["layer"])


def test_even_extents_stay_even_for_ranks() -> None:
    module = attention_like()
    twin, reduction = reduce(module, ranks=2, parts=2)
    verify(twin)
    assert isomorphic(twin, module)
    assert reduction.extents.keys() == {32, 64, 128, 4096}
    assert all(new % 2 == 0 for new in reduction.extents.values())
