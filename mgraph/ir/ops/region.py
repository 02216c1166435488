"""A region: pointwise steps and reductions of rows over one iteration space, as one node.

Its attributes hold the body. Values are numbered: the operands first, then what each step makes. A step is an op, the
numbers of its operands, and its attributes as pairs; `results` are the numbers of what the region gives. `takes` is an
operand that nothing reads afterwards: the first result like it may have its memory.

    %y = region(%x, %w) {results = [3], steps = [["aten.tanh.default", [0], []], ["aten.mul.Tensor", [2, 1], []]]}

computes y = tanh(x) * w. The *space* of a region is the shape that all values broadcast to: leading dims, and a last
dim that is a known number. A reduction is over that last dim; it keeps it as 1, or drops it, after which values are
*squeezed*: they have the leading dims alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from mgraph.ir.dims import Dim, as_dim
from mgraph.ir.graph import AttrValue, Node
from mgraph.ir.opdef import REQUIRED, define_op, op_def
from mgraph.ir.ops.cost import traffic
from mgraph.ir.types import DType, TensorType

MOST_LEADING = 4
"""Leading dims that a space may have."""

LONGEST_ROW = 16384
"""Elements of a row that a reduction takes: it is held whole."""

POWERS = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0, 4.0)
"""Exponents that have a form without logarithms."""

_DTYPES = (DType.F32, DType.BF16, DType.F16, DType.I64, DType.I32, DType.BOOL)

COMPARISONS = frozenset(
    f"aten.{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Scalar", "Tensor")
)
STEEP = COMPARISONS | {"aten.ceil.default", "aten.floor.default", "aten.isnan.default"}
"""Steps whose results jump: they see a number as its dtype has it, rounded."""
_OF_ANY = COMPARISONS | {
    *(f"aten.{name}.{kind}" for name in ("add", "sub", "mul", "div") for kind in ("Scalar", "Tensor")),
    "aten.abs.default",
    "aten.clamp.default",
    "aten.clamp_max.default",
    "aten.clamp_min.default",
    "aten.masked_fill.Scalar",
    "aten.maximum.default",
    "aten.minimum.default",
    "aten.neg.default",
    "aten.rsub.Scalar",
    "aten.square.default",
    "aten.where.ScalarOther",
    "aten.where.ScalarSelf",
    "aten.where.self",
    "cast",
}
"""Steps that may make integers, too."""
_OF_BOOLS = frozenset(
    {
        "aten.bitwise_and.Tensor",
        "aten.bitwise_not.default",
        "aten.bitwise_or.Tensor",
        "aten.logical_and.default",
        "aten.logical_not.default",
        "aten.logical_or.default",
    }
)
_OF_FLOATS = frozenset(
    f"aten.{name}"
    for name in (
        *(f"{unary}.default" for unary in ("ceil", "cos", "elu", "erf", "exp", "exp2", "expm1", "floor", "gelu")),
        *(f"{unary}.default" for unary in ("isnan", "leaky_relu", "log", "log1p", "log2", "reciprocal", "relu")),
        *(f"{unary}.default" for unary in ("rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt", "tanh")),
        *(f"{unary}_backward.default" for unary in ("gelu", "leaky_relu", "sigmoid", "silu", "softplus")),
        *(f"{unary}_backward.default" for unary in ("tanh", "threshold")),
        "addcmul.default",
        "pow.Tensor_Scalar",
    )
)
POINTWISE = _OF_ANY | _OF_BOOLS | _OF_FLOATS
ROWWISE = frozenset(
    {
        "aten._log_softmax_backward_data.default",
        "aten._softmax.default",
        "aten._softmax_backward_data.default",
        "aten.log_softmax.int",
        "aten.softmax.int",
    }
)
"""Steps that reduce rows on the way, and give rows."""
REDUCTIONS = frozenset(
    {
        "aten.amax.default",
        "aten.amin.default",
        "aten.logsumexp.default",
        "aten.mean.dim",
        "aten.sum.dim_IntList",
        "aten.var.correction",
    }
)
"""Steps that give one number a row."""
UNSQUEEZE = "aten.unsqueeze.default"
STEPS = POINTWISE | ROWWISE | REDUCTIONS | {UNSQUEEZE}
"""All ops that a region takes."""

_NUMBERS = "alpha beta correction exponent input_scale max min negative_slope other scale self threshold value"
_ATTRS = {*_NUMBERS.split(), "approximate", "args", "dim", "dtype", "half_to_float", "input_dtype", "keepdim"} | {
    "self_is_result"
}


class Step(NamedTuple):
    """One step of a body: an op, the numbers of its operands, and its attributes as pairs."""

    op: str
    operands: tuple[int, ...]
    attrs: tuple[tuple[str, AttrValue], ...] = ()

    @property
    def reduces(self) -> bool:
        """Whether it sums, or looks for the largest, over rows."""
        return self.op in ROWWISE or self.op in REDUCTIONS


def steps_of(attrs: Mapping[str, Any]) -> tuple[Step, ...]:
    """The steps that the attributes of a region hold."""
    return tuple(Step(op, tuple(operands), tuple(map(tuple, pairs))) for op, operands, pairs in attrs["steps"])


@lru_cache(maxsize=1024)
def value_types(operands: tuple[TensorType, ...], steps: tuple[Step, ...]) -> tuple[TensorType, ...]:
    """The types of all values of a body; raises ValueError where operands do not fit."""
    types = list(operands)
    for step in steps:
        (made,) = op_def(step.op).result_types([types[i] for i in step.operands], dict(step.attrs))
        assert isinstance(made, TensorType)
        types.append(made)
    return tuple(types)


def step_refusal(op: str, attrs: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType) -> str | None:
    """Why a node cannot be a step of a region, by itself; None if it can."""
    if op not in STEPS:
        return f"{op} is no pointwise op and no reduction"
    dtypes = [type_.dtype for type_ in (*operands, result)]
    for dtype in dtypes:
        if dtype not in _DTYPES:
            return f"{op} of {dtype.text}; a region takes {', '.join(d.text for d in _DTYPES)}"
    for name, value in attrs.items():
        if name not in _ATTRS or not _is_plain(value):
            return f"{op} has the attribute {name} = {value}"
    if op in _OF_BOOLS and set(dtypes) != {DType.BOOL}:
        return f"{op} of {' and '.join(sorted({d.text for d in dtypes}))}, not of bool alone"
    if op in _OF_FLOATS | ROWWISE and not all(d.is_float for d in dtypes[:-1]):
        return f"{op} of integers"
    mixed = {d.is_float for d in dtypes[:-1]} == {True, False} and op not in (
        "aten.where.self",
        "aten.masked_fill.Scalar",
    )
    if mixed and any(d in (DType.BF16, DType.F16) for d in dtypes):
        return f"{op} joins integers with numbers of 16 bits, to which they are rounded"
    if attrs.get("self_is_result"):
        return f"{op} of its own result"
    if op == "aten.pow.Tensor_Scalar" and float(attrs["exponent"]) not in POWERS:
        return f"{op} with exponent {attrs['exponent']}"
    if (op in ROWWISE or op in REDUCTIONS) and not _over_last(attrs, len(operands[0].shape)):
        return f"{op} over dim {attrs.get('dim')}, not over the last one alone"
    if op == UNSQUEEZE and attrs["dim"] not in (-1, len(operands[0].shape)):
        return f"{op} at dim {attrs['dim']}, not after the last one"
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | DType)


def _over_last(attrs: Mapping[str, Any], rank: int) -> bool:
    dims = attrs.get("dim")
    dims = dims if isinstance(dims, tuple) else (dims,)
    return rank > 0 and len(dims) == 1 and dims[0] in (-1, rank - 1)


@dataclass(frozen=True)
class Space:
    """The space of a region, the numbers of its squeezed values, and whether there are reductions."""

    shape: tuple[Dim, ...]
    squeezed: frozenset[int]
    reduces: bool

    @property
    def columns(self) -> int:
        """The last extent."""
        last = self.shape[-1]
        assert isinstance(last, int)
        return last

    def role(self, value: int, type_: TensorType) -> str | None:
        """`full`: the value has the shape of the space; `row`: one element a row; None: it is broadcast otherwise."""
        if value in self.squeezed:
            return "row" if type_.shape == self.shape[:-1] else None
        if type_.shape == self.shape:
            return "full"
        return "row" if type_.shape == (*self.shape[:-1], 1) else None


def space_of(types: Sequence[TensorType], steps: Sequence[Step], results: Sequence[int]) -> Space | str:
    """The space of a body whose values have these types, or why they have none."""
    first = len(types) - len(steps)
    squeezed: set[int] = set()
    for number, step in enumerate(steps, first):
        wide = [i for i in step.operands if types[i].shape != ()]
        lost = [i for i in wide if i in squeezed]
        if step.op == UNSQUEEZE:
            if not lost:
                return "a dim is added to what is no sum of rows"
        elif lost and (len(lost) < len(wide) or step.reduces):
            return "a number a row, without its dim, meets what has it"
        elif lost or (step.op in REDUCTIONS and not dict(step.attrs).get("keepdim", False)):
            squeezed.add(number)
    shape = _joint([t.shape for i, t in enumerate(types) if i not in squeezed])
    if isinstance(shape, str):
        return shape
    if not shape or not isinstance(shape[-1], int):
        return f"the last dim {shape[-1]} is not a known number" if shape else "there are no dims"
    if len(shape) > MOST_LEADING + 1:
        return f"there are {len(shape)} dims; a region takes up to {MOST_LEADING + 1}"
    space = Space(shape, frozenset(squeezed), any(step.reduces for step in steps))
    if space.reduces and space.columns > LONGEST_ROW:
        return f"a row of {space.columns} is reduced; a region takes up to {LONGEST_ROW}"
    for step in steps:
        if step.reduces and any(types[i].shape[-1] != space.columns for i in step.operands):
            return "what is reduced is narrower than the rows of the region"
    for result in results:
        if space.role(result, types[result]) is None:
            return f"{types[result]} leaves a region over {list(space.shape)}"
    return space


def _joint(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...] | str:
    """The shape that all shapes broadcast to."""
    joint: tuple[Dim, ...] = max(shapes, key=len, default=())
    for shape in shapes:
        head = joint[: len(joint) - len(shape)]
        pairs = list(zip(joint[len(head) :], shape, strict=True))
        if any(a != b and 1 not in (a, b) for a, b in pairs):
            return f"the shapes {list(joint)} and {list(shape)} do not broadcast"
        joint = (*head, *(b if a == 1 else a for a, b in pairs))
    return joint


def taken_by(types: Sequence[TensorType], space: Space, results: Sequence[int], operand: int) -> int | None:
    """The place of the first result that fits into the memory of an operand: both full, of one dtype."""
    if types[operand].shape != space.shape:
        return None
    fitting = (i for i, n in enumerate(results) if types[n].dtype is types[operand].dtype)
    return next((i for i in fitting if space.role(results[i], types[results[i]]) == "full"), None)


def _region(*operands: Any, steps: Any, results: Any, takes: int | None = None) -> Any:
    """What the steps make, one after the other, each rounded as its op rounds; a kernel may keep f32 between them."""
    values = list(operands)
    for step in steps_of({"steps": steps}):
        op = op_def(step.op)
        values.append(op.body(*(values[i] for i in step.operands), **op.complete(dict(step.attrs))))
    return tuple(values[i] for i in results)


def _infer(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    steps = steps_of(attrs)
    made = value_types(tuple(types), steps)
    space = space_of(made, steps, attrs["results"])
    if isinstance(space, str):
        raise ValueError(space)
    return tuple(made[i] for i in attrs["results"])


def _flops(node: Node) -> Dim:
    types = value_types(tuple(v.tensor for v in node.operands), steps_of(node.attrs))
    return as_dim(sum(type_.numel for type_ in types[len(node.operands) :]))


define_op(
    "region",
    _region,
    attrs={"steps": REQUIRED, "results": REQUIRED, "takes": None},
    infer=_infer,
    flops=_flops,
    bytes=traffic,
    compute_dtype="f32",
)
