"""Read an attention mask: turn the tensors that make it into a predicate over (batch, query, key), and name it.

Every int or bool tensor is an expression in its own indices: `arange` is its index, a slice shifts it, a comparison
gives a condition, and so on through the dozens of nodes that a mask is captured as. What no rule reads (an input like
`position_ids`, a running count of packed sequences) stays a function of its indices. The predicate is a conjunction:

    k <= q                                                causal
    q - k < w                                             window w
    s(b, q) == s(b, k)                                    segments s
    m(b, k) != 0                                          keys m

Positions p that restart in every packed sequence (`p(b, k) <= p(b, q)` with segments that count where p does not go up
by one) read as causal, and likewise for windows: within a segment p differs from the index by a constant.

Rules know canonical ops only (`mgraph.passes.canonicalize`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from mgraph.ir.aten import argument_names
from mgraph.ir.dims import Dim
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.types import DType, TensorType
from mgraph.passes.calls import resolve_argument

BATCH, HEAD, QUERY, KEY = sympy.symbols("b h q k", integer=True, nonnegative=True)
_INDEX = sympy.symbols("i0:8", integer=True, nonnegative=True)
_MASKED_BELOW = -1e4  # an additive mask at or below this hides the key in every dtype

Cases = tuple[tuple[Any, Any], ...]  # a number: (expression, condition) with exclusive conditions that cover all
Reading = Any  # Cases for numbers, a sympy condition for bools


@dataclass(frozen=True, slots=True)
class Predicate:
    """Which keys a query sees. `condition` is over `BATCH`, `HEAD`, `QUERY`, `KEY`; the other fields read it.

    `causal`: key <= query; `window` w: key > query - w; `segments` i64[B, S]: equal at query and key; `keys`
    [B, S]: nonzero at the key. Both are values of the function named `function`. `remainder` holds the conditions that
    none of these say, as text: a caller that does not know them must leave the mask as it is. `additive`: the mask is
    added to the scores (float) instead of selecting (bool).
    """

    condition: Any
    function: str
    additive: bool = False
    causal: bool = False
    window: int | None = None
    segments: Value | None = None
    keys: Value | None = None
    remainder: tuple[str, ...] = ()

    @property
    def everything(self) -> bool:
        """Whether every query sees every key."""
        return bool(self.condition == sympy.true)

    def __str__(self) -> str:
        return str(self.condition)


def mask_predicate(function: Function, value: Value, module: Module | None = None) -> Predicate | None:
    """The predicate of a mask that broadcasts to [B, H, S, T], bool or additive float; `None` for a float tensor that
    is no such mask.

    With `module`, a parameter of a layer function is followed to the one value that all calls pass.
    """
    if module is not None:
        function, value = resolve_argument(module, function, value)
    reader = _Reader(function)
    reading = reader.at(value, (BATCH, HEAD, QUERY, KEY)[-len(value.tensor.shape) :])
    if reading is None:
        return None
    additive = value.tensor.dtype.is_float
    if additive:
        if not all(number.is_number and (number == 0 or number <= _MASKED_BELOW) for number, _ in reading):
            return None
        reading = sympy.Or(*(condition for number, condition in reading if number == 0))
    elif value.tensor.dtype is not DType.BOOL:
        return None
    return _named(reading, reader, value, additive)


def _at_least_zero(expression: Any) -> Any:
    """`expression >= 0` in one form."""
    expression = sympy.expand(expression)
    if expression.is_nonnegative:
        return sympy.true
    return sympy.false if expression.is_negative else sympy.Ge(expression, 0, evaluate=False)


def _equal(left: Any, right: Any) -> Any:
    """`left == right` in one form."""
    difference = sympy.expand(left - right)
    if difference.is_zero:
        return sympy.true
    return sympy.false if difference.is_nonzero else sympy.Eq(difference, 0, evaluate=False)


def _negated(condition: Any) -> Any:
    """The opposite, in the same forms: integers make `not (e >= 0)` into `-e - 1 >= 0`."""
    if isinstance(condition, sympy.And | sympy.Or):
        dual = sympy.Or if isinstance(condition, sympy.And) else sympy.And
        return dual(*map(_negated, condition.args))
    if isinstance(condition, sympy.Ge):
        return _at_least_zero(-condition.lhs - 1)
    return sympy.Not(condition)


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "le": lambda a, b: _at_least_zero(b - a),
    "lt": lambda a, b: _at_least_zero(b - a - 1),
    "ge": lambda a, b: _at_least_zero(a - b),
    "gt": lambda a, b: _at_least_zero(a - b - 1),
    "eq": _equal,
    "ne": lambda a, b: _negated(_equal(a, b)),
}
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
}


def _merged(cases: Sequence[tuple[Any, Any]]) -> Cases:
    """Cases with equal numbers put together; impossible ones dropped."""
    conditions: dict[Any, Any] = {}
    for number, condition in cases:
        number = sympy.expand(number)
        if condition != sympy.false:
            conditions[number] = sympy.Or(conditions.get(number, sympy.false), condition)
    if len(conditions) == 1:
        return ((next(iter(conditions)), sympy.true),)
    return tuple(conditions.items())


def _combined(left: Cases, right: Cases, combine: Callable[[Any, Any], Any]) -> Cases:
    return _merged([(combine(a, b), sympy.And(c, d)) for a, c in left for b, d in right])


def _substituted(reading: Reading, replacements: dict[Any, Any]) -> Reading:
    if isinstance(reading, tuple):
        return _merged([(n.xreplace(replacements), _settled(c.xreplace(replacements))) for n, c in reading])
    return _settled(reading.xreplace(replacements))


def _settled(condition: Any) -> Any:
    """A condition whose parts are decided anew, after other expressions came in for its indices."""
    if isinstance(condition, sympy.And | sympy.Or):
        return type(condition)(*map(_settled, condition.args))
    if isinstance(condition, sympy.Ge):
        return _at_least_zero(condition.lhs - condition.rhs)
    if isinstance(condition, sympy.Eq):
        return _equal(condition.lhs, condition.rhs)
    if isinstance(condition, sympy.Ne):
        return _negated(_equal(condition.lhs, condition.rhs))
    return condition


def _truth(reading: Reading) -> Any:
    """A number as a condition: nonzero."""
    if not isinstance(reading, tuple):
        return reading
    return sympy.Or(*(sympy.And(c, _negated(_equal(n, sympy.Integer(0)))) for n, c in reading))


def _number(reading: Reading) -> Cases:
    """A condition as a number: 1 or 0."""
    if isinstance(reading, tuple):
        return reading
    return _merged([(sympy.Integer(1), reading), (sympy.Integer(0), _negated(reading))])


def _constant(number: Any) -> Cases:
    """A number as it is; whole floats become integers, since sympy holds 0.0 and 0 apart."""
    whole = isinstance(number, float) and number.is_integer()
    return ((sympy.sympify(int(number) if whole else number), sympy.true),)


class _Reader:
    """Readings of the values of one function. `functions` names what stays a function of its indices; `restarts` maps
    a running count to the positions whose restarts it counts."""

    def __init__(self, function: Function) -> None:
        self.producers = function.producers()
        self.function = function
        self.known: dict[Value, Reading] = {}
        self.functions: dict[Any, Value] = {}
        self.restarts: dict[Any, Any] = {}

    def at(self, value: Value, indices: Sequence[Any]) -> Reading:
        """The reading at indices of a shape that the value broadcasts to; `None` where it cannot be read."""
        reading = self.read(value)
        shape = value.tensor.shape
        if reading is None:
            return None
        aligned = indices[len(indices) - len(shape) :] if shape else ()
        return _substituted(
            reading,
            {
                _INDEX[d]: sympy.Integer(0) if extent == 1 else sympy.sympify(index)
                for d, (extent, index) in enumerate(zip(shape, aligned, strict=True))
            },
        )

    def read(self, value: Value) -> Reading:
        """The reading in the value's own indices."""
        if value not in self.known:
            node = self.producers.get(value)
            rule = None if node is None else _RULES.get(_base(node.op))
            type_ = value.type
            readable = isinstance(type_, TensorType) and len(type_.shape) <= len(_INDEX)
            reading = rule(self, node) if rule and node is not None and readable else None
            self.known[value] = self.opaque(value) if reading is None and readable else reading
        return self.known[value]

    def opaque(self, value: Value) -> Reading:
        """An int or bool value as a function of its indices; `None` for a float."""
        type_ = value.tensor
        if type_.dtype.is_float:
            return None
        symbol = sympy.Function(value.name, integer=True)
        self.functions[symbol] = value
        term = symbol(*(sympy.Integer(0) if e == 1 else i for i, e in zip(_INDEX, type_.shape, strict=False)))
        cases = ((term, sympy.true),)
        return _truth(cases) if type_.dtype is DType.BOOL else cases

    def arguments(self, node: Node) -> dict[str, Reading]:
        """Readings of the tensor operands and number attributes by schema name, at the result's indices."""
        indices = _INDEX[: len(node.results[0].tensor.shape)]
        names = argument_names(node.op, len(node.operands), node.attrs)
        read = {name: self.at(value, indices) for name, value in zip(names, node.operands, strict=True)}
        numbers = {n: _constant(v) for n, v in node.attrs.items() if isinstance(v, int | float | sympy.Expr)}
        return read | numbers


