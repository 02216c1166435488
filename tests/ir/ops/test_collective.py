"""Collectives over the axes of a mesh, all ranks in one process, against what they mean on the whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Axis, Entry, Module, Origin
from mgraph.ir.interpreter import run_ranks
from mgraph.ir.mesh import groups
from mgraph.ir.opdef import op_def
from mgraph.ir.types import DType, Partial, PendingType, Shard, TensorType

MESH = (Axis("dp", 2), Axis("tp", 3), Axis("all", of=("dp", "tp")))
SIZES = {"dp": 2, "tp": 3}


def on_all_ranks(op: str, tensors: list[torch.Tensor], placement: Any, axis: str, **attrs: Any) -> list[torch.Tensor]:
    """The op on every rank of the 2 x 3 mesh, by `start` and `wait` where there is a split-phase form."""
    builder = FunctionBuilder("main", "test")
    builder.origin = Origin("test", "test.py", 1)
    x = builder.param("x", TensorType(DType.F32, (6, 6)).place(axis, placement))
    (pending,) = builder.emit(f"{op}_start", [x], {"axis": axis, **attrs})
    module = Module(
        "m",
        mesh=MESH,
        functions={"main": builder.build([builder.one("wait", pending)])},
        entries={"main": Entry("main", "main", ("y",))},
    )
    outputs, _ = run_ranks(module, "main", [{"x": t} for t in tensors], [{}] * 6, SIZES)
    return [o["y"] for o in outputs]


def ranks_of(axis: str) -> list[list[int]]:
    """The groups of an axis."""
    return groups(MESH, SIZES, axis, 6)


def test_groups_are_major_first() -> None:
    assert ranks_of("tp") == [[0, 1, 2], [3, 4, 5]]
    assert ranks_of("dp") == [[0, 3], [1, 4], [2, 5]]
    assert ranks_of("all") == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("axis", ["dp", "tp", "all"])
@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_all_reduce(axis: str, reduction: str) -> None:
    tensors = [torch.randn(6, 6) for _ in range(6)]
    found = on_all_ranks("all_reduce", tensors, Partial(reduction), axis, reduction=reduction)
    for group in ranks_of(axis):
        stacked = torch.stack([tensors[r] for r in group])
        expected = stacked.sum(0) if reduction == "sum" else stacked.amax(0)
        assert all(torch.equal(found[r], expected) for r in group)


@pytest.mark.parametrize("axis", ["dp", "tp"])
@pytest.mark.parametrize("dim", [0, 1])
def test_gather_undoes_the_shard_and_scatter_keeps_a_part_of_the_sum(axis: str, dim: int) -> None:
    count = SIZES[axis]
    whole = torch.randn(6, 6)
    tensors = [torch.empty(0)] * 6
    for group in ranks_of(axis):
        for rank, part in zip(group, whole.chunk(count, dim), strict=True):
            tensors[rank] = part.contiguous()
    gathered = on_all_ranks("all_gather", tensors, Shard(dim), axis, dim=dim)
    assert all(torch.equal(t, whole) for t in gathered)
    terms = [torch.randn(6, 6) for _ in range(6)]
    scattered = on_all_ranks("reduce_scatter", terms, Partial("sum"), axis, dim=dim)
    for group in ranks_of(axis):
        parts = torch.stack([terms[r] for r in group]).sum(0).chunk(count, dim)
        assert all(torch.equal(scattered[r], part) for r, part in zip(group, parts, strict=True))


@pytest.mark.parametrize("op", ["reduce_scatter", "reduce_scatter_start"])
def test_a_wide_sum_of_narrow_terms_is_not_rounded(op: str) -> None:
    terms = [torch.randn(6, 6).bfloat16() for _ in range(3)]
    definition = op_def(op)
    assert definition.infer is not None
    (found,) = definition.body(terms, axis="tp", dim=1, reduction="sum", wide=True)
    exact = torch.stack([t.double() for t in terms]).sum(0).chunk(3, 1)
    for part, wanted in zip(found, exact, strict=True):
        assert part.dtype == torch.float32
        torch.testing.assert_close(part.double(), wanted, rtol=1e-6, atol=1e-6)
    assert not torch.equal(
        definition.body(terms, axis="tp", dim=1, reduction="sum", wide=False)[0][0].float(), found[0]
    )
    for dtype, wide in (
        (DType.BF16, DType.F32),
        (DType.F16, DType.F32),
        (DType.F64, DType.F64),
        (DType.I64, DType.I64),
    ):
        of = TensorType(dtype, (6, 6)).place("tp", Partial("sum"))
        (made,) = definition.infer([of], {"axis": "tp", "dim": 1, "wide": True})
        tensor = made.value if isinstance(made, PendingType) else made
        assert (tensor.dtype, tensor.on("tp")) == (wide, Shard(1))
    with pytest.raises(ValueError, match="a wide reduction is a sum, not max"):
        definition.infer([of], {"axis": "tp", "dim": 1, "wide": True, "reduction": "max"})


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_all_to_all_moves_the_shard_to_another_dim(axis: str) -> None:
    count = SIZES[axis]
    whole = torch.randn(6, 6)
    tensors = [torch.empty(0)] * 6
    for group in ranks_of(axis):
        for rank, part in zip(group, whole.chunk(count, 0), strict=True):
            tensors[rank] = part
    found = on_all_ranks("all_to_all", tensors, Shard(0), axis, split_dim=1, join_dim=0)
    for group in ranks_of(axis):
        assert all(torch.equal(found[r], p) for r, p in zip(group, whole.chunk(count, 1), strict=True))
