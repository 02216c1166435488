"""QK-norm, rotary embedding and the append to the paged cache in one kernel, as Triton source and torch twin.

A program takes some heads of one token: of the queries, which it normalises and turns into a new tensor; of the keys,
which go to their row of the cache instead; or of the values, which are copied to theirs. All three are read once and
written once, and a token's tables are read by few programs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mgraph.codegen.triton.aot import ALIGNMENT
from mgraph.codegen.triton.kernel import ITEM_BYTES, TRITON_LANGUAGE_DTYPES, KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.rms_norm import RmsNorm, rounded_normed
from mgraph.ir.graph import Node
from mgraph.ir.opdef import op_def

HEADS = 8
"""Heads of a program, at most."""
WARPS = 4
"""Of a program; with two, a prompt of 8192 tokens takes a quarter longer, and single tokens are no faster (H200)."""
WIDEST = 512
_STRIDES = tuple(f"{name}_stride_{dim}" for name in ("q", "k", "v") for dim in (0, 1))


@dataclass(frozen=True)
class RopeAppend:
    """One instance: dtypes, heads, widths, the style of the rotation, and the norm, if there is one."""

    dtype: str
    table: str
    heads: int
    groups: int
    width: int
    value_width: int
    table_width: int
    style: str = "half"
    norm: RmsNorm | None = None


def problem_of(node: Node) -> RopeAppend | str:
    """The instance that a node is, or why there is no kernel for it."""
    keys, values, q, k, v, _, cos, _, *weights = (value.tensor for value in node.operands)
    attrs = op_def("rope_kv_append").complete(node.attrs)
    if q.dtype.text not in TRITON_LANGUAGE_DTYPES or {t.dtype for t in (keys, values, k, v)} != {q.dtype}:
        return f"queries are {q.dtype.text} and the cache {keys.dtype.text}"
    if cos.dtype.text not in TRITON_LANGUAGE_DTYPES:
        return f"tables are {cos.dtype.text}"
    sizes: tuple[Any, ...] = (q.shape[1], k.shape[1], q.shape[2], v.shape[2], cos.shape[1])
    if not all(isinstance(size, int) for size in sizes):
        return "heads or widths are not known"
    heads, groups, width, value_width, table_width = sizes
    if width % 2 or max(width, value_width) > WIDEST:
        return f"heads of {width} and {value_width}"
    norm = None
    if weights:
        kinds = {t.dtype.text for t in weights}
        if len(kinds) > 1 or not kinds <= set(TRITON_LANGUAGE_DTYPES):
            return f"weights of the norms are {', '.join(sorted(kinds))}"
        eps, offset, rounding = float(attrs["eps"]), float(attrs["offset"]), str(attrs["round"])
        norm = RmsNorm(width, q.dtype.text, kinds.pop(), eps, rounding, offset)
    style = str(attrs["style"])
    return RopeAppend(q.dtype.text, cos.dtype.text, heads, groups, width, value_width, table_width, style, norm)


def append(name: str, problem: RopeAppend) -> KernelSpec:
    """The site `turned = name(keys, values, q, k, v, slots, cos, sin[, q_weight, k_weight])`: turned [T, H, D]; keys
    [C, G, D] and values [C, G, E] are written."""
    weights = ("q_weight", "k_weight") if problem.norm else ()
    inputs = ("keys", "values", "q", "k", "v", "slots", "cos", "sin", *weights)
    args = (*inputs, "turned", *_STRIDES, "cos_stride_0", "sin_stride_0")
    head, group = (problem.heads, problem.width), (problem.groups, problem.width)
    value = (problem.groups, problem.value_width)
    tensors = {
        "keys": TensorSpec("keys", problem.dtype, ("C", *group)),
        "values": TensorSpec("values", problem.dtype, ("C", *value)),
        "q": TensorSpec("q", problem.dtype, ("T", *head), strided=True),
        "k": TensorSpec("k", problem.dtype, ("T", *group), strided=True),
        "v": TensorSpec("v", problem.dtype, ("T", *value), strided=True),
        "slots": TensorSpec("slots", "i64", ("T",)),
        "cos": TensorSpec("cos", problem.table, ("T", problem.table_width), strided=True),
        "sin": TensorSpec("sin", problem.table, ("T", problem.table_width), strided=True),
    }
    if problem.norm:
        tensors |= {n: TensorSpec(n, problem.norm.weight, (problem.width,)) for n in weights}
    rows = [(problem.width, problem.dtype), (problem.value_width, problem.dtype), (problem.table_width, problem.table)]
    aligned = all(width * ITEM_BYTES[dtype] % 16 == 0 for width, dtype in rows)
    blocks = _blocks(problem.heads) + 2 * _blocks(problem.groups)
    return KernelSpec(
        name=name,
        source=_source(name, problem, args),
        twin=_twin(name, problem, inputs),
        inputs=tuple(tensors[n] for n in inputs),
        outputs=(TensorSpec("turned", problem.dtype, ("T", *head)),),
        scratch=(),
        launches=(Launch(name, args, ("T", blocks), WARPS, 1, aligned),),
        dims={},
    )


def fixed(name: str, problem: RopeAppend) -> KernelSpec:
    """The site of `append` with one binary for any number of tokens: a token has no stride to the next one, and so may
    lie evenly where several do not, but a norm adds up in another order where it is read otherwise."""
    spec = append(name, problem)
    heads = (problem.heads * problem.width, problem.groups * problem.width, problem.groups * problem.value_width)
    if problem.norm is None or not any(stride % ALIGNMENT for stride in (*heads, problem.width, problem.table_width)):
        return spec
    return replace(spec, launches=tuple(replace(launch, aligned=False) for launch in spec.launches))


def _blocks(heads: int) -> int:
    return -(-heads // HEADS)


def _turning(problem: RopeAppend, of: str, heads: int, first: str, target: tuple[str, str]) -> str:
    """Lines that normalise and turn the heads of `of` (q or k) and write them to rows that begin at `target`."""
    pairs = problem.width // 2
    inside = f"(head < {heads})[:, None] & (pair < {pairs})[None, :]"
    lines = [
        f"head = ({first}) * {HEADS} + tl.arange(0, {HEADS})",
        f"inside = {inside}",
        f"source = {of}_ptr + token * {of}_stride_0 + head[:, None] * {of}_stride_1",
        "a = tl.load(source + place_a[None, :], mask=inside, other=0.0).to(tl.float32)",
        "b = tl.load(source + place_b[None, :], mask=inside, other=0.0).to(tl.float32)",
    ]
    if problem.norm is not None:
        norm = problem.norm
        offset = f" + {norm.offset!r}" if norm.offset else ""
        language = TRITON_LANGUAGE_DTYPES[problem.dtype]
        lines += [f"rstd = tl.rsqrt(tl.sum(a * a + b * b, axis=1)[:, None] / {problem.width} + {norm.eps!r})"]
        for part in "ab":
            weight = f"tl.load({of}_weight_ptr + place_{part}, mask=pair < {pairs}, other=0.0)"
            lines += [
                f"scale_{part} = {weight}.to(tl.float32)[None, :]{offset}",
                f"{part} = {part} * rstd",
                f"{part} = ({rounded_normed(part, norm)} * scale_{part}).to(tl.{language}).to(tl.float32)",
            ]
    tensor, row = target
    language = TRITON_LANGUAGE_DTYPES[problem.dtype]
    for part, text in (("a", "a * cos_a - b * sin_a"), ("b", "b * cos_b + a * sin_b")):
        place = f"{row} * {heads * problem.width} + head[:, None] * {problem.width} + place_{part}[None, :]"
        lines.append(f"tl.store({tensor}_ptr + {place}, ({text}).to(tl.{language}), mask=inside)")
    return "".join(f"        {line}\n" for line in lines)


def _source(name: str, problem: RopeAppend, args: tuple[str, ...]) -> str:
    signature = ", ".join(a if "_stride_" in a else f"{a}_ptr" for a in args)
    pairs = problem.width // 2
    size = 1 << (pairs - 1).bit_length()
    value_size = 1 << (problem.value_width - 1).bit_length()
    places = ("pair * 2", "pair * 2 + 1") if problem.style == "interleaved" else ("pair", f"pair + {pairs}")
    narrow = problem.table_width != problem.width
    tables = [
        f"{t}_{part} = tl.load({t}_ptr + token * {t}_stride_0 + {'pair' if narrow else f'place_{part}'}, "
        f"mask=pair < {pairs}, other=0.0).to(tl.float32)[None, :]"
        for t in ("cos", "sin")
        for part in "ab"
    ]
    table_text = "".join(f"        {line}\n" for line in tables)
    queries, groups = _blocks(problem.heads), _blocks(problem.groups)
    return f'''
@triton.jit
def {name}(
    {signature}
):
    """Heads of one token: queries{", normalised and" * bool(problem.norm)} turned; keys and values go to the cache."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, {size})
    place_a = {places[0]}
    place_b = {places[1]}
    if block < {queries}:
{table_text}{_turning(problem, "q", problem.heads, "block", ("turned", "token"))}\
    elif block < {queries + groups}:
        row = tl.load(slots_ptr + token)
{table_text}{_turning(problem, "k", problem.groups, f"block - {queries}", ("keys", "row"))}\
    else:
        row = tl.load(slots_ptr + token)
        v_head = (block - {queries + groups}) * {HEADS} + tl.arange(0, {HEADS})
        wide = tl.arange(0, {value_size})
        v_inside = (v_head < {problem.groups})[:, None] & (wide < {problem.value_width})[None, :]
        v_source = v_ptr + token * v_stride_0 + v_head[:, None] * v_stride_1 + wide[None, :]
        v_place = row * {problem.groups * problem.value_width} + v_head[:, None] * {problem.value_width} + wide[None, :]
        tl.store(values_ptr + v_place, tl.load(v_source, mask=v_inside, other=0.0), mask=v_inside)
'''


def _twin(name: str, problem: RopeAppend, inputs: tuple[str, ...]) -> str:
    options = f', style="{problem.style}"' * (problem.style != "half")
    if (norm := problem.norm) is not None:
        options += f", eps={norm.eps!r}" + f", offset={norm.offset!r}" * bool(norm.offset)
        options += f', round="{norm.round}"' * (norm.round != "product")
    arguments = ", ".join(inputs)
    return f'''
def {name}({arguments}):
    """Queries, turned; keys and values are written to the cache."""
    return rt.rope_kv_append_({arguments}{options})
'''
