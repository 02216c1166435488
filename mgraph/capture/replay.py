"""Tracing one layer of each kind, and copying the nodes of that for the others.

While the model is traced, a layer of a kind that was traced before is one opaque op instead, whose results have the
sizes of the traced layer's:

    %a = aten.linear(%x, p_layers_0_w)                 %a   = aten.linear(%x, p_layers_0_w)
    %b = aten.relu(%a)                                 %b   = aten.relu(%a)
    %c = layer([%x], [%b], "layers.0", "layers.0")     %a_1 = aten.linear(%b, p_layers_1_w)
    %d = layer([%c], [%b], "layers.1", "layers.0")     %b_1 = aten.relu(%a_1)
          as traced                                          as expanded

The probe says which layers are of one kind. That they are also handed tensors of the same symbolic sizes, which it
cannot see, is part of what one was traced for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from mgraph.capture.alike import named_tensors
from mgraph.capture.layers import Forward, between
from mgraph.capture.unsupported import regions


@torch.library.custom_op("mgraph_capture::layer", mutates_args=())
def _layer(inputs: list[Tensor], like: list[Tensor], path: str, traced: str) -> list[Tensor]:
    """Stands for a layer that is handed `inputs`; its results are like the results of the layer `traced`."""
    raise AssertionError("a layer that stands in a trace only was run")


@_layer.register_fake
def _(inputs: list[Tensor], like: list[Tensor], path: str, traced: str) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like]


_OP = torch.ops.mgraph_capture.layer.default


class NotReplayed(Exception):
    """A trace cannot be expanded; the message says why."""


@dataclass(frozen=True)
class _Traced:
    """A layer that was traced: its path, and its results: where each tensor is among what it made or was handed."""

    path: str
    made: list[Tensor]
    results: Any
    leaves: list[tuple[str, Any]]


class Replay:
    """The layers of one model that are traced once a kind. `kinds` has each one's kind by its path."""

    def __init__(self, model: nn.Module, kinds: Mapping[str, int]) -> None:
        self._model = model
        self._kinds = kinds
        self._layers = {path: model.get_submodule(path) for path in kinds}
        self._traced: dict[Any, _Traced] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """For one trace."""
        self._traced.clear()
        with between(self._layers, self._run):
            yield

    def _run(self, path: str, forward: Forward, module: nn.Module, args: Any, keywords: Any) -> Any:
        """Trace a layer, or let the op stand for it."""
        leaves, tree = tree_flatten((args, keywords))
        given = list({id(t): t for t in leaves if isinstance(t, Tensor)}.values())
        place = {id(t): i for i, t in enumerate(given)}
        key = self._kinds[path], tree, tuple(_signature(leaf, place) for leaf in leaves)
        traced = self._traced.get(key)
        if traced is None or traced.path == path:
            # Noted before the layer runs: a conversion that changes nothing takes over the name of its operand.
            noted = _OP(given, given, path, path)
            results, tree = tree_flatten(forward(module, *args, **keywords))
            made = list({id(t): t for t in results if isinstance(t, Tensor) and id(t) not in place}.values())
            where = {id(t): ("made", i) for i, t in enumerate(made)} | {i: ("given", k) for i, k in place.items()}
            found = [where[id(leaf)] if isinstance(leaf, Tensor) else ("is", leaf) for leaf in results]
            traced = self._traced[key] = _Traced(path, made, tree, found)
            fresh = _OP(noted, made, path, path)
        else:
            fresh = _OP(given, traced.made, path, traced.path)
        sources = {"made": fresh, "given": given}
        return tree_unflatten([x if kind == "is" else sources[kind][x] for kind, x in traced.leaves], traced.results)

    def expand(self, program: Any) -> Counter[str]:
        """Put copies of the traced layers' nodes in the place of the ops; how many layers of each list were copied.

        Raises NotReplayed where a traced layer is more than nodes that can be copied.
        """
        graph = program.graph_module.graph
        for node in graph.nodes:
            if any(_OP in (n.target for n in region.graph.nodes) for region in regions(node, program.graph_module)):
                raise NotReplayed("layers run in a region without gradients")
        calls = [n for n in graph.nodes if n.target is _OP]
        specs = {s.arg.name: s for s in program.graph_signature.input_specs}
        states = _States(self._model, {specs[n.name].target: n for n in graph.nodes if n.op == "placeholder"}, specs)
        bodies = _bodies(graph, {n.args[2] for n in calls if n.args[2] == n.args[3]})
        handed: dict[str, list[Any]] = {}
        copied: Counter[str] = Counter()
        for call in calls:
            inputs, like, path, traced = call.args
            if traced not in handed and path != traced:
                raise NotReplayed("the results of a layer are not used")
            if path not in handed and path == traced:
                handed[path] = results = list(inputs)
                _check_body(bodies[path], handed[path])
            elif path == traced:
                results = list(like)
            else:
                replaced = dict(states.replacements(bodies[traced], traced, path))
                replaced.update(zip(handed[traced], inputs, strict=True))
                _copy(graph, bodies[traced], replaced, call, (traced, path))
                results = [replaced.get(n, n) for n in like]
                copied[path.rpartition(".")[0]] += 1
            for user in list(call.users):
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
        for call in reversed(calls):
            graph.erase_node(call)
        return copied


