"""Merging of equal nodes, and what must not merge."""

from __future__ import annotations

from typing import Any

import torch

from mgraph.ir.graph import Module, Phase
from mgraph.ir.types import DType, TensorType
from mgraph.ir.verifier import verify
from mgraph.passes.base import Report
from mgraph.passes.cse import CommonSubexpressions
from tests.passes.build import B, assert_same_results, f32, module_of, started

SCALAR = TensorType(DType.I64)


def merged(module: Module) -> Module:
    return CommonSubexpressions().run(module, Report())


def test_chains_of_equal_nodes_merge() -> None:
    builder = started()
    x = builder.param("x", f32(B, 4))
    branches = [builder.one("aten.mul.Tensor", builder.one("aten.exp.default", x), other=2.0) for _ in range(3)]
    total = builder.one("aten.add.Tensor", branches[0], builder.one("aten.sub.Tensor", branches[1], branches[2]))
    module, report = module_of(builder.build([total, branches[2]])), Report()
    after = CommonSubexpressions().run(module, report)
    function = after.functions["forward"]
    assert [n.op.split(".")[1] for n in function.nodes] == ["exp", "mul", "sub", "add"]
    assert function.results[1] is branches[0]
    assert [m.detail for m in report.matches] == ["equals exp", "equals mul"] * 2
    assert_same_results(module, after, {"x": torch.randn(3, 4)}, {})


def test_attributes_that_python_calls_equal_do_not_merge() -> None:
    builder = started()
    x = builder.param("x", TensorType(DType.I64, (B,)))
    results = [builder.one("aten.mul.Tensor", x, other=other) for other in (1, 1.0, True)]
    module = module_of(builder.build(results))
    assert merged(module) is module


def test_phases_do_not_merge() -> None:
    builder = started()
    x = builder.param("x", f32(B))
    first = builder.one("aten.exp.default", x)
    builder.phase = Phase.BACKWARD
    module = module_of(builder.build([first, builder.one("aten.exp.default", x)]))
    assert merged(module) is module


def _calling(random: bool) -> Module:
    """Two equal calls of `outer`, which calls `inner`, which may hold a random node."""
    inner = started("inner")
    seed = inner.param("seed", SCALAR)
    attrs: dict[str, Any] = {"shape": (4,), "samples": 1, "site": "a"}
    y = inner.emit("random", [seed, seed, seed], attrs)[0] if random else inner.one("cast", seed, dtype=DType.F32)
    outer = started("outer")
    type_ = y.tensor
    arguments = [outer.param("seed", SCALAR)]
    z = outer.emit("call", arguments, {"callee": "inner"}, types=[type_], names=["z"])
    main = started()
    s = main.param("seed", SCALAR)
    made = [main.emit("call", [s], {"callee": "outer"}, types=[type_], names=["y"])[0] for _ in range(2)]
    return module_of(main.build([main.one("aten.add.Tensor", *made)]), outer.build(z), inner.build([y]))


def test_equal_calls_merge() -> None:
    module = _calling(random=False)
    after = merged(module)
    assert [n.op for n in after.functions["forward"].nodes] == ["call", "aten.add.Tensor"]
    assert_same_results(module, after, {"seed": torch.tensor(3)}, {})


def test_random_never_merges() -> None:
    module = _calling(random=True)
    assert merged(module) is module
    builder = started()
    seed = builder.param("seed", SCALAR)
    attrs = {"shape": (4,), "samples": 1, "site": "a"}
    twice = module_of(builder.build([builder.emit("random", [seed] * 3, attrs)[0] for _ in range(2)]))
    assert merged(twice) is twice
    assert len(twice.functions["forward"].nodes) == 2


def test_the_result_is_valid() -> None:
    builder = started()
    x = builder.param("x", f32(B, 4))
    values = [builder.emit("aten.topk.default", [x], {"k": 2}) for _ in range(2)]
    module = module_of(builder.build([values[0][0], values[1][1]]))
    after = merged(module)
    verify(after)
    assert after.functions["forward"].results == values[0]
    assert_same_results(module, after, {"x": torch.randn(3, 4)}, {})
