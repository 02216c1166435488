"""Products of the rows of experts with the matrices of their experts, as Triton source and torch twin.

    product       y[r] = rows[r] @ w[e] (+ bias[e])                 e: the expert of row r, by `offsets`
    product_sum   y[r] = first[r] @ wa[e] + second[r] @ wb[e]

Sums are in f32, of bf16 or f16. Rows past the last offset are of no expert: nothing is computed for them, and what they
hold is undefined. A small launch lists the tiles: some rows of one expert each, as many as there are. What then runs
takes tiles in an order in which those that run at a time share rows and matrices, so that both come from the cache; it
has as many programs as there may be tiles, or some for each multiprocessor, which take one tile after the other. A call
with few rows for each expert, as a step that writes has, takes low tiles: each reads only its part of the matrix of an
expert that was chosen.

Other templates make their sources of the same parts: `Tiles`, and the lines of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgraph.codegen.triton.kernel import (
    TRITON_LANGUAGE_DTYPES,
    Expression,
    KernelSpec,
    Launch,
    TensorSpec,
)
from mgraph.codegen.triton.moe_route import power
from mgraph.codegen.triton.rope import lines_of
from mgraph.ir.graph import Node, Value

LISTED = 32
"""Tiles that one program of the small launch lists."""

UNIT = 16
"""Widths are multiples of it, so that rows begin on 16-byte boundaries and a product has no ragged end."""

MOST_EXPERTS = 1024
"""Experts, up to which each program of the small launch reads all offsets at once."""

LOW = ("bf16", "f16")
"""What the kernels multiply."""


@dataclass(frozen=True)
class Tuning:
    """How a product is cut.

    rows, columns, depth   of a tile of the result, and of what is summed at a time (powers of two)
    num_warps, num_stages  warps, and steps of the sum that are in shared memory or on the way
    group                  tiles of rows that take the same columns one after the other
    programs               for each multiprocessor; 0: one for each tile
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    group: int = 8
    programs: int = 0


