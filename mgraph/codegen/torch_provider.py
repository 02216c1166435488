"""The torch provider: how each op instance is written as calls of torch, of the runtime's ops, or of a kernel site.

`write` gives the text of one node. The text of a node that only writes into operands is a statement; of any other, an
expression to be bound to its results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from mgraph.codegen.dim_text import DimScope
from mgraph.codegen.expert_forms import EXPERT_FORMS, outer_operands
from mgraph.codegen.kernel_sites import KernelSites
from mgraph.codegen.liveness import written_operands
from mgraph.codegen.names import identifier
from mgraph.codegen.torch_forms import COMMUTATIVE, OVERWRITING, Call, expression
from mgraph.codegen.triton import adamw
from mgraph.errors import PassError
from mgraph.ir.aten import argument_names, call_arguments, overload, takes_device
from mgraph.ir.graph import Node, Static, Value
from mgraph.ir.opdef import op_def
from mgraph.ir.torch_bridge import torch_dtype_name
from mgraph.ir.types import DType


@dataclass(frozen=True, slots=True)
class Site:
    """What a writer sees of one node: texts of its operands, and how to write the rest.

    `overwrite` is the index of an operand whose memory the node may take for its result, or None. `tensors` writes
    a list of operands, with a name for the table of state names that it may need. `lists` says from where on operands
    are all of a list, which has a name, and how many they are. `sent` is the axis over which the next message sends all
    results.
    """

    node: Node
    operands: Sequence[str]
    dims: DimScope
    kernels: KernelSites
    device: Callable[[], str]
    tensors: Callable[[Sequence[Value], str], str]
    overwrite: int | None = None
    lists: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    sent: str = ""

    def listed(self, places: Iterable[int]) -> str:
        """The text of a list of operands."""
        return listed([(place, self.operands[place]) for place in places], self.lists)

    def literal(self, value: Any) -> str:
        """An attribute as Python text."""
        if isinstance(value, Static):
            return identifier(value.name)
        if isinstance(value, DType):
            return f"torch.{torch_dtype_name(value)}"
        if isinstance(value, tuple | list):
            return f"[{', '.join(map(self.literal, value))}]"
        if isinstance(value, sympy.Expr):
            return self.dims.text(value)
        if isinstance(value, str):
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        return repr(value)


@dataclass(frozen=True, slots=True)
class Written:
    """The text of a node. `results` maps results to the operand they are (written in place); all others are bound to
    `text`, which is a statement if there are none. Statements may come `before` and `after` it."""

    text: str
    results: Mapping[int, int]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def listed(operands: Sequence[tuple[int, str]], lists: Mapping[int, tuple[str, int]]) -> str:
    """The text of a list of operands, by places and texts; what is a list already goes by its name."""
    parts: list[str] = []
    rest = list(operands)
    while rest:
        start, text = rest[0]
        name, count = lists.get(start, (text, 1))
        if [place for place, _ in rest[:count]] != list(range(start, start + count)):
            name, count = text, 1
        if 1 < count == len(operands):
            return name
        parts.append(f"*{name}" if count > 1 else name)
        rest = rest[count:]
    return f"[{', '.join(parts)}]"


def write(site: Site) -> Written:
    """The text of a node."""
    node = site.node
    name = node.op.removesuffix("_")
    in_place = {i: i for i in range(written_operands(node))}
    if name == "adamw":
        return _adamw(site)
    if name in ("global_norm", "square_sum"):
        return Written(_of_all(site), {})
    if name == "matmul_add":
        return Written(f"rt.matmul_add({', '.join(site.operands)})", {})
    if name == "linear_cross_entropy_with_grad":
        return _linear_cross_entropy(site)
    if name in ("linear", "linear_glu") and not site.kernels.fixed:
        return Written(_linear(site), {})
    if name == "wait":  # of what is reduced in place there is no more to write, and that is not asked for
        return Written(_chosen(site, f"rt.wait({site.operands[0]})"), {})
    if (kernel := site.kernels.name(node)) is not None:
        return _kernel(site, kernel, in_place)
    if "." in node.op:
        return _write_aten(site, in_place)
    if name in _EXPRESSIONS:
        return Written(_EXPRESSIONS[name](site), in_place)
    raise PassError(f"there is no torch form of the op {node.op!r}", where=str(node.origin))


def _kernel(site: Site, name: str, in_place: dict[int, int]) -> Written:
    """A call of a kernel site, which gives all its results. An operand that it writes in place is a copy, unless its
    memory may be taken."""
    spec = site.kernels.spec(name)
    places = {tensor.name: index for index, tensor in enumerate(spec.inputs)}
    aliased = {i: places[tensor.alias] for i, tensor in enumerate(spec.outputs) if tensor.alias}
    texts = list(site.operands)
    for result, operand in aliased.items():
        if result not in in_place and operand != site.overwrite:
            texts[operand] += ".clone()"
    called = f"K.{name}(" if not site.sent else f"rt.sendable({site.literal(site.sent)}, K.{name}, "
    return Written(f"{called}{', '.join(texts)})", in_place)


def _linear(site: Site) -> str:
    """A call of the runtime's op, which takes the kernel for a few rows where there are few. More have their gated unit
    made by its own kernel."""
    node = site.node
    parts = [*site.operands, *(f"{name}={_tuple(site, value)}" for name, value in node.attrs.items())]
    if (few := site.kernels.name(node)) is not None:
        parts.append(f"few=K.{few}")
    if site.kernels.provider(node) == "tensorrt":
        parts.append('by="tensorrt"')
    if node.op == "linear_glu":
        glu = replace(node.with_values((node.result, node.result), node.results), op="glu")
        if (unit := site.kernels.name(glu)) is not None:
            parts.append(f"unit=K.{unit}")
    return f"rt.{node.op}({', '.join(parts)})"


def _tuple(site: Site, value: Any) -> str:
    return repr(value) if isinstance(value, tuple) else site.literal(value)


def _linear_cross_entropy(site: Site) -> Written:
    """The runtime's loop over rows, which is handed the kernel site of the loss where there is one."""
    node = site.node
    assert node.op.endswith("_"), f"{node!r}: sums into state are emitted in place"
    defaults = {} if (kernel := site.kernels.name(node)) else op_def(node.op).attrs
    given = {k: v for k, v in node.attrs.items() if k == "rows" or (k in defaults and defaults[k] != v)}
    options = [f"{k}={site.literal(v)}" for k, v in given.items()]
    options += [f"loss=K.{kernel}"] if kernel else []
    return Written(f"rt.{node.op}({', '.join([*site.operands, *options])})", {0: 0})


