"""Blocks: none lost, none twice, and what is found again is what was asked for."""

from __future__ import annotations

import random

import pytest

from mgraph.runtime.serving.blocks import ROOT, BlockPool


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """What a sequence does that finds what it can, takes the rest and says what is in it."""
    found, number = pool.match(tokens)
    pool.hold(found)
    blocks = found + pool.take(pool.needed(len(tokens)) - len(found))
    for at in range(len(found), len(tokens) // pool.block_size):
        size = pool.block_size
        number = pool.remember(blocks[at], number, tokens[at * size : (at + 1) * size])
    return blocks


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
    assert pool.match([1, 2, 3, 4, 9, 9])[0] == blocks[:2]
    assert pool.match([1, 2, 9, 9])[0] == blocks[:1]
    assert pool.match([3, 4])[0] == [], "the same tokens elsewhere are something else"
    assert pool.match([1, 2, 3])[0] == blocks[:1]
    assert pool.match([1])[0] == []
    pool.give_back(blocks)
    assert pool.match([1, 2, 3, 4])[0] == blocks[:2], "nobody holds it, and it is still there"
    assert pool.available == pool.usable


def test_the_end_of_a_chain_goes_first_and_the_oldest_before_others() -> None:
    pool = BlockPool(7, 1)
    first, second = fill(pool, [1, 2, 3]), fill(pool, [4, 5, 6])
    pool.give_back(first)
    pool.give_back(second)
    pool.take(2)
    assert [len(pool.match(t)[0]) for t in ([1, 2, 3], [4, 5, 6])] == [1, 3]
    pool.take(2)
    assert [len(pool.match(t)[0]) for t in ([1, 2, 3], [4, 5, 6])] == [0, 2]


def test_two_that_compute_the_same_at_once() -> None:
    """The second's block is not found, but what follows it is."""
    pool = BlockPool(20, 2)
    one, two = pool.take(2), pool.take(2)
    number = pool.remember(one[0], ROOT, [1, 2])
    assert pool.remember(two[0], ROOT, [1, 2]) == number
    pool.remember(two[1], number, [3, 4])
    assert pool.match([1, 2, 3, 4])[0] == [one[0], two[1]]
    pool.give_back(two)
    pool.give_back(one)
    pool.check([])


def test_a_pool_that_remembers_nothing() -> None:
    pool = BlockPool(20, 2, remember=False)
    pool.give_back(fill(pool, [1, 2, 3, 4]))
    assert pool.match([1, 2, 3, 4]) == ([], ROOT)


def test_forgetting_keeps_what_is_held() -> None:
    pool = BlockPool(6, 2)
    held = fill(pool, [1, 2, 3, 4])
    idle = fill(pool, [5, 6])
    pool.give_back(idle)
    pool.forget_all()
    pool.check([held])
    assert pool.match([1, 2])[0] == pool.match([5, 6])[0] == []
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
        found, _ = pool.match(tokens)
        for at, block in enumerate(found):
            assert contents[block] == tuple(tokens[: 2 * at + 2]), "the block holds something else"
        if pool.available - pool.idle(found) >= pool.needed(len(tokens)) - len(found):
            blocks = fill(pool, tokens)
            held.append(blocks)
            for at in range(len(found), len(blocks)):
                contents[blocks[at]] = tuple(tokens[: 2 * at + 2])
        elif held:
            pool.give_back(held.pop(source.randrange(len(held))))
        pool.check(held)
