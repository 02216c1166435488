"""A run in which memory that ends is filled with NaN, so that whatever still reads it shows in the results.

While entered, every tensor that an op makes is watched. New memory that nobody has written (`torch.empty`) begins as
NaN; memory that nothing refers to any more becomes NaN before the next op. On a GPU that is enqueued on the current
stream: a copy or a kernel of another stream that was not waited for reads NaN. The CPU has no streams, so copies from
and to the host (`offload.py`) happen at their `wait`, as late as a stream might make them, from memory that the handle
alone keeps alive. Memory is kept until the end there, so that it cannot be taken again meanwhile.

It is slow, and CUDA graphs are off: for finding errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgraph.errors import PackageError
from mgraph.runtime import offload

_EMPTY = ("aten::empty", "aten::new_empty")
"""Ops, by how their names begin, that give memory which nobody has written."""
_NAN = 0xFF
"""Every byte of a NaN; -1 in integers, which no index may be."""


class Poison(TorchDispatchMode):
    """Fills memory that ends, and memory that begins unwritten."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, torch.UntypedStorage] = {}
        self._dead: list[torch.UntypedStorage] = []

    def __enter__(self) -> Poison:
        offload.late_copies = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        offload.late_copies = False
        self._alive.clear()
        self._dead.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._bury()
        results = func(*args, **(kwargs or {}))
        unwritten = func._schema.name.startswith(_EMPTY)
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes():
                storage = tensor.untyped_storage()
                self._alive.setdefault(storage._cdata, storage)
                if unwritten:
                    _fill(storage)
        return results

    def _bury(self) -> None:
        """Fill what nothing but this refers to."""
        for key, storage in list(self._alive.items()):
            if torch._C._storage_Use_Count(key) == 1:
                _fill(storage)
                del self._alive[key]
                if storage.device.type == "cpu":
                    self._dead.append(storage)


def _fill(storage: torch.UntypedStorage) -> None:
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(_NAN)


def check(entry: str, results: Iterable[Tensor], state: Mapping[str, Tensor], where: str) -> None:
    """Raise PackageError where a result or a state that is no number shows that ended memory was read. Gradients of a
    loss that is scaled (fp16) may overflow by themselves: then what outlives the step is looked at."""
    named = [*((f"result {i}", t) for i, t in enumerate(results)), *state.items()]
    if "loss_scale" in state:
        named = [(name, t) for name, t in state.items() if not name.endswith(".grad")]
    wrong = [name for name, t in named if t.is_floating_point() and bool(t.isnan().any())]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise PackageError(
            f"{entry} gives NaN with --poison: {wrong[0]}{more} depends on memory that had ended or was never written",
            where,
            "without --poison it may seem right; if the loss is NaN without it too, look there first",
        )
