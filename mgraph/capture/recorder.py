"""Recording what a constructor does to its tensors, so that weights can be made later, shard by shard.

Inside `Recorder`, tensors of more than `SMALL` elements live on the meta device and small ones are real. Each storage
carries the program of in-place calls that would fill it (`InitCall`, ARCHITECTURE.md). A full overwrite starts the
program anew; arithmetic with a scalar, or a number written into a stretch of it (the row of a padding token), extends
it; anything else loses it, and the place is remembered for the error.
A small tensor that no random number went into needs no program: its values are known.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mgraph.capture.frames import user_frame
from mgraph.ir.graph import InitCall

SMALL = 64 * 1024
"""Elements up to which a tensor is real while a model is built."""

_Fill = Callable[[Sequence[Any], Mapping[str, Any]], tuple[InitCall, ...]]


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], index: int, name: str, default: Any) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


# Full overwrites: op -> the program of the result, from the arguments.
_FILLS: dict[str, _Fill] = {
    "aten.normal_": lambda a, k: (("normal_", _number(a, k, 1, "mean", 0.0), _number(a, k, 2, "std", 1.0)),),
    "aten.uniform_": lambda a, k: (("uniform_", _number(a, k, 1, "from", 0.0), _number(a, k, 2, "to", 1.0)),),
    "aten.zero_": lambda a, k: (("zeros_",),),
    "aten.fill_": lambda a, k: (("fill_", _number(a, k, 1, "value", 0.0)),),
    "aten.zeros": lambda a, k: (("zeros_",),),
    "aten.zeros_like": lambda a, k: (("zeros_",),),
    "aten.new_zeros": lambda a, k: (("zeros_",),),
    "aten.ones": lambda a, k: (("fill_", 1.0),),
    "aten.ones_like": lambda a, k: (("fill_", 1.0),),
    "aten.new_ones": lambda a, k: (("fill_", 1.0),),
    "aten.full": lambda a, k: (("fill_", _number(a, k, 1, "fill_value", 0.0)),),
    "aten.full_like": lambda a, k: (("fill_", _number(a, k, 1, "fill_value", 0.0)),),
    "aten.new_full": lambda a, k: (("fill_", _number(a, k, 2, "fill_value", 0.0)),),
    "aten.rand": lambda a, k: (("uniform_", 0.0, 1.0),),
    "aten.rand_like": lambda a, k: (("uniform_", 0.0, 1.0),),
    "aten.randn": lambda a, k: (("normal_", 0.0, 1.0),),
    "aten.randn_like": lambda a, k: (("normal_", 0.0, 1.0),),
}
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_UNINITIALISED = frozenset({"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided"})
_COPIES = frozenset({"aten.clone", "aten._to_copy"})

# Elementwise arithmetic with scalars; the in-place form has the same name with `_`.
_ARITHMETIC: dict[str, _Fill] = {
    "aten.mul": lambda a, k: (("mul_", _number(a, k, 1, "other", 1.0)),),
    "aten.div": lambda a, k: (("mul_", 1.0 / _divisor(a, k)),),
    "aten.add": lambda a, k: (("add_", _number(a, k, 1, "other", 0.0) * k.get("alpha", 1)),),
    "aten.sub": lambda a, k: (("add_", -_number(a, k, 1, "other", 0.0) * k.get("alpha", 1)),),
    "aten.neg": lambda a, k: (("mul_", -1.0),),
    "aten.erfinv": lambda a, k: (("erfinv_",),),
    "aten.clamp": lambda a, k: (("clamp_", _bound(a, k, 1, "min", -math.inf), _bound(a, k, 2, "max", math.inf)),),
}


class _NotScalar(Exception):
    """An argument is a tensor whose value is not known, or not a scalar."""


def _number(args: Sequence[Any], kwargs: Mapping[str, Any], index: int, name: str, default: float) -> float:
    value = _argument(args, kwargs, index, name, default)
    if isinstance(value, Tensor):
        if _on_meta(value) or value.numel() != 1:
            raise _NotScalar
        value = value.item()
    if not isinstance(value, int | float):
        raise _NotScalar
    return float(value)


def _divisor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    if kwargs.get("rounding_mode") is not None:
        raise _NotScalar
    return _number(args, kwargs, 1, "other", 1.0)


def _bound(args: Sequence[Any], kwargs: Mapping[str, Any], index: int, name: str, default: float) -> float:
    value = _argument(args, kwargs, index, name, None)
    return default if value is None else _number(args, kwargs, index, name, default)


@dataclass
class Record:
    """What is known of one storage: its program (`None`: lost, see `lost_at`), and whether it is random."""

    storage: torch.UntypedStorage  # kept alive: a freed storage's address would be used again
    calls: tuple[InitCall, ...] | None = ()
    written: bool = False
    random: bool = False
    lost_by: str = ""
    lost_at: str = ""

    def set(self, calls: tuple[InitCall, ...], random: bool) -> None:
        """A full overwrite."""
        self.calls, self.random, self.written, self.lost_by, self.lost_at = calls, random, True, "", ""

    def lose(self, op: str, random: bool) -> None:
        """The program can no longer say what the storage holds."""
        if self.calls is not None:
            frame = user_frame(traceback.extract_stack())
            self.lost_by, self.lost_at = op, f"{frame.file}:{frame.line}" if frame else ""
        self.calls, self.random, self.written = None, self.random or random, True


class Recorder(TorchDispatchMode):
    """The dispatch mode in which a model is built."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._records: dict[int, Record] = {}

    def record(self, tensor: Tensor) -> Record:
        """The record of a tensor's storage."""
        storage = tensor.untyped_storage()
        return self._records.setdefault(storage._cdata, Record(storage))

    def known(self, tensor: Tensor) -> bool:
        """Whether anything was recorded for the tensor's storage."""
        return tensor.untyped_storage()._cdata in self._records

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, real where it is small, and keep the records."""
        kwargs = dict(kwargs or {})
        name = f"{func.namespace}.{func._schema.name.split('::')[1]}"
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        written = _written(func, args, kwargs)
        if written:
            return self._mutate(func, name, args, kwargs, written, tensors)
        result = self._compute(func, name, args, kwargs, tensors)
        views = any(r.alias_info is not None for r in func._schema.returns)
        for made in torch.utils._pytree.tree_leaves(result):
            if isinstance(made, Tensor) and not views:
                self._made(func, name, args, kwargs, tensors, made)
        return result

    def _compute(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        factory = any(a.name == "device" for a in func._schema.arguments) and name not in _COPIES
        if not factory:
            if name in _COPIES:
                kwargs.pop("device", None)
            return func(*self._together(args, tensors), **self._together(kwargs, tensors))
        meta = func(*_to_meta(args), **{**_to_meta(kwargs), "device": "meta"})
        return func(*args, **{**kwargs, "device": "cpu"}) if meta.numel() <= SMALL else meta

    def _together(self, tree: Any, tensors: list[Tensor]) -> Any:
        """One meta operand makes the others meta."""
        return _to_meta(tree) if any(map(_on_meta, tensors)) and not all(map(_on_meta, tensors)) else tree

    def _made(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], made: Tensor
    ) -> None:
        """Start the record of a new tensor."""
        record = self.record(made)
        random = torch.Tag.nondeterministic_seeded in func.tags or any(self.record(t).random for t in tensors)
        source = self.record(tensors[0]) if tensors else None
        if name in _UNINITIALISED:
            return
        try:
            if name in _FILLS:
                record.set(_FILLS[name](args, kwargs), torch.Tag.nondeterministic_seeded in func.tags)
                return
            if source is not None and source.calls is not None and made.numel() == tensors[0].numel():
                if name in _COPIES:
                    record.set(source.calls, source.random)
                    record.written = source.written
                    return
                if name in _ARITHMETIC and _covers(tensors[0]):
                    record.set((*source.calls, *_ARITHMETIC[name](args, kwargs)), random)
                    return
        except _NotScalar:
            pass
        record.lose(name, random)

    def _mutate(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], written: list[Tensor], tensors: list[Tensor]
    ) -> Any:
        """Run an op that writes into tensors or views of them (in place, or given as `out`)."""
        target, sources = written[0], [t for t in tensors if not any(t is w for w in written)]
        random = torch.Tag.nondeterministic_seeded in func.tags or any(self.record(t).random for t in sources)
        stale = any(map(_on_meta, sources)) and not _on_meta(target)  # unknown values into a real tensor
        result: Any = target
        if not stale:
            result = func(*self._together(args, tensors), **self._together(kwargs, tensors))
        record = self.record(target)
        try:
            calls = self._overwrite(name, args, kwargs, record, sources)
        except _NotScalar:
            calls = None
        if len(written) == 1 and not _covers(target):
            calls = _stretch(name, calls, record, target)
        if calls is None or len(written) > 1:
            for each in written:
                self.record(each).lose(name, random or stale)
        else:
            overwrites = _covers(target) and (name in _FILLS or name == "aten.copy_")
            record.set(calls, random if overwrites else random or record.random)
        return result

    def _overwrite(
        self, name: str, args: Any, kwargs: dict[str, Any], record: Record, sources: list[Tensor]
    ) -> tuple[InitCall, ...] | None:
        """The program after an in-place call on the whole of a storage, `None` where it has none."""
        if name in _FILLS:
            return _FILLS[name](args, kwargs)
        if name == "aten.copy_" and len(sources) == 1 and sources[0].numel() == args[0].numel():
            return self.record(sources[0]).calls if _covers(sources[0]) else None
        arithmetic = _ARITHMETIC.get(name.removesuffix("_")) if name.endswith("_") else None
        if arithmetic is not None and record.calls is not None:
            return (*record.calls, *arithmetic(args, kwargs))
        return None


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an op writes into."""
    arguments = enumerate(func._schema.arguments)
    found = [_argument(args, kwargs, i, a.name, None) for i, a in arguments if a.alias_info and a.alias_info.is_write]
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, Tensor)]


