"""Which CUDA graph a step takes, or why it takes none: decided from its key alone, so that all ranks decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mgraph.runtime.serving.choices import Sampler, sampler_of, text_length
from mgraph.runtime.serving.step import Batch, Sampling

TEXTS = (64, 1024, 16384, 131072)
"""Lengths of penalised texts, of all rows together, that graphs hold."""


@dataclass(frozen=True, order=True)
class Bucket:
    """What a captured step holds; if it is `writing`, each request has one token."""

    tokens: int
    requests: int
    writing: bool


@dataclass(frozen=True)
class Key:
    """What decides how a step is launched: its numbers of tokens, requests and rows of logits, the entry that samples,
    and the tokens of penalised texts."""

    tokens: int
    requests: int
    rows: int
    sampler: Sampler
    text: int = 0

    @classmethod
    def of(cls, batch: Batch, sampling: Sampling) -> Key:
        """The key of a step."""
        sampler = sampler_of(sampling)
        text = text_length(sampling) if sampler is Sampler.CHANGED else 0
        return cls(len(batch.tokens), len(batch.lengths), len(batch.rows), sampler, text)


class Why(StrEnum):
    """Why a step, or what samples of it, is launched op by op."""

    NO_WRITING = "no bucket for single tokens"
    NO_MIXED = "no bucket for parts of prompts"
    TOO_LARGE = "more tokens or requests than any bucket"
    TOO_MANY_ROWS = "more rows of logits than requests"
    FIRST = "the first step of its bucket"
    LONG_TEXTS = "sampling alone: more tokens of penalised texts than a graph holds"
    FAILED = "a capture failed"


@dataclass(frozen=True)
class Decision:
    """The bucket that a step is replayed in, and the length of texts that what samples is replayed with (0: it reads
    none). `why` says what is launched op by op instead: the step where there is no bucket, else what samples."""

    bucket: Bucket | None
    text: int = 0
    why: Why | None = None


def choose(buckets: Sequence[Bucket], key: Key) -> Decision:
    """The smallest bucket of its kind that holds a step."""
    writing = key.tokens == key.requests
    alike = [b for b in buckets if b.writing == writing]
    if not alike:
        return Decision(None, why=Why.NO_WRITING if writing else Why.NO_MIXED)
    fitting = [b for b in alike if b.tokens >= key.tokens and b.requests >= key.requests]
    if not fitting:
        return Decision(None, why=Why.TOO_LARGE)
    if key.rows > min(fitting).requests:
        return Decision(None, why=Why.TOO_MANY_ROWS)
    if key.sampler is not Sampler.CHANGED:
        return Decision(min(fitting))
    text = min((length for length in TEXTS if length >= key.text), default=0)
    return Decision(min(fitting), text, None if text else Why.LONG_TEXTS)
