"""Attention with masks that no fused kernel of torch takes, as Triton source and torch twin.

    out = softmax(cap(scale * q k^T) + mask) v,   lse = log sum exp of the scores that are seen, and of the sink

A program has a block of queries and goes over blocks of keys; sums are kept relative to the largest score so far
(Milakov and Gimelshein 2018, arXiv:1805.02867), as in FlashAttention-2 (Dao 2023, arXiv:2307.08691). Inside, scores are
to the base 2. A block has the heads that share a key head, at few positions: so its queries see nearly the same keys,
and little is computed to be hidden. Keys that no query of the block can see, by position, are not read. Where segments
or padding hide more, a first kernel finds for each block the first and the last key that it may see, and the keys
between which all are seen by all its queries: for documents one after another these are the documents' own. A second
one puts the blocks in order, those with the most keys first, so that no long one begins last. Only blocks of keys that
some query does not see whole are masked.

There are two kernels, see `Tile`: one for tensors that lie on 16-byte boundaries, and one for any.

Products are of 16-bit numbers with sums in f32; the weights are rounded to the dtype of v before their product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mgraph.codegen.triton.attention_problem import Attention, tile_columns
from mgraph.codegen.triton.attention_reach import Reach, reached
from mgraph.codegen.triton.kernel import (
    LN2,
    LOG2E,
    LOWEST,
    TRITON_LANGUAGE_DTYPES,
    Expression,
    KernelSpec,
    Launch,
    TensorSpec,
)
from mgraph.codegen.triton.rope import lines_of, signature

LEAST_POSITIONS = 16
"""A block of queries has at least so many positions."""

SHORT = 128
"""Windows up to this are short."""


@dataclass(frozen=True)
class Tuning:
    """Queries and keys in a block (powers of two), warps, blocks of keys (or, for the gradient of keys, of queries)
    that are in shared memory at a time, and the bound of a thread's registers, 0 for none, by which more than one
    program has room on a multiprocessor."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    most_registers: int = 0

    def together(self, problem: Attention) -> int:
        """Heads that a block of queries has."""
        return max(1, min(problem.share, self.queries // LEAST_POSITIONS))

    def positions(self, problem: Attention) -> int:
        """Positions that a block of queries has, each with all its heads."""
        return self.queries // self.together(problem)


WIDE_ROW = 64
"""Columns of 16-bit numbers that fill a line of shared memory, 128 bytes. Values in narrower rows are read before the
scores are made: Triton 3.6 and 3.7 put those that are read after it where the keys were, and then what is not loaded
asynchronously (off 16-byte boundaries, or in one stage) is multiplied wrongly on sm_90a, from the 17th key on."""


def tuning(problem: Attention) -> Tuning:
    """Blocks of which two or more programs have room on a multiprocessor, whose products and exponentials then overlap;
    one of the widest heads. Within a short window less is computed to be hidden where few keys are taken at a time."""
    widest = max(problem.columns, problem.value_columns)
    if widest > 64:
        return Tuning(128, 64, 8, 2, 128 if widest == 128 else 0)
    if problem.window is not None and problem.window <= SHORT:
        return Tuning(64, 32, 4, 3)
    return Tuning(64, 64, 4, 2)


def forward(name: str, problem: Attention, cut: Tuning | None = None) -> KernelSpec:
    """The site `out, lse = name(q, k, v, ...)`: q [B, H, S, D], k [B, G, T, D], v [B, G, T, E] → out [B, H, S, E] like
    q, lse f32 [B, H, S]; further operands as in the op."""
    cut = cut or tuning(problem)
    search = Reach(f"{name}_reach", "reach", cut.positions(problem))
    before = found_before(search, f"{name}_order", "order", problem)
    args = forward_arguments(problem)
    ways = launches(name, args, grid_of_queries(problem, cut), cut, problem)
    sources = [source for _, source, _ in before]
    sources += [_source(launch.function, problem, cut, args, launch.takes == "aligned") for launch in ways]
    return KernelSpec(
        name=name,
        source="\n".join(sources),
        twin=twin(name, "attention", ("q", "k", "v"), problem),
        inputs=(*heads_of(problem), *further_of(problem)),
        outputs=(out_of(problem), TensorSpec("lse", "f32", ("B", "H", "S"))),
        scratch=tuple(tensor for _, _, tensors in before for tensor in tensors),
        launches=(*(launch for launch, _, _ in before), *ways),
    )


Part = tuple[Launch, str, tuple[TensorSpec, ...]]
"""A launch, its source, and the scratch that it writes."""


def found_before(search: Reach, function: str, order: str, problem: Attention) -> list[Part]:
    """What is launched before a kernel whose blocks marks hide something from: what they see, and their order."""
    if not problem.marks:
        return []
    return [
        (search.launch(problem), search.source(problem), (search.scratch(),)),
        (search.order_launch(function, order), search.order_source(function, order), (search.order(order),)),
    ]


def grid_of_queries(problem: Attention, cut: Tuning) -> tuple[Expression, ...]:
    """A program for each block of queries; the heads that it has divide H."""
    blocks: Expression = ("mul", ("cdiv", "S", cut.positions(problem)), "B")
    return (("mul", blocks, ("cdiv", "H", cut.together(problem))),)


def launches(
    name: str, args: tuple[str, ...], grid: tuple[Expression, ...], cut: Tuning, problem: Attention
) -> tuple[Launch, ...]:
    """The kernel for tensors on 16-byte boundaries and that for others; the latter alone where rows are not."""

    def launch(function: str, takes: str) -> Launch:
        aligned = takes == "aligned"
        return Launch(function, args, grid, cut.num_warps, cut.num_stages, aligned, cut.most_registers, takes=takes)

    return (launch(name, "aligned"), launch(f"{name}_any", "others")) if problem.aligned else (launch(name, "all"),)


def heads_of(problem: Attention) -> tuple[TensorSpec, ...]:
    """q, k and v."""
    return (
        TensorSpec("q", problem.dtype, ("B", "H", "S", problem.width), strided=True),
        TensorSpec("k", problem.dtype, ("B", "G", "T", problem.width), strided=True),
        TensorSpec("v", problem.dtype, ("B", "G", "T", problem.value_width), strided=True),
    )


def further_of(problem: Attention) -> tuple[TensorSpec, ...]:
    """The operands that `extra` names."""
    shapes: dict[str, tuple[Expression, ...]] = {"sinks": ("H",), "segments": ("B", "S"), "keys": ("B", "T")}
    return tuple(
        TensorSpec(operand, dtype, shapes[name])
        for operand, (name, dtype) in zip(problem.operands, problem.more, strict=True)
    )


def out_of(problem: Attention) -> TensorSpec:
    """The result, with q's strides where it has q's shape."""
    like = "q" if problem.width == problem.value_width else ""
    return TensorSpec("out", problem.dtype, ("B", "H", "S", problem.value_width), like=like)


def strides_of(*tensors: str) -> tuple[str, ...]:
    """The strides of all dims but the last, which is contiguous."""
    return tuple(f"{tensor}_stride_{dim}" for tensor in tensors for dim in range(3))


def forward_arguments(problem: Attention) -> tuple[str, ...]:
    """Tensors, extents, strides."""
    out = ("out",) if problem.width == problem.value_width else ()
    reach = ("reach", "order") if problem.marks else ()
    tensors = ("q", "k", "v", *problem.operands, *reach, "out", "lse")
    return (*tensors, "H", "G", "S", "T", *strides_of("q", "k", "v", *out))


def block_lines(problem: Attention, cut: Tuning) -> list[str]:
    """Which block of queries a program has: its batch, its first head, `lead`, the key head of that, `group`, and the
    head and the position of each row.

    Heads are next to each other, so that those of a group read the same keys at the same time, and programs with equal
    work run together. Those come first that have the most.
    """
    together, positions = cut.together(problem), cut.positions(problem)
    rows = f"tl.arange(0, {cut.queries})"
    last_first = "blocks - 1 - " * problem.causal
    place = ["place = tl.load(order_ptr + tl.program_id(0) // parts)"]
    place += ["block, batch = place % blocks, (place // blocks).to(tl.int64)"]
    if not problem.marks:
        place = ["place = tl.program_id(0) // parts", f"block = {last_first}place % blocks"]
        place += ["batch = (place // blocks).to(tl.int64)"]
    return [
        f"blocks = tl.cdiv(S, {positions})",
        f"parts = H // {together}",
        *place,
        f"lead = tl.program_id(0) % parts * {together}",
        "group = lead // (H // G)",
        f"head = lead + {rows} % {together}" if together > 1 else "head = lead",
        f"row = block * {positions} + {rows}" + f" // {together}" * (together > 1),
    ]


@dataclass(frozen=True)
class Tile:
    """How a kernel reads and writes blocks of `size` rows of the heads of `tensor`, which has `extent` rows.

    By descriptors (`described`), which know where a tensor ends and leave addresses to the copy engine, so that more
    programs have room for their registers on a multiprocessor; or by addresses, where tensors lie anywhere. `head` is
    the head of the program; without one, each block is of a head of its own. By addresses, a block may have rows of
    `together` heads from `head` on, those of a position next to each other.
    """

    tensor: str
    extent: str
    width: int
    size: int
    described: bool
    head: str = ""
    together: int = 1

    @property
    def columns(self) -> int:
        """`width`, rounded up to what a tile can have."""
        return tile_columns(self.width)

    def lines(self) -> list[str]:
        """What comes before reads and writes."""
        t, shape, block = self.tensor, f"{self.extent}, {self.width}", f"{self.size}, {self.columns}"
        lines = [f"{t}_ptr += batch * {t}_stride_0"]
        lines += [f"{t}_ptr += {self.head}.to(tl.int64) * {t}_stride_1"] if self.head else []
        if not self.described:
            column, inner = f"tl.arange(0, {self.columns})[None, :]", self.columns != self.width
            row, n = f"tl.arange(0, {self.size})[:, None]", self.together
            of_heads = [f"{t}_at += ({row} % {n}).to(tl.int64) * {t}_stride_1"] if n > 1 else []
            return [
                *lines,
                f"{t}_step = tl.zeros([], tl.int64) + {t}_stride_2",
                f"{t}_at = {row}{f' // {n}' if n > 1 else ''} * {t}_stride_2 + {column}",
                *of_heads,
                f"{t}_inner = {column} < {self.width}" if inner else "",
            ]
        strides = f"{t}_stride_2, 1"
        if not self.head:
            shape, strides, block = f"H, {shape}", f"{t}_stride_1, {strides}", f"1, {block}"
        return [*lines, f"{t}_tiles = tl.make_tensor_descriptor({t}_ptr, [{shape}], [{strides}], [{block}])"]

    def read(self, start: str, known: str, head: str = "") -> list[str]:
        """Reads the rows from `start` into the tensor's name, of `head` where the tile has none; those that are not
        `known` are 0."""
        t = self.tensor
        if self.described and self.head:
            return [f"{t} = {t}_tiles.load([{start}, 0])"]
        if self.described:
            return [f"{t} = {t}_tiles.load([{head}, {start}, 0]).reshape({self.size}, {self.columns})"]
        lines = [] if self.head else [f"{t}_head = {t}_ptr + {head}.to(tl.int64) * {t}_stride_1"]
        place = f"{t}_{'ptr' if self.head else 'head'} + {start} * {t}_step + {t}_at"
        return [*lines, f"{t} = tl.load({place}{self._mask(known)}, other=0.0)"]

    def write(self, start: str, known: str, value: str) -> list[str]:
        """Stores the rows from `start`, but for those that are not `known`."""
        t = self.tensor
        if self.described:
            return [f"{t} = {value}", f"{t}_tiles.store([{start}, 0], {t})"]
        return [f"{t} = {value}", f"tl.store({t}_ptr + {start} * {t}_step + {t}_at, {t}{self._mask(known)})"]

    def _mask(self, known: str) -> str:
        return f", mask=({known})[:, None]" + f" & {self.tensor}_inner" * (self.columns != self.width)


def seen_lines(problem: Attention, *, transposed: bool = False, all_inside: bool = False) -> list[str]:
    """`seen`, whether a query `row` sees a key `column`: [queries, keys], or `transposed`; nothing where nothing is
    hidden. Segments are `<name>_row` and `<name>_column`. `all_inside`: keys beyond the last do no harm."""
    row, column = ("[None, :]", "[:, None]") if transposed else ("[:, None]", "[None, :]")
    parts = []
    if not all_inside and not (problem.causal and problem.square):
        parts.append(f"(column < T){column}")
    if problem.causal:
        parts.append(f"(column{column} <= row{row})")
    if problem.window is not None:
        parts.append(f"(column{column} > (row - {problem.window}){row})")
    for name in problem.marks:
        parts.append(f"keys_column{column}" if name == "keys" else f"({name}_row{row} == {name}_column{column})")
    return [f"seen = {'seen & ' * (i > 0)}{part}" for i, part in enumerate(parts)]


def marks_of_rows(problem: Attention) -> list[str]:
    """Reads the segments of the queries `row`; those after the last are as the last, which takes fewer registers than a
    mask."""
    names = [name for name in problem.marks if name != "keys"]
    return [f"{name}_row = tl.load({name}_ptr + batch * S + tl.minimum(row, S - 1))" for name in names]


def marks_of_columns(problem: Attention) -> list[str]:
    """Reads the segments of the keys `column`, and which are no padding; those after the last are as the last."""
    lines = []
    for name in problem.marks:
        read = f"tl.load({name}_ptr + batch * T + tl.minimum(column, T - 1))"
        lines.append(f"{name}_column = {read}" + (" != 0" if name == "keys" else ""))
    return lines


def score_lines(problem: Attention) -> tuple[list[str], str]:
    """What makes scores to the base 2 of the products `score`, up to a factor, and the text of that factor.

    tanh(x) = 1 - 2 / (1 + exp(2 x)), whose exponential may be infinite.
    """
    if problem.softcap is None:
        return [], f" * {problem.scale * LOG2E!r}"
    turn, cap = 2 * LOG2E * problem.scale / problem.softcap, problem.softcap * LOG2E
    return [f"bent = 1.0 - 2.0 / (1.0 + tl.exp2(score * {turn!r}))", f"score = bent * {cap!r}"], ""


def masked(problem: Attention, cut: Tuning, step: int, mask: list[str]) -> str:
    """The lines of a mask in a loop, for blocks of `step` that are not seen whole; for all, where a window is hardly
    longer than blocks."""
    whole = problem.window is None or problem.window >= 2 * (cut.queries + cut.keys)
    if not mask or not whole:
        return lines_of(*mask, depth=2)
    return lines_of(f"if (start < begin) | (start + {step} > end):", depth=2) + lines_of(*mask, depth=3)


def sums_of(problem: Attention, cut: Tuning) -> list[str]:
    """The largest score so far, `peak`, the sum of the weights relative to it, `total`, and that of the values, `sum`:
    a sink is there from the beginning, or nothing."""
    peak = f"peak = tl.full([{cut.queries}], {LOWEST!r}, tl.float32)"
    lines = [peak, f"total = tl.zeros([{cut.queries}], tl.float32)"]
    if "sinks" in problem.operands:
        sink = f"sink = tl.load(sinks_ptr + head).to(tl.float32) * {LOG2E!r}"
        lines = [sink, peak, "peak = tl.maximum(peak, sink)", "total = tl.exp2(sink - peak)"]
    return [*lines, f"sum = tl.zeros([{cut.queries}, {problem.value_columns}], tl.float32)"]


def _source(name: str, problem: Attention, cut: Tuning, args: tuple[str, ...], described: bool) -> str:
    """The text of a kernel."""
    dtype, (bend, factor) = TRITON_LANGUAGE_DTYPES[problem.dtype], score_lines(problem)
    width, like_q = problem.value_width, problem.width == problem.value_width
    tensors = ("q", "k", "v", *problem.operands, "reach", "order", "out", "lse")
    together, positions = cut.together(problem), cut.positions(problem)
    q = Tile("q", "S", problem.width, cut.queries, False, "lead", together)  # once: hardly worth a descriptor
    k = Tile("k", "T", problem.width, cut.keys, described, "group")
    v, out = replace(k, tensor="v", width=width), replace(q, tensor="out", width=width)
    hide, first = seen_lines(problem), f"block * {positions}"
    start = [
        *block_lines(problem, cut),
        *reached(problem, positions),
        *marks_of_rows(problem),
        *q.lines(),
        *q.read(first, "row < S"),
        *k.lines(),
        *v.lines(),
        *sums_of(problem, cut),
        f"for start in range(low, high, {cut.keys}):",
    ]
    values = v.read("start", "column < T")
    early = problem.value_columns < WIDE_ROW
    scores = [
        f"column = start + tl.arange(0, {cut.keys})",
        *k.read("start", "column < T"),
        *(values if early else ()),
        "score = tl.dot(q, tl.trans(k))",
        *bend,
    ]
    hide = [*marks_of_columns(problem), *hide, 'score = tl.where(seen, score, float("-inf"))'] if hide else []
    weights = [
        f"above = tl.maximum(peak, tl.max(score, axis=1){factor})",
        f"weight = tl.exp2(score{factor} - above[:, None])",
        "shrink = tl.exp2(peak - above)",
        "total = total * shrink + tl.sum(weight, axis=1)",
        *(() if early else values),
        f"sum = tl.dot(weight.to(tl.{dtype}), v, sum * shrink[:, None])",
        "peak = above",
    ]
    contiguous = (
        f"out_stride_1, out_stride_2 = (tl.zeros([], tl.int64) + S) * {width}, {width}",
        "out_stride_0 = H * out_stride_1",
    )
    end = [
        "sum = sum / tl.where(total == 0.0, 1.0, total)[:, None]",
        f"lse = (peak + tl.log2(total)) * {LN2!r}",
        "tl.store(lse_ptr + (batch * H + head) * S + row, lse, mask=row < S)",
        *(() if like_q else contiguous),
        *out.lines(),
        *out.write(first, "row < S", f"sum.to(tl.{dtype})"),
    ]
    loop = lines_of(*scores, depth=2) + masked(problem, cut, cut.keys, hide) + lines_of(*weights, depth=2)
    return f'''
@triton.jit
def {name}(
{signature(args, tensors)}
):
    """{title(problem)}.

    lse = log sum exp of the scores; q [B, H, S, {problem.width}], k [B, G, T, {problem.width}], v [B, G, T, {width}];
    {described_block(cut, problem)} per program{"; for tensors on 16-byte boundaries" * described}.
    """
{lines_of(*start)}{loop}{lines_of(*end)}'''


def described_block(cut: Tuning, problem: Attention) -> str:
    """A block of queries in words."""
    return f"{cut.queries} queries: {cut.together(problem)} head(s) at {cut.positions(problem)} positions"


def title(problem: Attention) -> str:
    """The formula with the masks, for docstrings."""
    scores = f"{problem.scale:.6g} * q k^T"
    scores = scores if problem.softcap is None else f"{problem.softcap:g} * tanh({scores} / {problem.softcap:g})"
    window = f"window of {problem.window}" if problem.window is not None else ""
    masks = ", ".join(filter(None, ("causal" * problem.causal, window, *problem.operands)))
    return f"out = softmax({scores}) v" + (f" ({masks})" if masks else "")


def twin(name: str, op: str, tensors: tuple[str, ...], problem: Attention) -> str:
    """The torch function of a site."""
    args = ", ".join((*tensors, *problem.operands))
    options = [f"scale={problem.scale!r}"]
    options += ["causal=True"] if problem.causal else []
    options += [f"{key}={value!r}" for key in ("window", "softcap") if (value := getattr(problem, key)) is not None]
    options += [f"extra={problem.extra!r}"] if problem.extra else []
    gradient = "The gradient of " if op == "attention_grad" else ""
    return f'''
def {name}({args}):
    """{gradient}{title(problem)}."""
    return rt.{op}(
        {args},
        {", ".join(options)},
    )
'''