def _write_aten(site: Site, in_place: dict[int, int]) -> Written:
    node = site.node
    places = dict(zip(argument_names(node.op, len(node.operands), node.attrs), site.operands, strict=True))
    attrs = {k: v for k, v in node.attrs.items() if k != "args"}
    texts = {k: site.literal(v) for k, v in attrs.items()}
    marked = {**texts, **({"args": node.attrs["args"]} if "args" in node.attrs else {})}
    positional, keywords = call_arguments(node.op, range(len(node.operands)), marked)
    arguments = [a.name for a in overload(node.op)._schema.arguments]
    flags = [i for i, name in enumerate(arguments[: len(positional)]) if i and isinstance(attrs.get(name), bool)]
    cut = flags[0] if flags else len(positional)
    keywords = {**dict(zip(arguments[cut : len(positional)], positional[cut:], strict=True)), **keywords}
    joined = [_argument(site, a) for a in positional[:cut]]
    if takes_device(node.op):
        keywords["device"] = site.device()
    call = Call(node.op, joined, {k: _argument(site, v) for k, v in keywords.items()}, node)
    method = OVERWRITING.get(node.op)
    if site.overwrite is not None and method is not None:
        if site.overwrite == 1:
            assert node.op in COMMUTATIVE and len(places) == 2, f"{node!r} cannot overwrite its second operand"
            return Written(f"{joined[1]}.{method}({joined[0]})", {0: 1})
        return Written(f"{joined[0]}.{method}({call.arguments(1)})", {0: 0})
    return Written(expression(call), in_place)


