"""From a package and weights to an engine: the settings that `LLM` and the server share."""

from __future__ import annotations

import atexit
import math
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from mgraph.errors import OptionError, did_you_mean
from mgraph.runtime import mesh, options
from mgraph.runtime.chat import ChatTemplate, load_template
from mgraph.runtime.handshake import Facts
from mgraph.runtime.options import about
from mgraph.runtime.package import Package, read_manifest
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.step import Stepper

OF_A_RANK = ("weights", "tokenizer", "chat_template")
"""Settings that the ranks of a package need not have alike: places of files, on machines of their own."""

MOST_GIB = 2**20


@dataclass(frozen=True)
class Settings(options.Settings):
    """How a package is opened for serving: the keywords of `LLM`, and flags of the server.

    Raises OptionError for what is no value of a setting, or where it is not said what is served.
    """

    weights: Path | None = field(
        default=None, metadata=about("safetensors file or directory, or a training run's directory")
    )
    random_init: bool = field(
        default=False, metadata=about("serve without weights: parameters are drawn anew, and the text is noise")
    )
    tokenizer: Path | None = field(
        default=None,
        metadata=about(
            "a tokenizer.json, or a directory that has one (default: that beside the weights or of the training run, "
            "or bytes)"
        ),
    )
    chat_template: Path | None = field(
        default=None, metadata=about("how conversations become text, in Jinja (default: the tokenizer's own)")
    )
    num_blocks: int = field(
        default=0,
        metadata=about(
            "blocks of the cache; of a layer with a window those of the window only (default 0: what memory allows)",
            low=0,
        ),
    )
    cache_memory: float = field(
        default=0.0,
        metadata=about(
            "GiB of the cache of a rank, in place of its number of blocks (default 0: what memory allows)",
            low=0,
            high=MOST_GIB,
        ),
    )
    max_requests: int = field(default=0, metadata=about("sequences in a step at most (default 0: 128)", low=0))
    step_tokens: int = field(default=0, metadata=about("tokens in a step at most (default 0: 2048)", low=0))
    prefix_cache: bool = field(
        default=True,
        metadata=about(
            "compute every prompt anew, even one that begins like an earlier one",
            keyword="whether what was computed of earlier prompts is used again (default True)",
        ),
    )
    batch_invariant: bool = field(
        default=False,
        metadata=about(
            "give each request the same bits whatever else is served; slower, and on a GPU only packages that were "
            "compiled with it"
        ),
    )
    cuda_graphs: bool = field(
        default=True,
        metadata=about(
            "a GPU launches each kernel of a step by itself",
            keyword="whether steps on a GPU are replayed as CUDA graphs (default True)",
        ),
    )
    device: str = field(
        default="auto", metadata=about("where to run; auto is cuda if there is one", choices=mesh.DEVICES)
    )
    seed: int = field(default=0, metadata=about("of parameters drawn anew, and of requests without one", low=0))

    def __post_init__(self) -> None:
        """What is served, and settings that exclude each other."""
        super().__post_init__()
        weights, noise, *cache = map(self.written, ("weights", "random_init", "num_blocks", "cache_memory"))
        if self.weights is None and not self.random_init:
            hint = f"give {weights}, or {noise} to serve parameters drawn anew"
            raise OptionError("there are no weights to serve", hint=hint)
        if self.weights is not None and self.random_init:
            raise OptionError(f"{weights} and {noise} exclude each other", hint="leave one of them out")
        if 0 < self.step_tokens < self.max_requests:
            tokens, requests = map(self.written, ("step_tokens", "max_requests"))
            raise OptionError(
                f"{tokens} {self.step_tokens} is less than {requests} {self.max_requests}",
                hint="each sequence of a step has a token of it at least",
            )
        if self.num_blocks and self.cache_memory:
            raise OptionError(f"{' and '.join(cache)} exclude each other", hint="leave one of them out")

    @classmethod
    def written(cls, name: str) -> str:
        """As a keyword."""
        return name


