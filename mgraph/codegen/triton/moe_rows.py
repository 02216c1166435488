"""Rows of a mixture of experts, to and from tokens, as Triton source and torch twin.

    combine         y[t]        = sum over k of weights[t, k] * rows[place[t, k]]      products rounded as the op says
    combine_grad    drows[r]    = dy[t] * weights[t, k]                                r = place[t, k]
                    dweights[t, k] = sum of dy[t] * rows[r]
    dispatch_grad   dx[t]       = sum over k of drows[place[t, k]] + more[place[t, k]]     more: only where there is

in f32, each result rounded once. `order` says which pair t * K + k a row is of; a small launch turns it round, so that
`place` says which row a pair has. A program is then at one token: what the token has is read or written once, the sums
are in the order of k, and each row, of which all columns lie together, is read and written once, wherever it lies. With
offsets, rows past the last one are of no expert: they are neither read nor written, and count for 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgraph.codegen.triton.kernel import ITEM_BYTES, TRITON_LANGUAGE_DTYPES, KernelSpec, Launch, TensorSpec
from mgraph.ir.graph import Node
from mgraph.ir.types import DType

MOST_CHOICES = 32
"""Experts a token, up to which the rows of a token are all under way at once."""

MOST_ELEMENTS = 32768
"""Elements of a token's rows that a program has at once: 128 a thread of 8 warps."""

WASTE = 1 / 16
"""Share of idle lanes, where a row ends within a tile, up to which a wider tile is taken."""

PLACES = 256
"""Rows whose place one program of the small launch writes."""


@dataclass(frozen=True)
class MoeRows:
    """One instance: columns of a row, rows a token, the dtype of rows and tokens, that of the weights (none of the
    dispatch), that of the products (of `moe_combine` alone), whether there are `more` rows to add, and how many experts
    there are where some rows are of none of them (else 0)."""

    width: int
    choices: int
    dtype: str
    weights: str = ""
    products: str = "f32"
    more: bool = False
    experts: int = 0

    @property
    def aligned(self) -> bool:
        """Whether every row starts on a 16-byte boundary when the tensor does."""
        return self.width * ITEM_BYTES[self.dtype] % 16 == 0


def problem_of(node: Node) -> MoeRows | str:
    """The instance that a node `moe_combine`, `moe_combine_grad` or `moe_dispatch_grad` is, or why there is none."""
    operands = {"moe_combine": ("rows", "weights"), "moe_combine_grad": ("dy", "rows", "weights")}
    roles = operands.get(node.op, ("rows",))
    types = {role: value.tensor for role, value in zip(roles, node.operands, strict=False)}
    for role, tensor in types.items():
        if tensor.dtype.text not in TRITON_LANGUAGE_DTYPES:
            return f"{role} is {tensor.dtype.text}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    rows, weights = types["rows"], types.get("weights")
    if "dy" in types and types["dy"].dtype != rows.dtype:
        return f"dy is {types['dy'].dtype.text} and rows are {rows.dtype.text}; the kernel takes one dtype"
    width, choices = rows.shape[1], weights.shape[1] if weights else node.attrs["top_k"]
    if not isinstance(width, int):
        return f"the width {width} of a row is not a known number"
    if not isinstance(choices, int) or choices > MOST_CHOICES:
        return f"a token has {choices} rows; the kernel takes up to {MOST_CHOICES}"
    dtype = node.attrs.get("dtype", DType.F32)
    products = dtype.text if isinstance(dtype, DType) else str(dtype)
    offsets = next((v.tensor for v in node.operands if v.tensor.dtype is DType.I32), None)
    experts = 0 if offsets is None else offsets.shape[0]
    if not isinstance(experts, int):
        return f"the number {experts} of experts is not known"
    more = node.op == "moe_dispatch_grad" and node.operands[-1].tensor == rows
    if products not in TRITON_LANGUAGE_DTYPES:
        return f"the products are {products}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    return MoeRows(width, choices, rows.dtype.text, weights.dtype.text if weights else "", products, more, experts)


