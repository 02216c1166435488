"""Generate text with a serve package: one sequence, a contiguous cache, the likeliest token each time.

`python PKG/serve.py --weights DIR --prompt TEXT` prints the continuation on stdout. The prompt runs as one call of
`step`; every new token is one more call with one token.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch

from mgraph.errors import MgraphError, OptionError
from mgraph.runtime import checkpoint
from mgraph.runtime.mesh import choose_device
from mgraph.runtime.options import Settings, about, read
from mgraph.runtime.package import Package, State, load_package
from mgraph.runtime.state import create_state
from mgraph.runtime.tokenizer import load_tokenizer
from mgraph.runtime.weights import load_weights


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
    """A package with its weights and one cache."""

    def __init__(self, package: Package, state: State) -> None:
        if package.manifest["kind"] != "serve":
            raise OptionError(
                f"{package.path} is a {package.manifest['kind']} package", hint="compile the model with --for serve"
            )
        self.package, self.state = package, state
        caches = [s for s in package.state_specs if s.kind == "cache"]
        self.capacity = min(s.shape[2] for s in caches)

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        """Up to `count` tokens after a prompt of at least one, each the argmax of the logits.

        Raises OptionError where prompt and continuation do not fit in the cache.
        """
        if not prompt:
            raise OptionError("the prompt is empty", hint="give at least one token")
        if len(prompt) + count - 1 > self.capacity:
            raise OptionError(
                f"{len(prompt)} prompt tokens and {count} new ones do not fit in the cache of {self.capacity}",
                hint="ask for fewer, or compile with a larger --max-length",
            )
        tokens, start = list(prompt), 0
        for _ in range(count):
            inputs = torch.tensor([tokens], device=self.package.device)
            at = torch.tensor(start, device=self.package.device)
            logits = self.package.call("step", self.state, inputs, at)["logits"]
            start += len(tokens)
            tokens = [int(logits[0].argmax())]
            yield tokens[0]


def open_generator(package_dir: Path, weights: Path | None, device: torch.device | str, seed: int = 0) -> Generator:
    """Load a serve package and fill its parameters: from safetensors, from a training run, or drawn anew (`None`)."""
    package = load_package(package_dir, device)
    state = create_state(package.state_specs, seed, device)
    if weights is not None:
        if (found := _run_checkpoint(weights)) is not None:
            specs = tuple(s for s in package.state_specs if s.kind in ("param", "buffer") and s.persist)
            checkpoint.load_parameters(found, state, specs)
        else:
            load_weights(weights, state, package.state_specs, package.weight_layout)
    return Generator(package, state)


def _run_checkpoint(path: Path) -> checkpoint.Checkpoint | None:
    """The newest checkpoint of a training run's directory, if it is one."""
    if not path.is_dir():
        return None
    return checkpoint.latest(path / "checkpoints") or checkpoint.latest(path)


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
