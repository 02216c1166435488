"""Products of the rows of experts with the matrices of their experts, as Triton source and torch twin.

    product       y[r] = rows[r] @ w[e] (+ bias[e])                 e: the expert of row r, by `offsets`
    product_sum   y[r] = first[r] @ wa[e] + second[r] @ wb[e]

Sums are in f32, of bf16, f16 or f32. Rows past the last offset are of no expert: nothing is computed for them, and what
they hold is undefined. A small launch lists the tiles: some rows of one expert each, as many as there are. What then
runs takes the tiles of one expert after those of the one before, in an order in which those that run at a time share
rows and columns, so that both come from the cache; it has as many programs as there may be tiles, or some for each
multiprocessor, which take one tile after the other. A call with few rows for each expert, as a step that writes has,
takes lower tiles: each reads only its part of the matrix of an expert that was chosen. The lowest find their rows by
themselves, since a launch would cost more than that.

Other templates make their sources of the same parts: `Tiles`, and the lines of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mgraph.codegen.triton.kernel import (
    FLAT,
    TRITON_LANGUAGE_DTYPES,
    Expression,
    KernelSpec,
    Launch,
    TensorSpec,
)
from mgraph.codegen.triton.moe_order import power
from mgraph.codegen.triton.rope import lines_of
from mgraph.ir.graph import Node, Value

LISTED = 32
"""Tiles that one program of the small launch lists."""

FIELDS = ("expert", "begin", "stop", "before")
"""What is known of a tile of rows: its expert, where the rows of that begin and end, and how many tiles come before its
first one."""

UNIT = 16
"""Widths are multiples of it, so that rows begin on 16-byte boundaries and a product has no ragged end."""

MOST_EXPERTS = 1024
"""Experts, up to which each program of the small launch reads all offsets at once."""

LOW = ("bf16", "f16")
"""What tensor cores multiply."""

EXACT = "f32"
"""What is multiplied beside them, since they would round it."""


@dataclass(frozen=True)
class Tuning:
    """How a product is cut.

    rows, columns, depth   of a tile of the result, and of what is summed at a time (powers of two)
    num_warps, num_stages  warps, and steps of the sum that are in shared memory or on the way
    group                  tiles of rows that take the same columns one after the other
    programs               for each multiprocessor; 0: one for each tile
    listed                 whether a launch lists the tiles; else each program looks for its own among the offsets
    described              whether blocks that lie together come by descriptors, whose addresses are the copy engine's
    flat                   whether a program asks for the first blocks of its next tile before it ends with one, where a
                           tile is one loop
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    group: int = 8
    programs: int = 0
    listed: bool = True
    described: bool = False
    flat: bool = False


Cuts = Sequence[tuple[int, Tuning]]
"""Ways to cut a product, the lowest tiles first, each with the rows for each expert, on average, up to which it is
taken; the last one is for any number."""


