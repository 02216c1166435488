"""Reads what a package keeps of its compilation, without torch: the manifest, and per pass the graph and the report."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgraph.errors import GraphError, OptionError, PackageError, did_you_mean, some_of
from mgraph.manifest_form import damage

if TYPE_CHECKING:
    from mgraph.ir.graph import Module
    from mgraph.passes.base import Report

AGAIN = "compile the package again"
_ENDING = ".mg.gz"


@dataclass(frozen=True)
class Snapshot:
    """The graph after one pass (number 0: as captured) and the pass's report."""

    number: int
    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        """The graph as text."""
        try:
            return gzip.decompress(self.path.read_bytes()).decode()
        except (OSError, EOFError, ValueError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
            raise PackageError(
                f"the graph after '{self.name}' cannot be read: {error}", str(self.path), AGAIN
            ) from error

    @cached_property
    def module(self) -> Module:
        """The graph."""
        from mgraph.ir.parser import parse_module

        try:
            return parse_module(self.text, self.path.name)
        except GraphError as error:
            raise PackageError(
                f"the graph after '{self.name}' is damaged: {error.message}", error.where or str(self.path), AGAIN
            ) from error

    @cached_property
    def record(self) -> dict[str, Any]:
        """What the pass and the instruments wrote: `spec`, `report`, `changed`, `measured`; empty for number 0."""
        return _read_json(self.path.with_name(self.path.name.removesuffix(_ENDING) + ".json"))

    @property
    def report(self) -> Report:
        """The pass's report."""
        from mgraph.passes.base import Report

        return Report.from_json(self.record["report"]) if self.record else Report()

    @property
    def title(self) -> str:
        """`6 raise-norm`."""
        return f"{self.number} {self.name}"


@dataclass(frozen=True)
class Compiled:
    """A package as the compiler left it: its manifest and the snapshots in order."""

    path: Path
    manifest: dict[str, Any]
    snapshots: tuple[Snapshot, ...]

    def snapshot(self, wanted: str) -> Snapshot:
        """The snapshot of a pass, by name (its last run) or number; the last one for an empty text."""
        if not wanted:
            return self.snapshots[-1]
        found = [s for s in self.snapshots if wanted in (s.name, str(s.number), s.path.name.removesuffix(_ENDING))]
        if not found:
            names = [s.name for s in self.snapshots]
            raise OptionError(f"the package has no pass '{wanted}'", str(self.path), did_you_mean(wanted, set(names)))
        if len(found) > 1:
            others = ", ".join(str(s.number) for s in found[:-1])
            print(f"note: {wanted} ran more than once; this is {found[-1].number}, before it {others}", file=sys.stderr)
        return found[-1]

    def before(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot before one."""
        return self.snapshots[max(0, snapshot.number - 1)]

    def passes(self) -> Iterator[tuple[Snapshot, Snapshot]]:
        """The graphs before and after each pass, in order."""
        yield from zip(self.snapshots, self.snapshots[1:], strict=False)


def open_package(path: Path) -> Compiled:
    """Read a package. Raises PackageError where it is missing, incomplete, damaged, or of another schema."""
    file = path / "manifest.json"
    if not path.is_dir():
        raise PackageError("no step package: not a directory", str(path), "mgraph compile MODEL -o DIR writes one")
    if not file.is_file():
        hint = "delete the directory, and compile the package again"
        raise PackageError("not a whole step package: manifest.json, written last, is missing", str(path), hint)
    manifest = _read_json(file)
    absent = [key for key in ("schema", "kind", "name", "kernels", "files") if key not in manifest]
    if absent:
        raise PackageError(f"the manifest lacks {', '.join(absent)}", str(file), AGAIN)
    if manifest["schema"] != 1:
        hint = "compile it again with this version, or read it with the version that wrote it"
        raise PackageError(f"the package has schema {manifest['schema']!r}; this mgraph reads 1", str(file), hint)
    if (wrong := damage(manifest)) is not None:
        raise PackageError(wrong, str(file), AGAIN)
    snapshots = tuple(map(_snapshot, sorted((path / "graphs").glob("*" + _ENDING))))
    lost = [name for name in manifest["files"] if name.startswith("graphs/") and not (path / name).is_file()]
    if lost or not snapshots or [s.number for s in snapshots] != list(range(len(snapshots))):
        which = f": {some_of(lost)}" if lost else ""
        raise PackageError(f"the package lacks graphs of its passes{which}", str(path / "graphs"), AGAIN)
    _say_what_is_edited(path, manifest["files"])
    return Compiled(path, manifest, snapshots)


def has_kernels(manifest: Mapping[str, Any]) -> bool:
    """Whether a package has kernels for a GPU."""
    launches = (launch for kernel in manifest.get("kernels", ()) for launch in kernel["launches"])
    return bool(manifest.get("providers")) or any(launch["binaries"] for launch in launches)


def _snapshot(path: Path) -> Snapshot:
    number, _, name = path.name.removesuffix(_ENDING).partition("_")
    return Snapshot(int(number) if number.isdigit() else -1, name, path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PackageError(f"cannot be read: {error}", str(path), AGAIN) from error
    if not isinstance(data, dict):
        raise PackageError("not a JSON object", str(path), AGAIN)
    return data


def _say_what_is_edited(path: Path, files: dict[str, str]) -> None:
    """Note on stderr which files are no longer what the compiler wrote."""
    import hashlib

    edited = [
        name
        for name, digest in files.items()
        if not (path / name).is_file() or hashlib.sha256((path / name).read_bytes()).hexdigest() != digest
    ]
    if edited:
        print(f"note: edited or removed since it was compiled: {some_of(edited)}", file=sys.stderr)
