"""Text to token ids and back: bytes by default, or a `tokenizers` file.

With bytes the id of a token is the byte, 256 in all, and nothing needs to be trained or shipped. A tokenizer.json, as
published with most models, is read by the `tokenizers` library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mgraph.errors import DataError


class Tokenizer(Protocol):
    """What the runtime asks of a tokenizer."""

    name: str
    vocab_size: int

    def encode(self, text: str) -> Tensor:
        """Token ids of a text: a 1-d integer tensor."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become replacement signs."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as tokens."""

    name = "bytes"
    vocab_size = 256

    def encode(self, text: str) -> Tensor:
        """u8[number of bytes]."""
        return torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())

    def decode(self, ids: list[int]) -> str:
        """Ids must be below 256."""
        return bytes(ids).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer.json, without the special tokens that it would put around a text."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Library  # slow to import, and needed only here

        if not path.is_file():
            raise DataError(f"--tokenizer {path}: no such file", hint="give the path of a tokenizer.json")
        try:
            self._library: Any = Library.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"--tokenizer {path} cannot be read: {error}",
                hint="give a tokenizer.json as the tokenizers library writes it",
            ) from error
        self.name = path.name
        self.vocab_size: int = self._library.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> Tensor:
        """i32[number of tokens]."""
        return torch.tensor(self._library.encode(text, add_special_tokens=False).ids, dtype=torch.int32)

    def decode(self, ids: list[int]) -> str:
        """Special tokens are left out."""
        decoded: str = self._library.decode(ids)
        return decoded


def load_tokenizer(path: Path | None, model_vocab_size: int) -> Tokenizer:
    """The tokenizer at `path` (None: bytes); raises `DataError` if its ids exceed the model's vocabulary."""
    tokenizer: Tokenizer = ByteTokenizer() if path is None else FileTokenizer(path)
    if tokenizer.vocab_size > model_vocab_size:
        raise DataError(
            f"the tokenizer '{tokenizer.name}' has {tokenizer.vocab_size} tokens, the model knows {model_vocab_size}",
            hint="compile the model with a larger vocabulary, or give a smaller --tokenizer",
        )
    return tokenizer
