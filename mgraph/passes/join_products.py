"""join-products: projections of one input become one product, their gradients another, those of their weights a third.

    %g = aten.linear.default(%x, %gate)                     %w = joined(%gate, %up)
    %u = aten.linear.default(%x, %up)                       %p = aten.linear.default(%x, %w)
                                                            %g, %u = slices of %p
    %dg, %du = glu_grad(%dy, %g, %u)                 ==>    %d = glu_grad_joined(%dy, %g, %u)
    %a = aten.matmul.default(%du, %up)                      %dx = aten.matmul.default(%d, joined(%gate, %up))
    %dx = matmul_add(%a, %dg, %gate)
    … = accumulate(%gate.grad, %dg^T @ %x)                  … = accumulate_joined(%gate.grad, %up.grad, %d^T @ %x)
    … = accumulate(%up.grad, %du^T @ %x)

Likewise q, k and v: `rope_joined` turns q and k where they were projected, and `rope_join` makes all three gradients
beside each other, of what attention's backward gives. The weights, and their gradients, then lie one after another in
memory (`joined_states` of `joining.py` says which), so that nothing is copied for it; only the gradient of v is, which
moves less than the sums did unless v is twice as wide as the input. It pays because a product of few columns, or of a
short sum, runs slower than a large one: it fills the multiprocessors less evenly, and adds to what it must read first.

Weights that ranks gather lie so where they were received (`gathered.py`), if one gather has them one after another; the
function gives parts of the one gradient to its caller then.

What is joined must be state in every call, whole on each rank, or gathered in every call. Where the backward cannot be
joined, the forward is not. Where gate and up are parts of one projection already, its gradient is made at once
(`packed_units.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.gathered import with_results_together
from mgraph.passes.joining import Chains, Miss, Sum, sums_of, turning, uneven_states
from mgraph.passes.packed_units import with_packed_units

_LINEAR, _MATMUL, _MM, _T = "aten.linear.default", "aten.matmul.default", "aten.mm.default", "aten.t.default"


@dataclass(frozen=True)
class JoinProducts(Pass):
    """Make one product of several that read the same input."""

    name: ClassVar[str] = "join-products"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def on_twin(self, real: Module) -> Pass:
        """With the matrices of `real` for uneven, whatever their sizes are."""
        return _OnTwin(uneven_states(real))

    def _uneven(self, module: Module) -> frozenset[str]:
        return uneven_states(module)

    def run(self, module: Module, report: Report) -> Module:
        """Join in the backward functions, then the projections of the same weights; a module without a match is
        returned as it is."""
        functions = {
            name: with_packed_units(function, report, self.name) for name, function in module.functions.items()
        }
        if any(functions[name] is not function for name, function in module.functions.items()):
            module = replace(module, functions=functions)
        chains = Chains(module, self._uneven(module))
        functions = dict(module.functions)
        for name, function in module.functions.items():
            functions[name] = self._backward(function, chains, report)
        if not chains.of_state:
            return module
        for name, function in functions.items():
            functions[name] = self._forward(function, chains, report)
        return with_results_together(replace(module, functions=functions), chains.gathered, self.name)

    def _backward(self, function: Function, chains: Chains, report: Report) -> Function:
        for root in [node for node in function.nodes if node.op == "matmul_add"]:
            try:
                found = next(iter(sums_of(function, root)), None)
                if found is None:
                    continue
                chains.add([term.weight for term in found.terms], [update.operands[0] for update in found.updates])
            except Miss as miss:
                report.near_miss(function.name, root.id, self.name, *miss.args)
                continue
            before = {node.id for node in function.nodes}
            function = _with_joined_sum(function, found, self.name)
            made = [node.id for node in function.nodes if node.id not in before]
            report.match(function.name, root.id, f"{found.text} in one product", [n.id for n in found.gone], made)
        return function

    def _forward(self, function: Function, chains: Chains, report: Report) -> Function:
        for linears in _alike(function, chains):
            function = _with_joined_linear(function, linears, self.name)
            weights = ", ".join(node.operands[1].name for node in linears)
            report.match(function.name, linears[0].id, f"{weights} in one product", [n.id for n in linears])
        return function


def _alike(function: Function, chains: Chains) -> Iterator[list[Node]]:
    """Projections of one input by all weights of a chain, in its order."""
    found: dict[tuple[Value, Any], dict[int, Node]] = {}
    for node in function.nodes:
        place = chains.place(node.operands[1]) if node.op == _LINEAR and len(node.operands) == 2 else None
        if place is not None:
            chain, position = place
            found.setdefault((node.operands[0], chain), {})[position] = node
    for (_, chain), linears in found.items():
        if len(linears) == len(chain[0]):
            yield [linears[position] for position in sorted(linears)]


def _with_joined_linear(function: Function, linears: Sequence[Node], made_by: str) -> Function:
    """The function with one projection in the place of the first, and slices of what it gives; q and k, if there are
    such, turned first, so that what is kept for the backward is what was projected, and no more."""
    first = min(linears, key=function.nodes.index)
    make = _Maker(function, first, made_by)
    weight = make.joined([node.operands[1] for node in linears])
    given = first.result.tensor
    extents = [node.result.tensor.shape[-1] for node in linears]
    whole = make(
        _LINEAR, (first.operands[0], weight), replace(given, shape=(*given.shape[:-1], sum(extents))), "projected"
    )
    turned = turning(function, linears)
    if turned is not None:
        whole = make("rope_joined", (whole, *turned.tables), whole.type, "turned", **turned.attrs)
    make.nodes += _parts(linears, whole, len(given.shape) - 1, made_by)
    function = make.in_place_of(set(linears))
    if turned is None:
        return function
    views = dict(zip(turned.ropes, turned.views, strict=True))  # what was turned is read where it lies
    nodes = (replace(views[n], results=n.results, made_by=made_by) if n in views else n for n in function.nodes)
    return replace(function, nodes=tuple(node for node in nodes if node not in turned.views))


def _with_joined_sum(function: Function, found: Sum, made_by: str) -> Function:
    """The function with the sum of products, and the gradients of their weights, made of one tensor."""
    make = _Maker(function, found.root, made_by)
    grads = found.emit(make)
    weight = make.joined([term.weight for term in found.terms])
    make.nodes.append(replace(found.root, op=_MATMUL, operands=(grads, weight), attrs={}, made_by=made_by))
    if found.products:
        flat, x = found.products[0].operands[0], found.products[0].operands[1]
        rows, columns = flat.tensor.shape[1], grads.tensor.shape[-1]
        row_type = replace(found.flat_type, shape=(rows, columns))
        left = (
            grads
            if len(grads.tensor.shape) == 2
            else make("reshape", (grads,), row_type, "grads", shape=row_type.shape)
        )
        turned = make(_T, (left,), replace(flat.tensor, shape=(columns, rows)), "t")
        right = x if found.input is x else make("reshape", (found.input,), x.type, "reshape", shape=x.tensor.shape)
        product = found.products[0].result.tensor
        part = make(_MM, (turned, right), replace(product, shape=(columns, product.shape[1])), "mm")
        make.nodes += (
            _added(found.updates, part, made_by) if found.updates else _parts(found.products, part, 0, made_by)
        )
    return make.in_place_of({*found.gone, found.root})


def _added(updates: Sequence[Node], part: Value, made_by: str) -> list[Node]:
    """One gradient added to the totals of several weights, as if they were one."""
    operands = (*(update.operands[0] for update in updates), part)
    results = tuple(update.result for update in updates)
    return [replace(updates[0], op="accumulate_joined", operands=operands, results=results, made_by=made_by)]


def _parts(nodes: Sequence[Node], whole: Value, dim: int, made_by: str) -> list[Node]:
    """What several nodes gave, as parts of one tensor, one after another along `dim`."""
    made, start = [], 0
    for node in nodes:
        end = start + node.result.tensor.shape[dim]
        attrs = {"dim": dim, "start": start, "end": end}
        made.append(replace(node, op="aten.slice.Tensor", operands=(whole,), attrs=attrs, made_by=made_by))
        start = end
    return made


class _Maker:
    """Makes nodes that take the place of one."""

    def __init__(self, function: Function, place: Node, made_by: str) -> None:
        self._function, self._place, self._made_by = function, place, made_by
        self._builder = FunctionBuilder(function.name, "", function.names())
        self.nodes: list[Node] = []

    def __call__(self, op: str, operands: tuple[Value, ...], type_: Any, name: str, **attrs: Any) -> Value:
        value = Value(self._builder.fresh(name), type_)
        self.nodes.append(
            replace(self._place, op=op, operands=operands, results=(value,), attrs=attrs, made_by=self._made_by)
        )
        return value

    def joined(self, tensors: Sequence[Value]) -> Value:
        """Tensors of state as one, or of what ranks gathered."""
        first = tensors[0].tensor
        here = all(tensor.is_state or tensor in self._function.slots for tensor in tensors)
        attrs = {} if here else {"gathered": True}
        rows = sum((tensor.tensor.shape[0] for tensor in tensors[1:]), tensors[0].tensor.shape[0])
        return self(
            "joined", tuple(tensors), replace(first, shape=(rows, *tensors[0].tensor.shape[1:])), "weights", **attrs
        )

    def in_place_of(self, gone: set[Node]) -> Function:
        """The function with what was made where the one node stood, and without those that are gone."""
        nodes: list[Node] = []
        for node in self._function.nodes:
            if node is self._place:
                nodes += self.nodes
            elif node not in gone:
                nodes.append(node)
        return replace(self._function, nodes=tuple(nodes))


@dataclass(frozen=True)
class _OnTwin(JoinProducts):
    """As on the model whose twin it runs on, of which these are uneven."""

    uneven: frozenset[str] = frozenset()

    def _uneven(self, module: Module) -> frozenset[str]:
        return self.uneven
