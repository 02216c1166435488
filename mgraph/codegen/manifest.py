"""manifest.json of a package: what the runtime must know of it, as plain data (schema 1)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import mgraph
from mgraph.codegen.prepare import callees_first
from mgraph.codegen.step import function_names
from mgraph.ir.dims import dim_text
from mgraph.ir.facts import multiples
from mgraph.ir.graph import Axis, Module, State, Value
from mgraph.ir.local import declared_sizes
from mgraph.ir.types import Shard
from mgraph.passes.cache_groups import STEP, cache_groups
from mgraph.passes.calls import callee
from mgraph.passes.joining import joined_states

SCHEMA = 1
MAIN_ENTRIES = ("microbatch", "step")
"""The entry whose params are the inputs of the package, by kind of package."""


def manifest(
    module: Module,
    kind: str,
    pipeline: str,
    verification: Mapping[str, str],
    fingerprint: Mapping[str, Any],
    weight_layout: Sequence[Mapping[str, Any]],
    adapters: Mapping[str, Mapping[str, Any]],
    padded: Sequence[str] = (),
) -> dict[str, Any]:
    """The manifest of a module, but for its `kernels` and its `files`, which are known last."""
    after = joined_states(module)
    return {
        "schema": SCHEMA,
        "kind": kind,
        "name": module.name,
        "fingerprint": dict(fingerprint),
        "pipeline": pipeline,
        "verification": dict(verification),
        "versions": versions(),
        "mesh": {axis.name: list(axis.of) if axis.of else axis.size or "*" for axis in module.mesh},
        "dims": {dim.name: [dim.minimum, dim.maximum] for dim in module.dims.values() if not dim.ragged},
        "multiples": multiples((fact.text for fact in module.facts), declared_sizes(module)),
        **({"one_microbatch": True} if any(node.attrs.get("fresh") for _, node in module.walk()) else {}),
        "vocab_size": vocabulary_size(module),
        "inputs": _inputs(module),
        "state": [_state(state, adapters, module.mesh, after.get(state.name)) for state in module.state.values()],
        "entries": _entries(module),
        **_routing(module),
        **_cache_groups(module),
        **_counts_of_experts(module),
        **_host_reads(module),
        "weight_layout": list(weight_layout),
        "padded": list(padded),
    }


def manifest_items(data: Mapping[str, Any]) -> list[str]:
    """Keys of the manifest as JSON, one line per key and per element of a list (a state, a kernel)."""
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode  # `indent` would be slow for deep models

    def written(value: Any) -> str:
        return (
            "[\n  " + ",\n  ".join(map(encode, value)) + "\n ]" if isinstance(value, list) and value else encode(value)
        )

    return [f"{encode(key)}: {written(value)}" for key, value in data.items()]


def manifest_text(items: Iterable[str]) -> str:
    """The manifest of its items."""
    return "{\n " + ",\n ".join(items) + "\n}\n"


def versions() -> dict[str, str]:
    """Versions of what a package is made with; triton is absent where it is not installed."""
    import torch

    found = {"mgraph": mgraph.__version__, "torch": torch.__version__}
    with suppress(PackageNotFoundError):
        found["triton"] = version("triton")
    return found


def vocabulary_size(module: Module) -> int | None:
    """The last extent of the logits that some entry gives; None where none does."""
    for entry in module.entries.values():
        if "logits" in entry.outputs:
            result = module.functions[entry.function].results[entry.outputs.index("logits")]
            size = result.tensor.shape[-1]
            return size if isinstance(size, int) else None
    return None


def file_digests(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files of a directory, by name."""
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}


def _type(value: Value) -> dict[str, Any]:
    return {
        "dtype": value.tensor.dtype.text,
        "shape": [d if isinstance(d, int) else dim_text(d) for d in value.tensor.shape],
    }


def _inputs(module: Module) -> list[dict[str, Any]]:
    name = next((e for e in MAIN_ENTRIES if e in module.entries), None)
    if name is None:
        return []
    return [{"name": v.name, **_type(v)} for v in module.entry_function(name).params]


