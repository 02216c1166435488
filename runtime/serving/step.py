"""The contract between the engine, which decides what a step computes, and the stepper, which computes it.

A step works on the new tokens of many requests at once, one request after the other: chunks of prompts and single
tokens of requests that already write, the latter first. What is old of a request lies in the cache, which has
`num_blocks` blocks of `block_size` rows. Layers are in groups by how far back they see (`windows`), and a block is of
one group at a time: a row is the keys and values of one token in all layers of the group. Block 0 belongs to nobody:
padding is written there, and it stands for what lies before the window of a request's new tokens.

The engine may plan a step before it knows what the one before sampled. Such a token is written as `unknown(n)`, a
negative number: the token of row n of the step that was run just before. A stepper that runs asynchronously fills it in
on its device; to one that does not, the engine gives known tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mgraph.runtime.serving.blocks import Windows

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
F32 = NDArray[np.float32]

MOST_ALTERNATIVES = 20
"""How many of the likeliest tokens a row can be asked for, unless it is asked for all."""


def unknown(row: int) -> int:
    """How a step writes the token that row `row` of the step before samples."""
    return -1 - row


@dataclass(frozen=True)
class Batch:
    """The inputs of one step: T tokens of R requests, N rows of which logits are wanted. Nothing is padded.

    W, the width of a table in `blocks`, is ceil(max_length / block_size) in every step.
    """

    tokens: I64
    """[T] The new tokens, or `unknown` ones."""
    positions: I64
    """[T] The place of each token in its own sequence, from 0."""
    slots: tuple[I64, ...]
    """Of each group [T]: the cache row that takes its keys and values, block * block_size + offset."""
    starts: I32
    """[R + 1] The tokens of request r are starts[r]:starts[r + 1], at least one."""
    lengths: I32
    """[R] Tokens of request r that are in the cache after this step."""
    blocks: tuple[I32, ...]
    """Of each group [R, W]: its blocks in order. What is not used, or no new token sees, is 0."""
    rows: I64
    """[N] Which of the T tokens want logits, increasing."""
    requests: tuple[int, ...]
    """[R] Numbers of the requests, for logs and tests."""

    def inputs(self) -> dict[str, Any]:
        """The arrays by the names and in the order of a package's inputs."""
        slots, *more_slots = self.slots
        blocks, *more_blocks = self.blocks
        given = {"tokens": self.tokens, "positions": self.positions, "slots": slots, "starts": self.starts}
        given |= {"lengths": self.lengths, "blocks": blocks}
        for group, (slots, blocks) in enumerate(zip(more_slots, more_blocks, strict=True), 1):
            given |= {f"slots_{group}": slots, f"blocks_{group}": blocks}
        return given | {"rows": self.rows}


@dataclass(frozen=True)
class Sampling:
    """How each of the N rows of a step becomes a token.

    Logits are first changed by penalties and bias, then divided by the temperature, then cut by top_k, top_p and min_p
    in this order. Log-probabilities are those of the model, before any of this.
    """

    temperature: F32
    """[N] 0: the likeliest token."""
    top_k: I32
    """[N] 0: all."""
    top_p: F32
    """[N] 1: all."""
    min_p: F32
    """[N] 0: all. Tokens less probable than min_p times the likeliest one's probability are left out."""
    seeds: I64
    """[N] Of the random numbers; with `draws` they decide them, whatever else is in the batch."""
    draws: I64
    """[N] How many tokens this request has sampled before."""
    targets: I64
    """[N] -1, or a token taken instead of a sampled one: rows of a prompt whose log-probabilities are wanted."""
    repetition: F32
    """[N] 1: none. Of tokens of prompt or output: positive logits are divided by it, others multiplied."""
    presence: F32
    """[N] 0: none. Subtracted from logits of tokens in the output."""
    frequency: F32
    """[N] 0: none. Subtracted as often as the token is in the output."""
    prompts: tuple[I64, ...] | None
    """[N] arrays: the tokens of the prompt. None where no row has a penalty; empty for rows without one."""
    outputs: tuple[I64, ...] | None
    """[N] arrays: the tokens sampled so far, the last of which may be `unknown`."""
    bias: F32 | None
    """[N, V] Added to the logits, or None where no row needs it; -inf forbids a token."""
    alternatives: int
    """M, how many of the likeliest tokens each row must return: 0 to 20, or V."""
    padding_from: int | None = None
    """Tokens from it on, which the tokenizer does not have, are never sampled; None: all may be."""


@dataclass(frozen=True)
class Sampled:
    """What a step gave for its N rows."""

    tokens: I64
    """[N] The sampled token, or the target."""
    logprobs: F32
    """[N] Its log-probability under the model."""
    top_tokens: I64
    """[N, M] The likeliest tokens, the likeliest first."""
    top_logprobs: F32
    """[N, M] Theirs."""


class Pending(Protocol):
    """A step that was started."""

    def get(self) -> Sampled:
        """Wait for the result, copied to the host. Raises what went wrong in the step."""
        ...


class Stepper(Protocol):
    """What runs a model's steps, in the order in which they are given."""

    block_size: int
    max_length: int
    """The longest sequence, in tokens."""
    max_tokens: int
    """The most tokens of a step (T)."""
    max_requests: int
    """The most requests of a step (R)."""
    vocab_size: int
    num_blocks: int
    """Blocks of the cache, block 0 included."""
    windows: Windows
    """Of each group of layers how many tokens its last one sees, itself included; None: all."""
    asynchronous: bool
    """Whether `run` returns before the step has ended and takes `unknown` tokens."""

    @property
    def launches(self) -> Mapping[str, int]:
        """How many steps there were by how they were launched: `graph`, or why not as one."""
        ...

    def run(self, batch: Batch, sampling: Sampling) -> Pending:
        """Start a step. The arrays are not changed afterwards."""
        ...


class Done:
    """A step that has ended already."""

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled

    def get(self) -> Sampled:
        """The result."""
        return self._sampled


def describe(stepper: Stepper) -> dict[str, Any]:
    """The sizes of a stepper, for logs and metrics."""
    names = (
        "block_size",
        "max_length",
        "max_tokens",
        "max_requests",
        "vocab_size",
        "num_blocks",
        "windows",
        "asynchronous",
    )
    return {name: getattr(stepper, name) for name in names}
