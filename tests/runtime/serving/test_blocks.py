"""Blocks: none lost, none twice, and what is found again is what was asked for."""

from __future__ import annotations

import random

import pytest

from mgraph.runtime.serving.blocks import BlockPool, most_blocks


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """What a sequence does that finds what it can, takes the rest and says what is in it."""
    tables, content = pool.match(tokens)
    found = tables.length
    pool.hold(tables.all())
    tables.add(pool.take((pool.needed(len(tokens)) - found) * len(pool.windows)))
    for at in range(found, len(tokens) // pool.block_size):
        size = pool.block_size
        content = pool.remember([row[at] for row in tables.blocks], content, tokens[at * size : (at + 1) * size])
    return tables.all()


def found(pool: BlockPool, tokens: list[int]) -> list[int]:
    return pool.match(tokens)[0].all()


def test_block_0_belongs_to_nobody() -> None:
    pool = BlockPool(6, 4)
    assert pool.usable == pool.available == 5
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
    assert pool.available == 0
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 available"):
        pool.take(1)


def test_a_beginning_is_found_by_its_tokens_and_place() -> None:
    pool = BlockPool(20, 2)
    blocks = fill(pool, [1, 2, 3, 4, 5])
    assert found(pool, [1, 2, 3, 4, 9, 9]) == blocks[:2]
    assert found(pool, [1, 2, 9, 9]) == blocks[:1]
    assert found(pool, [3, 4]) == [], "the same tokens elsewhere are something else"
    assert found(pool, [1, 2, 3]) == blocks[:1]
    assert found(pool, [1]) == []
    pool.give_back(blocks)
    assert found(pool, [1, 2, 3, 4]) == blocks[:2], "nobody holds it, and it is still there"
    assert pool.available == pool.usable


def test_the_end_of_a_chain_goes_first_and_the_oldest_before_others() -> None:
    pool = BlockPool(7, 1)
    first, second = fill(pool, [1, 2, 3]), fill(pool, [4, 5, 6])
    pool.give_back(first)
    pool.give_back(second)
    pool.take(2)
    assert [len(found(pool, t)) for t in ([1, 2, 3], [4, 5, 6])] == [1, 3]
    pool.take(2)
    assert [len(found(pool, t)) for t in ([1, 2, 3], [4, 5, 6])] == [0, 2]


def test_two_that_compute_the_same_at_once() -> None:
    """The second's block is not found, but what follows it is."""
    pool = BlockPool(20, 2)
    one, two = pool.take(2), pool.take(2)
    content = pool.remember(one[:1], pool.root, [1, 2])
    assert pool.remember(two[:1], pool.root, [1, 2]) is content
    last = pool.remember(two[1:], content, [3, 4])
    assert last.before is content
    assert found(pool, [1, 2, 3, 4]) == [one[0], two[1]]
    pool.give_back(two)
    pool.give_back(one)
    pool.check([])


def test_a_pool_that_remembers_nothing() -> None:
    pool = BlockPool(20, 2, remember=False)
    pool.give_back(fill(pool, [1, 2, 3, 4]))
    assert found(pool, [1, 2, 3, 4]) == [] and pool.match([1, 2, 3, 4])[1] is pool.root


def test_forgetting_keeps_what_is_held() -> None:
    pool = BlockPool(6, 2)
    held = fill(pool, [1, 2, 3, 4])
    idle = fill(pool, [5, 6])
    pool.give_back(idle)
    pool.forget_all()
    pool.check([held])
    assert found(pool, [1, 2]) == found(pool, [5, 6]) == []
    pool.give_back(held)
    pool.check([])


def test_giving_back_twice_is_noticed() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.give_back(blocks)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_sequences(seed: int) -> None:
    """Few different tokens, so that beginnings are often the same; the pool is full most of the time."""
    source, pool, held = random.Random(seed), BlockPool(12, 2), []
    contents: dict[int, tuple[int, ...]] = {}
    for _ in range(300):
        tokens = [source.randrange(2) for _ in range(source.randint(1, 9))]
        blocks = found(pool, tokens)
        count = len(blocks)
        for at, block in enumerate(blocks):
            assert contents[block] == tuple(tokens[: 2 * at + 2]), "the block holds something else"
        if pool.available - pool.idle(blocks) >= pool.needed(len(tokens)) - count:
            blocks = fill(pool, tokens)
            held.append(blocks)
            for at in range(count, len(blocks)):
                contents[blocks[at]] = tuple(tokens[: 2 * at + 2])
        elif held:
            pool.give_back(held.pop(source.randrange(len(held))))
        pool.check(held)


@pytest.mark.parametrize(
    ("window", "size", "step"), [(1, 4, 1), (7, 4, 1), (8, 4, 3), (9, 4, 8), (5, 1, 2), (30, 8, 50)]
)
def test_the_most_blocks_are_those_that_are_ever_seen(window: int, size: int, step: int) -> None:
    """Counted: the blocks that a step's tokens see, over all steps of a text, wherever these begin."""
    length, most = 6 * (window + step), 0
    for begin in range(step):
        for first in range(begin, length, step):
            seen = range(max(0, first - window + 1) // size, -(-min(first + step, length) // size))
            most = max(most, len(seen))
    assert most <= most_blocks([window], size, length, step) <= most + 1
    assert most_blocks([None, window], size, length, step) == -(-length // size) + most_blocks(
        [window], size, length, step
    )
    assert most_blocks([window], size, 3, step) == -(-3 // size)


def test_groups_of_layers_share_a_pool() -> None:
    """Of the group with a window only the last blocks are needed, and what is longer is not found without them."""
    pool = BlockPool(40, 2, windows=(None, 3))
    text = list(range(10, 20))
    blocks = fill(pool, text)
    assert len(set(blocks)) == 10
    pool.give_back(blocks)
    tables, content = pool.match(text)
    assert tables.blocks == [blocks[::2], [0, 0, 0, 0, blocks[9]]] and tables.passed == [0, 4] and tables.held == 6
    pool.hold(tables.all())
    assert pool.available == pool.usable - 6 and tables.give_up([0, 4]) == []
    tables.add(pool.take(2))
    left = tables.give_up(pool.seen(12))
    assert pool.seen(12) == [0, 5] and left == [blocks[9]]
    pool.give_back(left)
    pool.check([tables.all()])
    pool.give_back(tables.all())
    pool.take(pool.available - 1)  # what was given back last: the end of the chain of one group
    assert content.before is not None and len(found(pool, text)) < 6


def test_content_ends_with_its_last_block() -> None:
    """What leads to a remembered block stays known, and nothing beyond that."""
    pool = BlockPool(5, 1, windows=(2,))
    content, kept = pool.root, []
    for token in range(50):
        (block,) = pool.take(1)
        content = pool.remember([block], content, [token])
        kept.append(block)
        if len(kept) > 2:
            pool.give_back([kept.pop(0)])
    assert len(pool._found) == 50 and pool.match(list(range(50)))[0].length == 50
    assert pool.match(list(range(30)))[0].length == 0
    pool.give_back(kept)
    del content
    pool.take(4)
    assert len(pool._found) == 0