def _base(op: str) -> str:
    return op.split(".")[1] if "." in op else op


Rule = Callable[[_Reader, Node], Reading]


def _arange(reader: _Reader, node: Node) -> Reading:
    start, step = node.attrs.get("start", 0), node.attrs.get("step", 1)
    return _merged([(sympy.sympify(start) + sympy.sympify(step) * _INDEX[0], sympy.true)])


def _full(reader: _Reader, node: Node) -> Reading:
    fill = node.attrs["fill_value"]
    return sympy.sympify(bool(fill)) if node.result.tensor.dtype is DType.BOOL else _constant(fill)


def _cast(reader: _Reader, node: Node) -> Reading:
    reading = reader.at(node.operands[0], _INDEX[: len(node.result.tensor.shape)])
    if reading is None:
        return None
    return _truth(reading) if node.attrs["dtype"] is DType.BOOL else _number(reading)


def _expand(reader: _Reader, node: Node) -> Reading:
    return reader.at(node.operands[0], _INDEX[: len(node.result.tensor.shape)])


def _reshape(reader: _Reader, node: Node) -> Reading:
    """Only extents of one may come and go."""
    source, target = node.operands[0].tensor.shape, node.result.tensor.shape
    kept = [d for d, extent in enumerate(target) if extent != 1]
    if [target[d] for d in kept] != [extent for extent in source if extent != 1]:
        return None
    places = iter(kept)
    return reader.at(node.operands[0], [_INDEX[next(places)] if extent != 1 else 0 for extent in source])


