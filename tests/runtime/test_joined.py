"""Joined states: a view where they lie one after another, an error elsewhere; and the joined ops of the runtime."""

from __future__ import annotations

import pytest
import torch

from mgraph.errors import PackageError
from mgraph.ir.opdef import op_def
from mgraph.runtime import joined as runtime
from mgraph.runtime.package import StateSpec
from mgraph.runtime.state import create_state


def spec(name: str, rows: int, after: str = "") -> StateSpec:
    init = (("normal_", 0.0, 1.0),)
    return StateSpec(name, "param", torch.float32, (rows, 4), True, True, init, name, after=after)


def test_states_lie_one_after_another() -> None:
    """With the values that each has by itself, in whichever order they are declared."""
    apart = create_state([spec("k", 3), spec("q", 2), spec("v", 1), spec("o", 5)], 7, "cpu")
    state = create_state([spec("k", 3, "q"), spec("q", 2), spec("v", 1, "k"), spec("o", 5)], 7, "cpu")
    assert list(state) == list(apart)
    whole = runtime.joined(state["q"], state["k"], state["v"])
    assert torch.equal(whole, torch.cat([apart["q"], apart["k"], apart["v"]]))
    whole.zero_()
    assert not state["k"].any() and torch.equal(state["o"], apart["o"])


@pytest.mark.parametrize("tensors", ["other", "turned", "gap"])
def test_what_lies_otherwise_is_refused(tensors: str) -> None:
    whole = torch.zeros(6, 4)
    pairs = {
        "other": (whole[:2], torch.zeros(2, 4)),
        "turned": (whole[:4].t(), whole[4:]),
        "gap": (whole[:2], whole[3:]),
    }
    with pytest.raises(PackageError, match="one after another"):
        runtime.joined(*pairs[tensors])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_are_those_of_the_graph(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def check(found: torch.Tensor, want: torch.Tensor) -> None:
        assert found.dtype is dtype and found.shape == want.shape
        assert float((found - want).norm()) <= (1e-2 if dtype is torch.bfloat16 else 1e-6) * float(want.norm())

    three = draw(2, 5, 6), draw(2, 5, 6), draw(2, 5, 6)
    for layout in ("halves", "swapped", "interleaved"):
        found = runtime.glu_grad_joined(*three, act="gelu_tanh", limit=1.0, layout=layout)
        check(found, op_def("glu_grad_joined").body(*three, act="gelu_tanh", limit=1.0, layout=layout))
    heads = draw(2, 4, 3, 8), draw(2, 2, 3, 8), draw(2, 2, 3, 8), draw(3, 4), draw(3, 4)
    for style in ("half", "interleaved"):
        want = op_def("rope_join").body(*heads, style=style, inverse=True)
        check(runtime.rope_join(*heads, style=style, inverse=True), want)
        x, tables = draw(2, 3, 5 * 8), heads[3:]
        want = op_def("rope_joined").body(x, *tables, heads=3, width=8, style=style)
        found = runtime.rope_joined(x, *tables, heads=3, width=8, style=style)
        check(found, want)
        assert not torch.equal(found, x)
        check(runtime.rope_joined(x, *tables, heads=3, width=8, style=style, out=x), want)
        assert torch.equal(found, x)
