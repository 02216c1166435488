"""Products of a few rows with a weight, as Triton source and torch twin: what decoding spends its time in.

    y = x w^T (+ bias) (+ residual)          x [..., size], w [columns, size], y [..., columns]
    y = glu(x gate^T, x up^T)                gate, up [columns, size]; the unit as in `glu.py`

summed in f32 and rounded once. With 1 to 16 rows all time goes into reading the weight, so programs are many and small,
each with enough loads on the way, and x is read by each again: it lies in the L2 cache. One row is multiplied
by elements and summed at the end, which needs no shared memory; more go through the tensor cores, padded to 16 rows.
What a row gives does not depend on how many others go the same way. Any number is right in both, and slow past theirs.

`fixed` has one way for any number, so that what a row gives never depends on it (`--batch-invariant`): tiles of 64
rows, whose sums run along a row in one order. Tiles of rows then stand first in the grid, so that a weight is read
once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mgraph.codegen.triton import glu
from mgraph.codegen.triton.glu import Glu, forward_lines
from mgraph.codegen.triton.kernel import ITEM_BYTES, TRITON_LANGUAGE_DTYPES, Expression, KernelSpec, Launch, TensorSpec
from mgraph.ir.graph import Node

ROWS = 16
"""Rows of a tile of the tensor cores."""

FIXED_ROWS, FIXED_PROGRAMS = 64, 128
"""Rows of a tile where there is one way for any number: what a group of warps multiplies at once. And how many programs
are enough for the multiprocessors."""

LONG, FIXED_NARROW = 8192, 2048
"""A sum that is longer has more on the way, if there are too few programs for that; and weights with fewer columns have
narrow tiles, so that there are more."""

MORE_ROWS: Expression = ("min", 1, ("max", 0, ("add", "rows", -1)))
"""1 where there are more rows than one, else 0."""
ONE_ROW: Expression = ("add", 1, ("mul", -1, MORE_ROWS))


@dataclass(frozen=True)
class FewRows:
    """One product: extents, the dtype of all tensors, and what is done with the sums: a `bias` [columns] and a
    `residual` [..., columns] are added, or the unit `glu` is made of those of two weights."""

    size: int
    columns: int
    dtype: str
    bias: bool = False
    residual: bool = False
    glu: Glu | None = None
    turned: bool = False
    """Whether the weight is [size, columns] and the bias comes first, as `addmm` has them; of tall tiles alone."""

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights."""
        return ("gate", "up") if self.glu else ("weight",)

    @property
    def operands(self) -> tuple[str, ...]:
        """What the site takes."""
        if self.turned:
            return "bias", "x", "weight"
        return ("x", *self.weights, *["bias"] * self.bias, *["residual"] * self.residual)

    @property
    def aligned(self) -> bool:
        """Whether every row of x and of the weights starts on a 16-byte boundary when the tensor does."""
        widths = (self.size, self.columns) if self.turned else (self.size,)
        return all(width * ITEM_BYTES[self.dtype] % 16 == 0 for width in widths)


def problem_of(node: Node) -> FewRows | str:
    """The instance that a node `linear` or `linear_glu` is, or why the kernels for a few rows do not take it."""
    problem = instance_of(node)
    if isinstance(problem, FewRows) and problem.dtype not in ("bf16", "f16"):
        return f"the operands are {problem.dtype}; the tensor cores take bf16 and f16"
    return problem


def instance_of(node: Node) -> FewRows | str:
    """The instance that a node `linear`, `linear_glu` or `addmm` is, of any dtype that Triton has, or why there is
    none."""
    dtypes = {value.tensor.dtype.text for value in node.operands}
    dtype = node.operands[0].tensor.dtype.text
    if len(dtypes) > 1:
        return f"the operands are {' and '.join(sorted(dtypes))}; the kernel takes one dtype"
    if dtype not in TRITON_LANGUAGE_DTYPES:
        return f"the operands are {dtype}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    if node.op == "aten.addmm.default":
        return _turned_of(node)
    columns, size = node.operands[1].tensor.shape
    if not isinstance(columns, int) or not isinstance(size, int):
        return f"the weight is [{columns}, {size}], which are no known numbers"
    if node.op == "linear":
        extra: Any = node.attrs.get("extra", ())
        return FewRows(size, columns, dtype, bias="bias" in extra, residual="residual" in extra)
    unit = glu.problem_of(replace(node.with_values((node.result, node.result), node.results), op="glu"))
    return unit if isinstance(unit, str) else FewRows(size, columns, dtype, glu=unit)


def _turned_of(node: Node) -> FewRows | str:
    bias, x, weight = (value.tensor for value in node.operands)
    size, columns = weight.shape
    if not isinstance(columns, int) or not isinstance(size, int):
        return f"the weight is [{size}, {columns}], which are no known numbers"
    if node.attrs or bias.shape != (columns,):
        return f"the kernel adds a number to each column, not {bias} with {dict(node.attrs)}"
    return FewRows(size, columns, x.dtype.text, bias=True, turned=True)


