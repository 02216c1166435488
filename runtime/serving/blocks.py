"""The blocks of the cache: which are held, and by how many; which hold the beginning of a text that may come again.

A block of complete content is remembered by what it holds: its tokens, and the block before it, by that one's number of
content. So a match compares token ids, at every block from the first, and never hashes alone. A remembered block that
nobody holds stays until its place is needed; then the one that was given back longest ago goes first. Of a sequence the
last blocks are given back first, so that what goes is the end of a chain, not the beginning that leads to it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

ROOT = 0
"""The number of content before the first block."""

Key = tuple[int, tuple[int, ...]]
"""The number of the content before, and the tokens."""


class BlockPool:
    """Blocks 1 to `num_blocks` - 1; block 0 is where padding is written, and is never handed out."""

    def __init__(self, num_blocks: int, block_size: int, remember: bool = True) -> None:
        assert num_blocks >= 2 and block_size >= 1, "a cache has block 0 and at least one more"
        self.num_blocks, self.block_size = num_blocks, block_size
        self._remember = remember
        self._holders = [0] * num_blocks
        self._empty = deque(range(1, num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # remembered, held by nobody; longest ago first
        self._content: dict[int, Key] = {}  # block -> what it is remembered by
        self._found: dict[Key, tuple[int, int]] = {}  # -> block, number of content
        self._numbers = ROOT

    @property
    def usable(self) -> int:
        """How many blocks there are to hold."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """How many blocks nobody holds."""
        return len(self._empty) + len(self._idle)

    def needed(self, tokens: int) -> int:
        """Blocks that this many tokens take."""
        return -(-tokens // self.block_size)

    def match(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The blocks that hold the longest remembered beginning of `tokens`, and the number of the last one's content.

        Nothing is held by this: `hold` them before anything else is taken.
        """
        blocks: list[int] = []
        number = ROOT
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            found = self._found.get((number, tuple(tokens[start : start + self.block_size])))
            if found is None:
                break
            blocks.append(found[0])
            number = found[1]
        return blocks, number

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

    def remember(self, block: int, before: int, tokens: Sequence[int]) -> int:
        """Say what a held block holds after the content `before`; gives the number of this content.

        Where another block is known to hold the same, that one stays the one that is found.
        """
        assert len(tokens) == self.block_size, "only whole blocks are remembered"
        if not self._remember:
            return ROOT
        key = (before, tuple(tokens))
        found = self._found.get(key)
        if found is not None:
            return found[1]
        self._forget(block)
        self._numbers += 1
        self._found[key] = (block, self._numbers)
        self._content[block] = key
        return self._numbers

    def forget_all(self) -> None:
        """Remember nothing, as after a step that failed: held blocks stay held."""
        self._found.clear()
        self._content.clear()
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
        assert {block for block, _ in self._found.values()} == set(self._content), "a block is found that has gone"

    def _forget(self, block: int) -> None:
        key = self._content.pop(block, None)
        if key is not None:
            del self._found[key]
