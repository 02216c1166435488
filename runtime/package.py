"""Read a step package from disk and make it callable.

A package is a directory whose manifest.json was written last, so a manifest vouches for a whole package. Loading reads
the manifest, checks that what it lists is there, chooses the device for the kernels, and executes step.py under a name
of its own, so that two packages can live in one process.

step.py is meant to be read, and may be edited: an edited file that still works is loaded (`Package.edited` names it);
one that no longer parses, or that lost an entry point, is a `PackageError` with file and line.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mgraph import __version__
from mgraph.errors import MgraphError, OptionError, PackageError, some_of
from mgraph.manifest_form import damage
from mgraph.runtime import kernels, poison
from mgraph.runtime.collectives import begin_entry
from mgraph.runtime.graphs import EntryGraphs
from mgraph.runtime.kept_products import KeptProducts
from mgraph.runtime.mesh import Mesh
from mgraph.runtime.poison import Poison
from mgraph.runtime.ranges import CALLED, compiled, range_of
from mgraph.runtime.shards import Factors, Share, Split, share_of
from mgraph.runtime.tuned_products import TUNED, TunedProducts, tuned_entry
from mgraph.step_order import order_text, read_step_order

SCHEMA = 1
"""The manifest schema this runtime writes of; the one before it is read too."""

RUNTIME_VERSION = 1
"""Raised when the meaning of a shim in `v1` changes; all ranks must have the same."""

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}

REQUIRED = ("schema", "kind", "name", "mesh", "dims", "vocab_size", "inputs", "state", "entries", "files")

State = dict[str, Tensor]
EntryFunction = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Adapter:
    """The trained update of low rank that a weight W has: `W + scale B A`.

    A [rank, in] and B [out, rank] are states of their own; W is [out, in], or [in, out] if `transposed`.
    """

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    scale: float
    transposed: bool


@dataclass(frozen=True)
class StateSpec:
    """One tensor that outlives a call, as the manifest declares it.

    `kind` is param, buffer, master, moment, grad or scalar; `init` is the list of in-place calls that fills the tensor;
    `seed_name` keys its random calls; only a tensor with `persist` goes into checkpoints;
    `adapter` is that of a weight which has one. `shape` is that of the whole tensor; `placement` says how it is split
    over mesh axes, `factors` which of its dims are products. One that is `host` lies in the memory of the host;
    one with `after` begins in memory where the state of that name ends.
    """

    name: str
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    trainable: bool
    persist: bool
    init: tuple[tuple[Any, ...], ...]
    seed_name: str
    adapter: Adapter | None = None
    placement: tuple[Split, ...] = ()
    factors: Factors = ()
    host: bool = False
    after: str = ""

    @property
    def bytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def share(self, mesh: Mesh) -> Share:
        """What this rank has of it."""
        return self.share_at(mesh, mesh.position)

    def share_at(self, mesh: Mesh, position: Mapping[str, int]) -> Share:
        """What the rank at another position of the mesh has of it."""
        return share_of(self.shape, self.placement, self.factors, mesh.axes, position)

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes of the mesh that it is split over; none where every rank has the whole tensor."""
        return tuple(dict.fromkeys(split.axis for split in self.placement if mesh.size(split.axis) > 1))


