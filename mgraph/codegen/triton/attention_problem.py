"""Which nodes of the graph the kernels of attention take: an instance, or the reason why not."""

from __future__ import annotations

from dataclasses import dataclass

from mgraph.codegen.triton.kernel import TRITON_DTYPES
from mgraph.ir.dims import Dim
from mgraph.ir.graph import Node

LARGEST_WIDTH = 256
"""Above this a block of queries and one of keys do not fit in shared memory together."""


@dataclass(frozen=True)
class Attention:
    """One instance of `attention` or `attention_grad`.

    `width` is that of q and k, `value_width` that of v. `more` has the name and the dtype of each further operand.
    `square`: there are as many queries as keys. `share`: a power of two of query heads that have one key head.
    """

    dtype: str
    width: int
    value_width: int
    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    more: tuple[tuple[str, str], ...] = ()
    square: bool = True
    share: int = 1

    @property
    def extra(self) -> tuple[str, ...]:
        """The attribute `extra` of the op."""
        return tuple(name for name, _ in self.more)

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the further operands in the source: a second `segments` is `segments_2`."""
        return tuple(
            f"{name}_{before + 1}" if (before := self.extra[:i].count(name)) else name
            for i, name in enumerate(self.extra)
        )

    @property
    def marks(self) -> tuple[str, ...]:
        """The operands that hide keys: segments and padding."""
        return tuple(name for name in self.operands if name != "sinks")

    @property
    def columns(self) -> int:
        """`width`, rounded up to what a tile can have."""
        return tile_columns(self.width)

    @property
    def value_columns(self) -> int:
        """`value_width`, rounded up to what a tile can have."""
        return tile_columns(self.value_width)

    @property
    def aligned(self) -> bool:
        """Whether rows begin on 16-byte boundaries when their strides do."""
        return self.width % 8 == 0 and self.value_width % 8 == 0


def tile_columns(width: int) -> int:
    """A power of two, of at least the 16 columns that a matrix product takes."""
    return max(16, 1 << (width - 1).bit_length())


def problem_of(node: Node) -> Attention | str:
    """The instance that a node `attention` or `attention_grad` is, or why no kernel of ours should run it."""
    problem = instance_of(node)
    fused = isinstance(problem, Attention) and has_fused_kernel(problem)
    return "cuDNN's kernel is faster" if fused else problem


def instance_of(node: Node) -> Attention | str:
    """The instance that a node `attention` or `attention_grad` is, or why no kernel of ours can run it."""
    first, further = (1, 6) if node.op == "attention_grad" else (0, 3)
    q, k, v = (value.tensor for value in node.operands[first : first + 3])
    attrs, extra = node.attrs, node.attrs.get("extra", ())
    assert isinstance(extra, tuple), node
    width, value_width, dtype = q.shape[3], v.shape[3], q.dtype.text
    scale, window, softcap = attrs["scale"], attrs.get("window"), attrs.get("softcap")
    if not isinstance(width, int) or not isinstance(value_width, int):
        return f"the widths {width} and {value_width} of heads are not known numbers"
    if max(width, value_width) > LARGEST_WIDTH:
        return f"heads are {max(width, value_width)} wide; the kernel takes up to {LARGEST_WIDTH}"
    if dtype not in ("bf16", "f16") or any(t.dtype is not q.dtype for t in (k, v)):
        return f"q is {dtype}, k {k.dtype.text} and v {v.dtype.text}; the kernel takes bf16 or f16 for all"
    for name, value in zip(extra, node.operands[further:], strict=True):
        if value.tensor.dtype.text not in TRITON_DTYPES:
            return f"{name} is {value.tensor.dtype.text}; the kernel takes {', '.join(TRITON_DTYPES)}"
    if "start" in extra:
        return "the queries start somewhere in a longer sequence"
    if extra.count("keys") > 1 or extra.count("sinks") > 1:
        return "the kernel takes one keys and one sinks"
    if not isinstance(scale, float | int) or not scale > 0:
        return f"the scale {scale} is not positive"
    return Attention(
        dtype=dtype,
        width=width,
        value_width=value_width,
        scale=float(scale),
        causal=bool(attrs.get("causal", False)),
        window=window if isinstance(window, int) else None,
        softcap=float(softcap) if isinstance(softcap, float | int) else None,
        more=tuple(
            (str(name), value.tensor.dtype.text) for name, value in zip(extra, node.operands[further:], strict=True)
        ),
        square=bool(q.shape[2] == k.shape[2]),
        share=_power_within(q.shape[1], k.shape[1]),
    )


def _power_within(heads: Dim, groups: Dim) -> int:
    """The largest power of two that divides the query heads of a key head; 1 where they are not known."""
    if not isinstance(heads, int) or not isinstance(groups, int):
        return 1
    share = heads // groups
    return share & -share


def has_fused_kernel(problem: Attention) -> bool:
    """Whether the runtime's attention runs a fused kernel of torch."""
    even = problem.width == problem.value_width and problem.width % 8 == 0 and problem.softcap is None
    return even and problem.window is None and not problem.marks and (problem.square or not problem.causal)
