"""The gradient of attention with masks that no fused kernel of torch takes, as Triton source and torch twin.

With the scores s, the weights P = exp(s - lse) and the row sums delta = sum dout * out (Dao et al. 2022,
arXiv:2205.14135, appendix B):

    dv = P^T dout,   ds = P * (dout v^T - delta) * (1 - (s / softcap)^2) * scale,   dq = ds k,   dk = ds^T q

and dsinks = -sum exp(sinks - lse) * delta. The weights are computed again from q, k and lse, twice: by programs that
have a block of queries and go over keys, for dq, and by programs that have a block of keys and go over the queries of
all heads of their group, for dk and dv. So nothing is added by two programs, and sums have one order. Before these, a
kernel writes delta and lse to the base 2, and what a block of rows adds to dsinks.

What blocks can see, and masks, are as in `attention.py`. Products are of 16-bit numbers with sums in f32; P and ds are
rounded to the dtype of q before their products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mgraph.codegen.triton.attention import (
    Part,
    Tile,
    Tuning,
    block_lines,
    described_block,
    found_before,
    further_of,
    grid_of_queries,
    heads_of,
    launches,
    marks_of_columns,
    marks_of_rows,
    masked,
    score_lines,
    seen_lines,
    strides_of,
    title,
    twin,
)
from mgraph.codegen.triton.attention_problem import Attention
from mgraph.codegen.triton.attention_reach import Reach, reached
from mgraph.codegen.triton.kernel import LOG2E, LOWEST, TRITON_LANGUAGE_DTYPES, KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.rope import lines_of, signature

ROWS = 64
"""Rows of a program that sums them."""

PADDED, PADDED_LINE = ("mul", ("cdiv", "S", ROWS), ROWS), f"rows = tl.cdiv(S, {ROWS}) * {ROWS}"
"""Rows of a head in `sums`: a multiple of those of a program, so that each head's begin on a 16-byte boundary; as an
extent, and in a kernel."""

SUMMED = 1024
"""Parts of dsinks that are added at a time."""


@dataclass(frozen=True)
class GradTuning:
    """How the programs for dq and those for dk and dv are cut."""

    of_queries: Tuning
    of_keys: Tuning


def tuning(problem: Attention) -> GradTuning:
    """Blocks of 64 and steps of 64, of which two programs or more have room on a multiprocessor; for the widest heads
    one, of more warps."""
    widest = max(problem.columns, problem.value_columns)
    if widest > 128:
        return GradTuning(Tuning(64, 32, 8, 2), Tuning(32, 64, 8, 2))
    return GradTuning(Tuning(64, 64, 4, 2), Tuning(64, 64, 4, 2))


def backward(name: str, problem: Attention, cut: GradTuning | None = None) -> KernelSpec:
    """The site `dq, dk, dv[, dsinks] = name(dout, q, k, v, out, lse, ...)`, with the shapes, dtypes and strides of q,
    k, v and sinks; further operands as in the op."""
    cut = cut or tuning(problem)
    parts = [_delta(name, problem), *_searches(name, problem, cut)]
    parts += [*_of_queries(name, problem, cut.of_queries), *_of_keys(name, problem, cut.of_keys)]
    if "sinks" in problem.operands:
        parts.append(_dsinks(name))
    q, k, v = heads_of(problem)
    dout = TensorSpec("dout", problem.dtype, ("B", "H", "S", problem.value_width), strided=True)
    out = TensorSpec("out", problem.dtype, ("B", "H", "S", problem.value_width), strided=True)
    further = further_of(problem)
    sinks = [t for t in further if t.name == "sinks"]
    return KernelSpec(
        name=name,
        source="\n".join(source for _, source, _ in parts),
        twin=twin(name, "attention_grad", ("dout", "q", "k", "v", "out", "lse"), problem),
        inputs=(dout, q, k, v, out, TensorSpec("lse", "f32", ("B", "H", "S")), *further),
        outputs=(
            *(TensorSpec(f"d{t.name}", t.dtype, t.shape, like=t.name) for t in (q, k, v)),
            *(TensorSpec("dsinks", t.dtype, t.shape) for t in sinks),
        ),
        scratch=tuple(tensor for _, _, tensors in parts for tensor in tensors),
        launches=tuple(launch for launch, _, _ in parts),
    )


def _searches(name: str, problem: Attention, cut: GradTuning) -> list[Part]:
    """What finds the keys that blocks of queries see, and the queries that see blocks of keys."""
    reach = Reach(f"{name}_reach", "reach", cut.of_queries.positions(problem))
    seen_by = Reach(f"{name}_seen_by", "seen_by", cut.of_keys.keys, of_keys=True)
    return [
        *found_before(reach, f"{name}_order", "order", problem),
        *found_before(seen_by, f"{name}_order_of_keys", "order_of_keys", problem),
    ]


def _delta(name: str, problem: Attention) -> Part:
    """lse to the base 2, row sums, and parts of dsinks."""
    sinks = "sinks" in problem.operands
    more = ("sinks", "shares") if sinks else ()
    tensors = ("dout", "out", "lse", "sums", *more)
    args = (*tensors, "H", "S", *strides_of("dout", "out"))
    dout = Tile("dout", "S", problem.value_width, ROWS, False, "head")
    out = replace(dout, tensor="out")
    lines = [
        f"blocks = tl.cdiv(S, {ROWS})",
        f"first = tl.program_id(0) % blocks * {ROWS}",
        f"row = first + tl.arange(0, {ROWS})",
        "head = tl.program_id(0) // blocks % H",
        "batch = (tl.program_id(0) // blocks // H).to(tl.int64)",
        *dout.lines(),
        *out.lines(),
        *dout.read("first", "row < S"),
        *out.read("first", "row < S"),
        "delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), axis=1)",
        "lse = tl.load(lse_ptr + (batch * H + head) * S + row, mask=row < S, other=0.0)",
        f"log_sum = tl.where(lse > {LOWEST!r}, lse * {LOG2E!r}, 0.0)",
        *_place_of_sums(),
        "tl.store(sums_ptr + at, log_sum)",
        "tl.store(sums_ptr + at + rows, delta)",
    ]
    if sinks:
        lines += [
            f"sink = tl.load(sinks_ptr + head).to(tl.float32) * {LOG2E!r}",
            "share = tl.where(row < S, tl.exp2(sink - log_sum) * delta, 0.0)",
            "tl.store(shares_ptr + tl.program_id(0), tl.sum(share))",
        ]
    more_said = "; shares: exp(sink - lse) * delta" * sinks
    source = f'''
@triton.jit
def {name}_delta(
{signature(args, tensors)}
):
    """sums: lse to the base 2, 0 where nothing is seen, and delta = sum dout * out{more_said}.

    dout, out [B, H, S, {problem.value_width}]; sums [B, H, 2, S and zeros after it]; {ROWS} rows per program.
    """
{lines_of(*lines)}'''
    grid = (("mul", ("mul", ("cdiv", "S", ROWS), "B"), "H"),)
    scratch = [TensorSpec("sums", "f32", ("B", "H", 2, PADDED))]
    scratch += [TensorSpec("shares", "f32", ("B", "H", ("cdiv", "S", ROWS)))] * sinks
    return Launch(f"{name}_delta", args, grid, 4, 1, problem.value_width % 8 == 0), source, tuple(scratch)


def _place_of_sums() -> list[str]:
    """Where in `sums` lse of the row `row` of `head` is; delta is `rows` further."""
    return [PADDED_LINE, "at = (batch * H + head) * 2 * rows + row"]


def _read_sums() -> list[str]:
    """Reads lse and delta of the rows `row` of `head` by addresses."""
    read = "= tl.load(sums_ptr + at{}, mask=row < S, other=0.0)"
    return [*_place_of_sums(), f"log_sum {read.format('')}", f"delta {read.format(' + rows')}"]


def _dsinks(name: str) -> Part:
    """The sum of the parts of dsinks, in one order."""
    source = f'''
@triton.jit
def {name}_dsinks(shares_ptr, dsinks_ptr, B, H, S):
    """dsinks = -sum of a head's shares, which are [B, H, blocks of {ROWS} rows]."""
    blocks = tl.cdiv(S, {ROWS})
    head = tl.program_id(0)
    total = tl.zeros([{SUMMED}], tl.float32)
    for start in range(0, B * blocks, {SUMMED}):
        part = start + tl.arange(0, {SUMMED})
        at = (part // blocks * H + head) * blocks + part % blocks
        total += tl.load(shares_ptr + at, mask=part < B * blocks, other=0.0)
    tl.store(dsinks_ptr + head, -tl.sum(total))
'''
    args = ("shares", "dsinks", "B", "H", "S")
    return Launch(f"{name}_dsinks", args, ("H",), 4, 1, aligned=False), source, ()


def _bend(problem: Attention) -> str:
    """The derivative of the cap, as a factor."""
    return "" if problem.softcap is None else " * (1.0 - bent * bent)"


def _of_queries(name: str, problem: Attention, cut: Tuning) -> list[Part]:
    """dq. Keys come by addresses, which are there sooner than descriptors."""
    reach = ("reach", "order") if problem.marks else ()
    tensors = ("dout", "q", "k", "v", "sums", *problem.marks, *reach, "dq")
    args = (*tensors, "H", "G", "S", "T", *strides_of("dout", "q", "k", "v", "dq"))
    more = (cut.num_warps, cut.num_stages, problem.aligned, cut.most_registers)
    launch = Launch(f"{name}_queries", args, grid_of_queries(problem, cut), *more)
    return [(launch, _source_of_queries(launch, problem, cut, tensors), ())]


def _source_of_queries(launch: Launch, problem: Attention, cut: Tuning, tensors: tuple[str, ...]) -> str:
    """The text of the kernel for dq. What needs no exponential is multiplied before it, so that there is one wait."""
    dtype, (bend, factor) = TRITON_LANGUAGE_DTYPES[problem.dtype], score_lines(problem)
    together, positions = cut.together(problem), cut.positions(problem)
    q = Tile("q", "S", problem.width, cut.queries, False, "lead", together)
    k = Tile("k", "T", problem.width, cut.keys, False, "group")
    v, dq = replace(k, tensor="v", width=problem.value_width), replace(q, tensor="dq")
    dout = replace(q, tensor="dout", width=problem.value_width)
    hide, first = seen_lines(problem), f"block * {positions}"
    start = [
        *block_lines(problem, cut),
        *(line for tile in (q, dout, k, v) for line in tile.lines()),
        *q.read(first, "row < S"),
        *dout.read(first, "row < S"),
        *_read_sums(),
        *marks_of_rows(problem),
        *reached(problem, positions),
        f"dq = tl.zeros([{cut.queries}, {problem.columns}], tl.float32)",
        f"for start in range(low, high, {cut.keys}):",
    ]
    weights = [
        f"column = start + tl.arange(0, {cut.keys})",
        *k.read("start", "column < T"),
        *v.read("start", "column < T"),
        "score = tl.dot(q, tl.trans(k))",
        "dweight = tl.dot(dout, tl.trans(v))",
        *bend,
        f"weight = tl.exp2(score{factor} - log_sum[:, None])",
    ]
    hide = [*marks_of_columns(problem), *hide, "weight = tl.where(seen, weight, 0.0)"] if hide else []
    gradients = [
        f"dscore = weight * (dweight - delta[:, None]){_bend(problem)}",
        f"dq = tl.dot(dscore.to(tl.{dtype}), k, dq)",
    ]
    end = [*dq.lines(), *dq.write(first, "row < S", f"(dq * {problem.scale!r}).to(tl.{dtype})")]
    loop = lines_of(*weights, depth=2) + masked(problem, cut, cut.keys, hide) + lines_of(*gradients, depth=2)
    return f'''
@triton.jit
def {launch.function}(
{signature(launch.args, tensors)}
):
    """dq of {title(problem)}.

    {described_block(cut, problem)} per program.
    """
{lines_of(*start)}{loop}{lines_of(*end)}'''


def _of_keys(name: str, problem: Attention, cut: Tuning) -> list[Part]:
    """dk and dv."""
    seen_by = ("seen_by", "order_of_keys") if problem.marks else ()
    tensors = ("dout", "q", "k", "v", "sums", *problem.marks, *seen_by, "dk", "dv")
    args = (*tensors, "B", "H", "G", "S", "T", *strides_of("dout", "q", "k", "v", "dk", "dv"))
    grid = (("mul", ("mul", ("cdiv", "T", cut.keys), "B"), "G"),)
    return [
        (way, _source_of_keys(way, problem, cut, tensors), ())
        for way in launches(f"{name}_keys", args, grid, cut, problem)
    ]


def _source_of_keys(way: Launch, problem: Attention, cut: Tuning, tensors: tuple[str, ...]) -> str:
    """The text of the kernel for dk and dv. Those keys come first that most queries may see, if it is causal: a program
    goes over all heads of a group, so that one that began last would be waited for."""
    dtype = TRITON_LANGUAGE_DTYPES[problem.dtype]
    described = way.takes == "aligned"
    k = Tile("k", "T", problem.width, cut.keys, described, "group")
    q = Tile("q", "S", problem.width, cut.queries, described)
    v, dk = replace(k, tensor="v", width=problem.value_width), replace(k, tensor="dk")
    dv, dout = replace(v, tensor="dv"), replace(q, tensor="dout", width=problem.value_width)
    first = f"block * {cut.keys}"
    place = ["batch, block = (tl.program_id(0) // G % B).to(tl.int64), tl.program_id(0) // G // B"]
    if problem.marks:
        place = ["place = tl.load(order_of_keys_ptr + tl.program_id(0) // G)"]
        place += ["block, batch = place % blocks, (place // blocks).to(tl.int64)"]
    start = [
        f"blocks = tl.cdiv(T, {cut.keys})",
        "group = tl.program_id(0) % G",
        *place,
        f"column = {first} + tl.arange(0, {cut.keys})",
        *(line for tile in (k, v, q, dout) for line in tile.lines()),
        *k.read(first, "column < T"),
        *v.read(first, "column < T"),
        *marks_of_columns(problem),
        *reached(problem, cut.keys, of_keys=True),
        f"steps = tl.cdiv(tl.maximum(high - low, 0), {cut.queries})",
        "heads = H // G",
        *(_tiles_of_sums(cut) if described else ()),
        f"dk = tl.zeros([{cut.keys}, {problem.columns}], tl.float32)",
        f"dv = tl.zeros([{cut.keys}, {problem.value_columns}], tl.float32)",
        f"head, start = group * heads, low - {cut.queries}",
        "for step in range(0, heads * steps):",
    ]
    end = [
        *dk.lines(),
        *dk.write(first, "column < T", f"(dk * {problem.scale!r}).to(tl.{dtype})"),
        *dv.lines(),
        *dv.write(first, "column < T", f"dv.to(tl.{dtype})"),
    ]
    return f'''
@triton.jit
def {way.function}(
{signature(way.args, tensors)}
):
    """dk and dv of {title(problem)}.

    {cut.keys} keys per program, {cut.queries} queries at a time, of all heads of the group one after
    another{"; for tensors on 16-byte boundaries" * described}.
    """
{lines_of(*start)}{_loop_of_keys(problem, cut, q, dout)}{lines_of(*end)}'''


def _tiles_of_sums(cut: Tuning) -> list[str]:
    """The descriptor of the sums of a batch: lse and delta of each head."""
    place = "sums_ptr + batch * H * 2 * rows"
    return [
        PADDED_LINE,
        f"sums_tiles = tl.make_tensor_descriptor({place}, [H * 2, rows], [rows, 1], [1, {cut.queries}])",
    ]


def _loop_of_keys(problem: Attention, cut: Tuning, q: Tile, dout: Tile) -> str:
    """A block of queries of one head enters dk and dv. Tiles are [keys, queries]."""
    dtype, (bend, factor) = TRITON_LANGUAGE_DTYPES[problem.dtype], score_lines(problem)
    hide = seen_lines(problem, transposed=True, all_inside=True)
    read = "sums_tiles.load([head * 2{}, start])" + f".reshape({cut.queries})"
    sums = [f"log_sum = {read.format('')}", f"delta = {read.format(' + 1')}"]
    weights = [
        f"start += {cut.queries}",
        "head = tl.where(start < high, head, head + 1)",
        "start = tl.where(start < high, start, low)",
        f"row = start + tl.arange(0, {cut.queries})",
        *q.read("start", "row < S", "head"),
        *dout.read("start", "row < S", "head"),
        *(sums if q.described else _read_sums()),
        "score = tl.dot(k, tl.trans(q))",
        "dweight = tl.dot(v, tl.trans(dout))",
        *bend,
        f"weight = tl.exp2(score{factor} - log_sum[None, :])",
    ]
    hide = [*marks_of_rows(problem), *hide, "weight = tl.where(seen, weight, 0.0)"] if hide else []
    gradients = [
        f"dv = tl.dot(weight.to(tl.{dtype}), dout, dv)",
        f"dscore = weight * (dweight - delta[None, :]){_bend(problem)}",
        f"dk = tl.dot(dscore.to(tl.{dtype}), q, dk)",
    ]
    return lines_of(*weights, depth=2) + masked(problem, cut, cut.queries, hide) + lines_of(*gradients, depth=2)
