"""Rotary position embedding and its inverse, as Triton source and torch twin, specialised by width, dtypes and layout.

With the pairs (a, b) of the last dim of x, and the numbers that cos and sin have for the two elements of a pair,

    y = (a * cos_a - b * sin_a,  b * cos_b + a * sin_b)          and of the inverse, which is also the gradient of x,
    y = (a * cos_a + b * sin_b,  b * cos_b - a * sin_a)

in f32, rounded once. A pair is element i of both halves (`half`) or two neighbours (`interleaved`). Tables of half the
width have one number for both elements of a pair.

x has up to three dims before the last. Tables are the same along one of them, the heads, and what they say of a
position is read once for a tile of heads. Tiles follow the positions, so that programs beside each other work beside
each other in memory where x is a permuted [B, S, H, D], as a projection gives it; in a contiguous [B, H, S, D] each row
of D elements is still read in one piece. y has the strides of x.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgraph.codegen.triton.kernel import ITEM_BYTES, TRITON_LANGUAGE_DTYPES, Expression, KernelSpec, Launch, TensorSpec
from mgraph.ir.graph import Node, Value

LARGEST_WIDTH = 4096
"""Above this a row no longer is a reasonable tile."""

TILE_ELEMENTS = 2048
"""Elements of x in a tile: 16 for each of 128 threads, two loads of 16 bytes in bf16."""

HEADS = "H"
"""The extent along which the tables are the same."""


@dataclass(frozen=True)
class Rope:
    """One instance of the op.

    `x` and `table` are dtypes, `width` and `table_width` the last extents. `axes` names the dims of x before the last:
    `H` is the one along which tables are the same, `S` and `B` are the others. `table_axes` has for each dim of the
    tables its name in `axes`, or "" where its extent is 1. `heads` is the extent of `H` if that is known: it chooses
    the tile, but a rank may hold fewer.
    """

    x: str
    table: str
    width: int
    table_width: int
    axes: tuple[str, ...]
    table_axes: tuple[str, ...]
    heads: int = 0
    style: str = "half"
    inverse: bool = False

    @property
    def positions(self) -> tuple[str, ...]:
        """The dims other than the heads, outer first."""
        return tuple(axis for axis in self.axes if axis != HEADS)

    @property
    def pairs(self) -> int:
        """Pairs in a row."""
        return self.width // 2

    @property
    def interleaved(self) -> bool:
        """Whether neighbours turn together."""
        return self.style == "interleaved"

    @property
    def aligned(self) -> bool:
        """Whether what a row is read in begins on a 16-byte boundary when the row does."""
        piece = self.width if self.interleaved else self.pairs
        return piece * ITEM_BYTES[self.x] % 16 == 0


def problem_of(node: Node) -> Rope | str:
    """The instance that a node `rope` is, or why there is no kernel for it."""
    return rope_instance(node, *node.operands)


def rope_instance(node: Node, *tensors: Value) -> Rope | str:
    """The instance of a node with the attributes of `rope` that rotates x by cos and sin."""
    x, cos, sin = (value.tensor for value in tensors)
    width, table_width = x.shape[-1], cos.shape[-1]
    if not isinstance(width, int) or not isinstance(table_width, int):
        return f"the last dim {width} is not a known number"
    if width > LARGEST_WIDTH:
        return f"the last dim is {width}; the kernel takes up to {LARGEST_WIDTH}"
    for role, dtype in (("x", x.dtype.text), ("cos", cos.dtype.text)):
        if dtype not in TRITON_LANGUAGE_DTYPES:
            return f"{role} is {dtype}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    if sin.dtype is not cos.dtype:
        return f"cos is {cos.dtype.text} but sin is {sin.dtype.text}"
    rank = len(x.shape) - 1
    if not 1 <= rank <= 3 or len(cos.shape) > len(x.shape):
        return f"x has {len(x.shape)} dims and cos {len(cos.shape)}; the kernel takes 2 to 4, and no more in cos"
    missing = rank + 1 - len(cos.shape)
    same = [axis < missing or cos.shape[axis - missing] == 1 for axis in range(rank)]
    if not any(same):
        return f"cos {list(cos.shape)} differs in every row of x {list(x.shape)}"
    head = max(axis for axis in range(rank) if same[axis])
    names = iter(("B", "S")[3 - rank :])
    axes = tuple(HEADS if axis == head else next(names) for axis in range(rank))
    heads = x.shape[head]
    return Rope(
        x=x.dtype.text,
        table=cos.dtype.text,
        width=width,
        table_width=table_width,
        axes=axes,
        table_axes=tuple("" if same[axis] else axes[axis] for axis in range(missing, rank)),
        heads=heads if isinstance(heads, int) else 0,
        style=str(node.attrs.get("style", "half")),
        inverse=bool(node.attrs.get("inverse", False)),
    )


@dataclass(frozen=True)
class Tuning:
    """How a kernel is cut: positions and heads per tile (powers of two), and warps."""

    positions: int
    heads: int
    num_warps: int = 4


def tuning(problem: Rope) -> Tuning:
    """Tiles of about `TILE_ELEMENTS`: all heads, or the largest power of two that divides them; then positions.

    Heads that only 1 or 2 divide are taken with some lanes idle.
    """
    rows = max(1, TILE_ELEMENTS // _power_of_two(problem.width))
    if not problem.positions:
        return Tuning(1, rows)
    heads = problem.heads or 8
    dividing = heads & -heads
    tile = min(rows, dividing if dividing >= 4 else _power_of_two(heads))
    return Tuning(rows // tile, tile)


def rotate(name: str, problem: Rope, cut: Tuning | None = None) -> KernelSpec:
    """The site `y = name(x, cos, sin)`: x [B, H, S, width] or with its dims in other order, tables as broadcast."""
    cut = cut or tuning(problem)
    shape: tuple[Expression, ...] = (*problem.axes, problem.width)
    table: tuple[Expression, ...] = (*(axis or 1 for axis in problem.table_axes), problem.table_width)
    launch = Launch(
        name,
        _arguments(problem),
        (("cdiv", "positions", cut.positions), ("cdiv", HEADS, cut.heads)),
        cut.num_warps,
        num_stages=1,
        aligned=problem.aligned,
    )
    return KernelSpec(
        name=name,
        source=_source(name, problem, cut),
        twin=_twin(name, problem),
        inputs=(
            TensorSpec("x", problem.x, shape, strided=True),
            TensorSpec("cos", problem.table, table, strided=True),
            TensorSpec("sin", problem.table, table, strided=True),
        ),
        outputs=(TensorSpec("y", problem.x, shape, like="x"),),
        scratch=(),
        launches=(launch,),
        dims={"positions": count(problem)},
    )


def _power_of_two(number: int) -> int:
    """The number rounded up to a power of two."""
    return 1 << (number - 1).bit_length()


def _arguments(problem: Rope) -> tuple[str, ...]:
    """Tensors, extents, and the strides of all dims but the last, which is contiguous."""
    return (
        "x",
        "cos",
        "sin",
        "y",
        *extents(problem),
        *strides(problem, ("x",)),
        *strides(problem, ("y",), tables=False),
    )


def extents(problem: Rope) -> tuple[str, ...]:
    """The extents that a kernel takes."""
    return (HEADS, *problem.positions[1:], *(["positions"] if problem.positions else []))


def strides(problem: Rope, tensors: tuple[str, ...], *, tables: bool = True) -> tuple[str, ...]:
    """The strides of tensors with the dims of x, and of the tables."""
    names = [f"{tensor}_stride_{axis}" for tensor in tensors for axis in range(len(problem.axes))]
    for table in ("cos", "sin") if tables else ():
        names += [f"{table}_stride_{axis}" for axis, name in enumerate(problem.table_axes) if name]
    return tuple(names)


def count(problem: Rope) -> Expression:
    """The number of positions."""
    total: Expression = 1
    for axis in problem.positions:
        total = axis if total == 1 else ("mul", total, axis)
    return total


def row_text(tensor: str, axes: tuple[str, ...], indices: dict[str, str]) -> str:
    """Where the rows of a tile begin in a tensor with these dims: [positions, heads, 1] in all.

    Tables have no heads. They are read as tiles of x's shape all the same, from the cache for all heads but the first,
    so that they come in the layout of x, and nothing goes through shared memory.
    """
    terms = {axis: f"{indices[axis]} * {tensor}_stride_{i}" for i, axis in enumerate(axes) if axis}
    heads = terms.pop(HEADS, "head * 0")
    positions = " + ".join(terms.values()) or "position * 0"
    return f"({positions})[:, None, None] + ({heads})[None, :, None]"


def lines_of(*lines: str, depth: int = 1) -> str:
    """Lines of a function's body; empty ones are left out."""
    return "".join(f"{'    ' * depth}{line}\n" for line in lines if line)


