"""The gradient of an embedding, added to its total, as Triton source and torch twin, specialised by width and dtypes.

    total[token] += sum of grad[i] over all i with tokens[i] = token            in the dtype of total

Tokens come sorted, with the place that each had (`rt.by_token`): equal ones are a run. The programs that begin at the
first token of a run, one per block of columns, add its rows in order and write the sum once, so that results repeat
from run to run, which sums by atomic additions do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgraph.codegen.triton.kernel import ITEM_BYTES, KernelSpec, Launch, TensorSpec
from mgraph.ir.graph import Node, Value

TRITON_LANGUAGE_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@dataclass(frozen=True)
class EmbeddingGrad:
    """One instance: the width of a row, and the dtype of the gradient; the total is f32."""

    width: int
    grad: str

    @property
    def aligned(self) -> bool:
        """Whether every row starts on a 16-byte boundary when the tensor does."""
        return self.width * ITEM_BYTES[self.grad] % 16 == 0


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut: rows and columns of a tile, and warps."""

    rows: int
    columns: int
    num_warps: int


def tuning(problem: EmbeddingGrad) -> Tuning:
    """Tiles of up to 32 rows and 128 columns: most runs are short, and what a tile has beyond them is masked and costs
    no memory; the run of a frequent token is hundreds of rows, all read by few programs, which is what 32 rows under
    way at a time are for."""
    columns = min(128, max(16, 1 << (problem.width - 1).bit_length()))
    return Tuning(rows=32, columns=columns, num_warps=4)


def problem_of(node: Node, total: Value) -> EmbeddingGrad | str:
    """The instance that the sum of a node `aten.embedding_dense_backward` or `embedding_part_grad` to a total is, or
    why the kernel does not take it."""
    width, dtype = node.operands[0].tensor.shape[-1], node.operands[0].tensor.dtype.text
    if not isinstance(width, int):
        return f"the width {width} of a row is not a known number"
    if dtype not in TRITON_LANGUAGE_DTYPES:
        return f"the gradient is {dtype}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    if total.tensor.dtype.text != "f32":
        return f"the total is {total.tensor.dtype.text}; the kernel takes f32"
    return EmbeddingGrad(width, dtype)


def build(name: str, problem: EmbeddingGrad, cut: Tuning | None = None) -> KernelSpec:
    """The site `total = name(total, grad, ids, order)`, in place: total f32 [V, width], grad [..., width], ids i32 [T]
    (rows of total in ascending order; those from V on name none), order i64 [T] (rows of grad)."""
    cut = cut or tuning(problem)
    args = ("total", "grad", "ids", "order", "T", "V")
    grid = ("T", ("cdiv", problem.width, cut.columns))
    return KernelSpec(
        name=name,
        source=_source(name, problem, cut),
        twin=_twin(name, problem),
        inputs=(
            TensorSpec("total", "f32", ("V", problem.width)),
            TensorSpec("grad", problem.grad, ("*", problem.width)),
            TensorSpec("ids", "i32", ("T",)),
            TensorSpec("order", "i64", ("T",)),
        ),
        outputs=(TensorSpec("sum", "f32", ("V", problem.width), alias="total"),),
        scratch=(),
        launches=(Launch(name, args, grid, cut.num_warps, num_stages=1, aligned=problem.aligned),),
    )


def _source(name: str, problem: EmbeddingGrad, cut: Tuning) -> str:
    ragged = problem.width % cut.columns != 0
    in_row = f"column < {problem.width}"
    mask = f", mask={in_row}" if ragged else ""
    tile = f"same[:, None] & ({in_row})[None, :]" if ragged else "same[:, None]"
    return f'''
@triton.jit
def {name}(total_ptr, grad_ptr, ids_ptr, order_ptr, T, V):
    """Add the rows of one run of equal ids to the total, {cut.columns} of {problem.width} columns per program.

    total[ids[i]] += grad[order[i]]        {cut.rows} rows at a time, in order
    """
    place = tl.program_id(0)
    token = tl.load(ids_ptr + place)
    before = tl.load(ids_ptr + place - 1, mask=place > 0, other=-1)
    if (token != before) & (token < V):
        column = tl.program_id(1) * {cut.columns} + tl.arange(0, {cut.columns})
        target = total_ptr + token.to(tl.int64) * {problem.width} + column
        total = tl.load(target{mask})
        found = {cut.rows}
        while found == {cut.rows}:
            row = place + tl.arange(0, {cut.rows})
            same = tl.load(ids_ptr + row, mask=row < T, other=-1) == token
            source = tl.load(order_ptr + row, mask=same, other=0)
            element = source[:, None] * {problem.width} + column[None, :]
            grad = tl.load(grad_ptr + element, mask={tile}, other=0.0).to(tl.float32)
            total += tl.sum(grad, axis=0)
            found = tl.sum(same.to(tl.int32), axis=0)
            place += {cut.rows}
        tl.store(target, total{mask})
'''


def _twin(name: str, problem: EmbeddingGrad) -> str:
    return f'''
def {name}(total, grad, ids, order):
    """Add row order[i] of grad [..., {problem.width}] to row ids[i] of total [V, {problem.width}], in place.

    ids are in ascending order; those from V on name no row.
    """
    inside = ids < total.shape[0]
    rows = grad.reshape(-1, {problem.width})[order].to(total.dtype).masked_fill_(~inside[:, None], 0)
    return total.index_add_(0, ids.where(inside, 0), rows)
'''
