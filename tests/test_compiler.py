"""The driver: which pipeline a recipe means, and what a compilation gives."""

from __future__ import annotations

import pytest

from mgraph.compiler import FUSE, RAISE, REGIONS, build_module, pipeline_of, pipeline_text
from mgraph.errors import PassError
from mgraph.ir.printer import print_module
from mgraph.passes.pipeline import NORMALIZE, parse_pipeline, print_pipeline
from mgraph.recipe import Recipe


def test_pipelines_of_both_purposes() -> None:
    common = (
        f"{NORMALIZE},{RAISE},joint-losses,autodiff,recompute{{mode=full}},adamw{{beta2=0.95}},data-parallel{{size=2}},"
        "by-layer,"
    )
    for target, rest in (
        ("cpu", "cse,dce,in-place"),
        ("h100", f"{FUSE}{REGIONS}dce,join-products,cse,dce,overlap-update,fuse-squares,in-place,cuda-graphs"),
    ):
        recipe = Recipe(model="m", mesh="dp=2", recompute="full", target=target)
        assert print_pipeline(pipeline_of(recipe)) == common + rest
    for graphs, last in (("layers", "in-place,cuda-graphs{layers=true}"), ("off", "in-place")):
        assert print_pipeline(pipeline_of(Recipe(model="m", target="h100", cuda_graphs=graphs))).endswith(last)
    serve = print_pipeline(pipeline_of(Recipe(model="m", purpose="serve", max_length=64)))
    fuse = "fuse-append,canonicalize,dce,fuse-rope,fuse-norm,skip-padding,fuse-experts{sums=true},"
    fuse += "fuse-linear,fuse-regions,cse,dce,"
    assert serve == f"{NORMALIZE},{RAISE},derive-serve{{max_length=64}},canonicalize,cse,dce,{fuse}in-place"


def test_text_and_passes_agree() -> None:
    recipe = Recipe(model="m", weight_decay=0.1)
    assert parse_pipeline(pipeline_text(recipe)) == pipeline_of(recipe)


def test_passes_left_out() -> None:
    names = [p.name for p in pipeline_of(Recipe(model="m", disable="raise-*,outline"))]
    assert not [n for n in names if n.startswith("raise-") or n == "outline"]
    with pytest.raises(PassError, match="requires"):
        pipeline_of(Recipe(model="m", disable="autodiff"))
    with pytest.raises(PassError, match="raise-nrom"):
        pipeline_of(Recipe(model="m", disable="raise-nrom"))


def test_module_and_what_was_measured() -> None:
    said: list[str] = []
    done = build_module(Recipe(model="dense-tiny"), say=said.append)
    assert said == ["capture dense-tiny"]
    assert set(done.module.entries) == {"microbatch", "finish", "evaluate", "predict"}
    assert done.snapshots.texts()[-1] == print_module(done.module)
    assert [r.name for r in done.results] == [p.name for p in pipeline_of(Recipe(model="dense-tiny"))]
    in_passes = sum(r.measured["seconds"] for r in done.results)
    assert 0 < in_passes <= done.seconds["passes"]
    assert done.package is None and done.twin == ""
