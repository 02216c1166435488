"""Types of values: dtype, logical shape, placement per mesh axis, physical form.

The *logical* shape is that of the whole tensor, whatever the mesh; the *placement* says how it lies over each named
mesh axis; the *physical* form says how the local part is stored (padded, quantized). All three survive lowering.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

from mgraph.ir.dims import Dim, as_dim, dim_text, divide, product


class DType(Enum):
    """Element types by their short names, with bits per element."""

    F64 = ("f64", 64)
    F32 = ("f32", 32)
    BF16 = ("bf16", 16)
    F16 = ("f16", 16)
    F8E4M3 = ("f8e4m3", 8)
    F8E5M2 = ("f8e5m2", 8)
    F8E8M0 = ("f8e8m0", 8)
    F4E2M1 = ("f4e2m1", 4)
    C64 = ("c64", 64)
    I64 = ("i64", 64)
    I32 = ("i32", 32)
    I16 = ("i16", 16)
    I8 = ("i8", 8)
    U8 = ("u8", 8)
    BOOL = ("bool", 8)

    def __init__(self, text: str, bits: int) -> None:
        self.text = text
        self.bits = bits

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a slow call, and types are hashed a lot

    def __repr__(self) -> str:
        return self.text

    @property
    def is_float(self) -> bool:
        """Whether it holds real numbers with a fraction."""
        return self.text[0] == "f" or self is DType.BF16

    @property
    def differentiable(self) -> bool:
        """Whether gradients can flow through it."""
        return self.is_float or self is DType.C64

    @staticmethod
    def parse(text: str) -> DType:
        """The dtype of a short name; raises KeyError for an unknown one."""
        return _BY_TEXT[text]


_BY_TEXT = {d.text: d for d in DType}


@dataclass(frozen=True, slots=True)
class Shard:
    """`S(dim)`: split along a dim, or along one factor of it (`S(0.1)`); `zigzag` pairs chunk i with 2n-1-i (CP)."""

    dim: int
    factor: int | None = None
    zigzag: bool = False

    def __str__(self) -> str:
        where = f"{self.dim}" if self.factor is None else f"{self.dim}.{self.factor}"
        return f"S({where}, zigzag)" if self.zigzag else f"S({where})"


@dataclass(frozen=True, slots=True)
class Partial:
    """`P(sum)` or `P(max)`: the value is the reduction over the axis of what the ranks hold."""

    reduction: str = "sum"

    def __str__(self) -> str:
        return f"P({self.reduction})"


Placement = Shard | Partial  # replicated (`R`) is the absence of an entry


@dataclass(frozen=True, slots=True)
class Physical:
    """How the local part is stored: padded extents, and for quantized storage its dtype and block scales."""

    shape: tuple[Dim, ...]
    storage: DType | None = None
    scale: DType | None = None
    block: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = "pad[" + ", ".join(map(dim_text, self.shape)) + "]"
        if self.storage is not None:
            text += f" as {self.storage.text}"
        if self.scale is not None:
            text += f" scale {self.scale.text}[" + ", ".join(map(str, self.block)) + "]"
        return text


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor. `factors` maps a dim index to its factors (`(2 f)`: packed gate and up), whose product is the dim."""

    dtype: DType
    shape: tuple[Dim, ...] = ()
    placement: tuple[tuple[str, Placement], ...] = ()
    factors: tuple[tuple[int, tuple[Dim, ...]], ...] = ()
    physical: Physical | None = None
    _text: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    def __str__(self) -> str:
        if not self._text:
            self._text.append(self._render())
        return self._text[0]

    def _render(self) -> str:
        factors = dict(self.factors)
        dims = [
            "(" + " ".join(map(dim_text, factors[i])) + ")" if i in factors else dim_text(d)
            for i, d in enumerate(self.shape)
        ]
        text = f"{self.dtype.text}[{', '.join(dims)}]"
        if self.placement:
            text += "{" + ", ".join(f"{axis}={p}" for axis, p in self.placement) + "}"
        if self.physical is not None:
            text += f"<{self.physical}>"
        return text

    def on(self, axis: str) -> Placement | None:
        """The placement over a mesh axis; `None` is replicated."""
        return dict(self.placement).get(axis)

    def place(self, axis: str, placement: Placement | None) -> TensorType:
        """The same tensor with another placement over one axis (`None`: replicated)."""
        return _placed(self, axis, placement)

    def with_shape(self, *shape: Dim) -> TensorType:
        """Same dtype, another logical shape, replicated."""
        return TensorType(self.dtype, tuple(map(as_dim, shape)))

    def with_dtype(self, dtype: DType) -> TensorType:
        """Same shape and placement, another dtype."""
        return replace(self, dtype=dtype, physical=None)

    @property
    def numel(self) -> Dim:
        """Logical number of elements."""
        return product(self.shape)

    def local_shape(self, sizes: dict[str, int]) -> tuple[Dim, ...]:
        """The shape one rank holds, for axis sizes; a dim that does not divide raises ValueError."""
        shape = list(self.shape)
        for axis, placement in self.placement:
            if isinstance(placement, Shard):
                part = divide(shape[placement.dim], sizes[axis])
                if part is None:
                    raise ValueError(f"dim {placement.dim} of {self} does not divide over {axis}={sizes[axis]}")
                shape[placement.dim] = part
        return tuple(shape)


@lru_cache(maxsize=4096)
def _placed(type_: TensorType, axis: str, placement: Placement | None) -> TensorType:
    """Equal types give the same object: the parameters of all layers share a few types."""
    others = tuple(p for p in type_.placement if p[0] != axis)
    return replace(type_, placement=others if placement is None else (*others, (axis, placement)))


@dataclass(frozen=True, slots=True)
class PendingType:
    """The result of a split-phase collective's `start`: `wait` turns it into `value`."""

    value: TensorType

    def __str__(self) -> str:
        return f"pending<{self.value}>"


Type = TensorType | PendingType
