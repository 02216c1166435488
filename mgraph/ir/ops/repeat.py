"""Parts of a dim that are repeated, so that more ranks than there are parts have one each.

`parts` equal parts along `dim` become `parts * times`: each is there `times` in a row. Over a mesh axis a rank takes
its own of them (`repeated_part`) and never holds the others; backward, `repeated_part_grad` puts what it has for them
in the place of the parts they came from, and the sum over the ranks is the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.dims import as_dim, divide
from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op
from mgraph.ir.ops.cost import traffic
from mgraph.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

    Types = Sequence[TensorType]
    Attrs = Mapping[str, Any]


def repeat_parts(x: Tensor, *, dim: int, parts: int, times: int) -> Tensor:
    """Each of `parts` equal parts of x along `dim`, `times` in a row: [.., parts * n] → [.., parts * times * n].

    It is what key and value heads mean to the query heads that share them.
    """
    by_part: Tensor = x.unflatten(dim, (parts, -1))
    return by_part.repeat_interleave(times, dim).flatten(dim, dim + 1)


def repeat_parts_grad(dy: Tensor, *, dim: int, parts: int, times: int) -> Tensor:
    """Gradient of `repeat_parts`: the sum over the repetitions of each part."""
    summed: Tensor = dy.unflatten(dim, (parts, times, -1)).sum(dim + 1)
    return summed.flatten(dim, dim + 1)


def _taken(index: Any, parts: int, times: int, ranks: int) -> list[int]:
    """Which parts rank `index` of `ranks` has of the repeated ones."""
    count = parts * times // ranks
    return [(int(index) * count + i) // times for i in range(count)]


def repeated_part(x: Tensor, index: Any, *, dim: int, parts: int, times: int, ranks: int) -> Tensor:
    """What rank `index` (i64[]) of `ranks` holds of `repeat_parts(x)` split along `dim`: `R` to `S(dim)`. Nothing is
    sent, and a single part is a view."""
    import torch

    all_ = x.chunk(parts, dim)
    taken = [all_[i] for i in _taken(index, parts, times, ranks)]
    return taken[0] if len(taken) == 1 else torch.cat(taken, dim)


def repeated_part_grad(dy: Tensor, index: Any, *, dim: int, parts: int, times: int, ranks: int) -> Tensor:
    """Gradient of `repeated_part`: dy in the places of its parts, zeros elsewhere: `S(dim)` to `P(sum)`."""
    import torch

    taken = _taken(index, parts, times, ranks)
    pieces = dy.chunk(len(taken), dim)
    sums = [torch.zeros_like(pieces[0])] * parts
    for i, piece in zip(taken, pieces, strict=True):
        sums[i] = sums[i] + piece
    return torch.cat(sums, dim)


def _gradient(request: GradientRequest) -> tuple[Value | None, ...]:
    return request.builder.emit("repeat_parts_grad", (request.cotangent,), request.node.attrs)


def _repeated(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    shape = list(types[0].shape)
    shape[attrs["dim"]] = as_dim(shape[attrs["dim"]] * attrs["times"])
    return (types[0].with_shape(*shape),)


def _summed(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    shape = list(types[0].shape)
    extent = divide(shape[attrs["dim"]], attrs["times"])
    if extent is None:
        raise ValueError(f"dim {attrs['dim']} of {types[0]} is not repeated {attrs['times']} times")
    shape[attrs["dim"]] = extent
    return (types[0].with_shape(*shape),)


_PARTS = {"dim": REQUIRED, "parts": REQUIRED, "times": REQUIRED}
define_op("repeat_parts", repeat_parts, attrs=_PARTS, infer=_repeated, gradient=_gradient, bytes=traffic)
define_op("repeat_parts_grad", repeat_parts_grad, attrs=_PARTS, infer=_summed, bytes=traffic)
define_op("repeated_part", repeated_part, attrs={**_PARTS, "ranks": REQUIRED}, infer=_repeated)
define_op("repeated_part_grad", repeated_part_grad, attrs={**_PARTS, "ranks": REQUIRED}, infer=_summed, bytes=traffic)
