"""Gated units of experts and their gradients, within the products before and after, as Triton source and torch twin.

    expert_glu        gate[r] = x[t] @ wg[e]      up[r] = x[t] @ wu[e]      y[r] = glu(gate[r], up[r])

of the token t and the expert e of row r, pair order[r] = t * K + k: rows of x are read where they lie, and only what is
activated is written, or gate and up beside it where a gradient needs them. The matrices may lie packed in one tensor,
as `halves` (gates, then ups) or in `pairs` (one after the other), and there may be biases, which lie alike.

    expert_glu_grad   g[r]  = dy[t] @ w[e]'               w: of the product after; dy: of what sums a token's rows
                      dgate[r], dup[r] = glu_grad(weights[t, k] * g[r], gate[r], up[r])
                      weighted[r]      = weights[t, k] * y[r]        for the gradient of w, with dy
                      dweights[t, k]   = g[r] . y[r]

so neither rows of dy nor the rows that were summed exist, and y is made again. Sums are in f32, of bf16 or f16; gate,
up and y are rounded where they would be if they were written. Of rows of no expert, past the last offset, only dweights
is written, as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgraph.codegen.triton.glu import Glu, backward_lines, forward_lines
from mgraph.codegen.triton.grouped import (
    LOW,
    WAVES,
    Cuts,
    Factor,
    Tiles,
    Tuning,
    bias_lines,
    depth_of,
    descriptor_lines,
    fitting,
    low_cuts,
    one_cut,
    parameters,
    product_lines,
    refusal,
    sources,
    store_lines,
    ways,
)
from mgraph.codegen.triton.kernel import TRITON_LANGUAGE_DTYPES, Expression, KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.moe_order import power
from mgraph.codegen.triton.rope import lines_of
from mgraph.ir.graph import Node

PART = 64
"""Columns of a tile that are worked on at a time after the sum."""

SUMMED = 256
"""Rows whose dot products one program of the last launch sums."""


@dataclass(frozen=True)
class ExpertGlu:
    """One instance of `expert_glu` or `expert_glu_grad`: experts, rows a token, widths of tokens and of units, whether
    the matrices are transposed ([E, out, in]), the unit, whether gate and up are kept, the dtype of the weights, how
    matrices and biases are packed, and the dtype of the biases."""

    experts: int
    choices: int
    inner: int
    width: int
    unit: Glu
    transposed: bool = False
    keep: bool = False
    weights: str = ""
    packed: str = ""
    bias: str = ""

    @property
    def tensors(self) -> dict[str, tuple[Expression, ...]]:
        """Matrices and biases of the forward, and their shapes."""
        names, width = (("w",), 2 * self.width) if self.packed else (("wg", "wu"), self.width)
        matrix = (self.experts, width, self.inner) if self.transposed else (self.experts, self.inner, width)
        biases = dict.fromkeys([f"b{name[1:]}" for name in names] if self.bias else (), (self.experts, width))
        return {**dict.fromkeys(names, matrix), **biases}

    @property
    def dtype(self) -> str:
        """Of all tensors but the weights."""
        return self.unit.dtype


def problem_of(node: Node) -> ExpertGlu | str:
    """The instance that a node is, or why there is no kernel for it."""
    gradient = node.op == "expert_glu_grad"
    if gradient:
        tokens, weights, _, _, w, gate, up = node.operands
        roles = {"dy is": tokens, "the matrices": w, "gate": gate, "up": up}
        if weights.tensor.dtype.text not in TRITON_LANGUAGE_DTYPES:
            return f"the weights are {weights.tensor.dtype.text}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    else:
        packed = str(node.attrs.get("packed", ""))
        tokens, _, _, w, *more = node.operands
        roles = {"x is": tokens, "the matrices": w}
        if not packed:
            roles["those of ups"], *more = more
        biases = {value.tensor.dtype.text for value in more}
        if len(biases) > 1 or not biases <= set(TRITON_LANGUAGE_DTYPES):
            return (
                f"the biases are {' and '.join(sorted(biases))}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
            )
    experts, inner, width = w.tensor.shape[0], tokens.tensor.shape[1], node.results[0].tensor.shape[1]
    if why := refusal(roles, experts, (inner, width), LOW):
        return why
    choices = node.attrs["top_k"]
    if not isinstance(choices, int):
        return f"the number {choices} of experts a token is not known"
    numbers: dict[str, Any] = {name: node.attrs.get(name, default) for name, default in _NUMBERS.items()}
    numbers = {name: float(number) for name, number in numbers.items()}
    if node.attrs["act"] != "quick_gelu":
        del numbers["alpha"]
    assert isinstance(experts, int) and isinstance(inner, int) and isinstance(width, int)
    return ExpertGlu(
        experts,
        choices,
        inner,
        width,
        Glu(width, 1, tokens.tensor.dtype.text, str(node.attrs["act"]), **numbers),
        bool(node.attrs.get("transpose_w", False)),
        bool(node.attrs.get("keep", False)),
        node.operands[1].tensor.dtype.text if gradient else "",
        "" if gradient else packed,
        "" if gradient else "".join(biases),
    )


_NUMBERS = {"alpha": Glu.alpha, "limit": 0.0, "offset": 0.0}


def forward_cuts(problem: ExpertGlu) -> Cuts:
    """Of many rows, 128 by 128 gates and as many ups: 8 warps have both sums in registers. Of few, lower tiles."""
    return low_cuts(problem.inner, problem.width, _many(problem, 128), factors=2)


def backward_tuning(problem: ExpertGlu) -> Tuning:
    """128 by 256: what follows the sum takes it in parts, so that only the sum itself fills the registers."""
    return _many(problem, 256)


def _many(problem: ExpertGlu, widest: int) -> Tuning:
    """Tiles of many rows, up to so many columns."""
    columns = widest if problem.width % widest == 0 else min(128, max(16, power(problem.width)))
    cut = Tuning(128, columns, depth_of(problem.inner, 64), 4, 4, group=16)
    return cut if columns < 128 else replace(cut, num_warps=8, num_stages=3, programs=WAVES, described=True)


def forward(name: str, problem: ExpertGlu, cuts: Cuts = ()) -> KernelSpec:
    """The site `y[, gate, up] = name(x, order, offsets, wg, wu[, bg, bu])`: x [T, inner], order i64 [R], offsets i32
    [E], wg and wu [E, inner, width] ([E, width, inner] if transposed), bg and bu [E, width]; of packed ones, `w` and
    `b` have twice the width → all [R, width]; gate and up where they are kept."""
    cuts = fitting(cuts or forward_cuts(problem), _factors(problem)[0])
    all_, dims = ways(name, problem.experts, problem.width, cuts)
    kept = ("gate", "up") if problem.keep else ()
    args = {tiles: ("x", "order", *problem.tensors, tiles.given, "y", *kept) for tiles in all_}
    return KernelSpec(
        name=name,
        source=sources(args, lambda tiles, given: _forward_source(problem, tiles, given)),
        twin=_forward_twin(name, problem),
        inputs=(
            TensorSpec("x", problem.dtype, ("T", problem.inner)),
            TensorSpec("order", "i64", ("R",)),
            TensorSpec("offsets", "i32", (problem.experts,)),
            *(
                TensorSpec(tensor, problem.dtype if tensor[0] == "w" else problem.bias, shape)
                for tensor, shape in problem.tensors.items()
            ),
        ),
        outputs=tuple(TensorSpec(output, problem.dtype, ("R", problem.width)) for output in ("y", *kept)),
        scratch=tuple(scratch for tiles in all_ for scratch in tiles.scratch()),
        launches=tuple(launch for tiles in all_ for launch in tiles.launches(args[tiles])),
        dims=dims,
    )


def fixed(name: str, problem: ExpertGlu) -> KernelSpec:
    """The site of `forward` in one cut."""
    return forward(name, problem, one_cut(forward_cuts(problem)))


def _factors(problem: ExpertGlu) -> tuple[list[Factor], list[str]]:
    """The products for gates and ups, and the names of their sums; of pairs that lie side by side, one product."""
    source = f"tl.load(order_ptr + row, mask=inside, other=0) // {problem.choices}"
    given = ("x", problem.inner, problem.width, problem.transposed, source)

    def factor(name: str, **where: Any) -> Factor:
        rows, inner, width, transposed, source = given
        return Factor(rows, name, inner, width, transposed, source, **where)

    both = {"tensor": "w", "whole": 2 * problem.width}
    if problem.packed == "pairs" and not problem.transposed:
        return [factor("w", **both, pairs=True)], ["total"]
    if problem.packed == "pairs":
        found = [factor("wg", **both, apart=2), factor("wu", **both, start=1, apart=2)]
    elif problem.packed:
        found = [factor("wg", **both), factor("wu", **both, start=problem.width)]
    else:
        found = [factor("wg"), factor("wu")]
    return found, ["gates", "ups"]


def _bias_lines(problem: ExpertGlu, tiles: Tiles) -> list[str]:
    if not problem.bias:
        return []
    row = 2 * problem.width
    places = {
        "": (("bg", problem.width, "column"), ("bu", problem.width, "column")),
        "halves": (("b", row, "column"), ("b", row, f"{problem.width} + column")),
        "pairs": (("b", row, "2 * column"), ("b", row, "1 + 2 * column")),
    }[problem.packed]
    return [
        line for total, place in zip(("gates", "ups"), places, strict=True) for line in bias_lines(tiles, total, *place)
    ]


def _forward_source(problem: ExpertGlu, tiles: Tiles, args: Sequence[str]) -> str:
    factors, totals = _factors(problem)
    cut, low = tiles.cut, f".to(tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]})"
    apart = [f"gates, ups = tl.split(tl.reshape(total, ({cut.rows}, {cut.columns}, 2)))"]
    lines = [
        *product_lines(factors, totals, tiles),
        *(apart if totals == ["total"] else ()),
        *_bias_lines(problem, tiles),
        f"gates = gates{low}",
        f"ups = ups{low}",
        "gate = gates.to(tl.float32)",
        "up = ups.to(tl.float32)",
        *forward_lines(problem.unit),
        *store_lines(tiles, ("y", f"y{low}"), *((("gate", "gates"), ("up", "ups")) if problem.keep else ())),
    ]
    return f'''
@triton.jit
def {tiles.body}({", ".join(parameters(args))}):
    """y[r] = {problem.unit.act}(x[t] @ wg[e]) * (x[t] @ wu[e]), {tiles.cut.rows} rows at a time."""
{tiles.loop(lines, descriptor_lines(factors, tiles))}'''


def backward(name: str, problem: ExpertGlu, cut: Tuning | None = None) -> KernelSpec:
    """The site `dgate, dup, weighted, dweights = name(dy, weights, order, offsets, w, gate, up)`: dy [T, inner],
    weights [T, K], w [E, width, inner] ([E, inner, width] if transposed), gate and up [R, width] → dgate, dup and
    weighted [R, width], dweights like weights."""
    cuts = fitting(((0, cut or backward_tuning(problem)),), [_back(problem)])
    (tiles,), dims = ways(name, problem.experts, problem.width, cuts)
    matrix = (problem.inner, problem.width) if problem.transposed else (problem.width, problem.inner)
    results = ("dgate", "dup", "weighted")
    args = ("dy", "weights", "order", "w", "gate", "up", tiles.given, *results, "dots", "R")
    dots = ("dots", "order", "offsets", "dweights", "R")
    wide = [TensorSpec(tensor, problem.dtype, ("R", problem.width)) for tensor in ("gate", "up", *results)]
    weights = TensorSpec("weights", problem.weights, ("T", problem.choices))
    return KernelSpec(
        name=name,
        source=sources({tiles: args}, lambda tiles, given: _backward_source(problem, tiles, given))
        + _dots_source(name, problem, tiles),
        twin=_backward_twin(name, problem),
        inputs=(
            TensorSpec("dy", problem.dtype, ("T", problem.inner)),
            weights,
            TensorSpec("order", "i64", ("R",)),
            TensorSpec("offsets", "i32", (problem.experts,)),
            TensorSpec("w", problem.dtype, (problem.experts, *matrix)),
            *wide[:2],
        ),
        outputs=(*wide[2:], TensorSpec("dweights", problem.weights, weights.shape)),
        scratch=(*tiles.scratch(), TensorSpec("dots", "f32", (tiles.across, "R"))),
        launches=(
            *tiles.launches(args),
            Launch(f"{name}_dots", dots, (("cdiv", "R", SUMMED),), 4, 1, aligned=False),
        ),
        dims=dims,
    )


def _back(problem: ExpertGlu) -> Factor:
    """The product backward. Its matrices are those of the one forward, so it takes them the other way round."""
    return Factor("dy", "w", problem.inner, problem.width, not problem.transposed, f"pair // {problem.choices}")


def _backward_source(problem: ExpertGlu, tiles: Tiles, args: tuple[str, ...]) -> str:
    factor = _back(problem)
    part = min(PART, tiles.cut.columns)
    names = [f"part_{start}" for start in range(0, tiles.cut.columns, part)]
    lines = [
        "pair = tl.load(order_ptr + row, mask=inside, other=0)",
        *product_lines([factor], ["total"], tiles),
        "weight = tl.load(weights_ptr + pair, mask=inside, other=0.0).to(tl.float32)",
        f"dots = tl.zeros([{tiles.cut.rows}], dtype=tl.float32)",
        # What follows needs many registers an element: it is done with some columns after the others.
        *_split_lines("total", names, tiles.cut.rows, tiles.cut.columns),
        *(line for i, name in enumerate(names) for line in _part_lines(problem, tiles, name, i * part, part)),
        "tl.store(dots_ptr + tl.cast(block, tl.int64) * R + row, dots, mask=inside)",
    ]
    return f'''
@triton.jit
def {tiles.body}(
{_wrapped(args)},
):
    """dgate, dup and weighted, and for dweights what each tile of columns has, {tiles.cut.rows} rows at a time."""
{tiles.loop(lines, descriptor_lines([factor], tiles))}'''


def _split_lines(total: str, names: Sequence[str], rows: int, columns: int) -> list[str]:
    """A tile in as many parts as there are names, a power of two, of columns beside one another."""
    if len(names) == 1:
        return [f"{names[0]} = {total}"]
    half, middle = columns // 2, len(names) // 2
    left, right = (names[0], names[1]) if middle == 1 else (f"{total}_left", f"{total}_right")
    return [
        f"{total} = tl.permute(tl.reshape({total}, ({rows}, 2, {half})), (0, 2, 1))",
        f"{left}, {right} = tl.split({total})",
        *(_split_lines(left, names[:middle], rows, half) if middle > 1 else ()),
        *(_split_lines(right, names[middle:], rows, half) if middle > 1 else ()),
    ]


def _part_lines(problem: ExpertGlu, tiles: Tiles, total: str, start: int, columns: int) -> list[str]:
    """What becomes of some of a tile's columns, those from `start` on."""
    low = f".to(tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]})"
    mask = "inside[:, None]"
    if problem.width % tiles.cut.columns:
        mask = f"{mask} & (column < {problem.width})[None, :]"
    # By a descriptor the last tile also has columns of the next expert, whatever these are.
    beyond = tiles.cut.described and problem.width % tiles.cut.columns
    up = f"(up + {problem.unit.offset!r})" if problem.unit.offset else "up"
    results = (("dgate", "dgate"), ("dup", "dup"), ("weighted", "y * weight[:, None]"))
    return [
        f"column = block * {tiles.cut.columns} + {start} + tl.arange(0, {columns})",
        f"element = row.to(tl.int64)[:, None] * {problem.width} + column[None, :]",
        f"real = {mask}",
        "gate = tl.load(gate_ptr + element, mask=real, other=0.0).to(tl.float32)",
        "up = tl.load(up_ptr + element, mask=real, other=0.0).to(tl.float32)",
        *([f"{total} = tl.where(real, {total}, 0.0)"] if beyond else []),
        f"dy = {total} * weight[:, None]",
        *backward_lines(problem.unit),
        f"y = (act * {up}){low}.to(tl.float32)",
        f"dots += tl.sum({total} * y, axis=1)",
        *(f"tl.store({tensor}_ptr + element, ({value}){low}, mask=real)" for tensor, value in results),
    ]


