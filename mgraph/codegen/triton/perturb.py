"""Scores of rows with Gumbel noise of each row's own, as Triton source and torch twin.

    key = score / temperature - log(-log(1 - v)),   v in (0, 1) by Philox-4x32-10, as in `mgraph/philox.py`

The largest key of a row is where a token is that is drawn from the softmax of its scores (the Gumbel-max trick). Where
the temperature is 0 keys are the scores. A program takes a part of one row: four stretches, each of which takes one
word of the same blocks. So a key depends on its row and place alone.
"""

from __future__ import annotations

from mgraph.codegen.triton.kernel import KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.likeliest import Likeliest
from mgraph.philox import STRETCH


def build(name: str, problem: Likeliest) -> KernelSpec:
    """The site `keys = name(scores, temperature, seeds, draws)`: scores [N, V], temperature f32 [N], seeds and draws
    i64 [N] → f32 [N, V]."""
    per_row = ("temperature", "f32"), ("seeds", "i64"), ("draws", "i64")
    return KernelSpec(
        name=name,
        source=_source(name, problem),
        twin=f'''
def {name}(scores, temperature, seeds, draws):
    """Scores over the temperature of their row, with Gumbel noise by its seed and its number of draws."""
    return rt.perturb(scores, temperature, seeds, draws)
''',
        inputs=(
            TensorSpec("scores", problem.dtype, ("*", problem.classes)),
            *(TensorSpec(text, dtype, ("*",)) for text, dtype in per_row),
        ),
        outputs=(TensorSpec("keys", "f32", ("*", problem.classes)),),
        scratch=(),
        launches=(
            Launch(
                name,
                ("scores", *(text for text, _ in per_row), "keys"),
                ("rows", -(-problem.classes // (4 * STRETCH))),
                num_warps=8,
                num_stages=1,
                aligned=problem.aligned,
            ),
        ),
    )


def _source(name: str, problem: Likeliest) -> str:
    stretches = "\n".join(
        f"    {name}_stretch(scores_ptr + start, keys_ptr + start, temperature, word_{lane}, column + {lane * STRETCH})"
        for lane in range(4)
    )
    return f'''
@triton.jit
def {name}_stretch(scores_ptr, keys_ptr, temperature, word, column):
    """The keys of some columns, whose noise is of these words."""
    inside = column < {problem.classes}
    score = tl.load(scores_ptr + column, mask=inside, other=0.0).to(tl.float32)
    v = tl.minimum((word.to(tl.float32) + 0.5) * {2.0**-32!r}, {1.0 - 2.0**-24!r})
    rest = 1.0 - v
    # -log(1 - v), which the rounding of 1 - v does not harm, and v itself where that is 1
    waited = tl.where(rest == 1.0, v, tl.log(rest) * v / tl.where(rest == 1.0, 1.0, rest - 1.0))
    key = score / tl.where(temperature == 0.0, 1.0, temperature) - tl.log(waited)
    tl.store(keys_ptr + column, tl.where(temperature == 0.0, score, key), mask=inside)


@triton.jit
def {name}(scores_ptr, temperature_ptr, seeds_ptr, draws_ptr, keys_ptr):
    """Of {4 * STRETCH} columns of a row: score / temperature - log(-log(1 - v))."""
    row, part = tl.program_id(0), tl.program_id(1)
    temperature, seed, draw = tl.load(temperature_ptr + row), tl.load(seeds_ptr + row), tl.load(draws_ptr + row)
    block = part * {STRETCH} + tl.arange(0, {STRETCH})
    low, high = draw.to(tl.int32), (draw >> 32).to(tl.int32)
    word_0, word_1, word_2, word_3 = tl.philox(seed, block, block * 0 + low, block * 0 + high, block * 0)
    start = row.to(tl.int64) * {problem.classes}
    column = part * {4 * STRETCH} + tl.arange(0, {STRETCH})
{stretches}
'''