def _routing(module: Module) -> dict[str, Any]:
    """The routers whose decisions the entries take and give, in their order, and how many experts each chooses from."""
    for node in (node for _, node in module.walk() if node.op == "stack_choices"):
        layers, experts = (cast(tuple[Any, ...], node.attrs[name]) for name in ("layers", "experts"))
        return {"routing": {"layers": list(layers), "experts": list(experts)}}
    return {}


def _cache_groups(module: Module) -> dict[str, Any]:
    """Which caches are of layers with a window, if there are any."""
    groups = cache_groups(module) if STEP in module.entries else ()
    if all(group.window is None for group in groups):
        return {}
    return {"cache_groups": [group.facts() for group in groups]}


def _counts_of_experts(module: Module) -> dict[str, Any]:
    """Of each layer whose loads, or tokens without room, `finish` tells: its router, how many counts, and how many
    experts a token chooses, or how many ranks share the experts."""
    found: dict[str, Any] = {}
    entry = module.entries.get("finish")
    nodes = module.functions[entry.function].nodes if entry is not None else ()
    for node in (node for node in nodes if node.op == "join_loads"):
        assert entry is not None, "what is told, finish tells"
        layers, more = (cast(tuple[Any, ...], node.attrs[name]) for name in ("layers", "choices"))
        rows = zip(layers, (count.tensor.shape[0] for count in node.operands), more, strict=True)
        output = entry.outputs[module.functions[entry.function].results.index(node.result)]
        names = ("layer", "experts", "choices") if output == "expert_loads" else ("layer", "counts", "ranks")
        found[output] = [dict(zip(names, row, strict=True)) for row in rows]
    return found


def _host_reads(module: Module) -> dict[str, Any]:
    """How often the host waits for sizes of messages, by entry, where it does."""
    counts: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in counts:
            nodes = module.functions[name].nodes
            counts[name] = sum(of(callee(n)) if n.op == "call" else n.op == "read_sizes" for n in nodes)
        return counts[name]

    found = {entry.name: of(entry.function) for entry in module.entries.values()}
    return {"host_reads": {name: count for name, count in found.items() if count}} if any(found.values()) else {}


def _state(
    state: State, adapters: Mapping[str, Mapping[str, Any]], mesh: Sequence[Axis], after: str | None
) -> dict[str, Any]:
    adapter = {"adapter": dict(adapters[state.name])} if state.name in adapters else {}
    return {
        "name": state.name,
        "kind": state.kind.value,
        **_type(state.value),
        "trainable": state.trainable,
        "persist": state.persist,
        **({"host": True} if state.host else {}),
        **({"after": after} if after else {}),
        "init": [[list(a) if isinstance(a, tuple) else a for a in call] for call in state.init],
        "seed_name": state.seed_name,
        **adapter,
        **_placement(state, mesh),
    }


def _placement(state: State, mesh: Sequence[Axis]) -> dict[str, Any]:
    """How a state is split over basic axes, in the order of splitting; nothing where each rank has it whole.

    An axis that is a product splits by its parts, major first. That a state is partial does not change what is stored.
    """
    products = {axis.name: axis.of for axis in mesh if axis.of}
    splits: list[dict[str, Any]] = []
    for name, placed in state.type.placement:
        if not isinstance(placed, Shard):
            continue
        parts = products.get(name, (name,))
        assert len(parts) == 1 or not placed.zigzag, f"{state.name}: {placed} over the product {name} is no sequence"
        factor = {} if placed.factor is None else {"factor": placed.factor}
        zigzag = {"zigzag": True} if placed.zigzag else {}
        splits += [{"axis": part, "dim": placed.dim, **factor, **zigzag} for part in parts]
    if not splits:
        return {}
    factors = [[dim, list(extents)] for dim, extents in state.type.factors]
    return {"placement": splits, **({"factors": factors} if factors else {})}


def _entries(module: Module) -> dict[str, Any]:
    names = function_names(module, callees_first(module)) if any(e.pieces for e in module.entries.values()) else {}
    return {
        entry.name: {
            "inputs": [v.name for v in module.functions[entry.function].params],
            "outputs": list(entry.outputs),
            **({"captured": True} if entry.captured else {}),
            **({"pieces": [names[piece] for piece in entry.pieces]} if entry.pieces else {}),
        }
        for entry in module.entries.values()
    }
