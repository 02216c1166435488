"""What a generated kernel is before it is compiled: source text, torch twin, signature and launches, all as plain data.

A `KernelSpec` describes one *kernel site*: a Python function over tensors that runs one or more GPU launches. It holds
no code objects and survives JSON, so that a package can be built in one process and read in another.

Extents are small expressions, kept as data so that the runtime can evaluate them without the compiler:

    8                      an integer
    "rows"                 a name: `rows` (product of the leading dims of the inputs), `sms` (multiprocessors of the
                           device), one of the kernel's own `dims`, or one that an input's shape binds
    ["cdiv", "rows", 4]    `add`, `mul`, `cdiv` (division rounded up), `min`, `max` of two expressions

A tensor's shape is a tuple of expressions; `"*"` in first place stands for the leading dims, equal for all tensors. A
name that is not known yet when an input is read is bound by that input's extent (`("B", "H", "S", 128)`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Expression = int | str | Sequence[Any]

TRITON_DTYPES = {
    "f32": "fp32",
    "bf16": "bf16",
    "f16": "fp16",
    "f64": "fp64",
    "i64": "i64",
    "i32": "i32",
    "bool": "i1",
}
"""mgraph's dtype name → the name in a Triton signature."""

TRITON_LANGUAGE_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
"""The floats that kernels take, by mgraph's dtype name → the name in Triton's language."""

FLAT = ", flatten=True"
"""Of a loop over tiles which asks for what the next one needs before it ends with one, which takes shared memory of its
own."""
LOG2E, LN2 = math.log2(math.e), math.log(2)
"""Kernels take exponentials and logarithms to the base 2."""
LOWEST = -3.0e38
"""A maximum of nothing: minus infinity would give no number where it is subtracted from itself."""

ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8, "i64": 8, "i32": 4, "bool": 1}
"""Bytes of one element, by mgraph's dtype name."""

STRIDE = "_stride_"
"""Between a tensor's name and the index of a dim in an argument that is a stride, in elements."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a kernel: its name in the source, its dtype (mgraph's name) and its shape of expressions.

    A tensor is contiguous, unless an input is `strided`: then it has any strides, and the kernel takes those that it
    needs as arguments `<name>_stride_<dim>`. An output has the strides of the input that `like` names (as
    torch.empty_like gives them), or is the input that `alias` names, written in place.

    An input that is to lie `beside` another has its columns in turns with that one's: one element further, with the
    same strides, of which the last is 2. Launches for `aligned` tensors are given that one alone, read both through it,
    and are left out of calls in which they lie otherwise.

    `many` is a list of tensors of any shapes (`shape` is `("*",)`), of which the kernel takes the first, see `Lists`.
    """

    name: str
    dtype: str
    shape: tuple[Expression, ...]
    strided: bool = False
    like: str = ""
    alias: str = ""
    beside: str = ""
    many: bool = False


@dataclass(frozen=True)
class Lists:
    """How a kernel over lists of tensors is cut: `chunk` elements a program, all from one entry of the lists.

    Its launches take the tables that `runtime/multi_tensor.py` describes by name: `owners` and `chunks`, `sizes`,
    `<list>_at`, `numbers` (values, each with the number of consecutive entries that it is of), and `unit`, an i32 that
    is 16 in the aligned variant. They and their grids may use `blocks`, the number of programs, and `before`, that of
    the launches of this function before this one.
    """

    chunk: int
    numbers: Mapping[str, tuple[tuple[float, int], ...]]

    def argument_types(self, lists: Sequence[str]) -> dict[str, str]:
        """The type of each argument that the tables bring."""
        tables = {"owners": "*i32", "chunks": "*i32", "sizes": "*i64", **{f"{name}_at": "*i64" for name in lists}}
        return {**tables, **dict.fromkeys(self.numbers, "*fp32")}


