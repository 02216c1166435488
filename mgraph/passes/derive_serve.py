"""derive-serve: the forward entry becomes `step`: new tokens of many requests in, logits of some of them out.

Before:

    %positions = aten.arange.default() {end = S}
    %out, %lse = attention(%q, %k, %v) {causal = true, …}                    (in @layer; q [B, H, S, D])
    entry forward = @forward -> (loss_sum, count, logits)

After (the tokens of all requests lie in one row of T; `starts` says where each request's begin):

    %keys, %values = kv_append(%cache.k, %cache.v, %k, %v, %slots)           k [T, G, D]
    %out = paged_attention(%q, %keys, %values, %starts, %lengths, %blocks) {block_size = 16, …}
    %wanted = aten.index_select.default(%x, %rows) {dim = 1}                 before the last norm and the head
    entry step = @step -> (logits) updates (cache.0.k, cache.0.v, …)

One sequence of T tokens stands for the batch (B = 1, S = T): what treats positions alike need not know that they are of
several requests. What does not, and is no causal attention, is refused (`mgraph.passes.positions`). The caches have
`block_size` rows in each of P blocks; P is bound where the package is loaded. The dim S stays declared: its maximum is
the longest sequence. Layers with a window have slots and tables of their own (`slots_1`, `blocks_1`, …; the first group
has the plain names), so that their cache is bounded (`mgraph.passes.cache_groups`). Entries that make tokens of the
logits come along (`mgraph.passes.serve_entries`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.dims import Dim, NamedDim, names_in, substitute, symbol
from mgraph.ir.graph import Entry, Function, Module, Node, Phase, State, StateKind, Value
from mgraph.ir.types import DType, TensorType
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.cache_groups import bounded, call_statics, grouped, window_of
from mgraph.passes.calls import callee, part_of
from mgraph.passes.dce import DeadCode
from mgraph.passes.positions import computes_with_length, mixes_positions, position_dims
from mgraph.passes.serve_entries import DIMS, ROWS, sampling_entries

SEQUENCE, BATCH = "S", "B"
TOKENS, REQUESTS, BLOCKS = "T", "R", "P"
STEP = "step"
_DEFAULT_LENGTH = 2048
_Tables = tuple[Value, Value]
"""The slots and the block tables of a group of layers."""


@dataclass(frozen=True)
class DeriveServe(Pass):
    """Derive the entries of inference; `max_length` 0 takes the model's own bound on S, or 2048."""

    max_length: int = 0
    block_size: int = 16

    name: ClassVar[str] = "derive-serve"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.REASSOCIATING
    requires: ClassVar[frozenset[str]] = frozenset({"forward"})
    provides: ClassVar[frozenset[str]] = frozenset({STEP, "derived"})
    invalidates: ClassVar[frozenset[str]] = frozenset({"forward"})

    def run(self, module: Module, report: Report) -> Module:
        """Derive `step`, the cache states, and the entries that sample."""
        entry = module.entries["forward"]
        if "logits" not in entry.outputs:
            raise PassError("the model gives no logits, so there is nothing to sample from", where=module.name)
        length = self.max_length or module.dims[SEQUENCE].maximum or _DEFAULT_LENGTH
        function = _only_logits(module.entry_function("forward"), entry.outputs.index("logits"))
        module = _one_row(_served_alone(module, replace(entry, outputs=("logits",)), function), length)
        derivation = _Derivation(module, self, -(-length // self.block_size), report)
        step = derivation.entry_function(module.functions[function.name])
        functions = {n: f for n, f in module.functions.items() if n != function.name}
        functions = {**functions, **derivation.functions, STEP: step}
        caches = {s.name: s for s in derivation.caches}
        if not caches:
            raise PassError("no attention was recognised, so nothing can be cached", hint="see `mgraph explain`")
        entries = {STEP: Entry(STEP, STEP, ("logits",), tuple(caches))}
        classes, origin = step.results[0].tensor.shape[-1], step.nodes[-1].origin
        for sampler, body in sampling_entries(classes, origin, self.name):
            entries[sampler.name], functions[body.name] = sampler, body
        dims = {dim.name: dim for dim in (*map(_dim, (TOKENS, REQUESTS, BLOCKS)), *DIMS)}
        return replace(
            module,
            dims={**{n: d for n, d in module.dims.items() if n != BATCH}, **dims},
            state={**module.state, **caches},
            functions=functions,
            entries=entries,
        )


def _dim(name: str) -> NamedDim:
    return NamedDim(name, 1)


class _Derivation:
    """Rewrites the entry's function and the functions it calls; each attention gets caches of its own."""

    def __init__(self, module: Module, pass_: DeriveServe, width: int, report: Report) -> None:
        self.module, self.report, self.width = module, report, width
        self.made_by, self.block_size = pass_.name, pass_.block_size
        self.functions: dict[str, Function] = {}
        self.caches: list[State] = []
        self.layers = _Layers()

    def entry_function(self, function: Function) -> Function:
        """The `step` function: what requests have is an input, caches are state."""
        length = self.module.dims[SEQUENCE].maximum
        assert isinstance(length, int)
        self.layers = _layers(self.module, function, length)
        builder = rebuild(function, self.made_by)
        builder.name = STEP
        (row,) = function.params
        flat = Value(row.name, TensorType(DType.I64, (symbol(TOKENS),)))
        builder.params = [flat]
        positions = builder.param("positions", flat.tensor)
        shared, tables = self._shared(builder, max(self.layers.groups, default=0) + 1)
        rows = builder.param("rows", TensorType(DType.I64, (symbol(ROWS),)))
        with builder.at(function.nodes[0], Phase.DECODE):
            whole = builder.one("reshape", flat, shape=(1, symbol(TOKENS)), name="row")
        builder.replace(row, whole)
        updates: list[Value] = []
        last = 0
        for node in function.nodes:
            if node.op == "call":
                updates += self._call(builder, node, positions, shared, tables)
            elif node.op == "attention":
                keys, values = self._cache_types(node)
                own = tables[self.layers.groups[len(self.caches) // 2]]
                caches = [self._declare(Value(f"cache.{k}", t)).value for k, t in (("k", keys), ("v", values))]
                updates += self._attention(builder, node, caches, shared, own)
            else:
                self._keep(builder, node, positions, function.name)
                continue
            last = len(builder.nodes)
        logits = _of_rows(builder, last, function.results[0], rows)
        return builder.build([logits, *updates])

    def _shared(self, builder: FunctionBuilder, groups: int) -> tuple[_Tables, list[_Tables]]:
        """Where each request begins and how long it is, and each group's slots and tables."""
        tokens, requests = symbol(TOKENS), symbol(REQUESTS)
        to_slots = TensorType(DType.I64, (tokens,))
        to_blocks = TensorType(DType.I32, (requests, self.width))
        slots = builder.param("slots", to_slots)
        starts = builder.param("starts", TensorType(DType.I32, (requests + 1,)))
        lengths = builder.param("lengths", TensorType(DType.I32, (requests,)))
        tables = [(slots, builder.param("blocks", to_blocks))]
        for group in range(1, groups):
            pair = builder.param(f"slots_{group}", to_slots), builder.param(f"blocks_{group}", to_blocks)
            tables.append(pair)
        return (starts, lengths), tables

    def _call(
        self, builder: FunctionBuilder, node: Node, positions: Value, shared: _Tables, tables: Sequence[_Tables]
    ) -> list[Value]:
        """Keep a call, with what its function reads now; the new values of its caches."""
        _refuse_length(node)
        body = self._body(callee(node))
        first = len(self.caches) // 2
        caches = [self._declare(slot) for slot in body.slots if slot.name.startswith("cache.")]
        old = self.module.functions[callee(node)]
        pairs = dict(zip(self.layers.pairs[callee(node)], self.layers.groups[first:], strict=False))
        (slots, blocks), *more = [tables[pairs.get(pair, 0)] for pair in range(max(pairs, default=0) + 1)]
        given = (positions, slots, *shared, blocks, *(value for pair in more for value in pair))
        params = (*node.operands[: len(old.params)], *given)
        operands = (*params, *node.operands[len(old.params) :], *(c.value for c in caches))
        extra = [Value(builder.fresh(c.name.replace(".", "_")), c.type) for c in caches]
        results = (*node.results, *extra)
        builder.keep(replace(node, operands=operands, results=results, phase=Phase.DECODE, made_by=self.made_by))
        return extra

    def _declare(self, slot: Value) -> State:
        """One cache state; the first attention's are `cache.0.k` and `cache.0.v`."""
        kind = slot.name.rpartition(".")[2]
        index = sum(c.name.endswith(f".{kind}") for c in self.caches)
        state = State.make(f"cache.{index}.{kind}", slot.tensor, StateKind.CACHE, init=(("zeros_",),), persist=False)
        self.caches.append(state)
        return state

    def _body(self, name: str) -> Function:
        """A called function with what requests have as its last params and its caches as its last slots and results."""
        if name not in self.functions:
            function = self.module.functions[name]
            builder = rebuild(function, self.made_by)
            positions = builder.param("positions", TensorType(DType.I64, (symbol(TOKENS),)))
            pairs = self.layers.pairs[name]
            shared, tables = self._shared(builder, max(pairs, default=0) + 1)
            own = iter(pairs)
            updates: list[Value] = []
            for node in function.nodes:
                if node.op == "call":
                    raise PassError(f"{name} calls {callee(node)}: nested layers are not served", str(node.origin))
                if node.op == "attention":
                    kinds = zip("kv", self._cache_types(node), strict=True)
                    caches = [builder.slot(f"cache.{kind}", type_) for kind, type_ in kinds]
                    updates += self._attention(builder, node, caches, shared, tables[next(own)])
                else:
                    self._keep(builder, node, positions, name)
            self.functions[name] = builder.build([*function.results, *updates])
        return self.functions[name]

    def _cache_types(self, node: Node) -> tuple[TensorType, TensorType]:
        rows = symbol(BLOCKS) * self.block_size
        keys, values = (v.tensor.with_shape(rows, v.tensor.shape[1], v.tensor.shape[3]) for v in node.operands[1:3])
        return keys, values

    def _attention(
        self, builder: FunctionBuilder, node: Node, caches: Sequence[Value], shared: _Tables, own: _Tables
    ) -> tuple[Value, ...]:
        _refuse_length(node)
        if not node.attrs.get("causal"):
            raise PassError("attention that is not causal cannot be served token by token", where=str(node.origin))
        extra = node.attrs.get("extra", ())
        assert isinstance(extra, tuple)
        unserved = [name for name in extra if name != "sinks"]
        if unserved:
            raise PassError(f"attention with {unserved[0]} cannot be served token by token", where=str(node.origin))
        attrs = {k: node.attrs[k] for k in ("scale", "window", "softcap") if node.attrs.get(k) is not None}
        slots, blocks = own
        with builder.at(node, Phase.DECODE):
            q, k, v = (_by_token(builder, value) for value in node.operands[:3])
            stored = builder.emit("kv_append", (*caches, k, v, slots), names=("keys", "values"))
            operands = (q, *stored, *shared, blocks, *node.operands[3:])
            mixed = builder.emit("paged_attention", operands, {"block_size": self.block_size, **attrs})[0]
            heads, width = mixed.tensor.shape[1:]
            mixed = builder.one("reshape", mixed, shape=(1, symbol(TOKENS), heads, width), name="mixed")
            mixed = builder.one("aten.permute.default", mixed, dims=(0, 2, 1, 3), name="mixed")
        builder.replace(node.results[0], mixed)
        self.report.match(builder.name, node.id, f"attention over a cache in blocks of {self.block_size}")
        return stored

    def _keep(self, builder: FunctionBuilder, node: Node, positions: Value, where: str) -> None:
        """Keep a node; positions are each token's own."""
        if _counts_positions(node):
            builder.replace(node.result, positions)
            return
        _refuse_length(node)
        problem = mixes_positions(node, TOKENS)
        if problem is not None:
            guard = f"{node.op} {problem}, and has no form over a cache"
            self.report.near_miss(where, node.id, "attention", guard)
            hint = "attention that is not recognised shows up so: see the raise-attention report"
            if node.op == "moe_capacity":
                hint = "a model without capacity_factor: what an expert drops depends on the other tokens of a batch"
            raise PassError(f"cannot serve: {guard}", where=str(node.origin), hint=hint)
        builder.keep(replace(node, phase=Phase.DECODE))


def _refuse_length(node: Node) -> None:
    if computes_with_length(node, TOKENS):
        hint = "a model that computes with each token's position, and not with the length of its sequence"
        problem = f"{node.op} computes with the length of a sequence, which is not known while it is written"
        raise PassError(f"cannot serve: {problem}", where=str(node.origin), hint=hint)


@dataclass(frozen=True)
class _Layers:
    """`groups` has that of each attention, in the order of the caches; `pairs` says, of each function, which of its own
    pairs of slots and tables each of its attentions reads: those share one whose groups are the same in all calls."""

    groups: Sequence[int] = ()
    pairs: Mapping[str, Sequence[int]] = field(default_factory=dict)


def _layers(module: Module, function: Function, length: int) -> _Layers:
    """The groups of what the entry's function and its layers attend to; sequences have at most `length` tokens."""
    windows: list[int | None] = []
    places: dict[str, list[list[int]]] = {}  # of a function's calls those of their attentions
    for node in function.nodes:
        begin = len(windows)
        if node.op == "attention":
            windows.append(bounded(window_of(node, {}), length))
        elif node.op == "call":
            statics = call_statics(node)
            inner = [n for n in module.functions[callee(node)].nodes if n.op == "attention"]
            windows += [bounded(window_of(n, statics), length) for n in inner]
            places.setdefault(callee(node), []).append(list(range(begin, len(windows))))
    groups = grouped(windows) if windows else []
    pairs = {}
    for name, calls in places.items():
        columns = [tuple(groups[at] for at in column) for column in zip(*calls, strict=True)]
        kinds = list(dict.fromkeys(columns))
        pairs[name] = [kinds.index(column) for column in columns]
    return _Layers(groups, pairs)


def _by_token(builder: FunctionBuilder, value: Value) -> Value:
    """[1, H, T, D] as [T, H, D]."""
    moved = builder.one("aten.permute.default", value, dims=(0, 2, 1, 3), name="by_token")
    return builder.one("reshape", moved, shape=moved.tensor.shape[1:], name="by_token")


def _counts_positions(node: Node) -> bool:
    """Whether a node makes 0, 1, 2, … of the positions of a sequence."""
    return (
        node.op.startswith("aten.arange.")
        and node.result.tensor.shape == (symbol(TOKENS),)
        and node.attrs.get("start", 0) == 0
        and node.attrs.get("step", 1) == 1
    )


def _of_rows(builder: FunctionBuilder, last: int, logits: Value, rows: Value) -> Value:
    """What was made from node `last` on, of the wanted rows alone; their logits f32 [N, V]."""
    tail, builder.nodes = builder.nodes[last:], builder.nodes[:last]
    chosen: dict[Value, Value] = {}
    known = {v for node in tail for v in node.results}
    to_rows: dict[str, Dim] = {TOKENS: symbol(ROWS)}

    def of_rows(value: Value) -> Value:
        if value not in chosen and not value.is_state and (dims := position_dims(value, TOKENS)):
            assert value not in known and len(dims) == 1, f"{value!r} is read before it is made"
            chosen[value] = builder.one("aten.index_select.default", value, rows, dim=dims[0], name="wanted")
        return chosen.get(value, value)

    for node in tail:
        with builder.at(node, Phase.DECODE):
            operands = tuple(of_rows(builder.value(v)) for v in node.operands)
            results = tuple(Value(v.name, _substituted_type(v, to_rows)) for v in node.results)
        chosen.update(zip(node.results, results, strict=True))
        attrs = {k: _attr(v, to_rows) for k, v in node.attrs.items()}
        builder.nodes.append(replace(node, operands=operands, results=results, attrs=attrs, phase=Phase.DECODE))
    with builder.at(builder.nodes[-1]):
        found = of_rows(builder.value(logits))
        found = builder.one("reshape", found, shape=(symbol(ROWS), found.tensor.shape[-1]), name="logits")
        return found if found.tensor.dtype is DType.F32 else builder.one("cast", found, dtype=DType.F32, name="logits")


def _only_logits(function: Function, index: int) -> Function:
    """The part of the forward function that makes the logits."""
    part = part_of(function, function.name, (function.results[index],))
    if [p.name for p in part.params] != ["tokens"]:
        names = ", ".join(p.name for p in part.params)
        raise PassError(f"serving takes the input tokens, but the model also reads: {names}", where=function.name)
    return part


def _served_alone(module: Module, entry: Entry, function: Function) -> Module:
    """The module with one entry, and without what only losses need, in layers too: they may work across positions."""
    return DeadCode().run(replace(module.with_function(function), entries={entry.name: entry}), Report())


def _one_row(module: Module, length: int) -> Module:
    """The module with B = 1 and S = T; sequences have 1 to `length` tokens."""
    _refuse_flat_counts(module)
    fixed: dict[str, Dim] = {BATCH: 1, SEQUENCE: symbol(TOKENS)}
    mapping: dict[Value, Value] = {}
    functions = {name: _substituted(f, fixed, mapping) for name, f in module.functions.items()}
    return replace(module, functions=functions, dims={**module.dims, SEQUENCE: NamedDim(SEQUENCE, 1, length)})


def _refuse_flat_counts(module: Module) -> None:
    """Refuse numbers of tokens within a whole batch, which would look like positions with B = 1."""
    for function, node in module.walk():
        if node.op.startswith("aten.arange.") and {BATCH, SEQUENCE} <= names_in(node.result.tensor.shape[0]):
            problem = f"{node.op} in {function.name} numbers the tokens of a batch"
            raise PassError(f"cannot serve: {problem}", where=str(node.origin))


def _substituted_type(value: Value, values: Mapping[str, Dim]) -> TensorType:
    assert isinstance(value.type, TensorType)
    return replace(value.type, shape=tuple(substitute(d, values) for d in value.type.shape))


def _attr(item: object, values: Mapping[str, Dim]) -> object:
    if isinstance(item, tuple):
        return tuple(_attr(i, values) for i in item)
    return substitute(item, values) if hasattr(item, "free_symbols") else item


def _substituted(function: Function, values: Mapping[str, Dim], mapping: dict[Value, Value]) -> Function:
    def changed(value: Value) -> Value:
        if value not in mapping:
            type_ = _substituted_type(value, values)
            mapping[value] = value if type_ == value.type else Value(value.name, type_, value.is_state)
        return mapping[value]

    nodes = tuple(
        replace(
            n,
            operands=tuple(map(changed, n.operands)),
            results=tuple(map(changed, n.results)),
            attrs={k: _attr(v, values) for k, v in n.attrs.items()},
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
