"""derive-serve: the forward entry becomes `step`: new tokens of one sequence in, the last position's logits out.

Before:

    %positions = aten.arange.default() {end = S}
    %out, %lse = attention(%q, %k, %v) {causal = true, …}                    (in @layer)
    entry forward = @forward -> (loss_sum, count, logits)

After (the keys and values of earlier tokens are state; `start` counts them):

    %positions_1 = aten.add.Tensor(%positions, %start)
    %keys = kv_append(%cache.k, %k, %start)
    %values = kv_append(%cache.v, %v, %start)
    %out, %lse = attention(%q, %keys, %values, %start) {causal = true, extra = ["start"], …}
    entry step = @step -> (logits) updates (cache.0.k, cache.0.v, …)

One sequence (B = 1), a contiguous cache of `max_length` rows, logits only where the next token is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.dims import Dim, NamedDim, names_in, substitute
from mgraph.ir.graph import Entry, Function, Module, Node, Phase, State, StateKind, Value
from mgraph.ir.types import DType, TensorType
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.calls import callee, part_of

SEQUENCE, BATCH = "S", "B"
START = "start"
_DEFAULT_LENGTH = 2048
# Ops that mix positions and have no form over a cache; where one is left, attention was not recognised.
_NOT_RAISED = ("scaled_dot_product_attention", "softmax")


@dataclass(frozen=True)
class DeriveServe(Pass):
    """Derive the inference entry; `max_length` 0 takes the model's own bound on S, or 2048."""

    max_length: int = 0

    name: ClassVar[str] = "derive-serve"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"forward"})
    provides: ClassVar[frozenset[str]] = frozenset({"step"})
    invalidates: ClassVar[frozenset[str]] = frozenset({"forward"})

    def run(self, module: Module, report: Report) -> Module:
        """Derive `step` and the cache states."""
        entry = module.entries["forward"]
        if "logits" not in entry.outputs:
            raise PassError("the model gives no logits, so there is nothing to sample from", where=module.name)
        length = self.max_length or module.dims[SEQUENCE].maximum or _DEFAULT_LENGTH
        function = _only_logits(module.entry_function("forward"), entry.outputs.index("logits"))
        module = _one_sequence(module.with_function(function), length)
        derivation = _Derivation(module, length, self.name, report)
        step = derivation.entry_function(module.functions[function.name])
        functions = {n: f for n, f in module.functions.items() if n != function.name}
        functions = {**functions, **derivation.functions, "step": step}
        caches = {s.name: s for s in derivation.caches}
        if not caches:
            raise PassError("no attention was recognised, so nothing can be cached", hint="see `mgraph explain`")
        return replace(
            module,
            state={**module.state, **caches},
            functions=functions,
            entries={"step": Entry("step", "step", ("logits",), tuple(caches))},
        )


class _Derivation:
    """Rewrites the entry's function and the functions it calls; each call gets caches of its own."""

    def __init__(self, module: Module, length: int, made_by: str, report: Report) -> None:
        self.module, self.length, self.made_by, self.report = module, length, made_by, report
        self.functions: dict[str, Function] = {}
        self.caches: list[State] = []

    def entry_function(self, function: Function) -> Function:
        """The `step` function: `start` is an input, caches are state."""
        builder = rebuild(function, self.made_by)
        builder.name = "step"
        start = builder.param(START, TensorType(DType.I64))
        updates: list[Value] = []
        for node in function.nodes:
            if node.op == "call":
                body = self._body(callee(node))
                caches = [self._declare(slot) for slot in body.slots if slot.name.startswith("cache.")]
                old = self.module.functions[callee(node)]
                params = (*node.operands[: len(old.params)], start)
                operands = (*params, *node.operands[len(old.params) :], *(c.value for c in caches))
                extra = tuple(Value(builder.fresh(c.name.replace(".", "_")), c.type) for c in caches)
                builder.keep(replace(node, operands=operands, results=node.results + extra, made_by=self.made_by))
                updates.extend(extra)
            elif node.op == "attention":
                caches = [self._declare(Value("cache.k", _cache_type(node.operands[1], self.length)))]
                caches.append(self._declare(Value("cache.v", _cache_type(node.operands[2], self.length))))
                updates.extend(self._attention(builder, node, [c.value for c in caches], start))
            else:
                self._keep(builder, node, start, function.name)
        logits = _last_position(builder, function.results[0])
        return builder.build([logits, *updates])

    def _declare(self, slot: Value) -> State:
        """One cache state; the first attention's are `cache.0.k` and `cache.0.v`."""
        kind = slot.name.rpartition(".")[2]
        index = sum(c.name.endswith(f".{kind}") for c in self.caches)
        state = State.make(f"cache.{index}.{kind}", slot.tensor, StateKind.CACHE, init=(("zeros_",),), persist=False)
        self.caches.append(state)
        return state

    def _body(self, name: str) -> Function:
        """A called function with `start` as its last param and its caches as its last slots and results."""
        if name not in self.functions:
            function = self.module.functions[name]
            builder = rebuild(function, self.made_by)
            start = builder.param(START, TensorType(DType.I64))
            updates: list[Value] = []
            for node in function.nodes:
                if node.op == "call":
                    raise PassError(f"{name} calls {callee(node)}: nested layers are not served", str(node.origin))
                if node.op == "attention":
                    caches = [
                        builder.slot(f"cache.{kind}", _cache_type(value, self.length))
                        for kind, value in zip("kv", node.operands[1:3], strict=True)
                    ]
                    updates.extend(self._attention(builder, node, caches, start))
                else:
                    self._keep(builder, node, start, name)
            self.functions[name] = builder.build([*function.results, *updates])
        return self.functions[name]

    def _attention(self, builder: FunctionBuilder, node: Node, caches: list[Value], start: Value) -> tuple[Value, ...]:
        if not node.attrs.get("causal"):
            raise PassError("attention that is not causal cannot be served token by token", where=str(node.origin))
        extra = node.attrs.get("extra", ())
        assert isinstance(extra, tuple)
        unserved = [name for name in extra if name != "sinks"]
        if unserved:
            raise PassError(f"attention with {unserved[0]} cannot be served token by token", where=str(node.origin))
        query, key, value, *more = node.operands
        with builder.at(node, Phase.DECODE):
            keys = builder.one("kv_append", caches[0], key, start, name="keys")
            values = builder.one("kv_append", caches[1], value, start, name="values")
        attrs = {**node.attrs, "extra": ("start", *extra)}
        builder.keep(replace(node, operands=(query, keys, values, start, *more), attrs=attrs, phase=Phase.DECODE))
        self.report.match(builder.name, node.id, f"attention over a cache of {self.length} rows")
        return keys, values

    def _keep(self, builder: FunctionBuilder, node: Node, start: Value, where: str) -> None:
        """Keep a node; positions start at `start`."""
        if any(f".{name}." in f".{node.op}." for name in _NOT_RAISED) and _spans_sequence(node):
            guard = f"{node.op} is left, so attention was not recognised"
            self.report.near_miss(where, node.id, "attention", guard)
            raise PassError(f"cannot serve: {guard}", where=str(node.origin), hint="see the raise-attention report")
        kept = builder.keep(replace(node, phase=Phase.DECODE))
        if node.op.startswith("aten.arange") and SEQUENCE in names_in(node.result.tensor.shape[0]):
            with builder.at(kept):
                moved = builder.one("aten.add.Tensor", node.result, start, name="positions")
            builder.replace(node.result, moved)


