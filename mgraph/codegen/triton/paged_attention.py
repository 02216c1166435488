"""Attention over a paged cache, single new tokens and parts of prompts alike, as Triton source and torch twin.

The new tokens of each request are cut into tiles of a few tokens times the query heads that read one key head, and the
keys that a tile sees into `splits` runs. A program takes one run for one tile and key head, walks over it through the
block table, and has sums that are not normalised (Milakov and Gimelshein 2018, arXiv:1805.02867): the largest score,
the sum of weights, and weights times values, in f32. With one run it ends there; else a second launch adds the runs of
each token, and the sink. Scores are in powers of two. Tiles are low where most requests have a single new token, as
then reading the cache is all the work, and high where there are chunks of prompts. Of few requests with single tokens,
whose tables are long, each multiprocessor has one program with much on the way, as its runs are; else several. Which
way it is and `splits`, as many as fill the GPU where there are few tiles, follow from shapes alone, so that a CUDA
graph of a bucket keeps them. Lengths are no shapes: the engine has the longest requests first, whose programs begin
first. Programs that read the same rows, for other heads, stand beside each other in the grid.

The first R tiles are the first ones of the R requests, so that their loads wait for no search. Of those after them,
T // tokens, tile R + p belongs to the last request r with starts[r] // tokens <= p: some are of no use, and no table of
tiles is needed. Behind the tokens of the last request its tiles go on, with tokens of no request, which give 0.

With fixed runs (`--batch-invariant`) what a token gives depends on its position alone: one height of tiles, runs that
begin at multiples of so many keys whatever else there is, and every walk masked. What a token does not see then adds 0
to sums that are in one order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mgraph.codegen.triton.attention import WIDE_ROW
from mgraph.codegen.triton.early import AHEAD, HERE
from mgraph.codegen.triton.kernel import (
    ITEM_BYTES,
    LOG2E,
    LOWEST,
    TRITON_LANGUAGE_DTYPES,
    Expression,
    KernelSpec,
    Launch,
    TensorSpec,
)
from mgraph.ir.graph import Node, Static
from mgraph.ir.opdef import op_def

MOST_SPLITS = 128
LEAST_KEYS = 64
"""A run of keys is not shorter than that, of the longest sequences there may be."""
FIXED_ROWS, FIXED_RUNS, FIXED_KEYS = 64, 8, 256
"""With fixed runs: rows of a tile, the most runs of the longest sequence, and the fewest keys of a run. More runs help
few long sequences, and need more room for their sums."""
LONG_ROWS = 2048
"""Tables with places for more, all together, are long."""
IDLE_ROWS = 3500
"""Where a quarter of the multiprocessors and more would have none of the programs for long tables, and these could have
read so many rows of all tables meanwhile, there are several programs on each instead."""
NARROW_ROWS = 1024
"""Where tables have more places, the lengths of requests may differ much: what is shared out evenly by shapes is then
uneven. Each request has runs for two rounds of programs, whose longest begin first, in place of one: of 12 to 64
requests with lengths from next to nothing up to 4,096 that takes an H200 0.62 to 0.84 of the time; 0.91 to 1.13 of it
where all are equally long, and 2 to 6 us more where all are short."""
SPAN = 128
"""Starts of requests that are looked at at once."""
TABLE_LINE = 32
"""Entries of a block table that lie in 128 bytes, and come from memory together."""
JOINED = {"few": (8, 64), "some": (16, 64), "many": (64, 16)}
"""Runs and columns that a program of a single warp, which waits for no other, adds at once: so many that all loads are
on the way together. There may be more than many runs, of which those that are there are added in turns."""
WIDEST = 256


@dataclass(frozen=True)
class PagedAttention:
    """One instance: dtype, query and key heads, widths of keys and values, and how scores are made."""

    dtype: str
    heads: int
    groups: int
    width: int
    value_width: int
    block_size: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: str = ""
    """The dtype of sinks, if there are."""
    run: int = 0
    """Keys of a run, a multiple of those of a tile, where runs begin at multiples of it; 0: as fills the GPU."""


@dataclass(frozen=True)
class Tuning:
    """Rows of a tile (tokens times heads), keys at a time, warps, steps of the walk that are on the way, and how many
    programs a multiprocessor gets where runs are cut for that."""

    rows: int
    keys: int
    num_warps: int = 4
    num_stages: int = 2
    per_sm: int = 4
    most_registers: int = 0
    """The bound of a thread's registers, 0 for none, by which more than one program has room on a multiprocessor."""
    ahead: bool = False
    """Whether a tile's entries in the block table are read a tile before, of the first before the wait."""


