"""Gated linear units and the squared ReLU, forward and backward, as Triton source and torch twin.

    y     = act(g) * (u + offset)               g, u: gate and up, with a limit > 0 cut to min(gate, limit) and
    dgate = dy * (u + offset) * act'(g)         min(max(up, -limit), limit); past it the gradient is 0
    dup   = dy * act(g)                         (joined: both in one result, dgate | dup, dup | dgate or in turns)

With s(t) = 1 / (1 + exp(-t)),

    silu          act(g) = g * s(g)
    quick_gelu    act(g) = g * s(alpha * g)
    gelu_tanh     act(g) = g * s(k g (1 + 0.044715 g^2)), k = sqrt(8 / pi): 0.5 (1 + tanh(t)) = s(2t) overflows nowhere
    gelu_erf      act(g) = g * 0.5 (1 + erf(g / sqrt(2)))
    squared_relu  y = max(x, 0)^2, dx = 2 dy max(x, 0): no gate

in f32, each result rounded once. Tensors are [..., size] with up to three leading dims. An input may have any strides
over these, as the halves of a packed [..., 2 size] have; its last dim is contiguous, unless gate and up are columns in
turns (`spaced`), which are read where they lie, too: whole and then taken apart in registers where each gate has its up
beside it, else one by one. Results are contiguous. On an H200, in bf16 [4, 8192, 5632], columns in turns read whole are
as fast as a copy of as many bytes, forward (1.02) and backward (1.02), one by one 0.89 of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from mgraph.codegen.triton.kernel import ITEM_BYTES, TRITON_LANGUAGE_DTYPES, Expression, KernelSpec, Launch, TensorSpec
from mgraph.ir.graph import Node

MOST_LEADING = 3
"""Leading dims that a tensor may have; each has its stride."""

LINE_ELEMENTS = 64
"""No row is cut into pieces shorter than this: 128 bytes of a 16-bit dtype are a line of the cache."""

WASTE = 1 / 16
"""Share of idle lanes, where a row ends within a tile, up to which a wider tile is taken."""

_K = math.sqrt(8 / math.pi)
_SIGMOID = {
    "silu": "gate",
    "quick_gelu": "{alpha!r} * gate",
    "gelu_tanh": f"{_K!r} * gate * (1 + 0.044715 * gate * gate)",
}
"""Acts of the form gate * sigmoid(t), by t."""

_SLOPE = {"silu": "", "quick_gelu": " * {alpha!r}", "gelu_tanh": f" * ({_K!r} * (1 + 0.134145 * gate * gate))"}
"""The factor dt/dgate of those."""


@dataclass(frozen=True)
class Glu:
    """One instance of the op: last extent, number of leading dims, the dtype of all tensors, and the attributes;
    `joined`: the gradients of gate and up lie in one result, as `layout` says; `spaced`: gate and up have columns with
    others between them."""

    size: int
    leading: int
    dtype: str
    act: str
    alpha: float = 1.702
    limit: float = 0.0
    offset: float = 0.0
    joined: bool = False
    layout: str = "halves"
    spaced: bool = False

    @property
    def operands(self) -> tuple[str, ...]:
        """What the forward takes."""
        return ("x",) if self.act == "squared_relu" else ("gate", "up")

    @property
    def aligned(self) -> bool:
        """Whether every row starts on a 16-byte boundary when the tensor does and its strides are multiples of 16."""
        return self.size * ITEM_BYTES[self.dtype] % 16 == 0


def problem_of(node: Node) -> Glu | str:
    """The instance that a node `glu`, `squared_relu` or a gradient of these is, or why there is no kernel for it."""
    shape, dtypes = node.operands[-1].tensor.shape, {value.tensor.dtype.text for value in node.operands}
    dtype = node.operands[-1].tensor.dtype.text
    if len(dtypes) > 1:
        return f"the operands are {' and '.join(sorted(dtypes))}; the kernel takes one dtype"
    if dtype not in TRITON_LANGUAGE_DTYPES:
        return f"the operands are {dtype}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    if not 1 <= len(shape) <= MOST_LEADING + 1:
        return f"the operands have {len(shape)} dims; the kernel takes 1 to {MOST_LEADING + 1}"
    if not isinstance(shape[-1], int):
        return f"the last dim {shape[-1]} is not a known number"
    act = str(node.attrs.get("act", "squared_relu"))
    numbers: dict[str, Any] = {name: node.attrs.get(name, 0.0) for name in ("limit", "offset")}
    if act == "quick_gelu":
        numbers["alpha"] = node.attrs.get("alpha", Glu.alpha)
    numbers = {name: float(number) for name, number in numbers.items()}
    joined = node.op == "glu_grad_joined"
    layout = str(node.attrs.get("layout", "halves"))
    spaced = layout == "interleaved" or bool(node.attrs.get("spaced", False))
    return Glu(shape[-1], len(shape) - 1, dtype, act, **numbers, joined=joined, layout=layout, spaced=spaced)


@dataclass(frozen=True)
class Tuning:
    """How a kernel is cut: rows and columns per tile (powers of two), and warps."""

    rows: int
    columns: int
    num_warps: int = 4


def forward_tuning(problem: Glu) -> Tuning:
    """32 bytes of each tensor a thread: two inputs of two 16-byte loads each keep enough on the way."""
    return _tuning(problem, elements=4096 // ITEM_BYTES[problem.dtype])


def backward_tuning(problem: Glu) -> Tuning:
    """16 bytes of each of the five tensors a thread, which leaves room for many blocks."""
    return _tuning(problem, elements=2048 // ITEM_BYTES[problem.dtype])


def _tuning(problem: Glu, elements: int) -> Tuning:
    """The widest tile of which next to nothing idles; else, of short and odd rows, that of which the least does."""
    widths = [elements >> i for i in range(elements.bit_length()) if elements >> i >= LINE_ELEMENTS]
    idle = {width: -problem.size % width / problem.size for width in widths}
    columns = next((width for width in widths if idle[width] <= WASTE), min(widths, key=lambda width: idle[width]))
    return Tuning(elements // columns if problem.leading else 1, columns)


def forward(name: str, problem: Glu, tuning: Tuning | None = None) -> KernelSpec:
    """The site `y = name(gate, up)`, or `y = name(x)` of the squared ReLU; all [..., size]."""
    cut = tuning or forward_tuning(problem)
    return _site(name, replace(problem, joined=False), cut, problem.operands, ("y",))


def backward(name: str, problem: Glu, tuning: Tuning | None = None) -> KernelSpec:
    """The site `dgate, dup = name(dy, gate, up)`, or `dx = name(dy, x)` of the squared ReLU; all [..., size]. Joined,
    it is `dx = name(dy, gate, up)`, [..., 2 size]."""
    cut = tuning or backward_tuning(problem)
    results = ("dx",) if problem.joined else tuple(f"d{operand}" for operand in problem.operands)
    return _site(name, problem, cut, ("dy", *problem.operands), results)


def _site(name: str, problem: Glu, cut: Tuning, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> KernelSpec:
    extents = tuple(f"n{i}" for i in range(problem.leading))
    shape: tuple[Expression, ...] = (*extents, problem.size)
    width = problem.size * (2 if problem.joined else 1)
    count: Expression = 1
    for extent in extents:
        count = extent if count == 1 else ("mul", count, extent)
    grid: Expression = ("mul", ("cdiv", "count", cut.rows), -(-problem.size // cut.columns))

    def launch(function: str, read: tuple[str, ...], spaced: tuple[str, ...], takes: str) -> tuple[Launch, str]:
        """The launch that reads tensors, some of them with a stride between columns, and its source."""
        strides = [f"{tensor}_stride_{i}" for tensor in read for i in range(problem.leading)]
        strides += [f"{tensor}_stride_{problem.leading}" for tensor in spaced]
        args = (*read, *outputs, "count", *extents[1:], *strides)
        aligned = problem.aligned and takes != "others"  # others are read column by column
        source = _source(function, problem, cut, args, read, outputs)
        return Launch(function, args, (grid,), cut.num_warps, 1, aligned, takes=takes), source

    if not problem.spaced:
        launches = [launch(name, inputs, (), "all")]
    elif problem.aligned:
        whole = tuple(tensor for tensor in inputs if tensor != "up")
        launches = [launch(f"{name}_whole", whole, (), "aligned"), launch(name, inputs, problem.operands, "others")]
    else:
        launches = [launch(name, inputs, problem.operands, "all")]
    return KernelSpec(
        name=name,
        source="".join(source for _, source in launches),
        twin=_twin(name, problem, inputs),
        inputs=tuple(
            TensorSpec(
                tensor,
                problem.dtype,
                shape,
                strided=bool(extents) or (problem.spaced and tensor in problem.operands),
                beside="gate" if problem.spaced and tensor == "up" else "",
            )
            for tensor in inputs
        ),
        outputs=tuple(TensorSpec(tensor, problem.dtype, (*extents, width)) for tensor in outputs),
        scratch=(),
        launches=tuple(made for made, _ in launches),
        dims={"count": count},
    )


def _formula(problem: Glu) -> str:
    """The formula with its numbers, for docstrings."""
    if problem.act == "squared_relu":
        return "max(x, 0)^2"
    up = f"(up + {problem.offset!r})" if problem.offset else "up"
    act = f"gate * sigmoid({problem.alpha!r} * gate)" if problem.act == "quick_gelu" else f"{problem.act}(gate)"
    cut = f", gate at most {problem.limit!r}, up within +-{problem.limit!r}" if problem.limit else ""
    return f"{act} * {up}{cut}"


def _source(
    name: str, problem: Glu, cut: Tuning, args: tuple[str, ...], inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> str:
    pointers = [f"{arg}_ptr" if arg in (*inputs, *outputs) else arg for arg in args]
    blocks = -(-problem.size // cut.columns)
    block = f"tl.program_id(0) % {blocks} * {cut.columns} + " if blocks > 1 else ""
    masks = ["(row < count)[:, None]"] * (cut.rows > 1)
    masks += [f"(column < {problem.size})[None, :]"] * (problem.size % cut.columns != 0)
    mask = ", mask=inside" if masks else ""
    lines = [
        f"tile = tl.program_id(0){f' // {blocks}' * (blocks > 1)}",
        f"row = tile{f' * {cut.rows}' * (cut.rows > 1)} + tl.arange(0, {cut.rows})",
        f"column = {block}tl.arange(0, {cut.columns})",
        *([f"inside = {' & '.join(masks)}"] if masks else []),
        *_index_lines(problem.leading),
    ]
    place, place_mask = _place(problem, cut, block)
    whole = problem.spaced and "up" not in inputs
    if whole or (problem.joined and problem.layout == "interleaved"):
        lines.append(f"place = {place}")
    for tensor in inputs:
        start = ""
        if problem.leading:
            offsets = [f"index_{i} * {tensor}_stride_{i}" for i in range(problem.leading)]
            lines.append(f"{tensor}_row = {' + '.join(offsets)}")
            start = f" + {tensor}_row[:, None]"
        if whole and tensor == "gate":
            lines += [
                f"whole = tl.load(gate_ptr{start} + place[None, :]{place_mask})",
                f"gate, up = tl.split(tl.reshape(whole, [{cut.rows}, {cut.columns}, 2]))",
                "gate, up = gate.to(tl.float32), up.to(tl.float32)",
            ]
            continue
        step = f" * {tensor}_stride_{problem.leading}" if problem.spaced and tensor in problem.operands else ""
        lines.append(f"{tensor} = tl.load({tensor}_ptr{start} + column[None, :]{step}{mask}).to(tl.float32)")
    lines += backward_lines(problem) if "dy" in inputs else forward_lines(problem)
    lines += _store_lines(problem, outputs, mask, place_mask)
    of = " of y" if "dy" in inputs else ""
    body = "".join(f"    {line}\n" for line in lines)
    return f'''
@triton.jit
def {name}({_signature(pointers)}):
    """{", ".join(outputs)}{of}, {cut.rows} row(s) by {cut.columns} of {problem.size} columns per program.

    y = {_formula(problem)}
    """
{body}'''


def _place(problem: Glu, cut: Tuning, block: str) -> tuple[str, str]:
    """The columns of a tile of pairs, a gate and its up, and their mask; `block` is where those of the program begin in
    each of the two, and a plus."""
    start = f"2 * ({block.removesuffix(' + ')}) + " if block else ""
    masks = ["(row < count)[:, None]"] * (cut.rows > 1)
    masks += [f"(place < {2 * problem.size})[None, :]"] * (problem.size % cut.columns != 0)
    return f"{start}tl.arange(0, {2 * cut.columns})", f", mask={' & '.join(masks)}" if masks else ""


def _store_lines(problem: Glu, outputs: tuple[str, ...], mask: str, place_mask: str) -> list[str]:
    """What writes the results."""
    narrow = f".to(tl.{TRITON_LANGUAGE_DTYPES[problem.dtype]})"
    if problem.joined and problem.layout == "interleaved":
        return [
            f"element = row.to(tl.int64)[:, None] * {2 * problem.size} + place[None, :]",
            f"tl.store(dx_ptr + element, tl.interleave(dgate{narrow}, dup{narrow}){place_mask})",
        ]
    width = problem.size * (2 if problem.joined else 1)
    places = {tensor: f"{tensor}_ptr + element" for tensor in outputs}
    if problem.joined:
        first, second = ("dup", "dgate") if problem.layout == "swapped" else ("dgate", "dup")
        places = {first: "dx_ptr + element", second: f"dx_ptr + element + {problem.size}"}
    stores = [f"tl.store({place}, {tensor}{narrow}{mask})" for tensor, place in places.items()]
    return [f"element = row.to(tl.int64)[:, None] * {width} + column[None, :]", *stores]


def _signature(names: list[str]) -> str:
    """Names of arguments; on lines of their own, strides apart, where they are many."""
    if len(names) <= 6:
        return ", ".join(names)
    strides = [name for name in names if "_stride_" in name]
    parts = [[name for name in names if name not in strides], strides]
    return "\n" + "".join(f"    {', '.join(part)},\n" for part in parts if part)


def _index_lines(leading: int) -> list[str]:
    """The index along each leading dim, of which rows are the product; in 64 bits, as offsets may need them."""
    lines, rest = [], "row"
    for i in range(leading - 1, 0, -1):
        lines.append(f"index_{i} = ({rest} % n{i}).to(tl.int64)")
        rest = f"{rest} // n{i}"
    return (
        [*lines, f"index_0 = ({rest}).to(tl.int64)" if leading > 1 else "index_0 = row.to(tl.int64)"] if leading else []
    )


def _cut_lines(problem: Glu) -> list[str]:
    """Gate and up within the limit; a number that is none stays so."""
    limit = problem.limit
    if not limit:
        return []
    return [
        f"gate = tl.where(gate > {limit!r}, {limit!r}, gate)",
        f"up = tl.where(up > {limit!r}, {limit!r}, tl.where(up < {-limit!r}, {-limit!r}, up))",
    ]


def _act_lines(problem: Glu) -> list[str]:
    """`part`, by which gate is multiplied, and `act`."""
    if problem.act == "gelu_erf":
        part = f"0.5 * (1 + tl.erf({math.sqrt(0.5)!r} * gate))"
    else:
        part = f"tl.sigmoid({_SIGMOID[problem.act].format(alpha=problem.alpha)})"
    return [f"part = {part}", "act = gate * part"]


def forward_lines(problem: Glu) -> list[str]:
    """`y` of gate and up, or of x."""
    if problem.act == "squared_relu":
        return ["positive = tl.where(x < 0, 0.0, x)", "y = positive * positive"]
    up = f"(up + {problem.offset!r})" if problem.offset else "up"
    return [*_cut_lines(problem), *_act_lines(problem), f"y = act * {up}"]


def backward_lines(problem: Glu) -> list[str]:
    """`dgate` and `dup` of dy, gate and up, with `act` on the way; or `dx` of dy and x."""
    if problem.act == "squared_relu":
        return ["dx = 2 * dy * tl.where(x < 0, 0.0, x)"]
    if problem.act == "gelu_erf":
        slope = f"part + gate * ({1 / math.sqrt(2 * math.pi)!r} * tl.exp(-0.5 * gate * gate))"
    else:
        slope = f"part + act * (1 - part){_SLOPE[problem.act].format(alpha=problem.alpha)}"
    up = f"(up + {problem.offset!r})" if problem.offset else "up"
    lines = [*_act_lines(problem), f"dgate = dy * {up} * ({slope})", "dup = dy * act"]
    if not problem.limit:
        return lines
    limit = problem.limit
    return [
        f"gate_past, up_past = gate > {limit!r}, tl.abs(up) > {limit!r}",
        *_cut_lines(problem),
        *lines,
        "dgate, dup = tl.where(gate_past, 0.0, dgate), tl.where(up_past, 0.0, dup)",
    ]


def _twin(name: str, problem: Glu, inputs: tuple[str, ...]) -> str:
    options = f', act="{problem.act}"' if problem.act != "squared_relu" else ""
    options += f", alpha={problem.alpha!r}" if problem.act == "quick_gelu" else ""
    options += f", limit={problem.limit!r}" if problem.limit else ""
    options += f", offset={problem.offset!r}" if problem.offset else ""
    options += (
        f', layout="{problem.layout}"' if problem.joined and "dy" in inputs and problem.layout != "halves" else ""
    )
    op = "squared_relu" if problem.act == "squared_relu" else "glu"
    results = "Gradient of " if "dy" in inputs else ""
    grad = ("_grad" + "_joined" * problem.joined) if "dy" in inputs else ""
    return f'''
def {name}({", ".join(inputs)}):
    """{results}y = {_formula(problem)}."""
    return rt.{op}{grad}({", ".join(inputs)}{options})
'''
