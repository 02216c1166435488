"""Rows for other ranks, packed, and the rows that come back, summed by token, as Triton source and torch twin.

    places    places[t, d] = how many tokens before t go to rank d, or -1 if t has none of its experts
    pack      y[d * C + places[t, d]] = x[t]       for each rank d that token t goes to; places is -1 where it does not
    unpack    y[t] = sum over these ranks d of rows[d * C + places[t, d]]        in f32, rounded once
    combine   y[t] = sum over choices k of weights[t, k] * rows[places[t, k]]    the same, where a place is a row

C is the room for each rank: T, or within a budget a part of it. A program has some tokens: what they have is read or
written once, wherever it goes. Tokens are counted by a program of their own each, and a second launch adds those of the
programs before. Rows that no token goes to are left alone, unless `fill` says what they are (numbers of experts, of
which such a row has none).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from mgraph.codegen.triton.kernel import TRITON_LANGUAGE_DTYPES, Expression, KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.moe_order import power
from mgraph.codegen.triton.rope import lines_of
from mgraph.ir.graph import Node
from mgraph.ir.types import DType

MOST_RANKS = 64
"""Ranks, up to which the code for each is written out."""

ELEMENTS = 2048
"""Elements that a program has at once, 8 a thread of 8 warps."""

FILLED = 1024
"""Elements that one program of the launch that fills writes."""

COUNTED = 256
"""Tokens that one program counts."""

CHUNK = 16
"""Programs whose counts are added at a time."""

_PACKED = (*TRITON_LANGUAGE_DTYPES, "i64")


@dataclass(frozen=True)
class Exchange:
    """One instance: columns of a row, ranks, dtype, what rows are that no token goes to (None: anything), for which
    part of the tokens each rank has room, and whether what is summed has weights."""

    width: int
    ranks: int
    dtype: str
    fill: int | None = None
    part: float = 1.0
    weighted: bool = False

    @property
    def room(self) -> Expression:
        """For how many of `T` tokens each rank has room: `part` of them, rounded up."""
        share = Fraction(str(self.part))
        return "T" if share == 1 else ("cdiv", ("mul", "T", share.numerator), share.denominator)

    @property
    def columns(self) -> int:
        """Columns of a tile, a power of two."""
        return min(ELEMENTS, power(self.width))

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return ELEMENTS // self.columns


def problem_of(node: Node) -> Exchange | str:
    """The instance that a node `pack_rows`, `unpack_rows` or `padded_combine` is, or why there is no kernel for it."""
    rows, *weights, places = (value.tensor for value in node.operands)
    if weights and not (weights[0].dtype is DType.F32 and node.attrs["dtype"] is DType.F32):
        return f"weights are {weights[0].dtype.text}, products {node.attrs['dtype']}; the kernel has f32"
    dtypes = _PACKED if node.op == "pack_rows" else tuple(TRITON_LANGUAGE_DTYPES)
    if rows.dtype.text not in dtypes:
        return f"rows are {rows.dtype.text}; the kernel takes {', '.join(dtypes)}"
    if len(rows.shape) != 2 or not isinstance(rows.shape[1], int):
        return f"the width of rows {rows} is not a known number"
    ranks = places.shape[1]
    if not isinstance(ranks, int) or ranks > MOST_RANKS:
        return f"there are {ranks} ranks; the kernel takes a known number up to {MOST_RANKS}"
    fill = node.attrs.get("fill")
    part = 0.0 if weights else float(str(node.attrs.get("part", 1.0)))
    filled = None if fill is None else int(str(fill))
    return Exchange(rows.shape[1], ranks, rows.dtype.text, filled, part, bool(weights))


def pack(name: str, problem: Exchange) -> KernelSpec:
    """The site `y = name(x, places)`: x [T, width], places i64 [T, ranks] → y [ranks * C, width]."""
    fill = "" if problem.fill is None else f", fill={problem.fill}"
    body = [
        *_tile(problem),
        f"x = tl.load(x_ptr + token.to(tl.int64)[:, None] * {problem.width} + column[None, :]{_mask('real')})",
        *_ranks(problem),
        "    goes = real & (place >= 0)[:, None]",
        f"    tl.store(y_ptr + row[:, None] * {problem.width} + column[None, :], x, mask=goes)",
    ]
    launch = Launch(name, ("x", "places", "y", "T", "C"), _grid(problem), 8, 1, aligned=True)
    filling: tuple[Launch, ...] = ()
    source = _source(name, "x", "y[d * C + places[t, d]] = x[t]", body)
    if problem.fill is not None:
        filling = (Launch(f"{name}_fill", ("y", "elements"), (("cdiv", "elements", FILLED),), 4, 1, aligned=True),)
        source += _fill_source(name, problem)
    return KernelSpec(
        name=name,
        source=source,
        twin=f'''
def {name}(x, places):
    """The rows that go to each of {problem.ranks} ranks: y[d * C + places[t, d]] = x[t]."""
    return rt.pack_rows(x, places{fill}{_part(problem)})
''',
        inputs=(_tensor("x", "T", problem), _places(problem)),
        outputs=(_tensor("y", ("mul", "C", problem.ranks), problem),),
        scratch=(),
        launches=(*filling, launch),
        dims={"C": problem.room, "elements": ("mul", "C", problem.ranks * problem.width)},
    )


def unpack(name: str, problem: Exchange) -> KernelSpec:
    """The site `y = name(rows, places)`: rows [ranks * C, width], places i64 [T, ranks] → y [T, width]; with weights
    f32 [T, ranks] `name(rows, weights, places)`."""
    weights = ["weights"] if problem.weighted else []
    formula = "y[t] = sum over choices k of weights[t, k] * rows[places[t, k]]"
    formula = formula if weights else "y[t] = sum over ranks d of rows[d * C + places[t, d]]"
    call = "padded_combine(rows, weights, places, dtype=torch.float32)"
    call = call if weights else f"unpack_rows(rows, places{_part(problem)})"
    body = [
        *_tile(problem),
        f"total = tl.zeros([{problem.tokens}, {problem.columns}], dtype=tl.float32)",
        *_ranks(problem),
        "    goes = real & (place >= 0)[:, None]",
        f"    part = tl.load(rows_ptr + row[:, None] * {problem.width} + column[None, :], mask=goes, other=0.0)",
        *(
            [
                f"    weight = tl.load(weights_ptr + token * {problem.ranks} + rank, mask=token < T, other=0.0)",
                "    total += part.to(tl.float32) * weight[:, None]",
            ]
            if weights
            else ["    total += part.to(tl.float32)"]
        ),
        f"target = y_ptr + token.to(tl.int64)[:, None] * {problem.width} + column[None, :]",
        f"tl.store(target, total.to(tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]}){_mask('real')})",
    ]
    return KernelSpec(
        name=name,
        source=_source(name, "_ptr, ".join(["rows", *weights]), formula, body),
        twin=f'''
def {name}({", ".join(["rows", *weights, "places"])}):
    """The sum of a token's rows: {formula}."""
    return rt.{call}
