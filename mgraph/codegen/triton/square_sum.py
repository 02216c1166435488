"""The sum of the squares of all elements of many tensors, or its root, the norm, as Triton source and torch twin.

    square_sum  = sum_i x_i^2            global_norm = sqrt(sum_i x_i^2)

Each program adds up one chunk of one tensor in f32, and a second, small launch adds the sums of all programs in f64.
Both have a fixed order, so results repeat from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgraph.codegen.triton.kernel import ITEM_BYTES, KernelSpec, Launch, Lists, TensorSpec
from mgraph.ir.graph import Node

LANGUAGE_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}

SUMS = 4096
"""Sums of programs that the second launch reads at a time."""


@dataclass(frozen=True)
class SquareSum:
    """One instance: the dtype of the tensors, and whether the root is taken."""

    dtype: str
    root: bool = False


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut: elements of a program, those it adds at a time, those a thread reads in one access, and
    warps."""

    chunk: int
    tile: int
    vector: int
    num_warps: int


def tuning(problem: SquareSum) -> Tuning:
    """Four accesses of 16 bytes a thread at a time, and large chunks: there is only one program for all their sums."""
    vector = 16 // ITEM_BYTES[problem.dtype]
    return Tuning(chunk=32768, tile=4 * vector * 128, vector=vector, num_warps=4)


def problem_of(node: Node) -> SquareSum | str:
    """The instance that a node `square_sum` or `global_norm` is, or why the kernel does not take it."""
    found = sorted({value.tensor.dtype.text for value in node.operands})
    if len(found) != 1 or found[0] not in LANGUAGE_DTYPES:
        return f"the tensors are {' and '.join(found)}; the kernel takes one of {', '.join(LANGUAGE_DTYPES)}"
    return SquareSum(found[0], root=node.op == "global_norm")


def build(name: str, problem: SquareSum, cut: Tuning | None = None) -> KernelSpec:
    """The site `result = name(tensors)`: a list of tensors of any shapes → f32[]."""
    cut = cut or tuning(problem)
    args = ("tensors", "partial", "owners", "chunks", "sizes", "tensors_at", "before", "unit")
    return KernelSpec(
        name=name,
        source=_source(name, problem, cut),
        twin=_twin(name, problem),
        inputs=(TensorSpec("tensors", problem.dtype, ("*",), many=True),),
        outputs=(TensorSpec("result", "f32", ()),),
        scratch=(TensorSpec("partial", "f32", ("blocks",)),),
        launches=(
            Launch(f"{name}_parts", args, ("blocks",), cut.num_warps, num_stages=1, aligned=True),
            Launch(f"{name}_sum", ("partial", "result", "blocks"), (1,), num_warps=16, num_stages=1, aligned=False),
        ),
        lists=Lists(chunk=cut.chunk, numbers={}),
    )


def _source(name: str, problem: SquareSum, cut: Tuning) -> str:
    result = "tl.sqrt(tl.sum(total, axis=0))" if problem.root else "tl.sum(total, axis=0)"
    return f'''
@triton.jit
def {name}_parts(
    tensors_ptr, partial_ptr, owners_ptr, chunks_ptr, sizes_ptr, tensors_at_ptr, before, unit,
):
    """The sum of the squares of chunk chunks[b] ({cut.chunk} elements) of tensor owners[b], b numbers the programs."""
    program = tl.program_id(0)
    owner = tl.load(owners_ptr + program)
    start = tl.load(chunks_ptr + program).to(tl.int64) * {cut.chunk}
    count = tl.minimum(tl.load(sizes_ptr + owner) * unit - start, {cut.chunk}).to(tl.int32)
    tensor = tensors_ptr + (tl.load(tensors_at_ptr + owner) * unit + start)
    total = tl.zeros([{cut.tile}], dtype=tl.float32)
    for tile in range(0, count, {cut.tile}):
        element = tl.max_contiguous(tile + tl.arange(0, {cut.tile}), {cut.vector})
        x = tl.load(tensor + element, mask=element < count, other=0.0).to(tl.float32)
        total += x * x
    tl.store(partial_ptr + before + program, tl.sum(total, axis=0))


@triton.jit
def {name}_sum(partial_ptr, result_ptr, blocks):
    """The {"root of the " if problem.root else ""}sum of all programs' sums, {SUMS} at a time."""
    total = tl.zeros([{SUMS}], dtype=tl.float64)
    for start in range(0, blocks, {SUMS}):
        place = start + tl.arange(0, {SUMS})
        total += tl.load(partial_ptr + place, mask=place < blocks, other=0.0).to(tl.float64)
    tl.store(result_ptr, {result}.to(tl.float32))
'''


def _twin(name: str, problem: SquareSum) -> str:
    kind = "global_norm" if problem.root else "square_sum"
    meaning = "root of the sum" if problem.root else "sum"
    return f'''
def {name}(tensors):
    """The {meaning} of the squares of all elements of all tensors, f32[]."""
    return rt.{kind}(tensors)
'''