def block(problem: Rope) -> int:
    """Columns of a piece that is read at once: a half, whose partner is half a row away, or a row, split into pairs."""
    return _power_of_two(problem.width if problem.interleaved else problem.pairs)


def tile_lines(
    problem: Rope,
    cut: Tuning,
    tensors: tuple[str, ...],
    blocks: tuple[str, str] = ("tl.program_id(0)", "tl.program_id(1)"),
) -> list[str]:
    """Where the rows of a tile begin in `tensors` (with the dims of x) and in the tables, and what of it is inside.

    `blocks` says which block of positions and which of heads the tile is.
    """
    axes, indices = problem.positions, {"S": "place", "B": "batch", HEADS: "head"}
    piece = problem.width if problem.interleaved else problem.pairs
    rows = "(head < H)[None, :, None]"
    rows += " & (position < positions)[:, None, None]" if axes and cut.positions > 1 else ""
    return [
        f"position = {blocks[0]} * {cut.positions} + tl.arange(0, {cut.positions})",
        f"head = ({blocks[1]} * {cut.heads} + tl.arange(0, {cut.heads})).to(tl.int64)",
        "batch = (position // S).to(tl.int64)" if len(axes) == 2 else "",
        "place = (position % S).to(tl.int64)" if len(axes) == 2 else "place = position.to(tl.int64)" if axes else "",
        *(f"{t}_row = {row_text(t, problem.axes, indices)}" for t in tensors),
        *(f"{t}_row = {row_text(t, problem.table_axes, indices)}" for t in ("cos", "sin")),
        f"column = tl.arange(0, {block(problem)})[None, None, :]",
        f"rows = {rows}",
        "inside = rows" + (f" & (column < {piece})" if block(problem) != piece else ""),
    ]