def _argument(site: Site, argument: Any) -> str:
    """An argument's text: an attribute has it, operands and lists of them are given by their places."""
    if isinstance(argument, int):
        return site.operands[argument]
    if isinstance(argument, list) and None not in argument:
        return site.listed(argument)
    return f"[{', '.join(_argument(site, a) for a in argument)}]" if isinstance(argument, list) else str(argument)


def overwritable(node: Node) -> tuple[int, ...]:
    """Operands whose memory the op could take for its only result, or its gradient, best first."""
    if node.op in ("cross_entropy_grad", "cross_entropy_part_grad"):
        return (1,)
    if node.op in ("cross_entropy_with_grad", "rope_joined"):
        return (0,)
    if node.op == "region":
        takes = node.attrs.get("takes")
        return (takes,) if isinstance(takes, int) else ()
    if node.op not in OVERWRITING or "args" in node.attrs or len(node.results) != 1:
        return ()
    result = node.result.tensor
    same = [v.tensor.dtype is result.dtype and v.tensor.shape == result.shape for v in node.operands]
    wanted = (0, 1) if node.op in COMMUTATIVE and len(node.operands) == 2 and not node.attrs else (0,)
    return tuple(i for i in wanted if i < len(same) and same[i])


_OUTERS = ("grouped_outer", "gathered_outer")
"""Gradients of the matrices of experts."""


def absorbable(part: Node, total: Value) -> bool:
    """Whether `accumulate(total, part)` has a form that adds a product to the total without making it apart."""
    dtypes = part.result.tensor.dtype, total.tensor.dtype
    if dtypes[0] is not dtypes[1] and not _widens(part, dtypes):
        return False
    if part.op == "aten.embedding_dense_backward.default":
        return part.attrs.get("padding_idx", -1) == -1 and not part.attrs.get("scale_grad_by_freq", False)
    return part.op in ("aten.mm.default", "embedding_part_grad", *_OUTERS)


def _widens(part: Node, dtypes: tuple[DType, DType]) -> bool:
    """Whether the sum of a low-precision product, or of rows, has a form that takes it unrounded into an f32 total."""
    low = dtypes[0] in (DType.BF16, DType.F16) and dtypes[1] is DType.F32
    embedding = ("aten.embedding_dense_backward.default", "embedding_part_grad")
    return low and part.op in ("aten.mm.default", *embedding, *_OUTERS)


def write_accumulated(part: Site, total: Value, text: str, *, fresh: bool = False) -> str:
    """The statement that adds an absorbable node to `total`, which is written `text`, or writes it there if `fresh`."""
    operands = ", ".join(part.operands)
    if fresh and part.node.op == "aten.mm.default":
        return f"rt.mm_({text}, {operands})"
    if (kernel := part.kernels.name_of_sum(part.node, total, fresh)) is not None:
        return f"K.{kernel}({text}, {operands})" if part.node.op in _OUTERS else _sum_by_token(part, kernel, text)
    if part.node.op in _OUTERS:
        return f"rt.grouped_outer_({text}, {outer_operands(part)}{', fresh=True' if fresh else ''})"
    assert not fresh, f"{part.node!r} is added to totals alone"
    if part.node.op == "aten.mm.default" and part.node.result.tensor.dtype in (DType.BF16, DType.F16):
        return f"rt.addmm_({text}, {operands})"
    if part.node.op == "aten.mm.default":
        return f"{text}.addmm_({operands})"
    if part.node.op == "embedding_part_grad":
        return f"rt.embedding_part_grad_({text}, {operands}, padding_idx={part.node.attrs['padding_idx']})"
    return f"rt.embedding_grad_({text}, {operands})"


