"""Gradients of torch ops that have no hand-written rule: a trace of torch's own, brought into the graph.

The op and `torch.autograd.grad` of it run once on fake tensors of the node's own types, on the meta device so that no
device-specific kernel is chosen; what they called is the gradient. The trace recomputes the op's forward where the
gradient needs its intermediates. Traces are cached by (op, types, attrs).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mgraph.errors import MgraphError
from mgraph.ir.aten import call_arguments, overload
from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Node, Value
from mgraph.ir.opdef import GradientRequest
from mgraph.ir.symbolic import SymbolicShapes, symbolic_shapes

_DROPPED = ("device", "layout", "pin_memory", "memory_format", "non_blocking")
_IDENTITY = ("aten.detach.default", "aten.alias.default", "aten.clone.default", "aten.contiguous.default")
_traces: dict[Any, Any] = {}


def traced_gradient(request: GradientRequest) -> Sequence[Value | None]:
    """Emit the traced gradient of the request's node; raises where torch has none."""
    node = request.node
    given = [c for c in request.cotangents if c is not None]
    key = (
        node.op,
        tuple(v.type for v in node.operands),
        tuple(node.attrs.items()),
        tuple(c is None for c in request.cotangents),
        request.needs,
    )
    if key not in _traces:
        _traces[key] = _trace(node, request.cotangents, request.needs)
    made = iter(import_trace(request.builder, _traces[key], [*node.operands, *given]))
    return [next(made) if need else None for need in request.needs]


def _trace(node: Node, cotangents: Sequence[Value | None], needs: Sequence[bool]) -> Any:
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    shapes = symbolic_shapes()
    attrs = {k: shapes.attr(v) for k, v in node.attrs.items()}
    count = len(node.operands)

    def gradient(*values: Any) -> list[Any]:
        operands = [v.detach().requires_grad_(need) for v, need in zip(values[:count], needs, strict=True)]
        with torch.enable_grad():
            positional, keywords = call_arguments(node.op, operands, attrs)
            results = overload(node.op)(*positional, **keywords)
            results = results if isinstance(results, tuple | list) else (results,)
            used = [r for r, c in zip(results, cotangents, strict=True) if c is not None]
            wanted = [o for o, need in zip(operands, needs, strict=True) if need]
            found = torch.autograd.grad(used, wanted, values[count:], allow_unused=True)
        return [torch.zeros_like(o) if g is None else g for o, g in zip(wanted, found, strict=True)]

    arguments = [shapes.fake(v.tensor).to("meta") for v in (*node.operands, *(c for c in cotangents if c is not None))]
    try:
        # Without the Python dispatcher: torch loses the gradient of nll_loss under it.
        with shapes.mode, _quiet():
            return make_fx(gradient, tracing_mode="real", _allow_non_fake_inputs=True)(*arguments)
    except (RuntimeError, NotImplementedError) as error:
        raise MgraphError(
            f"{node.op} has no gradient: {str(error).splitlines()[0]}",
            where=str(node.origin),
            hint="freeze what feeds it, or write the computation with differentiable ops",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch logs of a failure that is told as an error of ours."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def import_trace(builder: FunctionBuilder, traced: Any, inputs: Sequence[Value]) -> list[Value]:
    """Emit the calls of a traced graph module as nodes; returns the values of its outputs."""
    shapes = symbolic_shapes()
    values: dict[Any, Any] = {}
    waiting = iter(inputs)
    live = _live(traced.graph)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(waiting)
        elif node.op == "call_function" and node in live:
            values[node] = _import_call(builder, node, values, shapes)
        elif node.op == "output":
            return [values[n] for n in node.args[0]]
    raise AssertionError("a traced graph without output")


def _live(graph: Any) -> set[Any]:
    live: set[Any] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in live:
            live.update(node.all_input_nodes)
            live.add(node)
    return live


def _import_call(builder: FunctionBuilder, node: Any, values: Mapping[Any, Any], shapes: SymbolicShapes) -> Any:
    import operator

    if node.target is operator.getitem:
        return values[node.args[0]][node.args[1]]
    made = node.meta["val"]
    if not hasattr(made, "dtype") and not isinstance(made, tuple | list):
        return shapes.dim(made)  # size arithmetic: dims carry it
    name = str(node.target)
    if name in _IDENTITY:
        return values[node.args[0]]
    types = [shapes.type_of(t) for t in (made if isinstance(made, tuple | list) else [made])]
    operands, attrs = operands_and_attrs(
        node.target,
        node.args,
        node.kwargs,
        lambda n: values[n],
        lambda a: shapes.dim(a.meta["val"]) if hasattr(a, "meta") else a,
    )
    if name in ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"):
        return builder.one("reshape", operands[0], shape=types[0].shape)
    if name == "aten._conj.default":  # torch's is a mark on the memory, which not every op reads
        return builder.one("aten._conj_physical.default", operands[0])
    if name == "aten._to_copy.default":
        return builder.one("cast", operands[0], dtype=types[0].dtype)
    results = builder.emit(name, operands, attrs, types=types)
    return results if isinstance(made, tuple | list) else results[0]


def operands_and_attrs(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any, dim: Any
) -> tuple[list[Value], dict[str, Any]]:
    """Split a torch call into our operands and attrs: `value` maps a traced tensor, `dim` a traced size.

    Tensor arguments become operands, all others attrs under their schema names, defaults dropped.
    """
    operands: list[Value] = []
    places: list[str] = []
    attrs: dict[str, Any] = {}
    simple: list[str] = []
    given = dict(kwargs)
    for argument, a in zip(target._schema.arguments, args, strict=False):
        given[argument.name] = a
    for argument in target._schema.arguments:
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            simple.append(argument.name)
        if argument.name not in given or argument.name in _DROPPED:
            continue
        a = given[argument.name]
        if kind in ("Tensor", "Optional[Tensor]"):
            if a is not None:
                operands.append(value(a))
                places.append(argument.name)
        elif "Tensor" in kind:
            for index, item in enumerate(a):
                if item is not None:
                    operands.append(value(item))
                    places.append(f"{argument.name}.{index}")
        else:
            converted = _attr(a, dim)
            default = argument.default_value
            if not argument.has_default_value() or converted != _attr(default, dim):
                attrs[argument.name] = converted
    if places != simple[: len(places)]:
        attrs["args"] = tuple(places)
    return operands, attrs


def _attr(a: Any, dim: Any) -> Any:
    import torch

    from mgraph.ir.torch_bridge import from_torch_dtype

    if isinstance(a, tuple | list):
        return tuple(_attr(x, dim) for x in a)
    if isinstance(a, torch.dtype):
        return from_torch_dtype(a)
    return a if isinstance(a, bool | int | float | str | None) else dim(a)
