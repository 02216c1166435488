"""The blocks of the cache: which are held, and by how many; which hold the beginning of a text that may come again.

Layers are in groups, by how far back they see: all of a text, or a window of its last tokens. A sequence has a table of
blocks in each group (`Tables`), and all groups take theirs from one pool: a block of any group takes the same memory.
What no later token sees is given back as the sequence goes on, so in a group with a window it never holds more than the
window and the tokens of a step.

A block of complete content is remembered by what it holds: its tokens, and the content before it. So a match compares
token ids, at every block from the first, and never hashes alone. Of a group with a window it needs the blocks of the
last window only, the content before may have gone. A remembered block that nobody holds stays until its place is
needed; then the one that was given back longest ago goes first. Of a sequence the last blocks are given back first, so
that what goes is the end of a chain, not the beginning that leads to it.
"""

from __future__ import annotations

import bisect
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from weakref import WeakValueDictionary

Windows = Sequence[int | None]
"""Of each group of layers how many tokens its last one sees, itself included; None: all."""


def most_blocks(windows: Windows, block_size: int, tokens: int, step: int) -> int:
    """The most blocks that a sequence of `tokens` tokens holds at once if it is computed `step` tokens at a time."""
    whole = -(-tokens // block_size)
    # A run of n tokens, wherever it begins, lies in at most ceil((n - 1) / block_size) + 1 blocks.
    return sum(whole if w is None else min(whole, -(-(w + step - 2) // block_size) + 1) for w in windows)


class Content:
    """Tokens of a block and all that comes before them. It lasts as long as there is a block of it, a request that goes
    on from it, or content that follows."""

    __slots__ = ("__weakref__", "before", "blocks", "number")

    def __init__(self, number: int, before: Content | None, groups: int) -> None:
        self.number, self.before = number, before
        self.blocks = [0] * groups
        """The remembered block of each group; 0: there is none."""


class Tables:
    """The blocks of a sequence: of each group those of its tokens in order, 0 where no later token sees them."""

    def __init__(self, groups: int, blocks: Sequence[list[int]] = ()) -> None:
        self.blocks = list(blocks) or [[] for _ in range(groups)]
        self.passed = [next((at for at, block in enumerate(row) if block), len(row)) for row in self.blocks]
        """How many of each group were given back from its beginning."""

    @property
    def length(self) -> int:
        """Blocks of a group, those given back included."""
        return len(self.blocks[0])

    @property
    def held(self) -> int:
        """How many there are in all."""
        return sum(len(row) - passed for row, passed in zip(self.blocks, self.passed, strict=True))

    def all(self) -> list[int]:
        """Those of all groups, from the beginning of the sequence."""
        return [block for column in zip(*self.blocks, strict=True) for block in column if block]

    def add(self, blocks: Sequence[int]) -> None:
        """More blocks at the end, as many in each group."""
        groups = len(self.blocks)
        for group, row in enumerate(self.blocks):
            row += blocks[group::groups]

    def give_up(self, seen: Sequence[int]) -> list[int]:
        """Leave out what lies before block `seen` of each group; gives those that were there."""
        left = []
        for group, row in enumerate(self.blocks):
            begin, end = self.passed[group], min(seen[group], len(row))
            if begin < end:
                left += row[begin:end]
                row[begin:end] = [0] * (end - begin)
                self.passed[group] = end
        return left


class BlockPool:
    """Blocks 1 to `num_blocks` - 1; block 0 is where padding is written, and is never handed out."""

    def __init__(self, num_blocks: int, block_size: int, remember: bool = True, windows: Windows = (None,)) -> None:
        assert num_blocks > len(windows) and block_size >= 1, "a cache has block 0 and one more for each group"
        self.num_blocks, self.block_size, self.windows = num_blocks, block_size, tuple(windows)
        self.root = Content(0, None, len(windows))
        """The content before the first block."""
        self.remembers = remember
        self._holders = [0] * num_blocks
        self._empty = deque(range(1, num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # remembered, held by nobody; longest ago first
        self._content: dict[int, Content] = {}  # block -> what it is remembered by
        self._found: WeakValueDictionary[tuple[int, bytes], Content] = WeakValueDictionary()
        self._numbers = 0

    @property
    def usable(self) -> int:
        """How many blocks there are to hold."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """How many blocks nobody holds."""
        return len(self._empty) + len(self._idle)

    def needed(self, tokens: int) -> int:
        """Blocks of a group that this many tokens take."""
        return -(-tokens // self.block_size)

    def most(self, tokens: int, step: int = 1) -> int:
        """`most_blocks` of this pool's groups."""
        return most_blocks(self.windows, self.block_size, tokens, step)

    def longest(self, bound: int) -> int:
        """The most tokens, at most `bound`, of a sequence that fits if it has the pool for itself."""
        return bisect.bisect_right(range(1, bound + 1), self.usable, key=self.most)

    def seen(self, place: int) -> list[int]:
        """The first block of each group that the token at `place` sees."""
        return [0 if w is None else max(0, place + 1 - w) // self.block_size for w in self.windows]

    def tables(self) -> Tables:
        """Of a sequence that has no blocks yet."""
        return Tables(len(self.windows))

    def match(self, tokens: Sequence[int]) -> tuple[Tables, Content]:
        """The blocks that the token after the longest remembered beginning of `tokens` sees, and that one's content.

        Nothing is held by this: `hold` them before anything else is taken.
        """
        size, content = self.block_size, self.root
        chain: list[Content] = []
        for start in range(0, len(tokens) - size + 1, size):
            found = self._found.get((content.number, _key(tokens[start : start + size])))
            if found is None:
                break
            content = found
            chain.append(found)
        # What lies in a window moves on with its end: an end behind a gap that it sees can only be at the gap.
        while (gap := self._gap(chain)) is not None:
            del chain[gap:]
        first = self.seen(len(chain) * size)
        rows = [[0] * begin + [c.blocks[group] for c in chain[begin:]] for group, begin in enumerate(first)]
        return Tables(len(self.windows), rows), chain[-1] if chain else self.root

    def _gap(self, chain: Sequence[Content]) -> int | None:
        """The first place where a block is missing that the token after these contents sees."""
        gaps = [
            begin + at
            for group, begin in enumerate(self.seen(len(chain) * self.block_size))
            if (at := next((i for i, c in enumerate(chain[begin:]) if not c.blocks[group]), None)) is not None
        ]
        return min(gaps, default=None)

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds: to hold them makes so many fewer available."""
        return sum(self._holders[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1

    def take(self, count: int) -> list[int]:
        """`count` blocks with one holder each; their content is forgotten. The caller has looked at `available`."""
        assert count <= self.available, f"{count} blocks wanted, {self.available} available"
        taken = []
        for _ in range(count):
            if self._empty:
                block = self._empty.popleft()
            else:
                block, _ = self._idle.popitem(last=False)
                self._forget(block)
            self._holders[block] = 1
            taken.append(block)
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each block of a sequence, in its order."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is given back more often than it is held"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._content:
                    self._idle[block] = None
                else:
                    self._empty.append(block)

    def remember(self, blocks: Sequence[int], before: Content, tokens: Sequence[int]) -> Content:
        """Say what a held block of each group (0: none) holds after the content `before`; gives their content.

        Where another block is known to hold the same, that one stays the one that is found.
        """
        assert len(tokens) == self.block_size, "only whole blocks are remembered"
        if not self.remembers:
            return self.root
        key = before.number, _key(tokens)
        content = self._found.get(key)
        if content is None:
            self._numbers += 1
            content = self._found[key] = Content(self._numbers, before, len(self.windows))
        for group, block in enumerate(blocks):
            if block and not content.blocks[group]:
                self._forget(block)
                content.blocks[group] = block
                self._content[block] = content
        return content

    def apart(self) -> Content:
        """A content after which nothing is found: of blocks that hold something else than their tokens say."""
        self._numbers += 1
        return Content(self._numbers, self.root, len(self.windows))

    def forget_all(self) -> None:
        """Remember nothing, as after a step that failed: held blocks stay held."""
        for block in list(self._content):
            self._forget(block)
        self._found.clear()
        self._empty.extend(self._idle)
        self._idle.clear()

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that the holders are exactly the sequences with these blocks, and that no block is lost."""
        holders = [0] * self.num_blocks
        for blocks in held:
            assert len(set(blocks)) == len(blocks), "a sequence has a block twice"
            for block in blocks:
                holders[block] += 1
        assert holders == self._holders, "the counts of holders are not those of the sequences"
        assert holders[0] == 0, "block 0 was handed out"
        free = [*self._empty, *self._idle]
        assert sorted(free) == [b for b in range(1, self.num_blocks) if holders[b] == 0], (
            "a block is lost or twice free"
        )
        assert all(block in self._content for block in self._idle), "a block is kept, and not remembered"
        found = sorted(block for content in self._found.values() for block in content.blocks if block)
        assert found == sorted(self._content), "a block is found that has gone"

    def _forget(self, block: int) -> None:
        content = self._content.pop(block, None)
        if content is not None:
            content.blocks[content.blocks.index(block)] = 0


def _key(tokens: Sequence[int]) -> bytes:
    """Tokens in little memory: what is remembered may be long."""
    return array("q", tokens).tobytes()
