"""Verifier rules on functions: values, nodes, types, calls, inference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import sympy

from mgraph.ir.changes import callees
from mgraph.ir.cursor import suggestion
from mgraph.ir.dims import as_dim, dim_text, names_in, product
from mgraph.ir.graph import AttrValue, Function, Node, Phase, Static, Value
from mgraph.ir.opdef import REQUIRED, declared_ops, is_known_op, op_def
from mgraph.ir.printer import callee_of
from mgraph.ir.problem import Problem, Rule, Scope, Typed, all_dims, tensor_type
from mgraph.ir.types import PendingType, Shard, TensorType, Type

_STATIC = "static."


def _results(scope: Scope) -> Iterator[Problem]:
    for function, node in scope.walk():
        if not node.results:
            yield Problem(f"{node.op} has no result", function, node)


def _unique(scope: Scope) -> Iterator[Problem]:
    for function in scope.functions.values():
        seen = {v.name for v in function.inputs()}
        if len(seen) < len(function.inputs()):
            twice = [name for name, count in Counter(v.name for v in function.inputs()).items() if count > 1]
            yield Problem(f"input %{twice[0]} is defined twice", function)
        for node in function.nodes:
            for value in node.results:
                if value.name in seen or value.is_state:
                    yield Problem(f"{value!r} is defined twice, or is a state", function, node)
                seen.add(value.name)


def _defined(scope: Scope) -> Iterator[Problem]:
    for function in scope.functions.values():
        defined = set(function.inputs())
        for node in function.nodes:
            for value in node.operands:
                if not value.is_state and value not in defined:
                    yield Problem(f"operand {value!r} is not defined before it is read", function, node)
            defined.update(node.results)
        for value in function.results:
            if not value.is_state and value not in defined:
                yield Problem(f"returned value {value!r} is not defined", function)


def _states(scope: Scope) -> Iterator[Problem]:
    entries = {entry.function for entry in scope.module.entries.values()}
    reads: list[tuple[Value, Function, Node | None]] = []
    for function in scope.functions.values():
        if function.name not in entries:
            reads += [(v, function, n) for n in function.nodes for v in n.operands if v.is_state]
        reads += [(v, function, None) for v in function.results if v.is_state]
    # Most states are as declared: only the others are worth a tuple each.
    declared = scope.module.state
    for function, reader in scope.walk():
        if function.name in entries:
            for value in reader.operands:
                if value.is_state and (value.name not in declared or declared[value.name].value is not value):
                    reads.append((value, function, reader))
    for value, function, node in reads:
        state = scope.module.state.get(value.name)
        if state is None or state.value is not value:
            hint = suggestion(value.name, scope.module.state)
            yield Problem(f"state {value!r} is not declared by the module", function, node, hint)
        elif function.name not in entries:
            hint = "give the function a slot, and hand the state in at the call"
            yield Problem(f"state {value!r} is read outside an entry function", function, node, hint)


def _phase(scope: Scope) -> Iterator[Problem]:
    for function, node in scope.walk():
        if not isinstance(node.phase, Phase):
            yield Problem(f"{node.phase!r} is no phase", function, node, "one of " + ", ".join(Phase))


def _origin(scope: Scope) -> Iterator[Problem]:
    for function, node in scope.walk():
        if not node.origin.path and not node.origin.file:
            yield Problem("the node has no origin", function, node, "hand on the origin of the node it stands for")
        if not node.made_by:
            yield Problem("the node does not say which pass made it", function, node)


def _statics(scope: Scope) -> Iterator[Problem]:
    for function in scope.functions.values():
        for node in function.nodes:
            for name in _static_names(tuple(node.attrs.values())):
                if name not in function.statics:
                    hint = suggestion(name, function.statics)
                    yield Problem(f"${name} is not a static of the function", function, node, hint)


def _static_names(value: AttrValue) -> Iterator[str]:
    if isinstance(value, tuple):
        for part in value:
            yield from _static_names(part)
    elif isinstance(value, Static):
        yield value.name


def _known_op(scope: Scope) -> Iterator[Problem]:
    for function, node in scope.walk():
        if not is_known_op(node.op):
            yield Problem(f"unknown op {node.op!r}", function, node, suggestion(node.op, declared_ops()))


def _attrs(scope: Scope) -> Iterator[Problem]:
    for function, node in scope.walk():
        if "." in node.op:
            continue
        op = op_def(node.op)
        for name, default in op.attrs.items():
            if default is REQUIRED and name not in node.attrs:
                yield Problem(f"{node.op} lacks the attribute {name!r}", function, node)
        if not op.free_attrs:
            for name in sorted(node.attrs.keys() - op.attrs.keys()):
                hint = suggestion(name, op.attrs)
                yield Problem(f"{node.op} has no attribute {name!r}", function, node, hint)


def _dims_declared(scope: Scope) -> Iterator[Problem]:
    known = frozenset(scope.module.dims)
    for typed in scope.types:
        for name in sorted(_type_names(typed.type) - known):
            yield _undeclared(scope, typed.what, name, typed.function, typed.node)
    for function, node in scope.walk():
        for name in sorted(_attr_names(tuple(node.attrs.values())) - known):
            yield _undeclared(scope, f"an attribute of %{node.id}", name, function, node)


def _undeclared(scope: Scope, what: str, name: str, function: Function | None, node: Node | None) -> Problem:
    hint = suggestion(name, scope.module.dims)
    return Problem(f"{what}: dim {name!r} is not declared", function, node, hint)


def _type_names(type_: TensorType) -> frozenset[str]:
    return frozenset().union(*map(names_in, all_dims(type_)))


def _attr_names(value: AttrValue) -> frozenset[str]:
    if isinstance(value, tuple):
        return frozenset().union(*map(_attr_names, value))
    return names_in(value) if isinstance(value, sympy.Expr) else frozenset()


def _extents(scope: Scope) -> Iterator[Problem]:
    for typed in scope.types:
        for dim in all_dims(typed.type):
            if isinstance(dim, int) and dim < 0:
                yield typed.problem(f"extent {dim} is negative")
            elif type(as_dim(dim)) is not type(dim) or as_dim(dim) != dim:
                yield typed.problem(f"extent {dim_text(dim)} is not in normal form ({dim_text(as_dim(dim))})")


def _placement(scope: Scope) -> Iterator[Problem]:
    parts = {axis.name: axis.of for axis in scope.module.mesh}
    for typed in scope.types:
        used: set[str] = set()
        for axis, placement in typed.type.placement:
            if axis not in parts:
                yield typed.problem(f"{typed.type} is placed over {axis!r}, which is no axis of the mesh")
                continue
            single = _single_axes(axis, parts)
            if used & single:
                yield typed.problem(f"{typed.type} is placed twice over {', '.join(sorted(used & single))}")
            used |= single
            if isinstance(placement, Shard):
                yield from _shard(typed, placement)
            elif placement.reduction not in ("sum", "max"):
                yield typed.problem(f"{typed.type} is partial by {placement.reduction!r}, not sum or max")


def _single_axes(axis: str, parts: Mapping[str, tuple[str, ...]]) -> set[str]:
    return set().union(*(_single_axes(p, parts) for p in parts[axis])) if parts[axis] else {axis}


def _shard(typed: Typed, shard: Shard) -> Iterator[Problem]:
    type_ = typed.type
    if not 0 <= shard.dim < len(type_.shape):
        yield typed.problem(f"{type_} has rank {len(type_.shape)} and is split along dim {shard.dim}")
    elif shard.factor is not None and not 0 <= shard.factor < len(dict(type_.factors).get(shard.dim, ())):
        yield typed.problem(
            f"{type_} is split along factor {shard.factor} of dim {shard.dim}, which has no such factor"
        )


def _factors(scope: Scope) -> Iterator[Problem]:
    for typed in scope.types:
        indices = [index for index, _ in typed.type.factors]
        if indices != sorted(set(indices)):
            yield typed.problem(f"factors of {typed.type} are not in the order of its dims")
        for index, factors in typed.type.factors:
            if not 0 <= index < len(typed.type.shape) or len(factors) < 2:
                yield typed.problem(f"{typed.type} has {len(factors)} factor(s) of dim {index}")
            elif product(factors) != typed.type.shape[index]:
                text = " ".join(map(dim_text, factors))
                yield typed.problem(f"factors ({text}) do not multiply to {dim_text(typed.type.shape[index])}")


def _physical(scope: Scope) -> Iterator[Problem]:
    for typed in scope.types:
        stored = typed.type.physical
        if stored is None:
            continue
        if len(stored.shape) != len(typed.type.shape):
            yield typed.problem(f"{typed.type} is stored with rank {len(stored.shape)}")
        if (stored.scale is None) != (not stored.block) or any(b < 1 for b in stored.block):
            yield typed.problem(f"{typed.type} has a scale without a block, or a block without a scale")
        elif stored.block and len(stored.block) != len(stored.shape):
            yield typed.problem(f"{typed.type} has blocks of rank {len(stored.block)}")


def _calls(scope: Scope) -> Iterator[tuple[Function, Node, Function]]:
    for function, node in scope.walk():
        callee = callee_of(node)
        if callee is not None and callee in scope.module.functions:
            yield function, node, scope.module.functions[callee]


def _callee(scope: Scope) -> Iterator[Problem]:
    for function, node in scope.walk():
        if node.op == "call" and callee_of(node) not in scope.module.functions:
            callee = node.attrs.get("callee")
            yield Problem(
                f"no function {callee!r} to call", function, node, suggestion(str(callee), scope.module.functions)
            )


def _recursion(scope: Scope) -> Iterator[Problem]:
    called = {name: callees(function) for name, function in scope.module.functions.items()}
    for function in scope.functions.values():
        leading_back = {name for name in called[function.name] if function.name in _reached(name, called)}
        node = next((n for n in function.nodes if callee_of(n) in leading_back), None)
        if node is not None:
            yield Problem(f"the call of @{callee_of(node)} leads back to @{function.name}", function, node)
            return


def _reached(name: object, called: Mapping[str, set[object]]) -> set[object]:
    """The function and all that it calls, directly or through others."""
    reached, todo = set[object](), [name]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += called.get(str(name), ())
    return reached


def _call_operands(scope: Scope) -> Iterator[Problem]:
    for function, node, callee in _calls(scope):
        inputs = callee.inputs()
        if len(node.operands) != len(inputs):
            message = f"@{callee.name} takes {len(callee.params)} params and {len(callee.slots)} slots"
            yield Problem(f"{message}, the call gives {len(node.operands)}", function, node)
            continue
        for given, taken in zip(node.operands, inputs, strict=True):
            if given.type is not taken.type and given.type != taken.type:
                message = f"{given!r} is {given.type}, but {taken!r} of @{callee.name} is {taken.type}"
                yield Problem(message, function, node)


def _call_results(scope: Scope) -> Iterator[Problem]:
    for function, node, callee in _calls(scope):
        given, made = [v.type for v in node.results], [v.type for v in callee.results]
        if given != made:
            texts = ["(" + ", ".join(map(str, types)) + ")" for types in (given, made)]
            yield Problem(f"the call gives {texts[0]}, but @{callee.name} returns {texts[1]}", function, node)


def _call_statics(scope: Scope) -> Iterator[Problem]:
    for function, node, callee in _calls(scope):
        given = {name.removeprefix(_STATIC) for name in node.attrs if name.startswith(_STATIC)}
        other = sorted(n for n in node.attrs if n != "callee" and not n.startswith(_STATIC))
        for name in sorted(set(callee.statics) - given):
            yield Problem(f"the call does not supply ${name} of @{callee.name}", function, node)
        for name in [*sorted(given - set(callee.statics)), *other]:
            yield Problem(f"the call supplies {name!r}, which is no static of @{callee.name}", function, node)


def _pending(scope: Scope) -> Iterator[Problem]:
    for function in scope.functions.values():
        values = [*function.inputs(), *(v for n in function.nodes for v in n.results)]
        pending = [value for value in values if isinstance(value.type, PendingType)]
        if not pending:
            continue
        users, producers, returned = function.users(), function.producers(), set(function.results)
        for value in pending:
            readers = users.get(value, [])
            if [n.op for n in readers] != ["wait"] or value in returned:
                node = next((n for n in readers if n.op != "wait"), producers.get(value))
                message = f"pending {value!r} is read {len(readers)} time(s), by {[n.op for n in readers]}"
                if value in returned:
                    message += ", and returned"
                yield Problem(message, function, node)


def _inference(scope: Scope) -> Iterator[Problem]:
    for function, node in scope.walk():
        if "." in node.op or node.op == "call":
            continue
        op = op_def(node.op)
        types: list[Any] = [v.type for v in node.operands]
        try:
            inferred = op.result_types(types, node.attrs)
        except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            yield Problem(f"operands do not fit {node.op}: {error}", function, node)
            continue
        given = [v.type for v in node.results]
        if len(given) != len(inferred):
            yield Problem(f"{node.op} has {len(inferred)} result(s), not {len(given)}", function, node)
            continue
        for value, type_ in zip(node.results, inferred, strict=True):
            if value.type is not type_ and not _same(value.type, type_, op.collective):
                yield Problem(f"{value!r} is {value.type}, but {node.op} makes {type_}", function, node)


def _same(given: Type, inferred: Type, placed: bool) -> bool:
    """Inference knows dtype and logical shape; only collectives know the placement, which is what they change."""
    ours, theirs = tensor_type(given), tensor_type(inferred)
    if type(given) is not type(inferred) or (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    return not placed or dict(ours.placement) == dict(theirs.placement)


FUNCTION_RULES: tuple[Rule, ...] = (
    Rule("results", "every node has a result", _results),
    Rule("unique-names", "every value of a function has its own name", _unique),
    Rule("defined", "a value is defined before it is read", _defined),
    Rule("state-operands", "a state is read by its declared value, and only in entry functions", _states),
    Rule("phase", "every node has a phase", _phase),
    Rule("origin", "every node has an origin and says which pass made it", _origin),
    Rule("statics", "a function declares every static that its attributes use", _statics),
    Rule("known-op", "every op is declared, or is an op of torch", _known_op),
    Rule("attrs", "a declared op has all required attributes and no others", _attrs),
)
TYPE_RULES: tuple[Rule, ...] = (
    Rule("dims-declared", "the module declares every dim that types and attributes use", _dims_declared),
    Rule("extents", "an extent is at least 0 and in normal form", _extents),
    Rule("placement", "a tensor is placed over declared axes, each at most once, along its own dims", _placement),
    Rule("factors", "the factors of a dim multiply to it", _factors),
    Rule("physical", "a stored tensor has the rank of the logical one, and scales have blocks", _physical),
)
CALL_RULES: tuple[Rule, ...] = (
    Rule("pending", "a pending value is read exactly once, by `wait`", _pending),
    Rule("inference", "a declared op has the results that its declaration infers", _inference),
    Rule("callee", "a call names a function of the module", _callee),
    Rule("recursion", "no function calls itself, directly or through others", _recursion),
    Rule("call-operands", "a call gives the params, then the slots of its callee, with their types", _call_operands),
    Rule("call-results", "a call has the results of its callee, with their types", _call_results),
    Rule("call-statics", "a call supplies exactly the statics of its callee", _call_statics),
)
