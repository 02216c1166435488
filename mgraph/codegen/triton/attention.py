"""Attention with masks that no fused kernel of torch takes, as Triton source and torch twin.

    out = softmax(cap(scale * q k^T) + mask) v,   lse = log sum exp of the scores that are seen, and of the sink

A program has a block of queries of one head and goes over blocks of keys; sums are kept relative to the largest score
so far (Milakov and Gimelshein 2018, arXiv:1805.02867), as in FlashAttention-2 (Dao 2023, arXiv:2307.08691). Inside,
scores are to the base 2. Keys that no query of the block can see, by position, are not read. Where segments or padding
hide more, a first kernel finds for each block the first and the last key that it may see, and the keys between which
all are seen by all its queries: for documents one after another these are the documents' own. Only blocks of keys that
some query does not see whole are masked.

There are two kernels, see `Tile`: one for tensors that lie on 16-byte boundaries, and one for any.

Products are of 16-bit numbers with sums in f32; the weights are rounded to the dtype of v before their product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mgraph.codegen.triton.kernel import (
    TRITON_DTYPES,
    TRITON_LANGUAGE_DTYPES,
    Expression,
    KernelSpec,
    Launch,
    TensorSpec,
)
from mgraph.codegen.triton.rope import lines_of, signature
from mgraph.ir.graph import Node

LARGEST_WIDTH = 256
"""Above this a block of queries and one of keys do not fit in shared memory together."""

SCANNED = 1024
"""Positions that the search for what a block can see reads at a time."""

LOG2E, LN2 = math.log2(math.e), math.log(2)

LOWEST = -3.0e38
"""A largest score of nothing: minus infinity would give no number where it is subtracted from itself."""

FAR = 2**31 - 1
"""Above all positions."""

LARGEST = 2**63 - 1
"""The largest number of a segment."""


@dataclass(frozen=True)
class Attention:
    """One instance of `attention` or `attention_grad`.

    `width` is that of q and k, `value_width` that of v. `more` has the name and the dtype of each further operand.
    `square`: there are as many queries as keys.
    """

    dtype: str
    width: int
    value_width: int
    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    more: tuple[tuple[str, str], ...] = ()
    square: bool = True

    @property
    def extra(self) -> tuple[str, ...]:
        """The attribute `extra` of the op."""
        return tuple(name for name, _ in self.more)

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the further operands in the source: a second `segments` is `segments_2`."""
        return tuple(
            f"{name}_{before + 1}" if (before := self.extra[:i].count(name)) else name
            for i, name in enumerate(self.extra)
        )

    @property
    def marks(self) -> tuple[str, ...]:
        """The operands that hide keys: segments and padding."""
        return tuple(name for name in self.operands if name != "sinks")

    @property
    def columns(self) -> int:
        """`width`, rounded up to what a tile can have."""
        return tile_columns(self.width)

    @property
    def value_columns(self) -> int:
        """`value_width`, rounded up to what a tile can have."""
        return tile_columns(self.value_width)

    @property
    def aligned(self) -> bool:
        """Whether rows begin on 16-byte boundaries when their strides do."""
        return self.width % 8 == 0 and self.value_width % 8 == 0


def tile_columns(width: int) -> int:
    """A power of two, of at least the 16 columns that a matrix product takes."""
    return max(16, 1 << (width - 1).bit_length())


def problem_of(node: Node) -> Attention | str:
    """The instance that a node `attention` or `attention_grad` is, or why no kernel of ours should run it."""
    problem = instance_of(node)
    fused = isinstance(problem, Attention) and has_fused_kernel(problem)
    return "cuDNN's kernel is faster" if fused else problem