@dataclass(frozen=True)
class Tiles:
    """The tiles of a kernel's rows: `experts` and how a tile is cut. Which calls take them: `all`, or those whose
    tensors are `aligned`, beside the `others`."""

    name: str
    experts: int
    width: int
    cut: Tuning
    takes: str = "all"

    @property
    def forms(self) -> tuple[Tiles, ...]:
        """These tiles, once; by descriptors, whose tensors are aligned, and without, for others."""
        if not self.cut.described:
            return (self,)
        return replace(self, takes="aligned"), replace(self, cut=plain(self.cut), takes="others")

    @property
    def listed(self) -> bool:
        """Whether a launch lists the tiles."""
        return self.cut.listed

    @property
    def given(self) -> str:
        """The tensor that a program finds its tile in."""
        return self.tiles if self.listed else "offsets"

    @property
    def way(self) -> str:
        """Behind the names of what belongs to it: a site may have several ways to cut."""
        return f"_{self.cut.rows}"

    @property
    def body(self) -> str:
        """The launch that takes them."""
        return f"{self.name}{self.way}{'_any' if self.takes == 'others' else ''}"

    @property
    def bound(self) -> str:
        """The dim that says how many tiles of rows there are at most."""
        return f"bound{self.way}"

    @property
    def taken(self) -> str:
        """The dim that says whether a call takes this way."""
        return f"taken{self.way}"

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
        """`bound`: the most tiles of rows that there may be. Each expert's last may be short, and none is empty."""
        return {self.bound: ("min", "R", ("add", ("cdiv", "R", self.cut.rows), self.experts))}

    def scratch(self) -> tuple[TensorSpec, ...]:
        """For each: expert, the rows of that, begin and end, the number of its first tile, and of all tiles."""
        return (TensorSpec(self.tiles, "i32", (self.bound, len(FIELDS) + 1)),) if self.listed else ()

    def launches(self, args: tuple[str, ...], aligned: bool = True) -> tuple[Launch, ...]:
        """The launch that lists them, and those which take them, with arguments `args`."""
        cut = self.cut
        taking = tuple(
            Launch(
                form.body,
                args,
                self.grid(),
                cut.num_warps,
                cut.num_stages,
                aligned and form.takes != "others",
                when=self.taken,
                takes=form.takes,
            )
            for form in self.forms
        )
        if not self.listed:
            return taking
        given = ("offsets", self.tiles, self.bound)
        listing = Launch(self.function, given, (("cdiv", self.bound, LISTED),), 4, 1, aligned=True, when=self.taken)
        return (listing, *taking)

    def grid(self) -> tuple[Expression, ...]:
        """Of the launch that takes them."""
        all_: Expression = ("mul", self.bound, self.across)
        return (("min", all_, ("mul", "sms", self.cut.programs)) if self.cut.programs else all_,)

    def source(self) -> str:
        """The source of the launch that lists them."""
        if not self.listed:
            return ""
        place = f"{self.tiles}_ptr + tile * {len(FIELDS) + 1}"
        body = lines_of(
            *self._count_lines(),
            f"tile = tl.program_id(0) * {LISTED} + tl.arange(0, {LISTED})",
            "expert = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), axis=1)",
            "here = each[None, :] == expert[:, None]",
            "begin = tl.sum(tl.where(here, begins[None, :], 0), axis=1)",
            "stop = tl.sum(tl.where(here, ends[None, :], 0), axis=1)",
            "before = tl.sum(tl.where(here, (last - tiles)[None, :], 0), axis=1)",
            f"listed = tile < {self.bound}",
            *(f"tl.store({place} + {index}, {field}, mask=listed)" for index, field in enumerate(FIELDS)),
            f"tl.store({place} + {len(FIELDS)}, tl.sum(tiles, axis=0) + tile * 0, mask=listed)",
        )
        return f'''
@triton.jit
def {self.function}(offsets_ptr, {self.tiles}_ptr, {self.bound}):
    """For each tile of {self.cut.rows} rows of one expert: this, its rows, its first tile; the number of all tiles."""
{body}
'''

    def _count_lines(self) -> list[str]:
        """Of `each` expert where its rows begin and end, and how many `tiles` they are, none of what is no expert; and
        up to its `last` one."""
        real = f"each < {self.experts}"
        return [
            f"each = tl.arange(0, {power(self.experts)})",
            f"ends = tl.load(offsets_ptr + each, mask={real}, other=0)",
            f"begins = tl.load(offsets_ptr + each - 1, mask=(each > 0) & ({real}), other=0)",
            f"tiles = tl.cdiv(ends - begins, {self.cut.rows})",
            "last = tl.cumsum(tiles, axis=0)",
        ]

    def _found_lines(self) -> tuple[list[str], list[str]]:
        """`count`, the number of all tiles of rows; and of the `place`-th of them, the `FIELDS`."""
        if self.listed:
            at = f"{self.tiles}_ptr + place * {len(FIELDS) + 1}"
            loads = [f"{field} = tl.load({at} + {index})" for index, field in enumerate(FIELDS)]
            return [f"count = tl.load({self.tiles}_ptr + {len(FIELDS)})"], loads
        return [*self._count_lines(), "count = tl.sum(tiles, axis=0)"], [
            "expert = tl.sum((last <= place).to(tl.int32), axis=0)",
            "here = each == expert",
            "begin = tl.sum(tl.where(here, begins, 0), axis=0)",
            "stop = tl.sum(tl.where(here, ends, 0), axis=0)",
            "before = tl.sum(tl.where(here, last - tiles, 0), axis=0)",
        ]

    def loop(self, body: Sequence[str], before: Sequence[str] = ()) -> str:
        """The body of a kernel that does something with each tile: `expert`, `row`, `inside`, `column`, and `block`,
        the number of the tile from the left. What comes `before` is done once.

        The tiles of an expert follow one another, so that its matrix is read from memory once; groups of its tiles of
        rows take all columns, so that many rows are. Of 64 experts and 131,072 rows an H200 reads 1.40 GB for gates
        and ups so, 2.28 where groups have rows of two experts."""
        cut, across = self.cut, self.across
        per_group = cut.group * across
        all_, own = self._found_lines()
        lines = [
            f"place = tile // {across}",
            *own,
            f"within = tile - before * {across}",
            f"first = within // {per_group} * {cut.group}",
            f"high = tl.minimum(tl.cdiv(stop - begin, {cut.rows}) - first, {cut.group})",
            f"top = begin + (first + within % {per_group} % high) * {cut.rows}",
            f"block = within % {per_group} // high",
            f"row = top + tl.arange(0, {cut.rows})",
            "inside = row < stop",
            "matrix = expert.to(tl.int64)",
            f"column = block * {cut.columns} + tl.arange(0, {cut.columns})",
            *body,
        ]
        head = lines_of(*all_, *before)
        if cut.programs:
            flat = FLAT * cut.flat
            head += lines_of(f"for tile in tl.range(tl.program_id(0), count * {across}, tl.num_programs(0){flat}):")
        else:
            head += lines_of("tile = tl.program_id(0)", f"if tile < count * {across}:")
        return head + lines_of(*lines, depth=2)