def put_off(statement: str) -> str:
    """The statement that makes a product while the next message is under way; one that is no call of ours stays."""
    return re.sub(r"^(rt\.(?:add)?mm_)\(", r"rt.later(\1, ", statement)


def _sum_by_token(part: Site, kernel: str, total: str) -> str:
    """Rows of a gradient are added to those of the total that their tokens name, of its part of the vocabulary."""
    grad, tokens, *index = part.operands
    options = [*index, f"rows={total}.shape[0]", f"padding_idx={part.node.attrs['padding_idx']}"] if index else []
    return f"K.{kernel}({total}, {grad}, *rt.by_token({', '.join([tokens, *options])}))"


def _runtime(drop: Sequence[str] = ()) -> Callable[[Site], str]:
    """A call of the runtime's op of the same name: operands, then attrs by keyword."""

    def form(site: Site) -> str:
        parts = list(site.operands)
        defaults = op_def(site.node.op).attrs
        given = {k: v for k, v in site.node.attrs.items() if k not in drop and not (k in defaults and defaults[k] == v)}
        parts += [f"{k}={site.literal(v)}" for k, v in given.items()]
        if site.overwrite is not None:
            parts.append(f"out={site.operands[site.overwrite]}")
        return f"rt.{site.node.op}({', '.join(parts)})"

    return form


def _attention(site: Site) -> str:
    """A call of the runtime's op, which is told whose kernel it takes where that has been chosen."""
    text, provider = _runtime()(site), site.kernels.provider(site.node)
    return f'{text[:-1]}, by="{provider}")' if provider else text


def _cast(site: Site) -> str:
    return f"{site.operands[0]}.to({site.literal(site.node.attrs['dtype'])})"


def _reshape(site: Site) -> str:
    shape = site.literal(site.node.attrs["shape"])[1:-1]
    return f"{site.operands[0]}.reshape({shape or '()'})"


def _grouped_matmul(site: Site) -> str:
    rows, weight, *rest = site.operands
    weight = f"{weight}.transpose(1, 2)" if site.node.attrs.get("transpose_w") else weight
    by = ['by="te"'] if site.kernels.provider(site.node) == "te" else []
    return f"rt.grouped_mm({', '.join([rows, weight, *rest, *by])})"


def _first_layer(site: Site) -> str:
    (given,) = site.operands
    return f"{given}[0], {given}[1:]"


def _stack_choices(site: Site) -> str:
    return f"rt.stack_choices({site.listed(range(len(site.operands)))})"


def _grouped_outer(site: Site) -> str:
    left, right, offsets = site.operands
    return f"rt.grouped_mm({left}.t(), {right}, {offsets})"


def _accumulate(site: Site) -> str:
    total, part = site.operands
    if site.node.attrs.get("fresh"):
        assert site.node.op.endswith("_"), f"{site.node!r}: a total is written in place"
        return f"{total}.copy_({part})"
    return f"{total}.add{'_' if site.node.op.endswith('_') else ''}({part})"


def _accumulate_each(site: Site) -> str:
    node, count = site.node, len(site.node.results)
    assert node.op == "accumulate_each_", f"{node!r}: sums into state are emitted in place"
    name = "copy_" if node.attrs.get("fresh") else "accumulate_each_"
    return f"rt.{name}({site.tensors(node.operands[:count], '')}, {site.tensors(node.operands[count:], '')})"


def joined_text(texts: Sequence[str]) -> str:
    """Tensors that lie one after another, as one."""
    return f"rt.joined({', '.join(texts)})"


def _accumulate_joined(site: Site) -> str:
    *totals, part = site.operands
    assert site.node.op.endswith("_"), f"{site.node!r}: sums into state are emitted in place"
    return f"{joined_text(totals)}.{'copy_' if site.node.attrs.get('fresh') else 'add_'}({part})"


