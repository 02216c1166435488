"""The order of the rows of experts, as Triton source and torch twin, for routers and for choices of other making.

    order, offsets    pairs t * K + k by expert, then by token; where the rows of each expert end

A program has some tiles of tokens, one after the other. The first launch leaves, for each tile and expert, a word:
which tokens chose it, a bit for each, and above these how many of the program's tiles before did; and how many of each
program did in all. The second adds up what comes before its own, and writes each pair where it belongs: behind those of
earlier tiles and those of lower bits. Nothing depends on which program is first.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgraph.codegen.triton.kernel import Expression, KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.rope import lines_of
from mgraph.ir.graph import Node

MOST_EXPERTS = 1024
"""Experts, up to which the scores of a few tokens fit in registers."""

WORD = 32
"""Tokens of a tile at most: each has a bit."""

PLACE_WARPS = 4
"""Of a program that places pairs."""

PLACED = 512
"""Pairs that it puts in their places at a time."""

ADDED = 8192
"""Counts that it adds up at a time."""

ENDS = "ends"
"""The dim of `starts`, i32 [R + 1], where requests begin and the last one ends."""

END = f"real = tl.load(starts_ptr + {ENDS} - 1)"
"""How many tokens are of requests."""


def power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Tuning:
    """How the kernels are cut: tokens in a tile (a power of two), programs a multiprocessor at most, and warps."""

    tokens: int
    programs: int
    num_warps: int


def tuning(experts: int) -> Tuning:
    """32 scores a thread, so that a few programs share a multiprocessor.

    What limits a choice is how many instructions it takes: about as many for each token with more tokens a thread, and
    half as many again with fewer. More programs leave more counts to add up.
    """
    return Tuning(max(1, min(WORD, 4096 // power(experts))), 2, 4)


@dataclass(frozen=True)
class Order:
    """One instance of `moe_order`: experts, experts a token, which may be one twice, and whether some pairs are of no
    expert (`others`)."""

    experts: int
    choices: int
    others: bool = False


def order_problem_of(node: Node) -> Order | str:
    """The instance that a node `moe_order` is, or why there is no kernel for it."""
    choices, experts = node.operands[0].tensor.shape[1], node.results[1].tensor.shape[0]
    if not isinstance(experts, int) or experts > MOST_EXPERTS:
        return f"there are {experts} experts; the kernel takes a known number up to {MOST_EXPERTS}"
    if not isinstance(choices, int):
        return f"the number {choices} of experts a token is not known"
    return Order(experts, choices, bool(node.attrs.get("others", False)))


def order(name: str, problem: Order, cut: Tuning | None = None) -> KernelSpec:
    """The site `order, offsets = name(indices)`: indices i64 [T, K] → order i64 [T * K], offsets i32 [E]. Each pair is
    taken as a token of one expert, since a token may have chosen one twice; those of no expert have one more."""
    groups = problem.experts + problem.others
    cut = cut or tuning(groups)
    args = ("indices", "words", "counts", "pairs")
    return KernelSpec(
        name=name,
        source=_count_source(name, groups, cut)
        + place_source(name, groups, 1, cut, "pairs", problem.experts, given=True),
        twin=f'''
def {name}(indices):
    """Pairs t * {problem.choices} + k by expert, then by token; where the rows of each expert end."""
    return rt.moe_order(indices, num_experts={problem.experts}{", others=True" if problem.others else ""})
''',
        inputs=(TensorSpec("indices", "i64", ("T", problem.choices)),),
        outputs=outputs_of("pairs", problem.experts),
        scratch=scratch_of("pairs", groups, cut),
        launches=(
            Launch(f"{name}_count", args, ("programs",), cut.num_warps, 1, aligned=False, spread=True),
            place_launch(name, "pairs"),
        ),
        dims={"pairs": ("mul", "T", problem.choices), "programs": programs_of("pairs", cut)},
    )


def outputs_of(pairs: Expression, experts: int) -> tuple[TensorSpec, ...]:
    """`order` and `offsets`."""
    return TensorSpec("order", "i64", (pairs,)), TensorSpec("offsets", "i32", (experts,))


def scratch_of(tokens: str, experts: int, cut: Tuning) -> tuple[TensorSpec, ...]:
    """What the first launch leaves: words of each tile and counts of each program, by expert."""
    tiles = ("cdiv", tokens, cut.tokens)
    return TensorSpec("words", "i64", (tiles, experts)), TensorSpec("counts", "i32", ("programs", experts))


def programs_of(tokens: str, cut: Tuning) -> Expression:
    """How many programs there are: the extent `programs`, which grids and counts have."""
    return "min", ("cdiv", tokens, cut.tokens), ("mul", "sms", cut.programs)


def place_launch(name: str, tokens: str, more: tuple[str, ...] = ()) -> Launch:
    """The second launch, of the source that `place_source` gives."""
    args = ("indices", "words", "counts", "order", "offsets", tokens, *more)
    return Launch(f"{name}_place", args, ("programs",), PLACE_WARPS, num_stages=2, aligned=True, spread=True)


def _share(tokens: str, cut: Tuning) -> list[str]:
    """The tiles of a program: as many for each."""
    return [
        f"tiles = tl.cdiv({tokens}, {cut.tokens})",
        "share = tl.cdiv(tiles, tl.num_programs(0))",
        "first = tl.program_id(0) * share",
    ]


def tile_lines(tokens: str, cut: Tuning) -> list[str]:
    """The loop over the tiles of a program."""
    return [
        *_share(tokens, cut),
        "for tile in range(first, tl.minimum(first + share, tiles)):",
        f"    token = tile * {cut.tokens} + tl.arange(0, {cut.tokens})",
    ]


def count_lines(bits: list[str], tokens: str, experts: int, cut: Tuning) -> list[str]:
    """The words of a tile, and its bits counted; `bits` says how they are made of that of each token, `bit`."""
    mask = f", mask=expert < {experts}" if power(experts) > experts else ""
    return [
        f"bit = tl.where(token < {tokens}, 1 << tl.arange(0, {cut.tokens}), 0)",
        *bits,
        "bits = bits.to(tl.uint32, bitcast=True)",
        "word = (count.to(tl.int64) << 32) | bits.to(tl.int64)",
        f"tl.store(words_ptr + tile * {experts} + expert, word{mask})",
        *_ones("ones", "bits"),
        "count += ones",
    ]


def _ones(ones: str, bits: str) -> list[str]:
    """How many bits of a u32 are set, such that the compiler knows it for the one instruction that it is."""
    return [
        f"{ones} = {bits} - (({bits} >> 1) & 0x55555555)",
        f"{ones} = ({ones} & 0x33333333) + (({ones} >> 2) & 0x33333333)",
        f"{ones} = (({ones} + ({ones} >> 4)) & 0x0F0F0F0F) * 0x01010101",
        f"{ones} = ({ones} >> 24).to(tl.int32, bitcast=True)",
    ]


def _known(which: str, experts: int) -> str:
    """A number as i32; one of no expert (of a router that is wrong) is the last, so that nothing is written outside."""
    return f"tl.where(({which} >= 0) & ({which} < {experts}), {which}, {experts - 1}).to(tl.int32)"


def _count_source(name: str, experts: int, cut: Tuning) -> str:
    columns = power(experts)
    mask = f", mask=expert < {experts}" if columns > experts else ""
    body = lines_of(
        f"expert = tl.arange(0, {columns})",
        f"count = tl.zeros([{columns}], dtype=tl.int32)",
        *tile_lines("pairs", cut),
        *(
            f"    {line}"
            for line in (
                "which = tl.load(indices_ptr + token, mask=token < pairs, other=0)",
                f"which = {_known('which', experts)}",
                *count_lines(
                    ["bits = tl.sum(tl.where(expert[None, :] == which[:, None], bit[:, None], 0), axis=0)"],
                    "pairs",
                    experts,
                    cut,
                ),
            )
        ),
        f"tl.store(counts_ptr + tl.program_id(0) * {experts} + expert, count{mask})",
    )
    return f'''
@triton.jit
def {name}_count(indices_ptr, words_ptr, counts_ptr, pairs):
    """Which pairs are of each expert, {cut.tokens} at a time, and how many of this program."""
{body}
'''


def place_source(
    name: str,
    experts: int,
    choices: int,
    cut: Tuning,
    tokens: str,
    real: int,
    *,
    given: bool = False,
    ended: bool = False,
) -> str:
    """`real` of the experts have an offset. With `given` the choice comes from elsewhere, and may be wrong. Where it
    is `ended`, pairs from the end on stay where they are."""
    columns = power(experts)
    chunk = max(1, ADDED // columns)
    masked = columns > experts
    inside = f"(row < rows)[:, None]{f' & (expert < {experts})[None, :]' if masked else ''}"
    body = lines_of(
        f"expert = tl.arange(0, {columns})",
        f"earlier = tl.zeros([{chunk}, {columns}], dtype=tl.int32)",
        f"all_ = tl.zeros([{chunk}, {columns}], dtype=tl.int32)",
        "rows = tl.num_programs(0)",
        f"for start in range(0, rows, {chunk}):",
        f"    row = start + tl.arange(0, {chunk})",
        f"    at = row[:, None] * {experts} + expert[None, :]",
        f"    count = tl.load(counts_ptr + at, mask={inside}, other=0)",
        "    all_ += count",
        "    earlier += tl.where((row < tl.program_id(0))[:, None], count, 0)",
        "total = tl.sum(all_, axis=0)",
        "end = tl.cumsum(total, axis=0)",
        "if tl.program_id(0) == 0:",
        f"    tl.store(offsets_ptr + expert, end{f', mask=expert < {real}' if columns > real else ''})",
        "begin = end - total + tl.sum(earlier, axis=0)",
        END if ended else "",
        *_share(tokens, cut),
        f"last = tl.minimum(first + share, tiles) * {cut.tokens * choices}",
        f"last = tl.minimum(last, {tokens}{f' * {choices}' if choices > 1 else ''})",
        f"for start in range(first * {cut.tokens * choices}, last, {PLACED}):",
        f"    pair = start + tl.arange(0, {PLACED})",
        "    known = pair < last",
        "    which = tl.load(indices_ptr + pair, mask=known, other=0)",
        f"    which = {_known('which', experts) if given else 'which.to(tl.int32)'}",
        f"    word = tl.load(words_ptr + pair // {cut.tokens * choices} * {experts} + which, mask=known, other=0)",
        f"    lower = (1 << (pair // {choices} % {cut.tokens})) - 1",
        "    lower = word.to(tl.uint32) & lower.to(tl.uint32, bitcast=True)",
        *(f"    {line}" for line in _ones("before", "lower")),
        "    place = tl.gather(begin, which, 0) + (word >> 32).to(tl.int32) + before",
        f"    place = tl.where(pair < real * {choices}, place, pair)" if ended else "",
        "    tl.store(order_ptr + place, pair.to(tl.int64), mask=known)",
    )
    return f'''
@triton.jit
def {name}_place(
    indices_ptr, words_ptr, counts_ptr, order_ptr, offsets_ptr, {tokens}{f", starts_ptr, {ENDS}" * ended}
):
    """Where the rows of each expert end, and the pairs of this program in their places, in the order of tokens."""
{body}
'''
