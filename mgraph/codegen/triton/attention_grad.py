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

from dataclasses import dataclass

from mgraph.codegen.triton.attention import (
    LOG2E,
    LOWEST,
    Attention,
    Reach,
    Tuning,
    block_lines,
    bounds_of_queries,
    further_of,
    heads_of,
    inside,
    loops,
    marks_of_columns,
    marks_of_rows,
    reached,
    score_lines,
    seen_lines,
    strides_of,
    title,
    to_head,
    twin,
)
from mgraph.codegen.triton.kernel import TRITON_LANGUAGE_DTYPES, KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.rope import lines_of, signature

ROWS = 64
"""Rows of a program that sums them."""

SUMMED = 1024
"""Parts of dsinks that are added at a time."""


@dataclass(frozen=True)
class GradTuning:
    """How the programs for dq and those for dk and dv are cut."""

    of_queries: Tuning
    of_keys: Tuning


def tuning(problem: Attention) -> GradTuning:
    """Blocks of 128 whose sums stay in registers, and steps of 64; smaller for the widest heads."""
    widest = max(problem.columns, problem.value_columns)
    if widest > 128:
        return GradTuning(Tuning(64, 32, 8, 2), Tuning(32, 64, 8, 2))
    if widest > 64:
        return GradTuning(Tuning(128, 64, 8, 2), Tuning(64, 128, 8, 2))
    return GradTuning(Tuning(128, 64, 8, 3), Tuning(64, 128, 8, 3))


def backward(name: str, problem: Attention, cut: GradTuning | None = None) -> KernelSpec:
    """The site `dq, dk, dv[, dsinks] = name(dout, q, k, v, out, lse, ...)`, with the shapes, dtypes and strides of q,
    k, v and sinks; further operands as in the op."""
    cut = cut or tuning(problem)
    parts = [_delta(name, problem), *_searches(name, problem, cut)]
    parts += [_of_queries(name, problem, cut.of_queries), _of_keys(name, problem, cut.of_keys)]
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


_Part = tuple[Launch, str, tuple[TensorSpec, ...]]
"""A launch, its source, and the scratch that it writes."""


def _searches(name: str, problem: Attention, cut: GradTuning) -> list[_Part]:
    """What finds the keys that blocks of queries see, and the queries that see blocks of keys."""
    if not problem.marks:
        return []
    searches = (
        Reach(f"{name}_reach", "reach", cut.of_queries.queries),
        Reach(f"{name}_seen_by", "seen_by", cut.of_keys.keys, of_keys=True),
    )
    return [(search.launch(problem), search.source(problem), (search.scratch(),)) for search in searches]


def _delta(name: str, problem: Attention) -> _Part:
    """Row sums, lse to the base 2, and parts of dsinks."""
    sinks = "sinks" in problem.operands
    more = ("sinks", "shares") if sinks else ()
    tensors = ("dout", "out", "lse", "delta", "log_sums", *more)
    args = (*tensors, "H", "S", *strides_of("dout", "out"))
    lines = [
        f"blocks = tl.cdiv(S, {ROWS})",
        f"row = tl.program_id(0) % blocks * {ROWS} + tl.arange(0, {ROWS})",
        "head = tl.program_id(0) // blocks % H",
        "batch = (tl.program_id(0) // blocks // H).to(tl.int64)",
        f"value = tl.arange(0, {problem.value_columns})",
        *to_head("dout", "head"),
        *to_head("out", "head"),
        "dout_at = row.to(tl.int64)[:, None] * dout_stride_2 + value[None, :]",
        "out_at = row.to(tl.int64)[:, None] * out_stride_2 + value[None, :]",
        *(
            f"{t} = tl.load({t}_ptr + {t}_at{inside('row < S', problem.value_width, 'value')}).to(tl.float32)"
            for t in ("dout", "out")
        ),
        "delta = tl.sum(dout * out, axis=1)",
        "at = (batch * H + head) * S + row",
        "lse = tl.load(lse_ptr + at, mask=row < S, other=0.0)",
        f"log_sum = tl.where(lse > {LOWEST!r}, lse * {LOG2E!r}, 0.0)",
        "tl.store(delta_ptr + at, delta, mask=row < S)",
        "tl.store(log_sums_ptr + at, log_sum, mask=row < S)",
    ]
    if sinks:
        lines += [
            f"sink = tl.load(sinks_ptr + head).to(tl.float32) * {LOG2E!r}",
            "share = tl.where(row < S, tl.exp2(sink - log_sum) * delta, 0.0)",
            "tl.store(shares_ptr + tl.program_id(0), tl.sum(share))",
        ]
    source = f'''
@triton.jit
def {name}_delta(
{signature(args, tensors)}
):
    """delta = sum dout * out, and lse to the base 2, 0 where nothing is seen{"; sum exp(sink - lse) * delta" * sinks}.

    dout, out [B, H, S, {problem.value_width}]; {ROWS} rows per program.
    """
{lines_of(*lines)}'''
    grid = (("mul", ("mul", ("cdiv", "S", ROWS), "B"), "H"),)
    scratch = [TensorSpec(t, "f32", ("B", "H", "S")) for t in ("delta", "log_sums")]
    scratch += [TensorSpec("shares", "f32", ("B", "H", ("cdiv", "S", ROWS)))] * sinks
    return Launch(f"{name}_delta", args, grid, 4, 1, problem.value_width % 8 == 0), source, tuple(scratch)