@dataclass(frozen=True)
class Tiles:
    """The tiles of a kernel's rows: `experts` and how a tile is cut."""

    name: str
    experts: int
    width: int
    cut: Tuning
    way: str = ""
    """Behind the names of what belongs to it, where a site has several ways to cut."""

    @property
    def bound(self) -> str:
        """The dim that says how many tiles of rows there are at most."""
        return f"bound{self.way}"

    @property
    def tiles(self) -> str:
        """The tensor that lists them."""
        return f"tiles{self.way}"

    @property
    def function(self) -> str:
        """The launch that lists them."""
        return f"{self.name}_tiles{self.way}"

    @property
    def across(self) -> int:
        """Tiles beside one another."""
        return -(-self.width // self.cut.columns)

    @property
    def dims(self) -> dict[str, Expression]:
        """The most tiles of rows that there may be. Each expert's last may be short."""
        return {self.bound: ("add", ("cdiv", "R", self.cut.rows), self.experts)}

    def scratch(self) -> TensorSpec:
        """Expert, first row, end, and the number of tiles, for each."""
        return TensorSpec(self.tiles, "i32", (self.bound, 4))

    def launch(self, when: Expression = 1) -> Launch:
        """The launch that lists them."""
        args = ("offsets", self.tiles, self.bound)
        return Launch(self.function, args, (("cdiv", self.bound, LISTED),), 4, 1, aligned=True, when=when)

    def grid(self) -> tuple[Expression, ...]:
        """Of the launch that takes them."""
        all_: Expression = ("mul", self.bound, self.across)
        return (("min", all_, ("mul", "sms", self.cut.programs)) if self.cut.programs else all_,)

    def source(self) -> str:
        """The source of the launch that lists them."""
        columns = power(self.experts)
        body = lines_of(
            f"expert = tl.arange(0, {columns})",
            f"end = tl.load(offsets_ptr + expert, mask=expert < {self.experts}, other=0)",
            f"begin = tl.load(offsets_ptr + expert - 1, mask=(expert > 0) & (expert < {self.experts}), other=0)",
            f"count = tl.cdiv(end - begin, {self.cut.rows})",
            "last = tl.cumsum(count, axis=0)",
            f"tile = tl.program_id(0) * {LISTED} + tl.arange(0, {LISTED})",
            "which = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), axis=1)",
            "here = expert[None, :] == which[:, None]",
            f"start = begin[None, :] + (tile[:, None] - (last - count)[None, :]) * {self.cut.rows}",
            "start = tl.sum(tl.where(here, start, 0), axis=1)",
            "end = tl.sum(tl.where(here, end[None, :], 0), axis=1)",
            f"listed = tile < {self.bound}",
            f"tl.store({self.tiles}_ptr + tile * 4, which, mask=listed)",
            f"tl.store({self.tiles}_ptr + tile * 4 + 1, start, mask=listed)",
            f"tl.store({self.tiles}_ptr + tile * 4 + 2, end, mask=listed)",
            f"tl.store({self.tiles}_ptr + tile * 4 + 3, tl.sum(count, axis=0) + tile * 0, mask=listed)",
        )
        return f'''
@triton.jit
def {self.function}(offsets_ptr, {self.tiles}_ptr, {self.bound}):
    """Expert, first row, end of rows, and the number of all tiles, for each tile of {self.cut.rows} rows of one expert.
    """
{body}
'''

    def loop(self, body: Sequence[str]) -> str:
        """The body of a kernel that does something with each tile: `expert`, `row`, `inside`, `column`, and `block`,
        the number of the tile from the left."""
        cut, across = self.cut, self.across
        per_group = cut.group * across
        lines = [
            f"first = tile // {per_group} * {cut.group}",
            f"high = tl.minimum(count - first, {cut.group})",
            f"along = first + tile % {per_group} % high",
            f"block = tile % {per_group} // high",
            f"expert = tl.load({self.tiles}_ptr + along * 4)",
            f"row = tl.load({self.tiles}_ptr + along * 4 + 1) + tl.arange(0, {cut.rows})",
            f"inside = row < tl.load({self.tiles}_ptr + along * 4 + 2)",
            "matrix = expert.to(tl.int64)",
            f"column = block * {cut.columns} + tl.arange(0, {cut.columns})",
            *body,
        ]
        head = lines_of(f"count = tl.load({self.tiles}_ptr + 3)")
        if cut.programs:
            head += lines_of(f"for tile in range(tl.program_id(0), count * {across}, tl.num_programs(0)):")
        else:
            head += lines_of("tile = tl.program_id(0)", f"if tile < count * {across}:")
        return head + lines_of(*lines, depth=2)


@dataclass(frozen=True)
class Factor:
    """One product of a tile: `source` is the row of `rows` that each row of the tile takes, `matrix` of w [E, inner,
    width], or [E, width, inner] if `transposed`."""

    rows: str
    weight: str
    inner: int
    width: int
    transposed: bool
    source: str = "row.to(tl.int64)"


def product_lines(factors: Sequence[Factor], totals: Sequence[str], tiles: Tiles) -> list[str]:
    """Sums of a tile: each factor's product is added to the total that stands at its place. Those of the same rows read
    them once, in one loop; those of other rows follow in another, since a product that waits for the one before it has
    nothing to hide its loads behind."""
    zeros = f"tl.zeros([{tiles.cut.rows}, {tiles.cut.columns}], dtype=tl.float32)"
    lines = [
        f"depth = tl.arange(0, {tiles.cut.depth})",
        *(f"{total} = {zeros}" for total in dict.fromkeys(totals)),
    ]
    for rows in dict.fromkeys(factor.rows for factor in factors):
        pairs = [pair for pair in zip(factors, totals, strict=True) if pair[0].rows == rows]
        lines += _loop_lines(pairs, tiles)
    return lines


def _loop_lines(pairs: Sequence[tuple[Factor, str]], tiles: Tiles) -> list[str]:
    """The loop of products of the same rows."""
    cut, inner, rows = tiles.cut, pairs[0][0].inner, pairs[0][0].rows
    ragged, cut_off = inner % cut.depth != 0, tiles.width % cut.columns != 0
    deep = f"(depth < {inner} - step)" if ragged else ""
    lines = [
        f"source = tl.where(inside, {pairs[0][0].source}, 0)",
        f"{rows}_tile = {rows}_ptr + source[:, None] * {inner} + depth[None, :]",
    ]
    for factor, _ in pairs:
        start = f"{factor.weight}_ptr + matrix * {inner * factor.width}"
        at = f"depth[:, None] * {factor.width} + column[None, :]"
        if factor.transposed:
            at = f"column[None, :] * {inner} + depth[:, None]"
        lines.append(f"{factor.weight}_tile = {start} + {at}")
    row_mask = f", mask={deep}[None, :], other=0.0" if ragged else ""
    masks = [f"{deep}[:, None]"] * ragged + [f"(column < {tiles.width})[None, :]"] * cut_off
    weight_mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
    lines += [f"for step in range(0, {inner}, {cut.depth}):", f"    {rows}_part = tl.load({rows}_tile{row_mask})"]
    for factor, total in pairs:
        name = factor.weight
        lines += [
            f"    {name}_part = tl.load({name}_tile{weight_mask})",
            f"    {total} = tl.dot({rows}_part, {name}_part, {total})",
            f"    {name}_tile += {cut.depth if factor.transposed else cut.depth * factor.width}",
        ]
    return [*lines, f"    {rows}_tile += {cut.depth}"]


def store_lines(tiles: Tiles, *stores: tuple[str, str]) -> list[str]:
    """Each of (tensor, expression) to the tile's place in a tensor [R, width]."""
    mask = "inside[:, None]"
    if tiles.width % tiles.cut.columns:
        mask = f"{mask} & (column < {tiles.width})[None, :]"
    return [
        f"element = row.to(tl.int64)[:, None] * {tiles.width} + column[None, :]",
        f"real = {mask}",
        *(f"tl.store({tensor}_ptr + element, {value}, mask=real)" for tensor, value in stores),
    ]


def refusal(roles: dict[str, Value], experts: object, widths: Sequence[object]) -> str:
    """Why products of these operands, of so many experts and such widths, are not for the kernels; "" if they are."""
    dtypes = {value.tensor.dtype.text for value in roles.values()}
    if len(dtypes) > 1 or not dtypes <= set(LOW):
        found = ", ".join(f"{role} {value.tensor.dtype.text}" for role, value in roles.items())
        return f"{found}; the kernel takes {' or '.join(LOW)} for all"
    if not isinstance(experts, int) or experts > MOST_EXPERTS:
        return f"there are {experts} experts; the kernel takes a known number up to {MOST_EXPERTS}"
    for width in widths:
        if not isinstance(width, int) or width % UNIT:
            return f"a width is {width}; the kernel takes known multiples of {UNIT}"
    return ""


@dataclass(frozen=True)
class Product:
    """One instance of `grouped_matmul` or, with `second`, of `grouped_matmul_sum`: experts, widths of rows and result,
    dtype, whether the matrices are [E, width, inner], and the dtype of the bias."""

    experts: int
    inner: int
    width: int
    dtype: str
    transposed: bool = False
    second: bool = False
    bias: str = ""


def problem_of(node: Node) -> Product | str:
    """The instance that a node is, or why there is no kernel for it."""
    second = node.op == "grouped_matmul_sum"
    rows, w = node.operands[:2]
    roles = {"the rows are": rows, "the matrices": w}
    bias = None
    if second:
        roles |= {"the second rows": node.operands[2], "the second matrices": node.operands[3]}
    elif len(node.operands) > 3:
        bias = node.operands[3].tensor.dtype.text
    experts, (inner, width) = w.tensor.shape[0], (rows.tensor.shape[1], node.results[0].tensor.shape[1])
    why = refusal(roles, experts, (inner, width))
    if not why and bias is not None and bias not in TRITON_LANGUAGE_DTYPES:
        why = f"the bias is {bias}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    if why:
        return why
    assert isinstance(experts, int) and isinstance(inner, int) and isinstance(width, int)
    transposed = bool(node.attrs.get("transpose_w", False))
    return Product(experts, inner, width, rows.tensor.dtype.text, transposed, second, bias or "")


def tuning(problem: Product) -> Tuning:
    """128 by 256, four steps of 64 on the way: the largest tile whose sum 8 warps have in registers."""
    columns = next((n for n in (256, 128) if problem.width % n == 0), min(128, max(16, power(problem.width))))
    return Tuning(128, columns, depth_of(problem.inner, 64), 8 if columns >= 128 else 4, 4 if columns >= 128 else 3)


def few_tuning(inner: int, width: int) -> Tuning:
    """For few rows of each expert, which cost the reading of matrices: 16 rows, the least that is multiplied at once,
    and few columns, so that the tiles of some experts are enough for all multiprocessors."""
    return Tuning(16, min(64, max(16, power(width))), depth_of(inner, 128), 4, 4)


FEW = 16
"""Rows for each expert, on average, up to which tiles are for few."""


def few_dims(most: int) -> dict[str, Expression]:
    """`few`: whether there are at most so many rows R; `many`: whether more."""
    left: Expression = ("add", most + 1, ("mul", -1, "R"))
    return {"few": ("max", 0, ("min", 1, left)), "many": ("add", 1, ("mul", -1, "few"))}


def depth_of(inner: int, most: int) -> int:
    """What is summed at a time: `most`, or less of narrow rows."""
    return min(most, power(inner)) if inner % most else most


def product(name: str, problem: Product, cuts: Sequence[Tuning] = (), few: int = FEW) -> KernelSpec:
    """The site `y = name(rows, w, offsets[, bias])`: rows [R, inner], w [E, inner, width] ([E, width, inner] if
    transposed), offsets i32 [E], bias [E, width] → y [R, width]. With `second`, `y = name(first, wa, second, wb,
    offsets)`. `cuts` are for few rows, which are `few` for each expert on average at most, and for many."""
    cuts = cuts or (few_tuning(problem.inner, problem.width), tuning(problem))
    ways = {
        way: Tiles(name, problem.experts, problem.width, cut, f"_{way}")
        for way, cut in zip(("few", "many"), cuts, strict=True)
    }
    matrix = (problem.width, problem.inner) if problem.transposed else (problem.inner, problem.width)
    pairs = (("first", "wa"), ("second", "wb")) if problem.second else (("rows", "w"),)
    inputs = [
        tensor
        for rows, w in pairs
        for tensor in (
            TensorSpec(rows, problem.dtype, ("R", problem.inner)),
            TensorSpec(w, problem.dtype, (problem.experts, *matrix)),
        )
    ]
    inputs.append(TensorSpec("offsets", "i32", (problem.experts,)))
    if problem.bias:
        inputs.append(TensorSpec("bias", problem.bias, (problem.experts, problem.width)))
    given = tuple(tensor.name for tensor in inputs if tensor.name != "offsets")
    source, launches = "", []
    dims = few_dims(few * problem.experts)
    for way, tiles in ways.items():
        function, cut = f"{name}_{way}", tiles.cut
        args = (*given, tiles.tiles, "y")
        source += tiles.source() + _product_source(function, problem, tiles, pairs, args)
        launches += [
            tiles.launch(way),
            Launch(function, args, tiles.grid(), cut.num_warps, cut.num_stages, aligned=True, when=way),
        ]
        dims |= tiles.dims
    return KernelSpec(
        name=name,
        source=source,
        twin=_twin(name, problem),
        inputs=tuple(inputs),
        outputs=(TensorSpec("y", problem.dtype, ("R", problem.width)),),
        scratch=tuple(tiles.scratch() for tiles in ways.values()),
        launches=tuple(launches),
        dims=dims,
    )


def _product_source(
    name: str, problem: Product, tiles: Tiles, pairs: Sequence[tuple[str, str]], args: Sequence[str]
) -> str:
    factors = [Factor(rows, w, problem.inner, problem.width, problem.transposed) for rows, w in pairs]
    lines = product_lines(factors, ["total"] * len(factors), tiles)
    if problem.bias:
        mask = f", mask=column < {problem.width}, other=0.0" if problem.width % tiles.cut.columns else ""
        lines.append(f"bias = tl.load(bias_ptr + matrix * {problem.width} + column{mask})")
        lines.append("total += bias.to(tl.float32)[None, :]")
    lines += store_lines(tiles, ("y", f"total.to(tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]})"))
    return f'''
@triton.jit
def {name}({", ".join(f"{arg}_ptr" for arg in args)}):
    """y[r] = {_formula(problem)}, {tiles.cut.rows} rows by {tiles.cut.columns} columns at a time."""
{tiles.loop(lines)}'''


def _formula(problem: Product) -> str:
    if problem.second:
        return "first[r] @ wa[e] + second[r] @ wb[e]"
    return f"rows[r] @ w[e]{' + bias[e]' if problem.bias else ''}"


def _twin(name: str, problem: Product) -> str:
    turned = ".transpose(1, 2)" if problem.transposed else ""
    names = "first, wa, second, wb, offsets" if problem.second else "rows, w, offsets"
    names += ", bias" if problem.bias else ""
    call = f"rt.grouped_mm(rows, w{turned}, offsets{', bias' if problem.bias else ''})"
    if problem.second:
        call = f"rt.grouped_mm(first, wa{turned}, offsets).add_(rt.grouped_mm(second, wb{turned}, offsets))"
    matrices = "[E, width, inner]" if problem.transposed else "[E, inner, width]"
    return f'''
def {name}({names}):
    """y[r] = {_formula(problem)}, e the expert of row r, of matrices {matrices}."""
    return {call}
'''
