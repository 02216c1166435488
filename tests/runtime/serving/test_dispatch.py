"""The bucket that a step takes, and why it takes none."""

from __future__ import annotations

from mgraph.runtime.serving.choices import Sampler
from mgraph.runtime.serving.dispatch import TEXTS, Bucket, Key, Why, choose

BUCKETS = [Bucket(2, 2, True), Bucket(4, 4, True), Bucket(16, 4, False)]


def test_what_runs_without_a_graph_says_why() -> None:
    def chosen(tokens: int, requests: int, rows: int, buckets: list[Bucket] = BUCKETS, text: int = 0) -> object:
        sampler = Sampler.CHANGED if text else Sampler.SAMPLE if rows else Sampler.NONE
        found = choose(buckets, Key(tokens, requests, rows, sampler, text))
        return found.why or (found.bucket, found.text)

    assert chosen(3, 3, 3) == (Bucket(4, 4, True), 0)
    assert chosen(3, 2, 2) == (Bucket(16, 4, False), 0)
    assert chosen(9, 1, 0) == (Bucket(16, 4, False), 0), "no row is wanted"
    assert chosen(3, 3, 3, text=65) == (Bucket(4, 4, True), TEXTS[1])
    assert chosen(3, 3, 3, text=TEXTS[-1] + 1) is Why.LONG_TEXTS
    assert chosen(17, 2, 1) is Why.TOO_LARGE and chosen(5, 5, 5) is Why.TOO_LARGE
    assert chosen(9, 1, 9) is Why.TOO_MANY_ROWS
    assert chosen(9, 1, 1, BUCKETS[:1]) is Why.NO_MIXED
    assert chosen(1, 1, 1, BUCKETS[2:]) is Why.NO_WRITING