def _permute(reader: _Reader, node: Node) -> Reading:
    dims: Any = node.attrs["dims"]
    return reader.at(node.operands[0], [_INDEX[dims.index(d)] for d in range(len(dims))])


def _slice(reader: _Reader, node: Node) -> Reading:
    attrs: Any = node.attrs
    indices = list(_INDEX[: len(node.result.tensor.shape)])
    dim = attrs.get("dim", 0)
    indices[dim] = attrs.get("start", 0) + attrs.get("step", 1) * indices[dim]
    return reader.at(node.operands[0], indices)


def _comparison(reader: _Reader, node: Node) -> Reading:
    given = reader.arguments(node)
    left, right = given["self"], given["other"]
    if left is None or right is None:
        return None
    compare = _COMPARISONS[_base(node.op)]
    pairs = [(a, b, sympy.And(c, d)) for a, c in _number(left) for b, d in _number(right)]
    return sympy.Or(*(sympy.And(condition, compare(a, b)) for a, b, condition in pairs))


def _arithmetic(reader: _Reader, node: Node) -> Reading:
    given = reader.arguments(node)
    left, right = given["self"], given["other"]
    if left is None or right is None or "alpha" in given or node.result.tensor.dtype is DType.BOOL:
        return None
    return _combined(_number(left), _number(right), _ARITHMETIC[_base(node.op)])


def _logic(reader: _Reader, node: Node) -> Reading:
    if node.result.tensor.dtype is not DType.BOOL:
        return None
    given = reader.arguments(node)
    join = sympy.And if _base(node.op) == "bitwise_and" else sympy.Or
    return join(*(_truth(reading) for reading in given.values()))


