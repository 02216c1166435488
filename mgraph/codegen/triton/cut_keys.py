"""Keys of the tokens that top-k, top-p and min-p leave of each row, as Triton source and torch twin.

What is left of a row is a beginning of its scores in falling order: the k largest and what equals the last of them; of
these, those before which less than top_p of the probability lies, equal scores in the order of tokens; and those at
least min_p times as probable as the likeliest. No row is sorted for that. Floats have the order of whole numbers made
of their bits, and where a row ends is found four bits after the other: for each of the sixteen ways that the next bits
may be, how many scores, or how much probability, lie there or above.

A program has a part of a row. It is launched again for each step, knows from its own place in `whole` which step it
is, and adds up what all parts of its row found in the step before; so no program waits for another:

    0 … 7     the bits of the k-th largest score
    8         the probability of what k leaves, of which top_p is the target
    9 … 16    the bits of the score with which that is reached
    17        how many equal that

A step that a row has no use for ends at once; so do those of the lower bits where all scores have been bf16. Sums are
over parts of fixed columns, in one order: what becomes of a row does not depend on others. They are in f32, so where
top-p ends is right to about a millionth of the probability.
"""

from __future__ import annotations

from mgraph.codegen.triton.kernel import LOG2E, LOWEST, KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.likeliest import PART, Likeliest

BITS, WAYS = 4, 16
"""That are found in a step, and how they may be."""
LEVELS = 32 // BITS
STEPS = 2 * LEVELS + 2
STEP, REACHED, FROM, LOWER = range(4)
"""In `whole`, of each part: the step that is next, the order of scores that is reached, from which order on k leaves
scores, lower bits of scores."""
TOP, ABOVE, TARGET = range(3)
"""In `real`: the largest score of the row, what lies above the order that is reached, and what is to be reached."""
PER_ROW = (("temperature", "f32"), ("top_k", "i32"), ("top_p", "f32"), ("min_p", "f32"))


def build(name: str, problem: Likeliest) -> KernelSpec:
    """The site `left = name(scores, keys, temperature, top_k, top_p, min_p)`: scores [N, V], keys f32 [N, V],
    temperature, top_p, min_p f32 [N], top_k i32 [N] → f32 [N, V]."""
    names = tuple(text for text, _ in PER_ROW)
    all_, parts = ("*", problem.classes), problem.parts
    state = ("tops", "sums", "whole", "real")

    def launch(function: str, *args: str) -> Launch:
        return Launch(f"{name}_{function}", args, ("rows", parts), num_warps=8, num_stages=1, aligned=problem.aligned)

    return KernelSpec(
        name=name,
        source=_source(name, problem),
        twin=f'''
def {name}(scores, keys, {", ".join(names)}):
    """The keys of what the cuts leave of each row, minus infinity for all else."""
    return rt.cut_keys(scores, keys, {", ".join(names)})
''',
        inputs=(
            TensorSpec("scores", problem.dtype, all_),
            TensorSpec("keys", "f32", all_),
            *(TensorSpec(text, dtype, ("*",)) for text, dtype in PER_ROW),
        ),
        outputs=(TensorSpec("left", "f32", all_),),
        scratch=(
            TensorSpec("tops", "f32", ("*", parts)),
            TensorSpec("sums", "f32", ("*", parts * 2 * WAYS)),  # of a step and the one before
            TensorSpec("whole", "i32", ("*", parts * 4)),
            TensorSpec("real", "f32", ("*", parts * 4)),
        ),
        launches=(
            launch("top", "scores", "tops", "whole", "real"),
            *[launch("step", "scores", *names[:3], *state)] * STEPS,
            launch("write", "scores", "keys", *names, *state[1:], "left"),
        ),
    )


def _read(problem: Likeliest) -> str:
    return f"""column = part * {PART} + tl.arange(0, {PART})
    inside = column < {problem.classes}
    place = row.to(tl.int64) * {problem.classes} + column
    score = tl.load(scores_ptr + place, mask=inside, other=float("-inf")).to(tl.float32)"""


