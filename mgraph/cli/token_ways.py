"""How many rows of tokens leave a rank on their way to the experts of others, by each way to send them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import comb

from mgraph.cli.table import table
from mgraph.ir.collectives import sent as payload
from mgraph.ir.dims import Dim, as_dim, dim_text, evaluate, names_in
from mgraph.ir.graph import Function, Module, Node
from mgraph.passes.expert_parallel import ExpertParallel
from mgraph.passes.overlap_experts import SENDING, OverlapExperts
from mgraph.passes.recompute import size_text

HEADER = ("way", "rows that leave a rank", "of them in use", "bytes there", "and back", "")
_DISPATCH = {"all_to_all": "alltoall", "all_gather": "allgather"}
_SENDERS = (ExpertParallel.name, OverlapExperts.name)


@dataclass(frozen=True)
class Way:
    """What one function that sends tokens sends: a rank's tokens and the room for those that go to one other rank
    (fewer under a budget), bytes of a row there and back, and of how many experts, chosen by each token, the ranks have
    their share."""

    dispatch: str
    ranks: int
    experts: int
    choices: int
    tokens: Dim
    room: Dim
    there: int
    back: int
    exact: bool = False
    """Whether the host reads how many rows there are, and sends no others."""

    @property
    def used(self) -> float:
        """The share of tokens that go to another rank, where each of its experts is as likely as any other."""
        return 1 - comb(self.experts - self.experts // self.ranks, self.choices) / comb(self.experts, self.choices)

    def rows(self, tokens: int, room: int) -> Iterator[tuple[str, float, float]]:
        """Each way with the rows that leave a rank, and those of them in use."""
        others = self.ranks - 1
        used = others * tokens * self.used
        yield "alltoall", others * room, min(used, others * room)
        yield "allgather", others * tokens, used
        once = self.choices * tokens * others / self.ranks
        yield "once for each expert", once, once


def text(module: Module, sizes: Mapping[str, int]) -> str:
    """A table for the first function that sends tokens forward; nothing where none does."""
    way = next((found for f in module.functions.values() if (found := way_of(module, f)) is not None), None)
    if way is None or not names_in(way.tokens) | names_in(way.room) <= sizes.keys():
        return ""
    tokens, room = (int(evaluate(dim, sizes)) for dim in (way.tokens, way.room))
    lines = [
        (
            name,
            f"{rows:,.0f}",
            f"{used:,.0f}",
            size_text(int(rows * way.there)),
            size_text(int(rows * way.back)),
            "this package" if name == way.dispatch else "",
        )
        for name, rows, used in way.rows(tokens, room)
    ]
    head = f"tokens of a layer, forward: {dim_text(way.tokens)}, {way.choices} of {way.experts} experts each, over "
    used = "in use: where every expert is as likely" + "; this package sends only these" * way.exact
    return f"{head}{way.ranks} ranks; {used}\n{table(HEADER, lines)}"


def way_of(module: Module, function: Function) -> Way | None:
    """How a function sends tokens forward, all its chunks together; None where it does not."""
    owns = [node for node in function.nodes if node.op == "own_choices"]
    if not owns:
        return None
    makers, choices = function.producers(), owns[0].operands[0]
    sent = [n for n in function.nodes if _kind(n) in SENDING and n.made_by in _SENDERS]
    first = makers[choices]
    arrived = first.operands[first.results.index(choices)] if first.op == "wait" else choices
    there = makers[arrived]
    left = payload(there)[there.results.index(arrived)]
    packed = makers.get(left)
    rows = (packed.operands[0] if packed is not None and packed.op == "pack_rows" else left).tensor.shape[0]
    back = next(n for n in sent if all(v.tensor.dtype.is_float for v in payload(n)))
    bound = module.dims[str(choices.tensor.shape[0])].bound
    ranks = int(str(owns[0].attrs["ranks"]))
    assert bound is not None, "what is received is ragged"
    ragged = module.dims[str(rows)].bound if str(rows) in module.dims else None  # where the host says how many are sent
    tokens = rows if ragged is None else ragged / ranks
    return Way(
        _DISPATCH[_kind(there)],
        ranks,
        int(str(owns[0].attrs["num_experts"])),
        int(str(choices.tensor.shape[1])),
        as_dim(len(owns) * tokens),
        as_dim(len(owns) * bound / ranks),
        _row_bytes(there),
        _row_bytes(back),
        ragged is not None,
    )


def _kind(node: Node) -> str:
    return node.op.removesuffix("_start")


def _row_bytes(node: Node) -> int:
    """Bytes of a row of all tensors that a message has."""
    return sum(int(str(v.tensor.shape[1])) * v.tensor.dtype.bits // 8 for v in payload(node))
