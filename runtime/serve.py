"""Generate text with a serve package: one sequence, the likeliest token each time.

`python PKG/serve.py --weights DIR --prompt TEXT` prints the continuation on stdout. The prompt runs as one call of
`step`; every new token is one more call with one token.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from mgraph.errors import MgraphError, OptionError
from mgraph.runtime.mesh import choose_device
from mgraph.runtime.options import Settings, about, read
from mgraph.runtime.package import Package
from mgraph.runtime.serving.package_stepper import PackageStepper
from mgraph.runtime.serving.step import Batch, Sampling
from mgraph.runtime.tokenizer import load_tokenizer


@dataclass(frozen=True)
class ServeOptions(Settings):
    """All settings of one continuation."""

    weights: Path | None = field(
        default=None,
        metadata=about("safetensors file or directory, or a training run's directory (default: drawn anew)"),
    )
    prompt: str = field(default="The ", metadata=about("the text to continue"))
    max_new_tokens: int = field(default=100, metadata=about("how many tokens to write", low=1))
    tokenizer: Path | None = field(
        default=None, metadata=about("a tokenizer.json, or a directory that has one (default: bytes)")
    )
    device: str = field(
        default="auto", metadata=about("where to run; auto is cuda if there is one", choices=("auto", "cpu", "cuda"))
    )
    seed: int = field(default=0, metadata=about("of the weights where --weights is not given", low=0))


class Generator:
    """A package with its weights, and a cache for one sequence."""

    def __init__(self, stepper: PackageStepper) -> None:
        self.stepper = stepper

    @property
    def package(self) -> Package:
        """The package that runs."""
        return self.stepper.package

    def greedy(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        """Up to `count` tokens after a prompt of at least one, each the argmax of the logits.

        Raises OptionError where prompt and continuation do not fit in the cache.
        """
        longest = self.stepper.max_length
        if not prompt:
            raise OptionError("the prompt is empty", hint="give at least one token")
        if len(prompt) + count - 1 > longest:
            raise OptionError(
                f"{len(prompt)} prompt tokens and {count} new ones do not fit in the cache of {longest}",
                hint="ask for fewer, or compile with a larger --max-length",
            )
        tokens, start = list(prompt), 0
        for _ in range(count):
            sampled = self.stepper.run(self._batch(tokens, start), _greedy()).get()
            start += len(tokens)
            tokens = [int(sampled.tokens[0])]
            yield tokens[0]

    def _batch(self, tokens: Sequence[int], start: int) -> Batch:
        """The next tokens of the only request, whose blocks are 1, 2, … in order."""
        places = np.arange(start, start + len(tokens))
        blocks = np.arange(1, self.stepper.num_blocks, dtype=np.int32)[None]
        return Batch(
            tokens=np.array(tokens, np.int64),
            positions=places,
            slots=places + self.stepper.block_size,
            starts=np.array([0, len(tokens)], np.int32),
            lengths=np.array([start + len(tokens)], np.int32),
            blocks=blocks,
            rows=np.array([len(tokens) - 1]),
            requests=(0,),
        )


def _greedy() -> Sampling:
    zero, none = np.zeros(1, np.float32), np.zeros(1, np.int64)
    return Sampling(
        zero, none.astype(np.int32), zero + 1, zero, none, none, none - 1, zero + 1, zero, zero, None, None, None, 0
    )


def open_generator(package_dir: Path, weights: Path | None, device: torch.device | str, seed: int = 0) -> Generator:
    """Load a serve package and fill its parameters: from safetensors, from a training run, or drawn anew (`None`)."""
    stepper = PackageStepper(package_dir, weights, 2, device, seed=seed, max_requests=1)
    stepper.resize(1 + -(-stepper.max_length // stepper.block_size))
    return Generator(stepper)


def main(package_dir: Path | str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Generate with the options of the command line; exit code 0, or 2 for wrong input."""
    try:
        about_it = "Continue a text, taking the likeliest token each time."
        options = read(ServeOptions, arguments, Path(sys.argv[0]).name, about_it)
        if options.weights is None:
            print("no --weights: the parameters are drawn anew, so the text is noise", file=sys.stderr, flush=True)
        device = choose_device(options.device)
        generator = open_generator(Path(package_dir), options.weights, device, options.seed)
        tokenizer = load_tokenizer(options.tokenizer, generator.package.vocab_size)
        ids = list(generator.greedy(tokenizer.encode(options.prompt).tolist(), options.max_new_tokens))
    except MgraphError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    print(options.prompt + tokenizer.decode(ids))
    sys.exit(0)