@dataclass(frozen=True)
class Tuning:
    """How a kernel is cut: columns per tile (a power of two), and warps."""

    columns: int
    num_warps: int


def sum_tuning(problem: MoeRows) -> Tuning:
    """8 columns a thread, of all rows of the token at once: in 16-bit dtypes one load of 16 bytes a row. The widest
    tile of which next to nothing idles; else that of which the least does."""
    widths = (2048, 1024, 512) if problem.width > 256 else (_power(problem.width),)
    idle = {columns: -problem.width % columns / problem.width for columns in widths}
    best = min(widths, key=lambda columns: idle[columns])
    columns = next((columns for columns in widths if idle[columns] <= WASTE), best)
    return Tuning(columns, max(1, columns // 256))


def gradient_tuning(problem: MoeRows) -> Tuning:
    """All columns in one tile, since the token's are then read once, or as many as 8 warps have room for; 64 elements
    of the token's rows a thread, or 128. Lanes past the end of a row wait, but take nothing from memory."""
    choices = _power(problem.choices)
    columns = min(_power(problem.width), MOST_ELEMENTS // choices)
    return Tuning(columns, min(8, max(1, choices * columns // 2048)))


def _power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()


def combine(name: str, problem: MoeRows, cut: Tuning | None = None) -> KernelSpec:
    """The site `y = name(rows, weights, order[, offsets])`: rows [T*K, width], weights [T, K], order i64 [T*K], offsets
    i32 [E] → y [T, width]."""
    options = f"{_also(problem)}, dtype=torch.{TRITON_LANGUAGE_DTYPES[problem.products]}"
    twin = _twin(name, f"moe_combine(rows, weights, order{options})", "y[t] = sum of weights[t, k] * rows[r]")
    return _sum(name, problem, cut, twin, ("rows", "weights"), "y")


def dispatch_grad(name: str, problem: MoeRows, cut: Tuning | None = None) -> KernelSpec:
    """The site `dx = name(drows, order[, offsets][, more])`: drows and more [T*K, width], order i64 [T*K], offsets i32
    [E] → dx [T, width]."""
    more, added = (", more", " + more[r]") if problem.more else ("", "")
    others = ", others=True" if problem.experts else ""
    call = f"moe_dispatch_grad(drows, order{_also(problem)}{more}, top_k={problem.choices}{others})"
    return _sum(name, problem, cut, _twin(name, call, f"dx[t] = sum of drows[r]{added}"), ("drows",), "dx")


def _sum(
    name: str, problem: MoeRows, cut: Tuning | None, twin: str, inputs: tuple[str, ...], output: str
) -> KernelSpec:
    cut = cut or sum_tuning(problem)
    grid = ("mul", "T", -(-problem.width // cut.columns))
    more = ("more",) if problem.more else ()
    args = (*inputs, *more, *_offsets(problem), "places", output)
    of_pairs = ("places", "weights") if problem.weights else ("places",)
    by_row = (*((tensor, problem.choices) for tensor in of_pairs), (output, problem.width))
    return KernelSpec(
        name=name,
        source=_places_source(name) + _sum_source(name, problem, cut, inputs[0], output),
        twin=twin,
        inputs=(
            *(_tensor(tensor, problem) for tensor in inputs),
            *_order(problem),
            *(_tensor(tensor, problem) for tensor in more),
        ),
        outputs=(TensorSpec(output, problem.dtype, ("T", problem.width)),),
        scratch=(TensorSpec("places", "i32", ("R",)),),
        launches=(
            _places_launch(name),
            Launch(f"{name}_tokens", args, (grid,), cut.num_warps, 1, problem.aligned, by_row=by_row),
        ),
        dims=_dims(problem),
    )


def combine_grad(name: str, problem: MoeRows, cut: Tuning | None = None) -> KernelSpec:
    """The site `drows, dweights = name(dy, rows, weights, order[, offsets])`: dy [T, width], the others as in
    `combine`; drows and dweights are like rows and weights."""
    cut = cut or gradient_tuning(problem)
    inputs = ("dy", "rows", "weights")
    args = (*inputs, *_offsets(problem), "places", "drows", "dweights")
    call = f"moe_combine_grad(dy, rows, weights, order{_also(problem)})"
    return KernelSpec(
        name=name,
        source=_places_source(name) + _gradient_source(name, problem, cut, args),
        twin=_twin(name, call, "Gradient of y[t] = sum of weights[t, k] * rows[r]"),
        inputs=(*(_tensor(tensor, problem) for tensor in inputs), *_order(problem)),
        outputs=(_tensor("drows", problem), _tensor("dweights", problem)),
        scratch=(TensorSpec("places", "i32", ("R",)),),
        launches=(
            _places_launch(name),
            Launch(f"{name}_tokens", args, ("T",), cut.num_warps, num_stages=1, aligned=problem.aligned),
        ),
        dims=_dims(problem),
    )


def _tensor(name: str, problem: MoeRows) -> TensorSpec:
    if name.endswith("weights"):
        return TensorSpec(name, problem.weights, ("T", problem.choices))
    return TensorSpec(name, problem.dtype, ("T" if name == "dy" else "R", problem.width))


def _order(problem: MoeRows) -> tuple[TensorSpec, ...]:
    offsets = (TensorSpec("offsets", "i32", (problem.experts,)),) if problem.experts else ()
    return TensorSpec("order", "i64", ("R",)), *offsets


def _offsets(problem: MoeRows) -> tuple[str, ...]:
    """Arguments of a launch."""
    return ("offsets",) if problem.experts else ()


def _also(problem: MoeRows) -> str:
    """What follows the order in a call."""
    return ", offsets" if problem.experts else ""


def _dims(problem: MoeRows) -> dict[str, tuple[str, str, int]]:
    """The number of tokens, which without weights no input says."""
    return {} if problem.weights else {"T": ("cdiv", "R", problem.choices)}


def _places_launch(name: str) -> Launch:
    return Launch(f"{name}_places", ("order", "places", "R"), (("cdiv", "R", PLACES),), 4, num_stages=1, aligned=True)


def _places_source(name: str) -> str:
    return f'''
@triton.jit
def {name}_places(order_ptr, places_ptr, R):
    """places[order[r]] = r, {PLACES} rows per program."""
    row = tl.program_id(0) * {PLACES} + tl.arange(0, {PLACES})
    pair = tl.load(order_ptr + row, mask=row < R, other=0)
    tl.store(places_ptr + pair, row, mask=row < R)

'''


def _sum_source(name: str, problem: MoeRows, cut: Tuning, rows: str, output: str) -> str:
    width, choices, columns = problem.width, problem.choices, cut.columns
    blocks = -(-width // columns)
    whole = f"column < {width}" if width % columns else ""
    mask = f", mask={whole}" if whole else ""
    inside = f", mask={f'({whole}) & ' if whole else ''}(place < end), other=0.0" if problem.experts else mask
    token, block = "tl.program_id(0)", ""
    if blocks > 1:
        token, block = f"tl.program_id(0) // {blocks}", f"tl.program_id(0) % {blocks} * {columns} + "
    terms = [f"value = tl.load({rows}_ptr + element{inside}).to(tl.float32)"]
    operands, formula = [f"{rows}_ptr"], f"{rows}[places[t, k]]"
    if problem.weights:
        operands, formula = [*operands, "weights_ptr"], f"weights[t, k] * {formula}"
        narrow = f".to(tl.{TRITON_LANGUAGE_DTYPES[problem.products]}).to(tl.float32)"
        terms += [
            "weight = tl.load(weights_ptr + pair).to(tl.float32)",
            f"value = (value * weight){narrow if problem.products != 'f32' else ''}",
        ]
    if problem.more:
        operands, formula = [*operands, "more_ptr"], f"{formula} + more[places[t, k]]"
        terms.append(f"value += tl.load(more_ptr + element{inside}).to(tl.float32)")
    end = ""
    if problem.experts:
        operands, end = [*operands, "offsets_ptr"], f"    end = tl.load(offsets_ptr + {problem.experts - 1})\n"
    body = "".join(f"        {line}\n" for line in [*terms, "total += value"])
    return f'''
@triton.jit
def {name}_tokens({", ".join(operands)}, places_ptr, {output}_ptr):
    """{output}[t] = sum of {formula}

    One token and {columns} of its {width} columns per program.
    """
    token = {token}
    column = {block}tl.arange(0, {columns})
    total = tl.zeros([{columns}], dtype=tl.float32)
{end}    for choice in tl.static_range({choices}):
        pair = token * {choices} + choice
        place = tl.load(places_ptr + pair).to(tl.int64)
        element = place * {width} + column
{body}    target = {output}_ptr + token.to(tl.int64) * {width} + column
    tl.store(target, total.to(tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]}){mask})
'''


def _gradient_source(name: str, problem: MoeRows, cut: Tuning, args: Sequence[str]) -> str:
    width, choices, columns = problem.width, problem.choices, cut.columns
    padded = _power(choices)
    real = f"choice < {choices}"
    few, ragged = padded > choices, width % columns != 0
    of_choice = f", mask={real}, other=0" if few else ""
    of_column = f", mask=column < {width}, other=0.0" if ragged else ""
    kept = f"(row < end){f' & ({real})' if few else ''}" if problem.experts else real
    inside = [f"({kept})[:, None]"] * bool(few or problem.experts) + [f"(column < {width})[None, :]"] * ragged
    dtype = TRITON_LANGUAGE_DTYPES[problem.dtype]
    body = [
        f"dy = tl.load(dy_ptr + token.to(tl.int64) * {width} + column{of_column}).to(tl.float32)",
        f"element = row[:, None] * {width} + column[None, :]",
        *([f"inside = {' & '.join(inside)}"] if inside else []),
        f"rows = tl.load(rows_ptr + element{', mask=inside, other=0.0' if inside else ''}).to(tl.float32)",
        "drows = dy[None, :] * weight[:, None]",
        f"tl.store(drows_ptr + element, drows.to(tl.{dtype}){', mask=inside' if inside else ''})",
    ]
    lines = [
        "token = tl.program_id(0)",
        *([f"end = tl.load(offsets_ptr + {problem.experts - 1})"] if problem.experts else []),
        f"choice = tl.arange(0, {padded})",
        f"pair = token * {choices} + choice",
        f"row = tl.load(places_ptr + pair{of_choice}).to(tl.int64)",
        f"weight = tl.load(weights_ptr + pair{of_choice}).to(tl.float32)",
    ]
    if columns >= width:
        lines += [f"column = tl.arange(0, {columns})", *body, "dots = tl.sum(rows * dy[None, :], axis=1)"]
    else:
        lines += [
            f"dots = tl.zeros([{padded}], dtype=tl.float32)",
            f"for start in range(0, {width}, {columns}):",
            *(f"    {line}" for line in [f"column = start + tl.arange(0, {columns})", *body]),
            "    dots += tl.sum(rows * dy[None, :], axis=1)",
        ]
    mask = f", mask={real}" if few else ""
    lines.append(f"tl.store(dweights_ptr + pair, dots.to(tl.{TRITON_LANGUAGE_DTYPES[problem.weights]}){mask})")
    text = "".join(f"    {line}\n" for line in lines)
    return f'''
@triton.jit
def {name}_tokens({", ".join(f"{arg}_ptr" for arg in args)}):
    """The gradients of the rows and weights of one token, of which r = places[t, k] are the rows.

    drows[r]       = dy[t] * weights[t, k]
    dweights[t, k] = sum of dy[t] * rows[r]        over {width} columns
    """
{text}'''


def _twin(name: str, call: str, formula: str) -> str:
    arguments = call[call.index("(") + 1 : call.rindex(")")].split(", ")
    names = ", ".join(argument for argument in arguments if "=" not in argument)
    return f'''
def {name}({names}):
    """{formula}, r the row that stands for pair t * K + k."""
    return rt.{call}
'''
