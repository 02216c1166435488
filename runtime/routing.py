"""Decisions of routers in files: recorded while a model trains, and given back to another run.

A package that was compiled with `--replayable-routing` takes the input `routing` and gives the output of that name,
both i16[B, S, L, K]: the K experts that each of L routers chose for each token. -1 in the input leaves the choice to
the router. A recording is a directory:

    routing.json                                  routers by name, their experts, and the sizes of a microbatch
    step-000001/microbatch-0000.safetensors       by router u8[B, S, K] (i16 above 256 experts), and what it was for

A file has its name once it is whole. Microbatches count through all ranks, so that any number of ranks replays what any
other recorded. Only decisions are kept: weights are made anew of the scores that a router has.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgraph.errors import MgraphError, OptionError, PackageError, storage_hint
from mgraph.runtime.package import Package
from mgraph.runtime.weight_files import write_file

ROUTING = "routing"
INDEX = "routing.json"
_FORMAT, _TOKENS = "mgraph-routing 1", "tokens"
_NARROW = 256  # experts that a byte numbers
_DTYPES = {"U8": "uint8", "I16": "int16"}  # as files name them
_AGAIN = "record them again, with --record-routing"


class RoutingError(MgraphError):
    """Recorded decisions that are not those of this model, of these sizes, or of this data."""


@dataclass(frozen=True)
class Routers:
    """The routers of a package: their names, how many experts each chooses from, and how many of them a token has."""

    layers: tuple[str, ...]
    experts: tuple[int, ...]
    choices: int

    @staticmethod
    def of(package: Package) -> Routers | None:
        """Those whose decisions the entries take and give; None where the package was not compiled so."""
        listed = package.manifest.get(ROUTING)
        if listed is None:
            return None
        shapes = {item["name"]: item["shape"] for item in package.manifest["inputs"]}
        return Routers(tuple(listed["layers"]), tuple(listed["experts"]), int(shapes[ROUTING][-1]))

    def free(self, tokens: Tensor) -> Tensor:
        """The input for tokens [B, S] by which all routers choose for themselves: i16[B, S, L, K] of -1."""
        shape = (*tokens.shape, len(self.layers), self.choices)
        return torch.full(shape, -1, dtype=torch.int16, device=tokens.device)


def routers_of(package: Package, option: str) -> Routers:
    """The routers of a package for which `option` was given. Raises PackageError where it has no decisions to give."""
    routers = Routers.of(package)
    if routers is None:
        raise PackageError(
            f"{option}: the routers of this package neither take decisions nor give them",
            str(package.path),
            "mgraph compile MODEL --replayable-routing",
        )
    return routers


@dataclass(frozen=True)
class Sizes:
    """What a microbatch is: sequences, tokens of each, and how many of them a step has over all ranks."""

    batch: int
    seq: int
    microbatches: int


@dataclass(frozen=True)
class Recording:
    """A directory of decisions of these routers, for microbatches of these sizes."""

    path: Path
    routers: Routers
    sizes: Sizes

    # writing

    def begin(self, resumed: bool) -> None:
        """Make the directory, or go on with it where the run goes on. Raises RoutingError, OptionError."""
        if (self.path / INDEX).exists() and resumed:
            self.check()
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                raise OptionError(
                    f"--record-routing {self.path}: there is something already", hint="another directory, or remove it"
                )
            _rename_into(self.path / INDEX, json.dumps(self._index(), indent=1).encode() + b"\n")
        except OSError as error:
            raise _not_written(self.path, error) from error

    def write(self, step: int, microbatch: int, tokens: Tensor, routing: Tensor) -> None:
        """Write what was decided for tokens i64[B, S]: routing i16[B, S, L, K]. Raises RoutingError."""
        file = self.file(step, microbatch)
        decided = routing.cpu()
        for layer, (name, experts) in enumerate(zip(self.routers.layers, self.routers.experts, strict=True)):
            own = decided[:, :, layer]
            if bool(((own < 0) | (own >= experts)).any()):
                text = f"{name} at step {step} chose none of its {experts} experts for some tokens: that has no record"
                raise RoutingError(text, str(file), "a router that drops no choice, or a run without --record-routing")
        decided = decided.to(self.dtype)
        shape = (*decided.shape[:2], self.routers.choices)
        tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = dict.fromkeys(
            self.routers.layers, (self.dtype, shape)
        )
        values = [decided[:, :, layer].contiguous() for layer in range(len(self.routers.layers))]
        unfinished = file.with_suffix(".unfinished")
        try:
            file.parent.mkdir(exist_ok=True)
            write_file(unfinished, {_TOKENS: (torch.int64, (1,)), **tensors}, [_checksum(tokens), *values])
            os.replace(unfinished, file)
        except OSError as error:
            raise _not_written(file, error) from error

    # reading

    def check(self) -> None:
        """Raise RoutingError, which says what differs, unless what is there is of these routers and sizes."""
        file = self.path / INDEX
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RoutingError(
                f"recorded decisions cannot be read: {error}", str(file), "a directory that --record-routing made"
            ) from error
        wanted = self._index()
        lists = isinstance(found, dict) and [found.get(key) for key in ("layers", "experts")]
        known = lists and found.get("format") == _FORMAT and all(isinstance(each, list) for each in lists)
        if not known or len(found["layers"]) != len(found["experts"]):
            raise RoutingError("these are no recorded decisions of a known form", str(file))
        for key in _TEXTS:
            if type(found.get(key)) is not int:
                hint = "the file that --record-routing wrote"
                raise RoutingError(f"'{key}' is {json.dumps(found.get(key))}, not a whole number", str(file), hint)
        for name, here, recorded in zip(wanted["layers"], wanted["layers"], found["layers"], strict=False):
            if here != recorded:
                raise RoutingError(f"the router {recorded} was recorded where the model has {name}", str(file))
        if len(found["layers"]) != len(wanted["layers"]):
            raise RoutingError(
                f"{len(found['layers'])} routers were recorded, and the model has {len(wanted['layers'])}", str(file)
            )
        for name, here, recorded in zip(wanted["layers"], wanted["experts"], found["experts"], strict=True):
            if here != recorded:
                raise RoutingError(f"{name} was recorded with {recorded} experts, and has {here}", str(file))
        for key, text in _TEXTS.items():
            if found.get(key) != wanted[key]:
                hint = _OPTIONS.get(key, "a package of the model that was recorded").format(found.get(key))
                raise RoutingError(f"recorded for {found.get(key)} {text}, and here are {wanted[key]}", str(file), hint)

    def check_steps(self, first: int, last: int) -> None:
        """Raise RoutingError unless all microbatches of these steps are there, in whole files of these sizes."""
        for step in range(first, last + 1):
            for microbatch in range(self.sizes.microbatches):
                if not self.file(step, microbatch).is_file():
                    what = f"step {step}" if microbatch == 0 else f"microbatch {microbatch} of step {step}"
                    hint = (
                        f"--steps {step - 1} at most" if step > first else "--replay-routing of a run with these steps"
                    )
                    raise RoutingError(f"no decisions of {what} were recorded", str(self.path), hint)
                self._check_file(step, self.file(step, microbatch))

    def _check_file(self, step: int, file: Path) -> None:
        """Look at what a file says that it holds, which it is as long as: at no decision."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as opened:
                parts = {name: opened.get_slice(name) for name in opened.offset_keys()}
        except (SafetensorError, OSError) as error:
            raise _not_read(step, file, error) from error
        held = {n: f"{_DTYPES.get(p.get_dtype(), p.get_dtype())}{list(p.get_shape())}" for n, p in parts.items()}
        self._check_held(held, (self.sizes.batch, self.sizes.seq), step, file)

    def _check_held(self, held: Mapping[str, str], tokens: Sequence[int], step: int, file: Path) -> None:
        """Raise RoutingError unless what is held, dtypes and shapes by name, has decisions of all routers for tokens of
        this shape."""
        wanted = f"{_told(self.dtype)}{[*tokens, self.routers.choices]}"
        for name in self.routers.layers:
            if name not in held:
                raise RoutingError(f"step {step} has no decisions of {name}", str(file), _AGAIN)
            if held[name] != wanted:
                text = f"decisions of {name} at step {step} are {held[name]}, expected {wanted}"
                raise RoutingError(text, str(file), _AGAIN)

    def read(self, step: int, microbatch: int, tokens: Tensor) -> Tensor:
        """What was decided for tokens i64[B, S]: i16[B, S, L, K] on the CPU. Raises RoutingError."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        file = self.file(step, microbatch)
        try:
            found = load_file(file)
        except (SafetensorError, OSError) as error:
            raise _not_read(step, file, error) from error
        held = {name: f"{_told(tensor.dtype)}{list(tensor.shape)}" for name, tensor in found.items()}
        self._check_held(held, tokens.shape, step, file)
        for name, experts in zip(self.routers.layers, self.routers.experts, strict=True):
            layer = found[name]
            if layer.numel() and not 0 <= int(layer.min()) <= int(layer.max()) < experts:
                text = f"{name} at step {step} chose an expert that is none of its {experts}"
                raise RoutingError(text, str(file), _AGAIN)
            ordered = layer.sort(-1).values
            if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
                raise RoutingError(f"{name} at step {step} chose an expert twice for a token", str(file), _AGAIN)
        if _TOKENS not in found or not torch.equal(found[_TOKENS], _checksum(tokens)):
            raise RoutingError(
                f"decisions of step {step}, microbatch {microbatch}, are for other tokens",
                str(file),
                "the --data, --seed and --tokenizer that it was recorded with; --noise-seed changes the noise alone",
            )
        return torch.stack([found[name].to(torch.int16) for name in self.routers.layers], 2)

    def file(self, step: int, microbatch: int) -> Path:
        """Where the decisions for a microbatch of a step are; steps count from 1, microbatches from 0."""
        return self.path / f"step-{step:06d}" / f"microbatch-{microbatch:04d}.safetensors"

    @property
    def dtype(self) -> torch.dtype:
        """In which experts are numbered in files."""
        return torch.uint8 if max(self.routers.experts) <= _NARROW else torch.int16

    def _index(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "layers": list(self.routers.layers),
            "experts": list(self.routers.experts),
            "choices": self.routers.choices,
            "batch": self.sizes.batch,
            "seq": self.sizes.seq,
            "microbatches": self.sizes.microbatches,
        }


_TEXTS: Mapping[str, str] = {
    "choices": "experts a token",
    "batch": "sequences a microbatch",
    "seq": "tokens a sequence",
    "microbatches": "microbatches a step",
}
_OPTIONS: Mapping[str, str] = {"batch": "--batch-size {}", "seq": "--seq-len {}", "microbatches": "--accumulate {}"}


def _checksum(tokens: Tensor) -> Tensor:
    """What tells tokens from others, i64[1]."""
    return torch.tensor([zlib.crc32(tokens.cpu().contiguous().numpy().tobytes())])


def _rename_into(file: Path, content: bytes) -> None:
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, file)


def _told(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _not_read(step: int, file: Path, error: Exception) -> RoutingError:
    return RoutingError(f"decisions of step {step} cannot be read: {error}", str(file), _AGAIN)


def _not_written(where: Path, error: OSError) -> RoutingError:
    reason, hint = error.strerror, f"{storage_hint(error)} directory"
    if isinstance(error, FileExistsError | NotADirectoryError):
        taken = next((place for place in (where, *where.parents) if place.is_file()), where)
        reason, hint = f"{taken} is a file", "a directory that is new or empty"
    return RoutingError(f"decisions cannot be written: {reason}", str(where), hint)


@dataclass(frozen=True)
class Decisions:
    """What a training run does with the decisions of its routers: they are free, recorded, replayed, or both.

    `rank` and `ranks` are this one's position among those with other data, and their number; only a rank that `writes`
    records, the first of those that see the same.
    """

    routers: Routers
    record: Recording | None
    replay: Recording | None
    rank: int
    ranks: int
    writes: bool

    def begin(self, first: int, last: int, is_first: bool) -> None:
        """Before the steps `first` to `last`: check what is replayed, and make the directory of what is recorded."""
        if self.replay is not None:
            self.replay.check()
            self.replay.check_steps(first, last)
        if self.record is not None and is_first:
            self.record.begin(resumed=first > 1)

    def given(self, step: int, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """This rank's microbatches of a step with the decisions that are replayed, where any are."""
        if self.replay is None:
            return batches
        numbers = range(self.rank, self.rank + self.ranks * len(batches), self.ranks)
        tokens = [batch["tokens"] for batch in batches]
        read = [self.replay.read(step, number, t) for number, t in zip(numbers, tokens, strict=True)]
        return [{**batch, ROUTING: routing} for batch, routing in zip(batches, read, strict=True)]

    def take(self, step: int, batches: list[dict[str, Tensor]], taken: list[Tensor]) -> None:
        """Record what was decided for this rank's microbatches of a step."""
        if self.record is None or not self.writes:
            return
        for index, (batch, routing) in enumerate(zip(batches, taken, strict=True)):
            self.record.write(step, self.rank + self.ranks * index, batch["tokens"], routing)
