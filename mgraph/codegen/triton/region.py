"""Regions: pointwise steps and reductions of rows in one kernel, as Triton source and torch twin.

    y_k[i, j] = steps(x_0[i, j], x_1[i, j], ...)        i: index over the leading dims (a row), j: of `size` columns

The steps are those of the node (`mgraph.ir.ops.region`), written one after the other. Numbers of f32, bf16 and f16 are
f32 from where they are loaded to where a result is stored, which rounds once; a cast to a narrower dtype rounds where
it stands, and comparisons see numbers as their dtype would have them. Whole numbers and bools are what they are.

An operand has the shape of the space or broadcasts to it, with any strides over the leading dims where it has all
columns; results are contiguous, or one is the operand that the node may take, in place. Without reductions rows are cut
into tiles; with them a program holds rows whole, and sums in f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mgraph.codegen.torch_forms import Call, expression
from mgraph.codegen.triton.kernel import ITEM_BYTES, Expression, KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.region_forms import FORMS, OF_ROWS, Rows
from mgraph.ir.aten import argument_names, call_arguments
from mgraph.ir.dims import Dim
from mgraph.ir.graph import Node, Value
from mgraph.ir.ops.region import (
    COMPARISONS,
    STEEP,
    Space,
    Step,
    space_of,
    step_refusal,
    steps_of,
    taken_by,
    value_types,
)
from mgraph.ir.torch_bridge import torch_dtype_name
from mgraph.ir.types import DType, TensorType

LINE_ELEMENTS = 64
"""No row is cut into pieces shorter than this: 128 bytes of a 16-bit dtype are a line of the cache."""

WASTE = 1 / 16
"""Share of idle lanes, where a row ends within a tile, up to which a wider tile is taken."""

FLOATS = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
WHOLE = {"i64": "int64", "i32": "int32", "bool": "int1"}
LANGUAGE = FLOATS | WHOLE
"""Triton's names of the dtypes that a region takes."""

Extents = tuple[str | int, ...]


@dataclass(frozen=True)
class Region:
    """One instance of the op: number of leading dims, columns, operands (dtype and shape of each, where `n0`, `n1`, ...
    are the leading extents), the dtypes of all values, the steps, the squeezed values, and the numbers of results.
    `in_place`: a result, and the operand that it overwrites."""

    leading: int
    size: int
    operands: tuple[tuple[str, Extents], ...]
    dtypes: tuple[str, ...]
    steps: tuple[Step, ...]
    squeezed: frozenset[int]
    results: tuple[tuple[int, Extents], ...]
    in_place: tuple[int, int] | None = None

    @property
    def reduces(self) -> bool:
        """Whether rows must be whole."""
        return any(step.reduces for step in self.steps)

    @property
    def extents(self) -> tuple[str, ...]:
        """The leading extents by name, major first, without those that are always 1."""
        named = {n for _, extents in self.operands for n in extents[:-1]}
        return tuple(name for name in (f"n{i}" for i in range(self.leading)) if name in named)

    def is_wide(self, operand: int) -> bool:
        """Whether an operand has all columns."""
        extents = self.operands[operand][1]
        return bool(extents) and extents[-1] == self.size

    def strided(self, operand: int) -> tuple[int, ...]:
        """The dims of an operand whose strides the kernel takes: leading ones that are not broadcast."""
        extents = self.operands[operand][1]
        return tuple(i for i, n in enumerate(extents[:-1]) if n != 1) if self.is_wide(operand) else ()


def problem_of(node: Node) -> Region | str:
    """The instance that a node `region` is, or why there is no kernel for it."""
    steps, results = steps_of(node.attrs), node.attrs["results"]
    assert isinstance(results, tuple)
    types = value_types(tuple(value.tensor for value in node.operands), steps)
    first = len(node.operands)
    for step, made in zip(steps, types[first:], strict=True):
        refusal = step_refusal(step.op, dict(step.attrs), [types[i] for i in step.operands], made)
        if refusal is not None:
            return refusal
    numbers = [int(number) for number in results]
    space = space_of(types, steps, numbers)
    if isinstance(space, str):
        return space
    leading = len(space.shape) - 1
    named = [_extents(type_, number, space) for number, type_ in enumerate(types)]
    takes = node.attrs.get("takes")
    place = taken_by(types, space, numbers, takes) if isinstance(takes, int) else None
    return Region(
        leading,
        space.columns,
        tuple((type_.dtype.text, extents) for type_, extents in zip(types[:first], named, strict=False)),
        tuple(type_.dtype.text for type_ in types),
        steps,
        space.squeezed,
        tuple((number, named[number]) for number in numbers),
        None if place is None or not isinstance(takes, int) else (place, takes),
    )