@dataclass(frozen=True)
class Package:
    """A loaded step package: its manifest, its entry functions and the state they act on. Entries of a `poisoned` one
    are called with memory that ends filled with NaN (`poison.py`)."""

    path: Path
    manifest: dict[str, Any]
    device: torch.device
    entries: dict[str, EntryFunction]
    state_specs: tuple[StateSpec, ...]
    graphs: EntryGraphs
    poisoned: bool = False

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model knows."""
        return int(self.manifest["vocab_size"])

    @property
    def weight_layout(self) -> list[dict[str, Any]]:
        """How the model's tensors lie in files of weights, where not as they are; see `weight_layout.py`."""
        layout: list[dict[str, Any]] = self.manifest.get("weight_layout", [])
        return layout

    @property
    def one_microbatch(self) -> bool:
        """Whether a step has one microbatch on each data rank: it writes the gradients in place of adding to them."""
        return bool(self.manifest.get("one_microbatch", False))

    @property
    def edited(self) -> list[str]:
        """Files whose content is not what the compiler wrote."""
        listed: dict[str, str] = self.manifest["files"]
        return [name for name, digest in listed.items() if _digest(self.path / name) != digest]

    def call(self, entry: str, state: State, *inputs: Tensor) -> dict[str, Tensor]:
        """Call an entry function; its results under the output names of the manifest."""
        begin_entry()
        try:
            if self.poisoned:
                with Poison():
                    outputs = self.entries[entry](state, *inputs)
                poison.check(entry, outputs, state, str(self.path / "step.py"))
            else:
                outputs = self.graphs.call(entry, self.entries[entry], state, inputs)
        except MgraphError as error:
            error.where = error.where or self._place(error)
            raise
        except Exception as error:
            raise self._failure(entry, error) from error
        names = self.manifest["entries"][entry]["outputs"]
        assert len(names) == len(outputs), f"{entry} returned {len(outputs)} values, the manifest lists {names}"
        return dict(zip(names, outputs, strict=True))

    def _place(self, error: Exception) -> str:
        """The line of step.py that an error went through, and that of the model which it was written for."""
        file = self.path / "step.py"
        number = _line_in(file, error)
        above = reversed(file.read_text(encoding="utf-8").splitlines()[: number - 1])
        notes = (line.strip().removeprefix("# ") for line in above if line.lstrip().startswith(("# ", "def ")))
        note = next(notes, "def ")
        return f"{file}:{number}" + ("" if note.startswith("def ") else f", {' '.join(note.split())}")

    def _failure(self, entry: str, error: Exception) -> PackageError:
        """What failed inside step.py, and at which of its lines."""
        file = self.path / "step.py"
        reason = str(error).strip().splitlines() or [""]
        hint = "this file was edited: mend the line, or compile the package again" if "step.py" in self.edited else None
        if isinstance(error, torch.OutOfMemoryError):
            hint = "a smaller --batch-size or --seq-len, or compile with --memory-budget"
        return PackageError(
            f"{entry} failed: {type(error).__name__}: {reason[0]}", f"{file}:{_line_in(file, error)}", hint
        )

    def facts(self) -> dict[str, str]:
        """What ranks that run this package must agree on, by name: the options that it was compiled with, the contents
        of its files, the collectives of each function of step.py, the versions of mgraph, runtime and torch.

        Raises PackageError where step.py has a collective that some ranks might leave out.
        """
        compiled = self.manifest.get("fingerprint", {}).get("options", {})
        found = {f"compiled with {name}": str(value) for name, value in compiled.items() if name != "output"}
        listed: dict[str, str] = self.manifest["files"]
        groups: dict[str, list[str]] = {}
        for name in ["manifest.json", *sorted(listed)]:
            digest = _digest(self.path / name)
            top, slash, _ = name.partition("/")
            groups.setdefault(top + slash, []).append(digest)
            if not slash and digest != listed.get(name, digest):
                groups[top].append("edited")
        for name, parts in groups.items():
            whole = parts[0] if not name.endswith("/") else hashlib.sha256(" ".join(parts).encode()).hexdigest()
            found[name] = whole[:12] + (" (edited)" if parts[-1] == "edited" else "")
        step = self.path / "step.py"
        order = order_text(read_step_order(step.read_text(encoding="utf-8"), str(step)))
        found |= {f"the order of collectives in {name}": text for name, text in order.items()}
        return found | {"mgraph": f"{__version__}, runtime {RUNTIME_VERSION}", "torch": torch.__version__}

    def check_size(self, dim: str, value: int, flag: str) -> None:
        """Raise `OptionError` unless the named dim of the model may have this extent; `flag` is what the person set."""
        low, high = self.bounds(dim)
        if value < low or (high is not None and value > high):
            allowed = f"exactly {low}" if low == high else f"from {low} to {high if high is not None else 'any size'}"
            raise OptionError(
                f"{flag} {value} is outside what this package was compiled for: {dim} is {allowed}",
                hint=f"give a {flag} in this range, or compile the model again with another range of {dim}",
            )
        number = self.multiple(dim)
        if value % number:
            below = value // number * number
            near = f"{below} or {below + number}" if below else str(number)
            raise OptionError(
                f"{flag} {value} does not divide: this package splits {dim} into {number} parts",
                hint=f"{flag} {near}, or compile again without --sequence-parallel or --ep-chunks",
            )

    def bounds(self, dim: str) -> tuple[int, int | None]:
        """Smallest and largest extent of a named dim; None means no limit."""
        bound = self.manifest["dims"].get(dim, [1, None])
        return (bound, bound) if isinstance(bound, int) else (bound[0], bound[1])

    def multiple(self, dim: str) -> int:
        """What extents of a named dim are multiples of."""
        return int(self.manifest.get("multiples", {}).get(dim, 1))