def _source(name: str, problem: Likeliest) -> str:
    return _top_source(name, problem) + _step_source(name, problem) + _write_source(name, problem)


def _top_source(name: str, problem: Likeliest) -> str:
    parts = problem.parts
    return f'''
@triton.jit
def {name}_order(score):
    """Whole numbers in the order of floats."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def {name}_top(scores_ptr, tops_ptr, whole_ptr, real_ptr):
    """The largest score of a part, and lower bits; all else that is known of the row is 0."""
    row, part = tl.program_id(0), tl.program_id(1)
    {_read(problem)}
    at = row * {parts} + part
    tl.store(tops_ptr + at, tl.maximum(tl.max(score), {LOWEST!r}))
    lower = tl.max(score.to(tl.int32, bitcast=True) & 0xFFFF)
    tl.store(whole_ptr + at * 4 + tl.arange(0, 4), tl.where(tl.arange(0, 4) == {LOWER}, lower, 0))
    tl.store(real_ptr + at * 4 + tl.arange(0, 4), tl.zeros([4], dtype=tl.float32))
'''


def _step_source(name: str, problem: Likeliest) -> str:
    parts, width = problem.parts, problem.width
    above = "tl.sum(tl.where(order >= reached + (zero + {way} << shift), weight, 0.0))"
    levels = "\n".join(f"{' ' * 12}tl.store(found + {way}, {above.format(way=way)})" for way in range(1, WAYS))
    return f'''

@triton.jit
def {name}_step(
    scores_ptr, temperature_ptr, top_k_ptr, top_p_ptr, tops_ptr, sums_ptr, whole_ptr, real_ptr,
):
    """The next step of a part."""
    row, part = tl.program_id(0), tl.program_id(1)
    mine = (row * {parts} + part) * 4
    step = tl.load(whole_ptr + mine + {STEP})
    temperature, k, p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    hot = temperature != 0.0
    counted, cut = hot & (k > 0) & (k < {problem.classes}), hot & (p < 1.0)
    every = tl.arange(0, {width})
    lower = tl.load(whole_ptr + (row * {parts} + every) * 4 + {LOWER}, mask=every < {parts}, other=0)
    known = tl.where(tl.max(lower) == 0, {LEVELS // 2}, {LEVELS})  # after so many levels all bits are
    tops = tl.load(tops_ptr + row * {parts} + every, mask=every < {parts}, other={LOWEST!r})
    top = tl.max(tops)
    tl.debug_barrier()  # of a program's warps none may write what another has yet to read
    tl.store(whole_ptr + mine + {STEP}, step + 1)
    tl.store(real_ptr + mine + {TOP}, top)
    level = tl.where(step <= {LEVELS}, step, step - {LEVELS + 1})  # whose sums are to be made, if it is one
    last, useful = step == {STEPS - 1}, (level <= known) | (step == {LEVELS})
    if ((counted & (step <= {LEVELS})) | (cut & (step >= {LEVELS}))) & (useful | last):
        way = tl.arange(0, {WAYS})
        places = (row * {parts} + every[:, None]) * {2 * WAYS} + (step + 1) % 2 * {WAYS} + way[None, :]
        there = (every < {parts})[:, None] & (step > 0) & (way[None, :] >= 0)
        sums = tl.sum(tl.load(sums_ptr + places, mask=there, other=0.0), axis=0)
        reached = tl.load(whole_ptr + mine + {REACHED}).to(tl.uint32, bitcast=True)
        lowest = tl.load(whole_ptr + mine + {FROM}).to(tl.uint32, bitcast=True)
        above, target = tl.load(real_ptr + mine + {ABOVE}), tl.load(real_ptr + mine + {TARGET})
        tl.debug_barrier()
        # The bits of the step before: the last way in which the target is reached.
        digit = tl.sum(tl.where((way > 0) & (sums >= target), 1, 0))
        further = tl.where(digit == {WAYS - 1}, above, tl.sum(tl.where(way == digit + 1, sums, 0.0)))
        resolved = (level > 0) & (level <= known) & (counted | (step > {LEVELS}))
        zero = lowest * 0
        bits = digit.to(tl.uint32) << tl.maximum({32 - BITS} - {BITS} * (level - 1), 0).to(tl.uint32)
        reached = tl.where(resolved, reached + bits, reached)
        above = tl.where(resolved, further, above)
        lowest = tl.where((step == {LEVELS}) & counted, reached, lowest)
        target = tl.where(step == 0, k.to(tl.float32), target)
        begun = step == {LEVELS + 1}
        # Of no probability there is no part: the likeliest is left.
        target = tl.where(begun, tl.maximum(p * tl.sum(tl.where(way == 0, sums, 0.0)), 1e-30), target)
        reached, above = tl.where(begun, zero, reached), tl.where(begun, 0.0, above)
        # Lower bits that are 0 are 1 in the order of negative numbers.
        filled = last & (known < {LEVELS}) & (reached < 0x80000000)
        reached = tl.where(filled, reached | 0xFFFF, reached)
        tl.store(whole_ptr + mine + {REACHED}, reached.to(tl.int32, bitcast=True))
        tl.store(whole_ptr + mine + {FROM}, lowest.to(tl.int32, bitcast=True))
        tl.store(real_ptr + mine + {ABOVE}, above)
        tl.store(real_ptr + mine + {TARGET}, target)
        {_read(problem).replace(chr(10), chr(10) + "    ")}
        order = {name}_order(score)
        chance = tl.exp2((score - top) * ({LOG2E!r} / tl.where(hot, temperature, 1.0)))
        one = tl.where(score > float("-inf"), 1.0, 0.0)
        weight = tl.where(step < {LEVELS}, one, tl.where(order >= lowest, chance, 0.0))
        found = sums_ptr + (row * {parts} + part) * {2 * WAYS} + step % 2 * {WAYS}
        if step == {LEVELS}:
            tl.store(found, tl.sum(weight))
        elif last:
            tl.store(found, tl.sum(tl.where(inside & (order == reached), 1.0, 0.0)))
        elif level < known:
            shift = ({32 - BITS} - {BITS} * level).to(tl.uint32)
{levels}
'''