def _not(reader: _Reader, node: Node) -> Reading:
    return _negated(reader.read(node.operands[0])) if node.result.tensor.dtype is DType.BOOL else None


def _selected(condition: Any, yes: Reading, no: Reading, boolean: bool) -> Reading:
    if yes is None or no is None:
        return None
    if boolean:
        return sympy.Or(sympy.And(condition, _truth(yes)), sympy.And(_negated(condition), _truth(no)))
    branches = ((_number(yes), condition), (_number(no), _negated(condition)))
    return _merged([(n, sympy.And(c, branch)) for cases, branch in branches for n, c in cases])


def _where(reader: _Reader, node: Node) -> Reading:
    given = reader.arguments(node)
    boolean = node.result.tensor.dtype is DType.BOOL
    return _selected(_truth(given["condition"]), given["self"], given["other"], boolean)


def _masked_fill(reader: _Reader, node: Node) -> Reading:
    given = reader.arguments(node)
    boolean = node.result.tensor.dtype is DType.BOOL
    return _selected(_truth(given["mask"]), given["value"], given["self"], boolean)


def _triangle(reader: _Reader, node: Node) -> Reading:
    """`tril` keeps column <= row + diagonal, `triu` column >= row + diagonal."""
    rank = len(node.result.tensor.shape)
    row, column = _INDEX[rank - 2], _INDEX[rank - 1]
    reach = row + node.attrs.get("diagonal", 0) - column
    kept = _at_least_zero(reach if _base(node.op) == "tril" else -reach)
    return _selected(kept, reader.read(node.operands[0]), _constant(0), node.result.tensor.dtype is DType.BOOL)


def _diff(reader: _Reader, node: Node) -> Reading:
    """First differences along a dim, with at most one element put before."""
    names = argument_names(node.op, len(node.operands), node.attrs)
    operands = dict(zip(names, node.operands, strict=True))
    indices = list(_INDEX[: len(node.result.tensor.shape)])
    attrs: Any = node.attrs
    dim = attrs.get("dim", -1) % len(indices)
    if attrs.get("n", 1) != 1 or "append" in operands or operands["self"].tensor.dtype is DType.BOOL:
        return None
    index = indices[dim]

    def shifted(by: int) -> Cases:
        cases: Cases = reader.at(operands["self"], [*indices[:dim], index + by, *indices[dim + 1 :]])
        return cases

    if "prepend" not in operands:
        return _combined(shifted(1), shifted(0), _ARITHMETIC["sub"])
    before = reader.at(operands["prepend"], indices)
    if operands["prepend"].tensor.shape[dim] != 1 or before is None:
        return None
    at_start = {index: sympy.Integer(0)}
    first = _substituted(_combined(shifted(0), before, _ARITHMETIC["sub"]), at_start)
    others = _combined(shifted(0), shifted(-1), _ARITHMETIC["sub"])
    start = _equal(index, sympy.Integer(0))
    return _merged(
        [(n, sympy.And(c, start)) for n, c in first] + [(n, sympy.And(c, _negated(start))) for n, c in others]
    )


def _cumsum(reader: _Reader, node: Node) -> Reading:
    """A running sum of one constant; a count of restarts stays a function of its indices but is remembered."""
    source = reader.read(node.operands[0])
    attrs: Any = node.attrs
    dim = attrs["dim"] % len(node.result.tensor.shape)
    if source is None:
        return None
    cases = _number(source)
    if len(cases) == 1 and cases[0][0].is_number:
        return _merged([(cases[0][0] * (_INDEX[dim] + 1), sympy.true)])
    count = reader.opaque(node.result)
    symbol = count[0][0].func
    for term in source.atoms(sympy.Function) if not isinstance(source, tuple) else ():
        # Written for the positions p that are read here: p(i) - p(i - 1) != 1, and not at the start.
        if term.func in reader.functions and term.args[dim : dim + 1] == (_INDEX[dim],):
            step = term - term.xreplace({_INDEX[dim]: _INDEX[dim] - 1})
            zero, one = sympy.Integer(0), sympy.Integer(1)
            if source == sympy.And(_negated(_equal(_INDEX[dim], zero)), _negated(_equal(step, one))):
                reader.restarts[symbol] = term.func
    return count


