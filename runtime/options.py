"""What a person may say to a program: a dataclass, from which the command line, its help and its checks follow."""

from __future__ import annotations

import argparse
import math
import os
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar, get_type_hints

from mgraph.errors import OptionError, did_you_mean
from mgraph.runtime.examples import LONG, SUFFIX
from mgraph.runtime.mesh import DEVICES, environment
from mgraph.runtime.schedule import DECAYS
from mgraph.runtime.text import BUILTIN

EXIT_CODES = """exit codes:
  0  the run ended, or was stopped by SIGTERM or Ctrl-C after its step and saved
  2  wrong input (options, data, checkpoint, package) or no space on the disk
  3  the loss or the gradient is no longer finite (--non-finite raise); checkpoints written before are untouched
130  a second Ctrl-C, or one before the first step: ended at once, nothing saved
torchrun itself exits with 1 where a process it started exits with another code, or where it was stopped itself."""


def about(
    text: str,
    low: float | None = None,
    choices: Sequence[str] | None = None,
    high: float | None = None,
    keyword: str | None = None,
) -> dict[str, Any]:
    """Facts of a field: its help, the smallest and the largest value it may have, the values it may take; and what it
    is as a keyword, where the flag says the opposite."""
    return {"help": text, "low": low, "high": high, "choices": choices, "keyword": keyword or text}


S = TypeVar("S", bound="Settings")


@dataclass(frozen=True)
class Settings:
    """Settings of a program; each field is a flag of the same name, with `about` as its metadata.

    Raises OptionError for a value of another type, or one that it may not have. Paths may be given as texts.
    """

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for item in fields(self):
            value, kind = getattr(self, item.name), types[item.name]
            problem = _problem(value, kind, item.metadata)
            if problem is not None:
                name = self.written(item.name)
                shown = value if isinstance(value, int | float) else reprlib.repr(value)
                raise OptionError(f"{name} {shown}: must be {problem}", hint=f"{name} is {item.metadata['keyword']}")
            if kind not in _PLAIN and value is not None:
                object.__setattr__(self, item.name, Path(value))  # frozen for others

    @classmethod
    def written(cls, name: str) -> str:
        """How a person writes a field."""
        return flag(name)


_PLAIN = (bool, int, float, str, str | None)
"""Types of fields; any other is that of a path."""


def _problem(value: Any, kind: Any, facts: Mapping[str, Any]) -> str | None:
    """What a value must be that it is not."""
    low, high, choices = facts["low"], facts["high"], facts["choices"]
    if choices is not None:
        return None if value in choices else f"one of {', '.join(choices)}"
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    if kind in (str, str | None):
        return None if isinstance(value, str) or (value is None and kind is not str) else "a text"
    if kind not in _PLAIN:
        return None if value is None or isinstance(value, str | os.PathLike) else "a path"
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        return "a whole number" if kind is int else "a number"
    if low is not None and not value >= low:  # written so that nan fails too
        return f"at least {low}"
    if high is not None and not value <= high:
        return f"at most {high}"
    return None if isinstance(value, Integral) or math.isfinite(value) else "finite"


LEAST_RATE = 1e-4