def _extents(type_: TensorType, number: int, space: Space) -> Extents:
    """A shape in the names of a kernel's extents."""
    names: Extents = (*(f"n{i}" for i in range(len(space.shape) - 1)), space.columns)
    names = names[:-1] if number in space.squeezed else names
    wanted: Sequence[Dim] = type_.shape
    return tuple(1 if n == 1 else name for n, name in zip(wanted, names[len(names) - len(wanted) :], strict=True))


@dataclass(frozen=True)
class Tuning:
    """How a kernel is cut: rows and columns per tile (powers of two), and warps."""

    rows: int
    columns: int
    num_warps: int = 4


def tuning(problem: Region) -> Tuning:
    """Pointwise: 16 bytes of the widest tensor a thread, twice that of few tensors, in the widest tile of which next to
    nothing idles. Whole rows: tiles of at least 2,048 elements, and warps for up to 64 of them a thread and tensor."""
    if problem.reduces:
        columns = 1 << (problem.size - 1).bit_length()
        rows = max(1, 2048 // columns) if problem.leading else 1
        return Tuning(rows, columns, min(16, max(4, rows * columns // 512)))
    stored = [problem.operands[i][0] for i in range(len(problem.operands)) if problem.is_wide(i)]
    stored += [problem.dtypes[number] for number, extents in problem.results if extents[-1:] == (problem.size,)]
    elements = 2048 // max([2, *(ITEM_BYTES[dtype] for dtype in stored)]) * (2 if len(stored) <= 4 else 1)
    least = min(LINE_ELEMENTS, 1 << (problem.size - 1).bit_length())
    widths = [elements >> i for i in range(elements.bit_length()) if elements >> i >= least]
    idle = {width: -problem.size % width / problem.size for width in widths}
    columns = next((width for width in widths if idle[width] <= WASTE), min(widths, key=lambda width: idle[width]))
    return Tuning(elements // columns if problem.leading else 1, columns)


def forward(name: str, problem: Region, cut: Tuning | None = None) -> KernelSpec:
    """The site `results = name(*operands)`."""
    cut = cut or tuning(problem)
    extents = problem.extents
    count: Expression = 1
    for extent in extents:
        count = extent if count == 1 else ("mul", count, extent)
    inputs = [f"x{i}" for i in range(len(problem.operands))]
    outputs = [f"y{i}" for i in range(len(problem.results))]
    strides = [f"x{i}_stride_{d}" for i in range(len(inputs)) for d in problem.strided(i)]
    alias = {} if problem.in_place is None else {outputs[problem.in_place[0]]: inputs[problem.in_place[1]]}
    args = (*inputs, *(y for y in outputs if y not in alias), "count", *extents[1:], *strides)
    grid: Expression = ("cdiv", "count", cut.rows)
    blocks = -(-problem.size // cut.columns)
    return KernelSpec(
        name=name,
        source=_source(name, problem, cut, args, inputs, outputs),
        twin=_twin(name, problem, inputs),
        inputs=tuple(
            TensorSpec(x, dtype, shape, strided=bool(problem.strided(i)))
            for i, (x, (dtype, shape)) in enumerate(zip(inputs, problem.operands, strict=True))
        ),
        outputs=tuple(
            TensorSpec(y, problem.dtypes[number], shape, alias=alias.get(y, ""))
            for y, (number, shape) in zip(outputs, problem.results, strict=True)
        ),
        scratch=(),
        launches=(
            Launch(
                name,
                args,
                (("mul", grid, blocks) if blocks > 1 else grid,),
                cut.num_warps,
                num_stages=1,
                aligned=problem.size % 16 == 0,
            ),
        ),
        dims={"count": count},
    )


def _source(
    name: str, problem: Region, cut: Tuning, args: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]
) -> str:
    tensors = {*inputs, *outputs}
    signature = ", ".join(f"{arg}_ptr" if arg in tensors else arg for arg in args)
    if len(args) > 6:
        signature = f"\n    {signature},\n"
    blocks = -(-problem.size // cut.columns)
    lines = [
        f"tile = tl.program_id(0){f' // {blocks}' * (blocks > 1)}",
        f"row = tile{f' * {cut.rows}' * (cut.rows > 1)} + tl.arange(0, {cut.rows})",
        f"column = {f'tl.program_id(0) % {blocks} * {cut.columns} + ' * (blocks > 1)}tl.arange(0, {cut.columns})",
    ]
    masks = {"row": "row_inside" * (cut.rows > 1), "column": "column_inside" * (problem.size % cut.columns != 0)}
    lines += ["row_inside = (row < count)[:, None]"] * bool(masks["row"])
    lines += [f"column_inside = (column < {problem.size})[None, :]"] * bool(masks["column"])
    masks["full"] = " & ".join(filter(None, (masks["row"], masks["column"])))
    masks = {role: f", mask={mask}" if mask else "" for role, mask in masks.items()}
    lines += _index_lines(problem)
    lines += [_load(problem, i, masks) for i in range(len(inputs))]
    values = list(inputs)
    exact = set(range(len(inputs)))
    for number, step in enumerate(problem.steps, len(inputs)):
        values.append(f"v{number}")
        lines += _step_lines(problem, cut, number, step, values, exact)
    for y, (number, shape) in zip(outputs, problem.results, strict=True):
        narrow = f"{values[number]}.to(tl.{LANGUAGE[problem.dtypes[number]]})"
        full = shape[-1:] == (problem.size,) and number not in problem.squeezed
        where = f"row.to(tl.int64)[:, None] * {problem.size} + column[None, :]" if full else "row[:, None]"
        where = f"{y}_ptr + {where}"
        if problem.in_place is not None and outputs[problem.in_place[0]] == y:
            where = _place(problem, problem.in_place[1])
        lines.append(f"tl.store({where}, {narrow}{masks['full' if full else 'row']})")
    formula = "\n".join(f"    {line}" for line in _torch_lines(problem, values))
    body = "".join(f"    {line}\n" for line in lines)
    return f'''
@triton.jit
def {name}({signature}):
    """{cut.rows} row(s) by {cut.columns} of {problem.size} columns per program, in f32 from loads to stores.

{formula}
    {", ".join(f"{y} = {values[n]}" for y, (n, _) in zip(outputs, problem.results, strict=True))}
    """
{body}'''


def _index_lines(problem: Region) -> list[str]:
    """The index along each leading dim that an operand's place needs, of which rows are the product; in 64 bits."""
    extents = [shape for i, (_, shape) in enumerate(problem.operands) if _is_indexed(problem, i)]
    lead = problem.leading
    used = {lead - (len(shape) - 1) + d for shape in extents for d, n in enumerate(shape[:-1]) if n != 1}
    lines, rest = [], "row"
    for name in reversed(problem.extents):
        i = int(name[1:])
        if i in used:
            lines.append(f"index_{i} = ({rest}{f' % {name}' * (name != problem.extents[0])}).to(tl.int64)")
        rest = f"{rest} // {name}"
    return lines


def _is_indexed(problem: Region, operand: int) -> bool:
    """Whether the place of an operand in a row needs more than the number of the row."""
    _, extents = problem.operands[operand]
    present = tuple(n for n in extents[:-1] if n != 1)
    return bool(present) and (problem.is_wide(operand) or present != problem.extents)


def _load(problem: Region, operand: int, masks: dict[str, str]) -> str:
    """The line that loads an operand: a tile, a row of it, a column, or a single number."""
    dtype, extents = problem.operands[operand]
    wide, tall = problem.is_wide(operand), any(n != 1 for n in extents[:-1])
    mask = masks["full" if tall and wide else "row" if tall else "column"] if tall or wide else ""
    widened = ".to(tl.float32)" if dtype in FLOATS else ""
    return f"x{operand} = tl.load({_place(problem, operand)}{mask}){widened}"


def _place(problem: Region, operand: int) -> str:
    """Where the elements of an operand are that meet a tile."""
    _, extents = problem.operands[operand]
    name, wide = f"x{operand}", problem.is_wide(operand)
    lead = problem.leading - (len(extents) - 1)
    present = [d for d, n in enumerate(extents[:-1]) if n != 1]
    if wide:
        place = " + ".join(f"index_{lead + d} * {name}_stride_{d}" for d in present)
    elif not _is_indexed(problem, operand):
        place = "row.to(tl.int64)" if present else ""
    else:
        place = f"index_{lead + present[0]}"
        for d in present[1:]:
            place = f"({place}) * n{lead + d} + index_{lead + d}"
    return " + ".join([f"{name}_ptr"] + [f"({place})[:, None]"] * bool(place) + ["column[None, :]"] * wide)


def _step_lines(
    problem: Region, cut: Tuning, number: int, step: Step, values: Sequence[str], exact: set[int]
) -> list[str]:
    """The lines of one step. `exact`: values that are as their dtype has them, to which the step's may be added."""
    made, dtypes = problem.dtypes[number], [problem.dtypes[i] for i in step.operands]
    texts = []
    compares = step.op in COMPARISONS
    for i, dtype in zip(step.operands, dtypes, strict=True):
        rounds = step.op in STEEP or (step.op == "cast" and made in WHOLE)
        narrow = rounds and dtype in ("bf16", "f16") and i not in exact
        texts.append(f"{values[i]}.to(tl.{FLOATS[dtype]}).to(tl.float32)" if narrow else values[i])
    if step.op == "cast":
        if made in ("bf16", "f16"):
            exact.add(number)
        return [f"{values[number]} = {_cast(texts[0], dtypes[0], made)}"]
    wanted = made
    if compares or step.op == "aten.isnan.default":
        literal = any(isinstance(value, float) for _, value in step.attrs)
        floats = literal or any(dtype in FLOATS for dtype in dtypes)
        wanted = "f32" if floats else max(dtypes, key=lambda dtype: ITEM_BYTES[dtype])
    names = argument_names(step.op, len(step.operands), dict(step.attrs))
    arguments = {"zero": "0.0" if made in FLOATS else "0"}
    for name, text, dtype in zip(names, texts, dtypes, strict=True):
        condition = name in ("condition", "mask")
        arguments[name] = text if condition else _as(text, dtype, wanted)
    for name, value in step.attrs:
        if name != "args" and value is not None:
            arguments[name] = _number(value, wanted) if isinstance(value, int | float) else _literal(value)
    lines: list[str] = []
    if step.op in OF_ROWS:
        text = OF_ROWS[step.op](Rows(lines, values[number], problem.size, cut.columns), arguments)
    else:
        text = FORMS[step.op](arguments)
    return [*lines, f"{values[number]} = {text}"]


def _as(text: str, dtype: str, wanted: str) -> str:
    """A value of a dtype where another is wanted: floats are f32 already."""
    if dtype == wanted or (dtype in FLOATS and wanted in FLOATS):
        return text
    return f"{text}.to(tl.{'float32' if wanted in FLOATS else LANGUAGE[wanted]})"


def _cast(text: str, dtype: str, made: str) -> str:
    if made in ("bf16", "f16"):
        text = _as(text, dtype, "f32")
        return f"{text}.to(tl.{FLOATS[made]}).to(tl.float32)"
    if made == "bool":
        return f"{text} != 0"
    return _as(text, dtype, made)


def _number(value: float, wanted: str) -> str:
    """A number as Triton text, of the kind that is computed with."""
    if isinstance(value, bool) or wanted not in FLOATS:
        return repr(value)
    text = repr(float(value))
    return f'float("{text}")' if text.strip("-") in ("inf", "nan") else text


def _literal(value: Any) -> str:
    """An attribute as Python text."""
    if isinstance(value, DType):
        return f"torch.{torch_dtype_name(value)}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str):
        return f'"{value}"'
    return _number(value, "f32") if isinstance(value, float) else repr(value)


def _torch_lines(problem: Region, values: Sequence[str]) -> list[str]:
    """The steps as torch's statements."""
    first = len(problem.operands)
    held = [Value(name, TensorType(DType.parse(dtype), ())) for name, dtype in zip(values, problem.dtypes, strict=True)]
    lines = []
    for number, step in enumerate(problem.steps, first):
        texts = [values[i] for i in step.operands]
        attrs = dict(step.attrs)
        if step.op == "cast":
            text = f"{texts[0]}.to({_literal(attrs['dtype'])})"
        else:
            marked: dict[str, Any] = {k: v if k == "args" else _literal(v) for k, v in attrs.items()}
            positional, keywords = call_arguments(step.op, texts, marked)
            node = Node(step.op, tuple(held[i] for i in step.operands), (held[number],), attrs)
            text = expression(Call(step.op, positional, keywords, node))
            text = f"torch.nn.functional.{text[2:]}" if text.startswith("F.") else text
        lines.append(f"{values[number]} = {text}")
    return lines


def _twin(name: str, problem: Region, inputs: Sequence[str]) -> str:
    values = [*inputs, *(f"v{n}" for n in range(len(inputs), len(problem.dtypes)))]
    body = "".join(f"    {line}\n" for line in _torch_lines(problem, values))
    return f'''
def {name}({", ".join(inputs)}):
    """The steps of a region, one by one."""
{body}    return {", ".join(values[number] for number, _ in problem.results)}
'''
