"""How torch's own ops are written: one table entry per op, `torch.ops.aten.…` for all others.

A form takes the texts of the call's arguments and gives an expression. Texts of operands are names, subscripts or
method calls, so they bind tighter than any operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mgraph.ir.graph import Node


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one torch call as text; lists are `[...]`. `node` gives the types behind them."""

    op: str
    positional: Sequence[str]
    keywords: Mapping[str, str]
    node: Node

    def arguments(self, skip: int = 0) -> str:
        """The arguments after the first `skip`, comma-separated."""
        return ", ".join([*self.positional[skip:], *(f"{k}={v}" for k, v in self.keywords.items())])


Form = Callable[[Call], str | None]

_OPERATORS = {
    "aten.add.Tensor": "+",
    "aten.add.Scalar": "+",
    "aten.sub.Tensor": "-",
    "aten.sub.Scalar": "-",
    "aten.mul.Tensor": "*",
    "aten.mul.Scalar": "*",
    "aten.div.Tensor": "/",
    "aten.div.Scalar": "/",
    "aten.floor_divide.default": "//",
    "aten.remainder.Scalar": "%",
    "aten.pow.Tensor_Tensor": "**",
    "aten.mm.default": "@",
    "aten.bmm.default": "@",
    "aten.matmul.default": "@",
    "aten.bitwise_and.Tensor": "&",
    "aten.bitwise_or.Tensor": "|",
    "aten.__and__.Tensor": "&",
    "aten.__or__.Tensor": "|",
    "aten.eq.Scalar": "==",
    "aten.eq.Tensor": "==",
    "aten.ne.Scalar": "!=",
    "aten.ne.Tensor": "!=",
    "aten.lt.Scalar": "<",
    "aten.lt.Tensor": "<",
    "aten.le.Scalar": "<=",
    "aten.le.Tensor": "<=",
    "aten.gt.Scalar": ">",
    "aten.gt.Tensor": ">",
    "aten.ge.Scalar": ">=",
    "aten.ge.Tensor": ">=",
}

_PREFIXES = {"aten.neg.default": "-", "aten.bitwise_not.default": "~"}

_METHODS = """
    abs.default amax.default amin.default argmax.default argsort.default bernoulli.p ceil.default
    chunk.default clamp_min.default clone.default contiguous.default cos.default cumsum.default
    detach.default diagonal.default exp.default fill_.Scalar flatten.using_ints flip.default floor.default
    gather.default index_select.default isfinite.default isnan.default log.default logical_and.default
    logical_not.default logsumexp.default masked_fill.Scalar masked_fill.Tensor max.dim mean.default mean.dim min.dim
    narrow.default pow.Tensor_Scalar prod.default reciprocal.default repeat_interleave.self_int round.default
    rsqrt.default scatter.src scatter.value scatter_add.default sigmoid.default sin.default softmax.int
    log_softmax.int sort.default split.Tensor split_with_sizes.default sqrt.default square.default squeeze.default
    squeeze.dim squeeze.dims std.correction sum.default sum.dim_IntList t.default tanh.default topk.default
    transpose.int tril.default triu.default unbind.int unflatten.int unsqueeze.default var.correction
"""
_SPREAD = ["expand.default", "permute.default", "repeat.default", "view.default", "reshape.default"]
_FUNCTIONS = {
    "aten.addmm.default": "torch.addmm",
    "aten.arange.default": "torch.arange",
    "aten.arange.start": "torch.arange",
    "aten.arange.start_step": "torch.arange",
    "aten.baddbmm.default": "torch.baddbmm",
    "aten.cat.default": "torch.cat",
    "aten.dropout.default": "torch.dropout",
    "aten.einsum.default": "torch.einsum",
    "aten.empty.memory_format": "torch.empty",
    "aten.full.default": "torch.full",
    "aten.full_like.default": "torch.full_like",
    "aten.gelu.default": "F.gelu",
    "aten.linear.default": "F.linear",
    "aten.maximum.default": "torch.maximum",
    "aten.minimum.default": "torch.minimum",
    "aten.ones.default": "torch.ones",
    "aten.ones_like.default": "torch.ones_like",
    "aten.outer.default": "torch.outer",
    "aten.relu.default": "F.relu",
    "aten.rsub.Scalar": "torch.rsub",
    "aten.scalar_tensor.default": "torch.scalar_tensor",
    "aten.scaled_dot_product_attention.default": "F.scaled_dot_product_attention",
    "aten.searchsorted.Tensor": "torch.searchsorted",
    "aten.silu.default": "F.silu",
    "aten.softplus.default": "F.softplus",
    "aten.stack.default": "torch.stack",
    "aten.where.self": "torch.where",
    "aten.zeros.default": "torch.zeros",
    "aten.zeros_like.default": "torch.zeros_like",
}