''',
        inputs=(
            _tensor("rows", "R", problem),
            *(TensorSpec(weight, "f32", ("T", problem.ranks)) for weight in weights),
            _places(problem),
        ),
        outputs=(_tensor("y", "T", problem),),
        scratch=(),
        launches=(Launch(name, ("rows", *weights, "places", "y", "T", "C"), _grid(problem), 8, 1, aligned=True),),
        dims={"C": problem.room},
    )


def _tensor(name: str, rows: Expression, problem: Exchange) -> TensorSpec:
    return TensorSpec(name, problem.dtype, (rows, problem.width))


def _places(problem: Exchange) -> TensorSpec:
    return TensorSpec("places", "i64", ("T", problem.ranks))


def _part(problem: Exchange) -> str:
    return "" if problem.part == 1.0 else f", part={problem.part}"


def _grid(problem: Exchange) -> tuple[Expression, ...]:
    across = -(-problem.width // problem.columns)
    return (("mul", ("cdiv", "T", problem.tokens), across),)


def _tile(problem: Exchange) -> list[str]:
    """The tokens and columns of a program, and which of them are real."""
    across = -(-problem.width // problem.columns)
    return [
        f"token = tl.program_id(0) // {across} * {problem.tokens} + tl.arange(0, {problem.tokens})",
        f"column = tl.program_id(0) % {across} * {problem.columns} + tl.arange(0, {problem.columns})",
        f"real = (token < T)[:, None] & (column < {problem.width})[None, :]",
    ]


def _ranks(problem: Exchange) -> list[str]:
    """The head of a loop over ranks: where the row of each token lies among all."""
    return [
        f"for rank in tl.static_range({problem.ranks}):",
        f"    place = tl.load(places_ptr + token * {problem.ranks} + rank, mask=token < T, other=-1)",
        "    row = tl.cast(rank * C, tl.int64) + tl.maximum(place, 0)",
    ]


def _mask(name: str) -> str:
    return f", mask={name}"


def _source(name: str, rows: str, formula: str, body: list[str]) -> str:
    return f'''
@triton.jit
def {name}({rows}_ptr, places_ptr, y_ptr, T, C):
    """{formula}"""
{lines_of(*body)}
'''


def _fill_source(name: str, problem: Exchange) -> str:
    dtype = TRITON_LANGUAGE_DTYPES.get(problem.dtype, "int64")
    body = lines_of(
        f"element = tl.program_id(0).to(tl.int64) * {FILLED} + tl.arange(0, {FILLED})",
        f"tl.store(y_ptr + element, tl.full([{FILLED}], {problem.fill}, tl.{dtype}), mask=element < elements)",
    )
    return f'''