def _on_meta(tensor: Tensor) -> bool:
    # Not `is_meta`: inside a recording that always answers no.
    return tensor.device.type == "meta"


def _covers(tensor: Tensor) -> bool:
    """Whether a tensor or view is the whole of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _stretch(
    name: str, calls: tuple[InitCall, ...] | None, record: Record, target: Tensor
) -> tuple[InitCall, ...] | None:
    """The program after a number was written into a view; `None` where the view is no one stretch of elements."""
    if name not in ("aten.zero_", "aten.fill_") or calls is None or record.calls is None or not target.is_contiguous():
        return None
    ((_, *value),) = calls
    start = int(target.storage_offset())
    return (*record.calls, ("fill_range_", start, start + target.numel(), *(value or [0.0])))


def _to_meta(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t if _on_meta(t) else t.to("meta"), tree)


class _NeverMeta(TorchFunctionMode):
    """Torch's initialisers do nothing to a tensor that says `is_meta`; here they must run to be recorded."""

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer `is_meta` with no; everything else runs as it is."""
        return False if func == _IS_META else func(*args, **(kwargs or {}))


def _truncated_normal(
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> Tensor:
    """Normal numbers within [a, b] by the inverse of the distribution function: a fixed number of in-place calls.

    Torch may draw by rejection, whose number of draws depends on the values; it could not be replayed per shard.
    """
    low, high = (math.erf((bound - mean) / (std * math.sqrt(2.0))) for bound in (a, b))
    with torch.no_grad():
        return tensor.uniform_(low, high).erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(a, b)


@contextmanager
def recording() -> Iterator[Recorder]:
    """Build inside: constructors run on meta or small real tensors. The caller's random state is left as it was."""
    original = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = _truncated_normal
    try:
        with torch.random.fork_rng(devices=[]), _NeverMeta(), Recorder() as recorder:
            yield recorder
    finally:
        nn.init._no_grad_trunc_normal_ = original
