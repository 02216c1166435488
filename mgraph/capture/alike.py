"""Whether two modules are the same but for their tensors: which attributes differ between layers of a list.

Attributes are compared by what they are made of, since a constructor often makes each layer an equal object of its own
(an activation, a `functools.partial`, a configuration).
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

Place = tuple[str, str]
"""An attribute of a module within a layer: the module's path relative to the layer, and the attribute's name."""

_TENSORS = frozenset({"_parameters", "_buffers", "_modules"})
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


class Alike:
    """Compares values of one side with values of the other; `partners` maps ids of objects to what stands for them."""

    def __init__(self, partners: Mapping[int, object]) -> None:
        self._partners = partners
        self._assumed: set[tuple[int, int]] = set()  # pairs under comparison: a cycle back to one says nothing new

    def __call__(self, one: Any, two: Any) -> bool:
        """Whether two values are the same, or of one type and made of the same."""
        if id(one) in self._partners:
            return self._partners[id(one)] is two
        if one is two:
            return True
        if type(one) is not type(two):
            return False
        if isinstance(one, _VALUES):
            return repr(one) == repr(two)  # tells -0.0 from 0.0, and has one nan
        if (id(one), id(two)) in self._assumed:
            return True
        self._assumed.add((id(one), id(two)))
        if self._made_alike(one, two):
            return True
        self._assumed.clear()  # what was found alike on this assumption may not be
        return False

    def _made_alike(self, one: Any, two: Any) -> bool:
        if isinstance(one, list | tuple):
            return self._all(one, two) and self._all(_own(one), _own(two))
        if isinstance(one, dict):
            return all(self._all(list(part(one)), list(part(two))) for part in (dict.keys, dict.values, _own))
        if isinstance(one, set | frozenset):
            return bool(one == two)
        if isinstance(one, partial):
            return self._all((one.func, one.args, one.keywords), (two.func, two.args, two.keywords))
        if isinstance(one, types.MethodType):
            return self._all((one.__func__, one.__self__), (two.__func__, two.__self__))
        if isinstance(one, types.FunctionType):
            return one.__code__ is two.__code__ and self._all(_function(one), _function(two))
        if isinstance(one, types.CellType):
            return self._all(_contents(one), _contents(two))
        plain = isinstance(getattr(one, "__dict__", None), dict) and not hasattr(type(one), "__slots__")
        if isinstance(one, torch.Tensor | type | types.ModuleType) or not plain:
            return False  # only the very same object is known to hold the same
        return self(vars(one), vars(two))

    def _all(self, one: Any, two: Any) -> bool:
        return len(one) == len(two) and all(self(a, b) for a, b in zip(one, two, strict=True))


def _own(value: Any) -> list[Any]:
    """What an instance of a subclass of a container holds besides."""
    return [getattr(value, "__dict__", None)]


def _function(function: types.FunctionType) -> tuple[Any, ...]:
    return function.__defaults__, function.__kwdefaults__, function.__closure__, function.__dict__


def _contents(cell: types.CellType) -> list[Any]:
    """What a variable of an enclosing function holds; nothing if it has no value yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds besides its parameters, buffers and parts."""
    return {name: value for name, value in vars(module).items() if name not in _TENSORS}


def differing(one: nn.Module, two: nn.Module, alike: Alike) -> Iterator[Place]:
    """The attributes of two modules of equal structure that are not alike."""
    for (path, a), (_, b) in zip(one.named_modules(), two.named_modules(), strict=True):
        mine, other = attributes(a), attributes(b)
        for name in sorted(mine.keys() | other.keys()):
            if name not in mine or name not in other or not alike(mine[name], other[name]):
                yield path, name


def same_structure(one: nn.Module, two: nn.Module) -> bool:
    """Whether two modules have parts of the same classes and tensors of the same types, all under the same names."""
    return _structure(one) == _structure(two)


def _structure(module: nn.Module) -> list[Any]:
    parts = [(path, type(part), sorted(part._non_persistent_buffers_set)) for path, part in module.named_modules()]
    tensors = [
        (name, type(t), t.dtype, tuple(t.shape), t.stride(), t.requires_grad)
        for name, t in named_tensors(module).items()
    ]
    return [parts, tensors]


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by all their names."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return dict(named)


def partners(one: nn.Module, two: nn.Module) -> dict[int, object]:
    """The modules and tensors of one layer, by id, with what has their name in another of equal structure.

    What both layers share stands for itself.
    """
    modules = zip(one.modules(), two.modules(), strict=True)
    tensors = zip(named_tensors(one).values(), named_tensors(two).values(), strict=True)
    return {id(a): b for pairs in (modules, tensors) for a, b in pairs}