@dataclass(frozen=True)
class Options(Settings):
    """All settings of a training run."""

    data: str = field(
        default=BUILTIN,
        metadata=about(
            f"UTF-8 text, or examples ({SUFFIX}): a file, a directory, or '{BUILTIN}', prose that comes with Python"
        ),
    )
    tokenizer: Path | None = field(
        default=None, metadata=about("a tokenizer.json, or a directory that has one (default: bytes)")
    )
    chat_template: Path | None = field(
        default=None, metadata=about("how conversations become text, in Jinja (default: the tokenizer's own)")
    )
    end_of_text: str = field(
        default="auto",
        metadata=about("token behind texts and completions of examples, none, or auto, the tokenizer's eos_token"),
    )
    pack: str = field(
        default="auto",
        metadata=about(
            "several examples in a row; auto does where the package takes segment_ids", choices=("auto", "yes", "no")
        ),
    )
    long: str = field(
        default="cut", metadata=about("what becomes of an example that is longer than a row", choices=LONG)
    )
    init: Path | None = field(
        default=None,
        metadata=about(
            "weights to begin with: a .safetensors file, or a directory of them (default: as the model says)"
        ),
    )
    export: Path | None = field(
        default=None,
        metadata=about(
            "at the end, write the weights here as safetensors, with the model's config.json, if any, and the tokenizer"
        ),
    )
    export_adapter: Path | None = field(
        default=None, metadata=about("at the end, write the adapters of --lora here, as PEFT reads them")
    )
    export_dtype: str = field(
        default="param",
        metadata=about(
            "of exported parameters: their own, or f32, from copies of full precision", choices=("param", "f32")
        ),
    )
    steps: int = field(default=200, metadata=about("optimizer steps in all, those before a resume included", low=1))
    batch_size: int = field(default=8, metadata=about("sequences per microbatch", low=1))
    seq_len: int = field(default=128, metadata=about("tokens per sequence", low=1))
    accumulate: int = field(
        default=0,
        metadata=about(
            "microbatches per step over all ranks, a multiple of dp * fsdp * ep (an ep made of dp or fsdp counts once; "
            "default 0: one for each)",
            low=0,
        ),
    )
    lr: float = field(default=1e-3, metadata=about("peak learning rate", low=0))
    min_lr: float = field(
        default=LEAST_RATE,
        metadata=about("learning rate at the end of the decay; of a lower --lr a tenth, unless it is given", low=0),
    )
    warmup: int = field(default=20, metadata=about("steps of linear warm-up", low=0))
    decay: str = field(default="cosine", metadata=about("how the rate falls after the warm-up", choices=tuple(DECAYS)))
    non_finite: str = field(
        default="raise",
        metadata=about(
            "what a step with an infinite loss or gradient is: raise ends the run, skip leaves it out and goes on",
            choices=("raise", "skip"),
        ),
    )
    eval_every: int = field(default=100, metadata=about("steps between evaluations (0: at the end only)", low=0))
    eval_batches: int = field(default=16, metadata=about("validation batches per evaluation, over all ranks", low=1))
    save_every: int = field(default=500, metadata=about("steps between checkpoints (0: at the end only)", low=0))
    keep: int = field(default=2, metadata=about("number of checkpoints that are kept", low=1))
    log_every: int = field(default=10, metadata=about("steps between reports", low=1))
    out: Path | None = field(default=None, metadata=about("directory of the run (default: runs/NAME of the package)"))
    resume: bool = field(default=False, metadata=about("go on from the newest checkpoint in --out, if there is one"))
    seed: int = field(default=0, metadata=about("of weights, data order and sample", low=0))
    noise_seed: int = field(
        default=-1, metadata=about("of dropout and of the noise of routers (default -1: that of --seed)", low=-1)
    )
    record_routing: Path | None = field(
        default=None, metadata=about("write which experts the routers choose, step by step, into this directory")
    )
    replay_routing: Path | None = field(
        default=None, metadata=about("tokens go to the experts that --record-routing wrote into this directory")
    )
    sample_prompt: str = field(default="The ", metadata=about("beginning of the text that the model writes at the end"))
    sample_length: int = field(default=200, metadata=about("tokens that it writes (0: none)", low=0))
    temperature: float = field(default=0.8, metadata=about("of the sample; 0 takes the likeliest token", low=0))
    top_k: int = field(default=40, metadata=about("likeliest tokens that the sample draws from (0: all)", low=0))
    device: str = field(default="auto", metadata=about("where to run; auto is cuda if there is one", choices=DEVICES))
    threads: int = field(default=0, metadata=about("CPU threads per process (0: a fair share of the machine)", low=0))
    strict: bool = field(default=False, metadata=about("on a GPU, a kernel without a binary for it is an error"))
    jit: bool = field(default=False, metadata=about("kernels without a binary may be compiled by Triton"))
    poison: bool = field(
        default=False, metadata=about("fill memory that ends with NaN, to find what reads it afterwards; slow")
    )
    nvtx: bool = field(
        default=False, metadata=about("name what the step does for profilers, by line and origin; without CUDA graphs")
    )
    copy_tokens: bool = field(
        default=False,
        metadata=about("GPUs of one machine copy tokens of experts from each other, in place of messages by NCCL"),
    )
    no_cuda_graphs: bool = field(default=False, metadata=about("a GPU launches each kernel by itself"))
    tune_products: bool = field(
        default=False,
        metadata=about(
            "time cuBLAS's kernels in the first step, some 2 s a product, and take the fastest; rounds otherwise. The "
            "package keeps the choices, for later runs on such a machine"
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_lr > self.lr:
            if self.min_lr != LEAST_RATE:
                text = f"--min-lr {self.min_lr} is above --lr {self.lr}: the rate falls from one to the other"
                raise OptionError(text, hint="a --min-lr of at most --lr")
            object.__setattr__(self, "min_lr", self.lr / 10)  # frozen for others


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def flag_of(item: Field[Any]) -> str:
    """The same; that of a field that is true by itself makes it false."""
    return flag(f"no_{item.name}" if item.default is True else item.name)


def parse(arguments: Sequence[str] | None, program: str) -> Options:
    """Options of a trainer from a command line (None: the process's). Raises `OptionError`; `--help` exits with 0."""
    about_it = "Train the model of this step package. Run it alone, or with torchrun on many processes."
    return read(Options, arguments, program, about_it, EXIT_CODES)


def read(
    settings: type[S], arguments: Sequence[str] | None, program: str, description: str, epilog: str | None = None
) -> S:
    """Settings from a command line, as `parse`."""
    parser = Parser(
        prog=program,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    types = get_type_hints(settings)
    for item in fields(settings):
        text = item.metadata["help"]
        if types[item.name] is bool:
            action = "store_false" if item.default else "store_true"
            parser.add_argument(flag_of(item), dest=item.name, action=action, help=text)
            continue
        parser.add_argument(
            flag_of(item),
            type=_converter(types[item.name]),
            default=item.default,
            choices=item.metadata["choices"],
            metavar=None if item.metadata["choices"] else item.name.upper(),
            help=text if item.default is None or "default" in text else f"{text} (default: {item.default})",
        )
    return settings(**vars(parser.read(arguments)))


def _converter(kind: Any) -> Callable[[str], Any]:
    """From a flag's text to a value of this type. What is no number stays a text, which `Settings` refuses."""

    def convert(text: str) -> Any:
        try:
            return text if kind == str | None else kind(text)
        except ValueError:
            return text

    return convert if kind in _PLAIN else Path


class Parser(argparse.ArgumentParser):
    """Raises an error of ours instead of exiting, and prints its help on one rank only."""

    def read(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """The options (None: of the process's command line); an unknown one is an error with the nearest there is."""
        values, unknown = self.parse_known_args(arguments)
        if unknown:
            known = [text for action in self._actions for text in action.option_strings]
            near = did_you_mean(unknown[0].partition("=")[0], known)
            hint = near if near.startswith("did you mean") else f"{self.prog} --help lists all options"
            raise OptionError(f"unrecognized arguments: {' '.join(unknown)}", hint=hint)
        return values

    def error(self, message: str) -> NoReturn:
        """Raise `OptionError` with what argparse found."""
        raise OptionError(message, hint=f"{self.prog} --help lists all options")

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]  # stubs ask for a protocol
        """Print the help, on rank 0 alone."""
        if environment()[0] == 0:
            super().print_help(file or sys.stdout)
