"""Entries in pieces: on a stand-in for a GPU's graphs that reuses memory as a pool of graphs does.

What a GPU replays is compared in tests/end_to_end/test_gpu.py.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from mgraph.runtime import v1 as rt
from mgraph.runtime.graphs import EntryGraphs
from mgraph.runtime.pieces import Tape

LAYERS, WIDTH = 3, 4


class Pool:
    """Memory from which captured functions take theirs: the first gap that is large enough."""

    def __init__(self, size: int = 1 << 16) -> None:
        self.memory = torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN to whoever reads what nobody wrote
        self.taken: dict[int, int] = {}
        self.most = self.asked = 0
        self.records = False

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor in the pool, whose place is free again when nobody holds it."""
        size, at = max(tensor.untyped_storage().nbytes(), 8), 0
        for start in sorted(self.taken):
            if start - at >= size:
                break
            at = start + self.taken[start]
        assert at + size <= self.memory.numel()
        self.taken[at] = size
        self.most, self.asked = max(self.most, at + size), self.asked + size
        taken = self.taken

        array: Any = ctypes.c_uint8 * size

        class Block(array):  # type: ignore[misc]
            def __del__(self) -> None:
                del taken[at]

        block = Block.from_address(self.memory.data_ptr() + at)
        return torch.frombuffer(block, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def view(self, tensor: Tensor) -> Tensor:
        size = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
        array: Any = ctypes.c_uint8 * size
        return torch.frombuffer(array.from_address(tensor.data_ptr()), dtype=tensor.dtype).as_strided(
            tensor.shape, tensor.stride()
        )

    def record(self, function: Callable[[], Any]) -> tuple[Launches, Any]:
        launches = Launches(self)
        self.records = True
        try:
            with launches:
                return launches, function()
        finally:
            self.records = False


class Launches(TorchDispatchMode):
    """What was launched under a capture, to be launched again: nothing is written meanwhile but what is free."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pool = pool
        self.calls: list[tuple[Any, Any, Any, Tensor | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        views = tree_map_only(Tensor, self.pool.view, args)
        if func._schema.is_mutable:
            self.calls.append((func, views, kwargs, None))
            return args[0]
        made = func(*args, **kwargs)
        if any(a.untyped_storage().data_ptr() == made.untyped_storage().data_ptr() for a in args if _is_tensor(a)):
            return made
        placed = self.pool.like(made)
        if "empty" not in str(func):
            self.calls.append((func, views, kwargs, self.pool.view(placed)))
        return placed

    def replay(self) -> None:
        for func, args, kwargs, place in self.calls:
            made = func(*args, **kwargs)
            if place is not None:
                place.copy_(made)


def _is_tensor(given: Any) -> bool:
    return isinstance(given, Tensor)


class Step:
    """A step as step.py has it; `between` runs on the host between the functions of a layer."""

    def __init__(self) -> None:
        self.layer_fwd: Callable[..., Any] = _layer_fwd
        self.layer_bwd: Callable[..., Any] = _layer_bwd
        self.turned = False

    def entry(self, state: dict[str, Tensor], x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        table = scale * 2
        saved, x_stack = [], []
        for i in range(LAYERS):
            x_stack.append(x)
            y, kept = self.layer_fwd(x, table, state[f"{i}.w"], times=float(i))
            saved.append(kept)
            x = y * 0.5 + y[:1].sum()  # made anew in each run
        del kept, y
        loss = x.sum()
        dx = torch.ones_like(x)
        for i in reversed(range(LAYERS)):
            dx = self.layer_bwd(saved.pop(), x_stack.pop(), table, dx, state[f"{i}.w"], state[f"{i}.grad"])
            if self.turned:
                dx = dx * 1.5
        return loss, dx


def _layer_fwd(x: Tensor, table: Tensor, w: Tensor, *, times: float) -> Any:
    h = x @ w
    a = (h * table + times).tanh()
    return x + a, [h, a, h.view(-1, WIDTH)]


def _layer_bwd(saved: list[Tensor], x: Tensor, table: Tensor, dy: Tensor, w: Tensor, grad: Tensor) -> Tensor:
    h, a, view = saved
    saved.clear()
    dh = (1 - a * a) * dy
    del a
    dh = dh * table + view * 1e-3
    del h, view
    grad.add_(x.t() @ dh)
    return dy + dh @ w.t()


def fresh() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {f"{i}.w": torch.randn(WIDTH, WIDTH, generator=generator) for i in range(LAYERS)}
    return state | {f"{i}.grad": torch.zeros(WIDTH, WIDTH) for i in range(LAYERS)}


class Made:
    """The step by itself, and in pieces."""

    def __init__(self) -> None:
        self.plain, self.pieces = Step(), Step()
        self.ours, self.theirs = fresh(), fresh()
        self.pools: list[Pool] = []
        self.graphs = EntryGraphs([], {"microbatch": ["layer_fwd", "layer_bwd"]}, self.new_pool)
        for name in ("layer_fwd", "layer_bwd"):
            setattr(self.pieces, name, self.graphs.piece(name, getattr(self.pieces, name)))

    def new_pool(self) -> Pool:
        self.pools.append(Pool())
        return self.pools[-1]

    @property
    def pool(self) -> Pool:
        """The one that graphs are captured in."""
        return self.pools[-1]

    def check(self, seed: int, rows: int = 5) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        x, scale = torch.randn(rows, WIDTH, generator=generator), torch.rand(WIDTH, generator=generator)
        expected = self.plain.entry(self.theirs, x, scale)
        outputs = self.graphs.call("microbatch", self.pieces.entry, self.ours, [x, scale])
        assert all(map(torch.equal, outputs, expected))
        assert all(torch.equal(self.ours[name], tensor) for name, tensor in self.theirs.items())
        return outputs

    def captured(self) -> list[int]:
        """How many graphs the tapes have."""
        return [len(tape._pieces) for tape in self.graphs._held.values() if tape is not None]  # type: ignore[union-attr]


def test_pieces_do_what_the_functions_do() -> None:
    """Of two shapes in turns, bit for bit, while what is let go of is used again."""
    made = Made()
    outputs = [made.check(seed, rows=5 + seed % 2) for seed in range(8)]
    assert made.captured() == [2 * LAYERS, 2 * LAYERS]
    assert made.pool.taken == {} and made.pool.most < made.pool.asked / 2
    assert len({float(loss) for loss, _ in outputs}) == 8, "what an entry gave stays what it was"


def test_gathered_weights_of_a_piece() -> None:
    """A graph reads copies of what lay together where it was gathered: they are joined all the same."""

    def layer(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return x @ rt.joined(q, k, gathered=True).t()

    def entry(state: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
        whole = x.sum() * torch.arange(24.0).reshape(6, 4)  # as a gather gives them: one after another, anew
        return (piece(x, whole[:4], whole[4:]),)

    graphs = EntryGraphs([], {"entry": ["layer"]}, Pool)
    piece = layer
    inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    expected = [entry({}, x)[0] for x in inputs]
    piece = graphs.piece("layer", layer)
    for x, wanted in zip(inputs, expected, strict=True):
        assert torch.equal(graphs.call("entry", entry, {}, [x])[0], wanted)
    assert [len(tape._pieces) for tape in graphs._held.values() if isinstance(tape, Tape)] == [1]


def test_functions_do_not_keep_the_graphs() -> None:
    made = Made()
    for seed in range(3):
        made.check(seed)
    state = weakref.ref(made.ours["0.w"])
    step = made.pieces
    made.graphs, made.ours = EntryGraphs([]), {}
    assert state() is None and step.entry(made.theirs, torch.ones(2, WIDTH), torch.ones(WIDTH))


def test_other_state_is_captured_again() -> None:
    made = Made()
    for seed in range(3):
        made.check(seed)
    asked = made.pool.asked
    made.ours = {name: tensor.clone() for name, tensor in made.ours.items()}
    made.check(3)
    made.check(4)
    assert made.pool.asked == 2 * asked


def test_a_function_that_cannot_be_captured_runs() -> None:
    """Though it has taken from the list that it was handed."""
    made = Made()

    def refusing(saved: list[Tensor], *rest: Tensor) -> Tensor:
        records = bool(made.pools) and made.pool.records
        result = _layer_bwd(saved, *rest) if not records else rest[0] * saved.pop()
        if records:
            raise RuntimeError("operation not permitted\nmore")
        return result

    made.pieces.layer_bwd = made.graphs.piece("layer_bwd", refusing)
    made.check(0)
    with pytest.warns(RuntimeWarning, match="microbatch: layer_bwd runs without a CUDA graph: operation not permitted"):
        made.check(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2, 5):
            made.check(seed)
    assert made.captured() == [LAYERS]
    assert len(made.pools) == 2, "torch captures nothing into a pool where a capture has failed"


def test_another_order_ends_the_graphs() -> None:
    """A person's step may do otherwise from time to time: that is said, and right."""
    made = Made()
    for seed in range(3):
        made.check(seed)
    made.plain.turned = made.pieces.turned = True
    with pytest.warns(RuntimeWarning, match="what layer_bwd is handed is not where it was when it was captured"):
        made.check(3)
    made.check(4)
    assert made.captured() == []


def test_an_error_of_the_step_leaves_no_tape() -> None:
    made = Made()
    made.check(0)
    with pytest.raises(KeyError):
        made.graphs.call("microbatch", made.pieces.entry, {}, [torch.ones(5, WIDTH), torch.ones(WIDTH)])
    for seed in range(1, 4):
        made.check(seed)
    assert made.captured() == [2 * LAYERS]
