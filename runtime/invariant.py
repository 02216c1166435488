"""Results of a row that do not depend on what other rows there are: torch's ops in shapes that do not change.

What libraries compute for a row of a product depends on how many rows there are (other blocks, another order of sums),
and what an elementwise function gives depends on whether an element is in a whole vector or in the rest behind it. In
`fixed_shapes` each such op runs on pieces of a fixed shape, filled up with zeros and copied to a fresh place, so that
a row has the same bits whatever lies beside it:

* products of matrices, and reductions and softmaxes along a dim: `ROWS` rows at a time;
* elementwise functions that are not rounded exactly (`silu`, `cos`, …): `ELEMENTS` elements at a time;
* attention over a cache: `ROWS` positions of one sequence at a time, counted from its beginning (see `paged.py`).

Ops that only move data, choose, compare or are rounded exactly run as they are. An op that is known to be neither is
refused with its name, and nothing runs that might differ. This is slow.

On a GPU most work is done by kernels of the package, which were made to compute a row alike among any others. Of
torch's ops, elementwise functions run as they are, since all elements go one way there; reductions take pieces as
above, and so does `topk`, whose algorithm follows the number of rows. Products are refused: which kernel of a library
runs, and how it divides a sum, is known to the library alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mgraph.errors import PackageError

ROWS = 16
"""Rows of a product, or positions of a sequence, that are computed at once."""
ELEMENTS = 8192
"""Elements of an elementwise function that are computed at once: whole vectors, in one thread."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


EXACT = _names(
    "abs add bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min copy div eq floor frexp "
    "ge gt isfinite isinf isnan le logical_and logical_not logical_or lt masked_fill maximum minimum mul ne neg "
    "reciprocal relu round sign sqrt square sub to_copy where bitwise_xor bitwise_left_shift "
    "bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ rsub logical_xor sgn trunc"
)
"""Elementwise functions whose result is the exact one, rounded: the same in a vector and alone."""
MOVING = _names(
    "alias arange argmax argmin argsort bincount cat clone contiguous copy embedding embedding_bag_forward_only "
    "embedding_bag empty empty_like empty_strided fill flip full full_like gather index index_copy index_fill "
    "index_put index_select lift_fresh local_scalar_dense masked_select max min amax amin any all new_empty "
    "new_full new_ones new_zeros ones ones_like repeat repeat_interleave roll scalar_tensor scatter searchsorted "
    "sort stack tensor topk tril triu unsafe_view where zero zeros zeros_like constant_pad_nd histc bucketize isin "
    "item equal resize unsafe_index one_hot nonzero empty_permuted"
)
"""Ops that move, choose or compare what is there. (Sums of `embedding_bag` go bag by bag.)"""
ALONG = _names("softmax log_softmax sum mean logsumexp cumsum prod linalg_vector_norm var")
"""Reductions along a dim, or what is computed from them."""
_PRODUCTS_OF_TORCH = _names("mm addmm bmm _grouped_mm")
_LINE = 16
"""Bytes that a GPU's thread reads at once: how a row is read may depend on whether it begins at a multiple of them."""

_here: ContextVar[_FixedShapes | None] = ContextVar("fixed_shapes", default=None)


def active() -> bool:
    """Whether ops run in fixed shapes here."""
    return _here.get() is not None


@contextmanager
def fixed_shapes(wanted: bool = True) -> Iterator[None]:
    """Run ops in fixed shapes within, if `wanted`. Raises PackageError at an op that is not known."""
    if not wanted:
        yield
        return
    mode = _FixedShapes()
    before = _here.set(mode)
    try:
        with mode:
            yield
    finally:
        _here.reset(before)


@contextmanager
def as_it_is() -> Iterator[None]:
    """Run ops within as they are, for their caller has given them shapes that do not depend on the batch."""
    mode = _here.get()
    before = mode is not None and mode.plain
    if mode is not None:
        mode.plain = True
    try:
        yield
    finally:
        if mode is not None:
            mode.plain = before