def _load(tensor: str, column: str = "column", mask: str = "inside") -> str:
    """A tile in f32."""
    return f"tl.load({tensor}_ptr + {tensor}_row + {column}, mask={mask}, other=0.0).to(tl.float32)"


def _split(problem: Rope, cut: Tuning, tile: str) -> str:
    """The first and the second elements of the pairs of whole rows, in registers."""
    return f"tl.split(tl.reshape({tile}, [{cut.positions}, {cut.heads}, {block(problem) // 2}, 2]))"


def read_pairs(problem: Rope, cut: Tuning, tensor: str, first: str, second: str) -> list[str]:
    """The first and the second elements of the pairs of a tile, in f32."""
    if problem.interleaved:
        return [f"{tensor} = {_load(tensor)}", f"{first}, {second} = {_split(problem, cut, tensor)}"]
    return [f"{first} = {_load(tensor)}", f"{second} = {_load(tensor, f'column + {problem.pairs}')}"]


def read_tables(problem: Rope, cut: Tuning) -> list[str]:
    """cos and sin, or `cos_a` to `sin_b` where the elements of a pair have numbers of their own."""
    if problem.table_width != problem.pairs:
        return [line for t in ("cos", "sin") for line in read_pairs(problem, cut, t, f"{t}_a", f"{t}_b")]
    if not problem.interleaved:
        return [f"{table} = {_load(table)}" for table in ("cos", "sin")]
    return [
        f"pair = tl.arange(0, {block(problem) // 2})[None, None, :]",
        "known = rows" + (f" & (pair < {problem.pairs})" if block(problem) != problem.width else ""),
        *(f"{table} = {_load(table, 'pair', 'known')}" for table in ("cos", "sin")),
    ]


