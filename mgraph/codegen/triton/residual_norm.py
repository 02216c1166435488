"""RMS normalisation of a sum, forward and backward, as Triton source and torch twin, specialised by size and dtypes.

    sum  = x + residual                                  in f32, rounded to x's dtype
    y, rstd = rms_norm(sum, weight)                      of the rounded sum, as in `rms_norm.py`

and with n = sum * rstd and g = dy * (weight + offset), in f32, dx rounded once,

    dx      = dsum + (g - n * mean(g * n)) * rstd        the gradient of x and of residual
    dweight = sum over rows of dy * n                    n rounded as in the forward

A sum that is normalised is written once and not read again, and its gradient from behind is added where the norm's is
made: four tensors of x's size go through memory each way, where a norm and a sum apart move five and six.
"""

from __future__ import annotations

from mgraph.codegen.triton.kernel import TRITON_LANGUAGE_DTYPES, KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.rms_norm import (
    RmsNorm,
    Tuning,
    backward_tuning,
    bracketed,
    formula,
    forward_tuning,
    instance,
    refusal,
    rounded_normed,
    scaled_weight,
    sum_launch,
    sum_source,
    tile_masks,
    zero_outside,
)
from mgraph.ir.graph import Node


def problem_of(node: Node) -> RmsNorm | str:
    """The instance that a node `add_rms_norm` or `add_rms_norm_grad` is, or why there is no kernel for it."""
    problem = instance(node, *node.operands[2:4]) if node.op == "add_rms_norm_grad" else _forward_instance(node)
    return problem if isinstance(problem, str) else refusal(problem) or problem


def _forward_instance(node: Node) -> RmsNorm | str:
    x, residual, weight = node.operands
    if x.tensor.dtype is not residual.tensor.dtype:
        return f"x is {x.tensor.dtype.text} but residual is {residual.tensor.dtype.text}"
    return instance(node, x, weight)


def forward(name: str, problem: RmsNorm, tuning: Tuning | None = None) -> KernelSpec:
    """The site `total, y, rstd = name(x, residual, weight)`: all [..., size] but weight [size] and rstd [..., 1]."""
    cut = tuning or forward_tuning(problem)
    args = ("x", "residual", "weight", "total", "y", "rstd", "rows")
    rows, size = ("*", problem.size), problem.size
    return KernelSpec(
        name=name,
        source=_forward_source(name, problem, cut),
        twin=_twin(name, problem, "add_rms_norm", ("x", "residual", "weight")),
        inputs=(
            TensorSpec("x", problem.x, rows),
            TensorSpec("residual", problem.x, rows),
            TensorSpec("weight", problem.weight, (size,)),
        ),
        outputs=(
            TensorSpec("total", problem.x, rows),
            TensorSpec("y", problem.x, rows),
            TensorSpec("rstd", "f32", ("*", 1)),
        ),
        scratch=(),
        launches=(Launch(name, args, (("cdiv", "rows", cut.rows),), cut.num_warps, cut.num_stages, problem.aligned),),
    )


def backward(name: str, problem: RmsNorm, tuning: Tuning | None = None) -> KernelSpec:
    """The site `dx, dweight = name(dy, dsum, total, weight, rstd)`: dweight [size] in weight's dtype, dx like total."""
    cut = tuning or backward_tuning(problem, tensors=3)
    args = ("dy", "dsum", "total", "weight", "rstd", "dx", "partial", "rows")
    rows, size = ("*", problem.size), problem.size
    return KernelSpec(
        name=name,
        source=_backward_source(name, problem, cut),
        twin=_twin(name, problem, "add_rms_norm_grad", ("dy", "dsum", "total", "weight", "rstd")),
        inputs=(
            TensorSpec("dy", problem.x, rows),
            TensorSpec("dsum", problem.x, rows),
            TensorSpec("total", problem.x, rows),
            TensorSpec("weight", problem.weight, (size,)),
            TensorSpec("rstd", "f32", ("*", 1)),
        ),
        outputs=(TensorSpec("dx", problem.x, rows), TensorSpec("dweight", problem.weight, (size,))),
        scratch=(TensorSpec("partial", "f32", ("programs", size)),),
        launches=(
            Launch(f"{name}_rows", args, ("programs",), cut.num_warps, cut.num_stages, problem.aligned),
            sum_launch(name, problem),
        ),
        dims={"programs": ("min", ("cdiv", "rows", cut.rows), ("mul", "sms", cut.programs_per_sm))},
    )


