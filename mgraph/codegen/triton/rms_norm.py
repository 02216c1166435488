"""RMS normalisation, forward and backward, as Triton source and torch twin, specialised by size and dtypes.

    rstd = 1 / sqrt(mean(x * x) + eps)                 over the last dim, in f32
    y    = cast(cast(x * rstd) * (weight + offset))    round = "normed": to x's dtype also before the weight product
    y    = cast(x * rstd * (weight + offset))          round = "product": to x's dtype once

and with n = x * rstd and g = dy * (weight + offset), in f32,

    dx      = (g - n * mean(g * n)) * rstd
    dweight = sum over rows of dy * n                  n rounded as in the forward

The GPU backward is persistent: a fixed number of programs loop over the rows, each keeps its own sum for dweight, and a
second small launch adds these partial sums in a fixed order, so results repeat from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgraph.codegen.triton.kernel import ITEM_BYTES, TRITON_LANGUAGE_DTYPES, KernelSpec, Launch, TensorSpec
from mgraph.ir.graph import Node, Value

TORCH_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
WIDE = "f32"
"""The dtype that statistics are computed in."""

LARGEST_SIZE = 16384
"""Above this a row no longer fits the registers of one block of threads."""

LARGEST_NORM = 1024
"""Up to this size the twin takes torch's vector norm, which needs no tensor of squares; it adds a row in few partial
sums, and beyond this size their rounding would show (2e-6 relative at 16,384)."""

REDUCE_ROWS, REDUCE_COLUMNS = 256, 32
"""Tile of the launch that adds the partial sums: 32 columns of f32 are one 128-byte line, and of one program on each
multiprocessor all parts are on the way at once."""

ON_THE_WAY, MOST_STAGES = 96 * 1024, 8
"""Bytes of rows that a multiprocessor has on the way in a backward, which every GPU has the shared memory for."""


@dataclass(frozen=True)
class RmsNorm:
    """One instance of the op: normalised size, dtypes of x (also y's) and weight, and the attributes of `rms_norm`."""

    size: int
    x: str
    weight: str
    eps: float
    round: str = "product"
    offset: float = 0.0

    @property
    def rounds_normed(self) -> bool:
        """Whether x * rstd is rounded before the weight product; in the wide dtype that changes nothing."""
        return self.round == "normed" and self.x != WIDE

    @property
    def block(self) -> int:
        """The size rounded up to a power of two, as Triton's tiles require."""
        return 1 << (self.size - 1).bit_length()

    @property
    def aligned(self) -> bool:
        """Whether every row starts on a 16-byte boundary when the tensor does."""
        return all(self.size * ITEM_BYTES[dtype] % 16 == 0 for dtype in (self.x, self.weight))


def problem_of(node: Node) -> RmsNorm | str:
    """The instance that a node `rms_norm` or `rms_norm_grad` is, or why there is no kernel for it."""
    problem = instance(node, *(node.operands[:2] if node.op == "rms_norm" else node.operands[1:3]))
    return problem if isinstance(problem, str) else refusal(problem) or problem


def instance(node: Node, x: Value, weight: Value) -> RmsNorm | str:
    """The instance of a node with the attributes of `rms_norm` that normalises x."""
    size = x.tensor.shape[-1]
    if not isinstance(size, int):
        return f"the normalised dim {size} is not a known number"
    return RmsNorm(
        size=size,
        x=x.tensor.dtype.text,
        weight=weight.tensor.dtype.text,
        eps=float(node.attrs["eps"]),  # type: ignore[arg-type]
        round=str(node.attrs.get("round", "product")),
        offset=float(node.attrs.get("offset", 0.0)),  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class Tuning:
    """How a kernel is cut: rows per tile, warps, load stages in flight, and programs per multiprocessor (backward)."""

    rows: int
    num_warps: int
    num_stages: int = 1
    programs_per_sm: int = 1


def refusal(problem: RmsNorm) -> str | None:
    """Why this template has no GPU kernel for a problem, or None if it has one."""
    for role, dtype in (("x", problem.x), ("weight", problem.weight)):
        if dtype not in TRITON_LANGUAGE_DTYPES:
            return f"{role} is {dtype}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    if problem.size > LARGEST_SIZE:
        return f"the normalised size is {problem.size}; the kernel keeps a row in registers, up to {LARGEST_SIZE}"
    return None


def forward_tuning(problem: RmsNorm) -> Tuning:
    """At least 2,048 elements per tile, so that each thread moves 16 bytes at a time; more warps for long rows."""
    rows = max(1, 2048 // problem.block)
    return Tuning(rows, num_warps=min(16, max(4, rows * problem.block // 512)))


def backward_tuning(problem: RmsNorm, tensors: int = 2) -> Tuning:
    """One program on each multiprocessor, so that there are few parts of dweight, with rows of so many `tensors` on the
    way as have room: their bytes, not warps, hide what memory takes."""
    rows = max(1, 2048 // problem.block)
    stage = rows * problem.block * ITEM_BYTES[problem.x] * tensors
    stages = min(MOST_STAGES, 1 + ON_THE_WAY // stage)
    return Tuning(rows, min(16, max(8, rows * problem.block // 256)), stages, programs_per_sm=1)


def forward(name: str, problem: RmsNorm, tuning: Tuning | None = None) -> KernelSpec:
    """The site `y, rstd = name(x, weight)`: x [..., size], weight [size] → y [..., size], rstd [..., 1]."""
    cut = tuning or forward_tuning(problem)
    args, grid = ("x", "weight", "y", "rstd", "rows"), (("cdiv", "rows", cut.rows),)
    return KernelSpec(
        name=name,
        source=_forward_source(name, problem, cut),
        twin=_forward_twin(name, problem),
        inputs=(TensorSpec("x", problem.x, ("*", problem.size)), TensorSpec("weight", problem.weight, (problem.size,))),
        outputs=(TensorSpec("y", problem.x, ("*", problem.size)), TensorSpec("rstd", WIDE, ("*", 1))),
        scratch=(),
        launches=(Launch(name, args, grid, cut.num_warps, cut.num_stages, problem.aligned),),
    )


def backward(name: str, problem: RmsNorm, tuning: Tuning | None = None) -> KernelSpec:
    """The site `dx, dweight = name(dy, x, weight, rstd)`: dweight [size] has weight's dtype, dx is like x."""
    cut = tuning or backward_tuning(problem)
    size = problem.size
    args = ("dy", "x", "weight", "rstd", "dx", "partial", "rows")
    return KernelSpec(
        name=name,
        source=_backward_source(name, problem, cut),
        twin=_backward_twin(name, problem),
        inputs=(
            TensorSpec("dy", problem.x, ("*", size)),
            TensorSpec("x", problem.x, ("*", size)),
            TensorSpec("weight", problem.weight, (size,)),
            TensorSpec("rstd", WIDE, ("*", 1)),
        ),
        outputs=(TensorSpec("dx", problem.x, ("*", size)), TensorSpec("dweight", problem.weight, (size,))),
        scratch=(TensorSpec("partial", "f32", ("programs", size)),),
        launches=(
            Launch(f"{name}_rows", args, ("programs",), cut.num_warps, cut.num_stages, problem.aligned),
            sum_launch(name, problem),
        ),
        dims={"programs": ("min", ("cdiv", "rows", cut.rows), ("mul", "sms", cut.programs_per_sm))},
    )


def sum_launch(name: str, problem: RmsNorm) -> Launch:
    """The launch of `sum_source`."""
    grid = (("cdiv", problem.size, REDUCE_COLUMNS),)
    return Launch(f"{name}_sum", ("partial", "dweight", "programs"), grid, 8, 1, problem.aligned)


def formula(problem: RmsNorm, x: str = "x") -> str:
    """The formula of y with its numbers, for docstrings."""
    scale = f"(weight + {problem.offset!r})" if problem.offset else "weight"
    normed = f"{x} * rsqrt(mean({x} * {x}) + {problem.eps!r})"
    return f"cast(cast({normed}) * {scale})" if problem.round == "normed" else f"cast({normed} * {scale})"


def tile_masks(problem: RmsNorm, rows: int) -> tuple[str, str, str]:
    """Mask arguments for tiles, for one value per row and for columns; empty where nothing can overrun."""
    in_rows = "row < rows" if rows > 1 else ""
    in_columns = f"column < {problem.size}" if problem.block != problem.size else ""
    parts = [f"({in_rows})[:, None]"] * bool(in_rows) + [f"({in_columns})[None, :]"] * bool(in_columns)
    return (
        f", mask={' & '.join(parts)}" if parts else "",
        f", mask={in_rows}" if in_rows else "",
        f", mask={in_columns}" if in_columns else "",
    )


def zero_outside(mask: str) -> str:
    """A masked load must define what it reads outside: zero adds nothing to any sum here."""
    return f"{mask}, other=0.0" if mask else ""


def scaled_weight(problem: RmsNorm, weight: str) -> str:
    """`weight + offset`, where `weight` is wide already."""
    return f"{weight} + {problem.offset!r}" if problem.offset else weight


def rounded_normed(value: str, problem: RmsNorm) -> str:
    """`value` rounded to x's dtype and back to f32 where the forward rounds x * rstd."""
    if not problem.rounds_normed:
        return value
    return f"{value}.to(tl.{TRITON_LANGUAGE_DTYPES[problem.x]}).to(tl.float32)"


def bracketed(text: str) -> str:
    """`text` in brackets unless it is a single name."""
    return text if text.isidentifier() else f"({text})"


def _forward_source(name: str, problem: RmsNorm, cut: Tuning) -> str:
    tile, row, column = tile_masks(problem, cut.rows)
    return f'''
@triton.jit
def {name}(x_ptr, weight_ptr, y_ptr, rstd_ptr, rows):
    """y and rstd, {cut.rows} row(s) of {problem.size} per program.

    y = {formula(problem)}
    """
    row = tl.program_id(0) * {cut.rows} + tl.arange(0, {cut.rows})
    column = tl.arange(0, {problem.block})
    element = row.to(tl.int64)[:, None] * {problem.size} + column[None, :]
    x = tl.load(x_ptr + element{zero_outside(tile)}).to(tl.float32)
    weight = tl.load(weight_ptr + column{zero_outside(column)}).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / {problem.size} + {problem.eps!r})
    normed = x * rstd[:, None]
    y = {rounded_normed("normed", problem)} * {bracketed(scaled_weight(problem, "weight"))}[None, :]
    tl.store(y_ptr + element, y.to(tl.{TRITON_LANGUAGE_DTYPES[problem.x]}){tile})
    tl.store(rstd_ptr + row, rstd{row})
'''


def _backward_source(name: str, problem: RmsNorm, cut: Tuning) -> str:
    tile, row, column = tile_masks(problem, cut.rows)
    x_dtype = TRITON_LANGUAGE_DTYPES[problem.x]
    return f'''
@triton.jit
def {name}_rows(dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, rows):
    """dx, and this program's part of dweight, {cut.rows} row(s) at a time.

    y = {formula(problem)}
    """
    program = tl.program_id(0)
    column = tl.arange(0, {problem.block})
    weight = tl.load(weight_ptr + column{zero_outside(column)}).to(tl.float32)
    scale = {scaled_weight(problem, "weight")}
    dweight = tl.zeros([{cut.rows}, {problem.block}], dtype=tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, {cut.rows}), tl.num_programs(0), num_stages={cut.num_stages}):
        row = tile * {cut.rows} + tl.arange(0, {cut.rows})
        element = row.to(tl.int64)[:, None] * {problem.size} + column[None, :]
        x = tl.load(x_ptr + element{zero_outside(tile)}).to(tl.float32)
        dy = tl.load(dy_ptr + element{zero_outside(tile)}).to(tl.float32)
        rstd = tl.load(rstd_ptr + row{zero_outside(row)})[:, None]
        normed = x * rstd
        dweight += dy * {rounded_normed("normed", problem)}
        dnormed = dy * scale[None, :]
        mean = tl.sum(dnormed * normed, axis=1)[:, None] / {problem.size}
        dx = (dnormed - normed * mean) * rstd
        tl.store(dx_ptr + element, dx.to(tl.{x_dtype}){tile})
    tl.store(partial_ptr + program.to(tl.int64) * {problem.size} + column, tl.sum(dweight, axis=0){column})

{sum_source(name, problem)}'''


def sum_source(name: str, problem: RmsNorm) -> str:
    """The function that adds the programs' parts of dweight, in a fixed order."""
    weight_dtype = TRITON_LANGUAGE_DTYPES[problem.weight]
    return f'''
@triton.jit
def {name}_sum(partial_ptr, dweight_ptr, programs):
    """dweight: the sum of all programs' parts, {REDUCE_COLUMNS} columns per program."""
    column = tl.program_id(0) * {REDUCE_COLUMNS} + tl.arange(0, {REDUCE_COLUMNS})
    total = tl.zeros([{REDUCE_ROWS}, {REDUCE_COLUMNS}], dtype=tl.float32)
    for start in range(0, programs, {REDUCE_ROWS}):
        row = start + tl.arange(0, {REDUCE_ROWS})
        inside = (row < programs)[:, None] & (column < {problem.size})[None, :]
        total += tl.load(partial_ptr + row[:, None] * {problem.size} + column[None, :], mask=inside, other=0.0)
    dweight = tl.sum(total, axis=0).to(tl.{weight_dtype})
    tl.store(dweight_ptr + column, dweight, mask=column < {problem.size})
'''


def _torch(dtype: str) -> str:
    return f"torch.{TORCH_DTYPES[dtype]}"


def _cast(value: str, source: str, target: str) -> str:
    """`value` as `target`; nothing where it has that dtype already."""
    return value if source == target else f"{value}.to({_torch(target)})"


def _forward_twin(name: str, problem: RmsNorm) -> str:
    size = problem.size
    scale = scaled_weight(problem, _cast("weight", problem.weight, WIDE))
    mean = "wide.square().mean(-1, keepdim=True)"
    if size <= LARGEST_NORM:
        mean = f"torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_({size})"
    normed = "(wide * rstd)"
    # In-place products are computed in the wider of the two dtypes and rounded to that of the left side.
    y = f"{_cast(normed, WIDE, problem.x)}.mul_({scale})"
    if not problem.rounds_normed:
        y = _cast(f"{normed}.mul_({scale})", WIDE, problem.x)
    return f'''
def {name}(x, weight):
    """y = {formula(problem)}, and rstd [..., 1]."""
    wide = {_cast("x", problem.x, WIDE)}
    mean = {mean}
    rstd = mean.add_({problem.eps!r}).rsqrt_()
    return {y}, rstd
'''


def _backward_twin(name: str, problem: RmsNorm) -> str:
    size = problem.size
    head = f'''
def {name}(dy, x, weight, rstd):
    """dx and dweight of y, from rstd of the forward.

    y = {formula(problem)}
    """
    wide_dy = {_cast("dy", problem.x, WIDE)}
    scale = {scaled_weight(problem, _cast("weight", problem.weight, WIDE))}
    normed = {_cast("x", problem.x, WIDE)} * rstd
'''
    if problem.rounds_normed:
        rounded = _cast(_cast("normed", WIDE, problem.x), problem.x, WIDE)
        body = f"""    dweight = (wide_dy * {rounded}).reshape(-1, {size}).sum(0)
    dx = wide_dy * scale
    mean = (dx * normed).mean(-1, keepdim=True)
"""
    else:
        body = f"""    product = wide_dy * normed
    dweight = product.reshape(-1, {size}).sum(0)
    mean = (product @ scale).div_({size}).unsqueeze(-1)
    # The product has been used up: dx takes its memory.
    dx = torch.mul(wide_dy, scale, out=product)
"""
    results = f"{_cast('dx', WIDE, problem.x)}, {_cast('dweight', WIDE, problem.weight)}"
    return f"""{head}{body}    dx.addcmul_(normed, mean, value=-1).mul_(rstd)
    return {results}
"""
