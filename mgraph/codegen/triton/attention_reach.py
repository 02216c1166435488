"""What blocks of attention can see of a sequence, and in what order they are taken.

By position alone this is arithmetic. Where segments or padding hide more, a kernel finds it, see `Reach`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mgraph.codegen.triton.attention_problem import Attention
from mgraph.codegen.triton.kernel import Launch, TensorSpec
from mgraph.codegen.triton.rope import lines_of, signature

SCANNED = 1024
"""Positions that the search for what a block can see reads at a time."""

SEARCHED = 128
"""Positions whose blocks one program searches for."""

RANKED, COMPARED = 32, 256
"""Blocks that a program finds a place for, and those it compares them with at a time."""

ALIKE = 1024
"""Blocks whose keys differ in number by less may be in the order of their positions, and so read the same keys at the
same time."""

FAR = 2**31 - 1
"""Above all positions."""

LARGEST = 2**63 - 1
"""The largest number of a segment."""


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

    @property
    def searched(self) -> int:
        """Blocks that a program searches for."""
        return max(1, SEARCHED // self.size)

    def launch(self, problem: Attention) -> Launch:
        """A program for some blocks next to each other."""
        args = (*problem.marks, self.tensor, "S", "T")
        grid = (("mul", ("cdiv", self.extent, self.size * self.searched), "B"),)
        return Launch(self.function, args, grid, 8, 1, aligned=False)

    def source(self, problem: Attention) -> str:
        """Bounds by position; then the numbers of the block's segments from least to most, and who has such numbers.

        A block of one number sees all that has it. If nothing lies between that has not, all see all, within what all
        see by position.
        """
        args = (*problem.marks, self.tensor, "S", "T")
        body = lines_of(
            f"blocks = tl.cdiv({self.extent}, {self.size})",
            f"parts = tl.cdiv({self.extent}, {self.size * self.searched})",
            f"block = tl.program_id(0) % parts * {self.searched} + tl.arange(0, {self.searched})",
            "batch = (tl.program_id(0) // parts).to(tl.int64)",
            f"own = block[:, None] * {self.size} + tl.arange(0, {self.size})[None, :]",
            f"known = own < {self.extent}",
            *self._of_blocks(problem),
            *(bounds_of_queries(problem, self.size) if self.of_keys else bounds_of_keys(problem, self.size)),
            f"first = tl.full([{self.searched}, {SCANNED}], {FAR}, tl.int32)",
            f"last = tl.zeros([{self.searched}, {SCANNED}], tl.int32)",
            f"count = tl.zeros([{self.searched}, {SCANNED}], tl.int32)",
            "stop = tl.max(high)",
            f"for start in range(tl.min(low), stop, {SCANNED}):",
        )
        loop = lines_of(
            f"other = start + tl.arange(0, {SCANNED})",
            "within = other < stop",
            "met = (other[None, :] >= low[:, None]) & (other[None, :] < high[:, None])",
            *self._of_others(problem),
            f"first = tl.minimum(first, tl.where(met, other[None, :], {FAR}))",
            "last = tl.maximum(last, tl.where(met, other[None, :] + 1, 0))",
            "count += met.to(tl.int32)",
            depth=2,
        )
        store = lines_of(
            "low, high = tl.min(first, axis=1), tl.max(last, axis=1)",
            *(whole_of_queries if self.of_keys else whole_of_keys)(problem, self.size),
            "alike = alike & (tl.sum(count, axis=1) == high - low) & (begin < end)",
            f"place = {self.tensor}_ptr + (batch * blocks + block) * 4",
            "tl.store(place, low, mask=block < blocks)",
            "tl.store(place + 1, high, mask=block < blocks)",
            "tl.store(place + 2, tl.where(alike, begin, 0), mask=block < blocks)",
            "tl.store(place + 3, tl.where(alike, end, 0), mask=block < blocks)",
        )
        what = f"The queries that may see a key of a block of {self.size}" if self.of_keys else ""
        what = what or f"The keys that a query at one of {self.size} positions may see"
        return f'''
@triton.jit
def {self.function}({signature(args, (*problem.marks, self.tensor)).strip().rstrip(",")}):
    """{what}: the first and one after the last.

    Then the same of those that all of it see.
    """
{body}{loop}{store}
'''

    def _of_blocks(self, problem: Attention) -> list[str]:
        """What marks say of the blocks: their least and most numbers, and `alike`, whether those are one."""
        lines = ["alike = block >= 0"]
        if "keys" in problem.marks and self.of_keys:
            lines = ["real = known", "known = known & (tl.load(keys_ptr + batch * T + own, mask=known, other=0) != 0)"]
            lines += ["some = tl.max(known.to(tl.int32), axis=1) > 0"]
            lines += ["alike = tl.max((real & ~known).to(tl.int32), axis=1) == 0"]
        for name in (name for name in problem.marks if name != "keys"):
            lines += [
                f"mine = tl.load({name}_ptr + batch * S + own, mask=known, other=0).to(tl.int64)",
                f"{name}_least = tl.min(tl.where(known, mine, {LARGEST}), axis=1)",
                f"{name}_most = tl.max(tl.where(known, mine, {-LARGEST}), axis=1)",
                f"alike = alike & ({name}_least == {name}_most)",
            ]
        return lines

    def _of_others(self, problem: Attention) -> list[str]:
        """`met` without those whose marks say that they do not see a block, or are not seen by it."""
        lines = []
        if "keys" in problem.marks and self.of_keys:
            lines += ["met = met & some[:, None]"]
        elif "keys" in problem.marks:
            lines += ["met = met & (tl.load(keys_ptr + batch * T + other, mask=within, other=0) != 0)[None, :]"]
        for name in (name for name in problem.marks if name != "keys"):
            lines += [
                f"theirs = tl.load({name}_ptr + batch * S + other, mask=within, other=0).to(tl.int64)[None, :]",
                f"met = met & (theirs >= {name}_least[:, None]) & (theirs <= {name}_most[:, None])",
            ]
        return lines

    def order(self, tensor: str) -> TensorSpec:
        """The blocks of all batches, each as batch * blocks + block."""
        return TensorSpec(tensor, "i32", ("B", ("cdiv", self.extent, self.size)))

    def order_launch(self, function: str, tensor: str) -> Launch:
        """A program for some blocks."""
        grid = (("cdiv", ("mul", "B", ("cdiv", self.extent, self.size)), RANKED),)
        return Launch(function, (self.tensor, tensor, "B", self.extent), grid, 4, 1, aligned=False)

    def order_source(self, function: str, tensor: str) -> str:
        """A block's place is the number of those that come before it, for which every other is looked at."""
        return f'''
@triton.jit
def {function}({self.tensor}_ptr, {tensor}_ptr, B, {self.extent}):
    """The order of blocks of {self.size}: those that see the most first, by position where that is about the same."""
    blocks = B * tl.cdiv({self.extent}, {self.size})
    own = tl.program_id(0) * {RANKED} + tl.arange(0, {RANKED})
    low = tl.load({self.tensor}_ptr + own * 4, mask=own < blocks, other=0)
    high = tl.load({self.tensor}_ptr + own * 4 + 1, mask=own < blocks, other=0)
    mine = tl.maximum(high - low, 0)[:, None] // {ALIKE}
    before = tl.zeros([{RANKED}], tl.int32)
    for start in range(0, blocks, {COMPARED}):
        other = start + tl.arange(0, {COMPARED})
        least = tl.load({self.tensor}_ptr + other * 4, mask=other < blocks, other=0)
        most = tl.load({self.tensor}_ptr + other * 4 + 1, mask=other < blocks, other=0)
        theirs = tl.maximum(most - least, 0)[None, :] // {ALIKE}
        first = (theirs > mine) | ((theirs == mine) & (other[None, :] < own[:, None]))
        before += tl.sum((first & (other < blocks)[None, :]).to(tl.int32), axis=1)
    tl.store({tensor}_ptr + before, own, mask=own < blocks)
'''