def load_package(
    path: Path | str,
    device: torch.device | str,
    strict: bool = False,
    jit: bool = False,
    cuda_graphs: bool = True,
    poisoned: bool = False,
    ranges: str | bool = False,
    sizes: Mapping[str, int] | None = None,
    tuned: bool = False,
) -> Package:
    """Load the package at `path` for `device`; `sizes` gives named dims of states (the blocks of a cache).

    With `strict` a kernel without a binary for the device is an error instead of a warning; `jit` allows compiling it.
    Without `cuda_graphs` a GPU launches every op by itself; so it does with `poisoned`, and
    with `ranges` of a kind, which name what the step does for profilers (`ranges.py`). `tuned`: products of matrices
    run by the fastest kernels of a GPU (`tuned_products.py`).
    """
    path = Path(path).resolve()
    device = torch.device(device)
    if tuned and device.type != "cuda":
        raise OptionError("products are tuned on a GPU", "--tune-products", "leave it out, or --device cuda")
    manifest = read_manifest(path)
    if tuned and manifest["mesh"].get("tp", 1) != 1:
        raise OptionError(  # a router's logits, rounded otherwise, would lead ranks to different experts
            "ranks of tp make some products alike, and would each choose a kernel by times of their own",
            "--tune-products",
            "leave it out",
        )
    kernels.set_device(device, strict=strict, jit=jit)
    module = _execute(path / "step.py", ranges)
    entries, products = {}, TunedProducts(KeptProducts(path) if tuned else None)
    for name in manifest["entries"]:
        function = getattr(module, name, None)
        if not callable(function):
            raise PackageError(
                f"step.py has no function '{name}', which the manifest lists as an entry point",
                where=f"{path / 'step.py'}:1",
                hint="put the function back, or compile the package again",
            )
        entries[name] = tuned_entry(function, products) if tuned and name in TUNED else function
    listed = manifest["entries"].items()
    replayed = device.type == "cuda" and cuda_graphs and not ranges
    pieces = {name: entry["pieces"] for name, entry in listed if replayed and "pieces" in entry}
    graphs = EntryGraphs([name for name, entry in listed if replayed and entry.get("captured")], pieces)
    for name in dict.fromkeys(piece for names in pieces.values() for piece in names):
        if callable(function := getattr(module, name, None)):  # a person may have written the step otherwise
            setattr(module, name, graphs.piece(name, function))
    specs = tuple(_state_spec(item, path, sizes or {}) for item in manifest["state"])
    return Package(path, manifest, device, entries, specs, graphs, poisoned)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the package at `path`. Raises PackageError where it or a file is missing."""
    file = path / "manifest.json"
    if not path.is_dir():
        raise PackageError(f"no step package at {path}: not a directory", hint="mgraph compile MODEL -o DIR writes one")
    if not file.is_file():
        raise PackageError(
            f"{path} is not a whole step package: manifest.json, which is written last, is missing",
            hint="compile it again",
        )
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        line = getattr(error, "lineno", 1)
        raise PackageError(f"the manifest cannot be read: {error}", f"{file}:{line}", "compile it again") from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema not in (SCHEMA - 1, SCHEMA):
        raise PackageError(
            f"the package has schema {schema!r}; this runtime reads schemas {SCHEMA - 1} and {SCHEMA}",
            where=str(file),
            hint="compile it again with this version of mgraph, or run it with the version that wrote it",
        )
    absent = [key for key in REQUIRED if key not in manifest]
    if absent:
        raise PackageError(f"the manifest lacks {', '.join(absent)}", str(file), "compile the package again")
    if (wrong := damage(manifest)) is not None:
        raise PackageError(wrong, str(file), "compile the package again")
    lost = [name for name in manifest["files"] if not (path / name).is_file()]
    if lost:
        raise PackageError(f"files of the package are missing: {some_of(lost)}", str(path), "compile it again")
    return manifest


def _execute(file: Path, ranges: str | bool) -> ModuleType:
    """Run step.py as a module whose name no other package shares, with ranges around its statements if asked for."""
    name = f"mgraph_step_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        if ranges:
            vars(module)[CALLED] = range_of(str(ranges))
            exec(compiled(file), vars(module))
        else:
            spec.loader.exec_module(module)
    except SyntaxError as error:
        del sys.modules[name]
        raise PackageError(
            f"{file.name} is not valid Python: {error.msg}",
            where=f"{error.filename or file}:{error.lineno or 1}",
            hint="mend the line, or compile the package again",
        ) from error
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, PackageError):
            raise
        raise PackageError(
            f"{file.name} cannot be loaded: {type(error).__name__}: {error}",
            where=f"{file}:{_line_in(file, error)}",
            hint="mend the line, or compile the package again",
        ) from error
    return module


def _line_in(file: Path, error: BaseException) -> int:
    """The last line of a file that an error went through; 1 where it went through none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return (lines[-1] if lines else None) or 1


def _extent(extent: int | str, sizes: Mapping[str, int]) -> int:
    """An extent of a state: a number, or a product of numbers and named dims."""
    parts = str(extent).split("*")
    return math.prod(int(part) if part.isdecimal() else sizes.get(part, 1) for part in parts)


def _state_spec(item: dict[str, Any], path: Path, sizes: Mapping[str, int]) -> StateSpec:
    try:
        return StateSpec(
            name=item["name"],
            kind=item["kind"],
            dtype=DTYPES[item["dtype"]],
            shape=tuple(_extent(extent, sizes) for extent in item["shape"]),
            trainable=bool(item.get("trainable", False)),
            persist=bool(item.get("persist", True)),
            init=tuple(tuple(call) for call in item.get("init") or ()),
            seed_name=item.get("seed_name", item["name"]),
            adapter=Adapter(**item["adapter"]) if "adapter" in item else None,
            placement=tuple(Split(**split) for split in item.get("placement", ())),
            factors=tuple((dim, tuple(extents)) for dim, extents in item.get("factors", ())),
            host=bool(item.get("host", False)),
            after=item.get("after", ""),
        )
    except KeyError as error:
        raise PackageError(
            f"the manifest's state {item.get('name')!r} has no or an unknown {error}",
            where=str(path / "manifest.json"),
            hint="compile the package again",
        ) from error


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