def _spans_sequence(node: Node) -> bool:
    """Whether an op's result has the sequence in its last dim (attention weights), or it is attention itself."""
    shape = node.results[0].tensor.shape
    return "attention" in node.op or bool(shape and SEQUENCE in names_in(shape[-1]))


def _cache_type(value: Value, length: int) -> TensorType:
    batch, heads, _, width = value.tensor.shape
    return value.tensor.with_shape(batch, heads, length, width)


def _only_logits(function: Function, index: int) -> Function:
    """The part of the forward function that makes the logits."""
    part = part_of(function, function.name, (function.results[index],))
    if [p.name for p in part.params] != ["tokens"]:
        names = ", ".join(p.name for p in part.params)
        raise PassError(f"serving takes the input tokens, but the model also reads: {names}", where=function.name)
    return part


def _last_position(builder: FunctionBuilder, logits: Value) -> Value:
    """Slice to the last position before the head where the head is a linear, else after it."""
    logits = builder.value(logits)
    producer = next(n for n in reversed(builder.nodes) if logits in n.results)
    with builder.at(producer):
        if producer.op == "aten.linear.default" and producer is builder.nodes[-1]:
            builder.nodes.pop()
            last = _slice_last(builder, producer.operands[0])
            head = builder.one(producer.op, last, *producer.operands[1:], name="last_logits", **producer.attrs)
        else:
            head = _slice_last(builder, logits)
        vocab = head.tensor.shape[-1]
        return builder.one("reshape", head, shape=(1, vocab), name="next_logits")


def _slice_last(builder: FunctionBuilder, value: Value) -> Value:
    length = value.tensor.shape[1]
    return builder.one("aten.slice.Tensor", value, dim=1, start=length - 1, end=length, name="last")


def _one_sequence(module: Module, length: int) -> Module:
    """The module with B = 1 and 1 <= S <= length."""
    fixed: dict[str, Dim] = {BATCH: 1}
    mapping: dict[Value, Value] = {}
    functions = {name: _substituted(f, fixed, mapping) for name, f in module.functions.items()}
    dims = {n: d for n, d in module.dims.items() if n != BATCH}
    dims[SEQUENCE] = NamedDim(SEQUENCE, 1, length)
    return replace(module, functions=functions, dims=dims)


def _substituted(function: Function, values: Mapping[str, Dim], mapping: dict[Value, Value]) -> Function:
    def changed(value: Value) -> Value:
        if value not in mapping:
            assert isinstance(value.type, TensorType)
            shape = tuple(substitute(d, values) for d in value.type.shape)
            same = shape == value.type.shape
            mapping[value] = value if same else Value(value.name, replace(value.type, shape=shape), value.is_state)
        return mapping[value]

    def attr(item: object) -> object:
        if isinstance(item, tuple):
            return tuple(attr(i) for i in item)
        return substitute(item, values) if hasattr(item, "free_symbols") else item

    nodes = tuple(
        replace(
            n,
            operands=tuple(map(changed, n.operands)),
            results=tuple(map(changed, n.results)),
            attrs={k: attr(v) for k, v in n.attrs.items()},
        )
        for n in function.nodes
    )
    return replace(
        function,
        params=tuple(map(changed, function.params)),
        slots=tuple(map(changed, function.slots)),
        nodes=nodes,
        results=tuple(map(changed, function.results)),
    )
