"""Groups of the layers that are served, by how far back they see: what has left a window needs no place in the cache.

All groups take blocks from one pool, so a block has room for as many layers as the largest group has. Layers of one
window are therefore cut into several groups where others are few: as large ones as leave little of a block unused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgraph.ir.graph import Function, Module, Node, Static, Value
from mgraph.passes.calls import callee

UNUSED = 0.15
"""The part of all layers that blocks may have room for beyond these."""
STEP = "step"


@dataclass(frozen=True)
class CacheGroup:
    """Layers that see the last `window` tokens (None: all), with the names of their caches."""

    window: int | None
    caches: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        return {"window": self.window, "caches": list(self.caches)}


def bounded(window: int | None, length: int) -> int | None:
    """The window of a layer, if a sequence of at most `length` tokens ever leaves it."""
    return None if window is None or window >= length else window


def call_statics(call: Node) -> dict[str, Any]:
    """What a call supplies for the statics of its function."""
    return {name.removeprefix("static."): v for name, v in call.attrs.items() if name.startswith("static.")}


def window_of(attention: Node, statics: Mapping[str, Any]) -> int | None:
    """The window of an attention, in a call that supplies these statics."""
    window = attention.attrs.get("window")
    window = statics[window.name] if isinstance(window, Static) else window
    return None if window is None else int(str(window))


def grouped(windows: Sequence[int | None]) -> list[int]:
    """The group of each layer: layers of one window are neighbours, those that see all first."""
    counts = Counter(windows)
    size = max(counts.values())
    while sum(-(-count // size) * size for count in counts.values()) > (1 + UNUSED) * len(windows):
        size -= 1
    first, groups = 0, [0] * len(windows)
    for window in sorted(counts, key=lambda w: (w is not None, -(w or 0))):
        parts = -(-counts[window] // size)
        layers = [at for at, w in enumerate(windows) if w == window]
        for at, layer in enumerate(layers):
            groups[layer] = first + at * parts // len(layers)
        first += parts
    return groups


def cache_groups(module: Module) -> tuple[CacheGroup, ...]:
    """The groups of a module that serves, in the order of its inputs."""
    step, length = module.entry_function(STEP), int(module.dims["S"].maximum or 0)
    walk = _Walk(module)
    walk.function(step, {}, {})
    found: dict[str, list[tuple[int | None, str]]] = {}
    for table, window, *caches in walk.reads:
        found.setdefault(table, []).extend((window, name) for name in caches)
    groups = []
    for param in step.params:
        if param.name in found:
            windows = [bounded(window, length) for window, _ in found[param.name]]
            window = None if None in windows else max(w or 0 for w in windows)
            groups.append(CacheGroup(window, tuple(dict.fromkeys(name for _, name in found[param.name]))))
    return tuple(groups)


def shared_bytes(module: Module, sizes: Mapping[str, int]) -> int:
    """Bytes of all caches, given those of each: the n-th ones of all groups share memory, if they are of one shape."""
    kinds: dict[tuple[Any, ...], int] = {}
    for group in cache_groups(module):
        counts: Counter[Any] = Counter()
        for name in group.caches:
            kind = module.state[name].type.dtype, module.state[name].type.shape
            kinds[*kind, counts[kind]] = sizes[name]
            counts[kind] += 1
    return sum(kinds.values())


@dataclass
class _Walk:
    """Follows tables and caches from the entry to the attention that reads them."""

    module: Module
    reads: list[tuple[str, int | None, str, str]] = field(default_factory=list)
    """Of each attention its table, its window, and its caches of keys and values."""

    def function(self, function: Function, names: Mapping[Value, str], statics: Mapping[str, Any]) -> None:
        """`names` says what the caller calls the params and slots, `statics` what it gave for them."""
        known = dict(names)
        for node in function.nodes:
            operands = [known.get(v, v.name) for v in node.operands]
            if node.op == "call":
                body = self.module.functions[callee(node)]
                inner = dict(zip((*body.params, *body.slots), operands, strict=True))
                self.function(body, inner, call_statics(node))
            elif "kv_append" in node.op:
                known.update(zip(node.results[:2], operands[:2], strict=True))
            elif node.op == "paged_attention":
                self.reads.append((operands[5], window_of(node, statics), operands[1], operands[2]))
