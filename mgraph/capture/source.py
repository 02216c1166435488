"""Finding the model that the user named: a zoo model, a factory in a file, or a transformers configuration.

dense-tiny, moe-100m          a model of the zoo and its size
path/to/file.py:factory       `factory()` returns an nn.Module; the file may define `inputs` and `loss`
hf:path/to/config.json        an unmodified transformers class, by its configuration
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mgraph.capture import experts
from mgraph.capture.frames import error_frame
from mgraph.errors import ModelError, did_you_mean
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.types import DType

InputsFunction = Callable[[Any, Any], Mapping[str, tuple[torch.dtype, tuple[Any, ...]]]]
LossFunction = Callable[[Any, Mapping[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]


PACKED = ("position_ids", "segment_ids")
"""The inputs i64[B, S] of a model whose rows hold several documents: the place of a token in its document, and numbers
that are equal within one."""


@dataclass(frozen=True)
class ModelSpec:
    """What to capture. `dtype` is that of the parameters (`None`: as the definition says); `training` is the mode
    (dropout); `loss_mask` asks for this input, `packed` for `PACKED`; `max_length` bounds S (`None`: as the model
    says)."""

    text: str
    dtype: DType | None = None
    training: bool = True
    packed: bool = False
    loss_mask: bool = False
    max_length: int | None = None


@dataclass(frozen=True)
class Source:
    """A resolved model: its name, how to build it, and what its file defines beside it.

    `configuration` is the text of its config.json, where it is built from one.
    """

    name: str
    where: str
    factory: Callable[[], Any]
    inputs: InputsFunction | None = None
    loss: LossFunction | None = None
    configuration: str | None = None


def resolve(spec: ModelSpec) -> Source:
    """Find the model of a spec; nothing is built yet. Raises ModelError."""
    if spec.text.startswith("hf:"):
        return _transformers(spec)
    if ":" in spec.text or spec.text.endswith(".py"):
        return _file(spec)
    return _zoo(spec)


def _configuration_file(text: str) -> Path:
    """The file that a transformers model's name means."""
    path = Path(text.removeprefix("hf:"))
    return path / "config.json" if path.is_dir() else path


def _in_dtype(factory: Callable[[], Any], dtype: DType | None) -> Callable[[], Any]:
    """The factory run under another default dtype."""
    if dtype is None:
        return factory

    def run() -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(to_torch_dtype(dtype))
        try:
            return factory()
        finally:
            torch.set_default_dtype(before)

    return run


def _zoo(spec: ModelSpec) -> Source:
    from mgraph import models

    known = {f"{family}-{size}": (family, size) for family, sizes in models.SIZES.items() for size in sizes}
    name = spec.text if spec.text in known else f"{spec.text}-tiny"
    if name not in known:
        raise ModelError(f"unknown model '{spec.text}'", None, did_you_mean(spec.text, list(known)))
    return Source(name, spec.text, _in_dtype(lambda: models.get(*known[name]), spec.dtype))


def _file(spec: ModelSpec) -> Source:
    file, _, factory = spec.text.rpartition(":")
    if not file or not factory:
        raise ModelError(f"no factory in '{spec.text}'", None, "write path/to/file.py:factory")
    path = Path(file)
    if not path.is_file():
        raise ModelError(f"no file '{file}'", None, "give the path of a Python file, then :factory")
    module = _load(path)
    if not callable(getattr(module, factory, None)):
        functions = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        hint = did_you_mean(factory, functions) if functions else "define a function that returns an nn.Module"
        raise ModelError(f"'{factory}' is not a function of '{file}'", file, hint)
    return Source(
        path.stem,
        spec.text,
        _in_dtype(getattr(module, factory), spec.dtype),
        getattr(module, "inputs", None),
        getattr(module, "loss", None),
    )


def _load(path: Path) -> ModuleType:
    """Run a user's file as a module of its own name, able to import its neighbours."""
    name = f"mgraph_user_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ModelError(f"'{path}' is not a Python file", None, "give a file that ends in .py")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up by name
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file raises is theirs to see
        frame = error_frame(error)
        where = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else str(frame or path)
        raise ModelError(f"'{path}' cannot be imported: {type(error).__name__}: {error}", where) from error
    finally:
        sys.path.remove(folder)
    return module


def _transformers(spec: ModelSpec) -> Source:
    path = _configuration_file(spec.text)
    try:
        text = path.read_text(encoding="utf-8")
        settings = json.loads(text)
    except OSError as error:
        raise ModelError(f"cannot read '{path}': {error.strerror}", None, "give hf:path/to/config.json") from error
    except ValueError as error:
        raise ModelError(f"'{path}' is not JSON: {error}", str(path), "give a transformers config.json") from error
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ModelError(f"'{path}' has no model_type", str(path), "give the config.json of a transformers model")
    try:
        import transformers
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise ModelError("transformers is not installed", spec.text, "pip install 'mgraph[hf]'") from error
    model_type = settings.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        hint = did_you_mean(str(model_type), CONFIG_MAPPING.keys())
        raise ModelError(f"transformers has no model type '{model_type}'", str(path), hint)

    def factory() -> Any:
        try:
            config = CONFIG_MAPPING[model_type].from_dict({**settings, "use_cache": False})
        except Exception as error:  # its checks raise what they like
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(f"transformers refuses the configuration: {reason}", str(path), "correct it") from error
        config._experts_implementation = experts.register()
        if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
            config._attn_implementation = "eager"  # others leave the cap out, and transformers before 5.21 chooses them
        options = {} if spec.dtype is None else {"dtype": to_torch_dtype(spec.dtype)}
        named = _class_of(transformers, settings, path)
        make = named.from_config if named is transformers.AutoModelForCausalLM else named._from_config
        return make(config, **options)

    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return Source(name or str(model_type), spec.text, factory, configuration=text)


def _class_of(transformers: Any, settings: Mapping[str, Any], path: Path) -> Any:
    """The class that a configuration names, as checkpoints of it do; without a name, causal language modelling."""
    names = settings.get("architectures") or []
    if not names:
        return transformers.AutoModelForCausalLM
    found = getattr(transformers, str(names[0]), None)
    if found is None:
        hint = "name a class of the installed transformers, or leave architectures out"
        raise ModelError(f"transformers has no class '{names[0]}'", str(path), hint)
    return found