def ways(name: str, experts: int, width: int, cuts: Cuts) -> tuple[tuple[Tiles, ...], dict[str, Expression]]:
    """The tiles of each way to cut, and the dims of a site that has them: one way is `taken`, never two."""
    found = tuple(Tiles(name, experts, width, cut) for _, cut in cuts)
    dims: dict[str, Expression] = {}
    before: Expression = 0
    for (most, _), tiles in zip(cuts, found, strict=True):
        left: Expression = ("add", most * experts + 1, ("mul", -1, "R"))
        reached: Expression = 1 if tiles is found[-1] else ("max", 0, ("min", 1, left))
        dims[tiles.taken] = ("add", reached, ("mul", -1, before))
        before = reached
        dims |= tiles.dims
    return found, dims


AS_THEY_LIE = "row.to(tl.int64)"


def sources(args: Mapping[Tiles, tuple[str, ...]], write: Callable[[Tiles, tuple[str, ...]], str]) -> str:
    """The sources of all launches: of what lists tiles, and as `write` writes what takes them with its arguments."""
    parts = [(tiles.source(), *(write(form, given) for form in tiles.forms)) for tiles, given in args.items()]
    return "".join(text for part in parts for text in part)


@dataclass(frozen=True)
class Factor:
    """One product of a tile: `source` is the row of `rows` that each row of the tile takes, `matrix` of w [E, inner,
    width], or [E, width, inner] if `transposed`; `exact` where both are f32.

    Where matrices lie packed in one `tensor`, that has `whole` columns for each expert, those of w from `start` on and
    `apart` from each other. With `pairs` a tile has twice its columns, all that lie beside one another.
    """

    rows: str
    weight: str
    inner: int
    width: int
    transposed: bool
    source: str = AS_THEY_LIE
    tensor: str = ""
    whole: int = 0
    start: int = 0
    apart: int = 1
    pairs: bool = False
    exact: bool = False

    @property
    def of_all(self) -> int:
        """Columns that an expert has in the tensor."""
        return self.whole or self.width

    @property
    def column(self) -> str:
        """Numbers of the columns of a tile in the tensor."""
        if self.pairs:
            return "both"
        scaled = f"{self.apart} * column" if self.apart > 1 else "column"
        return f"({self.start} + {scaled})" if self.start else scaled

    def is_described(self, cut: Tuning) -> bool:
        """Whether its matrices come by a descriptor: their columns lie together, and depths end where they do."""
        return cut.described and not (self.exact or self.pairs or self.apart > 1 or self.inner % cut.depth)

    def are_rows_described(self, cut: Tuning) -> bool:
        """Whether its rows come by a descriptor: as they lie, of all rows."""
        return cut.described and self.source == AS_THEY_LIE and not self.exact

    def descriptors(self, experts: int, cut: Tuning) -> list[str]:
        """The lines that make them, of all rows and of the matrices of all experts."""
        lines = []
        if self.are_rows_described(cut):
            shape = f"[tl.maximum(R, 1), {self.inner}], [{self.inner}, 1], [{cut.rows}, {cut.depth}]"
            lines.append(f"{self.rows}_all = tl.make_tensor_descriptor({self.rows}_ptr, {shape})")
        return [*lines, self.descriptor(experts, cut)] if self.is_described(cut) else lines

    def descriptor(self, experts: int, cut: Tuning) -> str:
        """The line that makes that of the matrices."""
        extents, block = (experts * self.inner, self.of_all), (cut.depth, cut.columns)
        if self.transposed:
            extents, block = (experts * self.of_all, self.inner), (cut.columns, cut.depth)
        pointer = f"{self.tensor or self.weight}_ptr"
        shape, size = ", ".join(map(str, extents)), ", ".join(map(str, block))
        return f"{self.weight}_all = tl.make_tensor_descriptor({pointer}, [{shape}], [{extents[1]}, 1], [{size}])"

    def described(self, cut: Tuning) -> str:
        """The part of a tile at `step`, by its descriptor."""
        column = f"{self.start} + block * {cut.columns}" if self.start else f"block * {cut.columns}"
        if self.transposed:
            return f"{self.weight}_all.load([expert * {self.of_all} + {column}, step]).T"
        return f"{self.weight}_all.load([expert * {self.inner} + step, {column}])"

    def tile(self) -> str:
        """Where the first part of a tile lies."""
        start = f"{self.tensor or self.weight}_ptr + matrix * {self.inner * self.of_all}"
        if self.transposed:
            return f"{start} + {self.column}[None, :] * {self.inner} + depth[:, None]"
        return f"{start} + depth[:, None] * {self.of_all} + {self.column}[None, :]"


