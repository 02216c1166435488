"""`mgraph env`: versions, optional libraries, devices, settings of the compiler, the trainer and the server."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import mgraph
from mgraph.cli.catalogue import recipe_rows, serve_rows, trainer_rows
from mgraph.cli.table import table
from mgraph.recipe import TARGET_ARCHS


@dataclass(frozen=True)
class Extra:
    """An optional library: the extra that installs it, its distribution and module, and what it gives.

    `adapter` marks one that generated code would call: it stays unverified until a test of ours has run it.
    """

    extra: str
    distribution: str
    module: str
    gives: str
    adapter: bool = False


REQUIRED = (
    "torch",
    "triton",
    "numpy",
    "sympy",
    "safetensors",
    "tokenizers",
    "rich",
    "typer",
    "PyYAML",
    "Jinja2",
    "matplotlib",
)
EXTRAS = (
    Extra("gpu", "cuda-python", "cuda", "kernels are launched from their binaries"),
    Extra("hf", "transformers", "transformers", "models by their config.json (hf:…)"),
    Extra("serve", "starlette", "starlette", "a server around a serve package (mgraph serve)"),
    Extra("te", "transformer-engine", "transformer_engine", "products of experts", adapter=True),
    Extra("tensorrt", "torch-tensorrt", "torch_tensorrt", "products of serve packages", adapter=True),
    Extra("-", "flash-attn", "flash_attn", "FlashAttention 2", adapter=True),
)
SETTINGS = {"MGRAPH_DEBUG": "any value: an internal error prints its traceback instead of writing it to a file"}


def run() -> None:
    """Write the report to stdout."""
    rows = [("mgraph", mgraph.__version__), ("python", platform.python_version()), ("system", platform.platform())]
    rows += [(name, _version(name) or "missing") for name in REQUIRED]
    sections = [
        table(("package", "version"), rows),
        table(("extra", "library", "installed", "what it gives"), [_extra_row(extra) for extra in EXTRAS]),
        table(("device", "what"), _devices()),
        table(("target", "kernels for"), [(name, archs or "none") for name, archs in TARGET_ARCHS.items()]),
        table(("mgraph compile", "field of a recipe", "default", "values", "meaning"), recipe_rows()),
        table(("train.py", "default", "values", "meaning"), trainer_rows()),
        table(("serve.py", "default", "values", "meaning"), serve_rows()),
        table(("setting", "value", "meaning"), [(n, os.environ.get(n, ""), text) for n, text in SETTINGS.items()]),
    ]
    sys.stdout.write("\n".join(sections))


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _extra_row(extra: Extra) -> tuple[str, ...]:
    found = _version(extra.distribution) or ("yes" if find_spec(extra.module) is not None else "no")
    return extra.extra, extra.distribution, found + (", unverified" if extra.adapter else ""), extra.gives


def _devices() -> list[tuple[str, str]]:
    import torch

    rows = [("cpu", f"{len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads")]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory >> 20} MiB"))
    return rows