def problem_of(node: Node) -> PagedAttention | str:
    """The instance that a node is, or why there is no kernel for it."""
    q, keys, values, _, _, _, *sinks = (value.tensor for value in node.operands)
    attrs = op_def("paged_attention").complete(node.attrs)
    if q.dtype.text not in TRITON_LANGUAGE_DTYPES or {keys.dtype, values.dtype} != {q.dtype}:
        return f"q is {q.dtype.text} and the cache {keys.dtype.text}"
    sizes: tuple[Any, ...] = (*q.shape[1:], keys.shape[1], values.shape[2])
    if not all(isinstance(size, int) for size in sizes):
        return "heads or widths are not known"
    heads, width, groups, value_width = sizes
    if max(width, value_width) > WIDEST:
        return f"heads of {max(width, value_width)}, which is more than {WIDEST}"
    if any(isinstance(attrs[name], Static) for name in ("scale", "window", "softcap")):
        return "scale, window or softcap differ from layer to layer"
    block_size, scale = int(str(attrs["block_size"])), float(str(attrs["scale"]))
    window, softcap = int(str(attrs["window"] or 0)), float(str(attrs["softcap"] or 0))
    kind = sinks[0].dtype.text if sinks else ""
    if kind and kind not in TRITON_LANGUAGE_DTYPES:
        return f"sinks are {kind}"
    return PagedAttention(q.dtype.text, heads, groups, width, value_width, block_size, scale, window, softcap, kind)


