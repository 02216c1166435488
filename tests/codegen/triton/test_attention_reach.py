"""What blocks of attention see, and their order, in Triton's interpreter against the mask itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mgraph.codegen.triton import KernelSpec
from mgraph.codegen.triton.attention import further_of
from mgraph.codegen.triton.attention_problem import Attention
from mgraph.codegen.triton.attention_reach import ALIKE, RANKED, Reach
from mgraph.codegen.triton.kernel import TensorSpec
from mgraph.ir.ops import attention as op
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, interpret

REACHED = {
    "documents": Attention("bf16", 16, 16, 1.0, True, more=(("segments", "i64"),)),
    "documents_in_a_window": Attention("bf16", 16, 16, 1.0, True, 20, more=(("segments", "i64"),)),
    "documents_both_ways": Attention("bf16", 16, 16, 1.0, more=(("segments", "i32"),)),
    "padding": Attention("bf16", 16, 16, 1.0, True, more=(("keys", "bool"), ("segments", "i64"))),
    "padding_alone": Attention("bf16", 16, 16, 1.0, window=30, more=(("keys", "i64"),)),
}


def searches(name: str) -> list[KernelSpec]:
    """The searches of an instance as sites of their own: what blocks of queries see, and what sees blocks of keys."""
    problem, made = REACHED[name], []
    for of_keys in (False, True):
        search = Reach(f"{name}_{'by' * of_keys}", "reach", 64, of_keys=of_keys)
        inputs, outputs, launches = further_of(problem), (search.scratch(),), (search.launch(problem),)
        dims = {"S": "T"} if "segments" not in problem.extra else {} if "keys" in problem.extra else {"T": "S"}
        twin = f"def {search.function}(): ..."
        made.append(KernelSpec(search.function, search.source(problem), twin, inputs, outputs, (), launches, dims=dims))
    return made


def reach_of(name: str, more: tuple[torch.Tensor, ...], *, of_keys: bool) -> list[tuple[list[int], list[int]]]:
    """The first and one after the last that any of each block of 64 sees, or is seen by, and those of what all of it
    see, one batch after another."""
    problem, rows = REACHED[name], more[0].shape[1]
    given = tuple(zip(problem.extra, more, strict=True))
    zeros = torch.zeros(more[0].shape[0], 1, rows, 16)
    hidden = op._hidden(zeros, zeros, problem.causal, problem.window, given)
    seen = ~hidden.expand(more[0].shape[0], 1, 1, rows, rows)[:, 0, 0]
    blocks = (seen.mT if of_keys else seen).split(64, 1)
    return [(ends(block[batch].any(0)), ends(block[batch].all(0))) for batch in range(len(seen)) for block in blocks]


def ends(chosen: torch.Tensor) -> list[int]:
    """The first place and one after the last that are chosen; nothing where none is."""
    places = chosen.nonzero()
    return [int(places.min()), int(places.max()) + 1] if len(places) else []


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter cannot run with this NumPy")
def test_blocks_reach_no_further_than_they_see(tmp_path: Path) -> None:
    """With documents one after another, of 30 rows or so, and with padding. The last block is of one row, but what all
    of it see is found as if it were whole."""
    generator = torch.Generator().manual_seed(5)
    specs, cases, wanted = [], [], []
    for name, problem in REACHED.items():
        ids = (torch.rand(2, 129, generator=generator) < 1 / 30).long().cumsum(1)
        keys = torch.arange(129) < torch.tensor([[128], [64]])
        drawn = {"segments": ids, "keys": keys}
        types = {"i64": torch.int64, "i32": torch.int32, "bool": torch.bool}
        more = tuple(drawn[kind].to(types[dtype]) for kind, dtype in problem.more)
        for of_keys, spec in enumerate(searches(name)):
            specs.append(spec)
            cases.append((spec.name, more))
            wanted.append(reach_of(name, more, of_keys=bool(of_keys)))
    for (name, _), want, ((reach,), _) in zip(cases, wanted, interpret(specs, cases, tmp_path), strict=True):
        found = [
            [pair if pair[0] < pair[1] else [] for pair in (row[:2], row[2:])] for row in reach.flatten(0, 1).tolist()
        ]
        assert [any_sees for any_sees, _ in found] == [any_sees for any_sees, _ in want], name
        for index, ((_, whole), (_, most)) in enumerate(zip(found, want, strict=True)):
            assert whole == most or (index % 3 == 2 and (not whole or most[0] <= whole[0] < whole[1] <= most[1])), name


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter cannot run with this NumPy")
def test_blocks_that_see_the_most_come_first(tmp_path: Path) -> None:
    """Blocks of two batches, more than a program places; those that see about as much as others in their own order;
    one that sees nothing, whose first place is beyond its last."""
    search = Reach("search", "reach", 64)
    reach = torch.zeros(2, 2 * RANKED + 5, 4, dtype=torch.int32)
    reach[..., 0] = torch.randint(0, 8000, reach.shape[:2], generator=torch.Generator().manual_seed(2))
    reach[..., 1] = 8000
    reach[1, 7, :2] = torch.tensor([2**31 - 1, 0])
    spec = KernelSpec(
        name="order",
        source=search.order_source("order", "order"),
        twin="def order(): ...",
        inputs=(TensorSpec("reach", "i32", ("B", "blocks", 4)),),
        outputs=(search.order("order"),),
        scratch=(),
        launches=(search.order_launch("order", "order"),),
        dims={"S": ("mul", "blocks", search.size)},
    )
    [((order,), _)] = interpret([spec], [("order", (reach,))], tmp_path)
    seen = (reach[..., 1].long() - reach[..., 0]).clamp(min=0).flatten() // ALIKE
    assert order.flatten().tolist() == sorted(range(len(seen)), key=lambda block: (-int(seen[block]), block))