def bounds_of_keys(problem: Attention, size: int) -> list[str]:
    """`low` and `high`: keys that queries of a block may see by their position."""
    window = problem.window
    return [
        f"low = tl.maximum(block * {size} - {window - 1}, 0)" if window is not None else "low = block * 0",
        f"high = tl.minimum(block * {size} + {size}, T)" if problem.causal else "high = block * 0 + T",
    ]


def bounds_of_queries(problem: Attention, size: int) -> list[str]:
    """`low` and `high`: queries that may see keys of a block by their position."""
    window = problem.window
    return [
        f"low = block * {size}" if problem.causal else "low = block * 0",
        f"high = tl.minimum(block * {size} + {size - 1 + window}, S)" if window is not None else "high = block * 0 + S",
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


def reached(problem: Attention, size: int, *, of_keys: bool = False) -> list[str]:
    """`low` and `high` of what a block sees, or is seen by, and `begin` and `end` of what it sees whole."""
    if problem.marks:
        reach = "seen_by" if of_keys else "reach"
        return [
            f"{reach}_ptr += (batch * blocks + block) * 4",
            f"low, high = tl.load({reach}_ptr), tl.load({reach}_ptr + 1)",
            f"begin, end = tl.load({reach}_ptr + 2), tl.load({reach}_ptr + 3)",
        ]
    if of_keys:
        return [*bounds_of_queries(problem, size), *whole_of_queries(problem, size)]
    return [*bounds_of_keys(problem, size), *whole_of_keys(problem, size)]
