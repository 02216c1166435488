"""The meaning of a graph: run it with torch, one rank or all ranks of a mesh in lockstep in one process.

Every value is a list with one tensor per rank; an op runs on each rank alone, a collective on the lists of its
groups. One rank is the list of length one, so there is one interpreter and no process group.

*Lifted* mode replaces every float dtype by float64 (state, inputs, casts): two graphs that differ only in rounding
agree there to about 1e-12.

Named dims bind to the extents of a rank's own inputs: a dim that a data axis shards has its local extent in the
rank's program. Other axes divide constant extents (`mgraph.ir.local`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy

from mgraph.ir.dims import evaluate, factor_of, names_in
from mgraph.ir.graph import Function, Module, Node, Static, Value
from mgraph.ir.local import Division
from mgraph.ir.mesh import groups, mesh_sizes
from mgraph.ir.opdef import op_def
from mgraph.ir.types import DType, PendingType, TensorType

Ranks = list[Any]  # one tensor per rank
Hook = Callable[[Function, Node, Sequence[Ranks], Sequence[Ranks]], None]
"""Called after each node with its operands and its results."""


def run(
    module: Module,
    entry: str,
    inputs: Mapping[str, Any],
    state: Mapping[str, Any],
    *,
    lifted: bool = False,
    hook: Hook | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run an entry point on one rank: named outputs and updated states (new tensors; `state` is not changed)."""
    outputs, updates = run_ranks(module, entry, [inputs], [state], {}, lifted=lifted, hook=hook)
    return outputs[0], updates[0]


