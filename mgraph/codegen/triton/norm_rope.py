"""QK-norm and rotary embedding in one kernel, forward and backward, as Triton source and torch twin.

    n, rstd = rms_norm(x, weight)      as in `rms_norm.py`, n rounded to x's dtype
    y       = rope(n, cos, sin)        as in `rope.py`

and backward, with t the inverse rotation of dy, m = x * rstd and g = t * (weight + offset), in f32, rounded once,

    dx      = (g - m * mean(g * m)) * rstd
    dweight = sum over rows of t * m   m rounded as in the forward

Heads are short rows, so tiles are those of `rope.py`: what is normalised never leaves registers. The backward is
persistent: a fixed number of programs loop over the tiles, each keeps its own sum for dweight, and a second small
launch adds these in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mgraph.codegen.triton.kernel import TRITON_LANGUAGE_DTYPES, Expression, KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.rms_norm import (
    RmsNorm,
    formula,
    instance,
    refusal,
    rounded_normed,
    sum_launch,
    sum_source,
)
from mgraph.codegen.triton.rope import (
    HEADS,
    Rope,
    Tuning,
    block,
    count,
    extents,
    lines_of,
    read_pairs,
    read_tables,
    rope_instance,
    rotated,
    signature,
    strides,
    tile_lines,
    tuning,
    write_pairs,
)
from mgraph.ir.graph import Node

PROGRAMS_PER_SM = 5
"""Of four warps each, in the backward: its pairs, tables and sums take 96 registers a thread."""


@dataclass(frozen=True)
class NormRope:
    """One instance of the op: the norm and the rotation of the same rows."""

    norm: RmsNorm
    rope: Rope


def problem_of(node: Node) -> NormRope | str:
    """The instance that a node `norm_rope` or `norm_rope_grad` is, or why there is no kernel for it."""
    x, weight, cos, sin = node.operands[1:5] if node.op == "norm_rope_grad" else node.operands
    norm = instance(node, x, weight)
    if isinstance(norm, str):
        return norm
    rope = rope_instance(node, x, cos, sin)
    if isinstance(rope, str):
        return rope
    return refusal(norm) or NormRope(norm, replace(rope, inverse=False))


def forward(name: str, problem: NormRope, cut: Tuning | None = None) -> KernelSpec:
    """The site `y, rstd = name(x, weight, cos, sin)`: rstd f32 [..., 1], y like x."""
    rope, cut = problem.rope, cut or tuning(problem.rope)
    args = ("x", "weight", "cos", "sin", "y", "rstd", *extents(rope), *strides(rope, ("x",)))
    args += strides(rope, ("y",), tables=False)
    grid = (("cdiv", "positions", cut.positions), ("cdiv", HEADS, cut.heads))
    inputs = _inputs(problem)
    return KernelSpec(
        name=name,
        source=_forward_source(name, problem, cut, args),
        twin=_twin(name, problem, "norm_rope", ("x", "weight", "cos", "sin")),
        inputs=tuple(inputs[name] for name in ("x", "weight", "cos", "sin")),
        outputs=(
            TensorSpec("y", rope.x, (*rope.axes, rope.width), like="x"),
            TensorSpec("rstd", "f32", (*rope.axes, 1)),
        ),
        scratch=(),
        launches=(Launch(name, args, grid, cut.num_warps, 1, rope.aligned),),
        dims={"positions": count(rope)},
    )


def backward(name: str, problem: NormRope, cut: Tuning | None = None) -> KernelSpec:
    """The site `dx, dweight = name(dy, x, weight, cos, sin, rstd)`: dx like x, dweight [width]."""
    rope, cut = problem.rope, cut or tuning(problem.rope)
    args = ("dy", "x", "weight", "cos", "sin", "rstd", "dx", "partial", *extents(rope), "tiles")
    args += (*strides(rope, ("dy", "x")), *strides(rope, ("dx",), tables=False))
    inputs = _inputs(problem)
    tiles = ("mul", ("cdiv", "positions", cut.positions), ("cdiv", HEADS, cut.heads))
    return KernelSpec(
        name=name,
        source=_backward_source(name, problem, cut, args),
        twin=_twin(name, problem, "norm_rope_grad", ("dy", "x", "weight", "cos", "sin", "rstd")),
        inputs=tuple(inputs[name] for name in ("dy", "x", "weight", "cos", "sin", "rstd")),
        outputs=(
            TensorSpec("dx", rope.x, (*rope.axes, rope.width), like="x"),
            TensorSpec("dweight", problem.norm.weight, (rope.width,)),
        ),
        scratch=(TensorSpec("partial", "f32", ("programs", rope.width)),),
        launches=(
            Launch(f"{name}_rows", args, ("programs",), cut.num_warps, 1, rope.aligned),
            sum_launch(name, problem.norm),
        ),
        dims={
            "positions": count(rope),
            "tiles": tiles,
            "programs": ("min", "tiles", ("mul", "sms", PROGRAMS_PER_SM)),
        },
    )


def _inputs(problem: NormRope) -> dict[str, TensorSpec]:
    """All inputs of the two sites."""
    rope = problem.rope
    shape: tuple[Expression, ...] = (*rope.axes, rope.width)
    table: tuple[Expression, ...] = (*(axis or 1 for axis in rope.table_axes), rope.table_width)
    tensors = [TensorSpec(name, rope.x, shape, strided=True) for name in ("dy", "x")]
    tensors += [TensorSpec(name, rope.table, table, strided=True) for name in ("cos", "sin")]
    tensors += [TensorSpec("weight", problem.norm.weight, (rope.width,)), TensorSpec("rstd", "f32", (*rope.axes, 1))]
    return {tensor.name: tensor for tensor in tensors}


def _scales(problem: NormRope, cut: Tuning) -> list[str]:
    """The factors of the first and the second elements of the pairs; the same in every row."""
    rope, offset = problem.rope, f" + {problem.norm.offset!r}" if problem.norm.offset else ""
    pairs, size = rope.pairs, block(rope) // 2 if rope.interleaved else block(rope)
    inside = f", mask=pairs < {pairs}, other=0.0" if size != pairs else ""
    places = ("pairs * 2", "pairs * 2 + 1") if rope.interleaved else ("pairs", f"pairs + {pairs}")
    return [
        f"pairs = tl.arange(0, {size})[None, None, :]",
        *(
            f"scale_{part} = tl.load(weight_ptr + {place}{inside}).to(tl.float32){offset}"
            for part, place in zip("ab", places, strict=True)
        ),
    ]


def _rstd_place(rope: Rope) -> str:
    """Where the rstd of each row of a tile lies: contiguous in the dims of x."""
    index = {"B": "batch[:, None, None]", "S": "place[:, None, None]", HEADS: "head[None, :, None]"}
    place = index[rope.axes[0]]
    for axis in rope.axes[1:]:
        place = f"({place}) * {axis} + {index[axis]}"
    return place


def _forward_source(name: str, problem: NormRope, cut: Tuning, args: tuple[str, ...]) -> str:
    rope, norm = problem.rope, problem.norm
    rounded = f".to({_language(norm)}).to(tl.float32)"
    lines = [
        *tile_lines(rope, cut, ("x", "y")),
        *read_pairs(rope, cut, "x", "a", "b"),
        *read_tables(rope, cut),
        *_scales(problem, cut),
        f"rstd = tl.rsqrt(tl.sum(a * a + b * b, axis=2)[:, :, None] / {rope.width} + {norm.eps!r})",
        *(f"{v} = {v} * rstd" for v in "ab"),
        *(f"{v} = ({rounded_normed(v, norm)} * scale_{v}){rounded}" for v in "ab"),
        *write_pairs(rope, cut, "y", *rotated(rope)),
        f"rstd_row = {_rstd_place(rope)}",
        "tl.store(rstd_ptr + rstd_row, rstd, mask=rows)",
    ]
    return f'''
@triton.jit
def {name}(
{signature(args, ("x", "weight", "cos", "sin", "y", "rstd"))}
):
    """y and rstd of heads of {rope.width}; {cut.positions} position(s) and {cut.heads} head(s) per program.

    y = rope({formula(norm)}, cos, sin), pairs of style {rope.style}
    """
{lines_of(*lines)}'''


def _backward_source(name: str, problem: NormRope, cut: Tuning, args: tuple[str, ...]) -> str:
    rope, norm = problem.rope, problem.norm
    size = block(rope) // 2 if rope.interleaved else block(rope)
    inverse = rotated(replace(rope, inverse=True), "p", "q")
    before = [
        "program = tl.program_id(0)",
        f"head_blocks = tl.cdiv(H, {cut.heads})",
        *_scales(problem, cut),
        *(f"dweight_{v} = tl.zeros([{cut.positions}, {cut.heads}, {size}], dtype=tl.float32)" for v in "ab"),
        "for tile in tl.range(program, tiles, tl.num_programs(0)):",
    ]
    loop = [
        *tile_lines(rope, cut, ("dy", "x", "dx"), ("(tile // head_blocks)", "(tile % head_blocks)")),
        *read_pairs(rope, cut, "dy", "p", "q"),
        *read_pairs(rope, cut, "x", "a", "b"),
        *read_tables(rope, cut),
        f"rstd_row = {_rstd_place(rope)}",
        "rstd = tl.load(rstd_ptr + rstd_row, mask=rows, other=0.0)",
        *(f"{v} = {v} * rstd" for v in "ab"),
        *(f"turned_{v} = {text}" for v, text in zip("ab", inverse, strict=True)),
        *(f"dweight_{v} += turned_{v} * {rounded_normed(v, norm)}" for v in "ab"),
        *(f"d{v} = turned_{v} * scale_{v}" for v in "ab"),
        f"mean = tl.sum(da * a + db * b, axis=2)[:, :, None] / {rope.width}",
        *write_pairs(rope, cut, "dx", "(da - a * mean) * rstd", "(db - b * mean) * rstd"),
    ]
    inside = f", mask=pair < {rope.pairs}" if size != rope.pairs else ""
    places = ("pair * 2", "pair * 2 + 1") if rope.interleaved else ("pair", f"pair + {rope.pairs}")
    after = [
        f"pair = tl.arange(0, {size})",
        f"partial = partial_ptr + program.to(tl.int64) * {rope.width}",
        *(
            f"tl.store(partial + {place}, tl.sum(tl.sum(dweight_{v}, axis=0), axis=0){inside})"
            for v, place in zip("ab", places, strict=True)
        ),
    ]
    return f'''
@triton.jit
def {name}_rows(
{signature(args, ("dy", "x", "weight", "cos", "sin", "rstd", "dx", "partial"))}
):
    """dx, and this program's part of dweight; {cut.positions} position(s) and {cut.heads} head(s) at a time.

    y = rope({formula(norm)}, cos, sin), pairs of style {rope.style}
    """
{lines_of(*before)}{lines_of(*loop, depth=2)}{lines_of(*after)}

{sum_source(name, norm)}'''


def _language(norm: RmsNorm) -> str:
    return f"tl.{TRITON_LANGUAGE_DTYPES[norm.x]}"


def _twin(name: str, problem: NormRope, op: str, inputs: tuple[str, ...]) -> str:
    norm, rope = problem.norm, problem.rope
    options = f"eps={norm.eps!r}" + f", offset={norm.offset!r}" * bool(norm.offset)
    options += f', round="{norm.round}"' * (norm.round != "product") + f', style="{rope.style}"' * rope.interleaved
    arguments = ", ".join(inputs)
    return f'''
def {name}({arguments}):
    """With y = rope({formula(norm)}, cos, sin)."""
    return rt.{op}({arguments}, {options})
'''
