"""Write the weights of a run as other libraries read them: safetensors files, and the model's config.json.

Names are those of the model's own `state_dict`, a tied parameter stands once, and the metadata is what `transformers`
expects. A directory with the final name is whole: it is written beside it under another name, and renamed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from mgraph.errors import OptionError, StorageError, storage_hint
from mgraph.runtime.package import State, StateSpec
from mgraph.runtime.weights import INDEX, model_tensors

CONFIG = "config.json"
"""The file of a package, and of an export, that holds the configuration of a `transformers` model."""

SHARD_BYTES = 5 * 10**9
"""How large a file may become before the next one is begun."""

_DTYPE_KEYS = ("dtype", "torch_dtype")


def check_export(target: Path) -> None:
    """Raise OptionError where there is something at `target` that an export would write over."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise OptionError(
            f"--export {target}: there is something already", hint="give a directory that is new or empty"
        )


def export_weights(
    target: Path, state: State, specs: Iterable[StateSpec], config: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the parameters and persistent buffers to the directory `target`; with `config`, where that file exists.

    The configuration is written with the dtype that the parameters have now. Raises OptionError where `target` holds
    something, StorageError where it cannot be written; nothing half-written stays behind.
    """
    check_export(target)
    specs = model_tensors(specs)
    target = target.absolute()
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        temporary.chmod(0o755)  # temporary directories are private; weights need not be
        _write_shards(temporary, state, list(_shards(specs, shard_bytes)))
        if config.is_file():
            settings = json.loads(config.read_text(encoding="utf-8"))
            settings = {key: value for key, value in settings.items() if key not in _DTYPE_KEYS}
            settings["dtype"] = _dtype(specs)
            (temporary / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        temporary.rename(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            f"the weights could not be written: {reason}",
            where=str(target),
            hint=f"{storage_hint(error)} --export",
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _shards(specs: Iterable[StateSpec], shard_bytes: int) -> Iterator[list[StateSpec]]:
    """The tensors in their order, cut where a file would become too large; a single tensor is never cut."""
    shard: list[StateSpec] = []
    size = 0
    for spec in specs:
        if shard and size + spec.bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(spec)
        size += spec.bytes
    yield shard


def _write_shards(directory: Path, state: State, shards: list[list[StateSpec]]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    single = len(shards) == 1
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, 1):
        file = "model.safetensors" if single else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        try:
            tensors = {spec.name: state[spec.name].detach().cpu().contiguous() for spec in shard}
            save_file(tensors, directory / file, metadata={"format": "pt"})
        except SafetensorError as error:  # its writer reports a full disk in its own way
            raise OSError(str(error)) from error
        weight_map |= {spec.name: file for spec in shard}
    if not single:
        total = sum(spec.bytes for shard in shards for spec in shard)
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        (directory / INDEX).write_text(index_text + "\n", encoding="utf-8")


def _dtype(specs: Iterable[StateSpec]) -> str:
    """The dtype that most parameters have, as torch names it: `float32`, `bfloat16`."""
    sizes: dict[str, int] = {}
    for spec in specs:
        name = str(spec.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + spec.bytes
    return max(sizes, key=lambda name: sizes[name])