def instance_of(node: Node) -> Attention | str:
    """The instance that a node `attention` or `attention_grad` is, or why no kernel of ours can run it."""
    first, further = (1, 6) if node.op == "attention_grad" else (0, 3)
    q, k, v = (value.tensor for value in node.operands[first : first + 3])
    attrs, extra = node.attrs, node.attrs.get("extra", ())
    assert isinstance(extra, tuple), node
    width, value_width, dtype = q.shape[3], v.shape[3], q.dtype.text
    scale, window, softcap = attrs["scale"], attrs.get("window"), attrs.get("softcap")
    if not isinstance(width, int) or not isinstance(value_width, int):
        return f"the widths {width} and {value_width} of heads are not known numbers"
    if max(width, value_width) > LARGEST_WIDTH:
        return f"heads are {max(width, value_width)} wide; the kernel takes up to {LARGEST_WIDTH}"
    if dtype not in ("bf16", "f16") or any(t.dtype is not q.dtype for t in (k, v)):
        return f"q is {dtype}, k {k.dtype.text} and v {v.dtype.text}; the kernel takes bf16 or f16 for all"
    for name, value in zip(extra, node.operands[further:], strict=True):
        if value.tensor.dtype.text not in TRITON_DTYPES:
            return f"{name} is {value.tensor.dtype.text}; the kernel takes {', '.join(TRITON_DTYPES)}"
    if "start" in extra:
        return "the queries start somewhere in a longer sequence"
    if extra.count("keys") > 1 or extra.count("sinks") > 1:
        return "the kernel takes one keys and one sinks"
    if not isinstance(scale, float | int) or not scale > 0:
        return f"the scale {scale} is not positive"
    return Attention(
        dtype=dtype,
        width=width,
        value_width=value_width,
        scale=float(scale),
        causal=bool(attrs.get("causal", False)),
        window=window if isinstance(window, int) else None,
        softcap=float(softcap) if isinstance(softcap, float | int) else None,
        more=tuple(
            (str(name), value.tensor.dtype.text) for name, value in zip(extra, node.operands[further:], strict=True)
        ),
        square=bool(q.shape[2] == k.shape[2]),
    )


def has_fused_kernel(problem: Attention) -> bool:
    """Whether the runtime's attention runs a fused kernel of torch."""
    even = problem.width == problem.value_width and problem.width % 8 == 0 and problem.softcap is None
    return even and problem.window is None and not problem.marks and (problem.square or not problem.causal)


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


def tuning(problem: Attention) -> Tuning:
    """Blocks of which two or more programs have room on a multiprocessor, whose products and exponentials then overlap;
    one of the widest heads."""
    widest = max(problem.columns, problem.value_columns)
    if widest > 64:
        return Tuning(128, 64, 8, 2, 128 if widest == 128 else 0)
    return Tuning(64, 64, 4, 2)


def forward(name: str, problem: Attention, cut: Tuning | None = None) -> KernelSpec:
    """The site `out, lse = name(q, k, v, ...)`: q [B, H, S, D], k [B, G, T, D], v [B, G, T, E] → out [B, H, S, E] like
    q, lse f32 [B, H, S]; further operands as in the op."""
    cut = cut or tuning(problem)
    searches = (Reach(f"{name}_reach", "reach", cut.queries),) if problem.marks else ()
    args = forward_arguments(problem)
    grid: tuple[Expression, ...] = (("mul", ("mul", ("cdiv", "S", cut.queries), "B"), "H"),)
    ways = launches(name, args, grid, cut, problem)
    sources = [search.source(problem) for search in searches]
    sources += [_source(launch.function, problem, cut, args, launch.takes == "aligned") for launch in ways]
    return KernelSpec(
        name=name,
        source="\n".join(sources),
        twin=twin(name, "attention", ("q", "k", "v"), problem),
        inputs=(*heads_of(problem), *further_of(problem)),
        outputs=(out_of(problem), TensorSpec("lse", "f32", ("B", "H", "S"))),
        scratch=tuple(search.scratch() for search in searches),
        launches=(*(search.launch(problem) for search in searches), *ways),
    )


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
    reach = ("reach",) if problem.marks else ()
    tensors = ("q", "k", "v", *problem.operands, *reach, "out", "lse")
    return (*tensors, "H", "G", "S", "T", *strides_of("q", "k", "v", *out))