def _signature(leaf: Any, place: Mapping[int, int]) -> Any:
    """What of an argument decides the trace: a tensor's type and which argument it is, the value of anything else."""
    if isinstance(leaf, Tensor):
        sizes = tuple(_size(s) for s in (*leaf.shape, *leaf.stride(), leaf.storage_offset()))
        return place[id(leaf)], leaf.dtype, leaf.device, leaf.dim(), sizes
    if isinstance(leaf, int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(leaf), _size(leaf)
    return type(leaf), leaf if isinstance(leaf, str | bytes | torch.dtype | torch.device) else id(leaf)


def _size(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else size


def _is_size(node: Any) -> bool:
    """Whether a node makes a number, not a tensor."""
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _paths(node: Any) -> list[str]:
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _bodies(graph: Any, traced: set[str]) -> dict[str, list[Any]]:
    """Per traced layer its nodes, but for those that make sizes: what a size is, its readers know themselves."""
    bodies: dict[str, list[Any]] = {path: [] for path in traced}
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node.target is _OP:
            continue
        if _is_size(node):
            continue
        owner = next((path for path in _paths(node) if path in bodies), None)
        stands = any(n.target is _OP for n in node.all_input_nodes)  # a result of the op, not of the layer's own
        if owner is None or stands:
            continue
        if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
            raise NotReplayed("a layer has regions without gradients")
        bodies[owner].append(node)
    return bodies


def _check_body(body: list[Any], handed: list[Any]) -> None:
    """Raise NotReplayed unless a traced layer reads only what it makes, is handed, or has as its state."""
    known = {*body, *handed}
    for node in body:
        if any(n not in known and n.op != "placeholder" and not _is_size(n) for n in node.all_input_nodes):
            raise NotReplayed("a layer reads a tensor that it is not handed")


class _States:
    """Which placeholder of a trace has which tensor of the model."""

    def __init__(self, model: nn.Module, nodes: Mapping[str, Any], specs: Mapping[str, Any]) -> None:
        self._tensors = named_tensors(model)
        self._nodes = nodes
        self._names = {node: name for name, node in nodes.items()}
        self._specs = specs
        self._own: dict[str, dict[int, str]] = {}

    def replacements(self, body: list[Any], traced: str, path: str) -> Iterator[tuple[Any, Any]]:
        """The placeholders that the nodes of a traced layer read, each with what another layer reads instead."""
        for node in dict.fromkeys(n for b in body for n in b.all_input_nodes if n.op == "placeholder"):
            kind = self._specs[node.name].kind.name
            if kind == "CONSTANT_TENSOR":
                raise NotReplayed("a layer makes a tensor of numbers")
            if kind != "USER_INPUT":
                relative = self._relative(traced).get(id(self._tensors[self._names[node]]))
                if relative is not None:
                    yield node, self._nodes[f"{path}.{relative}"]

    def _relative(self, path: str) -> dict[int, str]:
        """The tensors of a layer, by id, with their names in it."""
        if path not in self._own:
            prefix = f"{path}."
            mine = {n: t for n, t in self._tensors.items() if n.startswith(prefix)}
            self._own[path] = {id(t): n.removeprefix(prefix) for n, t in reversed(list(mine.items()))}
        return self._own[path]


def _copy(graph: Any, body: list[Any], replaced: dict[Any, Any], before: Any, paths: tuple[str, str]) -> None:
    """Copy nodes to before another, with operands replaced, and enter each copy as what replaces its original."""
    renamed: dict[int, Any] = {}
    with graph.inserting_before(before):
        for node in body:
            new = graph.node_copy(node, lambda n: replaced.get(n, n))
            stack = node.meta.get("nn_module_stack")
            if id(stack) not in renamed:
                renamed[id(stack)] = {key: (_moved(path, *paths), kind) for key, (path, kind) in stack.items()}
            new.meta = {**node.meta, "nn_module_stack": renamed[id(stack)]}
            replaced[node] = new


def _moved(path: str, old: str, new: str) -> str:
    """A module path in one layer as that in another."""
    return new + path[len(old) :] if path == old or path.startswith(f"{old}.") else path