@dataclass(frozen=True)
class Launch:
    """One GPU launch: a function of `kernels.py`, its arguments in order, and its grid.

    An argument is the name of a tensor (passed as a pointer), of a dim or of a stride (passed as an i32). `aligned`
    says that every row of every tensor starts on a 16-byte boundary if the tensor does and its strides are multiples
    of 16 elements, so that a variant for aligned pointers and strides pays. `most_registers` bounds those of a thread,
    so that several blocks share a multiprocessor; 0 leaves it to the compiler. Where `when` is 0, a call leaves the
    launch out: so a site has several ways to do its work, chosen by shapes. `takes` says which calls it is for: `all`,
    those whose tensors are `aligned`, for which alone it is compiled then, or `others`: so a site has a way that only
    such tensors can go. A `large` one needs more shared memory than GPUs other than sm_90 and sm_100 may have: where a
    package is for such ones it is left out, and the dim that is its `when` is 0. Programs of one that is `spread` work
    long, a few on each multiprocessor: it does not come early (`early.py`) where those that are free first would take
    the share of the others. With `by_row` its programs are those of the rows of the extent `T`, one row after another,
    and it can be made for some of them: of these tensors, which have so many elements for each row, it is then handed
    what follows the first.
    """

    function: str
    args: tuple[str, ...]
    grid: tuple[Expression, ...]
    num_warps: int
    num_stages: int
    aligned: bool
    most_registers: int = 0
    when: Expression = 1
    takes: str = "all"
    large: bool = False
    spread: bool = False
    by_row: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class KernelSpec:
    """One kernel site: `name(*inputs) -> outputs`.

    `source` is the text of its Triton functions, `twin` the text of a torch function of the same name and signature,
    which may call the runtime's ops as `rt`. `scratch` tensors live for one call only. `dims` are named extents in the
    order in which they are evaluated.
    """

    name: str
    source: str
    twin: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    scratch: tuple[TensorSpec, ...]
    launches: tuple[Launch, ...]
    dims: Mapping[str, Expression] = field(default_factory=dict)
    lists: Lists | None = None

    def argument_types(self, launch: Launch) -> dict[str, str]:
        """The Triton signature of a launch: argument name (`x_ptr` for tensor `x`) → type such as `*bf16` or `i32`."""
        tensors = {tensor.name: tensor for tensor in (*self.inputs, *self.outputs, *self.scratch)}
        tables = self.lists.argument_types([t.name for t in self.inputs if t.many]) if self.lists else {}
        types = {}
        for name in launch.args:
            if name in tensors:
                types[f"{name}_ptr"] = "*" + TRITON_DTYPES[tensors[name].dtype]
            elif name in tables:
                types[f"{name}_ptr"] = tables[name]
            else:
                assert name in self._bound() or self.is_stride(name), (
                    f"kernel {self.name}: argument {name} is no tensor, no dim and no stride"
                )
                types[name] = "i32"
        return types

    def is_even(self, argument: str, kind: str) -> bool:
        """Whether the aligned variant may count on an argument being a multiple of 16."""
        return kind.startswith("*") or self.is_stride(argument) or (self.lists is not None and argument == "unit")

    def is_stride(self, argument: str) -> bool:
        """Whether an argument is the stride of a tensor that may have any strides."""
        tensor, mark, dim = argument.rpartition(STRIDE)
        strided = any(t.name == tensor and (t.strided or t.like) for t in (*self.inputs, *self.outputs))
        return bool(mark) and dim.isdigit() and strided

    def _bound(self) -> set[str]:
        """All names that extents may be written with."""
        extents = (extent for tensor in self.inputs for extent in tensor.shape)
        listed = {"blocks", "before", "unit"} if self.lists else set()
        return {"rows", "sms", *listed, *self.dims, *(e for e in extents if isinstance(e, str) and e != "*")}

    def to_data(self) -> dict[str, Any]:
        """The spec as JSON-ready data, texts included."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> KernelSpec:
        """The inverse of `to_data`."""

        def tensors(key: str) -> tuple[TensorSpec, ...]:
            return tuple(TensorSpec(**{**item, "shape": _frozen(item["shape"])}) for item in data[key])

        frozen = ("args", "grid", "when", "by_row")
        launches = tuple(
            Launch(**{**item, **{name: _frozen(item[name]) for name in frozen}}) for item in data["launches"]
        )
        dims = {name: _frozen(value) for name, value in data["dims"].items()}
        lists = data.get("lists")
        if lists is not None:
            lists = Lists(lists["chunk"], {name: _frozen(runs) for name, runs in lists["numbers"].items()})
        return KernelSpec(
            data["name"],
            data["source"],
            data["twin"],
            tensors("inputs"),
            tensors("outputs"),
            tensors("scratch"),
            launches,
            dims,
            lists,
        )


def _frozen(value: Any) -> Any:
    """JSON lists as tuples, all the way down, so that specs compare equal after a round trip."""
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def kernels_text(specs: Sequence[KernelSpec], helper: str = "") -> str:
    """The whole text of a package's `kernels.py`, with a function that kernels call before them."""
    header = '"""Triton kernels of this package: the source of the binaries under cubin/."""\n\nimport triton\n'
    texts = [text.strip() for text in (helper, *(spec.source for spec in specs)) if text]
    return header + "import triton.language as tl\n" + "".join(f"\n\n{text}\n" for text in texts)


def reference_text(specs: Sequence[KernelSpec]) -> str:
    """The whole text of a package's `reference.py`."""
    header = '"""Torch twins of this package\'s kernels: same names, arguments and results."""\n\nimport torch\n'
    body = "".join(f"\n\n{spec.twin.strip()}\n" for spec in specs)
    runtime = "\nfrom mgraph.runtime import v1 as rt\n" if "rt." in body else ""
    return header + runtime + body