def open_engine(
    package: Path | str, weights: Path | str | None = None, **settings: Any
) -> tuple[Engine, ChatTemplate | None]:
    """The engine and the chat template. Raises OptionError, PackageError, CheckpointError, DataError."""
    known = [item.name for item in fields(Settings)]
    for name in settings:
        if name not in known:
            raise OptionError(f"there is no setting '{name}'", hint=did_you_mean(name, known))
    if not isinstance(package, str | os.PathLike):
        raise OptionError(f"the package is {package!r}: must be a path", hint="the directory that was compiled")
    chosen = Settings(**{"weights": weights, **settings})
    stepper = open_stepper(Path(package), chosen)
    from mgraph.runtime.serving import beside  # loads torch's part of the runtime

    tokenizer = beside.open_tokenizer(chosen.tokenizer, chosen.weights, stepper.vocab_size)
    template_file = chosen.chat_template or beside.find_template(chosen.weights)
    own = (None, {}) if tokenizer is None else (tokenizer.chat_template, tokenizer.special_tokens)
    template = load_template(template_file, *own)
    beside.check_configuration(Path(package), chosen.weights)
    engine = Engine(
        stepper,
        tokenizer,
        padded=beside.is_padded(tokenizer, chosen.weights, stepper.vocab_size),
        ends_of_text=beside.ends_of_text(tokenizer, chosen.weights, stepper.vocab_size),
        seed=chosen.seed,
        prefix_cache=chosen.prefix_cache,
        max_requests=chosen.max_requests,
        max_tokens=chosen.step_tokens,
    )
    return engine, template


def open_stepper(package: Path, settings: Settings) -> Stepper:
    """The package with its parameters and its cache on a device.

    Where several ranks share the package, torchrun starts this process on each, and all call this. It returns on rank 0
    alone; the others run the steps that rank 0 asks for, and end with it.
    """
    from mgraph.runtime.serving import package_stepper as found  # loads torch's part of the runtime
    from mgraph.runtime.serving.ranks import led

    opened: list[Package] = []

    def prepare() -> tuple[torch.device, dict[str, int], Facts]:
        device = mesh.choose_device(settings.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        loaded = found.load_serving(package, device)
        opened.append(loaded)
        axes = mesh.bind_axes(loaded.manifest["mesh"], mesh.environment()[1], "serve.py")
        given = {item.name: str(getattr(settings, item.name)) for item in fields(settings)}
        return device, axes, {n: v for n, v in given.items() if n not in OF_A_RANK} | loaded.facts()

    where = mesh.ALONE
    if ranks_of(package) > 1:
        if mesh.current().world_size > 1:
            raise OptionError("these processes share a package already", hint="one LLM for each start of torchrun")
        atexit.register(leave)  # also where what follows fails
        where = mesh.start(prepare)
        torch.set_num_threads(mesh.share_of_threads())
    stepper = found.PackageStepper(
        opened[0] if opened else package,
        settings.weights,
        settings.num_blocks,
        where.device if opened else mesh.choose_device(settings.device),
        seed=settings.seed,
        max_tokens=settings.step_tokens or found.MAX_TOKENS,
        max_requests=settings.max_requests or found.MAX_REQUESTS,
        mesh=where,
        cuda_graphs=settings.cuda_graphs,
        batch_invariant=settings.batch_invariant,
        cache_bytes=int(settings.cache_memory * 2**30),
    )
    return led(stepper, where, stepper.release) if where.world_size > 1 else stepper


def leave() -> None:
    """Leave the process group, whose threads must not outlive the interpreter. An error that ended a program would hold
    it: Python keeps the last one for debuggers."""
    for name in ("last_exc", "last_value", "last_traceback"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    mesh.stop()


def check_kind(path: Path, kind: str) -> None:
    """Raise OptionError unless a package's kind is that of serving."""
    if kind != "serve":
        raise OptionError(f"{path} is a {kind} package", hint="compile the model with --for serve")


def ranks_of(package: Path) -> int:
    """How many processes a package is for. Raises PackageError where there is none."""
    from mgraph.runtime.serving.package_stepper import shared_axes

    manifest = read_manifest(package.resolve())
    return math.prod(int(manifest["mesh"][axis]) for axis in shared_axes(manifest))