@triton.jit
def {name}_fill(y_ptr, elements):
    """Every element is {problem.fill}."""
{body}
'''


@dataclass(frozen=True)
class Places:
    """One instance of `expert_places`: experts, experts a token, and ranks that share the experts."""

    experts: int
    choices: int
    ranks: int


def places_problem_of(node: Node) -> Places | str:
    """The instance that a node `expert_places` is, or why there is no kernel for it."""
    choices, ranks = node.operands[0].tensor.shape[1], int(str(node.attrs["ranks"]))
    if not isinstance(choices, int):
        return f"the number {choices} of experts a token is not known"
    if ranks > MOST_RANKS:
        return f"there are {ranks} ranks; the kernel takes up to {MOST_RANKS}"
    return Places(int(str(node.attrs["num_experts"])), choices, ranks)


def places(name: str, problem: Places) -> KernelSpec:
    """The site `places = name(indices)`: indices i64 [T, K], experts' numbers or that of all experts for none → places
    i64 [T, ranks]."""
    programs: Expression = ("cdiv", "T", COUNTED)
    args = ("indices", "places", "counts", "T")
    return KernelSpec(
        name=name,
        source=_count_source(name, problem) + _add_source(name, problem),
        twin=f'''
def {name}(indices):
    """Where each token lies among those that go to a rank; -1 where it does not go."""
    return rt.expert_places(indices, num_experts={problem.experts}, ranks={problem.ranks})
''',
        inputs=(TensorSpec("indices", "i64", ("T", problem.choices)),),
        outputs=(TensorSpec("places", "i64", ("T", problem.ranks)),),
        scratch=(TensorSpec("counts", "i32", (programs, problem.ranks)),),
        launches=(
            Launch(f"{name}_count", args, (programs,), 4, 1, aligned=False),
            Launch(f"{name}_add", args[1:], (programs,), 4, 1, aligned=False),
        ),
    )


def _count_source(name: str, problem: Places) -> str:
    columns = power(problem.ranks)
    body = lines_of(
        f"token = tl.program_id(0) * {COUNTED} + tl.arange(0, {COUNTED})",
        f"rank = tl.arange(0, {columns})",
        f"goes = tl.zeros([{COUNTED}, {columns}], dtype=tl.int32)",
        f"for choice in tl.static_range({problem.choices}):",
        f"    pair = token * {problem.choices} + choice",
        f"    which = tl.load(indices_ptr + pair, mask=token < T, other={problem.experts})",
        f"    owner = which.to(tl.int32) // {problem.experts // problem.ranks}",
        "    goes = tl.where(owner[:, None] == rank[None, :], 1, goes)",
        "before = tl.cumsum(goes, axis=0) - goes",
        "place = tl.where(goes > 0, before, -1).to(tl.int64)",
        f"real = (rank < {problem.ranks})[None, :] & (token < T)[:, None]",
        f"tl.store(places_ptr + token[:, None] * {problem.ranks} + rank[None, :], place, mask=real)",
        f"count_ptr = counts_ptr + tl.program_id(0) * {problem.ranks}",
        f"tl.store(count_ptr + rank, tl.sum(goes, axis=0), mask=rank < {problem.ranks})",
    )
    return f'''
@triton.jit
def {name}_count(indices_ptr, places_ptr, counts_ptr, T):
    """The places of {COUNTED} tokens among themselves, and how many of them go to each rank."""
{body}
'''


def _add_source(name: str, problem: Places) -> str:
    columns = power(problem.ranks)
    body = lines_of(
        f"rank = tl.arange(0, {columns})",
        f"earlier = tl.zeros([{columns}], dtype=tl.int32)",
        f"for start in range(0, tl.program_id(0), {CHUNK}):",
        f"    program = start + tl.arange(0, {CHUNK})",
        f"    real = (program < tl.program_id(0))[:, None] & (rank < {problem.ranks})[None, :]",
        f"    at = program[:, None] * {problem.ranks} + rank[None, :]",
        "    earlier += tl.sum(tl.load(counts_ptr + at, mask=real, other=0), axis=0)",
        f"token = tl.program_id(0) * {COUNTED} + tl.arange(0, {COUNTED})",
        f"real = (rank < {problem.ranks})[None, :] & (token < T)[:, None]",
        f"at = places_ptr + token[:, None] * {problem.ranks} + rank[None, :]",
        "place = tl.load(at, mask=real, other=-1)",
        "tl.store(at, tl.where(place >= 0, place + earlier[None, :], place), mask=real)",
    )
    return f'''
@triton.jit
def {name}_add(places_ptr, counts_ptr, T):
    """The places of {COUNTED} tokens among all."""
{body}
'''
