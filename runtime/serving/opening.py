"""From a package and weights to an engine: the settings that `LLM` and the server share."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from mgraph.errors import DataError, OptionError, did_you_mean
from mgraph.runtime import mesh
from mgraph.runtime.chat import ChatTemplate, load_template
from mgraph.runtime.handshake import Facts
from mgraph.runtime.package import Package, read_manifest
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.step import Stepper
from mgraph.runtime.tokenizer import Tokenizer, holds_tokenizer, load_tokenizer

GENERATION = "generation_config.json"
"""Beside weights, the file that names the tokens that end a text."""

OF_RANK_0 = ("tokenizer", "chat_template")
"""Settings that the other ranks do not need, or need not have alike."""


@dataclass(frozen=True)
class Settings:
    """How a package is opened for serving."""

    random_init: bool = False
    """Serve without weights: the parameters are drawn anew, and the text is noise."""
    tokenizer: Path | str | None = None
    """A tokenizer.json or a directory with one (None: that beside the weights, else bytes)."""
    chat_template: Path | str | None = None
    """A Jinja file (None: the tokenizer's own)."""
    num_blocks: int = 0
    """Blocks of the cache (0: what the memory allows)."""
    cache_memory: float = 0.0
    """GiB of the cache of a rank, instead of a number of blocks (0: what the memory allows)."""
    max_requests: int = 0
    """The most requests of a step (0: the package's)."""
    step_tokens: int = 0
    """The most tokens of a step (0: the package's)."""
    prefix_cache: bool = True
    """Whether what was computed of earlier prompts is used again."""
    batch_invariant: bool = False
    """Whether what a request gets has the same bits whatever else is served, and however its prompt is computed."""
    device: str = "auto"
    seed: int = 0
    """Of drawn weights, and of requests that bring none."""


def open_engine(
    package: Path | str, weights: Path | str | None = None, **settings: Any
) -> tuple[Engine, ChatTemplate | None]:
    """The engine and the chat template. Raises OptionError, PackageError, CheckpointError, DataError."""
    known = [item.name for item in fields(Settings)]
    for name in settings:
        if name not in known:
            raise OptionError(f"there is no setting '{name}'", hint=did_you_mean(name, known))
    chosen = Settings(**settings)
    directory = None if weights is None else Path(weights)
    check_weights(directory, chosen.random_init)
    stepper = open_stepper(Path(package), directory, chosen)
    tokenizer = load_tokenizer(_tokenizer_path(chosen, directory), stepper.vocab_size)
    template_file = None if chosen.chat_template is None else Path(chosen.chat_template)
    template = load_template(template_file, tokenizer.chat_template, tokenizer.special_tokens)
    engine = Engine(
        stepper,
        tokenizer,
        ends_of_text=ends_of_text(tokenizer, directory, stepper.vocab_size),
        seed=chosen.seed,
        prefix_cache=chosen.prefix_cache,
        max_requests=chosen.max_requests,
        max_tokens=chosen.step_tokens,
    )
    return engine, template


def check_weights(weights: Path | None, random_init: bool) -> None:
    """Raise OptionError where it is not said what is served."""
    if weights is None and not random_init:
        raise OptionError(
            "there are no weights to serve",
            hint="give weights (--weights DIR), or random_init (--random-init) to serve parameters drawn anew",
        )
    if weights is not None and random_init:
        raise OptionError("weights and random_init exclude each other", hint="leave one of them out")


def open_stepper(package: Path, weights: Path | None, settings: Settings) -> Stepper:
    """The package with its parameters and its cache on a device.

    Where several ranks share the package, torchrun starts this process on each, and all call this. It returns on rank 0
    alone; the others run the steps that rank 0 asks for, and end with it.
    """
    from mgraph.runtime.serving import package_stepper as found  # loads torch's part of the runtime
    from mgraph.runtime.serving.ranks import led

    if settings.num_blocks and settings.cache_memory:
        raise OptionError("num_blocks and cache_memory exclude each other", hint="leave one of them out")
    opened: list[Package] = []

    def prepare() -> tuple[torch.device, dict[str, int], Facts]:
        device = mesh.choose_device(settings.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        loaded = found.load_serving(package, device)
        opened.append(loaded)
        axes = mesh.bind_axes(loaded.manifest["mesh"], mesh.environment()[1], "serve.py")
        given = {item.name: str(getattr(settings, item.name)) for item in fields(settings)}
        return device, axes, {n: v for n, v in given.items() if n not in OF_RANK_0} | loaded.facts()

    where = mesh.ALONE
    if ranks_of(package) > 1:
        if mesh.current().world_size > 1:
            raise OptionError("these processes share a package already", hint="one LLM for each start of torchrun")
        where = mesh.start(prepare)
        torch.set_num_threads(mesh.share_of_threads())
    stepper = found.PackageStepper(
        opened[0] if opened else package,
        weights,
        settings.num_blocks,
        where.device if opened else mesh.choose_device(settings.device),
        seed=settings.seed,
        max_tokens=settings.step_tokens or found.MAX_TOKENS,
        max_requests=settings.max_requests or found.MAX_REQUESTS,
        mesh=where,
        batch_invariant=settings.batch_invariant,
        cache_bytes=int(settings.cache_memory * 2**30),
    )
    return led(stepper, where, stepper.release) if where.world_size > 1 else stepper


def ranks_of(package: Path) -> int:
    """How many processes a package is for. Raises PackageError where there is none."""
    from mgraph.runtime.serving.package_stepper import shared_axes

    manifest = read_manifest(package.resolve())
    return math.prod(int(manifest["mesh"][axis]) for axis in shared_axes(manifest))


def ends_of_text(tokenizer: Tokenizer, weights: Path | None, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a text: the tokenizer's `eos_token`, and those of a generation_config.json beside the weights.

    A token that the model does not have ends nothing, and is warned of. Raises DataError for what is no token.
    """
    text = tokenizer.special_tokens.get("eos_token")
    own = None if text is None else tokenizer.token_id(text)
    return tuple(sorted({*_generation_ends(weights, vocab_size), *([] if own is None else [own])}))


def _generation_ends(weights: Path | None, vocab_size: int) -> Sequence[int]:
    file = None if weights is None else (weights if weights.is_dir() else weights.parent) / GENERATION
    if file is None or not file.is_file():
        return []
    try:
        found = json.loads(file.read_text("utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{file} cannot be read: {error}", hint="repair it, or remove it") from error
    ids = found if isinstance(found, list) else [] if found is None else [found]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise DataError(
                f"{file}: eos_token_id is {json.dumps(found)}: {json.dumps(token)} is no token id",
                hint="write a token id, or a list of them, or remove the key",
            )
        if token >= vocab_size:
            message = f"{file}: eos_token_id {token} never comes: the model has the tokens 0 to {vocab_size - 1}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
    return [token for token in ids if token < vocab_size]


def _tokenizer_path(settings: Settings, weights: Path | None) -> Path | None:
    if settings.tokenizer is not None:
        return Path(settings.tokenizer)
    if weights is not None and holds_tokenizer(weights):
        return weights
    return None
