"""Declarations of torch's own ops, made on demand from their schemas.

Such an op means what torch says: its body calls it, its types come from running it on fake tensors with symbolic
sizes, its gradient is a hand-written rule (`mgraph.ir.ops.aten_gradients`) or a trace of torch's own.
Where a node's tensor operands are not simply the first tensor arguments of the schema, its attr `args` names the
argument of each operand: `"tensors.0"` is element 0 of the list argument `tensors`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from mgraph.errors import MgraphError
from mgraph.ir.opdef import GradientRequest, OpDef
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.types import DType, TensorType, Type

LIBRARIES = {"zoo": "mgraph.models.experts"}
"""Namespaces of ops that a module of ours registers: graphs read from text may hold them before anything imports it."""


@functools.cache
def overload(name: str) -> Any:
    """The torch overload of `aten.mul.Tensor`; an unknown one raises."""
    import torch

    namespace, op, variant = name.split(".")
    if namespace in LIBRARIES:
        importlib.import_module(LIBRARIES[namespace])
    try:
        return getattr(getattr(getattr(torch.ops, namespace), op), variant)
    except AttributeError:
        raise MgraphError(
            f"torch has no op {name!r}", hint="import the library that registers it, or check the spelling"
        ) from None


@functools.cache
def tensor_arguments(name: str) -> tuple[str, ...]:
    """Names of the schema's `Tensor` and `Tensor?` arguments, in order; lists are not among them."""
    return tuple(a.name for a in overload(name)._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]"))


def argument_names(name: str, count: int, attrs: Mapping[str, Any]) -> tuple[str, ...]:
    """The schema argument of each of `count` operands."""
    named = attrs.get("args")
    return tuple(named) if named is not None else tensor_arguments(name)[:count]


def call_arguments(name: str, operands: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of the torch call, from operands (anything) and attrs (kept as they are).

    Positional arguments end before the first one left at its default; the rest go by keyword.
    """
    given: dict[str, Any] = {k: v for k, v in attrs.items() if k != "args"}
    for where, operand in zip(argument_names(name, len(operands), attrs), operands, strict=True):
        argument, dot, index = where.partition(".")
        if dot:
            items: list[Any] = given.setdefault(argument, [])
            items.extend([None] * (int(index) + 1 - len(items)))
            items[int(index)] = operand
        else:
            given[argument] = operand
    for argument in overload(name)._schema.arguments:
        if str(argument.type) == "Optional[Tensor]" and not argument.has_default_value():
            given.setdefault(argument.name, None)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    contiguous = True
    for argument in overload(name)._schema.arguments:
        contiguous = contiguous and argument.name in given and not argument.kwarg_only
        if contiguous:
            positional.append(given[argument.name])
        elif argument.name in given:
            keywords[argument.name] = given[argument.name]
    return positional, keywords


@functools.cache
def takes_device(name: str) -> bool:
    """Whether the op is a factory that must be told its device (no tensor operand can say it)."""
    arguments = overload(name)._schema.arguments
    return any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)


def plain(value: Any) -> Any:
    """An attribute as torch takes it: tuples become lists, our dtypes torch's."""
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    return to_torch_dtype(value) if isinstance(value, DType) else value


def aten_op_def(name: str) -> OpDef:
    """The declaration of a torch op."""
    import torch

    target = overload(name)

    def body(*operands: Any, device: Any = None, **attrs: Any) -> Any:
        positional, keywords = call_arguments(name, operands, {k: plain(v) for k, v in attrs.items()})
        if device is not None and takes_device(name):
            keywords["device"] = device
        return target(*positional, **keywords)

    def gradient(request: GradientRequest) -> Sequence[Any]:
        from mgraph.ir.ops.aten_gradients import aten_gradient

        return aten_gradient(request)

    tags = target.tags
    return OpDef(
        name,
        f"torch.ops.{name}",
        body,
        infer=lambda types, attrs: infer(name, types, attrs),
        gradient=gradient,
        random=torch.Tag.nondeterministic_seeded in tags,
        free_attrs=True,
    )


def infer(name: str, types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[Type, ...]:
    """Result types, by running the op on fake tensors with symbolic sizes."""
    from mgraph.ir.symbolic import symbolic_shapes

    return symbolic_shapes().infer(name, types, attrs)