def run_ranks(
    module: Module,
    entry: str,
    inputs: Sequence[Mapping[str, Any]],
    state: Sequence[Mapping[str, Any]],
    sizes: Mapping[str, int],
    *,
    lifted: bool = False,
    hook: Hook | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run an entry point on all ranks of a mesh in lockstep: per rank the named outputs and the updated states.

    `sizes` gives the mesh axes in major-first order; their product is the number of ranks.
    """
    declared = module.entries[entry]
    function = module.functions[declared.function]
    runner = _Runner(module, len(inputs), sizes, lifted, state, hook)
    arguments = [[runner.lift(rank[p.name]) for rank in inputs] for p in function.params]
    runner.bind_dims(function.params, arguments)
    results = runner.call(function, arguments, {})
    named = len(declared.outputs)
    outputs, updates = results[:named], results[named:]
    ranks = range(len(inputs))
    return (
        [dict(zip(declared.outputs, (o[r] for o in outputs), strict=True)) for r in ranks],
        [dict(zip(declared.updates, (u[r] for u in updates), strict=True)) for r in ranks],
    )


def run_function(
    module: Module, function: Function, arguments: Sequence[Any], *, lifted: bool = False, **statics: Any
) -> tuple[Any, ...]:
    """Run one function alone on one rank: arguments are its params, then its slots."""
    runner = _Runner(module, 1, {}, lifted, [{}], None)
    lists = [[runner.lift(a)] for a in arguments]
    runner.bind_dims(function.inputs(), lists)
    return tuple(r[0] for r in runner.call(function, lists, statics))


class _Runner:
    """One run: the dims bound, the mesh, and the states read."""

    def __init__(
        self,
        module: Module,
        ranks: int,
        sizes: Mapping[str, int],
        lifted: bool,
        state: Sequence[Mapping[str, Any]],
        hook: Hook | None,
    ) -> None:
        self.module, self.ranks, self.lifted, self.state, self.hook = module, ranks, lifted, state, hook
        self.sizes = mesh_sizes(module.mesh, sizes, ranks)
        self.division = Division.of(module, self.sizes)
        self.dims: list[dict[str, int]] = [{} for _ in range(ranks)]

    def lift(self, tensor: Any) -> Any:
        return tensor.double() if self.lifted and tensor.is_floating_point() else tensor

    def bind_dims(self, values: Sequence[Value], arguments: Sequence[Ranks]) -> None:
        """Read the named dims off the shapes of inputs; a shape that contradicts its type is an error of the caller."""
        for value, ranks in zip(values, arguments, strict=True):
            for dims, tensor in zip(self.dims, ranks, strict=True):
                _bind(value, tuple(tensor.shape), dims)
        for dims in self.dims:
            for name, bound in self.division.bounds.items():
                if names_in(bound) <= dims.keys():
                    dims[name] = evaluate(bound, dims)

    def call(self, function: Function, arguments: Sequence[Ranks], statics: Mapping[str, Any]) -> list[Ranks]:
        values: dict[Value, Ranks] = dict(zip(function.inputs(), arguments, strict=True))
        self._read_extents(values)
        last_use = {v: i for i, node in enumerate(function.nodes) for v in node.operands}
        kept = set(function.results)
        for index, node in enumerate(function.nodes):
            operands = [self.read(v, values) for v in node.operands]
            results = self.node(node, operands, statics)
            if self.hook is not None:
                self.hook(function, node, operands, results)
            values.update(zip(node.results, results, strict=True))
            self._read_extents(dict(zip(node.results, results, strict=True)))
            for operand in set(node.operands):
                if last_use[operand] == index and operand not in kept:
                    values.pop(operand, None)
        return [self.read(v, values) for v in function.results]

    def _read_extents(self, values: Mapping[Value, Ranks]) -> None:
        """Bind the dims whose extents the host reads, as the last tensors have them."""
        if not self.division.read:
            return
        for value, ranks in values.items():
            if not isinstance(value.type, TensorType):
                continue
            for index, extent in enumerate(value.type.shape):
                for name in names_in(extent) & self.division.read:
                    factor = factor_of(extent, name)
                    for dims, tensor in zip(self.dims, ranks, strict=True):
                        if factor is not None:
                            dims[name] = int(tensor.shape[index] / factor)

    def read(self, value: Value, values: Mapping[Value, Ranks]) -> Ranks:
        if value.is_state:
            return [self.lift(rank[value.name]) for rank in self.state]
        return values[value]

    def node(self, node: Node, operands: Sequence[Ranks], statics: Mapping[str, Any]) -> Sequence[Ranks]:
        """The results of one node, each a list over ranks."""
        if node.op == "call":
            given = {
                k.removeprefix("static."): self.attr(v, 0, statics)
                for k, v in node.attrs.items()
                if k.startswith("static.")
            }
            return self.call(self.module.functions[str(node.attrs["callee"])], operands, given)
        if op_def(node.op).collective:
            return self.collective(node, operands)
        if node.op == "axis_index":
            return [self.axis_index(str(node.attrs["axis"]))]
        if node.op == "axis_share":
            return [[tensor / self.sizes.get(str(node.attrs["axis"]), 1) for tensor in operands[0]]]
        body, complete = op_def(node.op).body, op_def(node.op).complete(self.division.local_attrs(node))
        extra = {} if "." not in node.op else {"device": self.device(operands)}
        made = []
        for rank in range(self.ranks):
            attrs = {k: self.attr(v, rank, statics) for k, v in complete.items()}
            result = body(*(o[rank] for o in operands), **attrs, **extra)
            made.append(tuple(result) if isinstance(result, tuple | list) else (result,))
            assert len(made[-1]) == len(node.results), f"{node!r}: the body gave {len(made[-1])} results"
        return [list(column) for column in zip(*made, strict=True)]

    def device(self, operands: Sequence[Ranks]) -> Any:
        """Where factories make their tensors: with the operands, else with the state or the CPU."""
        for tensors in (*operands, [next(iter(self.state[0].values()), None)]):
            if tensors and hasattr(tensors[0], "device"):
                return tensors[0].device
        return "cpu"

    def attr(self, value: Any, rank: int, statics: Mapping[str, Any]) -> Any:
        """An attribute made concrete: dims become ints, statics their values, float dtypes f64 when lifted."""
        if isinstance(value, Static):
            value = statics[value.name]
        if isinstance(value, tuple):
            return tuple(self.attr(v, rank, statics) for v in value)
        if isinstance(value, sympy.Expr):
            return evaluate(value, self.dims[rank])
        if isinstance(value, DType) and value.is_float and self.lifted:
            return DType.F64
        return value

    def collective(self, node: Node, operands: Sequence[Ranks]) -> Sequence[Ranks]:
        results: list[Ranks] = [[None] * self.ranks for _ in node.results]
        for group in groups(self.module.mesh, self.sizes, str(node.attrs["axis"]), self.ranks):
            attrs = op_def(node.op).complete(node.attrs)
            made = op_def(node.op).body(*([o[r] for r in group] for o in operands), **attrs)
            for result, ranks in zip(results, made, strict=True):
                for rank, tensor in zip(group, ranks, strict=True):
                    result[rank] = tensor
        return results

    def axis_index(self, axis: str) -> Ranks:
        import torch

        index: Ranks = [None] * self.ranks
        for group in groups(self.module.mesh, self.sizes, axis, self.ranks):
            for position, rank in enumerate(group):
                index[rank] = torch.tensor(position)
        return index


def _bind(value: Value, shape: tuple[int, ...], dims: dict[str, int]) -> None:
    type_ = value.type.value if isinstance(value.type, PendingType) else value.type
    assert isinstance(type_, TensorType)
    assert len(shape) == len(type_.shape), f"{value!r}: {type_} got a tensor of shape {shape}"
    for declared, extent in zip(type_.shape, shape, strict=True):
        if isinstance(declared, sympy.Symbol):
            bound = dims.setdefault(declared.name, extent)
            assert bound == extent, f"{value!r}: {declared} is {extent} here but {bound} elsewhere"
