"""Random graphs with random placements of their states: what is inserted gives the results of one rank, at no more
bytes than gathering all that is split."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from mgraph.ir.collective_proof import prove
from mgraph.ir.dims import evaluate
from mgraph.ir.graph import Axis, Fact, Function, Module, State, StateKind, Value
from mgraph.ir.interpreter import run_ranks
from mgraph.ir.types import Partial, PendingType, Shard, TensorType
from mgraph.ir.verifier import verify
from mgraph.passes.adamw import AdamW
from mgraph.passes.autodiff import Autodiff
from mgraph.passes.base import Report
from mgraph.passes.samples import Margins
from mgraph.passes.spreading import Spreader
from tests.all_ranks import difference, joined, laid_out
from tests.passes.build import B, S, f32, module_of, started
from tests.passes.random_graphs import Drawing, draw_forward, draw_trained, places_beside
from tests.sampling import sampled

FOLLOWING = (StateKind.GRAD, StateKind.MOMENT)
MADE_BY = "spread"
LEAST = 1e-3
"""Values below it may be what is left of larger ones."""
AXIS = "tp"
MOVES = ("all_gather", "all_reduce", "reduce_scatter", "part_of")


def spread(module: Module, places: Mapping[str, Shard], axis: str, size: int, sequence: bool = False) -> Module:
    """The module over one axis more, with states placed; gradients and moments lie as their parameters."""
    state = {name: _placed(s, axis, places) for name, s in module.state.items()}
    facts = (Fact(f"S % {axis} == 0"),) if sequence else ()
    module = replace(module, mesh=(*module.mesh, Axis(axis, size)), facts=facts)
    spreader = Spreader(module, axis, size, MADE_BY, "S" if sequence else None)
    spreader.mapping.update({s.value: state[name].value for name, s in module.state.items()})
    for entry in module.entries.values():
        spreader.entry(entry, state)
    functions = {n: spreader.functions.get(n, f) for n, f in module.functions.items()}
    return replace(module, state=state, functions=functions)


def _placed(state: State, axis: str, places: Mapping[str, Shard]) -> State:
    place = places.get(state.name.rpartition(".")[0] if state.kind in FOLLOWING else state.name)
    if place is None:
        return state
    return replace(state, value=Value(state.name, state.type.place(axis, place), is_state=True))


# values


def check(before: Module, after: Module, sizes: Mapping[str, int], drawing: Drawing) -> None:
    """One rank and all ranks, every entry once, on float64: outputs and updated states are equal."""
    verify(after)
    prove(after)
    source = torch.Generator().manual_seed(0)
    state = {name: _state(s, source) for name, s in before.state.items()}
    held = [dict[str, Any]() for _ in range(_ranks(sizes))]
    _hold(held, state, after, sizes)
    inputs: dict[str, Any] = {}
    for entry in before.entries:
        for param in before.entry_function(entry).params:
            if param.name not in inputs:
                inputs[param.name] = _input(param, drawing, source)
        given = {p.name: inputs[p.name] for p in before.entry_function(entry).params}
        margins = Margins()
        outputs, updates = run_ranks(before, entry, [given], [state], {}, lifted=True, hook=margins)
        if margins.least < 1e-6:
            pytest.skip("rounding decides a choice of experts")
        found, changed = run_ranks(after, entry, [given] * len(held), held, sizes, lifted=True)
        for name, tensor in outputs[0].items():
            for rank in found:
                assert difference(tensor, rank[name], LEAST) <= 1e-9, f"{entry}: {name}"
        for name, tensor in updates[0].items():
            ranks = [rank[name] for rank in changed]
            assert difference(tensor, joined(ranks, after.state[name].type, sizes), LEAST) <= 1e-9, f"{entry}: {name}"
        state |= updates[0]
        _hold(held, updates[0], after, sizes)


def _hold(held: list[dict[str, Any]], state: Mapping[str, Any], module: Module, sizes: Mapping[str, int]) -> None:
    for name, tensor in state.items():
        for rank, own in zip(held, laid_out(tensor, module.state[name].type, sizes), strict=True):
            rank[name] = own


def _ranks(sizes: Mapping[str, int]) -> int:
    return torch.Size(sizes.values()).numel()


def _state(state: State, source: torch.Generator) -> Any:
    shape = [int(d) for d in state.type.shape]
    if state.kind is not StateKind.PARAM:
        return torch.zeros(shape, dtype=torch.float64 if state.type.dtype.is_float else torch.int64)  # also of rng.*
    noise = torch.randn(shape, generator=source, dtype=torch.float64)
    return noise / max(shape[-1], 1) ** 0.5 if len(shape) > 1 else 1 + 0.3 * noise


def _input(value: Value, drawing: Drawing, source: torch.Generator) -> Any:
    shape = [int(evaluate(d, drawing.dims)) for d in value.tensor.shape]
    if value.tensor.dtype.is_float:
        return torch.full((), 0.01) if not shape else torch.randn(shape, generator=source, dtype=torch.float64)
    return torch.randint(drawing.bounds[value.name], shape, generator=source)


# bytes


def sent(module: Module, function: Function, drawing: Drawing) -> tuple[float, float]:
    """Bytes that a rank sends over the axis in a function and those it calls: by its collectives, and if each value
    that is split was gathered once, and each that is partial reduced once, for all that read it."""
    moves = [n for n in function.nodes if n.op in MOVES and n.made_by == MADE_BY and len(n.results) == 1]
    moved = {n.result: n.operands[0] for n in moves}
    total = bound = 0.0
    for node in function.nodes:
        if node.op == "call":
            own = sent(module, module.functions[str(node.attrs["callee"])], drawing)
            total, bound = total + own[0], bound + own[1]
        if node.op in ("all_gather", "all_reduce", "reduce_scatter"):
            total += sum(_bytes(v, drawing) for v in node.operands) / (2 if node.op == "reduce_scatter" else 1)
    read = [v for node in function.nodes if node not in moves for v in node.operands]
    whole = dict.fromkeys(_source(v, moved) for v in (*read, *function.results))
    return total, bound + sum(_bytes(v, drawing) for v in whole)


def _source(value: Value, moved: Mapping[Value, Value]) -> Value:
    while value in moved:
        value = moved[value]
    return value


def _bytes(value: Value, drawing: Drawing) -> float:
    """What a rank sends to make a value whole: once if it is split, twice if it is a partial sum."""
    if isinstance(value.type, PendingType):
        return 0.0
    type_: TensorType = value.type
    place = type_.on(AXIS)
    once = evaluate(type_.numel, drawing.dims) * type_.dtype.bits / 8 * (drawing.size - 1) / drawing.size
    return float(2 * once if isinstance(place, Partial) else once if place is not None else 0)


# tests


def plan(drawing: Drawing, module: Module) -> None:
    """Spread a module over the axis, and check all ranks against one, the bytes that they send, and that no sum is read
    after it was reduced in place."""
    after = spread(module, drawing.places, AXIS, drawing.size, drawing.sequence)
    check(module, after, {AXIS: drawing.size}, drawing)
    for name in module.entries:
        total, bound = sent(after, after.entry_function(name), drawing)
        assert total <= bound, f"{name} sends {total} bytes, and {bound} would gather all"
    for function in after.functions.values():
        reduced: set[Value] = set()
        for node in function.nodes:
            assert reduced.isdisjoint(node.operands), f"{node!r} reads a sum whose total has taken its memory"
            reduced |= set(node.operands) if node.op == "all_reduce" else set()


def size_of(seed: int) -> int:
    """The size of the axis: 2, 3 or 4."""
    return 2 + seed % 3


def trained(module: Module) -> Module:
    """Derived first, then spread: gradients, and what an optimizer makes of them."""
    return AdamW().run(Autodiff().run(module, Report()), Report())


@pytest.mark.parametrize("seed", sampled(range(300), 25))
def test_forward(seed: int) -> None:
    plan(*draw_forward(random.Random(seed), size_of(seed)))


@pytest.mark.parametrize("seed", sampled(range(200), 8))
def test_trained(seed: int) -> None:
    drawing, module = draw_trained(random.Random(seed), size_of(seed))
    plan(drawing, trained(module))


@pytest.mark.parametrize("seed", sampled(range(200), 8))
def test_forward_with_sequences_split(seed: int) -> None:
    plan(*draw_forward(random.Random(seed), size_of(seed), sequence=True))


@pytest.mark.parametrize("seed", sampled(range(100), 4))
def test_trained_with_sequences_split(seed: int) -> None:
    drawing, module = draw_trained(random.Random(seed), size_of(seed), sequence=True)
    plan(drawing, trained(module))


@pytest.mark.parametrize("seed", sampled(range(100), 5))
def test_two_axes(seed: int) -> None:
    """One after the other: the second splits what the first leaves."""
    drawing, module = draw_forward(random.Random(seed), size_of(seed))
    first = spread(module, drawing.places, AXIS, drawing.size)
    check(module, spread(first, places_beside(drawing, 2), "ep", 2), {AXIS: drawing.size, "ep": 2}, drawing)


# by hand, where a choice is rare among drawn ones


def by_hand(*shapes: tuple[int, ...], rows: Mapping[int, int], size: int = 2) -> tuple[Drawing, list[Value]]:
    """A drawing with weights `w0`, `w1`, ... of these shapes, some of them split along a dim."""
    drawing = Drawing(random.Random(0), size)
    for index, shape in enumerate(shapes):
        name = f"w{index}"
        drawing.state[name] = State.make(name, f32(*shape), StateKind.PARAM, trainable=True)
    drawing.places = {f"w{index}": Shard(dim) for index, dim in rows.items()}
    return drawing, [s.value for s in drawing.state.values()]


def test_a_sum_that_was_reduced_is_read_as_its_total() -> None:
    """The second reader could take the partial sum as it is, and another with it; the first had it reduced in place."""
    drawing, (left, right) = by_hand((6, 8), (6, 8), rows={0: 1, 1: 1})
    builder = started()
    x = builder.param("x", f32(B, 8))
    one, other = (builder.one("aten.linear.default", x, weight) for weight in (left, right))
    first = builder.one("aten.relu.default", one)
    second = builder.one("aten.relu.default", builder.one("aten.add.Tensor", one, other))
    module = module_of(builder.build([first, second]), state=drawing.state)
    plan(drawing, module)
    ops = [n.op for n in spread(module, drawing.places, AXIS, 2).functions["forward"].nodes]
    assert ops.count("all_reduce") == 2 and "all_gather" not in ops


def test_a_sum_is_scattered_where_it_is_read_on_parts() -> None:
    """To reduce it on all ranks sends twice as much, which only its reader's choice can save here."""
    drawing, (up, down) = by_hand((6, 8), (8, 6), rows={0: 0, 1: 1})
    drawing = replace(drawing, sequence=True)
    builder = started()
    x = builder.param("x", f32(B, S, 8))
    hidden = builder.one("aten.linear.default", x, up)
    summed = builder.one("aten.relu.default", builder.one("aten.linear.default", hidden, down))
    module = module_of(builder.build([builder.one("aten.sum.dim_IntList", summed, dim=(2,))]), state=drawing.state)
    plan(drawing, module)
    after = spread(module, drawing.places, AXIS, 2, sequence=True)
    function = after.entry_function("forward")
    assert [n.op for n in function.nodes if n.op in MOVES] == ["reduce_scatter", "all_gather"]
    rows = drawing.dims["B"] * drawing.dims["S"]
    assert sent(after, function, drawing)[0] == 4 / 2 * (rows * 8 + rows), "half of f32[B, S, 8] and of the f32[B, S]"