def _write_source(name: str, problem: Likeliest) -> str:
    parts, width = problem.parts, problem.width
    return f'''
@triton.jit
def {name}_write(
    scores_ptr, keys_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, sums_ptr, whole_ptr, real_ptr, left_ptr,
):
    """The keys of a part where its scores are left, minus infinity elsewhere."""
    row, part = tl.program_id(0), tl.program_id(1)
    mine = (row * {parts} + part) * 4
    temperature, p, least = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    hot = temperature != 0.0
    last = tl.load(whole_ptr + mine + {REACHED}).to(tl.uint32, bitcast=True)
    lowest = tl.load(whole_ptr + mine + {FROM}).to(tl.uint32, bitcast=True)
    top, above = tl.load(real_ptr + mine + {TOP}), tl.load(real_ptr + mine + {ABOVE})
    target = tl.load(real_ptr + mine + {TARGET})
    last = tl.where(hot & (p < 1.0), last, last * 0)
    every = tl.arange(0, {width})
    equals = sums_ptr + (row * {parts} + every) * {2 * WAYS} + {(STEPS - 1) % 2 * WAYS}
    earlier = tl.sum(tl.load(equals, mask=(every < part) & (last > 0), other=0.0))
    {_read(problem)}
    key = tl.load(keys_ptr + place, mask=inside, other=0.0)
    order = {name}_order(score)
    weight = tl.exp2((score - top) * ({LOG2E!r} / tl.where(hot, temperature, 1.0)))
    equal = (inside & (order == last)).to(tl.int32)
    before = above + (earlier + (tl.cumsum(equal, axis=0) - equal).to(tl.float32)) * weight
    left = ((order > last) | ((equal != 0) & (before < target))) & (order >= lowest) & (weight >= least)
    key = tl.where(hot, tl.where(left, key, float("-inf")), key)
    tl.store(left_ptr + place, key, mask=inside)
'''
