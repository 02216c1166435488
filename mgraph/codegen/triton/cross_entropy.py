"""Cross entropy over a vocabulary, its gradient, and both in one, as Triton source and torch twin.

    lse     = log sum exp(logits)                             over the classes of a row; further columns are padding
    sum     = sum of lse - logits[label]                      over the rows whose label is not ignore_index
    dlogits = dsum * (exp(logits - lse) - onehot(label))      0 in the other rows and in padding

in f32. Exponentials are those of base 2, and the running maximum and lse are kept in that base: what is rounded in them
is then the same wherever they are used. Each lane of a tile, one load of 16 bytes, has its own running maximum and sum,
which meet once at the end of a row. The losses of the rows are added by a second launch in a fixed order, so that
results repeat from run to run. Gradients are written over the logits.

In `forward_backward` a program reads its row for lse, and again for the gradient. In between the row lies in the cache
of its multiprocessor (L1), or what does not fit in that of the card (L2), so that it is read from memory once and
written once. To leave all of L1 to rows, tiles are loaded into registers, not ahead into shared memory, which is cut
from it and goes around it; the caches are told what will be read again and what not; and few programs share a
multiprocessor. No tile waits in registers for the second time: so more of them can be on their way. And there is no
loop, so that loads are placed as early as registers allow.

Rows of sizes that are no multiple of 16 bytes have edges: fewer elements than such a vector has, before the first
16-byte boundary and after the last. What lies between goes by vectors as other rows do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mgraph.codegen.triton.kernel import (
    ITEM_BYTES,
    LN2,
    LOG2E,
    LOWEST,
    TRITON_LANGUAGE_DTYPES,
    KernelSpec,
    Launch,
    TensorSpec,
)
from mgraph.ir.dims import Dim
from mgraph.ir.graph import Node

THREAD_ELEMENTS = 16
"""Elements of a tile that one thread has where a row is read once: in 16-bit dtypes two loads of 16 bytes."""

WARPS = ((4, 8), (8, 32), (16, 128))
"""Where a row is read twice: warps of a program, and the longest row in KiB that is given no more of them."""

MOST_WARPS = 32
"""Those of the longest rows: one program a multiprocessor then."""

L1_BYTES = 256 * 1024
"""Of rows longer than that cache the end is in it when all is read: there they are read again first."""

MOST_TILES = 16
"""Those of a row that is read twice, all written out: of more a compiler takes long."""

TOGETHER = 8
"""Loads of a thread that are under way together where a row is read the second time."""

REGISTERS = 64
"""Those of a thread where a row is read twice: so all that a multiprocessor has are in use by 32 warps."""

SUM_ROWS = 4096
"""Losses that are added at a time, each lane its own."""


@dataclass(frozen=True)
class CrossEntropy:
    """One instance: columns, the dtype of the logits, and the attributes (`classes` 0: all columns are classes)."""

    size: int
    dtype: str
    ignore_index: int = -100
    classes: int = 0

    @property
    def real(self) -> int:
        """The number of classes."""
        return self.classes or self.size

    @property
    def vector(self) -> int:
        """Elements in 16 bytes."""
        return 16 // ITEM_BYTES[self.dtype]

    @property
    def even(self) -> bool:
        """Whether every row starts on a 16-byte boundary when the tensor does; else a row has edges."""
        return self.size % self.vector == 0


def problem_of(node: Node) -> CrossEntropy | str:
    """The instance that a node of `cross_entropy`, `cross_entropy_grad` or `cross_entropy_with_grad` is, or why not."""
    first = 1 if node.op == "cross_entropy_grad" else 0
    logits, labels = (value.tensor for value in node.operands[first : first + 2])
    return _problem(node, logits.shape[1], logits.dtype.text, labels.dtype.text)


def chunk_problem_of(node: Node) -> CrossEntropy | str:
    """The instance of `cross_entropy_with_grad` that a `linear_cross_entropy_with_grad` runs on some rows at a time."""
    _, x, weight, labels, _ = (value.tensor for value in node.operands)
    return _problem(node, weight.shape[0], x.dtype.text, labels.dtype.text)


def _problem(node: Node, size: Dim, dtype: str, labels: str) -> CrossEntropy | str:
    if not isinstance(size, int):
        return f"the vocabulary {size} is not a known number"
    if dtype not in TRITON_LANGUAGE_DTYPES:
        return f"the logits are {dtype}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    if labels != "i64":
        return f"the labels are {labels}; the kernel takes i64"
    ignore_index, classes = node.attrs.get("ignore_index", -100), node.attrs.get("classes", 0)
    assert isinstance(ignore_index, int) and isinstance(classes, int), node
    return CrossEntropy(size, dtype, ignore_index, classes if classes < size else 0)


@dataclass(frozen=True)
class Tuning:
    """How a row is cut: elements per tile (a power of two) and warps; where it is read once, the loads in flight in a
    loop; where it is read twice, how many tiles are loaded together the second time, and whether from the row's end."""

    tile: int
    num_warps: int
    num_stages: int = 3
    together: int = TOGETHER
    from_end: bool = False


