"""Writes a step package: in a temporary directory beside the target, renamed when it is whole, manifest last.

Where something fails, nothing half-written stays behind and an existing package is untouched. Files of an existing
package that a person has edited are not overwritten: that is an error, or with `force` they are kept as `*.edited`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgraph.codegen.fingerprint import fingerprint
from mgraph.codegen.kernel_sites import KernelSites
from mgraph.codegen.manifest import file_digests, manifest, manifest_items, manifest_text
from mgraph.codegen.profile import Profile
from mgraph.codegen.providers import Providers
from mgraph.codegen.step import Lines, step_text
from mgraph.codegen.step_check import check_step
from mgraph.codegen.triton.builder import KernelBuilder
from mgraph.errors import OptionError, PackageError, StorageError, storage_hint
from mgraph.ir.graph import Module
from mgraph.ir.local import Division, declared_sizes
from mgraph.ir.printer import print_module
from mgraph.passes.activations import extents

MANIFEST = "manifest.json"
EDITED = ".edited"
CONFIGURATION = "config.json"
"""Where a package keeps the configuration of a transformers model, for those who export its weights."""
PROFILE = "profile.json"
"""Where a package keeps the profile it was compiled with: the file that was asked for may move, or say other times."""


@dataclass(frozen=True)
class PackageInfo:
    """What a package is besides its graph.

    `kind` is `train` or `serve`; `options` the recipe (a dataclass), all of whose fields enter the fingerprint; `archs`
    the GPU architectures to build kernels for; `write_graphs` writes the snapshots of the passes into a directory and
    returns the text of the last one, the module's; `verification` says of each pass whether it was `verified` or is
    `unverified` (empty: --verify was not asked for); `configuration` the text of the model's config.json, as
    `transformers` reads it; `weight_layout` how the tensors of the model lie in files of weights, where they do not lie
    there as they are (`mgraph.capture.weight_layout`); `adapters` what is said of the adapter of a weight, by the
    weight's name; `padded` what the step makes longer by zeros, in words; `profile` the times that providers are chosen
    by, at these `extents` of named dims, and `providers` those that were asked for, by family; `graph_plan` the sizes
    of steps that are CUDA graphs when serving; `batch_invariant` says that kernels compute a row alike among any
    others, which no provider but ours does.
    """

    kind: str
    options: Any
    pipeline: str
    archs: Sequence[str] = ()
    write_graphs: Callable[[Path], str] | None = None
    verification: Mapping[str, str] = field(default_factory=dict)
    configuration: str | None = None
    weight_layout: Sequence[Mapping[str, Any]] = ()
    adapters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    padded: Sequence[str] = ()
    profile: Profile | None = None
    extents: Mapping[str, int] = field(default_factory=dict)
    providers: Mapping[str, str] = field(default_factory=dict)
    graph_plan: Mapping[str, Any] = field(default_factory=dict)
    batch_invariant: bool = False


def emit_package(
    module: Module,
    info: PackageInfo,
    out_dir: Path | str,
    *,
    force: bool = False,
    builder: KernelBuilder | None = None,
) -> Path:
    """Write the package of a module and return its directory. `builder` is one for `info.archs` that waits already.

    The order of its collectives has been proved; that step.py keeps to it is checked here. Raises PackageError where it
    does not, or where `out_dir` is something else than a package or holds edited files (and not `force`), and
    StorageError where it cannot be written.
    """
    target = Path(out_dir).absolute()
    edited = check_target(target, force=force)
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        with builder or KernelBuilder(info.archs) as kernels:
            _write(module, info, temporary, kernels)
        _keep_edited(target, temporary, edited)
        _move_into_place(temporary, target)
    except OSError as error:
        raise _storage_error(error, target) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def check_target(target: Path, *, force: bool = False) -> list[str]:
    """The edited files of a package that is there already; raises as `emit_package` does, before any work is done."""
    edited = _edited_files(target)
    if edited and not force:
        raise PackageError(
            f"these files of the package have been edited: {', '.join(edited)}",
            where=str(target),
            hint=f"compile into another directory, or use --force, which keeps them as *{EDITED}",
        )
    return edited


def _write(module: Module, info: PackageInfo, directory: Path, builder: KernelBuilder) -> None:
    """All files of the package, the manifest last; all else is made while the kernels are built."""
    directory.chmod(0o755)  # temporary directories are private; packages are not
    providers = _providers(module, info)
    sites = KernelSites(
        gpu=bool(info.archs),
        division=Division.of(module, declared_sizes(module)),
        chosen=None if providers is None else providers.chosen,
        fixed=info.batch_invariant,
    )
    lines: Lines = {}
    step = step_text(module, sites, lines)
    builder.start(sites.specs, directory)
    (directory / "step.py").write_text(step, encoding="utf-8")
    text = info.write_graphs(directory / "graphs") if info.write_graphs is not None else print_module(module)
    check_step(module, step)
    times = "" if info.profile is None else info.profile.text()
    if times:
        (directory / PROFILE).write_text(times, encoding="utf-8")
    mark = fingerprint(text, info.options, times)
    data = manifest(
        module, info.kind, info.pipeline, info.verification, mark, info.weight_layout, info.adapters, info.padded
    )
    if info.batch_invariant:
        data["batch_invariant"] = True
    if info.graph_plan:
        data["graph_plan"] = dict(info.graph_plan)
    if providers is not None:
        data["providers"] = providers.data()
    items = manifest_items({**data, "lines": lines})
    (directory / f"{info.kind}.py").write_text(driver_text(info.kind, module.name), encoding="utf-8")
    if info.configuration is not None:
        (directory / CONFIGURATION).write_text(info.configuration, encoding="utf-8")
    kernels = builder.result()
    files = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if _is_source(p))
    items += manifest_items({"kernels": kernels, "files": file_digests(directory, files)})
    (directory / MANIFEST).write_text(manifest_text(items), encoding="utf-8")


def _providers(module: Module, info: PackageInfo) -> Providers | None:
    """Who runs what on a GPU; None in packages without kernels for one, where asking for one is an OptionError, as what
    `check_forced` finds."""
    if info.providers and not info.archs:
        asked = ", ".join(f"{family}={provider}" for family, provider in info.providers.items())
        problem = f"{asked} is about kernels for a GPU, and this package has none"
        hint = "leave it out, or compile for a GPU: --target h100, without --arch none"
        raise OptionError(problem, "--provider", hint)
    if info.profile is None or not info.archs or info.batch_invariant:
        return None
    providers = Providers(module, info.profile, extents(module, info.extents), info.providers)
    providers.check_forced()
    return providers


def driver_text(kind: str, name: str) -> str:
    """The text of train.py or serve.py."""
    does, launch, main = {
        "train": ("Train", "torchrun --nproc-per-node N train.py --help", "main"),
        "serve": ("Serve", "python serve.py --help", "serve"),
    }[kind]
    return f'''"""{does} {name}: `{launch}` lists the options."""

from pathlib import Path

from mgraph.runtime.start import {main}

if __name__ == "__main__":
    {main}(Path(__file__).parent)
'''


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def _edited_files(target: Path) -> list[str]:
    """Files of an existing package whose content is not what was written; raises where the target is no package."""
    there = next(place for place in (target, *target.absolute().parents) if place.exists())
    if not there.is_dir():
        what = "the package's directory is" if there == target else f"the package's directory would be in {there},"
        raise PackageError(f"{what} a file", where=str(target), hint="give another -o DIR")
    if there != target:
        return []
    path = target / MANIFEST
    if not path.is_file():
        if any(target.iterdir()):
            raise PackageError(
                "the directory is not empty and not a whole step package",
                where=str(target),
                hint="delete it, if it was one, or give another -o DIR",
            )
        return []
    try:
        listed: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["files"]
        present = [name for name in listed if (target / name).is_file()]
        now = file_digests(target, present)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PackageError(
            f"the manifest of the package that is there cannot be read: {error}",
            where=str(path),
            hint="remove the directory, or give another -o DIR",
        ) from error
    return [name for name in present if now[name] != listed[name]]


def what_is_there(target: Path) -> str:
    """What the package at `target` was compiled from and for; "" where there is none, or none that says so."""
    try:
        options = json.loads((target / MANIFEST).read_text(encoding="utf-8"))["fingerprint"]["options"]
        return f"{options['model']} --for {options['purpose']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _keep_edited(target: Path, temporary: Path, edited: Sequence[str]) -> None:
    """Carry edited files over under another name, with those that an earlier compilation kept."""
    if not target.is_dir():
        return
    kept = [p.relative_to(target).as_posix() for p in target.rglob(f"*{EDITED}")]
    for name, new in [*((k, k) for k in kept), *((e, e + EDITED) for e in edited)]:
        (temporary / new).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(target / name, temporary / new)


def _move_into_place(temporary: Path, target: Path) -> None:
    """Rename; an existing package is moved aside first and comes back if the rename fails. What lay beside its files,
    such as the directory of a run or choices of products, is in the new one, too, under another name where that has a
    file of the name."""
    if not target.exists():
        os.rename(temporary, target)
        return
    beside = _beside(target)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    old = aside / target.name
    os.rename(target, old)
    try:
        os.rename(temporary, target)
    except OSError:
        os.rename(old, target)
        aside.rmdir()
        raise
    for name in beside:  # where one cannot be moved, all that is left of the old package stays where it is
        os.rename(old / name, target / (name + EDITED if (target / name).exists() else name))
    shutil.rmtree(aside, ignore_errors=True)


def _beside(target: Path) -> list[str]:
    """What is in the directory of a package and is none of its files, nor one that was edited."""
    path = target / MANIFEST
    listed = json.loads(path.read_text(encoding="utf-8"))["files"] if path.is_file() else {}
    own = {name.partition("/")[0] for name in listed} | {MANIFEST, "__pycache__"}
    return sorted(entry.name for entry in target.iterdir() if entry.name not in own and EDITED not in entry.suffixes)


def _storage_error(error: OSError, target: Path) -> StorageError:
    reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
    return StorageError(f"cannot write the package: {reason}", where=str(target), hint=f"{storage_hint(error)} -o DIR")