def _forward_source(name: str, problem: RmsNorm, cut: Tuning) -> str:
    tile, row, column = tile_masks(problem, cut.rows)
    dtype = TRITON_LANGUAGE_DTYPES[problem.x]
    return f'''
@triton.jit
def {name}(x_ptr, residual_ptr, weight_ptr, total_ptr, y_ptr, rstd_ptr, rows):
    """The sum of x and residual, its norm y, and rstd, {cut.rows} row(s) of {problem.size} per program.

    y = {formula(problem, "total")}
    """
    row = tl.program_id(0) * {cut.rows} + tl.arange(0, {cut.rows})
    column = tl.arange(0, {problem.block})
    element = row.to(tl.int64)[:, None] * {problem.size} + column[None, :]
    x = tl.load(x_ptr + element{zero_outside(tile)}).to(tl.float32)
    residual = tl.load(residual_ptr + element{zero_outside(tile)}).to(tl.float32)
    weight = tl.load(weight_ptr + column{zero_outside(column)}).to(tl.float32)
    rounded = (x + residual).to(tl.{dtype})
    tl.store(total_ptr + element, rounded{tile})
    total = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(total * total, axis=1) / {problem.size} + {problem.eps!r})
    normed = total * rstd[:, None]
    y = {rounded_normed("normed", problem)} * {bracketed(scaled_weight(problem, "weight"))}[None, :]
    tl.store(y_ptr + element, y.to(tl.{dtype}){tile})
    tl.store(rstd_ptr + row, rstd{row})
'''


def _backward_source(name: str, problem: RmsNorm, cut: Tuning) -> str:
    tile, row, column = tile_masks(problem, cut.rows)
    return f'''
@triton.jit
def {name}_rows(dy_ptr, dsum_ptr, total_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, rows):
    """dx, and this program's part of dweight, {cut.rows} row(s) at a time.

    y = {formula(problem, "total")}
    """
    program = tl.program_id(0)
    column = tl.arange(0, {problem.block})
    weight = tl.load(weight_ptr + column{zero_outside(column)}).to(tl.float32)
    scale = {scaled_weight(problem, "weight")}
    dweight = tl.zeros([{cut.rows}, {problem.block}], dtype=tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, {cut.rows}), tl.num_programs(0), num_stages={cut.num_stages}):
        row = tile * {cut.rows} + tl.arange(0, {cut.rows})
        element = row.to(tl.int64)[:, None] * {problem.size} + column[None, :]
        total = tl.load(total_ptr + element{zero_outside(tile)}).to(tl.float32)
        dy = tl.load(dy_ptr + element{zero_outside(tile)}).to(tl.float32)
        dsum = tl.load(dsum_ptr + element{zero_outside(tile)})
        rstd = tl.load(rstd_ptr + row{zero_outside(row)})[:, None]
        normed = total * rstd
        dweight += dy * {rounded_normed("normed", problem)}
        dnormed = dy * scale[None, :]
        mean = tl.sum(dnormed * normed, axis=1)[:, None] / {problem.size}
        dx = dsum.to(tl.float32) + (dnormed - normed * mean) * rstd
        tl.store(dx_ptr + element, dx.to(tl.{TRITON_LANGUAGE_DTYPES[problem.x]}){tile})
    tl.store(partial_ptr + program.to(tl.int64) * {problem.size} + column, tl.sum(dweight, axis=0){column})

{sum_source(name, problem)}'''


def _twin(name: str, problem: RmsNorm, op: str, inputs: tuple[str, ...]) -> str:
    options = f"eps={problem.eps!r}" + f", offset={problem.offset!r}" * bool(problem.offset)
    options += f', round="{problem.round}"' * (problem.round != "product")
    arguments = ", ".join(inputs)
    return f'''
def {name}({arguments}):
    """With y = {formula(problem, "total")}."""
    return rt.{op}({arguments}, {options})
'''