def fixed_problem_of(node: Node) -> PagedAttention | str:
    """The instance with fixed runs that a node is, or why there is no kernel for it."""
    problem, width = problem_of(node), node.operands[5].tensor.shape[1]
    if isinstance(problem, str):
        return problem
    if not isinstance(width, int):
        return f"block tables are {width} wide, which is no known number"
    keys = width * problem.block_size
    return replace(problem, run=max(FIXED_KEYS, _power(-(-keys // FIXED_RUNS))))


def tunings(problem: PagedAttention) -> dict[str, Tuning]:
    """The ways there are: for `single` tokens, which cost the reading of the cache, of those the `long` one for few
    requests whose tables are long, and for a `chunk` of a prompt, whose sums are large."""
    wide = max(_power(problem.width), _power(problem.value_width)) * ITEM_BYTES[problem.dtype]
    least = _padded(problem.heads // problem.groups)
    single = Tuning(least, 64 if wide <= 256 else 32)
    if wide <= 256 and problem.dtype != "f32":  # so that `per_sm` programs have room
        single = replace(single, most_registers=128)
    if 0 < problem.window <= 4 * single.keys:  # which begins anywhere: of high tiles it would see little
        single = Tuning(least, 32, num_warps=1)
    if problem.dtype == "f32":
        return {"single": single, "chunk": Tuning(max(32, least), 32, per_sm=2)}
    if wide > 256:
        return {"single": single, "chunk": Tuning(max(64, least), 32, per_sm=2)}
    ways = {"single": single, "chunk": Tuning(max(128, least), 64, 8, 3, 2, 128)}
    if not problem.window and least == 16:  # 128 KB of keys and values are on the way
        ahead = Tuning(least, 128, num_stages=3, per_sm=1, ahead=True)
        ways["long"] = ahead if wide > 128 else Tuning(least, 256, num_stages=5, per_sm=1)
    return ways


def fixed_tuning(problem: PagedAttention) -> Tuning:
    """One tile for single tokens and for chunks."""
    single = tunings(problem)["single"]
    if problem.dtype == "f32":
        return single
    return replace(single, rows=max(FIXED_ROWS, single.rows), num_warps=4, most_registers=0)


def forward(name: str, problem: PagedAttention, ways: Mapping[str, Tuning] | None = None) -> KernelSpec:
    """The site `out = name(q, keys, values, starts, lengths, blocks[, sinks])`: out [T, H, E] like q's dtype. `ways`
    are those of `tunings`, or with fixed runs one, `fixed`, of `fixed_tuning`."""
    ways = ways or ({"fixed": fixed_tuning(problem)} if problem.run else tunings(problem))
    head, value = (problem.heads, problem.width), (problem.heads, problem.value_width)
    sinks = (TensorSpec("sinks", problem.sinks, (problem.heads,)),) if problem.sinks else ()
    given = ("q", "keys", "values", "starts", "lengths", "blocks", *(s.name for s in sinks))
    walk = (*given, "part", "top", "total", "out", "T", "R", "W", "splits", *_STRIDES)
    ends = (*(s.name for s in sinks), "starts", "part", "top", "total", "out", "T", "R", "splits")
    aligned = all(width * ITEM_BYTES[problem.dtype] % 16 == 0 for width in (problem.width, problem.value_width))
    joined = ("few",) if problem.run else tuple(JOINED)
    return KernelSpec(
        name=name,
        source="".join(_walk_source(f"{name}_{way}", problem, cut, walk) for way, cut in ways.items())
        + "".join(_ends_source(f"{name}_{runs}", problem, ends, runs) for runs in joined),
        twin=_twin(name, problem),
        inputs=(
            TensorSpec("q", problem.dtype, ("T", *head), strided=True),
            TensorSpec("keys", problem.dtype, ("C", problem.groups, problem.width)),
            TensorSpec("values", problem.dtype, ("C", problem.groups, problem.value_width)),
            TensorSpec("starts", "i32", ("bounds",)),
            TensorSpec("lengths", "i32", ("R",)),
            TensorSpec("blocks", "i32", ("R", "W")),
            *sinks,
        ),
        outputs=(TensorSpec("out", problem.dtype, ("T", *value)),),
        scratch=(
            TensorSpec("part", "f32", ("parts", "T", *value)),
            TensorSpec("top", "f32", ("parts", "T", problem.heads)),
            TensorSpec("total", "f32", ("parts", "T", problem.heads)),
        ),
        launches=(
            *(
                Launch(
                    f"{name}_{way}",
                    walk,
                    (problem.groups, "splits", ("add", "R", _whole("T", _tokens(problem, cut)))),
                    cut.num_warps,
                    cut.num_stages,
                    aligned,
                    cut.most_registers,
                    when=1 if problem.run else way,
                    large=way == "long",
                    spread=True,
                )
                for way, cut in ways.items()
            ),
            *(
                Launch(f"{name}_{runs}", ends, ("T", problem.heads, _parts(problem, runs)[1]), 1, 1, aligned, when=runs)
                for runs in joined
            ),
        ),
        dims=_dims(problem, ways),
    )


def _dims(problem: PagedAttention, ways: Mapping[str, Tuning]) -> dict[str, Expression]:
    """The way that a call goes is 1, others are 0: `chunk` if there are more than two new tokens a request. `parts` is
    `splits` if there are several, else 0, and one of JOINED is 1 then. With fixed runs, of which there are few, both
    are the runs of the longest sequence."""
    rows: Expression = ("mul", "W", problem.block_size)
    if problem.run:
        cut = ways["fixed"]
        assert problem.run % cut.keys == 0, f"runs of {problem.run} keys, tiles of {cut.keys}"
        return {"splits": ("cdiv", rows, problem.run), "parts": "splits", "few": 1}

    def programs(cut: Tuning) -> Expression:
        tiles: Expression = ("max", "R", ("cdiv", "T", _tokens(problem, cut)))
        return ("max", 1, ("mul", tiles, problem.groups))

    def splits(cut: Tuning, rounds: Expression = 1) -> Expression:
        """As many as have room, rounded down: a last few programs would run alone."""
        room: Expression = ("mul", ("mul", "sms", cut.per_sm), rounds)
        fit: Expression = ("add", -1, ("cdiv", ("add", 1, room), programs(cut)))
        return ("max", 1, ("min", MOST_SPLITS, ("min", fit, ("cdiv", rows, LEAST_KEYS))))

    chunk = _exceeds(("cdiv", "T", ("max", 1, ("mul", "R", 2))), 1)
    uneven = 0 if problem.window else ("mul", _exceeds("R", 1), _exceeds(rows, NARROW_ROWS))
    dims: dict[str, Expression] = {"chunk": chunk, "uneven": uneven, "long": 0}
    if "long" in ways:
        all_rows: Expression = ("mul", "R", rows)
        taken: Expression = ("mul", programs(ways["long"]), splits(ways["long"]))
        idle = _without("sms", taken)
        wave = _exceeds(("add", 1, "sms"), taken)
        many_idle = _exceeds(("mul", "sms", 3), ("mul", taken, 4))
        much_idle = _exceeds(("mul", idle, all_rows), ("mul", "sms", IDLE_ROWS))
        one_run = _without(1, _exceeds(splits(ways["long"]), 1))
        taken_well = ("mul", wave, _without(1, ("max", ("mul", many_idle, much_idle), ("mul", "uneven", one_run))))
        dims["long"] = ("mul", _without(1, "chunk"), ("mul", taken_well, _exceeds(all_rows, LONG_ROWS)))
    dims["single"] = _without(_without(1, "chunk"), "long")
    dims["splits"] = 0
    for way, cut in ways.items():
        rounds: Expression = ("add", 1, "uneven") if way == "single" else 1
        dims["splits"] = ("add", dims["splits"], ("mul", way, splits(cut, rounds)))
    few, some, _ = (count for count, _ in JOINED.values())
    several = _exceeds("splits", 1)
    dims["parts"] = ("mul", "splits", several)
    dims["many"] = _exceeds("splits", some)
    dims["some"] = _without(_exceeds("splits", few), "many")
    dims["few"] = _without(_without(several, "many"), "some")
    return dims


def _exceeds(number: Expression, bound: Expression) -> Expression:
    """1 if a number is more than the bound, else 0."""
    return ("max", 0, ("min", 1, ("add", number, ("mul", -1, bound))))


def _whole(number: Expression, unit: int) -> Expression:
    """How many whole units a number has."""
    return ("add", ("cdiv", ("add", number, 1), unit), -1)


def _without(number: Expression, less: Expression) -> Expression:
    return ("add", number, ("mul", -1, less))


_STRIDES = ("q_stride_0", "q_stride_1")


def _power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()


def _padded(width: int) -> int:
    """The width or height of a tile, of which a product takes at least 16."""
    return max(16, _power(width))


def _parts(problem: PagedAttention, runs: str) -> tuple[int, int]:
    """Columns that a program adds runs of, and how many programs a row of values takes."""
    columns = min(JOINED[runs][1], _padded(problem.value_width))
    return columns, -(-problem.value_width // columns)


def _tokens(problem: PagedAttention, cut: Tuning) -> int:
    """New tokens of a tile."""
    return cut.rows // (problem.heads // problem.groups)


def _signature(args: tuple[str, ...]) -> str:
    numbers = {"T", "R", "W", "splits", *_STRIDES}
    return ", ".join(name if name in numbers else f"{name}_ptr" for name in args)


def _score_lines(problem: PagedAttention, masked: bool) -> list[str]:
    """Scores of a tile of keys, as powers of two; all keys are seen unless `masked`."""
    precision = ', input_precision="ieee"' if problem.dtype == "f32" else ""
    scale = problem.scale if problem.softcap else problem.scale * LOG2E
    lines = [f"score = tl.dot(q, tl.trans(k){precision}) * {scale!r}"]
    if problem.softcap:  # cap * tanh(score / cap), by the exponential of a number that is not positive
        lines += [
            f"bent = tl.exp(-2.0 * tl.abs(score) / {problem.softcap!r})",
            f"bent = {problem.softcap * LOG2E!r} * (1.0 - bent) / (1.0 + bent)",
            "score = tl.where(score < 0.0, -bent, bent)",
        ]
    if masked:
        seen = "inside[None, :] & (key[None, :] <= position[:, None])"
        if problem.window:
            seen += f" & (key[None, :] > position[:, None] - {problem.window})"
        lines.append(f'score = tl.where({seen}, score, float("-inf"))')
    return lines


def _walk_lines(
    problem: PagedAttention, cut: Tuning, low: str, high: str, masked: bool = True, again: bool = False
) -> str:
    """A loop over keys from `low` to `high`; where it is not `masked`, the latter is whole tiles away.

    What is not seen of a tile is not read, or where `again` the nearest key that is seen is read again in its place:
    loads without masks are copied while others are multiplied. Where the tuning is `ahead`, `following` has a tile's
    entries in the block table, and each step reads those of the next one.
    """
    language = f"tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]}"
    precision = ', input_precision="ieee"' if problem.dtype == "f32" else ""
    narrow, value_narrow = (width < _padded(width) for width in (problem.width, problem.value_width))
    partly = masked and not again
    k_masks = ["inside[:, None]"] * partly + [f"(wide < {problem.width})[None, :]"] * narrow
    v_masks = ["inside[:, None]"] * partly + [f"(across < {problem.value_width})[None, :]"] * value_narrow

    def mask(conditions: list[str]) -> str:
        return f", mask={' & '.join(conditions)}, other=0.0" if conditions else ""

    # Blocks before the first that is seen whole may hold anything.
    inside = "(key < high) & (key >= lowest)" if problem.window else "key < high"
    top = ["higher = tl.maximum(top, tl.max(score, 1))"]
    top += ['finite = tl.where(higher == float("-inf"), 0.0, higher)'] if masked else ["finite = higher"]
    entry, offset = _places(problem.block_size, cut.keys)
    nearest = []
    if again:
        seen = "tl.minimum(key, high - 1)"
        nearest = [f"near = tl.maximum({seen}, lowest)" if problem.window else f"near = {seen}"]
        entry, offset = f"near // {problem.block_size}", f"near % {problem.block_size}"
    table = "blocks_ptr + request * W"
    if cut.ahead:
        assert again and not problem.window, "every place of a tile has an entry that is read"
        place = f"tl.minimum(key + {cut.keys}, high - 1) // {problem.block_size}"
        blocks = ["block = following.to(tl.int64)", f"following = tl.load({table} + {place})"]
    else:
        loaded = "tl.load(entry" + ", mask=inside, other=0" * partly + ")"
        blocks = [f"entry = {table} + {entry}", f"block = {loaded}.to(tl.int64)"]
    rows = f"({offset} * {problem.groups} + group)"
    size = problem.block_size * problem.groups
    values = [
        f"v_block = values_ptr + (block * {size * problem.value_width})[:, None]",
        f"v = tl.load(v_block + ({rows}[:, None] * {problem.value_width} + across[None, :]){mask(v_masks)})",
    ]
    early = _padded(problem.value_width) < WIDE_ROW  # which says why
    lines = [
        f"key = place + tl.arange(0, {cut.keys})",
        *[f"inside = {inside}"] * masked,
        *nearest,
        *blocks,
        f"k_block = keys_ptr + (block * {size * problem.width})[:, None]",
        f"k = tl.load(k_block + ({rows}[:, None] * {problem.width} + wide[None, :]){mask(k_masks)})",
        *(values if early else ()),
        *_score_lines(problem, masked),
        *top,
        "weight = tl.exp2(score - finite[:, None])",
        "scale = tl.exp2(top - finite)",
        "total = total * scale + tl.sum(weight, 1)",
        *(() if early else values),
        f"part = part * scale[:, None] + tl.dot(weight.to({language}), v{precision})",
        "top = higher",
    ]
    head = f"for place in tl.range({low}, {high}, {cut.keys}):"
    return "\n        ".join([head, *("    " + line for line in lines)])


def _places(block_size: int, keys: int) -> tuple[str, str]:
    """The entries in the block table of `keys` at `place`, and their rows in those blocks.

    Places are multiples of `_step`. Where blocks have a whole number of tiles or tiles of blocks, rows of blocks are
    the same for all tiles or differ by one number, which leaves the loop.
    """
    each = f"tl.arange(0, {keys})"
    if keys % block_size == 0:
        return f"place // {block_size} + {each} // {block_size}", f"{each} % {block_size}"
    if block_size % keys == 0:
        return f"(place // {block_size} + {each} * 0)", f"(place % {block_size} + {each})"
    return f"key // {block_size}", f"key % {block_size}"


def _step(block_size: int, keys: int) -> int:
    """What the first key of a run is a multiple of."""
    return min(block_size, keys) if max(block_size, keys) % min(block_size, keys) == 0 else 1


def _walk_source(name: str, problem: PagedAttention, cut: Tuning, args: tuple[str, ...]) -> str:
    repeat, tokens = problem.heads // problem.groups, _tokens(problem, cut)
    width, value_width = _padded(problem.width), _padded(problem.value_width)
    lowest = f"tl.maximum(0, length - end + first - {problem.window - 1})" if problem.window else "0"
    lowest_tile = not problem.run and cut.rows == _padded(repeat)
    walk = _walk_lines(problem, cut, "low", "high", again=lowest_tile)
    # Masks of scores cost nothing beside the reading of the cache, but much beside products of high tiles.
    if not lowest_tile and not problem.window and not problem.run:
        bare = _walk_lines(problem, cut, "low", "seen", masked=False)
        walk = (
            f"seen = low + tl.maximum(0, tl.minimum(high, length - end + first + 1) - low) // {cut.keys} * {cut.keys}"
        )
        rest = _walk_lines(problem, cut, "seen", "high")
        # A loop that has nothing to do would fill its stages with zeros all the same.
        for ends, lines in (("low < seen", bare), ("seen < high", rest)):
            walk += f"\n        if {ends}:\n            " + lines.replace("\n", "\n    ")
    step = _step(problem.block_size, cut.keys)
    whole = f"lowest // {step} * {step}" if problem.window else "0"
    runs = f"""begin_keys = {whole}
    run = tl.cdiv(tl.cdiv(last - begin_keys, splits), {cut.keys}) * {cut.keys}
    low = begin_keys + split * run
    high = tl.minimum(last, low + run)"""
    if problem.run:  # what lies before all windows of the tile adds nothing, and is skipped by whole tiles of keys
        runs = f"""low = tl.maximum(split * {problem.run}, lowest // {cut.keys} * {cut.keys})
    high = tl.minimum(last, split * {problem.run} + {problem.run})"""
    early = ""
    if cut.ahead:
        early = f"""
    begins = tl.minimum(low + tl.arange(0, {cut.keys}), high - 1)
    there = (low < high) & (first < end)
    following = tl.load(blocks_ptr + request * W + begins // {problem.block_size}, mask=there, other=0)"""
    elif cut.per_sm == 1:  # few requests: nothing else hides how far away their tables are
        early = f"""
    near_by = low // {problem.block_size} + tl.arange(0, {TABLE_LINE})
    there = (near_by * {problem.block_size} < high) & (first < end)
    tl.load(blocks_ptr + request * W + near_by, mask=there, other=0, volatile=True)  # to be near, not to be used"""
    return f'''
@triton.jit
def {name}(
    {_signature(args)}
):
    """Attention of a tile of {tokens} token(s) and {repeat} head(s) each, or its sums over a run of keys.

    score = {problem.scale!r} * q k
    """
    group, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    {_search_lines(tokens)}
    first = begin + further * {tokens}
    lowest = {lowest}
    last = length - end + tl.minimum(first + {tokens}, end)
    {runs}{early}
    {HERE}
    row = tl.arange(0, {cut.rows})
    head = group * {repeat} + row % {repeat}
    across = tl.arange(0, {value_width})
    if first < end:
        token = first + row // {repeat}
        real = (token < end) & (row < {tokens * repeat})
        position = length - end + token
        wide = tl.arange(0, {width})
        q_place = token.to(tl.int64) * q_stride_0 + head * q_stride_1
        q_inside = real[:, None] & (wide < {problem.width})[None, :]
        q = tl.load(q_ptr + q_place[:, None] + wide[None, :], mask=q_inside, other=0.0)
        top = tl.full([{cut.rows}], float("-inf"), dtype=tl.float32)
        total = tl.zeros([{cut.rows}], dtype=tl.float32)
        part = tl.zeros([{cut.rows}, {value_width}], dtype=tl.float32)
        {walk}
        out = token.to(tl.int64) * {problem.heads} + head
        out_inside = real[:, None] & (across < {problem.value_width})[None, :]
        {_end_lines(problem, cut)}

'''


def _search_lines(tokens: int) -> str:
    """The request of a tile, its starts and length, and how many of its tiles come before. All this is read while the
    launch before ends, which appends keys, but never writes inputs of a step."""
    return f"""request, further = tile, 0
    if tile >= R:
        request = -1
        for base in tl.range(0, R, {SPAN}):  # all at once: a load that waits for another takes longer than it all
            one = base + tl.arange(0, {SPAN})
            start = tl.load(starts_ptr + one, mask=one < R, other=1 << 30)
            request += tl.sum((start // {tokens} <= tile - R).to(tl.int32), 0)
        request = tl.maximum(request, 0)
    begin = tl.load(starts_ptr + request, mask=request < R, other=0)
    end = tl.load(starts_ptr + request + 1, mask=request < R, other=0)
    length = tl.load(lengths_ptr + request, mask=request < R, other=0)
    if tile >= R:
        further = tile - R + 1 - begin // {tokens}"""


def _end_lines(problem: PagedAttention, cut: Tuning) -> str:
    """What a program leaves: the sums of its run, or where there is one run, what they come to."""
    repeat, tokens = problem.heads // problem.groups, _tokens(problem, cut)
    language, value_width = f"tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]}", _padded(problem.value_width)
    sums = f"""out += split.to(tl.int64) * T * {problem.heads}
        tl.store(top_ptr + out, top, mask=real)
        tl.store(total_ptr + out, total, mask=real & (low < high))
        part_place = out[:, None] * {problem.value_width} + across[None, :]
        tl.store(part_ptr + part_place, part, mask=out_inside & (low < high))"""
    if problem.run:
        return sums
    sink = ""
    if problem.sinks:
        sink = f"""
            sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * {LOG2E!r}
            higher = tl.maximum(top, sink)
            total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
            part = part * tl.exp2(top - higher)[:, None]"""
    return f"""if splits == 1:{sink}
            behind = (request == R - 1) & (token < T) & (row < {tokens * repeat})  # of no request
            out_place = out[:, None] * {problem.value_width} + across[None, :]
            made = tl.where(real[:, None], part / total[:, None], 0.0).to({language})
            written = (real | behind)[:, None] & (across < {problem.value_width})[None, :]
            tl.store(out_ptr + out_place, made, mask=written)
        else:
            {sums.replace(chr(10), chr(10) + "    ")}
    elif (request == R - 1) & (splits == 1):  # tokens of no request
        token = first + row // {repeat}
        out = token.to(tl.int64) * {problem.heads} + head
        nothing = ((token < T) & (row < {tokens * repeat}))[:, None] & (across < {problem.value_width})[None, :]
        zeros = tl.zeros([{cut.rows}, {value_width}], dtype={language})
        tl.store(out_ptr + out[:, None] * {problem.value_width} + across[None, :], zeros, mask=nothing)"""


def _ends_source(name: str, problem: PagedAttention, args: tuple[str, ...], runs: str) -> str:
    at_once, (columns, _) = JOINED[runs][0], _parts(problem, runs)
    sink = f"tl.load(sinks_ptr + head).to(tl.float32) * {LOG2E!r}"
    begin = [f"sink = {sink}", "largest, sum = sink, 1.0"] if problem.sinks else [f"largest, sum = {LOWEST!r}, 0.0"]
    language = f"tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]}"
    add = [
        f"place = row + run.to(tl.int64) * T * {problem.heads}",
        'tops = tl.load(top_ptr + place, mask=run < splits, other=float("-inf"))',
        "totals = tl.load(total_ptr + place, mask=run < splits, other=0.0)",
        f"part_place = place[:, None] * {problem.value_width} + across[None, :]",
        "part = tl.load(part_ptr + part_place, mask=(run < splits)[:, None] & inside[None, :], other=0.0)",
        'read = tops > float("-inf")',
        "higher = tl.maximum(largest, tl.max(tops, 0))",
        "scale = tl.where(read, tl.exp2(tops - higher), 0.0)",
        "shrink = tl.exp2(largest - higher)",
        "sum = sum * shrink + tl.sum(tl.where(read, scale * totals, 0.0), 0)",
        "made = made * shrink + tl.sum(tl.where(read[:, None], scale[:, None] * part, 0.0), 0)",
        "largest = higher",
    ]
    further = f"""
    every = tl.arange(0, {MOST_SPLITS})
    each = row + every.to(tl.int64) * T * {problem.heads}
    reached = tl.load(top_ptr + each, mask=every < splits, other=float("-inf")) > float("-inf")
    stop = tl.max(tl.where(reached, every + 1, 0), 0)
    for base in tl.range({at_once}, stop, {at_once}):
        run = base + tl.arange(0, {at_once})
        {(chr(10) + "        ").join(add)}"""
    return f'''
@triton.jit
def {name}(
    {_signature(args)}
):
    """{columns} columns of a head: the sums of all runs of keys{" and the sink" * bool(problem.sinks)}, normalised.

    What is not there of {"the first " * (runs == "many")}{at_once} is read as well: loads then wait for none.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    {AHEAD}
    across = tl.program_id(2) * {columns} + tl.arange(0, {columns})
    inside = across < {problem.value_width}
    row = token.to(tl.int64) * {problem.heads} + head
    tokens = tl.load(starts_ptr + R)
    made = tl.zeros([{columns}], dtype=tl.float32)
    {(chr(10) + "    ").join(begin)}
    run = tl.arange(0, {at_once})
    {HERE}
    {(chr(10) + "    ").join(add)}{further * (runs == "many")}
    made = tl.where(token < tokens, made / sum, 0.0)
    tl.store(out_ptr + row * {problem.value_width} + across, made.to({language}), mask=inside)
'''


def _twin(name: str, problem: PagedAttention) -> str:
    arguments = ", ".join(["q", "keys", "values", "starts", "lengths", "blocks", *(["sinks"] if problem.sinks else [])])
    options = f"block_size={problem.block_size}, scale={problem.scale!r}"
    options += f", window={problem.window}" * bool(problem.window)
    options += f", softcap={problem.softcap!r}" * bool(problem.softcap)
    return f'''
def {name}({arguments}):
    """Attention of new tokens over their requests' rows of the cache."""
    return rt.paged_attention({arguments}, {options})
'''
