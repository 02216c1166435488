"""Which launches sites have: where nothing may depend on the number of rows, the same ones for any number."""

from __future__ import annotations

import pytest

from mgraph.codegen.kernel_sites import FIXED_ON_GPUS, ON_GPUS, kernel_sites
from mgraph.codegen.triton import KernelSpec
from mgraph.compiler import build_module
from mgraph.ir.graph import Module
from mgraph.recipe import Recipe
from mgraph.runtime.kernels import evaluate


@pytest.fixture(scope="module")
def module() -> Module:
    """A step with experts, windows, sinks and biases."""
    settings = {"arch": "sm_90a", "max_length": 4096, "precision": "bf16"}
    return build_module(Recipe(model="gpt-oss-tiny", purpose="serve", **settings)).module  # type: ignore[arg-type]


def launched(spec: KernelSpec, count: int) -> list[str]:
    """The functions that run where all extents that inputs bind are `count`."""
    names = {extent for tensor in spec.inputs for extent in tensor.shape if isinstance(extent, str)}
    dims = {"sms": 132, "rows": count, **dict.fromkeys(names, count)}
    for name, expression in spec.dims.items():
        dims[name] = evaluate(expression, dims)
    return [launch.function for launch in spec.launches if evaluate(launch.when, dims)]


def test_with_one_way_the_same_functions_run_for_any_number_of_rows(module: Module) -> None:
    ways = {fixed: kernel_sites(module, gpu=True, fixed=fixed).specs for fixed in (True, False)}
    change = {
        fixed: {spec.name for spec in specs if len({tuple(launched(spec, n)) for n in (1, 3, 17, 900, 70000)}) > 1}
        for fixed, specs in ways.items()
    }
    assert not change[True]
    assert {name.rpartition("_")[0] for name in change[False]} == {"expert_glu_fwd", "expert_sum", "paged_attention"}
    assert {spec.name.rpartition("_")[0] for spec in ways[True]} >= {"fixed_rows", "expert_sum", "paged_attention"}
    greedy = {
        fixed: {spec.name for spec in specs if spec.name.startswith("likeliest")} for fixed, specs in ways.items()
    }
    assert list(greedy.values()) == [{"likeliest_0"}] * 2, "one kernel for greedy rows and for sampled ones"
    assert set(FIXED_ON_GPUS) - {"aten.addmm.default"} <= set(ON_GPUS)