def _zero(site: Site) -> str:
    assert site.node.op == "zero_", f"{site.node!r}: a reset is emitted in place"
    return f"rt.zero_({site.tensors(site.node.operands, '')})"


def _append(site: Site) -> str:
    assert site.node.op.endswith("_"), f"{site.node!r}: the cache is written in place"
    return _runtime()(site)


def _all_finite(site: Site) -> str:
    return f"rt.all_finite({site.tensors(site.node.operands, '')})"


def _expert_bias_update(site: Site) -> str:
    node, count = site.node, len(site.node.results)
    assert node.op == "expert_bias_update_", f"{node!r}: the update is emitted in place"
    biases, loads = (site.tensors(v, "") for v in (node.operands[:count], node.operands[count:-1]))
    rate = site.literal(node.attrs["rate"])
    return f"rt.expert_bias_update_({biases}, {loads}, {site.operands[-1]}, rate={rate})"


def _of_all(site: Site) -> str:
    """A kernel site or an op of the runtime over the list of all operands."""
    kernel = site.kernels.name(site.node)
    called = f"rt.{site.node.op}" if kernel is None else f"K.{kernel}"
    return f"{called}({site.tensors(site.node.operands, '')})"


def _adamw(site: Site) -> Written:
    """One call of a kernel site, or of the runtime per weight decay and rate; it may also scale the gradients, which
    nothing reads afterwards: sums of their squares come first.

    Operands: n weights (masters, where there are), first and second moments, the low-precision params that masters
    stand for, gradients, then lr, scale, the number of the update, and whether it is one.
    """
    node = site.node
    assert node.op == "adamw_", f"{node!r}: the update is emitted in place"
    attrs = op_def("adamw").complete(node.attrs)
    count = attrs["n"]
    values = [node.operands[i * count : (i + 1) * count] for i in range(5 if attrs["masters"] else 4)]
    lr, scale, step, finite = site.operands[-4:]
    weights, firsts, seconds, *low, grads = values
    groups = adamw.groups(node)
    by_group = []
    for (decay, rate, _), places in groups.items():
        hint = ("DECAYED" if decay else "NOT_DECAYED") if rate == 1.0 else "GROUP"
        # The names of the params come first: those of all other states are these with an ending.
        lists = (low[0] if low else weights, weights, grads, firsts, seconds)
        by_group.append([site.tensors([listed[i] for i in places], hint) for listed in lists][1:])
    in_place = {i: i for i in range(written_operands(node))}
    sums = len(node.results) - len(in_place)
    if (kernel := site.kernels.name(node)) is not None:
        order = [i for places in groups.values() for i in places]
        texts = [site.tensors([listed[i] for i in order], "") for listed in values]
        found = "" if not sums else "[-1][0]" if sums == 1 else "[-1].unbind()"
        return Written(f"K.{kernel}({', '.join([*texts, lr, scale, step, finite])}){found}", in_place)
    options = [f"{k}={site.literal(node.attrs[k])}" for k in ("beta1", "beta2", "eps") if k in node.attrs]
    options += [] if attrs["decoupled"] else ["decoupled=False"]
    lines = []
    for (decay, rate, _), texts in zip(groups, by_group, strict=True):
        texts += [step, lr if rate == 1.0 else f"{lr} * {site.literal(rate)}", *options]
        texts += [f"weight_decay={site.literal(decay)}", f"scale={scale}", f"finite={finite}"]
        lines.append(f"rt.adamw_({', '.join(texts)})")
    lines += [f"rt.copy_({site.tensors(params, '')}, {site.tensors(weights, '')})" for params in low]
    if sums:
        counted = [[g for g, k in zip(grads, attrs["sums"], strict=True) if k == i] for i in range(sums)]
        text = ", ".join(f"rt.square_sum({site.tensors(listed, '')})" for listed in counted)
        return Written(text, in_place, after=tuple(lines))
    return Written(lines[-1], in_place, tuple(lines[:-1]))


def _all_reduce(site: Site) -> str:
    return _collective(site, _reduction(site))