@dataclass(frozen=True)
class Reach:
    """The kernel that finds what each block can see: `tensor` i32 [B, blocks, 4]: the first and one after the last that
    any of it sees, then the first and one after the last of those between which all see all; 0 and 0 where it finds
    none.

    Blocks are of `size` queries, that see keys; or, for the gradient of keys, of keys, that are seen by queries
    (`of_keys`).
    """

    function: str
    tensor: str
    size: int
    of_keys: bool = False

    @property
    def extent(self) -> str:
        """The dim that is cut into blocks."""
        return "T" if self.of_keys else "S"

    def scratch(self) -> TensorSpec:
        """The tensor that is written."""
        return TensorSpec(self.tensor, "i32", ("B", ("cdiv", self.extent, self.size), 4))

    def launch(self, problem: Attention) -> Launch:
        """A program for each block."""
        args = (*problem.marks, self.tensor, "S", "T")
        return Launch(self.function, args, (("mul", ("cdiv", self.extent, self.size), "B"),), 4, 1, aligned=False)

    def source(self, problem: Attention) -> str:
        """Bounds by position; then the numbers of the block's segments from least to most, and who has such numbers.

        A block of one number sees all that has it. If nothing lies between that has not, all see all, within what all
        see by position.
        """
        args = (*problem.marks, self.tensor, "S", "T")
        segments = [name for name in problem.marks if name != "keys"]
        which, at = ("known", "own") if self.of_keys else ("met", "other")
        padding = f"{which} = {which} & (tl.load(keys_ptr + batch * T + {at}, mask={which}, other=0) != 0)"
        padded = "keys" in problem.marks
        block, scan = ["alike = block >= 0"], [padding] if padded and not self.of_keys else []
        if padded and self.of_keys:
            block = ["real = known", padding, "some = tl.max(known.to(tl.int32)) > 0"]
            block += ["alike = tl.max((real & ~known).to(tl.int32)) == 0"]
            scan = ["met = met & some"]
        for name in segments:
            block += [
                f"mine = tl.load({name}_ptr + batch * S + own, mask=known, other=0).to(tl.int64)",
                f"{name}_least = tl.min(tl.where(known, mine, {LARGEST}))",
                f"{name}_most = tl.max(tl.where(known, mine, {-LARGEST}))",
                f"alike = alike & ({name}_least == {name}_most)",
            ]
            scan += [
                f"theirs = tl.load({name}_ptr + batch * S + other, mask=met, other=0).to(tl.int64)",
                f"met = met & (theirs >= {name}_least) & (theirs <= {name}_most)",
            ]
        body = lines_of(
            f"blocks = tl.cdiv({self.extent}, {self.size})",
            "block = tl.program_id(0) % blocks",
            "batch = (tl.program_id(0) // blocks).to(tl.int64)",
            f"own = block * {self.size} + tl.arange(0, {self.size})",
            f"known = own < {self.extent}",
            *block,
            *(bounds_of_queries(problem, self.size) if self.of_keys else bounds_of_keys(problem, self.size)),
            f"first = tl.full([{SCANNED}], {FAR}, tl.int32)",
            f"last = tl.zeros([{SCANNED}], tl.int32)",
            f"count = tl.zeros([{SCANNED}], tl.int32)",
            f"for start in range(low, high, {SCANNED}):",
        )
        loop = lines_of(
            f"other = start + tl.arange(0, {SCANNED})",
            "met = other < high",
            *scan,
            f"first = tl.minimum(first, tl.where(met, other, {FAR}))",
            "last = tl.maximum(last, tl.where(met, other + 1, 0))",
            "count += met.to(tl.int32)",
            depth=2,
        )
        store = lines_of(
            "low, high = tl.min(first), tl.max(last)",
            *(whole_of_queries if self.of_keys else whole_of_keys)(problem, self.size),
            "alike = alike & (tl.sum(count) == high - low) & (begin < end)",
            f"{self.tensor}_ptr += tl.program_id(0) * 4",
            f"tl.store({self.tensor}_ptr, low)",
            f"tl.store({self.tensor}_ptr + 1, high)",
            f"tl.store({self.tensor}_ptr + 2, tl.where(alike, begin, 0))",
            f"tl.store({self.tensor}_ptr + 3, tl.where(alike, end, 0))",
        )
        what = f"The queries that may see a key of a block of {self.size}" if self.of_keys else ""
        what = what or f"The keys that a query of a block of {self.size} may see"
        return f'''
@triton.jit
def {self.function}({signature(args, (*problem.marks, self.tensor)).strip().rstrip(",")}):
    """{what}: the first and one after the last.

    Then the same of those that all of it see.
    """
{body}{loop}{store}
'''


def bounds_of_keys(problem: Attention, size: int) -> list[str]:
    """`low` and `high`: keys that queries of a block may see by their position."""
    window = problem.window
    return [
        f"low = tl.maximum(block * {size} - {window - 1}, 0)" if window is not None else "low = block * 0",
        f"high = tl.minimum(block * {size} + {size}, T)" if problem.causal else "high = T",
    ]


def bounds_of_queries(problem: Attention, size: int) -> list[str]:
    """`low` and `high`: queries that may see keys of a block by their position."""
    window = problem.window
    return [
        f"low = block * {size}" if problem.causal else "low = block * 0",
        f"high = tl.minimum(block * {size} + {size - 1 + window}, S)" if window is not None else "high = S",
    ]


def whole_of_keys(problem: Attention, size: int) -> list[str]:
    """`begin` and `end`: of the keys from `low` to `high`, those that all queries of a block see by their position."""
    window = problem.window
    return [
        f"begin = tl.maximum(block * {size} + {size - window}, low)" if window is not None else "begin = low",
        f"end = tl.minimum(block * {size} + 1, high)" if problem.causal else "end = high",
    ]