class _FixedShapes(TorchDispatchMode):
    """Runs each op of torch in fixed shapes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plain = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The op, or the op on pieces."""
        kwargs = dict(kwargs or {})
        if self.plain:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if any(tensor.is_cuda for tensor in _tensors([*args, *kwargs.values()])):
            if name in _PRODUCTS_OF_TORCH:
                return _outer(func, *args, **kwargs)
            if torch.Tag.pointwise in func.tags:
                return func(*args, **kwargs)
            if name == "topk" and not func._schema.is_mutable:
                return _along(func, args, kwargs)
        if name == "_grouped_mm":
            return _grouped(*args, **kwargs)
        known = name.strip("_") if not name.startswith("__") else name
        if known in ("mm", "addmm", "bmm"):
            return _given(func, known, _PRODUCTS[known], args, kwargs)
        if known in ("native_layer_norm", "fused_rms_norm"):
            return _normalized(func, *args, **kwargs)
        if known in ALONG:
            return _given(func, known, lambda *a, **k: _along(_functional(func), a, k, func._schema), args, kwargs)
        if _moves(func, known) or (known in EXACT and _rounded_once(args, kwargs)):
            return func(*args, **kwargs)
        if _whole(args, kwargs):
            made = func(*args, **kwargs)
            if _whole([made], {}):
                return made
        if torch.Tag.pointwise in func.tags:
            return _given(func, known, lambda *a, **k: _elementwise(_functional(func), a, k), args, kwargs)
        raise _refusal(func)


def _moves(func: Any, known: str) -> bool:
    """Whether an op gives values that are there already: it is listed, or gives a view."""
    views = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
    return known in MOVING or any(views)