def _all_gather(site: Site) -> str:
    together = ["together=True"] if site.node.attrs.get("together") else []
    return _chosen(site, _collective(site, [str(site.node.attrs["dim"]), *together]))


def _reduce_scatter(site: Site) -> str:
    attrs = site.node.attrs
    wide = ["wide=True"] if attrs.get("wide") else []
    return _chosen(site, _collective(site, [str(attrs["dim"]), *_reduction(site), *wide]))


def _collective(site: Site, options: Sequence[str]) -> str:
    node = site.node
    texts = [site.tensors(node.operands, ""), site.literal(node.attrs["axis"]), *options]
    return f"rt.{node.op}({', '.join(texts)})"


def _all_to_all(site: Site) -> str:
    attrs = site.node.attrs
    assert attrs["split_dim"] == attrs["join_dim"] == 0, f"{site.node!r}: parts of the first dim are sent"
    if attrs.get("rows") is not None:
        tensors, options = site.tensors(site.node.operands[:-1], ""), ", back=True" if attrs.get("back") else ""
        text = f"rt.{site.node.op}({tensors}, {site.literal(attrs['axis'])}, {site.operands[-1]}{options})"
        return _chosen(site, text)
    return _chosen(site, _collective(site, []))


def _constant(site: Site) -> str:
    """Numbers that no pass has put into their readers: a copy from the host in each step, which no CUDA graph has."""
    values = site.node.attrs["values"]
    assert isinstance(values, tuple), f"{site.node!r} has no values"
    few = ", ".join(map(str, values[:4])) + (", …" if len(values) > 4 else "")
    message = f"the forward makes a tensor of numbers, [{few}], in every step"
    hint = "make it once, in __init__: self.register_buffer(name, torch.tensor([…]), persistent=False)"
    raise PassError(message, str(site.node.origin), hint)


def _pack_rows(site: Site) -> str:
    options = "".join(f", {name}={site.node.attrs[name]}" for name in ("fill", "part") if name in site.node.attrs)
    return f"rt.pack_rows({', '.join(site.operands)}{options})"


def _copies(site: Site) -> str:
    return f"rt.{site.node.op}({site.tensors(site.node.operands, '')})"


def _store(site: Site) -> str:
    node, count = site.node, len(site.node.operands) // 2
    states, values = (site.tensors(v, "") for v in (node.operands[:count], node.operands[count:]))
    return f"rt.store_start({states}, {values})"


def _reduction(site: Site) -> list[str]:
    reduction = site.node.attrs.get("reduction", "sum")
    return [] if reduction == "sum" else [site.literal(reduction)]


def _chosen(site: Site, text: str) -> str:
    """New tensors come in a list, of which a single one is taken out; what is under way is one handle."""
    return f"{text}[0]" if len(site.node.results) == 1 and not site.node.op.endswith("_start") else text


