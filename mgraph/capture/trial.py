"""A run of a copy of a model without values, which notes what each of its layers does.

The run is on tensors of the sizes that a trace uses and on the device `meta`. Ops are noted in terms of local numbers:
a tensor is the n-th that a layer was handed or made, a tensor of the layer by its relative name, or another state.
Tensors are told apart by where they lie in memory, since torch hands on copies of the objects that stand for them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from mgraph.capture.alike import Alike, Place, attributes, named_tensors
from mgraph.capture.layers import Forward, between


class Unsuited(Exception):
    """The whole model cannot be judged by a probe; the message says why."""


Memory = tuple[Any, ...]
"""Where a tensor lies: its storage, offset, shape, strides and dtype. Equal for two tensors of the same elements."""


@dataclass(eq=False)
class Call:
    """One run of a layer: what it read and did, in terms of local numbers."""

    path: str
    own: dict[Memory, Any]
    local: dict[Memory, int] = field(default_factory=dict)
    made: set[Any] = field(default_factory=set)  # storages
    returned: set[Memory] = field(default_factory=set)
    log: list[Any] = field(default_factory=list)
    reads: set[Place] = field(default_factory=set)
    unfit: str = ""

    def number(self, tensor: Tensor) -> int:
        """The local number of a tensor, a new one if it has none."""
        return self.local.setdefault(_memory(tensor), len(self.local))

    def refuse(self, reason: str) -> None:
        """Note why the layer is unfit; the first reason counts."""
        self.unfit = self.unfit or reason


class Trial(TorchDispatchMode):
    """Sees every op of the run, and which layer it is in. `paths` are the layers, `suspects` attributes to watch."""

    def __init__(self, model: nn.Module, paths: list[str], suspects: set[Place]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.paths = paths
        self.suspects = suspects
        self.names = frozenset(name for _, name in suspects)
        self.current: Call | None = None
        self.done: dict[str, list[Call]] = {}
        self.maker: dict[Memory, Call | None] = {}
        self.alive: list[Any] = []  # a tensor that is gone could leave its place in memory to another
        self.states: dict[Memory, str] = {}
        self.parts: dict[int, tuple[str, str]] = {}  # of the dict of a module: its layer, and its path in it
        self.own: dict[str, dict[Memory, Any]] = {}

    def calls(self, arguments: tuple[Tensor, ...]) -> dict[str, list[Call]]:
        """Run a copy; the runs of each layer."""
        memo: dict[int, Any] = {}
        for tensor in named_tensors(self.model).values():
            if id(tensor) not in memo:
                memo[id(tensor)] = _like(tensor)
        try:
            twin = copy.deepcopy(self.model, memo)
        except Exception as error:  # an object of the user's may be of a kind that has no copy
            raise Unsuited(f"the model cannot be copied ({type(error).__name__})") from error
        layers = self._know(twin)
        given = tuple(_like(a) for a in arguments)
        self.alive.append(given)
        self.maker.update({_memory(t): None for t in given})
        try:
            with _as_if_exported(), self, between(layers, self._layer), self._reading():
                results = twin(*given)
        except Exception as error:  # whatever it is, the trace of the whole model will report it
            raise Unsuited(f"it does not run on sizes alone ({type(error).__name__})") from error
        self._outside(results)
        self._unchanged(twin, {key: made for key, made in memo.items() if isinstance(made, Tensor)})
        return self.done

    def _know(self, twin: nn.Module) -> dict[str, nn.Module]:
        """Note where the modules and tensors of a copy are; its layers."""
        layers = {path: twin.get_submodule(path) for path in self.paths}
        for name, tensor in named_tensors(twin).items():
            self.states.setdefault(_memory(tensor), name)
            self.alive.append(tensor)
        for path, layer in layers.items():
            for name, part in layer.named_modules():
                self.parts[id(vars(part))] = path, name
            own = self.own.setdefault(path, {})
            for name, tensor in named_tensors(layer).items():
                own.setdefault(_memory(tensor), ("own", name))
        return layers

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Note which suspected attributes the layers read."""
        names, parts, suspects = self.names, self.parts, self.suspects

        def read(module: nn.Module, name: str) -> Any:
            if name in names and self.current is not None:
                path, part = parts.get(id(object.__getattribute__(module, "__dict__")), ("", ""))
                if path == self.current.path and (part, name) in suspects:
                    self.current.reads.add((part, name))
            return object.__getattribute__(module, name)

        with patch.object(nn.Module, "__getattribute__", read):
            yield

    def _unchanged(self, twin: nn.Module, tensors: Mapping[int, Any]) -> None:
        """Raise Unsuited where the run changed an attribute: what a layer does may hang on how often it ran."""
        pairs = list(zip(self.model.named_modules(), twin.modules(), strict=True))
        alike = Alike({**tensors, **{id(part): other for (_, part), other in pairs}})
        for (path, part), other in pairs:
            mine, others = attributes(part), attributes(other)
            for name in mine.keys() | others.keys():
                if name not in mine or name not in others or not alike(mine[name], others[name]):
                    raise Unsuited(f"forward changes '{f'{path}.{name}'.lstrip('.')}'")

    def _layer(self, path: str, forward: Forward, module: nn.Module, args: Any, keywords: Any) -> Any:
        """Run one layer."""
        if self.current is not None:
            self.current.refuse(f"runs another layer ('{path}')")
            return forward(module, *args, **keywords)
        call = Call(path, self.own[path])
        self.done.setdefault(path, []).append(call)
        leaves, tree = tree_flatten((args, keywords))
        given = [t for t in leaves if isinstance(t, Tensor)]
        self._outside(given)
        self.alive.append(leaves)
        call.log.append((tree, tuple(_described(call, leaf) for leaf in leaves)))
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            call.refuse("runs without gradients, or under autocast")
        if not given:
            call.refuse("is handed no tensor")
        self.current = call
        try:
            results = forward(module, *args, **keywords)
        finally:
            self.current = None
        leaves, tree = tree_flatten(results)
        self.alive.append(leaves)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and _memory(leaf) not in call.local:
                call.refuse("returns a tensor that it did not make")
        call.returned = {_memory(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        call.log.append((tree, tuple(_described(call, leaf) for leaf in leaves)))
        return results

    def _outside(self, tensors: Iterable[Any]) -> None:
        """Note that tensors are read outside of layers."""
        for tensor in tensors:
            place = _memory(tensor)
            maker = self.maker.get(place)
            if maker is not None and place not in maker.returned:
                maker.refuse("makes a tensor that is read outside without being returned")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _on_meta(args), {name: _on_meta(value) for name, value in (kwargs or {}).items()}
        results = func(*args, **kwargs)
        given = list(_tensors((args, tuple(kwargs.values()))))
        made = list(_tensors(results))
        self.alive.append((given, made))
        call = self.current
        if call is None:
            self._outside(given)
        else:
            operands = self._operand(call, args), tuple((n, self._operand(call, v)) for n, v in kwargs.items())
            if func._schema.is_mutable:
                self._check_written(call, func, args, kwargs)
            before = {t.untyped_storage()._cdata for t in given}
            call.made.update(s for t in made if (s := t.untyped_storage()._cdata) not in before)
            call.log.append((func, operands, tuple((call.number(t), _type(t)) for t in made)))
        for tensor in made:
            self.maker.setdefault(_memory(tensor), call)
        return results

    def _operand(self, call: Call, value: Any) -> Any:
        """An argument of an op in a layer: a tensor by what the layer knows it as, anything else as it is."""
        if isinstance(value, list | tuple):
            return tuple(self._operand(call, v) for v in value)
        if not isinstance(value, Tensor):
            return _plain(value)
        place = _memory(value)
        for known in (call.local, call.own, self.states):
            if place in known:
                return known[place]
        self._outside([value])
        call.refuse("reads a tensor that it is not handed")
        return None

    def _check_written(self, call: Call, func: Any, args: Any, kwargs: Any) -> None:
        """An op in place may change what the layer made."""
        arguments = func._schema.arguments
        given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
        names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        for tensor in _tensors([given.get(name) for name in names]):
            if tensor.untyped_storage()._cdata not in call.made:
                call.refuse("changes a tensor in place that it did not make")


@contextmanager
def _as_if_exported() -> Iterator[None]:
    """Code that asks whether it is traced by torch.export is told that it is."""
    with (
        patch.object(torch.compiler, "_is_compiling_flag", True),
        patch.object(torch.compiler, "_is_exporting_flag", True),
    ):
        yield


def _like(tensor: Tensor) -> Tensor:
    """A tensor of the same type without values."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _on_meta(value: Any) -> Any:
    """An argument of an op for tensors without values: those that have some lose them, a device becomes `meta`."""
    if isinstance(value, list | tuple):
        return type(value)(_on_meta(v) for v in value)
    if isinstance(value, torch.device):
        return torch.device("meta")
    return _like(value) if isinstance(value, Tensor) and not value.is_meta else value


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results of an op."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _tensors(element)


def _memory(tensor: Tensor) -> Memory:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _type(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.shape, tensor.stride()


def _described(call: Call, leaf: Any) -> Any:
    """An argument or result of a layer: a tensor by its local number and type, anything else as it is."""
    return (call.number(leaf), _type(leaf), leaf.requires_grad) if isinstance(leaf, Tensor) else _plain(leaf)


def _plain(leaf: Any) -> Any:
    """What tells a value that is no tensor from others: `1`, `1.0` and `True` differ, objects are told by identity."""
    if isinstance(leaf, float):
        return float, leaf.hex()
    known = isinstance(leaf, int | str | bytes | torch.dtype | torch.device)
    return (type(leaf), leaf) if known else (type(leaf), id(leaf))