def forward_tuning(problem: CrossEntropy) -> Tuning:
    """Blocks of 8 warps, of which several share a multiprocessor; fewer for short rows."""
    return _tuning(problem, most_warps=8)


def backward_tuning(problem: CrossEntropy) -> Tuning:
    """Tiles without a loop: small blocks, many of them."""
    return _tuning(problem, most_warps=4)


def forward_backward_tuning(problem: CrossEntropy) -> Tuning:
    """As many programs a multiprocessor as its L1 holds rows of, so that some load while others compute and write. A
    tile is one load of 16 bytes a thread, and more of them in rows that would have too many tiles.

    Of a copy's speed on an H200, in bf16: 0.96 at 16,384 columns, 0.98 at 32,768 and at 50,304, 0.97 at 65,536, 0.96
    at 128,256; about 0.77 at 262,144, where neither L1 nor L2 holds the rows under way. Slower at 128,256 were rows in
    part in registers (0.89), loops (0.82), programs that take several rows and load the next while they write this one
    (0.87), to wait for the label before a row (0.93), and caches that are told nothing (0.76)."""
    row = problem.size * ITEM_BYTES[problem.dtype]
    num_warps = next((warps for warps, longest in WARPS if row <= longest * 1024), MOST_WARPS)
    loads = 1
    while problem.size > MOST_TILES * loads * 32 * num_warps * problem.vector:
        loads *= 2
    tile, together = loads * 32 * num_warps * problem.vector, max(1, TOGETHER // loads)
    return Tuning(tile, num_warps, 1, together, from_end=row > L1_BYTES)


def _tuning(problem: CrossEntropy, most_warps: int) -> Tuning:
    num_warps = most_warps
    while num_warps > 4 and 16 * num_warps * THREAD_ELEMENTS >= problem.size:
        num_warps //= 2
    return Tuning(32 * num_warps * THREAD_ELEMENTS, num_warps)


def forward(name: str, problem: CrossEntropy, tuning: Tuning | None = None) -> KernelSpec:
    """The site `sum, lse = name(logits, labels)`: logits [N, size], labels i64 [N] → sum f32 [], lse f32 [N]."""
    cut = tuning or forward_tuning(problem)
    return KernelSpec(
        name=name,
        source=_loss_source(name, problem, cut) + _sum_source(name),
        twin=_twin(name, "cross_entropy", ("logits", "labels"), problem),
        inputs=(_logits(problem), _LABELS),
        outputs=(_SUM, _LSE),
        scratch=(_LOSSES,),
        launches=(
            Launch(f"{name}_rows", ("logits", "labels", "lse", "losses"), ("rows",), *_shape(cut), aligned=True),
            _sum_launch(name),
        ),
    )


def backward(name: str, problem: CrossEntropy, tuning: Tuning | None = None) -> KernelSpec:
    """The site `dlogits = name(dsum, logits, labels, lse)`: dlogits is logits, written over."""
    cut = tuning or backward_tuning(problem)
    args = ("dsum", "logits", "labels", "lse")
    grid = (("mul", "rows", -(-problem.size // cut.tile)),)
    return KernelSpec(
        name=name,
        source=_gradient_source(name, problem, cut),
        twin=_twin(name, "cross_entropy_grad", args, problem),
        inputs=(_DSUM, _logits(problem), _LABELS, _LSE),
        outputs=(_gradient(problem),),
        scratch=(),
        launches=(Launch(name, args, grid, *_shape(cut), problem.even),),
    )


def forward_backward(name: str, problem: CrossEntropy, tuning: Tuning | None = None) -> KernelSpec:
    """The site `sum, lse, dlogits = name(logits, labels, dsum)`: dlogits is logits, written over."""
    cut = tuning or forward_backward_tuning(problem)
    args = ("logits", "labels", "dsum")
    return KernelSpec(
        name=name,
        source=_both_source(name, problem, cut) + _sum_source(name),
        twin=_twin(name, "cross_entropy_with_grad", args, problem),
        inputs=(_logits(problem), _LABELS, _DSUM),
        outputs=(_SUM, _LSE, _gradient(problem)),
        scratch=(_LOSSES,),
        launches=(
            Launch(f"{name}_rows", (*args, "lse", "losses"), ("rows",), *_shape(cut), True, REGISTERS),
            _sum_launch(name),
        ),
    )


_LABELS = TensorSpec("labels", "i64", ("*",))
_LSE = TensorSpec("lse", "f32", ("*",))
_LOSSES = TensorSpec("losses", "f32", ("*",))
_SUM = TensorSpec("sum", "f32", ())
_DSUM = TensorSpec("dsum", "f32", ())


def _logits(problem: CrossEntropy) -> TensorSpec:
    return TensorSpec("logits", problem.dtype, ("*", problem.size))


def _gradient(problem: CrossEntropy) -> TensorSpec:
    return TensorSpec("dlogits", problem.dtype, ("*", problem.size), alias="logits")


def _shape(cut: Tuning) -> tuple[int, int]:
    return cut.num_warps, cut.num_stages


def _sum_launch(name: str) -> Launch:
    return Launch(f"{name}_sum", ("losses", "sum", "rows"), (1,), num_warps=8, num_stages=1, aligned=True)


class _End(NamedTuple):
    """A column before which something ends: its text in the source, and the least number that it is."""

    text: str
    least: int


@dataclass(frozen=True)
class _Span:
    """Columns from where a pointer points: the ends of what is read, of the classes and of what is written."""

    pointer: str
    read: _End
    classes: _End
    written: _End

    def mask(self, column: str, end: _End, known_end: int | None = None) -> str:
        """The mask of a tile's columns; nothing where the tile is known to end before."""
        return "" if known_end is not None and known_end <= end.least else f", mask={column} < {end.text}"


def _whole_row(problem: CrossEntropy) -> _Span:
    """All columns of a row. Vectors are read whole, also that in which the classes end."""
    read = min(problem.size, -(-problem.real // problem.vector) * problem.vector)
    return _Span("logits_ptr", *(_End(str(end), end) for end in (read, problem.real, problem.size)))


def _body(problem: CrossEntropy) -> _Span:
    """The columns of a row that are vectors on 16-byte boundaries: all, or those between its edges."""
    if problem.even:
        return _whole_row(problem)
    end = _End("body_end", (problem.size - problem.vector + 1) // problem.vector * problem.vector)
    classes = _End(f"{problem.real} - head", problem.real - problem.vector + 1) if problem.classes else end
    return _Span("body_ptr", end, classes, end)


def _read(column: str, span: _Span, known_end: int | None = None, evict: str = "") -> str:
    """The text of a tile of logits as they lie."""
    mask = span.mask(column, span.read, known_end)
    other = ', other=float("-inf")' if mask else ""
    return f"tl.load({span.pointer} + {column}{mask}{other}{_policy(evict)})"


def _policy(evict: str) -> str:
    """What a load or store tells the cache: `first` for what nobody reads again, `last` for what is read soon."""
    return f', eviction_policy="evict_{evict}"' if evict else ""


def _wide_lines(tile: str, column: str, span: _Span, known_end: int | None = None) -> list[str]:
    """`x`, a tile of logits as f32, minus infinity outside the classes."""
    lines = [f"x = {tile}.to(tl.float32)"]
    if span.read != span.classes and span.mask(column, span.classes, known_end):
        lines.append(f'x = tl.where({column} < {span.classes.text}, x, float("-inf"))')
    return lines


def _loss_source(name: str, problem: CrossEntropy, cut: Tuning) -> str:
    span, column = _body(problem), "start + column"
    tile = [*_wide_lines(_read(column, span), column, span), *_ONLINE]
    return _rows_text(
        name,
        problem,
        ("logits_ptr", "labels_ptr", "lse_ptr", "losses_ptr"),
        [
            *_start_lines(problem, cut),
            f"for start in tl.range(0, {problem.real}, {cut.tile}, num_stages={cut.num_stages}):",
            *(f"    {line}" for line in tile),
            *_lse_lines(problem),
        ],
    )


def _both_source(name: str, problem: CrossEntropy, cut: Tuning) -> str:
    span, tiles = _body(problem), [(_at(start), start + cut.tile) for start in range(0, problem.size, cut.tile)]
    lines = _start_lines(problem, cut)
    for column, end in tiles[: -(-problem.real // cut.tile)]:
        lines += [*_wide_lines(_read(column, span, end, "last"), column, span, end), *_ONLINE]
    lines += ["scale = tl.where(counted, tl.load(dsum_ptr), 0.0)", *_lse_lines(problem)]
    again = tiles[::-1] if cut.from_end else tiles
    for first in range(0, len(tiles), cut.together):
        group = again[first : first + cut.together]
        lines += [f"tile_{i} = {_read(column, span, end, 'first')}" for i, (column, end) in enumerate(group)]
        for i, (column, end) in enumerate(group):
            lines += _wide_lines(f"tile_{i}", column, span, end) + _gradient_lines(column, problem, span, end)
    lines += _last_lines(problem)
    return _rows_text(name, problem, ("logits_ptr", "labels_ptr", "dsum_ptr", "lse_ptr", "losses_ptr"), lines)


def _rows_text(name: str, problem: CrossEntropy, arguments: tuple[str, ...], lines: list[str]) -> str:
    """The function that runs for each row."""
    over = ", and the gradient over its logits" if "dsum_ptr" in arguments else ""
    body = "".join(f"    {line}\n" for line in lines)
    return f'''
@triton.jit
def {name}_rows({", ".join(arguments)}):
    """lse and loss of one row of {problem.size} columns{_title(problem)}{over}.

    lse = log sum exp(logits), loss = lse - logits[label]; inside, lse and peak are to the base 2.
    """
{body}'''


def _start_lines(problem: CrossEntropy, cut: Tuning) -> list[str]:
    """Where a row and its columns are, its label, and maxima and sums of nothing yet."""
    lanes, vector = cut.tile // problem.vector, problem.vector
    return [
        "row = tl.program_id(0)",
        *([] if problem.even else _body_lines(problem)),
        f"logits_ptr += row.to(tl.int64) * {problem.size}",
        f"column = tl.arange(0, {lanes})[:, None] * {vector} + tl.arange(0, {vector})[None, :]",
        *_label_lines(problem),
        *([] if problem.even else _edge_lines(problem)),
        f"peak = tl.full([{lanes}], {LOWEST!r}, tl.float32)",
        f"total = tl.zeros([{lanes}], tl.float32)",
    ]


def _body_lines(problem: CrossEntropy) -> list[str]:
    """Where the body of an uneven row begins and ends; `head` columns are before it."""
    vector = problem.vector
    return [
        f"begin = (row.to(tl.int64) * {problem.size} + {vector - 1}) // {vector} * {vector}",
        f"head = tl.minimum(begin - row.to(tl.int64) * {problem.size}, {problem.size}).to(tl.int32)",
        f"body_end = ({problem.size} - head) // {vector} * {vector}",
        "body_ptr = logits_ptr + begin",
    ]


def _edge_lines(problem: CrossEntropy) -> list[str]:
    """The columns before and after the body of an uneven row, and their logits, to the base 2."""
    vector = problem.vector
    return [
        f"lane = tl.arange(0, {2 * vector})",
        f"edge = tl.where(lane < {vector}, lane, head + body_end + lane - {vector})",
        f"on_edge = tl.where(lane < {vector}, lane < head, edge < {problem.size})",
        f'at_edge = tl.load(logits_ptr + edge, mask=on_edge & (edge < {problem.real}), other=float("-inf"))',
        f"edge_x = at_edge.to(tl.float32) * {LOG2E!r}",
    ]


def _lse_lines(problem: CrossEntropy) -> list[str]:
    """lse and loss of a row, of the maxima and sums of its lanes and of its edges."""
    top, total = "tl.max(peak)", "tl.sum(total * tl.exp2(peak - top))"
    if not problem.even:
        top, total = f"tl.maximum({top}, tl.max(edge_x))", f"{total} + tl.sum(tl.exp2(edge_x - top))"
    return [
        f"top = {top}",
        f"lse = top + tl.log2({total})",
        f"tl.store(lse_ptr + row, lse * {LN2!r})",
        f"tl.store(losses_ptr + row, tl.where(counted, lse * {LN2!r} - picked, 0.0))",
    ]


def _last_lines(problem: CrossEntropy) -> list[str]:
    """The gradient in the edges of a row, and then in the label's column, wherever it is."""
    narrow = f".to(tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]})"
    at_edge = f"tl.store(logits_ptr + edge, (tl.exp2(edge_x - lse) * scale){narrow}, mask=on_edge)"
    return [
        *([] if problem.even else [at_edge]),
        "tl.debug_barrier()  # the label's column was written by another thread, perhaps",
        f"at_label = (tl.exp2(picked * {LOG2E!r} - lse) - 1.0) * scale",
        f"tl.store(logits_ptr + label, at_label{narrow}, mask=within)",
    ]


def _title(problem: CrossEntropy) -> str:
    return f", {problem.real} of them classes" if problem.classes else ""


def _at(start: int) -> str:
    return f"{start} + column" if start else "column"


def _label_lines(problem: CrossEntropy) -> list[str]:
    """The label, whether it counts, and its logit. One that is no class is not followed out of the row."""
    return [
        "label = tl.load(labels_ptr + row)",
        f"counted = label != {problem.ignore_index}",
        f"within = counted & (label >= 0) & (label < {problem.real})",
        "picked = tl.load(logits_ptr + label, mask=within, other=0.0).to(tl.float32)",
    ]


_ONLINE = (
    f"above = tl.maximum(peak, tl.max(x, axis=1) * {LOG2E!r})",
    f"total = total * tl.exp2(peak - above) + tl.sum(tl.exp2(x * {LOG2E!r} - above[:, None]), axis=1)",
    "peak = above",
)
"""The tile x enters the maxima and the sums of the lanes."""


def _gradient_lines(column: str, problem: CrossEntropy, span: _Span, known_end: int) -> list[str]:
    """The gradient of the tile x, but for the label's column, over its logits."""
    return [
        f"grad = tl.exp2(x * {LOG2E!r} - lse) * scale",
        f"tl.store({span.pointer} + {column}, grad.to(tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]})"
        f"{span.mask(column, span.written, known_end)}{_policy('first')})",
    ]


def _sum_source(name: str) -> str:
    return f'''

@triton.jit
def {name}_sum(losses_ptr, sum_ptr, rows):
    """The sum of the losses of all rows, in a fixed order."""
    total = tl.zeros([{SUM_ROWS}], tl.float32)
    for start in range(0, rows, {SUM_ROWS}):
        row = start + tl.arange(0, {SUM_ROWS})
        total += tl.load(losses_ptr + row, mask=row < rows, other=0.0)
    tl.store(sum_ptr, tl.sum(total))
'''


def _gradient_source(name: str, problem: CrossEntropy, cut: Tuning) -> str:
    blocks = -(-problem.size // cut.tile)
    row = f"tl.program_id(0) // {blocks}" if blocks > 1 else "tl.program_id(0)"
    start = f"tl.program_id(0) % {blocks} * {cut.tile} + " if blocks > 1 else ""
    end = blocks * cut.tile
    span = _whole_row(problem)
    read = "".join(f"    {line}\n" for line in _wide_lines(_read("column", span, end), "column", span, end))
    store_mask = span.mask("column", span.written, end)
    return f'''
@triton.jit
def {name}(dsum_ptr, logits_ptr, labels_ptr, lse_ptr):
    """The gradient over the logits, {cut.tile} of the {problem.size} columns of a row{_title(problem)}.

    dlogits = dsum * (exp(logits - lse) - onehot(label))
    """
    row = {row}
    column = {start}tl.arange(0, {cut.tile})
    logits_ptr += row.to(tl.int64) * {problem.size}
    label = tl.load(labels_ptr + row).to(tl.int32)
    scale = tl.where(label != {problem.ignore_index}, tl.load(dsum_ptr), 0.0)
    lse = tl.load(lse_ptr + row) * {LOG2E!r}
{read}    grad = tl.exp2(x * {LOG2E!r} - lse) - (column == label).to(tl.float32)
    tl.store(logits_ptr + column, (grad * scale).to(tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]}){store_mask})
'''


def _twin(name: str, op: str, inputs: tuple[str, ...], problem: CrossEntropy) -> str:
    options = f", ignore_index={problem.ignore_index}" if problem.ignore_index != -100 else ""
    options += f", classes={problem.classes}" if problem.classes else ""
    options += ", out=logits" if op != "cross_entropy" else ""
    what = {
        "cross_entropy": "The sum over rows of lse - logits[label], and lse",
        "cross_entropy_grad": "The gradient of the sum over rows of lse - logits[label], over the logits",
        "cross_entropy_with_grad": "The sum over rows of lse - logits[label], lse, and the gradient, over the logits",
    }[op]
    return f'''
def {name}({", ".join(inputs)}):
    """{what}."""
    return rt.{op}({", ".join(inputs)}{options})
'''
