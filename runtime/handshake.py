"""What all ranks must agree on before the first collective, and who does not.

Ranks that run different code, or the same code with different options, sooner or later wait for each other for ever. So
each rank states facts about what it is going to run, through the store that torchrun provides, before there is any
process group. Rank 0 reads them and publishes a verdict; where ranks differ, or one failed or never came, all of them
raise the same error, which names the ranks and the facts.

What most ranks state is taken for right, so that one stale machine among many is the one that is named.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mgraph.errors import MgraphError

T = TypeVar("T")
Facts = dict[str, str]
"""What a rank states: a name for each thing that must be the same everywhere, and its value, as text."""

TIMEOUT = timedelta(minutes=5)
"""How long ranks are waited for: they load packages from disks of different speed."""
_PARTING = timedelta(seconds=30)
_MOST_FACTS, _WIDTH = 4, 160
_HINT = "copy the same package directory to every machine, with the same versions installed, and start all ranks alike"


class MeshError(MgraphError):
    """The processes that were started do not fit the mesh of the package, or do not run the same."""


def handshake(
    store: c10d.Store,
    rank: int,
    world_size: int,
    prepare: Callable[[], tuple[T, Facts]],
    timeout: timedelta = TIMEOUT,
) -> T:
    """Run `prepare` and compare the facts that it gives over all ranks; what else it gave, unless ranks differ.

    Raises the first failed rank's error, or a `MeshError` that names the ranks that differ or never came, the same one
    on every rank. Rank 0 alone reads what all have to say, so the store sees a number of requests linear in the ranks.
    """
    made: T | None = None
    statement: dict[str, Any]
    try:
        made, facts = prepare()
        statement = {"facts": facts}
    except MgraphError as error:
        statement = {"error": [error.message, error.where, error.hint]}
    store.set(f"statement/{rank}", json.dumps(statement))
    if rank == 0:
        store.set("verdict", json.dumps(_verdict(store, world_size, timeout)))
    try:
        # Rank 0 may wait that long for the others, and its verdict comes after.
        store.wait(["verdict"], timeout * 2)
    except dist.DistError as error:
        raise MeshError(f"rank 0 said nothing for {_minutes(timeout * 2)}", hint="see its own output") from error
    verdict = json.loads(store.get("verdict"))
    if verdict is not None:
        _part(store, rank, world_size)
        raise MeshError(*verdict)
    assert made is not None, "a rank that failed is in the verdict"
    return made


def _part(store: c10d.Store, rank: int, world_size: int) -> None:
    """Rank 0 may hold the store, so it leaves last: when all have read the verdict."""
    store.set(f"heard/{rank}", "")
    if rank == 0:
        came = [other for other in range(world_size) if store.check([f"statement/{other}"])]
        with suppress(dist.DistError):  # one that died since will not hear
            store.wait([f"heard/{other}" for other in came], _PARTING)


def _verdict(store: c10d.Store, world_size: int, timeout: timedelta) -> list[str | None] | None:
    """The arguments of the error that all ranks raise, or None."""
    statements: list[dict[str, Any]] = []
    absent: list[int] = []
    for rank in range(world_size):
        try:
            # All had the same time: where one was waited for in vain, the others are there by now, or late too.
            store.wait([f"statement/{rank}"], timedelta(seconds=1) if absent else timeout)
            statements.append(json.loads(store.get(f"statement/{rank}")))
        except dist.DistError:
            absent.append(rank)
    for statement in statements:
        if "error" in statement:
            failure: list[str | None] = statement["error"]
            return failure
    if absent:
        what = f"{rank_text(absent)} did not come within {_minutes(timeout)}"
        return [what, None, "look at the output of these processes"]
    different = disagreement([statement["facts"] for statement in statements])
    return None if different is None else [different, None, _HINT]


def _minutes(time: timedelta) -> str:
    return f"{time.total_seconds() / 60:g} minutes"


def disagreement(statements: Sequence[Mapping[str, str]]) -> str | None:
    """Which ranks differ from most others, and in what; None where all agree."""
    texts = [json.dumps(statement, sort_keys=True) for statement in statements]
    counts = Counter(texts)
    if len(counts) == 1:
        return None
    usual = counts.most_common(1)[0][0]  # of equally many, that of the lowest rank
    reference = json.loads(usual)
    lines = []
    for text in dict.fromkeys(texts):
        if text != usual:
            ranks = [rank for rank, other in enumerate(texts) if other == text]
            lines.append(f"{rank_text(ranks)}: {_differences(json.loads(text), reference)}")
    others = rank_text([rank for rank, text in enumerate(texts) if text == usual])
    return f"not all ranks run the same; unlike {others}\n  " + "\n  ".join(lines)


def _differences(facts: Mapping[str, str], reference: Mapping[str, str]) -> str:
    names = [n for n in dict.fromkeys([*facts, *reference]) if facts.get(n) != reference.get(n)]
    told = [f"{n} is {_cut(facts.get(n))}, not {_cut(reference.get(n))}" for n in names[:_MOST_FACTS]]
    more = len(names) - _MOST_FACTS
    return "; ".join([*told, *([f"and {more} more"] if more > 0 else [])])


def _cut(value: str | None) -> str:
    text = "absent" if value is None else value or "empty"
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def rank_text(ranks: Sequence[int]) -> str:
    """Ranks in order as `rank 2` or `ranks 0-3, 7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {listed}"
