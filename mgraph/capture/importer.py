"""From torch's exported program to a `Module` with one function and one entry, `forward`.

What tracing adds and no one wrote is left out (assertions, conversions that change nothing, detours of memory layout),
sizes become dims, in-place ops become values, every view-like op becomes `reshape`, every conversion `cast`.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from mgraph.capture import noise, rules
from mgraph.capture.adapter import Adapter
from mgraph.capture.export import Exported
from mgraph.capture.frames import stack_frame
from mgraph.capture.initialise import Built, values_program
from mgraph.capture.mutation import Memory, Piece, tiled
from mgraph.capture.shapes import ShapeReader
from mgraph.capture.unsupported import INLINED, argument, check, check_sizes, is_assertion, is_no_dropout, op_name
from mgraph.errors import CaptureError
from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Entry, Module, Origin, State, StateKind, Value
from mgraph.ir.ops.constant import WRITTEN, written
from mgraph.ir.types import TensorType

_STATES = {"PARAMETER": StateKind.PARAM, "BUFFER": StateKind.BUFFER, "CONSTANT_TENSOR": StateKind.BUFFER}


def import_program(exported: Exported, built: Built, name: str) -> tuple[Module, Counter[str]]:
    """The module of a traced model, and how many nodes were left out, by op.

    Raises CaptureError that lists every construct the IR does not support.
    """
    importer = _Importer(exported, built)
    check(exported.program, importer.reader)
    check_sizes(exported.program, importer.reader)
    return importer.run(name), importer.dropped


class _Importer:
    """One import: `env` maps torch's nodes to values, or to a tuple of them for an op with several results."""

    def __init__(self, exported: Exported, built: Built) -> None:
        self.exported, self.built = exported, built
        self.program = exported.program
        self.specs = {s.arg.name: s for s in self.program.graph_signature.input_specs}
        placeholders = [n for n in self.program.graph.nodes if n.op == "placeholder"]
        self.users = [n for n in placeholders if self.specs[n.name].kind.name == "USER_INPUT"]
        sized = [(s, n.meta["val"]) for s, n in zip(exported.inputs, self.users, strict=True)]
        self.reader = ShapeReader(sized, dict(self.program.range_constraints))
        self.builder = FunctionBuilder("forward", "capture")
        self.state: dict[str, State] = {}
        self.env: dict[Any, Any] = {}
        self.dropped: Counter[str] = Counter()
        self.differentiable: set[Value] = set()
        self.noise = noise.Noise(self.emit, self.state, lambda: self.builder.origin)
        self.memory: Memory
        self._origins: dict[tuple[str, str], Origin] = {}

    def run(self, name: str) -> Module:
        """Import everything."""
        for spec, node in zip(self.exported.inputs, self.users, strict=True):
            self.env[node] = self.builder.param(spec.name, self.reader.type_of(node.meta["val"]))
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and node not in self.env:
                self.env[node] = self.constant(node) or self.declare(node).value
        results = self.graph(self.program.graph_module)
        used = {v.name for n in self.builder.nodes for v in n.operands if v.is_state} | {
            v.name for v in results if v.is_state
        }
        state = {n: s for n, s in self.state.items() if n in used or s.persist}
        function = self.builder.build(results)
        return Module(
            name,
            dims=self.reader.named_dims(),
            state=state,
            functions={"forward": function},
            entries={"forward": Entry("forward", "forward", self.exported.outputs)},
        )

    def constant(self, node: Any) -> Value | None:
        """A small tensor that the forward made of numbers (`torch.tensor(0.0)`), written into the graph."""
        spec, type_ = self.specs[node.name], self.reader.type_of(node.meta["val"])
        if spec.kind.name != "CONSTANT_TENSOR" or math.prod(node.meta["val"].shape) > WRITTEN:
            return None
        self.builder.origin = self.origin(next(iter(node.users), node))
        op, attrs = written(type_, self.program.constants[spec.target].reshape(-1).tolist())
        return self.emit(op, [], attrs, [type_], ["constant"])[0]

    def declare(self, node: Any) -> State:
        """The state behind a placeholder; tied parameters share one."""
        spec = self.specs[node.name]
        full = spec.target.removeprefix(f"{Adapter.PREFIX}.")
        name = self.built.aliases.get(full, full)
        if name not in self.state:
            kind = _STATES[spec.kind.name]
            trainable = kind is StateKind.PARAM and bool(node.meta["val"].requires_grad)
            init = self.built.inits.get(name) or values_program(self.program.constants[spec.target])
            made = State.make(
                name,
                self.reader.type_of(node.meta["val"]),
                kind,
                init=init,
                trainable=trainable,
                persist=spec.persistent is not False and spec.kind.name != "CONSTANT_TENSOR",
            )
            self.state[name] = made
            if trainable:
                self.differentiable.add(made.value)
        return self.state[name]

    def graph(self, graph_module: Any) -> list[Value]:
        """Import the nodes of a graph whose placeholders are bound; gives its results."""
        outer = getattr(self, "memory", None)
        self.memory = Memory(graph_module.graph)
        results: list[Value] = []
        for node in graph_module.graph.nodes:
            if node.op == "call_function":
                self.call(node, graph_module)
            elif node.op == "output":
                results = [self.value(a, node) for a in node.args[0]]
        if outer is not None:
            self.memory = outer
        return results

    def call(self, node: Any, graph_module: Any) -> None:
        """Import one call."""
        self.builder.origin = self.origin(node)
        name = op_name(node)
        if name == INLINED:
            self.env[node] = self.inline(node, graph_module)
        elif node.target is operator.getitem and isinstance(self.env.get(node.args[0]), tuple):
            self.env[node] = self.env[node.args[0]][node.args[1]]
        elif is_assertion(node) or isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymBool):
            self.dropped[name] += 1
        elif is_no_dropout(node) or name in rules.IDENTITIES:
            self.same(node, name)
        elif name == "aten.detach.default":
            self.detach(node, name)
        elif Memory.writes(node):
            self.write(node, name)
        elif noise.draws(node):
            self.env[node] = self.drawn(node, name)
        else:
            self.plain(node, name)

    def inline(self, node: Any, graph_module: Any) -> tuple[Value, ...]:
        """The body of a region with gradients on or off; results of a region without them are detached."""
        enabled, region, *operands = node.args
        body = getattr(graph_module, region.target)
        parameters = [n for n in body.graph.nodes if n.op == "placeholder"]
        for parameter, operand in zip(parameters, operands, strict=True):
            if operand in self.env:  # sizes are read off the nodes themselves
                self.env[parameter] = self.env[operand]
        results = self.graph(body)
        return tuple(v if enabled else self.without_gradient(v) for v in results)

    def detach(self, node: Any, name: str) -> None:
        """Detaching matters only where a gradient could flow."""
        source = self.value(node.args[0], node)
        self.env[node] = self.without_gradient(source)
        self.dropped[name] += self.env[node] is source

    def without_gradient(self, value: Value) -> Value:
        """The value, detached if it depends on a trainable parameter."""
        return (
            self.emit("aten.detach.default", [value], {}, [value.tensor], ["detach"])[0] if self.flows(value) else value
        )

    def flows(self, value: Value) -> bool:
        return value in self.differentiable

    def same(self, node: Any, name: str) -> None:
        self.env[node] = self.value(node.args[0], node)
        self.dropped[name] += 1

    def plain(self, node: Any, name: str) -> None:
        """Import an op that only makes values."""
        made = node.meta["val"]
        types = [self.reader.type_of(t) for t in (made if isinstance(made, tuple | list) else [made])]
        if name in rules.CASTS or name in rules.RESHAPES:
            self.env[node] = self.convert(node, name, types[0])
            return
        operands, attrs = rules.operands_and_attrs(node, types[0], lambda n: self.value(n, node), self.reader)
        if rules.changes_nothing(name, operands, attrs, types[0]):
            self.same(node, name)
            return
        attrs |= rules.implied(name, operands, attrs)
        results = self.emit(name, operands, attrs, types, rules.result_names(node, len(types)))
        self.env[node] = results if isinstance(made, tuple | list) else results[0]

    def convert(self, node: Any, name: str, type_: TensorType) -> Value:
        """A conversion of dtype or shape, left out where the type stays."""
        source = self.value(node.args[0], node)
        if source.type == type_:
            self.dropped[name] += 1
            return source
        return self.as_type(source, type_, rules.base_name(node))

    def as_type(self, value: Value, type_: TensorType, name: str) -> Value:
        """A value cast, then reshaped, to a type."""
        if value.tensor.dtype != type_.dtype:
            cast = value.tensor.with_dtype(type_.dtype)
            value = self.emit("cast", [value], {"dtype": type_.dtype}, [cast], [name])[0]
        if value.tensor.shape != type_.shape:
            value = self.emit("reshape", [value], {"shape": type_.shape}, [type_], [name])[0]
        return value

    def write(self, node: Any, name: str) -> None:
        """An in-place op: every name that holds the value written gets the new one."""
        target = node.args[0]
        before = self.value(target, node, written=True)
        new = (
            self.copied(node, before.tensor)
            if name == "aten.copy_.default"
            else self.updated(node, name, before.tensor)
        )
        self.env[node] = new
        if target is not self.memory.root(target) and self.memory.is_new(target) and name == "aten.copy_.default":
            self.assemble(node, target, new)
            return
        for other in self.memory.names(target):
            if other is target or self.env.get(other) is before:
                self.env[other] = new
            elif other in self.env and self.memory.read_after(other, node):
                raise self.aliased(node)

    def drawn(self, node: Any, name: str) -> Value:
        """Dropout, attention with dropout, or random numbers."""
        type_ = self.reader.type_of(node.meta["val"])
        operands, attrs = rules.operands_and_attrs(node, type_, lambda n: self.value(n, node), self.reader)
        if name == noise.DROPOUT:
            return self.noise.dropout(operands[0], attrs["p"])
        return self.noise.attention(operands, attrs) if name == noise.ATTENTION else self.noise.uniform(type_)

    def updated(self, node: Any, name: str, type_: TensorType) -> Value:
        """The result of the functional form of an in-place op, in the dtype of its target."""
        namespace, base, variant = name.split(".")
        functional = f"{namespace}.{base.removesuffix('_')}.{variant}"
        operands, attrs = rules.operands_and_attrs(node, type_, lambda n: self.value(n, node), self.reader)
        if name == noise.UNIFORM:
            return self.noise.uniform(type_, attrs.get("from", 0.0), attrs.get("to", 1.0))
        result = self.emit(functional, operands, attrs, None, None)[0]
        return self.as_type(result, type_, base.removesuffix("_"))

    def copied(self, node: Any, type_: TensorType) -> Value:
        """The source of a `copy_` as its target holds it."""
        source = self.value(argument(node, 1, "src"), node)
        if source.tensor.shape != type_.shape:
            wide = TensorType(source.tensor.dtype, type_.shape)
            source = self.emit("aten.expand.default", [source], {"size": type_.shape}, [wide], ["expand"])[0]
        return self.as_type(source, type_, "copy")

    def assemble(self, node: Any, target: Any, value: Value) -> None:
        """A slice of an uninitialised tensor was written; when slices fill it, it is their concatenation."""
        root, chain = self.memory.root(target), self.memory.slices(target)
        whole = self.reader.type_of(root.meta["val"])
        partial = [
            s for s in chain or () if self.reader.type_of(s.meta["val"]) != self.reader.type_of(s.args[0].meta["val"])
        ]
        if chain is None or len(partial) != 1:
            raise self.aliased(node)
        dim = argument(partial[0], 1, "dim", 0) % len(whole.shape)
        start, end = rules.slice_bounds(partial[0], whole.shape[dim], self.reader)
        pieces = self.memory.pieces.setdefault(root, {}).setdefault(dim, [])
        pieces.append(Piece(start, end, value))
        ordered = tiled(pieces, whole.shape[dim])
        if ordered is None:
            return
        del self.memory.pieces[root]
        names = tuple(f"tensors.{i}" for i in range(len(ordered)))
        attrs: dict[str, Any] = {"args": names, "dim": dim}
        self.env[root] = self.emit("aten.cat.default", [p.value for p in ordered], attrs, [whole], ["cat"])[0]

    def aliased(self, node: Any) -> CaptureError:
        frame = stack_frame(node.meta.get("stack_trace") or "")
        return CaptureError(
            f"a tensor is changed in place through one view and read through another ({op_name(node)})",
            str(frame) if frame else None,
            "write into the whole tensor, or build it with torch.cat or torch.where",
        )

    def value(self, node: Any, reader_node: Any, written: bool = False) -> Value:
        """The value of an operand. One that is still written in part may only be sliced or written."""
        found = self.env[node]
        assert isinstance(found, Value), f"{node} has several results"
        pending = self.memory.pieces and self.memory.pieces.get(node)
        if pending and not written and op_name(reader_node) != "aten.slice.Tensor":
            raise self.aliased(reader_node)
        return found

    def emit(
        self,
        op: str,
        operands: Sequence[Value],
        attrs: dict[str, Any],
        types: Sequence[TensorType] | None,
        names: Sequence[str] | None,
    ) -> tuple[Value, ...]:
        """Append a node and note which results a gradient can flow through."""
        results = self.builder.emit(op, operands, attrs, types=types, names=names)
        if op != "aten.detach.default" and any(self.flows(v) for v in operands):
            self.differentiable.update(v for v in results if v.tensor.dtype.differentiable)
        return results

    def origin(self, node: Any) -> Origin:
        """Module path and source line of a node."""
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed(stack.values()))[0] if stack else ""
        key = path, node.meta.get("stack_trace") or ""
        if key not in self._origins:
            frame = stack_frame(key[1])
            inner = "" if path == Adapter.PREFIX else path.removeprefix(f"{Adapter.PREFIX}.")
            self._origins[key] = Origin(inner, frame.file if frame else "", frame.line if frame else 0)
        return self._origins[key]
