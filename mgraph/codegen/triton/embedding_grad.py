"""The gradient of an embedding, added to its total, as Triton source and torch twin, specialised by width and dtypes.

    total[token] += sum of grad[i] over all i with tokens[i] = token            in the dtype of total

Tokens come sorted, with the place that each had (`rt.by_token`): equal ones are a run. A run is cut where a window of
the sorted tokens ends, so that no few programs have all the work of a frequent token: the programs at the first token
of a piece add its rows, to the total where the run begins, else to a row of their window's own; a second launch adds
those rows of each run to the total. All in a fixed order, so that results repeat from run to run, which sums by atomic
additions do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgraph.codegen.triton.kernel import ITEM_BYTES, TRITON_LANGUAGE_DTYPES, KernelSpec, Launch, TensorSpec
from mgraph.ir.graph import Node, Value


@dataclass(frozen=True)
class EmbeddingGrad:
    """One instance: the width of a row, and the dtype of the gradient; the total is f32."""

    width: int
    grad: str
    total: str = "f32"

    @property
    def aligned(self) -> bool:
        """Whether every row starts on a 16-byte boundary when the tensor does."""
        return self.width * ITEM_BYTES[self.grad] % 16 == 0


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut: rows and columns of a tile, tokens of a window, and warps."""

    rows: int
    columns: int
    window: int
    num_warps: int


def tuning(problem: EmbeddingGrad) -> Tuning:
    """Tiles of up to 1024 columns, since most runs are of one row or two, and of 4096 elements: 32 values a thread. 64
    rows at most one after the other keep the last program short."""
    columns = min(1024, max(16, 1 << (problem.width - 1).bit_length()))
    return Tuning(rows=min(32, 4096 // columns), columns=columns, window=64, num_warps=4)


def problem_of(node: Node, total: Value, fresh: bool = False) -> EmbeddingGrad | str:
    """The instance that the sum of a node `aten.embedding_dense_backward` or `embedding_part_grad` to a total is, or
    why the kernel does not take it."""
    width, dtype = node.operands[0].tensor.shape[-1], node.operands[0].tensor.dtype.text
    if fresh:
        return "only the rows that tokens name are written"
    if not isinstance(width, int):
        return f"the width {width} of a row is not a known number"
    if dtype not in TRITON_LANGUAGE_DTYPES:
        return f"the gradient is {dtype}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    if total.tensor.dtype.text not in TRITON_LANGUAGE_DTYPES:
        return f"the total is {total.tensor.dtype.text}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    return EmbeddingGrad(width, dtype, total.tensor.dtype.text)


def build(name: str, problem: EmbeddingGrad, cut: Tuning | None = None) -> KernelSpec:
    """The site `total = name(total, grad, ids, order)`, in place: total [V, width], grad [..., width], ids i32 [T]
    (rows of total in ascending order; those from V on name none), order i64 [T] (rows of grad)."""
    cut = cut or tuning(problem)
    columns = ("cdiv", problem.width, cut.columns)
    shape = (cut.num_warps, 1, problem.aligned)  # one stage: loops end where the tokens say
    args = ("total", "grad", "ids", "order", "partial", "T", "V")
    return KernelSpec(
        name=name,
        source=_source(name, problem, cut),
        twin=_twin(name, problem),
        inputs=(
            TensorSpec("total", problem.total, ("V", problem.width)),
            TensorSpec("grad", problem.grad, ("*", problem.width)),
            TensorSpec("ids", "i32", ("T",)),
            TensorSpec("order", "i64", ("T",)),
        ),
        outputs=(TensorSpec("sum", problem.total, ("V", problem.width), alias="total"),),
        scratch=(TensorSpec("partial", "f32", ("windows", problem.width)),),
        launches=(
            Launch(f"{name}_rows", args, ("T", columns), *shape),
            Launch(f"{name}_windows", ("total", "ids", "partial", "T", "V"), ("windows", columns), *shape),
        ),
        dims={"windows": ("cdiv", "T", cut.window)},
    )


def _source(name: str, problem: EmbeddingGrad, cut: Tuning) -> str:
    width, window = problem.width, cut.window
    ragged = width % cut.columns != 0
    mask = f", mask=column < {width}" if ragged else ""
    low = problem.total != "f32"
    widened, stored = ".to(tl.float32)" * low, f".to(tl.{TRITON_LANGUAGE_DTYPES[problem.total]})" * low
    tile = f"same[:, None] & (column < {width})[None, :]" if ragged else "same[:, None]"
    return f'''
@triton.jit
def {name}_rows(total_ptr, grad_ptr, ids_ptr, order_ptr, partial_ptr, T, V):
    """Sums of rows of one id, from sorted place p to the end of its run or window; {cut.columns} columns per program.

    total[ids[p]] += sum of grad[order[i]]         where a run begins
    partial[p / {window}]  = sum of grad[order[i]]         where a window of {window} begins within a run
    """
    place = tl.program_id(0)
    token = tl.load(ids_ptr + place)
    before = tl.load(ids_ptr + place - 1, mask=place > 0, other=-1)
    if ((token != before) | (place % {window} == 0)) & (token < V):
        column = tl.program_id(1) * {cut.columns} + tl.arange(0, {cut.columns})
        end = tl.minimum(place - place % {window} + {window}, T)
        total = tl.zeros([{cut.columns}], dtype=tl.float32)
        start = place
        found = {cut.rows}
        while found == {cut.rows}:
            row = start + tl.arange(0, {cut.rows})
            same = tl.load(ids_ptr + row, mask=row < end, other=-1) == token
            source = tl.load(order_ptr + row, mask=same, other=0)
            element = source[:, None] * {width} + column[None, :]
            grad = tl.load(grad_ptr + element, mask={tile}, other=0.0)
            total += tl.sum(grad.to(tl.float32), axis=0)
            found = tl.sum(same.to(tl.int32), axis=0)
            start += {cut.rows}
        if token != before:
            target = total_ptr + token.to(tl.int64) * {width} + column
            total += tl.load(target{mask}){widened}
            tl.store(target, total{stored}{mask})
        else:
            tl.store(partial_ptr + (place // {window}).to(tl.int64) * {width} + column, total{mask})


@triton.jit
def {name}_windows(total_ptr, ids_ptr, partial_ptr, T, V):
    """Add the sums of the windows that begin within one run to the total, {cut.columns} columns per program."""
    window = tl.program_id(0)
    token = tl.load(ids_ptr + window * {window})
    before = tl.load(ids_ptr + window * {window} - 1, mask=window > 0, other=-1)
    # Whether the window before this one began within the same run, too.
    earlier = tl.load(ids_ptr + (window - 1) * {window} - 1, mask=window > 1, other=-1)
    if (token == before) & (token != earlier) & (token < V):
        column = tl.program_id(1) * {cut.columns} + tl.arange(0, {cut.columns})
        total = tl.zeros([{cut.columns}], dtype=tl.float32)
        found = {cut.rows}
        while found == {cut.rows}:
            row = window + tl.arange(0, {cut.rows})
            same = tl.load(ids_ptr + row * {window}, mask=row < tl.cdiv(T, {window}), other=-1) == token
            element = row.to(tl.int64)[:, None] * {width} + column[None, :]
            part = tl.load(partial_ptr + element, mask={tile}, other=0.0)
            total += tl.sum(part, axis=0)
            found = tl.sum(same.to(tl.int32), axis=0)
            window += {cut.rows}
        target = total_ptr + token.to(tl.int64) * {width} + column
        total += tl.load(target{mask}){widened}
        tl.store(target, total{stored}{mask})
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
