"""fuse-experts: rows of experts are taken where their tokens lie, and units are activated where they are made.

    %rows, %order, %offsets = moe_dispatch(%x, %indices)      ==>  %order, %offsets = moe_order(%indices)
    %gate = grouped_matmul(%rows, %wg, %offsets)                   %y, %gate, %up = expert_glu(%x, %order, %offsets,
    %up = grouped_matmul(%rows, %wu, %offsets)                                                 %wg, %wu)
    %y = glu(%gate, %up)

and backward

    %drows, %dweights = moe_combine_grad(%dy, %out,           ==>  %dgate, %dup, %wy, %dweights = expert_glu_grad(
                                         %weights, %order)             %dy, %weights, %order, %offsets, %wd, %gate, %up)
    %dh = grouped_matmul(%drows, %wd, %offsets)                    %dwd = gathered_outer(%wy, %dy, %order, %offsets)
    %dwd = grouped_outer(%y, %drows, %offsets)                     %dwg = gathered_outer(%x, %dgate, %order, %offsets)
    %dgate, %dup = glu_grad(%dh, %gate, %up)                       %dx = moe_dispatch_grad(grouped_matmul_sum(
    %dwg = grouped_outer(%rows, %dgate, %offsets)                      %dgate, %wg, %dup, %wu, %offsets), %order)
    %dx = moe_dispatch_grad(%a + %b, %order)

Of a layer there then are gate and up beside what its other ops keep: neither its rows, nor what is activated, nor what
the experts give is kept for the gradient. Where what rows were taken from was not kept either (tokens that came from
other ranks), it is, in the place of the rows. A router in the same function makes the order along with its choice.

Both matrices before a unit may lie packed in one tensor (`%gate` and `%up` are then parts of one product), and have
biases, where nothing is kept for a gradient. With `sums` what follows is one op as well:

    %out = grouped_matmul(%y, %wd, %offsets)                  ==>  %sum = expert_sum(%y, %wd, %weights, %order,
    %sum = moe_combine(%out, %weights, %order)                                       %offsets)

which hides a tensor of a row a pair from what predicts memory: it is for the few tokens of a step that is served.

The backward is rewritten first, since only then does nothing read the rows. It is in a function of its own, as a rule,
and is handed all it reads: what a parameter stands for is found by the calls of both functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.ops.glu import GLU_ATTRS
from mgraph.ir.types import DType
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.dce import DeadCode
from mgraph.passes.handed import Exchange, exchanged, obstacle
from mgraph.passes.sources import Made, Sources

_LOW = (DType.BF16, DType.F16)
_PRODUCT, _OUTER = "grouped_matmul", "grouped_outer"


class _Miss(Exception):
    """A guard that fails, and how."""

    def __init__(self, guard: str, detail: str) -> None:
        super().__init__(guard, detail)


def _need(holds: object, guard: str, detail: str) -> None:
    if not holds:
        raise _Miss(guard, detail)


@dataclass(frozen=True)
class FuseExperts(Pass):
    """Join the products of experts with the taking of rows and with their units, forward and backward; with `sums`
    also the last product with the sum of a token's rows."""

    sums: bool = False

    name: ClassVar[str] = "fuse-experts"
    stage: ClassVar[Stage] = Stage.FUSE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    conflicts: ClassVar[frozenset[str]] = frozenset({"in-place"})

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite every function; a module without a match is returned as it is."""
        for name in tuple(module.functions):
            work = _Backward(module, module.functions[name], report)
            function = work.rewritten()
            if function is not module.functions[name]:
                module = exchanged(module.with_function(function), name, work.exchanges)
        module = DeadCode().run(module, Report()) if report.matches else module
        forward = {name: _Forward(f, report).rewritten() for name, f in module.functions.items()}
        if self.sums:
            forward = {name: _Sums(f, report).rewritten() for name, f in forward.items()}
        changed = any(forward[name] is not f for name, f in module.functions.items())
        return replace(module, functions=forward) if changed else module


class _Rewriting:
    """A function of which some nodes go, and behind some of which others come: each node of the op `root` is tried."""

    root: ClassVar[str]

    def __init__(self, function: Function, report: Report) -> None:
        self.function, self.report = function, report
        self.makers, self.users = function.producers(), function.users()
        self.place = {node: index for index, node in enumerate(function.nodes)}
        self._gone: set[Node] = set()
        self._after: dict[Node, list[Node]] = {}
        self._names = FunctionBuilder(function.name, "", function.names())

    def rewritten(self) -> Function:
        """The function with what matches rewritten."""
        for node in self.function.nodes:
            if node.op == self.root:
                try:
                    self._fuse(node)
                except _Miss as miss:
                    self.report.near_miss(self.function.name, node.id, FuseExperts.name, *miss.args)
        return self.result()

    def _fuse(self, node: Node) -> None:
        """Rewrite what begins at a node. Raises `_Miss` where that cannot be."""
        raise NotImplementedError(type(self).__name__)

    def fresh(self, name: str, like: Value) -> Value:
        """A new value of the type of another."""
        return Value(self._names.fresh(name), like.type)

    def readers(self, value: Value) -> list[Node]:
        """Who reads a value; a result of the function is read outside, too."""
        return self.users.get(value, [])

    def only(self, value: Value, *nodes: Node) -> None:
        """Nothing but these nodes reads a value."""
        others = [node.op for node in self.readers(value) if node not in nodes]
        others += ["the callers"] * (value in self.function.results)
        _need(not others, "users", f"{value!r} is read by {', '.join(others[:3])}, too")

    def reader(self, value: Value, op: str, place: int = 0) -> Node:
        """The one node of an op that reads a value at a place."""
        found = [node for node in self.readers(value) if node.op == op and node.operands[place] is value]
        _need(len(found) == 1, "users", f"{len(found)} of {op} read {value!r}, expected 1")
        return found[0]

    def maker(self, value: Value, op: str) -> Node:
        """The node that makes a value."""
        node = self.makers.get(value)
        if node is None or node.op != op:
            raise _Miss("maker", f"{value!r} is not made by {op} here")
        return node

    def last(self, nodes: Sequence[Node]) -> Node:
        """The last of some nodes."""
        return max(nodes, key=self.place.__getitem__)

    def in_time(self, at: Node, values: Sequence[Value], gone: Sequence[Node]) -> None:
        """Values that are made behind a node from now on are not read before."""
        for value in values:
            for node in self.readers(value):
                early = self.place[node] <= self.place[at] and node not in gone
                _need(not early, "order", f"{value!r} is read by {node.op} before all is there that it is made of")

    def exchange(self, gone: Sequence[Node], at: Node, new: Sequence[Node]) -> None:
        """Nodes go, and others come behind a node, or in its place."""
        self._gone.update(gone)
        self._after.setdefault(at, []).extend(new)

    def result(self) -> Function:
        """The function with all exchanges; itself without any."""
        if not self._after:
            return self.function
        nodes: list[Node] = []
        for node in self.function.nodes:
            nodes += [] if node in self._gone else [node]
            nodes += self._after.get(node, [])
        return replace(self.function, nodes=tuple(nodes))


def _made(node: Node, op: str, operands: Sequence[Value], results: Sequence[Value], attrs: Mapping[str, Any]) -> Node:
    """A node that stands for another."""
    return replace(
        node, op=op, operands=tuple(operands), results=tuple(results), attrs=dict(attrs), made_by=FuseExperts.name
    )


def _unit(node: Node) -> dict[str, Any]:
    """The attributes of a `glu` or its gradient, with defaults."""
    attrs = op_def(node.op).complete(node.attrs)
    return {name: attrs[name] for name in GLU_ATTRS}


def _turned(node: Node) -> bool:
    return bool(node.attrs.get("transpose_w", False))


@dataclass(frozen=True)
class _Unit:
    """A unit and the products before it: what goes with them, the matrices and then their biases, how these are packed,
    and whether gate and up are read elsewhere."""

    node: Node
    products: Sequence[Node]
    parts: Sequence[Node]
    operands: Sequence[Value]
    packed: str
    keep: bool


_PACKED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {"halves": ((0, 1), (1, 1)), "pairs": ((0, 2), (1, 2))}
"""Where gates and ups begin, in halves of the columns or in columns, and their step."""


class _Forward(_Rewriting):
    """Dispatches, with the products and units of their rows."""

    root = "moe_dispatch"

    def _fuse(self, dispatch: Node) -> None:
        x, indices = dispatch.operands
        rows, order, offsets = dispatch.results
        _need(rows.tensor.dtype in _LOW, "dtype", f"rows are {rows.tensor.dtype.text}, not bf16 or f16")
        products = [node for node in self.readers(rows) if node.op == _PRODUCT and node.operands[0] is rows]
        _need(len(products) in (1, 2), "users", f"{len(products)} products read {rows!r}, expected 1 or 2")
        self.only(rows, *products)
        unit = self._packed(products[0]) if len(products) == 1 else self._apart(products)
        _need(all(node.operands[2] is offsets for node in products), "users", "products are of other offsets")
        gone = (unit.node, *unit.parts, *unit.products)
        kept = unit.node.operands if unit.keep else ()
        at = self.last(gone[:-1] if unit.parts else unit.products)
        self.in_time(at, (unit.node.result, *kept), gone)
        attrs = {"top_k": indices.tensor.shape[1], **_unit(unit.node), "transpose_w": _turned(products[0])}
        attrs |= {"keep": unit.keep, **({"packed": unit.packed} if unit.packed else {})}
        new = _made(unit.node, "expert_glu", (x, order, offsets, *unit.operands), (unit.node.result, *kept), attrs)
        self.exchange(gone, at, [new])
        self._order(dispatch)
        replaced = [node.id for node in (dispatch, *unit.products, *unit.parts, unit.node)]
        self.report.match(self.function.name, dispatch.id, "its rows are taken in the products", replaced, [new.id])

    def _apart(self, products: Sequence[Node]) -> _Unit:
        """A unit of two products."""
        node = self.reader(products[0].result, "glu", 0 if self._is_gate(products[0]) else 1)
        gate, up = (self.maker(value, _PRODUCT) for value in node.operands)
        _need({gate, up} == set(products), "users", f"the unit %{node.id} is not of both products")
        _need(_turned(gate) == _turned(up), "attributes", "one matrix is transposed, the other is not")
        keep = any(v in self.function.results or self.readers(v) != [node] for v in node.operands)
        biases = (*gate.operands[3:], *up.operands[3:])
        _need(len(biases) != 1, "bias", f"one of the products of the unit %{node.id} has a bias")
        _need(not (keep and biases), "bias", f"the product %{gate.id} has a bias, and is read elsewhere")
        return _Unit(node, (gate, up), (), (gate.operands[1], up.operands[1], *biases), "", keep)

    def _packed(self, product: Node) -> _Unit:
        """A unit of the parts of one product."""
        both = product.result
        parts = [node for node in self.readers(both) if node.op == "aten.slice.Tensor"]
        _need(len(parts) == 2, "users", f"{len(parts)} parts of {both!r} are taken, expected 2")
        self.only(both, *parts)
        node = self.reader(parts[0].result, "glu", 0 if self._is_gate(parts[0]) else 1)
        gate, up = (self.maker(value, "aten.slice.Tensor") for value in node.operands)
        _need({gate, up} == set(parts), "users", f"the unit %{node.id} is not of both parts")
        for part in parts:
            self.only(part.result, node)
        _, w, _, *bias = product.operands
        placed = [value for value in (w, *bias) if value.tensor.placement]
        _need(not placed, "placement", f"ranks hold parts of {', '.join(map(repr, placed))}, which has both matrices")
        packed = self._packing(both, gate, up)
        return _Unit(node, (product,), (gate, up), (w, *bias), packed, keep=False)

    def _packing(self, both: Value, gate: Node, up: Node) -> str:
        """How gates and ups lie in the columns of what has both."""
        width = both.tensor.shape[1]
        taken = []
        for part in (gate, up):
            attrs = op_def(part.op).complete(part.attrs)
            start, step, count = attrs.get("start") or 0, attrs.get("step", 1), part.result.tensor.shape[1]
            _need(attrs.get("dim") in (1, -1) and 2 * count == width, "parts", f"%{part.id} is no half of the columns")
            taken.append((start, step))
        for packed, ((first, step), (second, _)) in _PACKED.items():
            unit = width // 2 if packed == "halves" else 1
            if taken == [(first * unit, step), (second * unit, step)]:
                return packed
        raise _Miss("parts", f"gates and ups are columns {taken} (first and step) of {width}, neither halves nor pairs")

    def _is_gate(self, product: Node) -> bool:
        return any(node.op == "glu" and node.operands[0] is product.result for node in self.readers(product.result))

    def _order(self, dispatch: Node) -> None:
        """What is left of a dispatch, joined with the router where there is one."""
        indices, (_, order, offsets) = dispatch.operands[1], dispatch.results
        real = self.makers.get(indices)
        ended = real is not None and real.op == "real_choice" and self.readers(indices) == [dispatch]
        router = self.makers.get(real.operands[0]) if ended and real is not None else real
        if router is not None and router.op == "moe_route" and router not in self._gone:
            results = (*router.results, order, offsets)
            operands, attrs, gone = router.operands, router.attrs, [router, dispatch]
            if ended and real is not None:
                operands, attrs, gone = (*operands, real.operands[1]), {**attrs, "ended": True}, [*gone, real]
            self.exchange(gone, router, [_made(router, "moe_route_order", operands, results, attrs)])
            return
        alone = _made(dispatch, "moe_order", (indices,), (order, offsets), dispatch.attrs)
        self.exchange((dispatch,), dispatch, [alone])


class _Sums(_Rewriting):
    """Products of experts whose rows are summed by token."""

    root = "moe_combine"

    def _fuse(self, combine: Node) -> None:
        out, weights, order, *others = combine.operands
        _need(out.tensor.dtype in _LOW, "dtype", f"rows are {out.tensor.dtype.text}, not bf16 or f16")
        product = self.maker(out, _PRODUCT)
        self.only(out, combine)
        _need(not others or self._is_ended(order), "others", "rows of no expert here are not those of the last tokens")
        rows, w, offsets, *bias = product.operands
        attrs = {"dtype": combine.attrs["dtype"], "transpose_w": _turned(product), "ended": bool(others)}
        new = _made(combine, "expert_sum", (rows, w, weights, order, offsets, *bias), combine.results, attrs)
        self.exchange((product, combine), combine, [new])
        self.report.match(
            self.function.name, combine.id, "rows are summed behind the product", [product.id, combine.id], [new.id]
        )

    def _is_ended(self, order: Value) -> bool:
        """Whether all that is of no expert is padding, which comes last."""
        maker = self.makers.get(order)
        if maker is None or maker.op not in ("moe_order", "moe_dispatch"):
            return maker is not None and bool(maker.attrs.get("ended"))
        real = self.makers.get(maker.operands[-1])
        return real is not None and real.op == "real_choice"


class _Backward(_Rewriting):
    """Gradients of weighted sums of rows, with those of the products and units before."""

    def __init__(self, module: Module, function: Function, report: Report) -> None:
        super().__init__(function, report)
        self.sources, self.module = Sources(module, function), module
        self.exchanges: list[Exchange] = []

    root = "moe_combine_grad"

    def _fuse(self, combine: Node) -> None:
        dy, out, weights, order = combine.operands[:4]
        drows, dweights = combine.results
        _need(drows.tensor.dtype in _LOW, "dtype", f"rows are {drows.tensor.dtype.text}, not bf16 or f16")
        back = self.reader(drows, _PRODUCT)
        outer = [node for node in self.readers(drows) if node.op == _OUTER]
        self.only(drows, back, *outer[:1])
        unit = self.reader(back.result, "glu_grad")
        self.only(back.result, unit)
        self._of_one_unit(combine, out, back, unit, outer)
        before = [self._product_before(value) for value in unit.results]
        outers, x, views = self._outers_before(unit)
        summed, sum_ = self._sum_of(before)
        # All guards hold from here on, but that of the order of what is made.
        wd, offsets = back.operands[1:]
        gate, up = unit.operands[1:]
        operands = (dy, weights, order, offsets, wd, gate, up)
        at = self.last([combine, *(self.makers[v] for v in operands if v in self.makers)])
        gone = (combine, back, unit, *outer)
        self.in_time(at, (dweights, *unit.results), gone)
        top_k = {"top_k": weights.tensor.shape[1]}
        weighted = self.fresh("weighted", gate)
        attrs = {**top_k, **_unit(unit), "transpose_w": not _turned(back)}
        new = _made(unit, "expert_glu_grad", operands, (*unit.results, weighted, dweights), attrs)
        self.exchange(gone, at, [new])
        for node in outer:
            sides = [weighted if value is not drows else dy for value in node.operands[:2]]
            side = "left" if node.operands[0] is drows else "right"
            made = _made(node, "gathered_outer", (*sides, order, offsets), node.results, {**top_k, "side": side})
            self.exchange((), self.last([at, node]), [made])
        self._take(outers, x, views, order, top_k)
        both = _made(
            sum_,
            "grouped_matmul_sum",
            (*before[0].operands[:2], *before[1].operands[:2], offsets),
            sum_.results,
            {"transpose_w": _turned(before[0])},
        )
        self.exchange((sum_, *before), sum_, [both])
        replaced = [node.id for node in (*gone, *outers, *before, sum_, summed)]
        self.report.match(self.function.name, combine.id, "gradients of units in the product", replaced, [new.id])

    def _of_one_unit(self, combine: Node, out: Value, back: Node, unit: Node, outer: Sequence[Node]) -> None:
        """What was summed is the product of the units whose gradient this is, without a bias."""
        made = self.sources.made(out)
        node = made.node if made is not None else None
        if made is None or node is None or node.op != _PRODUCT:
            raise _Miss("maker", f"{out!r} is not made by {_PRODUCT}")
        _need(len(node.operands) == 3, "bias", f"the product %{node.id} has a bias")
        _need(
            node.origin.path == back.origin.path and _turned(node) != _turned(back),
            "maker",
            f"%{back.id} is of another product",
        )
        y = made.function.producers().get(node.operands[0])
        _need(y is not None and y.op == "glu", "maker", f"{node.operands[0]!r} is not made by glu")
        assert y is not None
        _need(_unit(y) == _unit(unit), "attributes", f"the unit is {_unit(y)}, its gradient {_unit(unit)}")
        for theirs, ours in zip(y.operands, unit.operands[1:], strict=True):
            _need(self.sources.is_same(ours, made, theirs), "maker", f"{ours!r} is not the {theirs!r} of the unit")
        for product in outer:
            ours = next(v for v in product.operands[:2] if v is not combine.results[0])
            _need(self.sources.is_same(ours, made, y.result), "maker", f"{ours!r} is not what the unit gave")

    def _product_before(self, grad: Value) -> Node:
        product = self.reader(grad, _PRODUCT)
        _need(len(product.operands) == 3, "bias", f"the product %{product.id} has a bias")
        return product

    def _outers_before(self, unit: Node) -> tuple[list[Node], Value | None, list[Node]]:
        """Gradients of matrices before the unit, in their order; what their rows are taken from, and the new nodes that
        make it."""
        outers = [node for grad in unit.results for node in self.readers(grad) if node.op == _OUTER]
        outers.sort(key=self.place.__getitem__)
        rows = {v for node in outers for v in node.operands[:2] if v not in unit.results}
        if not rows:
            return outers, None, []
        _need(len(rows) == 1, "rows", "the products before the unit are not of the same rows")
        (value,) = rows
        made = self.sources.made(value)
        if made is None or made.node is None or made.node.op != "moe_dispatch":
            raise _Miss("maker", f"{value!r} is not made by moe_dispatch")
        x = made.node.operands[0]
        base, views = self.sources.here(made, x) or (self._handed(value, made, x, outers), [])
        nodes = []
        for view in views:
            new = self.fresh(view.result.name, view.result)
            nodes.append(_made(view, view.op, (base,), (new,), view.attrs))
            base = new
        return outers, base, [replace(node, phase=unit.phase) for node in nodes]

    def _handed(self, rows: Value, made: Made, x: Value, outers: Sequence[Node]) -> Value:
        """What rows are taken from, a new parameter in the place of that for the rows."""
        self.only(rows, *outers)
        why = obstacle(self.module, self.function, rows, made)
        _need(not why, "kept", f"{x!r} of {made.function.name} is not kept for this function, and {why}")
        new = self.fresh(x.name, x)
        self.exchanges.append(Exchange(rows, made, x, new))
        return new

    def _sum_of(self, before: Sequence[Node]) -> tuple[Node, Node]:
        """The gradient of the dispatch, and the sum of the products that it takes."""
        first, second = before
        _need(_turned(first) == _turned(second), "attributes", "one matrix is transposed, the other is not")
        sum_ = self.readers(first.result)
        _need(len(sum_) == 1 and sum_[0].op == "aten.add.Tensor", "users", f"{first.result!r} does not go into one sum")
        node = sum_[0]
        _need(set(node.operands) == {first.result, second.result} and not node.attrs, "users", "the sum is of more")
        for product in before:
            self.only(product.result, node)
        dispatch = self.reader(node.result, "moe_dispatch_grad")
        self.only(node.result, dispatch)
        return dispatch, node

    def _take(
        self, outers: Sequence[Node], x: Value | None, views: Sequence[Node], order: Value, top_k: Mapping[str, Any]
    ) -> None:
        """Rows of gradients of matrices are taken from x, which `views` make before the first."""
        if x is None:
            return
        for node in outers:
            left, right, offsets = node.operands
            maker = self.makers.get(left)
            given = maker is not None and maker.op == "glu_grad"
            operands = (left, x) if given else (x, right)
            attrs = {**top_k, "side": "right" if given else "left"}
            made = _made(node, "gathered_outer", (*operands, order, offsets), node.results, attrs)
            self.exchange((node,), node, [*(views if node is outers[0] else ()), made])
