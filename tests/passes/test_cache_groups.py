"""Groups of layers that are served: by window, of about one size, and read back from any form of the step."""

from __future__ import annotations

from collections import Counter

import pytest

from mgraph.capture import capture
from mgraph.codegen.memory import RankMemory
from mgraph.ir.graph import StateKind
from mgraph.passes.activations import extents
from mgraph.passes.cache_groups import UNUSED, CacheGroup, bounded, cache_groups, grouped
from mgraph.passes.pipeline import run_pipeline

RAISED = "outline,canonicalize,constant-fold,cse,dce,raise-norm,raise-rope,raise-attention,raise-glu,raise-moe,cse,dce"


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([None] * 7, [7]),
        ([8] * 7, [7]),
        ([8, None] * 12, [12, 12]),
        (([512] * 5 + [None]) * 4 + [512] * 2, [4, 4, 4, 4, 4, 3, 3]),  # 22 with a window and 4 without
        (([9] * 5 + [None]) * 10 + [9] * 2, [13, 13, 13, 13, 10]),
        ([4, 8, 4, None], [1, 1, 1, 1]),
        ([4, 4, 8, 8, None, None], [2, 2, 2]),
    ],
)
def test_groups_are_of_one_window_and_of_one_size(windows: list[int | None], sizes: list[int]) -> None:
    groups = grouped(windows)
    counts = Counter(groups)
    assert sorted(counts.values(), reverse=True) == sizes and sorted(counts) == list(range(len(counts)))
    assert all(len({windows[at] for at, g in enumerate(groups) if g == group}) == 1 for group in counts)
    assert max(sizes) * len(sizes) <= (1 + UNUSED) * len(windows)
    order = [next(w for w, g in zip(windows, groups, strict=True) if g == group) for group in sorted(counts)]
    assert order == sorted(order, key=lambda w: (w is not None, -(w or 0))), "those that see all come first"


def test_a_window_that_no_sequence_leaves_is_none() -> None:
    assert [bounded(w, 64) for w in (None, 63, 64, 65)] == [None, 63, None, None]


@pytest.mark.parametrize("more", ["", ",fuse-append", ",fuse-append,in-place"])
def test_groups_of_a_step(more: str) -> None:
    """Sliding and full layers by turns; whatever the step has become, the same caches are of the same group."""
    length = 64
    derived = f"{RAISED},derive-serve{{max_length={length},block_size=4}},canonicalize,cse,dce{more}"
    module, _ = run_pipeline(capture("gpt-oss-tiny"), derived)
    full, sliding = cache_groups(module)
    assert full.window is None and sliding.window is not None and sliding.window < length
    caches = {name for name, state in module.state.items() if state.kind is StateKind.CACHE}
    assert {*full.caches, *sliding.caches} == caches and not {*full.caches} & {*sliding.caches}
    names = [p.name for p in module.entry_function("step").params]
    assert names == [*("tokens", "positions", "slots", "starts", "lengths", "blocks", "slots_1", "blocks_1", "rows")]
    # The two groups share memory: a block is as large as that of one of them.
    memory = RankMemory(module, extents(module, {"T": 4, "R": 2, "N": 2, "K": 4, "P": 10}), {})
    assert memory.state()[StateKind.CACHE] == sum(memory.bytes(module.state[n].type) for n in full.caches)
    assert isinstance(full, CacheGroup) and full.facts() == {"window": None, "caches": list(full.caches)}


def test_models_of_one_kind_of_layer_have_one_group() -> None:
    for model in ("dense-tiny", "dense-tiny-capped"):  # that one has a window of 7 in a layer
        module, _ = run_pipeline(capture(model), f"{RAISED},derive-serve{{max_length=7}},canonicalize,cse,dce")
        (group,) = cache_groups(module)
        assert group.window is None and len(group.caches) == sum(
            s.kind is StateKind.CACHE for s in module.state.values()
        )
