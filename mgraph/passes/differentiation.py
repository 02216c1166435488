"""Reverse-mode differentiation of one function: `f` becomes `f.fwd`, which also returns what `f.bwd` needs.

`f.bwd` takes the saved values (params of `f` it needs, then intermediates that `f.fwd` returns), then one cotangent
per seeded result; its slots are the states it reads, then one gradient accumulator per differentiated slot. It returns
the gradients of the needed params, then the new accumulators. Values keep their names across the three functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Function, Module, Node, Phase, Value
from mgraph.ir.opdef import GradientRequest, op_def
from mgraph.ir.types import DType, TensorType

# Views of a saved value cost nothing to make again, and saving them would only lengthen the list of saved values.
# Repeated and padded parts are one where a rank takes its own, or else copies of a weight.
VIEWS = frozenset(
    {
        "reshape",
        "repeat_parts",
        "pad_extent",
        "aten.t.default",
        "aten.transpose.int",
        "aten.permute.default",
        "aten.unsqueeze.default",
        "aten.squeeze.dim",
        "aten.expand.default",
        "aten.slice.Tensor",
        "aten.select.int",
    }
)


@cache
def gradient_type(type_: TensorType) -> TensorType:
    """The type of what is kept of a parameter in full precision: f32, or f64 for f64."""
    return type_.with_dtype(DType.F64 if type_.dtype is DType.F64 else DType.F32)


@dataclass(frozen=True, slots=True)
class Derivative:
    """A function with its forward and backward forms.

    `saved_params` are indices of params that `bwd` takes, `saved` the intermediates that `fwd` returns, `states` the
    slots that `bwd` reads, `seeded` the results with a cotangent, `param_gradients` and `slot_gradients` the inputs
    that get a gradient.
    """

    fwd: Function
    bwd: Function
    saved_params: tuple[int, ...]
    saved: tuple[Value, ...]
    states: tuple[int, ...]
    seeded: tuple[int, ...]
    param_gradients: tuple[int, ...]
    slot_gradients: tuple[int, ...]


class Differentiator:
    """Differentiates functions of a module on demand, once per (function, needed inputs, seeded results). `low_sums`:
    gradients are summed in the dtype of their parameters."""

    def __init__(self, module: Module, made_by: str, *, low_sums: bool = False) -> None:
        self.module = module
        self.made_by = made_by
        self._low_sums = low_sums
        self.functions: dict[str, Function] = {}
        self._done: dict[tuple[str, tuple[bool, ...], tuple[bool, ...]], Derivative] = {}

    def accumulator_type(self, type_: TensorType) -> TensorType:
        """The type in which the gradient of a parameter is summed."""
        return type_ if self._low_sums else gradient_type(type_)

    def active(self, function: Function, needs: Sequence[bool]) -> set[Value]:
        """Values that depend differentiably on the needed inputs (trainable states always count)."""
        inputs = zip(function.inputs(), needs, strict=True)
        active = {v for v, need in inputs if need}
        for node in function.nodes:
            if any(self.needed(v, active) for v in node.operands) and self._may_differentiate(node):
                active.update(v for v in node.results if isinstance(v.type, TensorType) and v.type.dtype.differentiable)
        return active

    def needed(self, value: Value, active: set[Value]) -> bool:
        """Whether a value gets a cotangent."""
        return value in active or (value.is_state and self.module.state[value.name].trainable)

    def _may_differentiate(self, node: Node) -> bool:
        return node.op == "call" or op_def(node.op).gradient is not None

    def function(self, function: Function, needs: tuple[bool, ...], seeds: tuple[bool, ...]) -> Derivative:
        """The derivative of a function with respect to the needed inputs, given cotangents of the seeded results."""
        key = (function.name, needs, seeds)
        if key not in self._done:
            number = sum(k[0] == function.name for k in self._done)
            suffix = f".{number}" if number else ""
            self._done[key] = self._differentiate(function, needs, seeds, suffix)
            for made in (self._done[key].fwd, self._done[key].bwd):
                self.functions[made.name] = made
        return self._done[key]

    def _differentiate(
        self, function: Function, needs: tuple[bool, ...], seeds: tuple[bool, ...], suffix: str
    ) -> Derivative:
        sweep = Sweep(self, function, f"{function.name}.bwd{suffix}", needs)
        forward = sweep.forward()
        maker = {value: node for node in forward for value in node.results}
        cotangents = []
        seeded = tuple(i for i, seed in enumerate(seeds) if seed)
        for i in seeded:
            result = function.results[i]
            value = Value(sweep.builder.fresh(f"d_{result.name}"), result.type)
            cotangents.append(value)
            with sweep.builder.at(maker.get(result, forward[-1]), Phase.BACKWARD):  # a result may stand twice
                sweep.add(result, value)
        accumulators = {
            slot: sweep.builder.slot(f"grad.{slot.name}", self.accumulator_type(slot.tensor))
            for slot, need in zip(function.slots, needs[len(function.params) :], strict=True)
            if need
        }
        sweep.accumulators.update(accumulators)
        sweep.backward()
        param_gradients = tuple(i for i, p in enumerate(function.params) if needs[i] and p in sweep.cotangents)
        results = [sweep.cotangents[function.params[i]] for i in param_gradients]
        results += [sweep.accumulators[slot] for slot in accumulators]
        nodes, free = _rematerialize_views(sweep.builder.nodes, forward, results, set(cotangents))
        params = [p for p in function.params if p in free]
        states = [s for s in function.slots if s in free]
        saved = tuple(v for node in forward for v in node.results if v in free)
        backward = Function(
            sweep.builder.name,
            (*params, *saved, *cotangents),
            (*states, *accumulators.values()),
            nodes,
            tuple(results),
            function.statics,
        )
        fwd = replace(function, name=f"{function.name}.fwd{suffix}", nodes=forward, results=function.results + saved)
        return Derivative(
            fwd,
            backward,
            tuple(function.params.index(p) for p in params),
            saved,
            tuple(function.slots.index(s) for s in states),
            seeded,
            param_gradients,
            tuple(i for i, slot in enumerate(function.slots) if slot in accumulators),
        )


class Sweep:
    """One backward sweep over a function: collects cotangents and emits backward nodes into `builder`.

    `accumulators` maps each differentiated slot (or state) to its current accumulator value; contributions to them are
    accumulated at once, so that no gradient of a weight lives longer than it must.
    """

    def __init__(self, owner: Differentiator, function: Function, name: str, needs: tuple[bool, ...]) -> None:
        self.owner = owner
        self.source = function
        self.builder = FunctionBuilder(name, owner.made_by, function.names(), Phase.BACKWARD)
        self.active = owner.active(function, needs)
        self.cotangents: dict[Value, Value] = {}
        self.accumulators: dict[Value, Value] = {}
        self._used = {v for n in function.nodes for v in n.operands} | set(function.results)
        self._calls: dict[int, tuple[Derivative, Node]] = {}
        self._forward: list[Node] = []

    def forward(self) -> tuple[Node, ...]:
        """The forward nodes, with calls replaced by calls of the callee's forward form."""
        for node in self.source.nodes:
            if node.op == "call" and any(self.owner.needed(v, self.active) for v in node.operands):
                node = self._forward_call(node)
            self._forward.append(node)
        return tuple(self._forward)

    def _forward_call(self, node: Node) -> Node:
        callee = self.owner.module.functions[str(node.attrs["callee"])]
        needs = tuple(self.owner.needed(v, self.active) for v in node.operands)
        seeds = tuple(v in self.active and v in self._used for v in node.results)
        derivative = self.owner.function(callee, needs, seeds)
        extra = tuple(Value(self.builder.fresh_like(v), v.type) for v in derivative.saved)
        made = replace(
            node,
            results=node.results + extra,
            attrs={**node.attrs, "callee": derivative.fwd.name},
            made_by=self.owner.made_by,
        )
        self._calls[id(made)] = derivative, made
        return made

    def add(self, value: Value, cotangent: Value) -> None:
        """Add a contribution to the cotangent of a value; slots and states accumulate at once."""
        if value in self.accumulators:
            self.accumulators[value] = self.builder.one(
                "accumulate", self.accumulators[value], cotangent, name=self._accumulator_name(value)
            )
        elif value in self.cotangents:
            self.cotangents[value] = self.builder.one("aten.add.Tensor", self.cotangents[value], cotangent)
        else:
            self.cotangents[value] = cotangent

    def _accumulator_name(self, value: Value) -> str:
        return f"grad_{value.name.replace('.', '_')}"

    def backward(self) -> None:
        """Visit the forward nodes in reverse and emit their gradients."""
        for node in reversed(self._forward):
            if not any(v in self.cotangents for v in node.results):
                continue
            with self.builder.at(node, Phase.BACKWARD):
                if id(node) in self._calls:
                    self._backward_call(*self._calls[id(node)])
                else:
                    self._backward_node(node)

    def _backward_node(self, node: Node) -> None:
        needs = tuple(self.owner.needed(v, self.active) for v in node.operands)
        rule = op_def(node.op).gradient
        if not any(needs):
            return
        if rule is None:
            raise PassError(
                f"{node.op} has no gradient, but the loss depends on it through {node!r}", where=str(node.origin)
            )
        cotangents = tuple(self.cotangents.get(v) for v in node.results)
        begin = len(self.builder.nodes)
        made = rule(GradientRequest(self.builder, node, cotangents, needs))
        if any("." in n.op and op_def(n.op).random for n in self.builder.nodes[begin:]):
            raise PassError(
                f"the gradient of {node.op} would draw its random numbers anew",
                where=str(node.origin),
                hint="write it with torch.nn.functional.dropout, or with random numbers that need no gradient",
            )
        for operand, need, gradient in zip(node.operands, needs, made, strict=True):
            if need and gradient is not None:
                self.add(operand, gradient)

    def _backward_call(self, derivative: Derivative, node: Node) -> None:
        callee = derivative.bwd
        if not callee.results:
            return  # no gradient gets through it
        original = self.owner.module.functions[derivative.fwd.name.rpartition(".fwd")[0]]
        params = node.operands[: len(original.params)]
        slots = node.operands[len(original.params) :]
        saved = node.results[len(original.results) :]
        cotangents = [self._cotangent_or_zero(node.results[i]) for i in derivative.seeded]
        accumulated = [slots[i] for i in derivative.slot_gradients]
        operands = (
            *(params[i] for i in derivative.saved_params),
            *saved,
            *cotangents,
            *(slots[i] for i in derivative.states),
            *(self.accumulators[s] for s in accumulated),
        )
        names = [f"d_{params[i].name}" for i in derivative.param_gradients]
        names += [self._accumulator_name(s) for s in accumulated]
        attrs = {**{k: v for k, v in node.attrs.items() if k != "callee"}, "callee": callee.name}
        results = self.builder.emit("call", operands, attrs, types=[v.type for v in callee.results], names=names)
        for i, gradient in zip(derivative.param_gradients, results, strict=False):
            self.add(params[i], gradient)
        for slot, new in zip(accumulated, results[len(derivative.param_gradients) :], strict=True):
            self.accumulators[slot] = new

    def _cotangent_or_zero(self, value: Value) -> Value:
        if value not in self.cotangents:
            type_ = value.tensor
            zeros = self.builder.one("aten.zeros.default", size=type_.shape, dtype=type_.dtype)
            self.cotangents[value] = zeros
        return self.cotangents[value]


def _rematerialize_views(
    backward: Sequence[Node], forward: Sequence[Node], results: Sequence[Value], own: set[Value]
) -> tuple[tuple[Node, ...], set[Value]]:
    """Make views again in the backward instead of saving them; returns its nodes and the values it takes from outside.

    A value that another node saves anyway, or that is an input, is the base of its views.
    """
    producers = {v: node for node in forward for v in node.results}
    local = {v for node in backward for v in node.results} | own
    nodes: list[Node] = []
    made: set[Value] = set()

    def bring(value: Value) -> None:
        producer = producers.get(value)
        if value in local or value in made or producer is None or producer.op not in VIEWS:
            return
        bring(producer.operands[0])
        nodes.append(replace(producer, phase=Phase.BACKWARD))
        made.add(value)

    for node in backward:
        for operand in node.operands:
            bring(operand)
        nodes.append(node)
    local |= made
    free = {v for node in nodes for v in node.operands if v not in local and not v.is_state}
    free |= {v for v in results if v not in local and not v.is_state}
    return tuple(nodes), free
