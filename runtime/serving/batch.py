"""A plan of the scheduler as the arrays of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mgraph.runtime.serving.constraints import Constraints
from mgraph.runtime.serving.parameters import ALL
from mgraph.runtime.serving.request import Request
from mgraph.runtime.serving.scheduler import Work
from mgraph.runtime.serving.step import F32, I32, I64, Batch, Sampling, unknown


@dataclass(frozen=True)
class Row:
    """What a row of logits is for: a new token of a request, or the log-probability of one of its prompt's tokens."""

    request: Request
    target: int
    """-1: a new token."""
    draw: int


@dataclass
class _Written:
    """The tables of a request as arrays, up to a length and without what it had given up by then."""

    preempted: int
    length: int
    passed: list[int]
    arrays: tuple[I32, ...]


class BatchBuilder:
    """Makes arrays of plans. It keeps the block tables of running requests, which grow by a few entries a step."""

    def __init__(
        self, block_size: int, max_length: int, vocab_size: int, groups: int = 1, padding_from: int | None = None
    ) -> None:
        """`groups` are those of layers, each of which has tables of its own; for `padding_from` see `Sampling`."""
        self._block_size, self._vocab_size, self._groups = block_size, vocab_size, groups
        self._padding_from = padding_from
        self._width = -(-max_length // block_size)
        self._tables: dict[int, _Written] = {}
        self._constraints: dict[int, Constraints] = {}

    def add(self, request: Request, constraints: Constraints) -> None:
        """A request that will be in plans."""
        self._constraints[request.number] = constraints

    def drop(self, request: Request) -> None:
        """A request that has ended."""
        self._constraints.pop(request.number, None)
        self._tables.pop(request.number, None)

    def build(self, works: Sequence[Work], before: Mapping[int, int]) -> tuple[Batch, Sampling, list[Row]]:
        """The arrays of a step and what its rows are for. `before`: request number to row of the step just before."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in range(self._groups)]
        tables: list[tuple[I32, ...]] = []
        starts, rows, wanted = [0], [], []
        for work in works:
            request, at = work.request, len(tokens)
            tokens += _tokens(work, before)
            size = self._block_size
            tables.append(self._arrays(request))
            positions += range(work.start, work.stop)
            for rows_of_group, blocks in zip(slots, request.tables.blocks, strict=True):
                rows_of_group += [blocks[p // size] * size + p % size for p in range(work.start, work.stop)]
            starts.append(len(tokens))
            for place in work.targets:
                rows.append(at + place - work.start)
                wanted.append(Row(request, request.prompt[place + 1], work.draw))
            if work.samples:
                rows.append(len(tokens) - 1)
                wanted.append(Row(request, -1, work.draw))
        batch = Batch(
            tokens=np.array(tokens, np.int64),
            positions=np.array(positions, np.int64),
            slots=tuple(np.array(of_group, np.int64) for of_group in slots),
            starts=np.array(starts, np.int32),
            lengths=np.array([work.stop for work in works], np.int32),
            blocks=tuple(np.stack(of_group) for of_group in zip(*tables, strict=True)),
            rows=np.array(rows, np.int64),
            requests=tuple(work.request.number for work in works),
        )
        return batch, self._sampling(wanted, before), wanted

    def _arrays(self, request: Request) -> tuple[I32, ...]:
        """i32[W] of a request for each group: those of the step before with what has changed, or new ones after a
        preemption."""
        tables, old = request.tables, self._tables.get(request.number)
        if old is None or old.preempted != request.preempted:
            nothing = tuple(np.zeros(self._width, np.int32) for _ in tables.blocks)
            old = _Written(request.preempted, 0, [0] * len(nothing), nothing)
        if old.length == tables.length and old.passed == tables.passed:
            return old.arrays
        arrays = tuple(array.copy() for array in old.arrays)  # steps under way may still read the old ones
        for array, blocks, before, passed in zip(arrays, tables.blocks, old.passed, tables.passed, strict=True):
            array[before:passed] = 0
            array[old.length : tables.length] = blocks[old.length :]
        self._tables[request.number] = _Written(request.preempted, tables.length, list(tables.passed), arrays)
        return arrays

    def _sampling(self, rows: Sequence[Row], before: Mapping[int, int]) -> Sampling:
        params = [row.request.params for row in rows]
        sampled = [row.target < 0 for row in rows]
        penalised = [made and p.penalises for made, p in zip(sampled, params, strict=True)]
        prompts, outputs = None, None
        if any(penalised):
            prompts = tuple(_array(r.request.prompt if on else ()) for r, on in zip(rows, penalised, strict=True))
            outputs = tuple(_array(_output(r, before) if on else ()) for r, on in zip(rows, penalised, strict=True))
        asked = [p.logprobs if made else p.prompt_logprobs for made, p in zip(sampled, params, strict=True)]
        return Sampling(
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([p.top_k for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            seeds=np.array([row.request.seed for row in rows], np.int64),
            draws=np.array([row.draw for row in rows], np.int64),
            targets=np.array([row.target for row in rows], np.int64),
            repetition=np.array([p.repetition_penalty for p in params], np.float32),
            presence=np.array([p.presence_penalty for p in params], np.float32),
            frequency=np.array([p.frequency_penalty for p in params], np.float32),
            prompts=prompts,
            outputs=outputs,
            bias=self._bias(rows),
            alternatives=max(map(self._count, asked), default=0),
            padding_from=self._padding_from,
        )

    def _count(self, asked: int | None) -> int:
        """Of alternatives."""
        return self._vocab_size if asked == ALL else asked or 0

    def _bias(self, rows: Sequence[Row]) -> F32 | None:
        """Dense, [N, V], and only where a row needs it: it is as large as the logits."""
        found = {}
        for index, row in enumerate(rows):
            constraints = self._constraints[row.request.number]
            if row.target < 0 and (bias := constraints.bias(row.draw, row.request.output)) is not None:
                found[index] = bias
        if not found:
            return None
        dense = np.zeros((len(rows), self._vocab_size), np.float32)
        for index, bias in found.items():
            dense[index] = bias
        return dense


def _tokens(work: Work, before: Mapping[int, int]) -> list[int]:
    request = work.request
    known = len(request.prompt) + len(request.output)
    tokens = list(request.known(work.start, min(work.stop, known)))
    if work.stop > known:
        tokens.append(unknown(before[request.number]))
    return tokens


def _output(row: Row, before: Mapping[int, int]) -> list[int]:
    output = row.request.output
    return output if row.draw == len(output) else [*output, unknown(before[row.request.number])]


def _array(tokens: Sequence[int]) -> I64:
    return np.array(tokens, np.int64)