def _wrapped(args: tuple[str, ...]) -> str:
    names = parameters(args)
    half = len(names) // 2
    return f"    {', '.join(names[:half])},\n    {', '.join(names[half:])}"


def _dots_source(name: str, problem: ExpertGlu, tiles: Tiles) -> str:
    body = lines_of(
        f"row = tl.program_id(0) * {SUMMED} + tl.arange(0, {SUMMED})",
        "inside = row < R",
        f"real = row < tl.load(offsets_ptr + {problem.experts - 1})",
        f"total = tl.zeros([{SUMMED}], dtype=tl.float32)",
        f"for block in range(0, {tiles.across}):",
        "    total += tl.load(dots_ptr + tl.cast(block, tl.int64) * R + row, mask=real, other=0.0)",
        "pair = tl.load(order_ptr + row, mask=inside, other=0)",
        f"tl.store(dweights_ptr + pair, total.to(tl.{TRITON_LANGUAGE_DTYPES[problem.weights]}), mask=inside)",
    )
    return f'''

@triton.jit
def {name}_dots(dots_ptr, order_ptr, offsets_ptr, dweights_ptr, R):
    """dweights: the sums over tiles of columns, at their pairs; 0 for a row of no expert."""
{body}'''


def _options(problem: ExpertGlu) -> str:
    unit = problem.unit
    options = [f'act="{unit.act}"'] + [f"alpha={unit.alpha!r}"] * (unit.act == "quick_gelu")
    options += [f"{name}={getattr(unit, name)!r}" for name in ("limit", "offset") if getattr(unit, name)]
    return ", ".join([f"top_k={problem.choices}", *options])