def product_lines(factors: Sequence[Factor], totals: Sequence[str], tiles: Tiles) -> list[str]:
    """Sums of a tile: each factor's product is added to the total that stands at its place. Those of the same rows read
    them once, in one loop; those of other rows follow in another, since a product that waits for the one before it has
    nothing to hide its loads behind."""
    cut = tiles.cut
    lines = [f"depth = tl.arange(0, {cut.depth})"]
    if any(factor.pairs for factor in factors):
        lines.append(f"both = block * {2 * cut.columns} + tl.arange(0, {2 * cut.columns})")
    for total, factor in {t: f for f, t in zip(factors, totals, strict=True)}.items():
        lines.append(f"{total} = tl.zeros([{cut.rows}, {cut.columns * (1 + factor.pairs)}], dtype=tl.float32)")
    for rows in dict.fromkeys(factor.rows for factor in factors):
        pairs = [pair for pair in zip(factors, totals, strict=True) if pair[0].rows == rows]
        lines += _loop_lines(pairs, tiles)
    return lines


def fitting(cuts: Cuts, factors: Sequence[Factor]) -> Cuts:
    """The cuts, without descriptors where nothing would come by one."""
    return tuple(
        (most, cut if any(f.is_described(cut) or f.are_rows_described(cut) for f in factors) else plain(cut))
        for most, cut in cuts
    )


def plain(cut: Tuning) -> Tuning:
    """The same cut by addresses, asking for nothing ahead."""
    return replace(cut, described=False, flat=False)


def descriptor_lines(factors: Sequence[Factor], tiles: Tiles) -> list[str]:
    """What comes before all tiles: descriptors of what comes by one."""
    return [line for factor in factors for line in factor.descriptors(tiles.experts, tiles.cut)]


def _loop_lines(pairs: Sequence[tuple[Factor, str]], tiles: Tiles) -> list[str]:
    """The loop of products of the same rows."""
    cut, inner, rows = tiles.cut, pairs[0][0].inner, pairs[0][0].rows
    ragged, cut_off = inner % cut.depth != 0, tiles.width % cut.columns != 0
    deep = f"(depth < {inner} - step)" if ragged else ""
    described = pairs[0][0].are_rows_described(cut)
    # Rows that are not there are not read: programs that all read one in their place would wait for one another.
    real = f"inside[:, None]{f' & {deep}[None, :]' if ragged else ''}"
    read = f"{rows}_all.load([top, step])" if described else f"tl.load({rows}_tile, mask={real}, other=0.0)"
    addresses = [
        f"source = tl.where(inside, {pairs[0][0].source}, 0)",
        f"{rows}_tile = {rows}_ptr + source[:, None] * {inner} + depth[None, :]",
    ]
    lines = [
        *([] if described else addresses),
        *(f"{factor.weight}_tile = {factor.tile()}" for factor, _ in pairs if not factor.is_described(cut)),
        f"for step in range(0, {inner}, {cut.depth}):",
        f"    {rows}_part = {read}",
    ]
    for factor, total in pairs:
        real = f"both < {2 * tiles.width}" if factor.pairs else f"column < {tiles.width}"
        masks = [f"{deep}[:, None]"] * ragged + [f"({real})[None, :]"] * cut_off
        mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        name = factor.weight
        product = f"    {total} = {dot(f'{rows}_part', f'{name}_part', total, factor.exact)}"
        if factor.is_described(cut):
            lines += [f"    {name}_part = {factor.described(cut)}", product]
            continue
        lines += [
            f"    {name}_part = tl.load({name}_tile{mask})",
            product,
            f"    {name}_tile += {cut.depth if factor.transposed else cut.depth * factor.of_all}",
        ]
    return lines if described else [*lines, f"    {rows}_tile += {cut.depth}"]


