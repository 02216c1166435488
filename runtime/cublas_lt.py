"""cuBLASLt's products of two matrices, with the kernel chosen among those that its heuristic proposes.

torch asks cuBLAS for one kernel and takes it. Which one is fastest depends on the shapes, the card and how warm it
runs, so `Product` offers all that are proposed and, once it is `widened`, others of the same algorithm: `run(i, …)`
multiplies by the i-th. It may add a third matrix where it writes the product, which torch does only over what it adds
to: `sum_of` is that, with the first of the kernels or the one that tuning has found. The library is the one that torch
has loaded; its types, functions and numbers are those of cublasLt.h.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgraph.errors import PackageError

MOST = 16
"""Kernels that are asked for."""
WORKSPACE = 32 << 20
"""Bytes that a kernel may use beside its operands, as torch gives it on Hopper."""

_COMPUTE_32F, _R_32F = 68, 0
_TYPES = {torch.bfloat16: 14, torch.float16: 2}
_TRANSPOSE_A, _TRANSPOSE_B, _MOST_WORKSPACE = 3, 4, 1
_ALIGNMENTS, ALIGNMENT = (5, 6, 7, 8), 16
"""Attributes that say where operands and result begin, and the bytes that all of them are multiples of."""
_NOT_SUPPORTED = 15
_TILE, _OPTION, _CLUSTER = 1, 5, 8
"""Attributes of an algorithm: its tile, an option of its own, its cluster of thread blocks."""
_TILES = {
    "128x128": 20, "128x160": 29, "160x128": 30, "128x176": 409, "176x128": 201, "128x192": 32, "192x128": 31,
    "144x256": 186, "256x144": 500, "160x256": 195, "256x160": 502, "176x256": 203, "256x176": 504, "192x192": 209,
    "128x240": 416, "240x128": 227, "128x256": 23, "256x128": 24, "128x320": 176, "320x128": 248, "344x128": 254,
}  # fmt: skip
_CLUSTERS = {"2x1": 3, "1x2": 5}
_OPTIONS = range(8)


_Algorithm = ctypes.c_uint64 * 8
"""cublasLtMatmulAlgo_t."""


class _Candidate(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Lie:
    """How a matrix lies in memory: `turned` if its columns are contiguous, `stride` from one of its rows, or columns,
    to the next."""

    turned: bool
    stride: int

    @staticmethod
    def of(matrix: Tensor) -> Lie | None:
        """That of a matrix; None where neither rows nor columns are contiguous and apart."""
        rows, columns = matrix.shape
        across, along = matrix.stride()
        if along == 1 and across >= columns:
            return Lie(False, across)
        return Lie(True, along) if across == 1 and along >= rows else None


@dataclass(frozen=True)
class Shape:
    """What a product is chosen by: left [rows, depth] @ right [depth, columns], and how they lie; out is contiguous."""

    rows: int
    columns: int
    depth: int
    left: Lie
    right: Lie
    dtype: torch.dtype

    @staticmethod
    def of(left: Tensor, right: Tensor) -> Shape | None:
        """That of a product; None where the library is not asked for it."""
        lies = Lie.of(left), Lie.of(right)
        if lies[0] is None or lies[1] is None or left.dtype not in _TYPES or right.dtype is not left.dtype:
            return None
        if not (is_aligned(left, lies[0].stride) and is_aligned(right, lies[1].stride)):
            return None
        return Shape(left.shape[0], right.shape[1], left.shape[1], lies[0], lies[1], left.dtype)


class Product:
    """Kernels for a product. The library thinks in columns, so it is handed out^T = right^T left^T."""

    def __init__(self, shape: Shape) -> None:
        self._lib, self._handle = _library(torch.cuda.current_device())
        kind = _TYPES[shape.dtype]
        self._how = self._made("MatmulDescCreate", _COMPUTE_32F, _R_32F)
        for attribute, lie in ((_TRANSPOSE_A, shape.right), (_TRANSPOSE_B, shape.left)):
            value = ctypes.c_int32(lie.turned)
            _check(self._lib.cublasLtMatmulDescSetAttribute(self._how, attribute, ctypes.byref(value), _size(4)))
        self._right = self._layout(kind, shape.depth, shape.columns, shape.right)
        self._left = self._layout(kind, shape.rows, shape.depth, shape.left)
        self._out = self._layout(kind, shape.rows, shape.columns, Lie(False, shape.columns))
        preference = self._made("MatmulPreferenceCreate")
        limits = (_MOST_WORKSPACE, ctypes.c_uint64(WORKSPACE)), *((a, ctypes.c_uint32(ALIGNMENT)) for a in _ALIGNMENTS)
        for attribute, number in limits:
            size = _size(ctypes.sizeof(number))
            _check(self._lib.cublasLtMatmulPreferenceSetAttribute(preference, attribute, ctypes.byref(number), size))
        proposed, found = (_Candidate * MOST)(), ctypes.c_int(0)
        self._layouts = self._right, self._left, self._out, self._out
        code = self._lib.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._how, *self._layouts, preference, MOST, proposed, ctypes.byref(found)
        )
        _check(0 if code == _NOT_SUPPORTED else code)
        self._algorithms = [_Algorithm(*proposed[i].algorithm) for i in range(found.value if code == 0 else 0)]

    @property
    def count(self) -> int:
        """How many kernels there are."""
        return len(self._algorithms)

    def widened(self) -> Product:
        """This product, which offers the first proposal's algorithm with other tiles and clusters besides."""
        for tile, cluster, option in itertools.product(_TILES.values(), _CLUSTERS.values(), _OPTIONS):
            if not self._algorithms:
                break
            variant = _Algorithm(*self._algorithms[0])
            for attribute, number in (
                (_TILE, ctypes.c_uint32(tile)),
                (_CLUSTER, ctypes.c_uint16(cluster)),
                (_OPTION, ctypes.c_uint32(option)),
            ):
                size = _size(ctypes.sizeof(number))
                self._lib.cublasLtMatmulAlgoConfigSetAttribute(variant, attribute, ctypes.byref(number), size)
            if self._works(variant) and all(bytes(variant) != bytes(other) for other in self._algorithms):
                self._algorithms.append(variant)
        return self

    def _works(self, algorithm: ctypes.Array[ctypes.c_uint64]) -> bool:
        """Whether the library has a kernel for it, which needs no more than the workspace."""
        result = _Candidate()
        code = self._lib.cublasLtMatmulAlgoCheck(
            self._handle, self._how, *self._layouts, algorithm, ctypes.byref(result)
        )
        return bool(code == 0 and result.workspace <= WORKSPACE)

    def run(self, index: int, left: Tensor, right: Tensor, out: Tensor, added: Tensor | None = None) -> bool:
        """Write left @ right, plus what is `added`, which lies as out does, over out, on the current stream; False
        where the kernel refuses it."""
        one, factor = ctypes.c_float(1), ctypes.c_float(added is not None)
        space = _workspace(out.device)
        code = self._lib.cublasLtMatmul(
            self._handle, self._how, ctypes.byref(one), _pointer(right), self._right, _pointer(left), self._left,
            ctypes.byref(factor), _pointer(out if added is None else added), self._out, _pointer(out), self._out,
            self._algorithms[index], _pointer(space), _size(WORKSPACE),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        return bool(code == 0)

    def _made(self, name: str, *arguments: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        _check(getattr(self._lib, f"cublasLt{name}")(ctypes.byref(made), *arguments))
        return made

    def _layout(self, kind: int, rows: int, columns: int, lie: Lie) -> ctypes.c_void_p:
        """A matrix [rows, columns] as the library names it: by columns, so that contiguous rows are its columns."""
        extents = (rows, columns) if lie.turned else (columns, rows)
        numbers = *map(ctypes.c_uint64, extents), ctypes.c_int64(lie.stride)
        made = ctypes.c_void_p()
        _check(self._lib.cublasLtMatrixLayoutCreate(ctypes.byref(made), kind, *numbers))
        return made


def version() -> int:
    """That of the library: major, minor and patch in a number."""
    library, _ = _library(torch.cuda.current_device())
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return int(library.cublasLtGetVersion())


def sum_of(total: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
    """total [M, N] + left [M, K] @ right [K, N] in memory of its own: one pass over the total, as the product is
    written, where torch first copies it. Over the total itself the library would round the product before it adds it,
    as it does on Hopper. None where the library is not asked for such a sum, or has no kernel."""
    if not (left.is_cuda and total.dtype is left.dtype and total.is_contiguous() and left.numel() and total.numel()):
        return None
    shape, device = Shape.of(left, right), left.device.index
    if shape is None or not is_aligned(total, total.shape[1]) or _path() is None:
        return None
    if device != torch.cuda.current_device():  # of which the library's handles and torch's current stream are
        return None
    product, out = _product(shape, device), torch.empty_like(total)
    if not product.count:
        return None
    return out if product.run(kernel_of_sum(shape, product, total, left, right), left, right, out, total) else None


def _first(shape: Shape, product: Product, total: Tensor, left: Tensor, right: Tensor) -> int:
    """The kernel that the library would take itself."""
    return 0


kernel_of_sum: Callable[[Shape, Product, Tensor, Tensor, Tensor], int] = _first
"""Which kernel makes a sum of a total and a product; tuning chooses others (`tuned_products.py`)."""


@functools.cache
def _product(shape: Shape, device: int) -> Product:
    """The product of a shape on the current device."""
    return Product(shape)


def is_aligned(matrix: Tensor, stride: int = 0) -> bool:
    """Whether all rows, or columns, begin where kernels can read many numbers at once; `stride` apart, if not one after
    the other."""
    stride = stride or matrix.shape[-1]
    return not (matrix.data_ptr() % ALIGNMENT or stride * matrix.element_size() % ALIGNMENT)


def _size(number: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(number)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


_WITHOUT = "run without --tune-products; sums with a residual need a package compiled with --disable fuse-residual"


def _check(code: int) -> None:
    if code:
        raise PackageError(f"cuBLASLt gives status {code}", hint=_WITHOUT)


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    """Memory of the kernels: products of a device run one after the other."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


@functools.cache
def _library(device: int) -> tuple[Any, ctypes.c_void_p]:
    """The library that torch has loaded, and a handle of the current device."""
    path = _path()
    if path is None:
        raise PackageError("torch has not loaded cuBLASLt", hint=_WITHOUT)
    library, handle = ctypes.CDLL(path), ctypes.c_void_p()
    _check(library.cublasLtCreate(ctypes.byref(handle)))
    return library, handle


@functools.cache
def _path() -> str | None:
    """Where the library lies that torch has loaded, if it has."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.is_file() else []
    return next((line.split()[-1] for line in lines if "libcublasLt.so" in line), None)
