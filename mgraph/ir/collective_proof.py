"""The proof that the ranks of every group issue the same collectives, in the same order: no rank can wait for ever.

A collective ends only if all ranks of its group take part in it, with the same op, dtype and number of elements, and
as the n-th of that group on each of them. The proof needs no ranks, and each function only once:

1. *One program.* All ranks run the same function for an entry, and what runs depends on no value: only a `call` runs
   other nodes, and it names its callee (`control`). So all ranks issue one sequence.
2. *Groups.* A collective names a mesh axis, or a product of axes (`axis`). The groups of either part the ranks: each
   rank is in exactly one, and all ranks of it issue the collective at the same place of the sequence.
3. *Same messages.* dtypes are the same everywhere, since they are part of the types. So is the number of elements:
   extents divide over their axes (`elements`). A dim that is bound on each rank (`B` over a data axis) is the same on
   all by the options, which ranks compare before the first step. An extent that is read back at run time may be in
   messages that are sent by sizes alone, which ranks have told each other over the same axis before (`sizes`): what one
   sends, the other expects.
4. *No cycle.* One host thread enqueues the sequence. A `wait` stands after its start (values are defined before they
   are read), every start has exactly one, and none is left when an entry ends (`pending`). So the streams of all groups
   are entered in the order of the program, which is no cycle.

Besides, a collective must fit how its operands lie over the axis (`fit`): a sum over the wrong group, a gather in the
place of a reduction, or a reduction of what is whole already end, but with wrong numbers. That a reduction is missing
altogether shows in the numbers alone, which `--verify` compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from mgraph.errors import PassError
from mgraph.ir.collectives import CollectiveOrder, Issued, kind_of, sent
from mgraph.ir.cursor import suggestion
from mgraph.ir.graph import AttrValue, Function, Module, Node, Value
from mgraph.ir.printer import callee_of
from mgraph.ir.problem import Problem
from mgraph.ir.types import Partial, PendingType, Placement, Shard, Type
from mgraph.ir.verifier import place_of


class CollectiveOrderError(PassError):
    """Ranks might issue different collectives, or one that does not fit its operands."""


Check = Callable[[CollectiveOrder], Iterator[Problem]]


def prove(module: Module) -> CollectiveOrder:
    """The order of collectives of a module that the verifier has passed, proved.

    Raises CollectiveOrderError at the first node for which it cannot be: what, the node, its source line, and the graph
    around it.
    """
    order = CollectiveOrder(module)
    for name, (says, check) in RULES.items():
        for problem in check(order):
            message = f"{problem.message} [{name}: {says}]"
            raise CollectiveOrderError(message, place_of(module, problem), problem.hint)
    return order


def _control(order: CollectiveOrder) -> Iterator[Problem]:
    module = order.module
    for function, node in module.walk():
        if node.op == "call" and callee_of(node) not in module.functions:
            yield Problem(f"the call of {node.attrs.get('callee')!r} depends on who calls", function, node)
        if node.op != "call":
            run = sorted(name for name in _texts(tuple(node.attrs.values())) if name in order.items)
            if run:
                yield Problem(
                    f"{node.op} may run @{run[0]}, which issues collectives, on some ranks only", function, node
                )


def _texts(value: AttrValue) -> Iterator[str]:
    if isinstance(value, tuple):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, str):
        yield value


def _axis(order: CollectiveOrder) -> Iterator[Problem]:
    axes = {axis.name: axis for axis in order.module.mesh}
    for issued in order.issued:
        given: Any = issued.node.attrs["axis"]
        if not isinstance(given, str):
            message = f"the axis of {issued.node.op} is {given!r}, which each call may choose"
            yield _at(issued, message, "name the axis: functions that use different ones are different functions")
        elif given not in axes:
            yield _at(issued, f"{issued.node.op} over {given!r}, which is no axis of the mesh", suggestion(given, axes))
        elif len(set(axes[given].of)) < len(axes[given].of):
            yield _at(issued, f"axis {given} is a product that holds an axis twice")


def _fit(order: CollectiveOrder) -> Iterator[Problem]:
    for issued in order.issued:
        attrs = issued.node.attrs
        fits, wanted = WANTED[issued.kind](attrs)
        for value in sent(issued.node):
            placements = _placements(order, value.type, issued.axis)
            if not all(map(fits, placements)):
                lies = ", ".join("R" if p is None else str(p) for p in placements)
                message = f"{issued.node.op} over {issued.axis} takes what is {wanted} there, and {value!r} is {lies}"
                yield _at(issued, message, "another axis or another collective")


def _placements(order: CollectiveOrder, type_: Type, axis: str) -> list[Placement | None]:
    """How a tensor lies over an axis, which may be a product: as such, or over each of its parts."""
    tensor = type_.value if isinstance(type_, PendingType) else type_
    whole = tensor.on(axis)
    return [whole] if whole is not None else [tensor.on(part) for part in order.shares.parts(axis)]


_Wanted = tuple[Callable[[Placement | None], bool], str]


def _partial(attrs: Any) -> _Wanted:
    if attrs.get("extent") is not None:
        return _sharded("dim")(attrs)
    reduction = attrs.get("reduction", "sum")
    return lambda p: isinstance(p, Partial) and p.reduction == reduction, f"partial ({reduction})"


def _sharded(name: str) -> Callable[[Any], _Wanted]:
    def wanted(attrs: Any) -> _Wanted:
        dim = attrs[name]
        return lambda p: isinstance(p, Shard) and p.dim == dim, f"sharded along dim {dim}"

    return wanted


WANTED: dict[str, Callable[[Any], _Wanted]] = {
    "all_reduce": _partial,
    "reduce_scatter": _partial,
    "all_gather": _sharded("dim"),
    "all_to_all": _sharded("join_dim"),
}
"""What each collective takes: a test of the placement over its axis, and the same in words."""


def _elements(order: CollectiveOrder) -> Iterator[Problem]:
    for issued in order.issued:
        for value in (*sent(issued.node), *issued.node.results):
            message = f"ranks may hand over different numbers of elements of {value!r}: "
            try:
                order.shares.elements(value.type)
            except ValueError as error:
                yield _at(issued, f"{message}{error}", "a mesh whose axes divide it, or padding")
            name = order.shares.read_back(value.type)
            if name is not None and issued.node.attrs.get("rows") is None:
                message += f"extent {name} of {value.type} is read back at run time, and may differ on each rank"
                yield _at(issued, message, "an extent by bound, or messages by sizes")


def _sizes(order: CollectiveOrder) -> Iterator[Problem]:
    for issued in order.issued:
        if issued.node.attrs.get("rows") is not None:
            sizes = issued.node.operands[-1]
            if not _exchanged(order.module, issued.function, sizes, issued.axis):
                message = (
                    f"the sizes {sizes!r} of its messages are none that ranks of {issued.axis} have told each other"
                )
                yield _at(issued, message, "read_sizes of what was sent by all_to_all over the same axis")


def _exchanged(module: Module, function: Function, value: Value, axis: str) -> bool:
    """Whether sizes were exchanged over an axis, in whatever function."""
    made = function.producers()
    maker = made.get(value)
    if maker is None:
        inputs = function.inputs()
        calls = [(f, n) for f, n in module.walk() if callee_of(n) == function.name]
        given = [(f, n.operands[inputs.index(value)]) for f, n in calls] if value in inputs else []
        return bool(given) and all(_exchanged(module, f, v, axis) for f, v in given)
    name = callee_of(maker)
    if name is not None:
        body = module.functions[name]
        return _exchanged(module, body, body.results[maker.results.index(value)], axis)
    if maker.op != "read_sizes":
        return False
    own, others = maker.operands
    exchange = made.get(others)
    if exchange is not None and exchange.op == "wait":
        exchange = made.get(exchange.operands[0])
    return (
        exchange is not None
        and (kind_of(exchange.op), exchange.operands) == ("all_to_all", (own,))
        and (exchange.attrs["axis"] == axis)
    )


def _pending(order: CollectiveOrder) -> Iterator[Problem]:
    entries = {entry.function for entry in order.module.entries.values()}
    for name, function in order.module.functions.items():
        made: dict[Value, Node | None] = {v: None for v in function.inputs() if isinstance(v.type, PendingType)}
        made |= {v: n for n in function.nodes for v in n.results if isinstance(v.type, PendingType)}
        if not made:
            continue
        users, returned = function.users(), Counter(function.results)
        for value, node in made.items():
            readers = users.get(value, [])
            other = next((n for n in readers if n.op not in ("wait", "call")), None)
            if other is not None:
                yield Problem(f"{value!r} is read by {other.op} while it is under way", function, other)
            elif len(readers) + returned[value] != 1:
                message = f"{value!r} is under way, and ended {len(readers) + returned[value]} times"
                yield Problem(message, function, readers[-1] if readers else node)
            elif not readers and name in entries:
                yield Problem(f"{value!r} is still under way when the entry ends", function, node)


def _at(issued: Issued, message: str, hint: str | None = None) -> Problem:
    return Problem(message, issued.function, issued.node, hint)


RULES: dict[str, tuple[str, Check]] = {
    "control": ("only a call runs other nodes, and it names what it runs", _control),
    "axis": ("a collective names a mesh axis, whose groups part the ranks", _axis),
    "fit": ("a collective fits how its operands lie over its axis", _fit),
    "elements": ("all ranks of a group hand over equally many elements", _elements),
    "sizes": ("messages of unequal sizes have those that ranks have told each other", _sizes),
    "pending": ("what was started is ended exactly once, before the entry ends", _pending),
}
"""What the proof checks, in order: later rules rely on earlier ones."""