def dot(left: str, right: str, total: str, exact: bool) -> str:
    """The product of two tiles, added to `total`; of f32 it is `exact`."""
    precision = ', input_precision="ieee"' if exact else ""
    return f"tl.dot({left}, {right}, {total}{precision})"


def store_lines(tiles: Tiles, *stores: tuple[str, str]) -> list[str]:
    """Each of (tensor, expression) to the tile's place in a tensor [R, width]."""
    return written_lines(tiles, "row", *stores)


def written_lines(tiles: Tiles, row: str, *stores: tuple[str, str]) -> list[str]:
    """As `store_lines`, to other rows of the tensors."""
    mask = "inside[:, None]"
    if tiles.width % tiles.cut.columns:
        mask = f"{mask} & (column < {tiles.width})[None, :]"
    return [
        f"element = {row}.to(tl.int64)[:, None] * {tiles.width} + column[None, :]",
        f"real = {mask}",
        *(f"tl.store({tensor}_ptr + element, {value}, mask=real)" for tensor, value in stores),
    ]


def bias_lines(tiles: Tiles, total: str, tensor: str, width: int, column: str = "column") -> list[str]:
    """What is added to the sums of a tile: the row of its expert of a tensor [E, width], of the columns that belong to
    the tile's."""
    mask = f", mask=column < {tiles.width}, other=0.0" if tiles.width % tiles.cut.columns else ""
    return [
        f"bias = tl.load({tensor}_ptr + matrix * {width} + {column}{mask})",
        f"{total} += bias.to(tl.float32)[None, :]",
    ]


def refusal(
    roles: dict[str, Value], experts: object, widths: Sequence[object], taken: Sequence[str] = (*LOW, EXACT)
) -> str:
    """Why products of these operands, of so many experts and such widths, are not for the kernels that multiply what is
    `taken`; "" if they are."""
    dtypes = {value.tensor.dtype.text for value in roles.values()}
    if len(dtypes) > 1 or not dtypes <= set(taken):
        found = ", ".join(f"{role} {value.tensor.dtype.text}" for role, value in roles.items())
        return f"{found}; the kernel takes {' or '.join(taken)} for all"
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


WAVES = 4
"""Programs on a multiprocessor, one after the other, that take large tiles by turns: each makes its descriptors once.
They are several, as one that has to wait, for communication that is on its multiprocessor, would end far too late."""


def tuning(problem: Product) -> Tuning:
    """128 by 256, the largest tile whose sum 8 warps have in registers, three steps of 64 on the way by descriptors."""
    if problem.dtype == EXACT:
        return exact_tuning(problem.width)
    columns = next((n for n in (256, 128) if problem.width % n == 0), min(128, max(16, power(problem.width))))
    cut = Tuning(128, columns, depth_of(problem.inner, 64), 4, 3)
    if columns < 128:
        return cut
    return replace(cut, num_warps=8, programs=WAVES, described=True, flat=not problem.second)


def exact_tuning(width: int, rows: int = 64) -> Tuning:
    """Of f32, whose parts each thread multiplies from its registers, so tiles are small.

    Of 32 experts and matrices of 2048 by 768 an H200 takes 35, 85, 216 and 1179 us for 8, 256, 2048 and 16384 rows
    (torch, one product after the other, 333, 691, 662 and 1486); tiles of 128 rows are slower for any number.
    """
    columns = min(64, max(16, power(width)))
    return Tuning(rows, columns, 32, 4, 4) if rows == 16 else Tuning(rows, columns, 16, 4, 3)


def cuts_of(problem: Product) -> Cuts:
    """The ways to cut a product."""
    many = tuning(problem)
    if problem.dtype == EXACT:
        return (FEW, replace(exact_tuning(problem.width, 16), listed=False)), (0, many)
    return low_cuts(problem.inner, problem.width, many)


