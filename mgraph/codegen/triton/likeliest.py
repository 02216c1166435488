"""The likeliest token of each row of logits, or a given one, and its log-probability, as Triton source and torch twin.

    token    = argmax_v logits[n, v], the first of equals; targets[n] where that is not negative
    logprob  = logits[n, token] - log sum_v exp(logits[n, v])

A decoding step has few rows, as long as the vocabulary: a program takes a part of one row, and a second, small launch
joins what the parts of a row found. Parts are cut by columns alone and joined in a fixed order, so that a row's bits
do not depend on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgraph.codegen.triton.kernel import (
    ITEM_BYTES,
    LN2,
    LOG2E,
    LOWEST,
    TRITON_LANGUAGE_DTYPES,
    KernelSpec,
    Launch,
    TensorSpec,
)
from mgraph.codegen.triton.moe_order import power
from mgraph.ir.graph import Node

PART = 4096
"""Columns of a part: several dozen programs for a row of a large vocabulary."""


@dataclass(frozen=True)
class Likeliest:
    """One instance: the classes, and the dtype of the logits."""

    classes: int
    dtype: str

    @property
    def parts(self) -> int:
        """Of a row."""
        return -(-self.classes // PART)

    @property
    def width(self) -> int:
        """All parts of a row, as a power of two."""
        return power(self.parts)

    @property
    def aligned(self) -> bool:
        """Whether all rows begin on 16-byte boundaries if the first one does."""
        return self.classes % (16 // ITEM_BYTES[self.dtype]) == 0


def problem_of(node: Node) -> Likeliest | str:
    """The instance that a node `likeliest`, `perturb` or `cut_keys` is, or why the kernel does not take it."""
    logits = node.operands[0].tensor
    classes, dtype = logits.shape[1], logits.dtype.text
    if not isinstance(classes, int):
        return f"the vocabulary {classes} is not a known number"
    if dtype not in TRITON_LANGUAGE_DTYPES:
        return f"the logits are {dtype}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    return Likeliest(classes, dtype)


def build(name: str, problem: Likeliest) -> KernelSpec:
    """The site `tokens, logprobs = name(logits, targets)`: logits [N, V], targets i64 [N] → i64 [N], f32 [N]."""
    found = ("tops", "places", "sums")
    return KernelSpec(
        name=name,
        source=_source(name, problem),
        twin=f'''
def {name}(logits, targets):
    """The likeliest token of each row of {problem.classes}, or its target, and its log-probability."""
    return rt.likeliest(logits, targets)
''',
        inputs=(
            TensorSpec("logits", problem.dtype, ("*", problem.classes)),
            TensorSpec("targets", "i64", ("*",)),
        ),
        outputs=(TensorSpec("tokens", "i64", ("*",)), TensorSpec("logprobs", "f32", ("*",))),
        scratch=tuple(
            TensorSpec(text, dtype, ("*", problem.parts))
            for text, dtype in zip(found, ("f32", "i32", "f32"), strict=True)
        ),
        launches=(
            Launch(
                f"{name}_parts",
                ("logits", *found),
                ("rows", problem.parts),
                num_warps=8,
                num_stages=1,
                aligned=problem.aligned,
            ),
            Launch(
                f"{name}_join",
                ("logits", "targets", *found, "tokens", "logprobs"),
                ("rows",),
                num_warps=1,
                num_stages=1,
                aligned=False,
            ),
        ),
    )


def _source(name: str, problem: Likeliest) -> str:
    masked = problem.parts != problem.width

    def read(found: str, other: str) -> str:
        mask = f", mask=part < {problem.parts}, other={other}" * masked
        return f"tl.load({found}_ptr + row * {problem.parts} + part{mask})"

    return f'''
@triton.jit
def {name}_parts(logits_ptr, tops_ptr, places_ptr, sums_ptr):
    """Of {PART} columns of a row: the largest, where it is first, and the sum of 2^(log2(e) (x - largest))."""
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * {PART} + tl.arange(0, {PART})
    x = tl.load(
        logits_ptr + row.to(tl.int64) * {problem.classes} + column,
        mask=column < {problem.classes},
        other=float("-inf"),
    ).to(tl.float32)
    top = tl.maximum(tl.max(x), {LOWEST!r})
    place = tl.min(tl.where(x == top, column, {problem.classes - 1}))
    total = tl.sum(tl.exp2((x - top) * {LOG2E!r}))
    at = row * {problem.parts} + part
    tl.store(tops_ptr + at, top)
    tl.store(places_ptr + at, place)
    tl.store(sums_ptr + at, total)


@triton.jit
def {name}_join(logits_ptr, targets_ptr, tops_ptr, places_ptr, sums_ptr, tokens_ptr, logprobs_ptr):
    """What the {problem.parts} parts of a row found, as one; the target in place of the likeliest if there is one."""
    row = tl.program_id(0)
    part = tl.arange(0, {problem.width})
    tops = {read("tops", repr(LOWEST))}
    places = {read("places", str(problem.classes - 1))}
    sums = {read("sums", "0.0")}
    top = tl.max(tops)
    first = tl.where(top > {LOWEST!r}, tl.min(tl.where(tops == top, places, {problem.classes - 1})), 0)
    total = tl.sum(sums * tl.exp2((tops - top) * {LOG2E!r}))
    target = tl.load(targets_ptr + row)
    token = tl.where(target < 0, first.to(tl.int64), target)
    taken = tl.load(logits_ptr + row.to(tl.int64) * {problem.classes} + token).to(tl.float32)
    tl.store(tokens_ptr + row, token)
    tl.store(logprobs_ptr + row, taken - top - tl.log2(total) * {LN2!r})
'''
