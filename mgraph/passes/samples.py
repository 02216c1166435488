"""Random states and inputs for running a module, and the margins of its discontinuous decisions.

Everything is a function of (seed, name), so that two modules that share a state or an input get the same numbers.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgraph.ir.dims import evaluate
from mgraph.ir.facts import multiples
from mgraph.ir.graph import Function, InitCall, Module, Node, StateKind, Value
from mgraph.ir.local import declared_sizes
from mgraph.ir.mesh import mesh_sizes
from mgraph.ir.opdef import op_def
from mgraph.ir.ops.replay import ROUTING
from mgraph.ir.ops.route import CHOOSING, moe_choices
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.types import DType, Partial
from mgraph.passes.serve_samples import CACHE_DIMS, is_of_serving, serving_inputs

IGNORED = -100
SIZES = (2, 5, 3, 7)  # of the named dims; few tokens make it likely that all routing choices are clear
MAX_RANKS = 16
CHOICES = {"aten.topk.default": "k", "moe_route": "top_k"}
_SCALE = 8.0  # a factor that is kept between steps: one that scales without rounding

Tensors = dict[str, Any]


@dataclass(frozen=True)
class Shapes:
    """The numbers that runs of a module share: named dims and the size of the vocabulary."""

    dims: Mapping[str, int]
    vocab: int

    @staticmethod
    def of(module: Module) -> Shapes:
        """Small named dims, pairwise distinct where their ranges allow."""
        dims = {
            name: max(dim.minimum, size if dim.maximum is None else min(size, dim.maximum))
            for (name, dim), size in zip(module.dims.items(), itertools.chain(SIZES, itertools.repeat(2)), strict=False)
        }
        rows = [n.operands[0].tensor.shape[0] for _, n in module.walk() if n.op == "aten.embedding.default"]
        return Shapes(dims, min((r for r in rows if isinstance(r, int)), default=2)).fitting(module)

    def fitting(self, module: Module) -> Shapes:
        """These, but named dims that a fact of the module makes multiples of a number are the next ones."""
        known = multiples((fact.text for fact in module.facts), declared_sizes(module))
        more = {name: -size % known.get(name, 1) for name, size in self.dims.items()}
        return Shapes({name: size + more[name] for name, size in self.dims.items()}, self.vocab)


def generator(seed: int, name: str, rank: int = 0) -> Any:
    """A random generator of its own for a name (and a rank)."""
    import torch

    return torch.Generator().manual_seed(zlib.crc32(name.encode()) + 7919 * seed + 104729 * rank)


def random_state(module: Module, seed: int, rank: int = 0) -> Tensors:
    """A value for every state; a state that is partial over the mesh differs from rank to rank."""
    made: Tensors = {}
    for name, state in module.state.items():
        partial = any(isinstance(p, Partial) for _, p in state.type.placement)
        shape = tuple(int(evaluate(d, CACHE_DIMS)) for d in state.type.shape)
        init = state.init if state.kind is StateKind.BUFFER else ()
        how = (shape, state.type.dtype, state.kind, state.persist, init)
        made[name] = _state(seed, name, rank if partial else 0, *how).clone()
    for name, state in module.state.items():
        if state.kind is StateKind.MASTER:
            made[name] = made[name.removesuffix(".master")].to(made[name].dtype)
        for call in state.init:
            if call[0] == "copy_from":
                made[name] = made[str(call[1])].to(made[name].dtype)
    return made


def zero_accumulators(module: Module, state: Tensors) -> Tensors:
    """The state at the beginning of a step: gradient, loss and count accumulators are zero."""
    resets = {n for n, s in module.state.items() if not s.persist and s.kind in (StateKind.GRAD, StateKind.SCALAR)}
    return {n: t.new_zeros(t.shape) if n in resets else t for n, t in state.items()}


@functools.lru_cache(maxsize=1024)
def _state(
    seed: int,
    name: str,
    rank: int,
    shape: tuple[int, ...],
    type_: DType,
    kind: StateKind,
    persist: bool,
    init: tuple[InitCall, ...],
) -> Any:
    """A value, kept: from one graph to the next most states are the same, and drawing them takes as long as runs do."""
    import torch

    source, dtype = generator(seed, name, rank), to_torch_dtype(type_)
    if not type_.is_float:
        number = torch.randint(3, 9, shape, generator=source)
        return _replayed(init, number, dtype) if kind is StateKind.BUFFER else number.to(dtype)
    noise = torch.randn(shape, generator=source, dtype=torch.float64)
    if kind is StateKind.SCALAR and persist:
        return torch.full(shape, _SCALE, dtype=dtype)
    if kind is StateKind.BUFFER:
        return _replayed(init, noise, dtype)
    if kind is StateKind.PARAM:
        # A matrix keeps the size of what it is applied to; a vector is as likely a norm's scale as a bias.
        noise = noise / max(shape[-1], 1) ** 0.5 if len(shape) > 1 else 1 + 0.3 * noise
    elif kind is StateKind.MOMENT:
        noise = 0.1 * noise.abs()
    return noise.to(dtype)


def _replayed(init: tuple[InitCall, ...], tensor: Any, dtype: Any) -> Any:
    """A buffer as its recorded initialiser makes it, for tables mean something; where that draws, the noise stays."""
    import torch

    for call, *arguments in init:
        if call == "copy_":
            tensor = torch.tensor(arguments[0], dtype=torch.float64).reshape(tensor.shape)
        elif call == "zeros_":
            tensor = tensor.zero_()
        elif call not in ("normal_", "uniform_", "copy_from", "fill_range_"):
            tensor = getattr(tensor, str(call))(*arguments)
    return tensor.to(dtype)


def random_inputs(function: Function, shapes: Shapes, seed: int, rank: int = 0) -> Tensors:
    """A value for every input: what it is follows from its name and type (token ids, labels, positions, masks)."""
    if is_of_serving(function):
        return serving_inputs(function, shapes.vocab, generator(seed, function.name))
    return {
        p.name: _input(p, shapes, generator(seed, p.name, rank if p.tensor.placement else 0)) for p in function.params
    }


def _input(value: Value, shapes: Shapes, source: Any) -> Any:
    import torch

    shape = [int(evaluate(d, shapes.dims)) for d in value.tensor.shape]
    dtype = to_torch_dtype(value.tensor.dtype)
    if value.tensor.dtype.is_float:
        if not shape:
            return torch.tensor(0.01, dtype=dtype)
        masks = value.name.endswith("mask")
        made = torch.randint(2, shape, generator=source) if masks else torch.randn(shape, generator=source)
        return made.to(dtype)
    if value.tensor.dtype is DType.BOOL:
        return torch.randint(2, shape, generator=source).bool()
    if not shape:
        return torch.tensor(3, dtype=dtype)
    if value.name == "position_ids":
        return torch.arange(shape[-1], dtype=dtype).expand(shape).contiguous()
    if value.name == ROUTING:  # of some tokens, distinct experts; the others are the routers'
        given = torch.rand(shape, generator=source).argsort(-1)
        return given.where(torch.rand((*shape[:-1], 1), generator=source) < 0.5, -1).to(dtype)
    if value.name == "segment_ids":
        thirds = (torch.arange(shape[-1]) * 3 // shape[-1] + 1) % 3  # two documents and padding
        return thirds.to(dtype).expand(shape).contiguous()
    made = torch.randint(shapes.vocab, shape, generator=source, dtype=dtype)
    if value.name == "labels":
        made.flatten()[0] = IGNORED
    return made


def mesh_of(module: Module) -> dict[str, int]:
    """Axis sizes to run a module on: every axis at most 2. Asserts that this is at most 16 ranks."""
    basic = {a.name: 2 if a.size is None else min(a.size, 2) for a in module.mesh if not a.of}
    ranks = ranks_of(basic)
    assert ranks <= MAX_RANKS, f"{len(basic)} mesh axes give {ranks} ranks"
    return mesh_sizes(module.mesh, basic, ranks)


def ranks_of(sizes: Mapping[str, int]) -> int:
    """The number of ranks of a mesh."""
    count = 1
    for size in sizes.values():
        count *= size
    return count


@dataclass
class Margins:
    """An interpreter hook that finds how near the choices of top-k came to another outcome: `least` is the smallest
    gap between the last chosen score and the first one left."""

    least: float = float("inf")

    def __call__(
        self, function: Function, node: Node, operands: Sequence[Sequence[Any]], results: Sequence[Sequence[Any]]
    ) -> None:
        """Look at one node's operands, per rank."""
        if node.op not in CHOICES:
            return
        for given in zip(*operands, strict=True):
            for values, taken in _choices(node, [tensor.double() for tensor in given]):
                if taken < values.shape[-1]:
                    ordered = values.sort(-1, descending=True).values
                    self.least = min(self.least, float((ordered[..., taken - 1] - ordered[..., taken]).min()))


def _choices(node: Node, operands: Sequence[Any]) -> list[tuple[Any, int]]:
    """What a node chooses from, and how many of the largest it takes."""
    k = int(str(node.attrs[CHOICES[node.op]]))
    if node.op != "moe_route":
        return [(operands[0], k)]
    attrs: Mapping[str, Any] = op_def(node.op).complete(node.attrs)
    return moe_choices(*operands, top_k=k, score=attrs["score"], **{n: attrs[n] for n in CHOOSING})