def low_cuts(inner: int, width: int, many: Tuning, factors: int = 1) -> Cuts:
    """For few rows of each expert, which cost the reading of matrices: 16 rows, the least that is multiplied at once,
    and few columns, so that the tiles of some experts are enough for all multiprocessors; 64 in between. `many`: for
    all others.

    Of 1 to 128 tokens, 128 experts and matrices of 2048 by 768 an H200 reads with 128 columns at once, of one matrix or
    two, 0.49 to 0.90 and 0.68 to 0.98 of what a copy moves; with 32 of each 0.35 to 0.66. With 16 rows for each expert
    tiles of 16 take 208 and 115 us, of 64 240 and 196; with 32 269 and 153, 220 and 170; with 48 348 and 198, 210 and
    136, and of 128 288 and 205; with 64 of 64 266 and 214, of 128 265 and 190.
    """
    columns = min(128 // factors, max(16, power(width)))
    low = Tuning(16, columns, depth_of(inner, 64), 8, 4 if factors == 1 else 6, listed=False)
    middle = Tuning(64, min(128, max(16, power(width))), depth_of(inner, 64), 4, 4 if factors == 1 else 3)
    return (FEW, low), (SOME, middle), (0, many)


def one_cut(cuts: Cuts) -> Cuts:
    """The second of them for any number of rows: what a row gives then does not depend on it."""
    return ((0, cuts[1][1]),)


FEW, SOME = 20, 56
"""Rows for each expert, on average, up to which tiles have 16 rows, and up to which they have 64."""


def depth_of(inner: int, most: int) -> int:
    """What is summed at a time: `most`, or less of narrow rows."""
    return min(most, power(inner)) if inner % most else most


def product(name: str, problem: Product, cuts: Cuts = ()) -> KernelSpec:
    """The site `y = name(rows, w, offsets[, bias])`: rows [R, inner], w [E, inner, width] ([E, width, inner] if
    transposed), offsets i32 [E], bias [E, width] → y [R, width]. With `second`, `y = name(first, wa, second, wb,
    offsets)`."""
    pairs = (("first", "wa"), ("second", "wb")) if problem.second else (("rows", "w"),)
    all_, dims = ways(name, problem.experts, problem.width, fitting(cuts or cuts_of(problem), _factors(problem, pairs)))
    matrix = (problem.width, problem.inner) if problem.transposed else (problem.inner, problem.width)
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
    args = {tiles: (*given, tiles.given, "y", *["R"] * tiles.cut.described) for tiles in all_}
    return KernelSpec(
        name=name,
        source=sources(args, lambda tiles, given: _product_source(problem, tiles, pairs, given)),
        twin=_twin(name, problem),
        inputs=tuple(inputs),
        outputs=(TensorSpec("y", problem.dtype, ("R", problem.width)),),
        scratch=tuple(scratch for tiles in all_ for scratch in tiles.scratch()),
        launches=tuple(launch for tiles in all_ for launch in tiles.launches(args[tiles])),
        dims=dims,
    )


def _factors(problem: Product, pairs: Sequence[tuple[str, str]]) -> list[Factor]:
    exact = problem.dtype == EXACT
    return [Factor(rows, w, problem.inner, problem.width, problem.transposed, exact=exact) for rows, w in pairs]


def _product_source(problem: Product, tiles: Tiles, pairs: Sequence[tuple[str, str]], args: Sequence[str]) -> str:
    factors = _factors(problem, pairs)
    lines = product_lines(factors, ["total"] * len(factors), tiles)
    if problem.bias:
        lines += bias_lines(tiles, "total", "bias", problem.width)
    lines += store_lines(tiles, ("y", f"total.to(tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]})"))
    return f'''
@triton.jit
def {tiles.body}({", ".join(parameters(args))}):
    """y[r] = {_formula(problem)}, {tiles.cut.rows} rows by {tiles.cut.columns} columns at a time."""
{tiles.loop(lines, descriptor_lines(factors, tiles))}'''


def parameters(args: Sequence[str]) -> list[str]:
    """The parameters of a function: pointers, and the number of rows."""
    return [arg if arg == "R" else f"{arg}_ptr" for arg in args]


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


def fixed(name: str, problem: Product) -> KernelSpec:
    """The site of `product` in one cut."""
    return product(name, problem, one_cut(cuts_of(problem)))