def _dsinks(name: str) -> _Part:
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


def _key_lines(problem: Attention, cut: Tuning, *, masked: bool) -> list[str]:
    """A block of keys enters dq. Not `masked`: all queries of the block see all of them."""
    dtype, (bend, factor) = TRITON_LANGUAGE_DTYPES[problem.dtype], score_lines(problem)
    rows = "column < T" if masked else ""
    mask = seen_lines(problem) if masked else []
    return [
        f"column = start + tl.arange(0, {cut.keys})",
        f"k = tl.load(k_ptr + start * k_step + k_at{inside(rows, problem.width)})",
        f"v = tl.load(v_ptr + start * v_step + v_at{inside(rows, problem.value_width, 'value')})",
        "score = tl.dot(q, tl.trans(k))",
        *bend,
        f"weight = tl.exp2(score{factor} - log_sum[:, None])",
        *(marks_of_columns(problem) if masked else []),
        *mask,
        "weight = tl.where(seen, weight, 0.0)" if mask else "",
        "dweight = tl.dot(dout, tl.trans(v))",
        f"dscore = weight * (dweight - delta[:, None]){_bend(problem)}",
        f"dq = tl.dot(dscore.to(tl.{dtype}), k, dq)",
    ]


def _of_queries(name: str, problem: Attention, cut: Tuning) -> _Part:
    """dq."""
    dtype, value_width = TRITON_LANGUAGE_DTYPES[problem.dtype], problem.value_width
    reach = ("reach",) if problem.marks else ()
    tensors = ("dout", "q", "k", "v", "log_sums", "delta", *problem.marks, *reach, "dq")
    args = (*tensors, "H", "G", "S", "T", *strides_of("dout", "q", "k", "v", "dq"))
    first = f"block * {cut.queries}"
    lines = [
        *block_lines(cut, last_first=problem.causal),
        f"row = {first} + tl.arange(0, {cut.queries})",
        f"feature = tl.arange(0, {problem.columns})",
        f"value = tl.arange(0, {problem.value_columns})",
        *to_head("q", "head", first),
        *to_head("dout", "head", first),
        *to_head("dq", "head", first),
        *to_head("k", "group"),
        *to_head("v", "group"),
        "k_step, v_step = k_stride_2.to(tl.int64), v_stride_2.to(tl.int64)",
        f"q_at = tl.arange(0, {cut.queries})[:, None] * q_stride_2 + feature[None, :]",
        f"dout_at = tl.arange(0, {cut.queries})[:, None] * dout_stride_2 + value[None, :]",
        f"dq_at = tl.arange(0, {cut.queries})[:, None] * dq_stride_2 + feature[None, :]",
        f"k_at = tl.arange(0, {cut.keys})[:, None] * k_stride_2 + feature[None, :]",
        f"v_at = tl.arange(0, {cut.keys})[:, None] * v_stride_2 + value[None, :]",
        f"q = tl.load(q_ptr + q_at{inside('row < S', problem.width)})",
        f"dout = tl.load(dout_ptr + dout_at{inside('row < S', value_width, 'value')})",
        "at = (batch * H + head) * S + row",
        "log_sum = tl.load(log_sums_ptr + at, mask=row < S, other=0.0)",
        "delta = tl.load(delta_ptr + at, mask=row < S, other=0.0)",
        *marks_of_rows(problem),
        *reached(problem, cut.queries, step=cut.keys),
        f"dq = tl.zeros([{cut.queries}, {problem.columns}], tl.float32)",
    ]
    stored = f"(dq * {problem.scale!r}).to(tl.{dtype}){inside('row < S', problem.width, other='')}"
    masked, plain = (_key_lines(problem, cut, masked=masked) for masked in (True, False))
    source = f'''
@triton.jit
def {name}_queries(
{signature(args, tensors)}
):
    """dq of {title(problem)}.

    {cut.queries} queries per program.
    """
{lines_of(*lines)}{loops(problem, cut, masked, plain)}{lines_of(f"tl.store(dq_ptr + dq_at, {stored})")}'''
    grid = (("mul", ("mul", ("cdiv", "S", cut.queries), "B"), "H"),)
    return Launch(f"{name}_queries", args, grid, cut.num_warps, cut.num_stages, problem.aligned), source, ()