def _forward_twin(name: str, problem: ExpertGlu) -> str:
    matrices = [tensor for tensor in problem.tensors if tensor[0] == "w"]
    biases = [tensor for tensor in problem.tensors if tensor[0] == "b"]
    lines = [f"{w} = {w}.transpose(1, 2)" for w in matrices] if problem.transposed else []
    if problem.packed:
        lines += [f"wg, wu = {_parts('w', problem.packed)}"] + [f"bg, bu = {_parts('b', problem.packed)}"] * bool(
            biases
        )
    given = f"x, order, offsets, wg, wu, {_options(problem)}" + ", biases=(bg, bu)" * bool(biases)
    lines += ["y, gate, up = rt.expert_glu(", f"    {given}", ")"]
    body = "".join(f"    {line}\n" for line in lines)
    return f'''
def {name}(x, order, offsets, {", ".join(problem.tensors)}):
    """y[r] = {problem.unit.act}(x[t] @ wg[e]) * (x[t] @ wu[e]), t the token and e the expert of row r."""
{body}    return {"y, gate, up" if problem.keep else "y"}
'''


def _parts(tensor: str, packed: str) -> str:
    """Gates and ups of what has both in its last dim."""
    return f"{tensor}.chunk(2, -1)" if packed == "halves" else f"{tensor}[..., ::2], {tensor}[..., 1::2]"


def _backward_twin(name: str, problem: ExpertGlu) -> str:
    turned = "" if problem.transposed else ".transpose(1, 2)"
    return f'''
def {name}(dy, weights, order, offsets, w, gate, up):
    """Gradients of units and weights, whose product with w and sum over a token's rows has the gradient dy."""
    return rt.expert_glu_grad(
        dy, weights, order, offsets, w{turned}, gate, up, {_options(problem)}
    )
'''
