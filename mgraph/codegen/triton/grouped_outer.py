"""Gradients of the matrices of experts, as Triton source and torch twin.

    y[e] = sum over the rows r of expert e of left[r]' right[r]

in f32, of bf16, f16 or f32, rounded once; or added to a total in place, or (`fresh`) written over it. Where one side is
`taken` from tokens, its row r is that of the token of pair order[r], which is never copied. A program has a tile of one
expert's result and goes over all of its rows, so that nothing is added twice and the order of the sum is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mgraph.codegen.triton.grouped import EXACT, Tuning, dot, exact_tuning, plain, refusal
from mgraph.codegen.triton.kernel import (
    TRITON_LANGUAGE_DTYPES,
    Expression,
    KernelSpec,
    Launch,
    TensorSpec,
)
from mgraph.codegen.triton.moe_order import power
from mgraph.codegen.triton.rope import lines_of
from mgraph.ir.graph import Node, Value


@dataclass(frozen=True)
class Outer:
    """One instance of `grouped_outer` or `gathered_outer`: experts, widths of left and right, dtype, which side is
    taken from tokens ("": none) of so many rows each, the dtype of the total ("": a result of its own), and whether
    what that holds is written over."""

    experts: int
    left: int
    right: int
    dtype: str
    taken: str = ""
    choices: int = 1
    total: str = ""
    fresh: bool = False


def problem_of(node: Node) -> Outer | str:
    """The instance that a node is, or why there is no kernel for it."""
    left, right = node.operands[:2]
    widths = (left.tensor.shape[1], right.tensor.shape[1])
    experts = node.results[0].tensor.shape[0]
    if why := refusal({"left is": left, "right": right}, experts, widths):
        return why
    taken = str(node.attrs["side"]) if node.op == "gathered_outer" else ""
    choices = node.attrs.get("top_k", 1)
    if not isinstance(choices, int):
        return f"the number {choices} of experts a token is not known"
    assert isinstance(experts, int) and isinstance(widths[0], int) and isinstance(widths[1], int)
    return Outer(experts, widths[0], widths[1], left.tensor.dtype.text, taken, choices)


def problem_of_sum(node: Node, total: Value, fresh: bool = False) -> Outer | str:
    """The instance that the sum of a node to a total is, or to zeros if that is `fresh`; or why there is no kernel."""
    problem = problem_of(node)
    if isinstance(problem, str):
        return problem
    if total.tensor.dtype.text not in TRITON_LANGUAGE_DTYPES:
        return f"the total is {total.tensor.dtype.text}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    return replace(problem, total=total.tensor.dtype.text, fresh=fresh)


def tuning(problem: Outer) -> Tuning:
    """Large tiles, as the sum is long, with 64 rows at a time; of f32 smaller ones. They are wide on a side that lies
    row by row, which comes by a descriptor: what is taken is read by addresses."""
    if problem.dtype == EXACT:
        return exact_tuning(problem.right, min(64, max(16, power(problem.left))))
    rows, columns = (min(128, max(16, power(width))) for width in (problem.left, problem.right))
    if problem.taken != "right" and problem.right % 256 == 0:
        columns = 256
    elif problem.taken != "left" and problem.left % 256 == 0:
        rows = 256
    if rows * columns < 128 * 128:
        return Tuning(rows, columns, 64, 4, 4)
    return Tuning(rows, columns, 64, 8, 3, described=True)


def outer(name: str, problem: Outer, cut: Tuning | None = None) -> KernelSpec:
    """The site `y = name([total, ]left, right, [order, ]offsets)`: left [R, left], right [R, right] (of the side that
    is taken from tokens [T, width]), order i64 [R], offsets i32 [E] → y [E, left, right]; with a total, in place."""
    cut = cut or tuning(problem)
    shape = (problem.experts, problem.left, problem.right)
    sides = [
        TensorSpec(side, problem.dtype, ("T" if side == problem.taken else "R", width))
        for side, width in (("left", problem.left), ("right", problem.right))
    ]
    order = [TensorSpec("order", "i64", ("R",))] if problem.taken else []
    total = [TensorSpec("total", problem.total, shape)] if problem.total else []
    inputs = (*total, *sides, *order, TensorSpec("offsets", "i32", (problem.experts,)))
    output = TensorSpec("y", problem.total or problem.dtype, shape, alias="total" if problem.total else "")
    args = (*(tensor.name for tensor in inputs), *(() if problem.total else ("y",)))
    tiles = problem.experts * -(-problem.left // cut.rows) * -(-problem.right // cut.columns)
    grid: Expression = ("min", tiles, ("mul", "sms", cut.programs)) if cut.programs else tiles
    forms = {"aligned": cut, "others": plain(cut)} if _described(problem, cut) else {"all": cut}
    launches = tuple(
        Launch(
            f"{name}{'_any' * (takes == 'others')}",
            args,
            (grid,),
            cut.num_warps,
            cut.num_stages,
            aligned=takes != "others",
            takes=takes,
        )
        for takes in forms
    )
    return KernelSpec(
        name=name,
        source="".join(_source(launch.function, problem, forms[launch.takes], args) for launch in launches),
        twin=_twin(name, problem, args),
        inputs=inputs,
        outputs=(output,),
        scratch=(),
        launches=launches,
    )


def _described(problem: Outer, cut: Tuning) -> dict[str, str]:
    """The sides that come by descriptors, with the lines that make them: those that lie row by row, up to the end of
    the expert's, so that rows of others are 0."""
    if not cut.described or problem.dtype == EXACT:
        return {}
    sides = (("left", problem.left, cut.rows), ("right", problem.right, cut.columns))
    form = "{0}_all = tl.make_tensor_descriptor({0}_ptr, [tl.maximum(end, 1), {1}], [{1}, 1], [{2}, {3}])"
    return {side: form.format(side, width, cut.depth, block) for side, width, block in sides if side != problem.taken}