def whole_of_queries(problem: Attention, size: int) -> list[str]:
    """`begin` and `end`: of the queries from `low` to `high`, those that see all keys of a block by their position."""
    window = problem.window
    return [
        f"begin = tl.maximum(block * {size} + {size - 1}, low)" if problem.causal else "begin = low",
        f"end = tl.minimum(block * {size} + {window}, high)" if window is not None else "end = high",
    ]


def reached(problem: Attention, size: int, *, step: int, of_keys: bool = False) -> list[str]:
    """`low` and `high` of what a block sees, or is seen by, and `begin` and `end` of what it sees whole; `low` at the
    beginning of a block of `step`."""
    if problem.marks:
        reach = "seen_by" if of_keys else "reach"
        lines = [
            f"{reach}_ptr += (batch * blocks + block) * 4",
            f"low, high = tl.load({reach}_ptr), tl.load({reach}_ptr + 1)",
            f"begin, end = tl.load({reach}_ptr + 2), tl.load({reach}_ptr + 3)",
        ]
    elif of_keys:
        lines = [*bounds_of_queries(problem, size), *whole_of_queries(problem, size)]
    else:
        lines = [*bounds_of_keys(problem, size), *whole_of_keys(problem, size)]
    return [*lines, f"low = low // {step} * {step}"]


def block_lines(cut: Tuning, *, last_first: bool) -> list[str]:
    """Which block of queries, head and batch a program has.

    Heads are next to each other, so that those of a group read the same keys at the same time, and programs with equal
    work run together; `last_first` begins with those that may have the most.
    """
    return [
        f"blocks = tl.cdiv(S, {cut.queries})",
        "head = tl.program_id(0) % H",
        "block = " + ("blocks - 1 - " if last_first else "") + "tl.program_id(0) // H % blocks",
        "batch = (tl.program_id(0) // H // blocks).to(tl.int64)",
        "group = head // (H // G)",
    ]


@dataclass(frozen=True)
class Tile:
    """How a kernel reads and writes blocks of `size` rows of the heads of `tensor`, which has `extent` rows.

    By descriptors (`described`), which know where a tensor ends and leave addresses to the copy engine, so that more
    programs have room for their registers on a multiprocessor; or by addresses, where tensors lie anywhere. `head` is
    the head of the program; without one, each block is of a head of its own.
    """

    tensor: str
    extent: str
    width: int
    size: int
    described: bool
    head: str = ""

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
            return [
                *lines,
                f"{t}_step = tl.zeros([], tl.int64) + {t}_stride_2",
                f"{t}_at = tl.arange(0, {self.size})[:, None] * {t}_stride_2 + {column}",
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
    tensors = ("q", "k", "v", *problem.operands, "reach", "out", "lse")
    q = Tile("q", "S", problem.width, cut.queries, False, "head")  # once: hardly worth a descriptor
    k = Tile("k", "T", problem.width, cut.keys, described, "group")
    v, out = replace(k, tensor="v", width=width), replace(q, tensor="out", width=width)
    hide, first = seen_lines(problem), f"block * {cut.queries}"
    start = [
        *block_lines(cut, last_first=problem.causal),
        f"row = {first} + tl.arange(0, {cut.queries})",
        *reached(problem, cut.queries, step=cut.keys),
        *marks_of_rows(problem),
        *q.lines(),
        *q.read(first, "row < S"),
        *k.lines(),
        *v.lines(),
        *sums_of(problem, cut),
        f"for start in range(low, high, {cut.keys}):",
    ]
    scores = [
        f"column = start + tl.arange(0, {cut.keys})",
        *k.read("start", "column < T"),
        "score = tl.dot(q, tl.trans(k))",
        *bend,
    ]
    hide = [*marks_of_columns(problem), *hide, 'score = tl.where(seen, score, float("-inf"))'] if hide else []
    weights = [
        f"above = tl.maximum(peak, tl.max(score, axis=1){factor})",
        f"weight = tl.exp2(score{factor} - above[:, None])",
        "shrink = tl.exp2(peak - above)",
        "total = total * shrink + tl.sum(weight, axis=1)",
        *v.read("start", "column < T"),
        f"sum = tl.dot(weight.to(tl.{dtype}), v, sum * shrink[:, None])",
        "peak = above",
    ]
    end = [
        "sum = sum / tl.where(total == 0.0, 1.0, total)[:, None]",
        f"lse = (peak + tl.log2(total)) * {LN2!r}",
        "tl.store(lse_ptr + (batch * H + head) * S + row, lse, mask=row < S)",
        "" if like_q else f"out_stride_0, out_stride_1, out_stride_2 = H * S * {width}, S * {width}, {width}",
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
    {cut.queries} queries per program{"; for tensors on 16-byte boundaries" * described}.
    """
{lines_of(*start)}{loop}{lines_of(*end)}'''


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
