"""Attention over a paged cache, single new tokens and parts of prompts alike, as Triton source and torch twin.

Two launches. The first cuts the new tokens of each request into tiles of a few tokens times the query heads that read
one key head, and the keys that a tile sees into `splits` runs; a program takes one run for one tile and key head, walks
over it through the block table, and leaves sums that are not normalised (Milakov and Gimelshein 2018,
arXiv:1805.02867): the largest score, the sum of weights, and weights times values, in f32. The second adds the runs of
each token, and the sink. `splits` follows from shapes alone, as many as fill the GPU where there are few tiles, so that
a CUDA graph of a bucket keeps it.

Tile p belongs to the last request r with starts[r] // tokens + r <= p: each request may waste one tile, and no table of
tiles is needed. Tokens of no request give 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mgraph.codegen.triton.kernel import ITEM_BYTES, TRITON_LANGUAGE_DTYPES, KernelSpec, Launch, TensorSpec
from mgraph.ir.graph import Node, Static
from mgraph.ir.opdef import op_def

PER_SM = 2
"""Programs of the first launch that each multiprocessor should have, if need be by splits."""
MOST_SPLITS = 32
LEAST_KEYS = 256
"""A run of keys is not shorter than that, of the longest sequences there may be."""
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


@dataclass(frozen=True)
class Tuning:
    """Rows of a tile (tokens times heads), keys at a time, and warps."""

    rows: int
    keys: int
    num_warps: int = 4


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


def tuning(problem: PagedAttention) -> Tuning:
    """Tiles for single tokens: what these cost is reading the cache."""
    wide = max(_power(problem.width), _power(problem.value_width)) * ITEM_BYTES[problem.dtype]
    return Tuning(max(16, _power(problem.heads // problem.groups)), 64 if wide <= 256 else 32)


def forward(name: str, problem: PagedAttention, cut: Tuning | None = None) -> KernelSpec:
    """The site `out = name(q, keys, values, starts, lengths, blocks[, sinks])`: out [T, H, E] like q's dtype."""
    cut = cut or tuning(problem)
    tokens = _tokens(problem, cut)
    head, value = (problem.heads, problem.width), (problem.heads, problem.value_width)
    sinks = (TensorSpec("sinks", problem.sinks, (problem.heads,)),) if problem.sinks else ()
    tables = ("starts", "lengths", "blocks")
    parts = ("q", "keys", "values", *tables, "part", "top", "total", "T", "R", "W", "splits", *_STRIDES)
    ends = (*(s.name for s in sinks), "starts", "part", "top", "total", "out", "T", "R", "splits")
    aligned = all(width * ITEM_BYTES[problem.dtype] % 16 == 0 for width in (problem.width, problem.value_width))
    busy = ("cdiv", ("mul", "sms", PER_SM), ("mul", "tiles", problem.groups))
    longest = ("cdiv", ("mul", "W", problem.block_size), LEAST_KEYS)
    return KernelSpec(
        name=name,
        source=_parts_source(name, problem, cut, parts) + _ends_source(name, problem, ends),
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
            TensorSpec("part", "f32", ("splits", "T", *value)),
            TensorSpec("top", "f32", ("splits", "T", problem.heads)),
            TensorSpec("total", "f32", ("splits", "T", problem.heads)),
        ),
        launches=(
            Launch(f"{name}_parts", parts, ("tiles", problem.groups, "splits"), cut.num_warps, 2, aligned),
            Launch(f"{name}_ends", ends, ("T", problem.heads), 1, 1, aligned),
        ),
        dims={
            "tiles": ("add", ("cdiv", "T", tokens), "R"),
            "splits": ("max", 1, ("min", MOST_SPLITS, ("min", busy, longest))),
        },
    )


_STRIDES = ("q_stride_0", "q_stride_1")


def _power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()


def _tokens(problem: PagedAttention, cut: Tuning) -> int:
    """New tokens of a tile."""
    return cut.rows // (problem.heads // problem.groups)


def _signature(args: tuple[str, ...]) -> str:
    numbers = {"T", "R", "W", "splits", *_STRIDES}
    return ", ".join(name if name in numbers else f"{name}_ptr" for name in args)


def _score_lines(problem: PagedAttention) -> str:
    precision = ', input_precision="ieee"' if problem.dtype == "f32" else ""
    lines = [f"score = tl.dot(q, k{precision}) * {problem.scale!r}"]
    if problem.softcap:  # cap * tanh(score / cap), by the exponential of a number that is not positive
        lines += [
            f"bent = tl.exp(-2.0 * tl.abs(score) / {problem.softcap!r})",
            f"bent = {problem.softcap!r} * (1.0 - bent) / (1.0 + bent)",
            "score = tl.where(score < 0.0, -bent, bent)",
        ]
    seen = "inside[None, :] & (key[None, :] <= position[:, None])"
    if problem.window:
        seen += f" & (key[None, :] > position[:, None] - {problem.window})"
    return "\n            ".join([*lines, f'score = tl.where({seen}, score, float("-inf"))'])