def _index(reader: _Reader, node: Node) -> Reading:
    """Indexing by integer tensors on neighbouring dims, which broadcast against each other."""
    names = argument_names(node.op, len(node.operands), node.attrs)
    source = node.operands[0]
    given = {int(n.partition(".")[2]): v for n, v in zip(names[1:], node.operands[1:], strict=True)}
    dims = sorted(given)
    if dims != list(range(dims[0], dims[0] + len(dims))) or any(v.tensor.dtype is DType.BOOL for v in given.values()):
        return None
    rank = max(len(v.tensor.shape) for v in given.values())
    block = _INDEX[dims[0] : dims[0] + rank]
    indices: list[Any] = list(_INDEX[: dims[0]])
    for dim in dims:
        cases = reader.at(given[dim], block)
        if len(cases) != 1:
            return None
        indices.append(cases[0][0])
    indices += _INDEX[dims[0] + rank : len(node.result.tensor.shape)]
    return reader.at(source, indices)


_RULES: dict[str, Rule] = {
    "arange": _arange,
    "full": _full,
    "cast": _cast,
    "expand": _expand,
    "reshape": _reshape,
    "permute": _permute,
    "slice": _slice,
    "bitwise_and": _logic,
    "bitwise_or": _logic,
    "bitwise_not": _not,
    "where": _where,
    "masked_fill": _masked_fill,
    "tril": _triangle,
    "triu": _triangle,
    "diff": _diff,
    "cumsum": _cumsum,
    "index": _index,
    **dict.fromkeys(_COMPARISONS, _comparison),
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
}


def _named(condition: Any, reader: _Reader, value: Value, additive: bool) -> Predicate:
    """Name the parts of the conjunction."""
    parts = condition.args if isinstance(condition, sympy.And) else () if condition == sympy.true else (condition,)
    extents: tuple[Dim, ...] = value.tensor.shape[-2:] if len(value.tensor.shape) > 1 else (1, *value.tensor.shape)
    inside = {sympy.expand(e - 1 - i) for e, i in zip(extents, (QUERY, KEY), strict=True)}
    segments = keys = None
    ordered = {KEY: QUERY}  # what stands for the key's position → what stands for the query's
    rest = []
    for part in sorted(parts, key=str):
        same = _same_function(part, reader) if isinstance(part, sympy.Eq) else None
        key = _key_function(part, reader) if isinstance(part, sympy.Ne) else None
        if same is not None and segments is None:
            segments = reader.functions[same]
            if same in reader.restarts:
                position = reader.restarts[same]
                ordered[position(BATCH, KEY)] = position(BATCH, QUERY)
        elif key is not None and keys is None:
            keys = reader.functions[key]
        else:
            rest.append(part)
    causal, windows, remainder = False, [], []
    for part in rest:
        lag = _lag(part, ordered)
        if isinstance(part, sympy.Ge) and part.lhs in inside:
            continue
        if lag == (1, 0):
            causal = True
        elif lag is not None and lag[0] == -1 and lag[1] >= 0:
            windows.append(lag[1] + 1)
        else:
            remainder.append(str(part))
    return Predicate(
        condition,
        reader.function.name,
        additive,
        causal,
        min(windows, default=None),
        segments,
        keys,
        tuple(remainder),
    )


def _same_function(part: Any, reader: _Reader) -> Any:
    """The f of `f(b, q) == f(b, k)`."""
    for symbol in reader.functions:
        difference = symbol(BATCH, QUERY) - symbol(BATCH, KEY)
        if part.lhs in (difference, sympy.expand(-difference)) and part.rhs == 0:
            return symbol
    return None


def _key_function(part: Any, reader: _Reader) -> Any:
    """The f of `f(b, k) != 0`."""
    return next((f for f in reader.functions if part == sympy.Ne(f(BATCH, KEY), 0)), None)


def _lag(part: Any, ordered: dict[Any, Any]) -> tuple[int, int] | None:
    """`(sign, c)` of `sign * (query position - key position) + c >= 0` with an integer c."""
    if not isinstance(part, sympy.Ge):
        return None
    for key, query in ordered.items():
        for sign in (1, -1):
            constant = sympy.expand(part.lhs - sign * (query - key))
            if constant.is_Integer:
                return sign, int(constant)
    return None
