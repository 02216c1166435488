"""Sums over the experts of a token of what they give, weighed, as Triton source and torch twin.

    y[t] = sum over k of weights[t, k] * (rows[r] @ w[e] (+ bias[e]))      r: the row of pair t * K + k, e: its expert

The product writes each row where its pair belongs (`order`), so that those of a token lie one after the other, and
what sums them looks for none. Sums of products are in f32 and rounded once, then weighed, each product rounded as the
op says, and added in f32 in the order of k. Where some pairs are of no expert (`ended`), they are those of the last
tokens, from the last offset on, of which the sum is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgraph.codegen.triton import grouped, moe_rows
from mgraph.codegen.triton.grouped import (
    EXACT,
    Cuts,
    Factor,
    Product,
    Tiles,
    bias_lines,
    cuts_of,
    descriptor_lines,
    fitting,
    one_cut,
    parameters,
    product_lines,
    sources,
    ways,
    written_lines,
)
from mgraph.codegen.triton.kernel import TRITON_LANGUAGE_DTYPES, KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.moe_rows import MOST_CHOICES, MoeRows, sum_tuning
from mgraph.codegen.triton.rope import lines_of
from mgraph.ir.graph import Node
from mgraph.ir.types import DType


@dataclass(frozen=True)
class ExpertSum:
    """One instance: the product, experts a token, the dtype of the weights and that to which what is weighed is
    rounded, and whether the last tokens may be of no expert."""

    product: Product
    choices: int
    weights: str = "f32"
    products: str = "f32"
    ended: bool = False


def problem_of(node: Node) -> ExpertSum | str:
    """The instance that a node `expert_sum` is, or why there is no kernel for it."""
    rows, w, weights, _, offsets, *bias = node.operands
    product = grouped.problem_of(node.with_values((rows, w, offsets, *bias), node.results))
    if isinstance(product, str):
        return product
    choices = weights.tensor.shape[1]
    if not isinstance(choices, int) or choices > MOST_CHOICES:
        return f"a token has {choices} rows; the kernel takes up to {MOST_CHOICES}"
    dtype = node.attrs["dtype"]
    assert isinstance(dtype, DType)
    products = dtype.text
    for role, found in (("weights", weights.tensor.dtype.text), ("products", products)):
        if found not in TRITON_LANGUAGE_DTYPES:
            return f"the {role} are {found}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    return ExpertSum(product, choices, weights.tensor.dtype.text, products, bool(node.attrs.get("ended", False)))


def build(name: str, problem: ExpertSum, cuts: Cuts = ()) -> KernelSpec:
    """The site `y = name(rows, w, weights, order, offsets[, bias])`: rows [R, inner], w [E, inner, width] ([E, width,
    inner] if transposed), weights [T, K], order i64 [R], offsets i32 [E], bias [E, width] → y [T, width]."""
    product = problem.product
    cuts = fitting(cuts or cuts_of(product), [_factor(product)])
    all_, dims = ways(name, product.experts, product.width, cuts)
    matrix = (product.width, product.inner) if product.transposed else (product.inner, product.width)
    bias = ("bias",) if product.bias else ()
    args = {tiles: ("rows", "w", *bias, "order", tiles.given, "pairs", *["R"] * tiles.cut.described) for tiles in all_}
    inputs = [
        TensorSpec("rows", product.dtype, ("R", product.inner)),
        TensorSpec("w", product.dtype, (product.experts, *matrix)),
        TensorSpec("weights", problem.weights, ("T", problem.choices)),
        TensorSpec("order", "i64", ("R",)),
        TensorSpec("offsets", "i32", (product.experts,)),
        *(TensorSpec(tensor, product.bias, (product.experts, product.width)) for tensor in bias),
    ]
    rows = MoeRows(product.width, problem.choices, product.dtype, problem.weights, problem.products)
    cut = sum_tuning(rows)
    summed = ("pairs", "weights", *(["offsets"] if problem.ended else []), "y")
    grid = ("mul", "T", -(-product.width // cut.columns))
    return KernelSpec(
        name=name,
        source=sources(args, lambda tiles, given: _product_source(problem, tiles, given))
        + _sum_source(name, problem, cut, summed),
        twin=_twin(name, problem),
        inputs=tuple(inputs),
        outputs=(TensorSpec("y", product.dtype, ("T", product.width)),),
        scratch=(
            *(scratch for tiles in all_ for scratch in tiles.scratch()),
            TensorSpec("pairs", product.dtype, ("R", product.width)),
        ),
        launches=(
            *(launch for tiles in all_ for launch in tiles.launches(args[tiles])),
            Launch(f"{name}_tokens", summed, (grid,), cut.num_warps, 1, rows.aligned),
        ),
        dims=dims,
    )


def fixed(name: str, problem: ExpertSum) -> KernelSpec:
    """The site of `build` in one cut."""
    return build(name, problem, one_cut(cuts_of(problem.product)))


def _factor(product: Product) -> Factor:
    exact = product.dtype == EXACT
    return Factor("rows", "w", product.inner, product.width, product.transposed, exact=exact)


def _product_source(problem: ExpertSum, tiles: Tiles, args: Sequence[str]) -> str:
    product = problem.product
    factor = _factor(product)
    lines = product_lines([factor], ["total"], tiles)
    if product.bias:
        lines += bias_lines(tiles, "total", "bias", product.width)
    lines += [
        "pair = tl.load(order_ptr + row, mask=inside, other=0)",
        *written_lines(tiles, "pair", ("pairs", f"total.to(tl.{TRITON_LANGUAGE_DTYPES[product.dtype]})")),
    ]
    return f'''
@triton.jit
def {tiles.body}({", ".join(parameters(args))}):
    """pairs[order[r]] = rows[r] @ w[e], {tiles.cut.rows} rows by {tiles.cut.columns} columns at a time."""
{tiles.loop(lines, descriptor_lines([factor], tiles))}'''


def _sum_source(name: str, problem: ExpertSum, cut: moe_rows.Tuning, args: Sequence[str]) -> str:
    width, choices, columns = problem.product.width, problem.choices, cut.columns
    blocks = -(-width // columns)
    inside = [f"(column < {width})"] if width % columns else []
    store = f", mask={inside[0]}" if inside else ""
    inside += ["real"] if problem.ended else []
    load = f", mask={' & '.join(inside)}, other=0.0" if inside else ""
    narrow = f".to(tl.{TRITON_LANGUAGE_DTYPES[problem.products]}).to(tl.float32)" * (problem.products != "f32")
    end = f"tl.load(offsets_ptr + {problem.product.experts - 1})"
    body = lines_of(
        f"token = tl.program_id(0) // {blocks}",
        f"column = tl.program_id(0) % {blocks} * {columns} + tl.arange(0, {columns})",
        *([f"real = column * 0 + token * {choices} < {end}"] if problem.ended else []),
        f"total = tl.zeros([{columns}], dtype=tl.float32)",
        f"for choice in tl.static_range({choices}):",
        f"    pair = token.to(tl.int64) * {choices} + choice",
        f"    value = tl.load(pairs_ptr + pair * {width} + column{load}).to(tl.float32)",
        "    weight = tl.load(weights_ptr + pair).to(tl.float32)",
        f"    total += {'tl.where(real, ' if problem.ended else ''}(value * weight){narrow}"
        f"{', 0.0)' if problem.ended else ''}",
        f"target = y_ptr + token.to(tl.int64) * {width} + column",
        f"tl.store(target, total.to(tl.{TRITON_LANGUAGE_DTYPES[problem.product.dtype]}){store})",
    )
    return f'''

@triton.jit
def {name}_tokens({", ".join(f"{arg}_ptr" for arg in args)}):
    """y[t] = sum of weights[t, k] * pairs[t * {choices} + k]: one token and {columns} of {width} columns a program."""
{body}'''


def _twin(name: str, problem: ExpertSum) -> str:
    product = problem.product
    names = "rows, w, weights, order, offsets" + ", bias" * bool(product.bias)
    turned = ".transpose(1, 2)" if product.transposed else ""
    options = f"dtype=torch.{TRITON_LANGUAGE_DTYPES[problem.products]}" + ", bias=bias" * bool(product.bias)
    options += ", ended=True" * problem.ended
    return f'''
def {name}({names}):
    """y[t] = sum of weights[t, k] * (rows[r] @ w[e]), r the row that stands for pair t * {problem.choices} + k."""
    return rt.expert_sum(
        rows, w{turned}, weights, order, offsets, {options}
    )
'''
