"""Keys of the tokens that top-k, top-p and min-p leave of each row, as Triton source and torch twin.

What is left of a row is a beginning of its scores in falling order: the k largest and what equals the last of them; of
these, those before which less than top_p of the probability lies, equal scores in the order of tokens; and those at
least min_p times as probable as the likeliest. No row is sorted for that. Floats have the order of whole numbers made
of their bits, so a program finds where a row ends three bits at a time: it goes over the row and sums, for each of the
eight ways that the next bits may be, how many scores, or how much probability, lie there or above. A row that is not
cut is copied. What becomes of it does not depend on other rows.
"""

from __future__ import annotations

from mgraph.codegen.triton.kernel import ITEM_BYTES, LOG2E, LOWEST, KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.likeliest import Likeliest

BLOCK = 4096
"""Columns that are looked at at once."""
BITS = 3
"""That are found in one walk over a row."""


def build(name: str, problem: Likeliest) -> KernelSpec:
    """The site `left = name(scores, keys, temperature, top_k, top_p, min_p)`: scores [N, V], keys f32 [N, V],
    temperature, top_p, min_p f32 [N], top_k i32 [N] → f32 [N, V]."""
    per_row = ("temperature", "f32"), ("top_k", "i32"), ("top_p", "f32"), ("min_p", "f32")
    names = tuple(text for text, _ in per_row)
    whole = ("*", problem.classes)
    return KernelSpec(
        name=name,
        source=_search_source(name, problem) + _source(name, problem),
        twin=f'''
def {name}(scores, keys, {", ".join(names)}):
    """The keys of what the cuts leave of each row, minus infinity for all else."""
    return rt.cut_keys(scores, keys, {", ".join(names)})
''',
        inputs=(
            TensorSpec("scores", problem.dtype, whole),
            TensorSpec("keys", "f32", whole),
            *(TensorSpec(text, dtype, ("*",)) for text, dtype in per_row),
        ),
        outputs=(TensorSpec("left", "f32", whole),),
        scratch=(),
        launches=(
            Launch(
                name,
                ("scores", "keys", *names, "left"),
                ("rows",),
                num_warps=16,
                num_stages=3,
                aligned=problem.classes % (16 // ITEM_BYTES[problem.dtype]) == 0,
            ),
        ),
    )


def _search_source(name: str, problem: Likeliest) -> str:
    ways = range(1, 2**BITS)
    levels = -(-32 // BITS)

    def lines(form: str, depth: int) -> str:
        return "\n".join(f"{' ' * 4 * depth}{form.format(way=way, next=way + 1)}" for way in ways)

    above = f"tl.where(digit == {len(ways)}, above, sum_{len(ways)})"
    for way in reversed(ways[:-1]):
        above = f"tl.where(digit == {way - 1}, sum_{way}, {above})"
    return f'''
@triton.jit
def {name}_order(score):
    """Whole numbers in the order of floats."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def {name}_weight(score, order, top, scale, lowest, COUNTED: tl.constexpr):
    """1, or probabilities but for a factor, of scores from the order `lowest` on."""
    weight = tl.where(score > float("-inf"), 1.0, 0.0) if COUNTED else tl.exp2((score - top) * scale)
    return tl.where(order >= lowest, weight, 0.0)


@triton.jit
def {name}_search(scores_ptr, top, scale, lowest, target, COUNTED: tl.constexpr):
    """The largest order from which on the weights reach `target`, and the weight above it."""
    reached = (lowest * 0).to(tl.uint32)
    above = target * 0.0
    for level in range({levels}):
        shift = tl.maximum({32 - BITS} - {BITS} * level, 0).to(tl.uint32)
{lines(f"part_{{way}} = tl.zeros([{BLOCK}], dtype=tl.float32)", 2)}
        for at in tl.range(0, {problem.classes}, {BLOCK}):
            column = at + tl.arange(0, {BLOCK})
            score = tl.load(scores_ptr + column, mask=column < {problem.classes}, other=float("-inf")).to(tl.float32)
            order = {name}_order(score)
            weight = {name}_weight(score, order, top, scale, lowest, COUNTED)
{lines("part_{way} += tl.where(order >= reached + (shift * 0 + {way} << shift), weight, 0.0)", 3)}
{lines("sum_{way} = tl.sum(part_{way})", 2)}
        digit = tl.where(sum_1 >= target, 1, 0)
{lines("digit += tl.where(sum_{next} >= target, 1, 0)", 2).rpartition(chr(10))[0]}
        above = {above}
        reached += digit.to(tl.uint32) << shift
    return reached, above

'''


def _source(name: str, problem: Likeliest) -> str:
    classes = problem.classes
    return f'''
@triton.jit
def {name}(scores_ptr, keys_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, left_ptr):
    """A row: its keys where its score is left, minus infinity elsewhere."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * {classes}
    temperature, k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    p, least = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    hot = temperature != 0.0
    scale = {LOG2E!r} / tl.where(hot, temperature, 1.0)
    top = temperature * 0.0
    if hot & ((p < 1.0) | (least > 0.0)):
        tops = tl.full([{BLOCK}], {LOWEST!r}, dtype=tl.float32)
        for at in tl.range(0, {classes}, {BLOCK}):
            column = at + tl.arange(0, {BLOCK})
            score = tl.load(scores_ptr + start + column, mask=column < {classes}, other=float("-inf"))
            tops = tl.maximum(tops, score.to(tl.float32))
        top = tl.max(tops)
    lowest = (row * 0).to(tl.uint32)
    if hot & (k > 0) & (k < {classes}):
        lowest, _ = {name}_search(scores_ptr + start, top, scale, lowest, k.to(tl.float32), True)
    last, above, target = lowest * 0, top * 0.0, top * 0.0
    if hot & (p < 1.0):
        sums = tl.zeros([{BLOCK}], dtype=tl.float32)
        for at in tl.range(0, {classes}, {BLOCK}):
            column = at + tl.arange(0, {BLOCK})
            score = tl.load(scores_ptr + start + column, mask=column < {classes}, other=float("-inf")).to(tl.float32)
            sums += {name}_weight(score, {name}_order(score), top, scale, lowest, False)
        # Of nothing there is no part: the likeliest is left.
        target = tl.maximum(p * tl.sum(sums), 1e-30)
        last, above = {name}_search(scores_ptr + start, top, scale, lowest, target, False)
    equals = row * 0
    for at in tl.range(0, {classes}, {BLOCK}):
        column = at + tl.arange(0, {BLOCK})
        inside = column < {classes}
        score = tl.load(scores_ptr + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        key = tl.load(keys_ptr + start + column, mask=inside, other=0.0)
        order = {name}_order(score)
        weight = tl.exp2((score - top) * scale)
        equal = (inside & (order == last)).to(tl.int32)
        before = above + (equals + tl.cumsum(equal, axis=0) - equal).to(tl.float32) * weight
        equals += tl.sum(equal)
        left = (order > last) | ((equal != 0) & (before < target))
        left = left & (order >= lowest) & (weight >= least)
        key = tl.where(hot, tl.where(left, key, float("-inf")), key)
        tl.store(left_ptr + start + column, key, mask=inside)
'''