def write_pairs(problem: Rope, cut: Tuning, tensor: str, first: str, second: str) -> list[str]:
    """Stores both elements of the pairs, rounded to x's dtype."""
    at, dtype = f"{tensor}_ptr + {tensor}_row + column", TRITON_LANGUAGE_DTYPES[problem.x]
    if problem.interleaved:
        joined = f"tl.reshape(tl.join({first}, {second}), [{cut.positions}, {cut.heads}, {block(problem)}])"
        return [f"{tensor} = {joined}", f"tl.store({at}, {tensor}.to(tl.{dtype}), mask=inside)"]
    return [
        f"tl.store({at}, ({first}).to(tl.{dtype}), mask=inside)",
        f"tl.store({at} + {problem.pairs}, ({second}).to(tl.{dtype}), mask=inside)",
    ]


def _source(name: str, problem: Rope, cut: Tuning) -> str:
    """Where rows begin and what of a tile is inside; then x, tables and y as the style has it."""
    shape = ", ".join((*problem.axes, str(problem.width)))
    body = lines_of(
        *tile_lines(problem, cut, ("x", "y")),
        *read_pairs(problem, cut, "x", "a", "b"),
        *read_tables(problem, cut),
        *write_pairs(problem, cut, "y", *rotated(problem)),
    )
    return f'''
@triton.jit
def {name}(
{signature(_arguments(problem), ("x", "cos", "sin", "y"))}
):
    """y = {_formula(problem)}.

    x [{shape}]; {cut.positions} position(s) and {cut.heads} head(s) per program.
    """
{body}'''


def rotated(problem: Rope, a: str = "a", b: str = "b") -> tuple[str, str]:
    """Both elements of the rotated pairs (a, b)."""
    one = problem.table_width == problem.pairs
    cos_a, cos_b, sin_a, sin_b = ("cos", "cos", "sin", "sin") if one else ("cos_a", "cos_b", "sin_a", "sin_b")
    if problem.inverse:
        return f"{a} * {cos_a} + {b} * {sin_b}", f"{b} * {cos_b} - {a} * {sin_a}"
    return f"{a} * {cos_a} - {b} * {sin_a}", f"{b} * {cos_b} + {a} * {sin_b}"


def _formula(problem: Rope) -> str:
    """The map in one line, for docstrings."""
    turn = "(a, b) -> (-b, a) on " + ("neighbours" if problem.interleaved else "both halves")
    return f"x * cos {'- R(x * sin)' if problem.inverse else '+ R(x) * sin'}, R: {turn}"


def signature(arguments: tuple[str, ...], tensors: tuple[str, ...]) -> str:
    """The arguments as the source names them, in lines of at most 120 columns."""
    lines, line = [], "   "
    for argument in arguments:
        name = f"{argument}_ptr" if argument in tensors else argument
        if len(line) + len(name) + 2 > 120:
            lines.append(line)
            line = "   "
        line += f" {name},"
    return "\n".join([*lines, line])


def _twin(name: str, problem: Rope) -> str:
    options = f', style="{problem.style}"' * problem.interleaved + ", inverse=True" * problem.inverse
    return f'''
def {name}(x, cos, sin):
    """y = {_formula(problem)}."""
    return rt.rope(x, cos, sin{options})
'''
