"""Adapters of low rank at the end of a run: merged into the weights, or as files of their own in the form of PEFT.

PEFT's form is a directory with adapter_model.safetensors, whose tensors are named as the modules of the model behind
`base_model.model.`, and adapter_config.json: what every module has in common, and by module what differs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mgraph.adapters import adapter_names
from mgraph.errors import OptionError
from mgraph.runtime.package import Adapter, State, StateSpec
from mgraph.runtime.weight_files import write_file

PREFIX = "base_model.model."
"""What PEFT puts before the names of modules."""

FILE, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


def merged(base: Tensor, a: Tensor, b: Tensor, adapter: Adapter) -> Tensor:
    """`base + scale B A`, f32, contiguous; a [rank, in], b [out, rank], base [out, in], or [in, out] if transposed."""
    update = adapter.scale * (b.float() @ a.float())
    return (base.float() + (update.T if adapter.transposed else update)).contiguous()


def check_adapters(specs: Iterable[StateSpec], where: str) -> None:
    """Raise OptionError where a package (`where`) has no adapters, or trains what PEFT's form has no place for."""
    specs = list(specs)
    adapted = {_module(s.name) for s in specs if s.adapter is not None}
    if not adapted:
        raise OptionError("--export-adapter: the package has no adapters", where, "compile it with --lora")
    for spec in _trained_besides(specs):
        if _module(spec.name) in adapted:
            raise OptionError(
                f"--export-adapter: {spec.name} is trained, and its module has an adapter too",
                where,
                "PEFT's form has no place for it: --export writes all weights, or compile with another --lora-train",
            )


def write_adapter(
    directory: Path, state: State, specs: Iterable[StateSpec], names: Mapping[str, str], about: Mapping[str, Any]
) -> int:
    """Write both files; how many bytes the tensors have. The states are read under other names where `names` has them;
    `about` is what the configuration says of the model. Raises OSError."""
    specs = list(specs)
    adapters = {s.name: s.adapter for s in specs if s.adapter is not None}
    saved = {_module(spec.name) for spec in _trained_besides(specs)}
    chosen = adapter_states(specs)
    read = {spec.name: state[names.get(spec.name, spec.name)] for spec in chosen}
    chosen.sort(key=lambda spec: -read[spec.name].itemsize)
    tensors = {PREFIX + spec.name: (read[spec.name].dtype, spec.shape) for spec in chosen}
    size = write_file(directory / FILE, tensors, (read[spec.name].detach().cpu().contiguous() for spec in chosen))
    modules = {_module(s.name) for s in specs if s.kind == "param"}
    settings = {**about, **_settings({_module(name): a for name, a in adapters.items()}, modules, sorted(saved))}
    (directory / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return size


def adapter_states(specs: Iterable[StateSpec]) -> list[StateSpec]:
    """What PEFT's form has of a state: all A and B, and the modules that are trained besides."""
    specs = list(specs)
    by_name = {spec.name: spec for spec in specs}
    saved = {_module(spec.name) for spec in _trained_besides(specs)}
    chosen = [by_name[name] for s in specs if s.adapter is not None for name in adapter_names(s.name)]
    return chosen + [s for s in specs if s.kind == "param" and _module(s.name) in saved]


def _settings(adapters: Mapping[str, Adapter], modules: set[str], saved: Sequence[str]) -> dict[str, Any]:
    """The configuration of adapters by module; `modules` are all that have parameters, `saved` those that are trained.

    One factor is written in one way: where some adapters divide by the root of the rank and some do not, alpha is
    chosen for all to divide by the rank. One probability of dropout holds for all, the largest.
    """
    roots = {adapter.rslora for adapter in adapters.values()}
    ranks = {module: adapter.rank for module, adapter in adapters.items()}
    alphas = {m: _whole(a.alpha if len(roots) == 1 else a.scale * a.rank) for m, a in adapters.items()}
    rank, alpha = _commonest(ranks.values()), _commonest(alphas.values())
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {m: r for m, r in ranks.items() if r != rank},
        "alpha_pattern": {m: a for m, a in alphas.items() if a != alpha},
        "use_rslora": roots == {True},
        "lora_dropout": max(adapter.dropout for adapter in adapters.values()),
        "target_modules": list(_targets(adapters, modules)),
        "modules_to_save": list(saved) or None,
        "fan_in_fan_out": any(adapter.transposed for adapter in adapters.values()),
        "bias": "none",
        "inference_mode": True,
    }


def _targets(adapted: Iterable[str], modules: set[str]) -> Iterator[str]:
    """The modules by the last part of their names, where no other module has it; else by their whole names."""
    adapted = list(adapted)
    others = {module.rpartition(".")[2] for module in modules - set(adapted)}
    last = {module: module.rpartition(".")[2] for module in adapted}
    yield from sorted({module if last[module] in others else last[module] for module in adapted})


def _whole(number: float) -> float:
    """The number, as JSON writes whole ones."""
    return int(number) if number.is_integer() else number


def _commonest(values: Iterable[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]


def added_by_adapters(specs: Iterable[StateSpec]) -> set[str]:
    """The names of all A and B."""
    return {name for s in specs if s.adapter is not None for name in adapter_names(s.name)}


def _trained_besides(specs: Iterable[StateSpec]) -> list[StateSpec]:
    """The trained parameters that are no adapter's."""
    specs = list(specs)
    added = added_by_adapters(specs)
    return [s for s in specs if s.kind == "param" and s.trainable and s.name not in added]


def _module(name: str) -> str:
    """The module that a parameter belongs to."""
    return name.rpartition(".")[0]