OVERWRITING = {
    "aten.add.Tensor": "add_",
    "aten.add.Scalar": "add_",
    "aten.sub.Tensor": "sub_",
    "aten.sub.Scalar": "sub_",
    "aten.mul.Tensor": "mul_",
    "aten.mul.Scalar": "mul_",
    "aten.div.Tensor": "div_",
    "aten.div.Scalar": "div_",
    "aten.neg.default": "neg_",
    "aten.exp.default": "exp_",
    "aten.sqrt.default": "sqrt_",
    "aten.rsqrt.default": "rsqrt_",
    "aten.square.default": "square_",
    "aten.tanh.default": "tanh_",
    "aten.sigmoid.default": "sigmoid_",
    "aten.cos.default": "cos_",
    "aten.sin.default": "sin_",
    "aten.masked_fill.Scalar": "masked_fill_",
    "aten.clamp.default": "clamp_",
    "aten.scatter_add.default": "scatter_add_",
    "aten.scatter.src": "scatter_",
}
"""Ops with a method that writes the result over the first operand."""

COMMUTATIVE = {"aten.add.Tensor", "aten.mul.Tensor"}
"""Ops that may as well overwrite their second operand."""


def expression(call: Call) -> str:
    """The text of one torch call."""
    form = _FORMS.get(call.op)
    text = form(call) if form is not None else None
    return text if text is not None else f"torch.ops.{call.op}({call.arguments()})"


def is_simple(text: str) -> bool:
    """Whether a scalar argument needs no brackets beside an operator."""
    return text.removeprefix("-").replace(".", "").replace("_", "").isalnum()


def _operator(sign: str) -> Form:
    def form(call: Call) -> str | None:
        if len(call.positional) != 2 or call.keywords:
            return None
        left, right = call.positional
        has_operand = len(call.node.operands) == 2 or is_simple(right)
        space = "" if sign == "**" else " "
        return f"{left}{space}{sign}{space}{right if has_operand else f'({right})'}"

    return form


def _prefix(sign: str) -> Form:
    return lambda call: f"{sign}{call.positional[0]}"


def _method(name: str) -> Form:
    return lambda call: f"{call.positional[0]}.{name}({call.arguments(1)})"


def _spread_method(name: str) -> Form:
    def form(call: Call) -> str | None:
        if len(call.positional) != 2 or call.keywords or call.positional[1] == "[]":
            return None
        return f"{call.positional[0]}.{name}({call.positional[1][1:-1]})"

    return form


def _function(name: str) -> Form:
    return lambda call: f"{name}({call.arguments()})"


def _slice(call: Call) -> str | None:
    attrs, rank = call.node.attrs, len(call.node.operands[0].tensor.shape)
    dim = attrs.get("dim", 0)
    if not isinstance(dim, int) or "args" in attrs:
        return None
    texts = dict(zip(("self", "dim", "start", "end", "step"), call.positional, strict=False)) | dict(call.keywords)
    start, end, step = texts.get("start", "None"), texts.get("end", "None"), texts.get("step", "1")
    start = "" if start in ("None", "0") else start
    end = "" if end in ("None", str(2**63 - 1)) else end
    space = "" if all(is_simple(t) or not t for t in (start, end)) else " "
    text = f"{start}{space if start else ''}:{space if end else ''}{end}" + (f":{step}" if step != "1" else "")
    return f"{texts['self']}[{_leading(dim, rank)}{text}]"


def _select(call: Call) -> str | None:
    attrs, rank = call.node.attrs, len(call.node.operands[0].tensor.shape)
    dim = attrs["dim"]
    if not isinstance(dim, int) or call.keywords:
        return None
    return f"{call.positional[0]}[{_leading(dim, rank)}{call.positional[2]}]"


def _leading(dim: int, rank: int) -> str:
    """The part of a subscript before `dim`."""
    dim %= rank
    return "..., " if dim == rank - 1 and rank > 2 else ":, " * dim


def _index(call: Call) -> str | None:
    if len(call.node.operands) != 2 or "None" in call.positional[1]:
        return None
    return f"{call.positional[0]}[{call.positional[1][1:-1]}]"


def _embedding(call: Call) -> str | None:
    weight, indices = call.positional[:2]
    return f"F.embedding({indices}, {weight})"  # padding_idx matters to the gradient alone


def _clamp(call: Call) -> str | None:
    bounds = [f"{k}={v}" for k, v in zip(("min", "max"), call.positional[1:], strict=False) if v != "None"]
    return f"{call.positional[0]}.clamp({', '.join([*bounds, *(f'{k}={v}' for k, v in call.keywords.items())])})"


def _cast(call: Call) -> str | None:
    return f"{call.positional[0]}.to({call.arguments(1)})"


_FORMS: dict[str, Form] = {
    **{op: _operator(sign) for op, sign in _OPERATORS.items()},
    **{op: _prefix(sign) for op, sign in _PREFIXES.items()},
    **{f"aten.{op}": _method(op.split(".")[0]) for op in _METHODS.split()},
    **{f"aten.{op}": _spread_method(op.split(".")[0]) for op in _SPREAD},
    **{op: _function(name) for op, name in _FUNCTIONS.items()},
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.index.Tensor": _index,
    "aten.embedding.default": _embedding,
    "aten.clamp.default": _clamp,
    "aten.to.dtype": _cast,
}
