"""Random small graphs of the ops that models have, with a random placement of each state over one axis.

A graph is drawn op by op: each maker takes values that fit from the pool of those there are, makes the weights it
needs, and adds its results. Functions with slots are drawn the same way and called several times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.dims import Dim, NamedDim, evaluate, product, symbol
from mgraph.ir.graph import Entry, Function, Module, State, StateKind, Value
from mgraph.ir.ops.random import STATES, sequences_in
from mgraph.ir.types import DType, Shard
from tests.passes.build import f32, i64, module_of, started

SAVING = ("rms_norm", "layer_norm", "attention", "cross_entropy")
"""Ops whose results after the first are for their gradient alone."""
DEEPEST = 2
"""How deep calls go."""
LARGEST = 4096
"""The most elements that a value has."""
SPLIT = 0.7
"""How often a weight is split, where the axis divides it."""
BATCH = 3
"""The extent of the named dim B."""
STRETCH = 2
"""How much of the named dim S each rank has where it is split."""


@dataclass
class Drawing:
    """What is drawn for an axis of `size`, a function of `source`: functions, states, placements and integer inputs."""

    source: random.Random
    size: int
    trained: bool = False
    sequence: bool = False
    """Whether there is the named dim S, a multiple of the size."""
    state: dict[str, State] = field(default_factory=dict)
    places: dict[str, Shard] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    bounds: dict[str, int] = field(default_factory=dict)
    """Integer inputs by name (of another function than the entry's: `function.name`), and what they stay below."""
    number: int = 0

    @property
    def dims(self) -> dict[str, int]:
        """The extents of the named dims."""
        return {"B": BATCH, "S": STRETCH * self.size}

    def choose(self, options: Sequence[Any]) -> Any:
        """One of some options."""
        return self.source.choice(options)

    def weight(self, shape: Sequence[Dim]) -> Value:
        """A new parameter, placed somehow."""
        name = f"w{len(self.state)}"
        state = State.make(name, f32(*shape), StateKind.PARAM, trainable=True)
        self.state[name] = state
        dims = [i for i, d in enumerate(shape) if isinstance(d, int) and d % self.size == 0]
        if dims and self.source.random() < SPLIT:
            self.places[name] = Shard(self.choose(dims))
        return state.value


def places_beside(drawing: Drawing, size: int) -> dict[str, Shard]:
    """Placements over one axis more, of what the first leaves of each state."""
    found = {}
    for name, state in drawing.state.items():
        first = drawing.places.get(name)
        left = [int(d) // (drawing.size if first == Shard(i) else 1) for i, d in enumerate(state.type.shape)]
        dims = [i for i, extent in enumerate(left) if extent % size == 0]
        if dims and drawing.source.random() < SPLIT:
            found[name] = Shard(drawing.choose(dims))
    return found


class Scope:
    """One function while it is drawn: its builder, and the pool of float values."""

    def __init__(
        self, drawing: Drawing, builder: FunctionBuilder, weight: Callable[[Sequence[Dim]], Value], depth: int = 0
    ) -> None:
        self.drawing, self.builder, self.weight, self.depth = drawing, builder, weight, depth
        self.calls: dict[str, Sequence[Value]] = {}
        self.choose, self.pool = drawing.choose, list[Value]()
        self.bounds: dict[Value, int] = {}

    def extent(self, largest: int = 12) -> int:
        """An extent, mostly one that the axis divides."""
        size = self.drawing.size
        options = [size, 2 * size, 3 * size] * 3 + [1, 2, 3, 4, 5, 6, 7, 8]
        return int(self.choose([e for e in options if e <= largest]))

    def pick(self, fits: Callable[[tuple[Dim, ...]], bool] = lambda _: True) -> Value | None:
        """One of the values whose shape fits, if there is any; often the latest, so that chains of ops come to be."""
        found = [v for v in self.pool if fits(v.tensor.shape)]
        return self.choose([*found, *found[-1:] * 2 * len(found)]) if found else None

    def add(self, op: str, *operands: Value, **attrs: Any) -> Value:
        """A node; float results that are not too large join the pool."""
        made = self.builder.emit(op, operands, attrs)
        for value in made[:1] if self.drawing.trained and op in SAVING else made:
            if value.tensor.dtype.is_float and count(value.tensor.shape) <= LARGEST:
                self.pool.append(value)
        return made[0]

    def integers(self, shape: Sequence[Dim], bound: int) -> Value:
        """A new integer input below a bound."""
        value = self.builder.param(f"i{len(self.bounds)}", i64(*shape))
        self.bounds[value] = bound
        return value


def count(shape: Sequence[Dim]) -> int:
    """The number of elements."""
    return int(evaluate(product(shape), {"B": BATCH, "S": STRETCH * 4}))


def ranks(*wanted: int) -> Callable[[tuple[Dim, ...]], bool]:
    """Shapes of some numbers of dims."""
    return lambda shape: len(shape) in wanted


def wide(*wanted: int) -> Callable[[tuple[Dim, ...]], bool]:
    """Those whose last extent is a number, as a weight's are."""
    return lambda shape: len(shape) in wanted and isinstance(shape[-1], int)


# Makers: each adds to a scope what it can.


def linear(s: Scope) -> None:
    x = s.pick(wide(1, 2, 3, 4))
    if x is not None:
        n = s.extent()
        weight = s.weight((n, x.tensor.shape[-1]))
        bias = [s.weight((n,))] if s.choose([False, True]) else []
        s.add("aten.linear.default", x, weight, *bias)


def matmul(s: Scope) -> None:
    x = s.pick(wide(2, 3, 4))
    if x is None:
        return
    form = s.choose(["matmul", "mm", "weights", "bmm", "square"])
    shape = x.tensor.shape
    if form == "mm" and len(shape) == 2:
        s.add("aten.mm.default", x, s.weight((shape[1], s.extent())))
    elif form == "bmm" and len(shape) == 3 and isinstance(shape[0], int):
        s.add("aten.bmm.default", x, s.weight((shape[0], shape[2], s.extent())))
    elif form == "weights" and all(isinstance(d, int) for d in shape):
        s.add("aten.matmul.default", x, s.weight((*shape[:-2], shape[-1], s.extent())))
    elif form == "square":
        s.add("aten.matmul.default", x, s.add("aten.transpose.int", x, dim0=-2, dim1=-1))
    else:
        s.add("aten.matmul.default", x, s.weight((shape[-1], s.extent())))


def norm(s: Scope) -> None:
    x = s.pick(wide(1, 2, 3, 4))
    if x is None:
        return
    width = x.tensor.shape[-1:]
    if s.choose([True, False]):
        s.add("rms_norm", x, s.weight(width), eps=1e-2)
    else:
        s.add("layer_norm", x, s.weight(width), s.weight(width), eps=1e-2)


def gated(s: Scope) -> None:
    x = s.pick(wide(2, 3))
    if x is None:
        return
    n = s.extent()
    gate = s.add("aten.linear.default", x, s.weight((n, x.tensor.shape[-1])))
    if s.choose([True, False]):
        up = s.add("aten.linear.default", x, s.weight((n, x.tensor.shape[-1])))
        s.add("glu", gate, up, act=s.choose(["silu", "gelu_tanh"]), offset=s.choose([0.0, 1.0]))
    else:
        s.add("squared_relu", gate)


POINTWISE: list[tuple[str, dict[str, Any]]] = [
    ("aten.tanh.default", {}),
    ("aten.gelu.default", {}),
    ("aten.sigmoid.default", {}),
    ("aten.neg.default", {}),
    ("aten.mul.Scalar", {"other": 0.5}),
    ("aten.add.Scalar", {"other": 1.5}),
    ("aten.clamp.default", {"max": 0.7}),
    ("aten.clone.default", {}),
    ("cast", {"dtype": DType.F32}),
    ("aten.detach.default", {}),
]
ALONG: list[tuple[str, dict[str, Any]]] = [
    ("aten._softmax.default", {"half_to_float": False}),
    ("aten._log_softmax.default", {"half_to_float": False}),
    ("aten.cumsum.default", {}),
]


def pointwise(s: Scope) -> None:
    x = s.pick()
    if x is not None:
        op, attrs = s.choose(POINTWISE)
        s.add(op, x, **attrs)


def along(s: Scope) -> None:
    x = s.pick(ranks(1, 2, 3, 4))
    if x is not None:
        op, attrs = s.choose(ALONG)
        s.add(op, x, dim=s.choose(range(-1, len(x.tensor.shape) - 1)), **attrs)


def binary(s: Scope) -> None:
    x = s.pick()
    if x is None:
        return
    shape = x.tensor.shape

    def broadcasts(other: tuple[Dim, ...]) -> bool:
        return len(other) <= len(shape) and all(
            a == 1 or a == b for a, b in zip(reversed(other), reversed(shape), strict=False)
        )

    fixed = [d if isinstance(d, int) else 1 for d in shape]
    y = s.pick(broadcasts)
    if y is None or s.choose([False, True]):
        lead = s.choose(range(len(shape) + 1))
        y = s.weight([1 if s.choose([False, False, True]) else d for d in fixed[lead:]])
    op, attrs = s.choose([("add", {}), ("mul", {}), ("sub", {}), ("add", {"alpha": 0.5})])
    s.add(f"aten.{op}.Tensor", *((x, y) if s.choose([True, False]) else (y, x)), **attrs)


def reduction(s: Scope) -> None:
    x = s.pick(ranks(1, 2, 3, 4))
    if x is None:
        return
    rank = len(x.tensor.shape)
    dims = tuple(d for d in range(rank) if s.choose([False, True])) or (rank - 1,)
    op = s.choose(["sum", "mean", "all"])
    if op == "all":
        s.add("aten.sum.default", x)
    else:
        named = {"sum": "aten.sum.dim_IntList", "mean": "aten.mean.dim"}[op]
        s.add(named, x, dim=dims, keepdim=s.choose([False, True]))


def reshape(s: Scope) -> None:
    """Split a dim, join two, or add a dim of one."""
    x = s.pick(ranks(1, 2, 3, 4))
    if x is None:
        return
    shape = list(x.tensor.shape)
    dim = s.choose(range(len(shape)))
    form = s.choose(["split", "join", "one", "flat"])
    factors = [f for f in (s.drawing.size, 2, 3, 4) if isinstance(shape[dim], int) and shape[dim] % f == 0]
    if form == "split" and factors:
        factor = s.choose(factors)
        pair = [factor, shape[dim] // factor]
        shape[dim : dim + 1] = pair if s.choose([True, False]) else pair[::-1]
    elif form == "join" and dim + 1 < len(shape):
        shape[dim : dim + 2] = [product(shape[dim : dim + 2])]
    elif form == "one":
        shape.insert(dim, 1)
    else:
        shape = [product(shape)]
    s.add("reshape", x, shape=tuple(shape))


def transpose(s: Scope) -> None:
    x = s.pick(ranks(2, 3, 4))
    if x is None:
        return
    rank = len(x.tensor.shape)
    form = s.choose(["transpose", "permute", "t"])
    if form == "t" and rank == 2:
        s.add("aten.t.default", x)
    elif form == "permute":
        s.add("aten.permute.default", x, dims=tuple(s.drawing.source.sample(range(rank), rank)))
    else:
        s.add("aten.transpose.int", x, dim0=s.choose(range(rank)), dim1=s.choose(range(-rank, 0)))


def view(s: Scope) -> None:
    x = s.pick(ranks(1, 2, 3))
    if x is None:
        return
    shape = x.tensor.shape
    dim = s.choose(range(len(shape)))
    extent = shape[dim]
    form = s.choose(["unsqueeze", "expand", "select", "slice", "squeeze"])
    if form == "expand" and count(shape) <= LARGEST // 4:
        s.add("aten.expand.default", x, size=(s.extent(4), *shape))
    elif form == "select" and isinstance(extent, int):
        s.add("aten.select.int", x, dim=dim, index=s.choose(range(extent)))
    elif form == "slice" and isinstance(extent, int) and extent > 1:
        begin = s.choose(range(extent - 1))
        s.add("aten.slice.Tensor", x, dim=dim, start=begin, end=s.choose(range(begin + 1, extent + 1)))
    elif form == "squeeze" and extent == 1:
        s.add("aten.squeeze.dim", x, dim=dim)
    else:
        s.add("aten.unsqueeze.default", x, dim=dim)


def cat(s: Scope) -> None:
    x = s.pick(ranks(1, 2, 3))
    if x is None or count(x.tensor.shape) > LARGEST // 2:
        return
    shape = x.tensor.shape
    dim = s.choose(range(-1, len(shape) - 1))
    y = s.pick(lambda other: other == shape)
    s.add("aten.cat.default", x, y or x, dim=dim, args=("tensors.0", "tensors.1"))


def split(s: Scope) -> None:
    x = s.pick(lambda shape: bool(shape) and isinstance(shape[-1], int) and shape[-1] > 1)
    if x is not None:
        width: Any = x.tensor.shape[-1]
        first = s.choose(range(1, width))
        s.add("aten.split_with_sizes.default", x, split_sizes=(first, width - first), dim=-1)


def where(s: Scope) -> None:
    x = s.pick()
    y = x and s.pick(lambda shape: shape == x.tensor.shape)
    if x is not None and y is not None:
        mask = s.builder.one("aten.gt.Scalar", s.integers(x.tensor.shape, 2), other=0)
        s.add("aten.where.self", mask, x, y)


def attention(s: Scope) -> None:
    """Projections, heads, perhaps rotation and sinks, attention, and back."""
    x = s.pick(lambda shape: wide(3)(shape) and "B" not in str(shape[1]) and count(shape[:2]) <= 64)
    if x is None:
        return
    size = s.drawing.size
    groups = s.choose([size, 1, 2, 2 * size])
    heads, width = groups * s.choose([1, 2]), s.choose([2, 4])
    batch, length, inner = x.tensor.shape

    def project(number: int) -> Value:
        flat = s.add("aten.linear.default", x, s.weight((number * width, inner)))
        split = s.add("reshape", flat, shape=(batch, length, number, width))
        return s.add("aten.permute.default", split, dims=(0, 2, 1, 3))

    q, k, v = project(heads), project(groups), project(groups)
    if isinstance(length, int) and s.choose([False, True]):
        tables = [s.weight((length, width)) for _ in range(2)]
        q, k = (s.add("rope", value, *tables) for value in (q, k))
    extra = ("sinks",) if s.choose([False, True]) else ()
    sinks = [s.weight((heads,)) for _ in extra]
    out = s.add("attention", q, k, v, *sinks, scale=0.5, causal=s.choose([True, False]), extra=extra)
    back = s.add("aten.transpose.int", out, dim0=1, dim1=2)
    flat = s.add("reshape", back, shape=(batch, length, heads * width))
    s.add("aten.linear.default", flat, s.weight((s.extent(), heads * width)))


def embedding(s: Scope) -> None:
    rows = s.choose([2 * s.drawing.size, 7, 12])
    lead = s.choose([(3,), (2, 3), (s.drawing.size, 4)])
    attrs = s.choose([{}, {"padding_idx": 1}])
    s.add("aten.embedding.default", s.weight((rows, s.extent())), s.integers(lead, rows), **attrs)


def cross_entropy(s: Scope) -> None:
    x = s.pick(lambda shape: len(shape) == 2 and isinstance(shape[1], int) and shape[1] > 1)
    if x is not None:
        rows, classes = x.tensor.shape
        assert isinstance(classes, int)
        s.add("cross_entropy", x, s.integers((rows,), classes), ignore_index=1)


def experts(s: Scope) -> None:
    """Routing, dispatch, a grouped product, and combination."""
    x = s.pick(lambda shape: len(shape) == 2 and all(isinstance(d, int) for d in shape))
    if x is None:
        return
    number, inner = s.choose([2 * s.drawing.size, 3, 4]), x.tensor.shape[1]
    logits = s.add("aten.linear.default", x, s.weight((number, inner)))
    weights, indices = s.builder.emit("moe_route", (logits,), {"top_k": 2, "score": s.choose(["softmax", "sigmoid"])})
    rows, order, offsets = s.builder.emit("moe_dispatch", (x, indices), {"num_experts": number})
    width = s.extent()
    made = s.add("grouped_matmul", rows, s.weight((number, inner, width)), offsets)
    s.add("moe_combine", made, weights, order, dtype=DType.F32)


def drop(s: Scope) -> None:
    """Dropout, in the entry's function: it reads the states of random numbers."""
    x = s.pick(ranks(1, 2, 3))
    samples = x and sequences_in(x.tensor.shape)
    if x is None or samples is None or s.depth:
        return
    numbers = []
    for name in STATES:
        made = State.make(name, i64(), StateKind.SCALAR, persist=False)
        numbers.append(s.drawing.state.setdefault(name, made).value)
    s.add("dropout", x, *numbers, p=0.3, site=f"site{s.drawing.number}", samples=samples)
    s.drawing.number += 1


def constant(s: Scope) -> None:
    x = s.pick()
    if x is not None:
        s.add("aten.add.Tensor", x, s.add("aten.full.default", size=x.tensor.shape, fill_value=0.25, dtype=DType.F32))


def call(s: Scope) -> None:
    """A call of a new function, or of one there is, with weights of its own or those of an earlier call."""
    known = [n for n, f in s.drawing.functions.items() if all(_of_type(s, p) for p in _floats(f))]
    if not known or s.choose([True, False]):
        x, y = s.pick(), s.pick()
        if x is None or y is None or s.depth == DEEPEST:
            return
        name = _function(s, [x] if x is y else [x, y])
        arguments = [x] if x is y else [x, y]
    else:
        name = s.choose(known)
        arguments = [s.choose(_of_type(s, p)) for p in _floats(s.drawing.functions[name])]
    body = s.drawing.functions[name]
    bounds = s.drawing.bounds
    arguments += [s.integers(p.tensor.shape, bounds[f"{name}.{p.name}"]) for p in body.params[len(arguments) :]]
    slots = s.calls.get(name)
    if slots is None or s.choose([True, False]):
        slots = [s.weight(slot.tensor.shape) for slot in body.slots]
    s.calls[name] = slots
    types = [v.type for v in body.results]
    s.pool += s.builder.emit("call", (*arguments, *slots), {"callee": name}, types=types, names=["y"] * len(types))


def _of_type(s: Scope, param: Value) -> list[Value]:
    return [v for v in s.pool if v.type == param.type]


def _floats(function: Function) -> list[Value]:
    return [p for p in function.params if p.tensor.dtype.is_float]


def _function(s: Scope, like: Sequence[Value]) -> str:
    """Draw a function of values of these types."""
    drawing = s.drawing
    name = f"layer{drawing.number}"
    drawing.number += 1
    builder = started(name)
    inner = Scope(drawing, builder, lambda shape: builder.slot("w", f32(*shape)), s.depth + 1)
    inner.pool += [builder.param("x", v.type) for v in like]
    steps(inner, 5)
    if not builder.nodes:
        pointwise(inner)
    results = list(dict.fromkeys([inner.pool[-1], inner.choose(inner.pool)]))
    drawing.functions[name] = builder.build(results)
    drawing.bounds |= {f"{name}.{value.name}": bound for value, bound in inner.bounds.items()}
    return name


MAKERS: list[Callable[[Scope], None]] = [
    *[linear, reshape, binary, reduction] * 2,  # what splits, and what splits move through
    linear,
    binary,
    pointwise,
    call,
    matmul,
    reshape,
    transpose,
    norm,
    gated,
    reduction,
    attention,
    embedding,
    view,
    along,
    cat,
    split,
    where,
    constant,
    drop,
    experts,
    cross_entropy,
]


def steps(s: Scope, most: int, makers: Sequence[Callable[[Scope], None]] = MAKERS) -> None:
    """Draw some ops."""
    for _ in range(most):
        s.choose(makers)(s)


def draw_forward(source: random.Random, size: int, *, sequence: bool = False, most: int = 12) -> tuple[Drawing, Module]:
    """A module with the entry `forward`: some values are its outputs, some are added to states."""
    drawing = Drawing(source, size, sequence=sequence)
    scope = _entry(drawing, most)
    outputs = list(dict.fromkeys([scope.pool[-1], scope.choose(scope.pool)]))
    updates = []
    for value in scope.choose([[], scope.pool[-1:], scope.pool[-3:]]):
        if all(isinstance(d, int) for d in value.tensor.shape):
            total = drawing.weight(value.tensor.shape)
            updates.append((total.name, scope.builder.one("accumulate", total, value)))
    return drawing, _module(drawing, scope, outputs, updates)


def draw_trained(source: random.Random, size: int, *, sequence: bool = False, most: int = 8) -> tuple[Drawing, Module]:
    """A module with the entry `forward` that gives the loss sum and count which the training entries are derived of."""
    drawing = Drawing(source, size, trained=True, sequence=sequence)
    scope = _entry(drawing, most)
    # The input always counts, so that the entry's function keeps it, and with it the dim B.
    x = scope.builder.one("aten.add.Tensor", scope.pool[-1], scope.builder.one("aten.sum.default", scope.pool[0]))
    shape = x.tensor.shape
    width = shape[-1] if shape and isinstance(shape[-1], int) else 1
    rows = product(shape[:-1]) if shape and width != 1 else product(shape)
    x = scope.builder.one("reshape", x, shape=(rows, width))
    classes = 2 * size
    logits = scope.builder.one("aten.linear.default", x, drawing.weight((classes, width)))
    labels = scope.integers((rows,), classes)
    loss = scope.builder.one("cross_entropy", logits, labels, ignore_index=1)
    counted = scope.builder.one("aten.ne.Scalar", labels, other=1)
    return drawing, _module(drawing, scope, [loss, scope.builder.one("aten.sum.default", counted)], [])


def _entry(drawing: Drawing, most: int) -> Scope:
    """The scope of the entry's function, drawn."""
    scope = Scope(drawing, started(), drawing.weight)
    batch, tokens = symbol("B"), symbol("S")
    leads = [(batch,), (drawing.size,), (batch, 2 * drawing.size), (2, 5), (batch, 3)]
    lead = drawing.choose([(batch, tokens), (batch, tokens), (3, tokens), (tokens,)] if drawing.sequence else leads)
    scope.pool.append(scope.builder.param("x", f32(*lead, scope.extent())))
    steps(scope, most)
    if not scope.builder.nodes:
        pointwise(scope)
    return scope


def _module(drawing: Drawing, scope: Scope, outputs: Sequence[Value], updates: Sequence[tuple[str, Value]]) -> Module:
    drawing.bounds |= {value.name: bound for value, bound in scope.bounds.items()}
    main = scope.builder.build([*outputs, *(value for _, value in updates)])
    module = module_of(main, *drawing.functions.values(), state=drawing.state)
    names = ("loss_sum", "count") if drawing.trained else tuple(f"out{i}" for i in range(len(outputs)))
    entry = Entry("forward", main.name, names, tuple(name for name, _ in updates))
    dims = {name: NamedDim(name) for name in ("B", "S")}
    return replace(module, dims=dims, entries={"forward": entry})
