"""What a generated kernel is before it is compiled: source text, torch twin, signature and launches, all as plain data.

A `KernelSpec` describes one *kernel site*: a Python function over tensors that runs one or more GPU launches. It holds
no code objects and survives JSON, so that a package can be built in one process and read in another.

Extents are small expressions, kept as data so that the runtime can evaluate them without the compiler:

    8                      an integer
    "rows"                 a name: `rows` (product of the leading dims of the inputs), `sms` (multiprocessors of the
                           device) or one of the kernel's own `dims`
    ["cdiv", "rows", 4]    `mul`, `cdiv` (division rounded up), `min`, `max` of two expressions

A tensor's shape is a tuple of expressions; `"*"` in first place stands for the leading dims, equal for all tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Expression = int | str | Sequence[Any]

TRITON_DTYPES = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "f64": "fp64", "i64": "i64", "i32": "i32"}
"""mgraph's dtype name → the name in a Triton signature."""

ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8, "i64": 8, "i32": 4}
"""Bytes of one element, by mgraph's dtype name."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a kernel: its name in the source, its dtype (mgraph's name) and its shape of expressions."""

    name: str
    dtype: str
    shape: tuple[Expression, ...]


@dataclass(frozen=True)
class Launch:
    """One GPU launch: a function of `kernels.py`, its arguments in order, and its grid.

    An argument is the name of a tensor (passed as a pointer) or of a dim (passed as an i32). `aligned` says that every
    row of every tensor starts on a 16-byte boundary if the tensor does, so that a variant for aligned pointers pays.
    """

    function: str
    args: tuple[str, ...]
    grid: tuple[Expression, ...]
    num_warps: int
    num_stages: int
    aligned: bool


@dataclass(frozen=True)
class KernelSpec:
    """One kernel site: `name(*inputs) -> outputs`.

    `source` is the text of its Triton functions, `twin` the text of a torch function of the same name and signature.
    `scratch` tensors live for one call only. `dims` are named extents in the order in which they are evaluated.
    """

    name: str
    source: str
    twin: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    scratch: tuple[TensorSpec, ...]
    launches: tuple[Launch, ...]
    dims: Mapping[str, Expression] = field(default_factory=dict)

    def argument_types(self, launch: Launch) -> dict[str, str]:
        """The Triton signature of a launch: argument name (`x_ptr` for tensor `x`) → type such as `*bf16` or `i32`."""
        tensors = {tensor.name: tensor for tensor in (*self.inputs, *self.outputs, *self.scratch)}
        types = {}
        for name in launch.args:
            if name in tensors:
                types[f"{name}_ptr"] = "*" + TRITON_DTYPES[tensors[name].dtype]
            else:
                assert name == "rows" or name in self.dims, (
                    f"kernel {self.name}: argument {name} is no tensor and no dim"
                )
                types[name] = "i32"
        return types

    def to_data(self) -> dict[str, Any]:
        """The spec as JSON-ready data, texts included."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> KernelSpec:
        """The inverse of `to_data`."""

        def tensors(key: str) -> tuple[TensorSpec, ...]:
            return tuple(TensorSpec(item["name"], item["dtype"], _frozen(item["shape"])) for item in data[key])

        launches = tuple(
            Launch(**{**item, "args": tuple(item["args"]), "grid": _frozen(item["grid"])}) for item in data["launches"]
        )
        dims = {name: _frozen(value) for name, value in data["dims"].items()}
        return KernelSpec(
            data["name"],
            data["source"],
            data["twin"],
            tensors("inputs"),
            tensors("outputs"),
            tensors("scratch"),
            launches,
            dims,
        )


def _frozen(value: Any) -> Any:
    """JSON lists as tuples, all the way down, so that specs compare equal after a round trip."""
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def kernels_text(specs: Sequence[KernelSpec]) -> str:
    """The whole text of a package's `kernels.py`."""
    header = '"""Triton kernels of this package: the source of the binaries under cubin/."""\n\nimport triton\n'
    return header + "import triton.language as tl\n" + "".join(f"\n\n{spec.source.strip()}\n" for spec in specs)


def reference_text(specs: Sequence[KernelSpec]) -> str:
    """The whole text of a package's `reference.py`."""
    header = '"""Torch twins of this package\'s kernels: same names, arguments and results."""\n\nimport torch\n'
    return header + "".join(f"\n\n{spec.twin.strip()}\n" for spec in specs)
