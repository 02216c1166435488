"""How the steps of a region are written in Triton: one entry per op, in f32 or in whole numbers.

A form takes the texts of a step's arguments by their names in torch's schema and gives an expression. Those of numbers
of any float dtype are f32; a form in `OF_ROWS` sees a `Rows`, which writes reductions, and may write lines of its own.
Numbers that are none stay so: a comparison with one is false, so the forms of `maximum` and the like are made of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Arguments = Mapping[str, str]
Form = Callable[[Arguments], str]

_K = math.sqrt(8 / math.pi)
_ROOT = math.sqrt(0.5)
_DENSITY = 1 / math.sqrt(2 * math.pi)


def _sum(sign: str) -> Form:
    def form(a: Arguments) -> str:
        other = a["other"] if a.get("alpha", "1") in ("1", "1.0") else f"{a['alpha']} * {a['other']}"
        return f"{a['self']} {sign} {other}"

    return form


def _infix(sign: str) -> Form:
    return lambda a: f"{a['self']} {sign} {a['other']}"


def _call(name: str) -> Form:
    return lambda a: f"tl.{name}({a['self']})"


def _reverse_difference(a: Arguments) -> str:
    part = a["self"] if a.get("alpha", "1") in ("1", "1.0") else f"{a['alpha']} * {a['self']}"
    return f"{a['other']} - {part}"


def _clamp(a: Arguments) -> str:
    """A bound that is none is not there; the upper one wins where they cross."""
    text = a["self"]
    if "min" in a:
        text = f"tl.where({text} < {a['min']}, {a['min']}, {text})"
    if "max" in a:
        text = f"tl.where({text} > {a['max']}, {a['max']}, {text})"
    return text


def _power(a: Arguments) -> str:
    """Exponents of `mgraph.ir.ops.region.POWERS`."""
    x, exponent = a["self"], float(a["exponent"])
    if exponent in (0.5, -0.5):
        return f"tl.{'sqrt_rn' if exponent > 0 else 'rsqrt'}({x})"
    product = " * ".join([x] * int(abs(exponent)))
    return product if exponent > 0 else f"1 / ({product})"


def _gelu(a: Arguments) -> str:
    x = a["self"]
    if a.get("approximate") == '"tanh"':
        return f"{x} * tl.sigmoid({_K!r} * {x} * (1 + 0.044715 * {x} * {x}))"
    return f"{x} * (0.5 * (1 + tl.erf({_ROOT!r} * {x})))"


def _gelu_backward(a: Arguments) -> str:
    x, dy = a["self"], a["grad_output"]
    if a.get("approximate") == '"tanh"':
        part = f"tl.sigmoid({_K!r} * {x} * (1 + 0.044715 * {x} * {x}))"
        slope = f"{_K!r} * (1 + 0.134145 * {x} * {x})"
        return f"{dy} * ({part} + {x} * {part} * (1 - {part}) * {slope})"
    part = f"0.5 * (1 + tl.erf({_ROOT!r} * {x}))"
    return f"{dy} * ({part} + {x} * ({_DENSITY!r} * tl.exp(-0.5 * {x} * {x})))"


def _silu_backward(a: Arguments) -> str:
    x, part = a["self"], f"tl.sigmoid({a['self']})"
    return f"{a['grad_output']} * {part} * (1 + {x} * (1 - {part}))"


def _where(first: str, second: str) -> Form:
    return lambda a: f"tl.where({a['condition']}, {a[first]}, {a[second]})"


def _filled(a: Arguments) -> str:
    return f"tl.where({a['mask']}, {a['value']}, {a['self']})"


FORMS: dict[str, Form] = {
    "aten.abs.default": _call("abs"),
    "aten.addcmul.default": lambda a: f"{a['self']} + {a.get('value', '1')} * {a['tensor1']} * {a['tensor2']}",
    "aten.bitwise_and.Tensor": _infix("&"),
    "aten.bitwise_not.default": lambda a: f"({a['self']}) == 0",
    "aten.bitwise_or.Tensor": _infix("|"),
    "aten.clamp.default": _clamp,
    "aten.clamp_max.default": _clamp,
    "aten.clamp_min.default": _clamp,
    "aten.ceil.default": _call("ceil"),
    "aten.cos.default": _call("cos"),
    "aten.erf.default": _call("erf"),
    "aten.exp.default": _call("exp"),
    "aten.exp2.default": _call("exp2"),
    "aten.floor.default": _call("floor"),
    "aten.gelu.default": _gelu,
    "aten.gelu_backward.default": _gelu_backward,
    "aten.isnan.default": lambda a: f"{a['self']} != {a['self']}",
    "aten.leaky_relu.default": lambda a: (
        f"tl.where({a['self']} > 0, {a['self']}, {a['self']} * {a.get('negative_slope', '0.01')})"
    ),
    "aten.leaky_relu_backward.default": lambda a: (
        f"tl.where({a['self']} > 0, {a['grad_output']}, {a['grad_output']} * {a['negative_slope']})"
    ),
    "aten.log.default": _call("log"),
    "aten.log2.default": _call("log2"),
    "aten.logical_and.default": _infix("&"),
    "aten.logical_not.default": lambda a: f"({a['self']}) == 0",
    "aten.logical_or.default": _infix("|"),
    "aten.masked_fill.Scalar": _filled,
    "aten.maximum.default": lambda a: (
        f"tl.where(({a['self']} > {a['other']}) | ({a['self']} != {a['self']}), {a['self']}, {a['other']})"
    ),
    "aten.minimum.default": lambda a: (
        f"tl.where(({a['self']} < {a['other']}) | ({a['self']} != {a['self']}), {a['self']}, {a['other']})"
    ),
    "aten.neg.default": lambda a: f"-{a['self']}",
    "aten.pow.Tensor_Scalar": _power,
    "aten.reciprocal.default": lambda a: f"1 / {a['self']}",
    "aten.relu.default": lambda a: f"tl.where({a['self']} < 0, 0.0, {a['self']})",
    "aten.rsqrt.default": _call("rsqrt"),
    "aten.rsub.Scalar": _reverse_difference,
    "aten.sigmoid.default": _call("sigmoid"),
    "aten.sigmoid_backward.default": lambda a: f"{a['grad_output']} * {a['output']} * (1 - {a['output']})",
    "aten.silu.default": lambda a: f"{a['self']} * tl.sigmoid({a['self']})",
    "aten.silu_backward.default": _silu_backward,
    "aten.sin.default": _call("sin"),
    "aten.softplus_backward.default": lambda a: (
        f"tl.where({a['self']} * {a['beta']} > {a['threshold']}, {a['grad_output']}, "
        f"{a['grad_output']} * tl.sigmoid({a['self']} * {a['beta']}))"
    ),
    "aten.sqrt.default": _call("sqrt_rn"),
    "aten.square.default": lambda a: f"{a['self']} * {a['self']}",
    "aten.tanh_backward.default": lambda a: f"{a['grad_output']} * (1 - {a['output']} * {a['output']})",
    "aten.threshold_backward.default": lambda a: f"tl.where({a['self']} <= {a['threshold']}, 0.0, {a['grad_output']})",
    "aten.unsqueeze.default": lambda a: a["self"],
    "aten.where.ScalarOther": _where("self", "other"),
    "aten.where.ScalarSelf": _where("self", "other"),
    "aten.where.self": _where("self", "other"),
    **{f"aten.add.{kind}": _sum("+") for kind in ("Scalar", "Tensor")},
    **{f"aten.sub.{kind}": _sum("-") for kind in ("Scalar", "Tensor")},
    **{f"aten.mul.{kind}": _infix("*") for kind in ("Scalar", "Tensor")},
    "aten.div.Scalar": _infix("/"),
    "aten.div.Tensor": lambda a: f"tl.div_rn({a['self']}, {a['other']})",
    **{
        f"aten.{name}.{kind}": _infix(sign)
        for name, sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items()
        for kind in ("Scalar", "Tensor")
    },
}
"""Forms of one expression."""


class Rows:
    """Writes what takes several lines: reductions over the rows of a tile of `size` of `columns` columns.

    `name` is that of the result, from which names of what is made on the way are derived; `lines` take those.
    """

    def __init__(self, lines: list[str], name: str, size: int, columns: int) -> None:
        self._lines, self.name, self.size, self._columns = lines, name, size, columns

    def let(self, ending: str, text: str) -> str:
        """A name for a text."""
        name = f"{self.name}_{ending}"
        self._lines.append(f"{name} = {text}")
        return name

    def kept(self, text: str, neutral: str) -> str:
        """The value with something neutral in the columns past the row."""
        return text if self.size == self._columns else f"tl.where(column_inside, {text}, {neutral})"

    def sum(self, text: str, neutral: str = "0.0") -> str:
        """The sum of each row, as a column."""
        return f"tl.sum({self.kept(text, neutral)}, 1)[:, None]"

    def most(self, text: str, least: bool = False) -> str:
        """The largest (or least) of each row, as a column."""
        neutral = 'float("inf")' if least else 'float("-inf")'
        return f"tl.{'min' if least else 'max'}({self.kept(text, neutral)}, 1)[:, None]"


def _extreme(rows: Rows, a: Arguments, least: bool) -> str:
    """Of a row in which a number is none, none."""
    x = a["self"]
    wrong = rows.kept(f"({x} != {x}).to(tl.int32)", "0")
    none = rows.let("none", f"tl.max({wrong}, 1)[:, None]")
    return f'tl.where({none} > 0, float("nan"), {rows.most(x, least)})'


def _exponentials(rows: Rows, x: str) -> tuple[str, str, str]:
    """Names of x less the largest of its row, of the exponential of that, and of the sum of these."""
    low = rows.let("low", f"{x} - {rows.most(x)}")
    power = rows.let("power", f"tl.exp({low})")
    return low, power, rows.let("total", rows.sum(power))


def _softmax(rows: Rows, a: Arguments) -> str:
    _, power, total = _exponentials(rows, a["self"])
    return f"tl.div_rn({power}, {total})"


def _log_softmax(rows: Rows, a: Arguments) -> str:
    low, _, total = _exponentials(rows, a["self"])
    return f"{low} - tl.log({total})"


def _log_sum_exp(rows: Rows, a: Arguments) -> str:
    """Of rows whose largest is no finite number, that is taken as 0."""
    x = a["self"]
    most = rows.let("most", rows.most(x))
    finite = rows.let("finite", f'tl.where(tl.abs({most}) == float("inf"), 0.0, {most})')
    total = rows.sum(f"tl.exp({x} - {finite})")
    return f"{finite} + tl.log({total})"


def _softmax_backward(rows: Rows, a: Arguments) -> str:
    dot = rows.let("dot", rows.sum(f"{a['grad_output']} * {a['output']}"))
    return f"{a['output']} * ({a['grad_output']} - {dot})"


def _log_softmax_backward(rows: Rows, a: Arguments) -> str:
    total = rows.let("total", rows.sum(a["grad_output"]))
    return f"{a['grad_output']} - tl.exp({a['output']}) * {total}"


def _variance(rows: Rows, a: Arguments) -> str:
    """The mean of squares around the mean; torch divides by one less unless told otherwise."""
    low = rows.let("low", f"{a['self']} - {rows.sum(a['self'])} / {rows.size}")
    total = rows.let("total", rows.sum(f"{low} * {low}"))
    return f"{total} / {rows.size - int(float(a.get('correction', '1')))}"


def _log_of_more(rows: Rows, x: str) -> str:
    """log(1 + x): near 0 as 2 atanh(x / (2 + x)), by its series."""
    ratio = rows.let("ratio", f"{x} / (2 + {x})")
    square = rows.let("square", f"{ratio} * {ratio}")
    series = f"{1 / 3!r} + {square} * (0.2 + {square} * ({1 / 7!r} + {square} * {1 / 9!r}))"
    near = rows.let("near", f"2 * {ratio} * (1 + {square} * ({series}))")
    return f"tl.where(tl.abs({x}) < 0.25, {near}, tl.log(1 + {x}))"


def _less_one(rows: Rows, x: str) -> str:
    """exp(x) - 1: near 0 by its series."""
    series = "1"
    for number in range(8, 1, -1):
        series = f"1 + {x} * {1 / number!r} * ({series})"
    near = rows.let("near", f"{x} * ({series})")
    return f"tl.where(tl.abs({x}) < 0.35, {near}, tl.exp({x}) - 1)"


def _softplus(rows: Rows, a: Arguments) -> str:
    x, beta = a["self"], a.get("beta", "1")
    scaled = rows.let("scaled", f"{x} * {beta}")
    power = rows.let("power", f"tl.exp(-tl.abs({scaled}))")
    bent = f"(tl.where({scaled} > 0, {scaled}, 0.0) + {rows.let('bent', _log_of_more(rows, power))}) / {beta}"
    return f"tl.where({scaled} > {a.get('threshold', '20')}, {x}, {bent})"


def _elu(rows: Rows, a: Arguments) -> str:
    x, scale = a["self"], a.get("scale", "1")
    scaled = rows.let("scaled", f"{x} * {a.get('input_scale', '1')}")
    low = rows.let("low", _less_one(rows, scaled))
    return f"tl.where({x} > 0, {x} * {scale}, {low} * {a.get('alpha', '1')} * {scale})"


def _tanh(rows: Rows, a: Arguments) -> str:
    """(1 - e) / (1 + e) with e = exp(-2 |x|), and its series where the difference would cancel."""
    x = a["self"]
    power = rows.let("power", f"tl.exp(-2 * tl.abs({x}))")
    wide = rows.let("wide", f"(1 - {power}) / (1 + {power})")
    square = rows.let("square", f"{x} * {x}")
    series = f"{1 / 3!r} - {square} * ({2 / 15!r} - {square} * ({17 / 315!r} - {square} * {62 / 2835!r}))"
    near = rows.let("near", f"{x} * (1 - {square} * ({series}))")
    return f"tl.where({square} < 0.09, {near}, tl.where({x} < 0, -{wide}, {wide}))"


OF_ROWS: dict[str, Callable[[Rows, Any], str]] = {
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
    "aten._softmax.default": _softmax,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten.amax.default": lambda rows, a: _extreme(rows, a, least=False),
    "aten.amin.default": lambda rows, a: _extreme(rows, a, least=True),
    "aten.elu.default": _elu,
    "aten.expm1.default": lambda rows, a: _less_one(rows, a["self"]),
    "aten.log1p.default": lambda rows, a: _log_of_more(rows, a["self"]),
    "aten.log_softmax.int": _log_softmax,
    "aten.logsumexp.default": _log_sum_exp,
    "aten.mean.dim": lambda rows, a: f"{rows.sum(a['self'])} / {rows.size}",
    "aten.softmax.int": _softmax,
    "aten.softplus.default": _softplus,
    "aten.sum.dim_IntList": lambda rows, a: rows.sum(a["self"], a["zero"]),
    "aten.tanh.default": _tanh,
    "aten.var.correction": _variance,
}
"""Forms of several lines."""
