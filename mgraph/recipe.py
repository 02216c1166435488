"""The recipe: every setting of a compilation, in one dataclass.

`mgraph compile` makes a flag of each field, a recipe file (YAML) may set any of them, and the documentation's table
and `mgraph env` are printed from here. A flag wins over the file, the file over the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgraph.errors import OptionError, did_you_mean


def option(default: Any, help_text: str, choices: tuple[str, ...] = ()) -> Any:
    """A recipe field: its default, what it means, and the values it may take."""
    return dataclasses.field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a package is."""

    model: str = option("", "what to compile: a zoo model (dense-tiny), file.py:factory, or hf:config.json")
    purpose: str = option("train", "what the package is for", ("train", "serve"))
    mesh: str = option("dp=*", "mesh axes and sizes, e.g. dp=2; * binds to the number of processes at launch")
    precision: str = option("fp32", "dtype of the parameters and of the computation", ("fp32", "bf16"))
    target: str = option("h100", "the machine that kernels are chosen for", ("h100", "cpu"))
    arch: str = option("sm_90a", "GPU architectures to build kernels for, comma-separated; empty for none")
    output: str = option("", "the package's directory (default: build/MODEL-PURPOSE)")
    recompute: str = option("none", "which layer activations are computed again in the backward", ("none", "full"))
    weight_decay: float = option(0.01, "AdamW's decoupled weight decay, for parameters of two dims or more")
    beta1: float = option(0.9, "AdamW's decay of the first moment")
    beta2: float = option(0.95, "AdamW's decay of the second moment")
    eps: float = option(1e-8, "AdamW's epsilon")
    max_norm: float = option(1.0, "clip the gradient's norm to this; 0: never")
    loss_mask: bool = option(False, "add the input loss_mask f32[B, S], a weight per target")
    position_ids: bool = option(False, "add the input position_ids i64[B, S]")
    max_length: int = option(0, "the longest sequence, and the size of the cache when serving (0: as the model says)")
    disable: str = option("", "passes to leave out: names or patterns, comma-separated (raise-*)")
    verify: bool = option(False, "check every pass with the interpreter, all ranks, on a reduced twin of the model")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), field.metadata["choices"]
            if choices and value not in choices:
                hint = did_you_mean(str(value), choices) or f"one of {', '.join(choices)}"
                raise OptionError(f"{field.name} is {value!r}", where=flag_of(field.name), hint=hint)

    @property
    def directory(self) -> Path:
        """Where the package goes."""
        return Path(self.output) if self.output else Path("build") / f"{self.model_name}-{self.purpose}"

    @property
    def model_name(self) -> str:
        """A short name for the model: the zoo's, the factory's, or the directory of a configuration."""
        text = self.model.removeprefix("hf:")
        if self.model.startswith("hf:"):
            path = Path(text)
            return path.resolve().parent.name if path.name == "config.json" else path.stem
        return text.rpartition(":")[2] if ":" in text else Path(text).stem

    def mesh_axes(self) -> dict[str, int | None]:
        """The mesh as axis name to size (`None`: `*`). Raises OptionError."""
        axes: dict[str, int | None] = {}
        for part in filter(None, self.mesh.split(",")):
            name, equals, size = part.strip().partition("=")
            if not equals or not (size == "*" or (size.isdigit() and int(size) > 0)):
                raise OptionError(f"mesh axis {part!r}", where="--mesh", hint="write NAME=SIZE, e.g. dp=2 or dp=*")
            if name != "dp":
                raise OptionError(
                    f"mesh axis {name!r} is not supported", where="--mesh", hint="the data-parallel axis is dp"
                )
            if name in axes:
                raise OptionError(f"mesh axis {name!r} is given twice", where="--mesh")
            axes[name] = None if size == "*" else int(size)
        return axes

    def patterns(self) -> tuple[str, ...]:
        """Passes to leave out."""
        return tuple(p.strip() for p in self.disable.split(",") if p.strip())


def flag_of(field: str) -> str:
    """The command line flag of a recipe field."""
    return {"purpose": "--for", "model": "MODEL", "output": "-o"}.get(field, "--" + field.replace("_", "-"))


def read_recipe(path: Path | None, flags: Mapping[str, Any]) -> Recipe:
    """The recipe of a YAML file (none: only defaults) and of the flags given. Raises OptionError with file and field."""
    values: dict[str, Any] = {}
    if path is not None:
        values = _read_yaml(path)
    fields = {f.name: f for f in dataclasses.fields(Recipe)}
    for name, value in values.items():
        if name == "for":
            continue
        if name not in fields:
            raise OptionError(f"unknown field {name!r}", where=str(path), hint=did_you_mean(name, fields))
        wanted = type(fields[name].default)
        if wanted is float and type(value) is int:
            values[name] = float(value)
        elif type(value) is not wanted:
            raise OptionError(f"{name} is {value!r}", where=str(path), hint=f"give a value of type {wanted.__name__}")
    if "for" in values:
        values["purpose"] = values.pop("for")
    return Recipe(**{**values, **flags})


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read the recipe: {error.strerror}", where=str(path)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"not YAML: {' '.join(str(error).split())}", where=str(path)) from error
    if not isinstance(loaded, dict):
        raise OptionError("a recipe is a mapping of fields to values", where=str(path), hint="e.g. `model: dense-tiny`")
    return {str(k).replace("-", "_"): v for k, v in loaded.items()}