def _whole(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether all tensors are of whole numbers, sums of which are exact."""
    given = [*_tensors(args), *_tensors(list(kwargs.values()))]
    return not any(t.is_floating_point() or t.is_complex() for t in given)


def _rounded_once(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an exact function is one here: not of complex numbers, and not a sum with a factor."""
    return kwargs.get("alpha", 1) == 1 and not any(t.is_complex() for t in _tensors(args))


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    flat = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    return [item for item in flat if isinstance(item, Tensor)]


def _given(
    func: Any, known: str, compute: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    """What `compute` gives, written where the op writes: into `out`, its first operand, or nowhere."""
    out = kwargs.pop("out", None)
    if out is None and func._schema.is_mutable:
        out = args[0]
    made = compute(*args, **kwargs)
    if out is not None and out.shape != made.shape:
        out.resize_(made.shape)
    return made if out is None else out.copy_(made)


def _functional(func: Any) -> Any:
    """The op that gives a new tensor where this one writes in place."""
    if not func._schema.is_mutable:
        return func
    return getattr(torch.ops.aten, func._schema.name.split("::")[1].rstrip("_"))


def _piece(rows: Tensor, begin: int, count: int, taken: int | None = None) -> Tensor:
    """`count` rows of a tensor, of which the first `taken` (all) are those from `begin` on, at a fresh place; zeros
    where there are no more."""
    piece = rows.new_zeros(count, *rows.shape[1:])
    here = rows[begin : begin + (taken or count)]
    piece[: here.shape[0]] = here
    return piece


def _pieces(compute: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """`compute` of a tensor's rows, `ROWS` at a time."""
    return _joined(lambda piece: (compute(piece),), rows)[0]


def _joined(compute: Callable[[Tensor], Sequence[Tensor]], rows: Tensor) -> list[Tensor]:
    """What `compute` gives of a tensor's rows, `ROWS` at a time; or on a GPU, where rows do not begin alike, one."""
    width = math.prod(rows.shape[1:]) * rows.element_size()
    taken = 1 if rows.is_cuda and width % _LINE else ROWS
    made = [compute(_piece(rows, at, ROWS, taken)) for at in range(0, max(1, rows.shape[0]), taken)]
    return [torch.cat([part[:taken] for part in parts])[: rows.shape[0]] for parts in zip(*made, strict=True)]


def _mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    return _pieces(lambda piece: torch.mm(piece, b), a)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if bias.dim() == 1 or bias.shape[0] == 1:
        return _pieces(lambda piece: torch.addmm(bias, piece, b, beta=beta, alpha=alpha), a)
    made = [
        torch.addmm(_piece(bias, begin, ROWS), _piece(a, begin, ROWS), b, beta=beta, alpha=alpha)
        for begin in range(0, max(1, a.shape[0]), ROWS)
    ]
    return torch.cat(made)[: a.shape[0]]


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([_mm(one, other) for one, other in zip(a, b, strict=True)])


_PRODUCTS: Mapping[str, Callable[..., Tensor]] = {"mm": _mm, "addmm": _addmm, "bmm": _bmm}


def _outer(func: Any, a: Tensor, b: Tensor, *more: Any, **named: Any) -> Tensor:
    """A product of columns with rows, in which nothing is added up; any other is refused."""
    if func._schema.name.split("::")[1] not in ("mm", "bmm") or a.shape[-1] != 1 or func._schema.is_mutable:
        raise _refusal(func)
    return a * b


def _grouped(
    rows: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The products of groups of rows, one group after the other; rows of none are 0."""
    out = rows.new_zeros(rows.shape[0], weight.shape[2])
    begin = 0
    for index, end in enumerate(offs.tolist()):
        if end > begin:
            out[begin:end] = _mm(rows[begin:end], weight[index])
        begin = end
    return out


def _along(func: Any, args: Sequence[Any], kwargs: dict[str, Any], schema: Any = None) -> Any:
    """An op along one dim or several: the rows of the tensor, laid densely, are taken `ROWS` at a time."""
    given = (schema or func._schema).arguments
    bound = {argument.name: argument.default_value for argument in given if argument.name == "dim"}
    bound |= dict(zip([argument.name for argument in given], args, strict=False)) | kwargs
    if _whole(args, kwargs) and not getattr(kwargs.get("dtype"), "is_floating_point", False):
        return func(*args, **kwargs)
    x = bound.pop(given[0].name)
    dim = bound.pop("dim", None)
    if dim is None or (not isinstance(dim, int) and not dim):
        raise _refusal(func)  # a sum over rows
    places = [place % x.dim() for place in ([dim] if isinstance(dim, int) else dim)]
    keepdim = bound.pop("keepdim", False)
    kept = [place for place in range(x.dim()) if place not in places]
    shape = [x.shape[place] for place in kept]
    flat = x.permute(*kept, *places).reshape(math.prod(shape), -1)
    along = 1 if isinstance(dim, int) else [1]
    returned: list[type[Any]] = []

    def compute(piece: Tensor) -> Sequence[Tensor]:
        found = func(piece, dim=along, **bound)
        returned.append(type(found))
        return (found,) if isinstance(found, Tensor) else found

    laid = [_laid(made, shape, places, keepdim) for made in _joined(compute, flat)]
    return laid[0] if issubclass(returned[0], Tensor) else tuple(laid)


def _laid(made: Tensor, shape: Sequence[int], places: Sequence[int], keepdim: bool) -> Tensor:
    """What was made of rows, with the dims that the op gives: those that were kept have `shape`."""
    if made.dim() == 2:  # as many as there were, or other ones
        return made.reshape(*shape, made.shape[1]).movedim(-1, places[0])
    made = made.reshape(shape)
    for place in sorted(places) if keepdim else ():
        made = made.unsqueeze(place)
    return made


def _normalized(func: Any, x: Tensor, shape: Sequence[int], *more: Any, **named: Any) -> tuple[Tensor, ...]:
    """A norm over the last dims, `ROWS` rows at a time, and its statistics."""
    leading = x.shape[: x.dim() - len(shape)]
    flat = x.reshape(-1, *shape)
    joined = _joined(lambda piece: func(piece, shape, *more, **named), flat)
    return tuple(part.reshape(*leading, *part.shape[1:]) for part in joined)


def _refusal(func: Any) -> PackageError:
    problem = f"{func}: what it gives for a row may depend on the number of rows"
    return PackageError(problem, hint="serve this package without --batch-invariant")


def _elementwise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """An elementwise function, `ELEMENTS` elements at a time."""
    tensors = [a for a in args if isinstance(a, Tensor) and a.dim()]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors)) if tensors else ()
    if not tensors:
        return _elementwise(func, [a[None] if isinstance(a, Tensor) else a for a in args], kwargs)[0]
    flat = [a.expand(shape).reshape(-1) if isinstance(a, Tensor) and a.dim() else a for a in args]
    count = math.prod(shape)
    made = []
    for begin in range(0, max(1, count), ELEMENTS):
        pieces = [_piece(a, begin, ELEMENTS) if isinstance(a, Tensor) and a.dim() else a for a in flat]
        made.append(func(*pieces, **kwargs))
    return torch.cat(made)[:count].reshape(shape)