def _load(problem: Outer, side: str, width: int, column: str, block: int) -> list[str]:
    """The rows of one side, `row` by `column`."""
    mask = "inside[:, None]"
    if width % block:
        mask = f"{mask} & ({column} < {width})[None, :]"
    source = "source" if side == problem.taken else "row.to(tl.int64)"
    return [
        f"element = {source}[:, None] * {width} + {column}[None, :]",
        f"{side} = tl.load({side}_ptr + element, mask={mask}, other=0.0)",
    ]


def _source(name: str, problem: Outer, cut: Tuning, args: tuple[str, ...]) -> str:
    along, across = -(-problem.left // cut.rows), -(-problem.right // cut.columns)
    low = f".to(tl.{TRITON_LANGUAGE_DTYPES[problem.total or problem.dtype]})"
    masks = [f"(line < {problem.left})[:, None]"] * bool(problem.left % cut.rows)
    masks += [f"(column < {problem.right})[None, :]"] * bool(problem.right % cut.columns)
    mask = f", mask={' & '.join(masks)}" if masks else ""
    # What is taken is known a step ahead: a load that waits for another within a step would hold up all on the way.
    source = f"tl.load(order_ptr + {{row}}, mask={{row}} < end, other=0) // {problem.choices}"
    first = [f"row = begin + tl.arange(0, {cut.depth})", f"source = {source.format(row='row')}"]
    ahead = [f"ahead = row + {cut.depth}", f"source = {source.format(row='ahead')}"]
    described = _described(problem, cut)
    places = {"left": f"tile % {along} * {cut.rows}", "right": f"tile // {along} % {across} * {cut.columns}"}

    def load(side: str, width: int, column: str, block: int) -> list[str]:
        if side in described:
            return [f"{side} = {side}_all.load([start, {places[side]}])"]
        return _load(problem, side, width, column, block)

    lines = [
        f"expert = tile // {along * across}",
        f"line = {places['left']} + tl.arange(0, {cut.rows})",
        f"column = {places['right']} + tl.arange(0, {cut.columns})",
        "begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)",
        "end = tl.load(offsets_ptr + expert)",
        f"sum_ = tl.zeros([{cut.rows}, {cut.columns}], dtype=tl.float32)",
        *described.values(),
        *(first if problem.taken else []),
        f"for start in range(begin, end, {cut.depth}):",
        *(
            f"    {line}"
            for line in [
                f"row = start + tl.arange(0, {cut.depth})",
                "inside = row < end",
                *load("left", problem.left, "line", cut.rows),
                *load("right", problem.right, "column", cut.columns),
                *(ahead if problem.taken else []),
                f"sum_ = {dot('tl.trans(left)', 'right', 'sum_', problem.dtype == EXACT)}",
            ]
        ),
        f"element = tl.cast(expert, tl.int64) * {problem.left * problem.right}",
        f"element += line[:, None] * {problem.right} + column[None, :]",
    ]
    if problem.total and not problem.fresh:
        lines += [
            "if begin < end:",
            f"    old = tl.load(total_ptr + element{mask}).to(tl.float32)",
            f"    tl.store(total_ptr + element, (old + sum_){low}{mask})",
        ]
    else:
        lines.append(f"tl.store({'total' if problem.total else 'y'}_ptr + element, sum_{low}{mask})")
    tiles = problem.experts * along * across
    if cut.programs:
        loop = lines_of(f"for tile in range(tl.program_id(0), {tiles}, tl.num_programs(0)):")
        body = loop + lines_of(*lines, depth=2)
    else:
        body = lines_of("tile = tl.program_id(0)", *lines)
    what = f"total[e] {'' if problem.fresh else '+'}=" if problem.total else "y[e] ="
    return f'''
@triton.jit
def {name}({", ".join(f"{arg}_ptr" for arg in args)}):
    """{what} sum of left[r]' right[r] over the rows r of expert e, {cut.rows} by {cut.columns} of it at a time."""
{body}'''


def _twin(name: str, problem: Outer, args: tuple[str, ...]) -> str:
    names = [arg for arg in args if arg != "y"]
    sides = {side: side for side in ("left", "right")}
    if problem.taken:
        sides[problem.taken] = f"{problem.taken}[order // {problem.choices}]"
    left, right = sides["left"], sides["right"]
    call = f"rt.grouped_mm({left}.t(), {right}, offsets)"
    if problem.total:
        call = f"rt.grouped_outer_(total, {left}, {right}, offsets{', fresh=True' if problem.fresh else ''})"
    what = "total[e]:" if problem.fresh else "Add to total[e]" if problem.total else "y[e]:"
    return f'''
def {name}({", ".join(names)}):
    """{what} the sum of left[r]' right[r] over the rows r of expert e."""
    return {call}
'''
