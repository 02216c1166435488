"""Which ops of a trace change nothing, which are conversions, and how torch's arguments become operands and attrs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mgraph.capture.shapes import ShapeReader
from mgraph.capture.unsupported import argument, op_name
from mgraph.ir.dims import Dim
from mgraph.ir.graph import Value
from mgraph.ir.torch_bridge import from_torch_dtype, to_torch_dtype
from mgraph.ir.types import TensorType

IDENTITIES = frozenset(
    {
        "aten.alias.default",
        "aten.clone.default",
        "aten.contiguous.default",
        "aten.detach_.default",  # only ever applied to constants that tracing lifted
        "aten.lift_fresh.default",
        "aten.lift_fresh_copy.default",
    }
)
"""Ops whose result equals their operand: values have no memory layout."""

CASTS = frozenset(
    {
        "aten._to_copy.default",
        "aten.to.device",
        "aten.to.dtype",
        "aten.to.dtype_layout",
        "aten.to.other",
        "aten.type_as.default",
    }
)
RESHAPES = frozenset(
    {
        "aten._reshape_alias.default",
        "aten._unsafe_view.default",
        "aten.flatten.using_ints",
        "aten.reshape.default",
        "aten.reshape_as.default",
        "aten.unflatten.int",
        "aten.view.default",
        "aten.view_as.default",
    }
)

_DROPPED_ARGUMENTS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
_UNIT = {"aten.mul.Tensor": 1, "aten.mul.Scalar": 1, "aten.div.Tensor": 1, "aten.div.Scalar": 1}
_OPEN_END = 2**62


def implied(name: str, operands: Sequence[Value], attrs: dict[str, Any]) -> dict[str, Any]:
    """Arguments left out whose default hangs on the dtype, written out: a graph may be run in another dtype.

    The epsilon of `rms_norm` is that of the dtype it computes in, f32 for narrower ones.
    """
    if name != "aten.rms_norm.default" or "eps" in attrs:
        return {}
    wide = torch.promote_types(to_torch_dtype(operands[0].tensor.dtype), torch.float32)
    return {"eps": torch.finfo(wide).eps}


def changes_nothing(name: str, operands: Sequence[Value], attrs: dict[str, Any], type_: TensorType) -> bool:
    """Whether an op gives its operand back, bit for bit."""
    if len(operands) != 1 or operands[0].type != type_:
        return False
    if name in ("aten.expand.default", "aten.slice.Tensor"):
        return "step" not in attrs
    if name in _UNIT:
        return bool(attrs.get("other") == 1) and "rounding_mode" not in attrs
    # A float 0 would turn -0.0 into 0.0.
    return name in ("aten.add.Tensor", "aten.sub.Tensor") and attrs.get("other") == 0 and not type_.dtype.is_float


@functools.cache
def _schema(target: Any) -> tuple[tuple[str, str, bool, Any], ...]:
    """(name, type, has a default, default) of each argument of an overload."""
    return tuple(
        (a.name, str(a.type), a.has_default_value(), a.default_value if a.has_default_value() else None)
        for a in target._schema.arguments
    )


def operands_and_attrs(
    node: Any, type_: TensorType, value: Callable[[Any], Value], reader: ShapeReader
) -> tuple[list[Value], dict[str, Any]]:
    """Tensor arguments as operands, all others as attrs under their schema names, defaults dropped.

    `type_` is that of the first result, `value` gives the value of a node. Where the operands are not the first tensor
    arguments of the schema, the attr `args` names them.
    """
    operands: list[Value] = []
    names: list[str] = []
    attrs: dict[str, Any] = {}
    given = {**dict(zip((a[0] for a in _schema(node.target)), node.args, strict=False)), **node.kwargs}
    for name, _, has_default, default in _schema(node.target):
        if name not in given or name in _DROPPED_ARGUMENTS:
            continue
        item = given[name]
        if _is_tensor(item):
            operands.append(value(item))
            names.append(name)
        elif isinstance(item, list | tuple) and any(map(_is_tensor, item)):
            for index, element in enumerate(_joined(op_name(node), item, type_, value)):
                if element is not None:
                    operands.append(value(element))
                    names.append(f"{name}.{index}")
        elif not (has_default and _equal(item, default)):
            attrs[name] = _attr(item, reader)
    _normalise(op_name(node), attrs, operands, type_)
    plain = [a[0] for a in _schema(node.target) if a[1] in ("Tensor", "Optional[Tensor]")][: len(names)]
    if names != plain:
        attrs["args"] = tuple(names)
    return operands, attrs


def _normalise(name: str, attrs: dict[str, Any], operands: list[Value], type_: TensorType) -> None:
    """Sizes written in full, open ends of slices left out: one spelling for one meaning."""
    if name == "aten.expand.default":
        attrs["size"] = type_.shape
        attrs.pop("implicit", None)
    elif name == "aten.slice.Tensor":
        dim = attrs.get("dim", 0)
        if attrs.get("start") == 0:
            del attrs["start"]
        end = attrs.get("end")
        if (isinstance(end, int) and end >= _OPEN_END) or end == operands[0].tensor.shape[dim]:
            attrs.pop("end", None)


def _joined(name: str, tensors: Sequence[Any], type_: TensorType, value: Callable[[Any], Value]) -> Sequence[Any]:
    """A list of tensors, without those that torch.cat passes over: among others, empty ones may have one dim alone."""
    if name != "aten.cat.default":
        return tensors
    return [tensor for tensor in tensors if len(value(tensor).tensor.shape) == len(type_.shape)]


def _is_tensor(item: Any) -> bool:
    return isinstance(item, torch.fx.Node) and not isinstance(
        item.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool
    )


def _equal(item: Any, default: Any) -> bool:
    if isinstance(item, torch.fx.Node):
        return False
    return list(item) == list(default) if isinstance(item, list | tuple) and default is not None else item == default


def _attr(item: Any, reader: ShapeReader) -> Any:
    """An argument as an attribute: sizes as dims, dtypes as ours, lists as tuples."""
    if isinstance(item, torch.fx.Node):
        item = item.meta["val"]
    if isinstance(item, list | tuple):
        return tuple(_attr(i, reader) for i in item)
    if isinstance(item, torch.SymInt):
        return reader.dim(item)
    if isinstance(item, torch.dtype):
        return from_torch_dtype(item)
    assert item is None or isinstance(item, bool | int | float | str), f"an argument of type {type(item).__name__}"
    return item


def result_names(node: Any, count: int) -> list[str]:
    """Names of a node's results: its own, with the schema's result names where there are several.

    The number of a node's name is left out: it counts what was traced, not what a module has.
    """
    base = base_name(node)
    if count == 1:
        return [base]
    returns = node.target._schema.returns
    named = [r.name for r in returns] if len(returns) == count else []
    return [f"{base}_{named[i] if i < len(named) and named[i] else i}" for i in range(count)]


def base_name(node: Any) -> str:
    """The name of a node without its number."""
    stem, _, number = str(node.name).rpartition("_")
    return stem if stem and number.isdecimal() else str(node.name)


def slice_bounds(node: Any, extent: Dim, reader: ShapeReader) -> tuple[Dim, Dim]:
    """Start and end of a slice of step 1, as extents of the sliced dim."""

    def bound(index: int, name: str, default: Dim) -> Dim:
        found = argument(node, index, name)
        found = default if found is None else _attr(found, reader)
        if isinstance(found, int):
            return extent if found >= _OPEN_END else found + extent if found < 0 else found
        return found

    return bound(2, "start", 0), bound(3, "end", extent)
