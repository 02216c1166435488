"""A budget for all memory: what is chosen fits, costs least of what was looked at, and what cannot fit is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import training_models
from mgraph.cli.explain import overview
from mgraph.cli.snapshots import open_package
from mgraph.codegen.memory import RankMemory
from mgraph.compiler import Compilation, build_module, compile_package
from mgraph.errors import OptionError
from mgraph.ir.mesh import mesh_sizes
from mgraph.passes.activations import extents
from mgraph.recipe import Recipe
from tests.sampling import sampled

GIB = 2**30


def _fitted(budget: str, model: str = "dense", **more: Any) -> Compilation:
    shape = training_models.SHAPES[model]
    settings: dict[str, Any] = {"max_norm": 0.0, "grad_dtype": "param", "precision": "bf16", "mesh": "dp=1", **more}
    name = f"{training_models.__file__}:{model}"
    return build_module(Recipe(name, memory_budget=budget, batch=shape.batch, seq=shape.length, **settings))


def _needs(done: Compilation, ranks: int = 1) -> int:
    sizes = extents(done.module, {"B": done.recipe.batch, "S": done.recipe.seq})
    return RankMemory(done.module, sizes, mesh_sizes(done.module.mesh, {}, ranks)).reserved()


@pytest.mark.parametrize(
    ("budget", "more", "recompute", "offload"),
    sampled(
        [
            ("60GiB", {}, "none", ""),
            ("29GiB", {}, "none", "activations=.*"),
            ("24GiB", {}, "selective", "activations=.*"),
            ("15.9GiB", {}, "selective", "activations=.*"),
            ("13GiB", {}, "selective", "activations=.*,optimizer"),
            ("6.7GiB", {}, "selective", "activations=.*,optimizer"),
            ("29GiB", {"recompute": "full"}, "full", ""),
            ("22GiB", {"offload": "optimizer"}, "none", "optimizer"),
            ("13GiB", {"mesh": "tp=2"}, "selective", "activations=.*"),
            ("17GiB", {"mesh": "fsdp=2"}, "selective", "activations=.*"),
        ],
        0,
        always=[("60GiB", {}, "none", "")],
    ),
)
def test_the_cheapest_that_fits(budget: str, more: dict[str, Any], recompute: str, offload: str) -> None:
    """The dense model takes 29.7 GiB, and 1.1 for evaluation beside its graphs; 9.9 are masters and moments."""
    done = _fitted(budget, **more)
    assert done.recipe.recompute == recompute and re.fullmatch(offload, done.recipe.offload), done.fit
    assert _needs(done, 2 if "mesh" in more else 1) <= float(budget.removesuffix("GiB")) * GIB
    assert done.fit[0].startswith(f"budget {budget}; recompute {recompute}")
    assert [line.startswith("chosen: ") for line in done.fit[1:]].count(True) == 1
    seconds = {line: float(line.rsplit(", ", 1)[1].split(" ms")[0]) for line in done.fit[1:]}
    assert min((line for line in seconds if not line.startswith("too large")), key=seconds.__getitem__).startswith("ch")


def test_what_cannot_fit_is_said() -> None:
    with pytest.raises(OptionError, match=r"at least 1\.\d+MiB with 2 sequences of 64 tokens \(recompute") as found:
        build_module(Recipe("dense-tiny", arch="none", memory_budget="1MiB", batch=2, seq=64))
    assert found.value.hint is not None and found.value.hint.startswith("--memory-budget 1.")
    with pytest.raises(OptionError, match="activation_budget is not given"):
        Recipe("dense-tiny", recompute="selective", memory_budget="1GiB")
    with pytest.raises(OptionError, match="nothing can be fitted"):
        build_module(Recipe("dense-tiny", memory_budget="1GiB", disable="recompute"))


def test_the_package_says_what_was_chosen(tmp_path: Path) -> None:
    """The recipe stays as it was given; the pipeline is that of the choice."""
    recipe = Recipe("dense-tiny", arch="none", memory_budget="1.9MiB", batch=2, seq=64, output=str(tmp_path / "p"))
    done = compile_package(recipe)
    assert done.recipe.offload or done.recipe.recompute != "none"
    manifest = json.loads((tmp_path / "p" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["fingerprint"]["options"]["memory_budget"] == "1.9MiB"
    assert ("offload{" in manifest["pipeline"]) == bool(done.recipe.offload)
    assert not any(re.search(r"\d{5,}B", line) for line in done.fit), "sizes are for a reader"
    told = json.loads((tmp_path / "p" / "graphs" / "compilation.json").read_text(encoding="utf-8"))["fit"]
    assert told == list(done.fit)
    assert [f"  {line}" for line in told] == [
        line for line in overview(open_package(tmp_path / "p")) if "offload " in line
    ]