def _parts_source(name: str, problem: PagedAttention, cut: Tuning, args: tuple[str, ...]) -> str:
    repeat, tokens = problem.heads // problem.groups, _tokens(problem, cut)
    language = f"tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]}"
    width, value_width = max(16, _power(problem.width)), max(16, _power(problem.value_width))
    lowest = f"tl.maximum(0, length - end + first - {problem.window - 1})" if problem.window else "0"
    precision = ', input_precision="ieee"' if problem.dtype == "f32" else ""
    return f'''
@triton.jit
def {name}_parts(
    {_signature(args)}
):
    """Sums of a run of keys for a tile of {tokens} token(s) and {repeat} head(s) each: largest score, weights, values.

    score = {problem.scale!r} * q k
    """
    tile, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = 0
    beyond = R
    while beyond - request > 1:
        middle = (request + beyond) // 2
        before = tl.load(starts_ptr + middle) // {tokens} + middle <= tile
        request = tl.where(before, middle, request)
        beyond = tl.where(before, beyond, middle)
    begin = tl.load(starts_ptr + request)
    end = tl.load(starts_ptr + request + 1)
    length = tl.load(lengths_ptr + request)
    first = begin + (tile - begin // {tokens} - request) * {tokens}
    if first < end:
        row = tl.arange(0, {cut.rows})
        token = first + row // {repeat}
        head = group * {repeat} + row % {repeat}
        real = (token < end) & (row < {tokens * repeat})
        position = length - end + token
        wide = tl.arange(0, {width})
        q_place = token.to(tl.int64) * q_stride_0 + head * q_stride_1
        q_inside = real[:, None] & (wide < {problem.width})[None, :]
        q = tl.load(q_ptr + q_place[:, None] + wide[None, :], mask=q_inside, other=0.0)
        lowest = {lowest}
        last = length - end + tl.minimum(first + {tokens}, end)
        run = tl.cdiv(tl.cdiv(last - lowest, splits), {cut.keys}) * {cut.keys}
        low = lowest + split * run
        high = tl.minimum(last, low + run)
        across = tl.arange(0, {value_width})
        top = tl.full([{cut.rows}], float("-inf"), dtype=tl.float32)
        total = tl.zeros([{cut.rows}], dtype=tl.float32)
        part = tl.zeros([{cut.rows}, {value_width}], dtype=tl.float32)
        for place in tl.range(low, high, {cut.keys}):
            key = place + tl.arange(0, {cut.keys})
            inside = key < high
            table = blocks_ptr + request * W + key // {problem.block_size}
            block = tl.load(table, mask=inside, other=0).to(tl.int64)
            slot = (block * {problem.block_size} + key % {problem.block_size}) * {problem.groups} + group
            k_inside = inside[None, :] & (wide < {problem.width})[:, None]
            k = tl.load(keys_ptr + slot[None, :] * {problem.width} + wide[:, None], mask=k_inside, other=0.0)
            {_score_lines(problem)}
            higher = tl.maximum(top, tl.max(score, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp(score - finite[:, None])
            scale = tl.exp(top - finite)
            total = total * scale + tl.sum(weight, 1)
            v_inside = inside[:, None] & (across < {problem.value_width})[None, :]
            v_place = slot[:, None] * {problem.value_width} + across[None, :]
            v = tl.load(values_ptr + v_place, mask=v_inside, other=0.0)
            part = part * scale[:, None] + tl.dot(weight.to({language}), v{precision})
            top = higher
        out = (split.to(tl.int64) * T + token) * {problem.heads} + head
        tl.store(top_ptr + out, top, mask=real)
        tl.store(total_ptr + out, total, mask=real)
        out_inside = real[:, None] & (across < {problem.value_width})[None, :]
        tl.store(part_ptr + out[:, None] * {problem.value_width} + across[None, :], part, mask=out_inside)

'''


def _ends_source(name: str, problem: PagedAttention, args: tuple[str, ...]) -> str:
    value_width = max(16, _power(problem.value_width))
    sink = (
        "tl.load(sinks_ptr + head).to(tl.float32)" if problem.sinks else "tl.load(total_ptr + row) * 0.0 - float('inf')"
    )
    language = f"tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]}"
    return f'''
@triton.jit
def {name}_ends(
    {_signature(args)}
):
    """A token's head: the sums of all runs of keys{" and the sink" * bool(problem.sinks)}, normalised."""
    token, head = tl.program_id(0), tl.program_id(1)
    across = tl.arange(0, {value_width})
    inside = across < {problem.value_width}
    row = token.to(tl.int64) * {problem.heads} + head
    made = tl.zeros([{value_width}], dtype=tl.float32)
    if token < tl.load(starts_ptr + R):
        sink = {sink}
        largest = sink
        place = row
        for _ in tl.range(0, splits):
            largest = tl.maximum(largest, tl.load(top_ptr + place))
            place += T * {problem.heads}
        sum = tl.exp(sink - largest)
        place = row
        for _ in tl.range(0, splits):
            scale = tl.exp(tl.load(top_ptr + place) - largest)
            sum += scale * tl.load(total_ptr + place)
            made += scale * tl.load(part_ptr + place * {problem.value_width} + across, mask=inside, other=0.0)
            place += T * {problem.heads}
        made = made / sum
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
