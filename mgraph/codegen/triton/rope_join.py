"""The heads of q, k and v beside each other, those of q and k turned by rotary position embedding.

    y[b, s] = rope(q)[b, :, s] | rope(k)[b, :, s] | v[b, :, s]

as one projection has them whose weights are joined: with the inverse rotation, the gradient of what it gave, of the
gradients that attention's backward made. q [B, H, S, width], k [B, G, S, width] and v [B, J, S, width] may have any
strides, but for the last dim; y [B, S, (H + G + J) width] is contiguous. The formulas are those of `rope.py`, in f32
and rounded once; v is copied as it is. A program makes some heads of one of the three.

Forward, `turn` rotates the first heads of what such a projection gave, where they lie, and leaves the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mgraph.codegen.triton.kernel import Expression, KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.rope import (
    HEADS,
    TILE_ELEMENTS,
    Rope,
    Tuning,
    block,
    count,
    lines_of,
    read_pairs,
    read_tables,
    rope_instance,
    rotated,
    row_text,
    signature,
    strides,
    write_pairs,
)
from mgraph.ir.graph import Node

INPUTS = ("q", "k", "v")


@dataclass(frozen=True)
class RopeJoin:
    """One instance of the op: how q turns (k does likewise), and the heads of the three."""

    rope: Rope
    heads: tuple[int, int, int]

    @property
    def width(self) -> int:
        """The last extent of y."""
        return sum(self.heads) * self.rope.width


def problem_of(node: Node) -> RopeJoin | str:
    """The instance that a node `rope_join` is, or why there is no kernel for it."""
    q, k, v, cos, sin = node.operands
    problem = rope_instance(node, q, cos, sin)
    if isinstance(problem, str):
        return problem
    if problem.axes != ("B", HEADS, "S"):
        return f"cos {list(cos.tensor.shape)} is not the same for all heads of q {list(q.tensor.shape)}"
    heads = tuple(tensor.tensor.shape[1] for tensor in (q, k, v))
    numbers = [head for head in heads if isinstance(head, int)]
    if len(numbers) < len(heads):
        return f"the numbers of heads {list(heads)} are not all known"
    if {tensor.tensor.dtype for tensor in (k, v)} != {q.tensor.dtype}:
        return "q, k and v differ in dtype; the kernel takes one"
    return RopeJoin(problem, (numbers[0], numbers[1], numbers[2]))


def tuning(problem: RopeJoin) -> Tuning:
    """Heads: the largest power of two that divides those of all three, at most a tile's rows; then positions."""
    rows = max(1, TILE_ELEMENTS // (2 * block(problem.rope)))
    shared = math.gcd(*problem.heads)
    heads = min(rows, shared & -shared)
    return Tuning(rows // heads, heads)


def join(name: str, problem: RopeJoin, cut: Tuning | None = None) -> KernelSpec:
    """The site `y = name(q, k, v, cos, sin)`."""
    cut = cut or tuning(problem)
    rope, dtype = problem.rope, problem.rope.x
    table: tuple[Expression, ...] = (*(axis or 1 for axis in rope.table_axes), rope.table_width)
    blocks = sum(-(-heads // cut.heads) for heads in problem.heads)
    launch = Launch(
        name,
        _arguments(problem),
        (("cdiv", "positions", cut.positions), blocks),
        cut.num_warps,
        num_stages=1,
        aligned=rope.aligned,
    )
    return KernelSpec(
        name=name,
        source=_source(name, problem, cut),
        twin=_twin(name, problem),
        inputs=(
            *(
                TensorSpec(tensor, dtype, ("B", heads, "S", rope.width), strided=True)
                for tensor, heads in zip(INPUTS, problem.heads, strict=True)
            ),
            TensorSpec("cos", rope.table, table, strided=True),
            TensorSpec("sin", rope.table, table, strided=True),
        ),
        outputs=(TensorSpec("y", dtype, ("B", "S", problem.width)),),
        scratch=(),
        launches=(launch,),
        dims={"positions": count(rope)},
    )


def _arguments(problem: RopeJoin) -> tuple[str, ...]:
    return (*INPUTS, "cos", "sin", "y", "S", "positions", *strides(problem.rope, INPUTS))


def _source(name: str, problem: RopeJoin, cut: Tuning) -> str:
    """What all programs do; then one of three branches, by the block of heads."""
    rope = problem.rope
    piece = rope.width if rope.interleaved else rope.pairs
    indices = {"S": "place", "B": "batch", HEADS: "head"}
    body = lines_of(
        f"position = tl.program_id(0) * {cut.positions} + tl.arange(0, {cut.positions})",
        "batch = (position // S).to(tl.int64)",
        "place = (position % S).to(tl.int64)",
        "block = tl.program_id(1)",
        f"column = tl.arange(0, {block(rope)})[None, None, :]",
    )
    first = before = 0
    for tensor, heads in zip(INPUTS, problem.heads, strict=True):
        end = first + -(-heads // cut.heads)
        at = f"head * {rope.width}" + f" + {before * rope.width}" * (before > 0)
        turned = tensor != "v"
        body += lines_of(f"if block < {end}:" if not first else f"elif block < {end}:" if turned else "else:")
        body += lines_of(
            f"head = ((block - {first}) * {cut.heads} + tl.arange(0, {cut.heads})).to(tl.int64)",
            f"{tensor}_row = {row_text(tensor, rope.axes, indices)}",
            *(f"{table}_row = {row_text(table, rope.table_axes, indices)}" for table in ("cos", "sin") if turned),
            f"y_row = (position.to(tl.int64) * {problem.width})[:, None, None] + ({at})[None, :, None]",
            f"rows = (head < {heads})[None, :, None] & (position < positions)[:, None, None]",
            "inside = rows" + f" & (column < {piece})" * (block(rope) != piece),
            *read_pairs(rope, cut, tensor, "a", "b"),
            *(read_tables(rope, cut) if turned else ()),
            *write_pairs(rope, cut, "y", *(rotated(rope) if turned else ("a", "b"))),
            depth=2,
        )
        first, before = end, before + heads
    counts = " + ".join(map(str, problem.heads))
    return f'''
@triton.jit
def {name}(
{signature(_arguments(problem), (*INPUTS, "cos", "sin", "y"))}
):
    """y = q | k | v, q and k turned{" back" * rope.inverse}.

    {counts} heads of {rope.width} columns; {cut.positions} position(s) and {cut.heads} head(s) per program.
    """
{body}'''


def _twin(name: str, problem: RopeJoin) -> str:
    rope = problem.rope
    options = f', style="{rope.style}"' * rope.interleaved + ", inverse=True" * rope.inverse
    return f'''
def {name}(q, k, v, cos, sin):
    """y = q | k | v, q and k turned{" back" * rope.inverse}."""
    return rt.rope_join(q, k, v, cos, sin{options})
'''


@dataclass(frozen=True)
class RopeJoined:
    """One instance of `rope_joined`: how heads turn, how many, and the last extent of x."""

    rope: Rope
    heads: int
    columns: int


def turn_problem_of(node: Node) -> RopeJoined | str:
    """The instance that a node `rope_joined` is, or why there is no kernel for it."""
    x, cos, sin = node.operands
    heads, width = node.attrs["heads"], node.attrs["width"]
    batch, length, columns = x.tensor.shape
    assert isinstance(heads, int) and isinstance(width, int) and isinstance(columns, int), f"{node!r} has numbers"
    shape = (batch, heads, length, width)
    problem = rope_instance(node, replace(x, type=replace(x.tensor, shape=shape)), cos, sin)
    if isinstance(problem, str):
        return problem
    if problem.axes != ("B", HEADS, "S"):
        return f"cos {list(cos.tensor.shape)} is not the same for all heads of {list(shape)}"
    return RopeJoined(problem, heads, columns)


def turn(name: str, problem: RopeJoined, cut: Tuning | None = None) -> KernelSpec:
    """The site `y = name(x, cos, sin)`: x [B, S, columns], contiguous, which y is."""
    rope = problem.rope
    cut = cut or tuning(RopeJoin(rope, (problem.heads,) * 3))
    table: tuple[Expression, ...] = (*(axis or 1 for axis in rope.table_axes), rope.table_width)
    shape: tuple[Expression, ...] = ("B", "S", problem.columns)
    arguments = ("x", "cos", "sin", "S", "positions", *strides(rope, ()))
    grid: tuple[Expression, ...] = (("cdiv", "positions", cut.positions), -(-problem.heads // cut.heads))
    return KernelSpec(
        name=name,
        source=_turn_source(name, problem, cut, arguments),
        twin=_turn_twin(name, problem),
        inputs=(
            TensorSpec("x", rope.x, shape),
            TensorSpec("cos", rope.table, table, strided=True),
            TensorSpec("sin", rope.table, table, strided=True),
        ),
        outputs=(TensorSpec("y", rope.x, shape, alias="x"),),
        scratch=(),
        launches=(Launch(name, arguments, grid, cut.num_warps, num_stages=1, aligned=rope.aligned),),
        dims={"positions": count(rope)},
    )


def _turn_source(name: str, problem: RopeJoined, cut: Tuning, arguments: tuple[str, ...]) -> str:
    rope = problem.rope
    piece = rope.width if rope.interleaved else rope.pairs
    indices = {"S": "place", "B": "batch", HEADS: "head"}
    body = lines_of(
        f"position = tl.program_id(0) * {cut.positions} + tl.arange(0, {cut.positions})",
        f"head = tl.program_id(1) * {cut.heads} + tl.arange(0, {cut.heads})",
        "batch = (position // S).to(tl.int64)",
        "place = (position % S).to(tl.int64)",
        f"column = tl.arange(0, {block(rope)})[None, None, :]",
        *(f"{table}_row = {row_text(table, rope.table_axes, indices)}" for table in ("cos", "sin")),
        f"x_row = (position.to(tl.int64) * {problem.columns})[:, None, None] + (head * {rope.width})[None, :, None]",
        f"rows = (head < {problem.heads})[None, :, None] & (position < positions)[:, None, None]",
        "inside = rows" + f" & (column < {piece})" * (block(rope) != piece),
        *read_pairs(rope, cut, "x", "a", "b"),
        *read_tables(rope, cut),
        *write_pairs(rope, cut, "x", *rotated(rope)),
    )
    return f'''
@triton.jit
def {name}(
{signature(arguments, ("x", "cos", "sin"))}
):
    """x with {problem.heads} heads of {rope.width} columns turned{" back" * rope.inverse} where they lie.

    {cut.positions} position(s) and {cut.heads} head(s) per program.
    """
{body}'''


def _turn_twin(name: str, problem: RopeJoined) -> str:
    rope = problem.rope
    options = f"heads={problem.heads}, width={rope.width}"
    options += f', style="{rope.style}"' * rope.interleaved + ", inverse=True" * rope.inverse
    return f'''
def {name}(x, cos, sin):
    """x with {problem.heads} heads of {rope.width} columns turned{" back" * rope.inverse}."""
    return rt.rope_joined(x, cos, sin, {options})
'''