def _query_lines(problem: Attention, cut: Tuning) -> list[str]:
    """A block of queries of one head enters dk and dv. Tiles are [keys, queries]."""
    dtype, (bend, factor) = TRITON_LANGUAGE_DTYPES[problem.dtype], score_lines(problem)
    mask = seen_lines(problem, transposed=True, all_inside=True)
    return [
        "head = (group * heads + step // steps).to(tl.int64)",
        f"start = (low + step % steps * {cut.queries}).to(tl.int64)",
        f"row = low + step % steps * {cut.queries} + tl.arange(0, {cut.queries})",
        "q_block = q_ptr + head * q_stride_1 + start * q_stride_2",
        "dout_block = dout_ptr + head * dout_stride_1 + start * dout_stride_2",
        f"q = tl.load(q_block + q_at{inside('row < S', problem.width)})",
        f"dout = tl.load(dout_block + dout_at{inside('row < S', problem.value_width, 'value')})",
        "at = (batch * H + head) * S + row",
        "log_sum = tl.load(log_sums_ptr + at, mask=row < S, other=0.0)",
        "delta = tl.load(delta_ptr + at, mask=row < S, other=0.0)",
        "score = tl.dot(k, tl.trans(q))",
        *bend,
        f"weight = tl.exp2(score{factor} - log_sum[None, :])",
        *marks_of_rows(problem),
        *mask,
        "weight = tl.where(seen, weight, 0.0)" if mask else "",
        f"dv = tl.dot(weight.to(tl.{dtype}), dout, dv)",
        "dweight = tl.dot(v, tl.trans(dout))",
        f"dscore = weight * (dweight - delta[None, :]){_bend(problem)}",
        f"dk = tl.dot(dscore.to(tl.{dtype}), q, dk)",
    ]


def _of_keys(name: str, problem: Attention, cut: Tuning) -> _Part:
    """dk and dv."""
    dtype, value_width = TRITON_LANGUAGE_DTYPES[problem.dtype], problem.value_width
    seen_by = ("seen_by",) if problem.marks else ()
    tensors = ("dout", "q", "k", "v", "log_sums", "delta", *problem.marks, *seen_by, "dk", "dv")
    args = (*tensors, "H", "G", "S", "T", *strides_of("dout", "q", "k", "v", "dk", "dv"))
    first, keys = f"block * {cut.keys}", f"tl.arange(0, {cut.keys})[:, None]"
    key_mask, value_mask = (
        inside("column < T", width, columns, other="")
        for width, columns in ((problem.width, "feature"), (value_width, "value"))
    )
    queries = f"tl.arange(0, {cut.queries})[:, None]"
    read = ["seen_by_ptr += (batch * blocks + block) * 2", "low, high = tl.load(seen_by_ptr), tl.load(seen_by_ptr + 1)"]
    lines = [
        f"blocks = tl.cdiv(T, {cut.keys})",
        "block = tl.program_id(0) % blocks",
        "group = tl.program_id(0) // blocks % G",
        "batch = (tl.program_id(0) // blocks // G).to(tl.int64)",
        f"column = {first} + tl.arange(0, {cut.keys})",
        f"feature = tl.arange(0, {problem.columns})",
        f"value = tl.arange(0, {problem.value_columns})",
        *(line for tensor in ("k", "v", "dk", "dv") for line in to_head(tensor, "group", first)),
        "q_ptr += batch * q_stride_0",
        "dout_ptr += batch * dout_stride_0",
        f"q_at = {queries} * q_stride_2 + feature[None, :]",
        f"dout_at = {queries} * dout_stride_2 + value[None, :]",
        f"k_at = {keys} * k_stride_2 + feature[None, :]",
        f"v_at = {keys} * v_stride_2 + value[None, :]",
        f"k = tl.load(k_ptr + k_at{key_mask}, other=0.0)",
        f"v = tl.load(v_ptr + v_at{value_mask}, other=0.0)",
        *marks_of_columns(problem),
        *(read if problem.marks else bounds_of_queries(problem, cut.keys)),
        f"low = low // {cut.queries} * {cut.queries}",
        f"steps = tl.maximum(tl.cdiv(high - low, {cut.queries}), 0)",
        "heads = H // G",
        f"dk = tl.zeros([{cut.keys}, {problem.columns}], tl.float32)",
        f"dv = tl.zeros([{cut.keys}, {problem.value_columns}], tl.float32)",
        "for step in range(0, heads * steps):",
    ]
    end = [
        f"dk_at = {keys} * dk_stride_2 + feature[None, :]",
        f"dv_at = {keys} * dv_stride_2 + value[None, :]",
        f"tl.store(dk_ptr + dk_at, (dk * {problem.scale!r}).to(tl.{dtype}){key_mask})",
        f"tl.store(dv_ptr + dv_at, dv.to(tl.{dtype}){value_mask})",
    ]
    source = f'''
@triton.jit
def {name}_keys(
{signature(args, tensors)}
):
    """dk and dv of {title(problem)}.

    {cut.keys} keys per program, {cut.queries} queries at a time, of all heads of the group one after another.
    """
{lines_of(*lines)}{lines_of(*_query_lines(problem, cut), depth=2)}{lines_of(*end)}'''
    grid = (("mul", ("mul", ("cdiv", "T", cut.keys), "B"), "G"),)
    return Launch(f"{name}_keys", args, grid, cut.num_warps, cut.num_stages, problem.aligned), source, ()
