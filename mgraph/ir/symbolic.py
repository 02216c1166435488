"""Torch's symbolic shapes over our named dims: fake tensors in, tensor types out.

One `ShapeEnv` serves the process; each named dim gets one symbolic int of it, with a hint of its own that no model
dimension is likely to equal. Used to infer the types of torch ops and to trace torch's own gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from mgraph.ir.aten import call_arguments, overload, plain
from mgraph.ir.dims import Dim, as_dim, evaluate, names_in, symbol
from mgraph.ir.torch_bridge import from_torch_dtype, to_torch_dtype
from mgraph.ir.types import TensorType

_HINTS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069, 1087, 1091, 1093, 1097)


class SymbolicShapes:
    """A fake tensor mode whose symbolic ints stand for named dims."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False), allow_non_fake_inputs=True)
        self._ints: dict[str, Any] = {}
        self._names: dict[sympy.Symbol, sympy.Symbol] = {}
        self._inferred: dict[Any, tuple[TensorType, ...]] = {}

    def _int(self, name: str) -> Any:
        if name not in self._ints:
            import torch
            from torch._dynamo.source import ConstantSource
            from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

            hint = torch.empty(_HINTS[len(self._ints)], device="meta")
            context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
            fake = self.mode.from_tensor(hint, symbolic_context=context, source=ConstantSource(f"dim_{name}"))
            size = fake.shape[0]
            self._ints[name] = size
            self._names[size.node.expr] = symbol(name)  # type: ignore[attr-defined]
        return self._ints[name]

    def size(self, dim: Dim) -> Any:
        """A dim as an int or a symbolic int."""
        return evaluate(dim, {name: self._int(name) for name in names_in(dim)})

    def fake(self, type_: TensorType, requires_grad: bool = False) -> Any:
        """A fake tensor of a type, contiguous, on the CPU."""
        import torch

        sizes = [self.size(d) for d in type_.shape]  # outside the mode: new symbols start from a real tensor
        with self.mode:
            return torch.empty(sizes, dtype=to_torch_dtype(type_.dtype), requires_grad=requires_grad)

    def dim(self, size: Any) -> Dim:
        """The dim of an int or a symbolic int of this mode."""
        if isinstance(size, int):
            return size
        expression = size.node.expr.replace(lambda e: type(e).__name__ == "FloorDiv", lambda e: _floor(*e.args))
        return as_dim(expression.xreplace({s: self._names[s] for s in expression.free_symbols}))

    def type_of(self, tensor: Any) -> TensorType:
        """The type of a fake tensor."""
        return TensorType(from_torch_dtype(tensor.dtype), tuple(self.dim(s) for s in tensor.shape))

    def attr(self, value: Any) -> Any:
        """An attribute with dims as symbolic ints."""
        if isinstance(value, tuple):
            return [self.attr(v) for v in value]
        return self.size(value) if isinstance(value, sympy.Expr) else plain(value)

    def infer(self, name: str, types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
        """Result types of a torch op; raises ValueError with torch's words where operands do not fit."""
        from torch._dispatch.python import enable_python_dispatcher

        key = (name, tuple(types), tuple(attrs.items()))
        if key not in self._inferred:
            operands = [self.fake(t) for t in types]
            positional, keywords = call_arguments(name, operands, {k: self.attr(v) for k, v in attrs.items()})
            try:
                # What torch 2.11 takes apart in C++ asks for sizes there, which fails, or makes a named dim its hint.
                with self.mode, enable_python_dispatcher():
                    made = overload(name)(*positional, **keywords)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                raise ValueError(f"{name}: {str(error).splitlines()[0]}") from error
            made = made if isinstance(made, tuple | list) else (made,)
            self._inferred[key] = tuple(self.type_of(t) for t in made)
        return self._inferred[key]


def _floor(above: sympy.Expr, below: sympy.Expr) -> sympy.Expr:
    """Torch's quotient, rounded down, as ours: what is rounded up is one of a negative number to torch."""
    negative = above.could_extract_minus_sign()
    return -sympy.ceiling(-above / below) if negative else sympy.floor(above / below)


@functools.cache
def symbolic_shapes() -> SymbolicShapes:
    """The process's instance (made on first use: it needs torch)."""
    return SymbolicShapes()
