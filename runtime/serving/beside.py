"""What belongs to weights besides: their tokenizer, their chat template, and the tokens that end a text.

It lies in the directory of the weights; where those are a file, in the directory of that file. A training run says in
its checkpoints which tokenizer and chat template it was trained with. Texts are bytes only where nothing names another.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgraph.errors import DataError
from mgraph.runtime.checkpoint import Checkpoint
from mgraph.runtime.export import CONFIG
from mgraph.runtime.options import flag
from mgraph.runtime.serving.package_stepper import run_checkpoint
from mgraph.runtime.tokenizer import TEMPLATE, ByteTokenizer, Tokenizer, holds_tokenizer, load_tokenizer

GENERATION = "generation_config.json"
"""Beside weights, the file that names the tokens that end a text."""
_OF_NO_STEP = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "quantization_config"),
    *("output_router_logits", "router_aux_loss_coef", "pretraining_tp", "id2label", "label2id", "task_specific_params"),
}
"""Keys of a config.json that change nothing of what a step that serves computes, or that the package says itself."""
_MOST_SAID = 4


def find_tokenizer(weights: Path | None) -> Path | None:
    """The tokenizer of weights; None: bytes. Raises DataError where it is named and not there."""
    directory = _directory(weights)
    if directory is not None and holds_tokenizer(directory):
        return directory
    return _of_run(weights, "tokenizer")


def open_tokenizer(given: Path | None, weights: Path | None, vocab_size: int) -> Tokenizer | None:
    """The one that is given, else that of the weights, else bytes; None, of which is warned, for a model that has fewer
    tokens than those. Raises DataError."""
    path = given or find_tokenizer(weights)
    if path is None and vocab_size < ByteTokenizer.vocab_size:
        message = (
            f"the model has {vocab_size} tokens, fewer than bytes: without --tokenizer FILE it is served by token ids"
        )
        warnings.warn(f"{message} alone", RuntimeWarning, stacklevel=3)
        return None
    return load_tokenizer(path, vocab_size)


def find_template(weights: Path | None) -> Path | None:
    """The chat template that is not the tokenizer's own. Raises DataError where it is named and not there."""
    directory = _directory(weights)
    if directory is not None and (directory / TEMPLATE).is_file() and not holds_tokenizer(directory):
        return directory / TEMPLATE
    return _of_run(weights, "chat_template")


def ends_of_text(tokenizer: Tokenizer | None, weights: Path | None, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a text: the tokenizer's `eos_token`, and those of a generation_config.json beside the weights.

    A token that the model does not have ends nothing, and is warned of. Raises DataError for what is no token.
    """
    text = None if tokenizer is None else tokenizer.special_tokens.get("eos_token")
    own = None if tokenizer is None or text is None else tokenizer.token_id(text)
    return tuple(sorted({*_generation_ends(weights, vocab_size), *([] if own is None else [own])}))


def is_padded(tokenizer: Tokenizer | None, weights: Path | None, vocab_size: int) -> bool:
    """Whether tokens that the tokenizer lacks are padding of the vocabulary. Of weights that have none beside them it
    is not known which texts they are for: all of their tokens may come, and those beyond bytes have no text."""
    if not isinstance(tokenizer, ByteTokenizer) or weights is None or run_checkpoint(weights) is not None:
        return True
    if vocab_size > tokenizer.vocab_size:
        message = f"{weights} has no tokenizer: texts are bytes, and tokens from {tokenizer.vocab_size} on have no text"
        warnings.warn(f"{message} (--tokenizer FILE names one)", RuntimeWarning, stacklevel=3)
    return False


def check_configuration(package: Path, weights: Path | None) -> None:
    """Warn where the config.json beside weights computes something else than the one that the package was compiled
    from: names and shapes of parameters may be the same."""
    directory = _directory(weights)
    if directory is None:
        return
    compiled, given = _configuration(package / CONFIG), _configuration(directory / CONFIG)
    unlike = [key for key in sorted(compiled.keys() & given.keys() - _OF_NO_STEP) if compiled[key] != given[key]]
    if unlike:
        said = ", ".join(f"{key} {json.dumps(given[key])} ({json.dumps(compiled[key])})" for key in unlike[:_MOST_SAID])
        more = f" and {len(unlike) - _MOST_SAID} more" * (len(unlike) > _MOST_SAID)
        message = f"{directory / CONFIG} is not what the package was compiled from: {said}{more}"
        warnings.warn(f"{message}; compile {directory} to serve what it says", RuntimeWarning, stacklevel=3)


def _configuration(file: Path) -> dict[str, Any]:
    """What a config.json says, but for what it leaves to the model (null). Nothing where there is none, as weights do
    not need one; one that cannot be read is warned of."""
    try:
        found = json.loads(file.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"{file} cannot be read, so what it computes was not compared: {reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)
        return {}
    return {key: value for key, value in found.items() if value is not None}


def _directory(weights: Path | None) -> Path | None:
    return None if weights is None else weights if weights.is_dir() else weights.parent


def _of_run(weights: Path | None, name: str) -> Path | None:
    """A file that a training run was given with the option of this name."""
    run = None if weights is None else run_checkpoint(weights)
    given = None if run is None else _place(run, name)
    if run is None or given is None or given.exists():
        return given
    raise DataError(
        f"the run was trained with {flag(name)} {given}, which is not there",
        where=str(run.path),
        hint=f"put it there again, or say where it is: {flag(name)} PATH ({name} in Python)",
    )


def _place(run: Checkpoint, name: str) -> Path | None:
    places, options = run.run.get("places", {}), run.run.get("options", {})
    text = places[name] if name in places else options.get(name)  # of an older run as it was written
    return None if text in (None, "None") else Path(text)


def _generation_ends(weights: Path | None, vocab_size: int) -> Sequence[int]:
    directory = _directory(weights)
    file = None if directory is None else directory / GENERATION
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
