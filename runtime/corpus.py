"""The built-in corpus: real English prose that every machine with Python has.

It is the text of the Python language reference that `help()` shows (`pydoc_data.topics`), about 450 KB.
"""

from __future__ import annotations

import importlib

from mgraph.errors import DataError


def builtin_text() -> str:
    """All help topics of this Python, in the order of their names. Raises DataError where Python came without them."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DataError(
            "the built-in corpus is missing: this Python has no module pydoc_data.topics",
            hint="name a text file or a directory instead, or use a Python with its full standard library",
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))