_EXPRESSIONS: dict[str, Callable[[Site], str]] = {
    **EXPERT_FORMS,
    "accumulate": _accumulate,
    "accumulate_each": _accumulate_each,
    "accumulate_joined": _accumulate_joined,
    "add_rms_norm": _runtime(),
    "add_rms_norm_grad": _runtime(),
    "all_finite": _all_finite,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_to_all_start": _all_to_all,
    "all_gather_start": _all_gather,
    "all_reduce": _all_reduce,
    "all_reduce_start": _all_reduce,
    "attention": _attention,
    "attention_grad": _attention,
    "axis_share": lambda site: f"rt.axis_share({site.operands[0]}, {site.literal(site.node.attrs['axis'])})",
    "joint_sum": lambda site: site.operands[0],  # over an axis that the mesh has not
    "axis_index": lambda site: f"rt.axis_index({site.literal(site.node.attrs['axis'])})",
    "cast": _cast,
    "change_scores": _runtime(),
    "cut_keys": _runtime(),
    "constant": _constant,
    "cross_entropy": _runtime(),
    "cross_entropy_grad": _runtime(),
    "cross_entropy_join": _runtime(),
    "cross_entropy_part": _runtime(),
    "cross_entropy_part_grad": _runtime(),
    "cross_entropy_with_grad": _runtime(),
    "dropout": _runtime(),
    "dropout_part": _runtime(),
    "embedding_part": _runtime(),
    "embedding_part_grad": _runtime(),
    "expert_bias_update": _expert_bias_update,
    "joined": lambda site: joined_text([*site.operands, *["gathered=True"] * bool(site.node.attrs.get("gathered"))]),
    "join_loads": lambda site: f"torch.cat({site.listed(range(len(site.operands)))})",
    "expert_counts": _runtime(),
    "exact_places": _runtime(("rows",)),
    "expert_places": _runtime(),
    "own_choices": _runtime(),
    "even_ends": _runtime(),
    "pack_rows": _pack_rows,
    "padded_combine": _runtime(),
    "padded_combine_grad": _runtime(),
    "padded_dispatch": _runtime(),
    "padded_return": lambda site: site.operands[0],
    "padded_send": lambda site: site.operands[0],
    "swap_blocks": _runtime(),
    "places_overrun": _runtime(),
    "read_sizes": _runtime(),
    "rows_sent": lambda site: f"({site.operands[0]} >= 0).sum(0)",
    "take_rows": lambda site: f"{site.operands[0]}.index_select(0, {site.operands[1]})",
    "within_room": _runtime(),
    "unpack_rows": _runtime(),
    "first_layer": _first_layer,
    "glu": _runtime(),
    "glu_grad": _runtime(),
    "glu_grad_joined": _runtime(),
    "gradient_scale": _runtime(),
    "grouped_matmul": _grouped_matmul,
    "grouped_outer": _grouped_outer,
    "grouped_sum": _runtime(),
    "kv_append": _append,
    "layer_norm": _runtime(),
    "layer_norm_grad": _runtime(),
    "likeliest": _runtime(),
    "loss_scale_update": _runtime(),
    "moe_capacity": _runtime(),
    "moe_capacity_grad": _runtime(),
    "moe_combine": _runtime(),
    "moe_combine_grad": _runtime(),
    "moe_dispatch": _runtime(),
    "moe_dispatch_grad": _runtime(),
    "moe_drop_padding": _runtime(),
    "moe_order": _runtime(),
    "moe_route": _runtime(),
    "moe_route_grad": _runtime(),
    "moe_route_order": _runtime(),
    "moe_weigh": _runtime(),
    "norm_rope": _runtime(),
    "norm_rope_grad": _runtime(),
    "paged_attention": _runtime(),
    "pad_extent": _runtime(),
    "pad_extent_grad": _runtime(),
    "padded_part": _runtime(),
    "of_first": _runtime(),
    "part_of": _runtime(),
    "perturb": _runtime(),
    "random": _runtime(),
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_start": _reduce_scatter,
    "repeat_parts": _runtime(),
    "repeat_parts_grad": _runtime(),
    "repeated_part": _runtime(),
    "repeated_part_grad": _runtime(),
    "replay_choice": _runtime(),
    "reshape": _reshape,
    "join_rows": lambda site: f"torch.cat({site.tensors(site.node.operands, '')})",
    "split_rows": lambda site: f"{site.operands[0]}.chunk({site.node.attrs['parts']})",
    "rms_norm": _runtime(),
    "rms_norm_grad": _runtime(),
    "rope": _runtime(),
    "rope_join": _runtime(),
    "rope_joined": _runtime(),
    "rope_kv_append": _append,
    "rope_table_grad": _runtime(),
    "sample": _runtime(),
    "squared_relu": _runtime(),
    "stack_choices": _stack_choices,
    "squared_relu_grad": _runtime(),
    "store_start": _store,
    "to_device_start": _copies,
    "to_host_start": _copies,
    "top_logprobs": _runtime(),
    "zero": _zero,
}