@dataclass(frozen=True)
class Tuning:
    """How a launch is cut: rows of a program (1, or 16 and more for the tensor cores), columns, elements of a row at
    once (powers of two), warps, and stages."""

    rows: int
    columns: int
    part: int
    num_warps: int
    num_stages: int

    @property
    def tall(self) -> bool:
        """Whether tiles are for many rows: those of the same columns then run at the same time."""
        return self.rows > ROWS


def tunings(problem: FewRows) -> tuple[Tuning, ...]:
    """For one row a program a column, 4 KB of each weight at once; for more, which only units take, 64 columns.

    As measured on an H200, over shapes of Llama 1B and 8B: one row at 0.5 (4 MB) to 1.0 (100 MB and more) of what a
    copy moves, where cuBLAS reaches 0.25 to 0.95. Products of two to sixteen rows without a unit cuBLAS makes as fast.
    """
    one = Tuning(1, 1, 2048, 4, 1)
    return (one, Tuning(ROWS, 64, 128, 4, 4)) if problem.glu else (one,)


def forward(name: str, problem: FewRows, *cuts: Tuning) -> KernelSpec:
    """The site `y = name(x, weight[, bias][, residual])` or `y = name(x, gate, up)`, with the cuts of `tunings` where
    none are given: of two, the first is for one row and the second for more."""
    cuts = cuts or tunings(problem)
    vector, row = (problem.columns,), ("*", problem.columns)
    shapes = {"x": ("*", problem.size), "bias": vector, "residual": row}
    matrix = (problem.columns, problem.size)
    shapes |= dict.fromkeys(problem.weights, matrix[::-1] if problem.turned else matrix)
    assert not problem.turned or all(cut.rows > 1 for cut in cuts), "of one row the weight is read along its rows"
    sources, launches = [], []
    for cut, when in zip(cuts, (1,) if len(cuts) == 1 else (ONE_ROW, MORE_ROWS), strict=True):
        way, source = ("one", _one_row_source) if cut.rows == 1 else ("rows", _rows_source)
        grid: tuple[Expression, ...] = (-(-problem.columns // cut.columns), ("cdiv", "rows", cut.rows))
        grid = grid[::-1] if cut.tall else grid
        args = (*problem.operands, "y", "rows")
        sources.append(source(f"{name}_{way}", problem, cut))
        launches.append(Launch(f"{name}_{way}", args, grid, cut.num_warps, cut.num_stages, problem.aligned, when=when))
    return KernelSpec(
        name=name,
        source="\n".join(sources),
        twin=_twin(name, problem),
        inputs=tuple(TensorSpec(operand, problem.dtype, shapes[operand]) for operand in problem.operands),
        outputs=(TensorSpec("y", problem.dtype, row),),
        scratch=(),
        launches=tuple(launches),
    )


def fixed_tuning(problem: FewRows) -> Tuning:
    """One cut for any number of rows, by the weight alone.

    As measured on an H200, over shapes of Llama 8B: 1.0 (head) to 1.5 times cuBLAS for up to 128 rows, and 1.4 to 2.6
    times for 2048, where its tiles are larger.
    """
    if problem.dtype == "f32":
        return Tuning(ROWS, 32, 32, 4, 2)
    if problem.columns < FIXED_NARROW:
        return Tuning(FIXED_ROWS, 32, 128, 4, 4)
    few = problem.columns < FIXED_PROGRAMS * 64
    columns = 128 if not problem.glu and problem.columns >= FIXED_PROGRAMS * 128 else 64
    return Tuning(FIXED_ROWS, columns, 128 if few and problem.size > LONG else 64, 4, 4)


def fixed(name: str, problem: FewRows) -> KernelSpec:
    """The site of `forward` in one cut."""
    return forward(name, problem, fixed_tuning(problem))


def _formula(problem: FewRows) -> str:
    if problem.glu:
        return f"{problem.glu.act} unit of x gate^T and x up^T"
    return f"x weight{'' if problem.turned else '^T'}" + " + bias" * problem.bias + " + residual" * problem.residual


def _signature(problem: FewRows) -> str:
    return ", ".join([*(f"{name}_ptr" for name in (*problem.operands, "y")), "rows"])


def _column_lines(problem: FewRows, cut: Tuning) -> list[str]:
    return [
        f"column = tl.program_id({int(cut.tall)}) * {cut.columns} + tl.arange(0, {cut.columns})",
        *([f"inside = column < {problem.columns}"] if problem.columns % cut.columns else []),
    ]


def _mask(*parts: str) -> str:
    kept = [part for part in parts if part]
    return f", mask={' & '.join(kept)}, other=0.0" if kept else ""


def _one_row_source(name: str, problem: FewRows, cut: Tuning) -> str:
    """Columns of the weight lie along the first dim, and parts of a row along the second."""
    within = f"(k < {problem.size})" if problem.size % cut.part else ""
    inside = "inside[:, None]" if problem.columns % cut.columns else ""
    lines = ["row = tl.program_id(1).to(tl.int64)", *_column_lines(problem, cut)]
    lines += [f"{w}_sums = tl.zeros([{cut.columns}, {cut.part}], dtype=tl.float32)" for w in problem.weights]
    lines += [
        f"element = column.to(tl.int64)[:, None] * {problem.size}",
        f"for start in tl.range(0, {problem.size}, {cut.part}, num_stages={cut.num_stages}):",
        f"    k = start + tl.arange(0, {cut.part})",
        f"    x = tl.load(x_ptr + row * {problem.size} + k{_mask(within)}).to(tl.float32)",
    ]
    for w in problem.weights:
        mask = _mask(inside, f"{within}[None, :]" if within else "")
        load = f'tl.load({w}_ptr + element + k[None, :]{mask}, eviction_policy="evict_first")'
        lines += [f"    {w} = {load}", f"    {w}_sums += {w}.to(tl.float32) * x[None, :]"]
    lines += [f"{w} = tl.sum({w}_sums, axis=1)" for w in problem.weights]
    masked = ", mask=inside" if inside else ""
    lines += _end_lines(problem, "column", f"row * {problem.columns} + column", masked, masked)
    return _function(name, problem, f"One row; {cut.columns} column(s) per program.", lines)


def _rows_source(name: str, problem: FewRows, cut: Tuning) -> str:
    """Rows lie along the first dim, columns of the weight along the second."""
    within = f"(k < {problem.size})" if problem.size % cut.part else ""
    inside = "inside[None, :]" if problem.columns % cut.columns else ""
    exact = ', input_precision="ieee"' if problem.dtype == "f32" else ""
    once = "" if cut.tall else ', eviction_policy="evict_first"'
    x_mask = _mask("(row < rows)[:, None]", f"{within}[None, :]" if within else "")
    rows = f"row = tl.program_id({int(not cut.tall)}) * {cut.rows} + tl.arange(0, {cut.rows})"
    lines = [rows, *_column_lines(problem, cut)]
    lines += [f"{w} = tl.zeros([{cut.rows}, {cut.columns}], dtype=tl.float32)" for w in problem.weights]
    along, at = f" * {problem.size}", "k[:, None]"
    if problem.turned:
        along, at = "", f"k.to(tl.int64)[:, None] * {problem.columns}"
    lines += [
        f"element = column.to(tl.int64)[None, :]{along}",
        f"x_element = row.to(tl.int64)[:, None] * {problem.size}",
        f"for start in tl.range(0, {problem.size}, {cut.part}, num_stages={cut.num_stages}):",
        f"    k = start + tl.arange(0, {cut.part})",
        f"    x = tl.load(x_ptr + x_element + k[None, :]{x_mask})",
    ]
    for w in problem.weights:
        mask = _mask(inside, f"{within}[:, None]" if within else "")
        load = f"tl.load({w}_ptr + element + {at}{mask}{once})"
        lines += [f"    {w}_part = {load}", f"    {w} = tl.dot(x, {w}_part, {w}{exact})"]
    masks = ["(row < rows)[:, None]", *([inside] if inside else [])]
    place = f"row.to(tl.int64)[:, None] * {problem.columns} + column[None, :]"
    masked = ", mask=inside" if inside else ""
    lines += _end_lines(problem, "column", place, masked, f", mask={' & '.join(masks)}", wide=True)
    return _function(name, problem, f"{cut.rows} rows by {cut.columns} columns per program.", lines)


def _end_lines(
    problem: FewRows, column: str, place: str, column_mask: str, mask: str, *, wide: bool = False
) -> list[str]:
    """From sums to what is stored."""
    lines = [f"place = {place}"]
    if problem.glu:
        lines += forward_lines(problem.glu)
    else:
        lines.append("y = weight")
    if problem.bias:
        lines.append(
            f"y += tl.load(bias_ptr + {column}{column_mask}).to(tl.float32){'[None, :]' * wide}",
        )
    if problem.residual:
        lines.append(f"y += tl.load(residual_ptr + place{mask}).to(tl.float32)")
    return [*lines, f"tl.store(y_ptr + place, y.to(tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]}){mask})"]


def _function(name: str, problem: FewRows, shape: str, lines: list[str]) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f'''
@triton.jit
def {name}({_signature(problem)}):
    """{shape}

    y = {_formula(problem)}
    """
{body}'''


def _twin(name: str, problem: FewRows) -> str:
    def product(weight: str) -> str:
        if problem.turned:
            return "torch.addmm(bias, x, weight)"
        return f"torch.nn.functional.linear(x, {weight}{', bias' * problem.bias})"

    if problem.glu:
        unit = problem.glu
        options = f', act="{unit.act}"' + f", alpha={unit.alpha!r}" * (unit.act == "quick_gelu")
        options += f", limit={unit.limit!r}" * bool(unit.limit) + f", offset={unit.offset!r}" * bool(unit.offset)
        made = f"rt.glu({product('gate')}, {product('up')}{options})"
    else:
        made = product("weight") + " + residual" * problem.residual
    return f'''
def {name}({", ".join(problem.operands)}):
    """{_formula(problem)}."""
    return {made}
'''
