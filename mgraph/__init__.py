"""mgraph compiles a plain PyTorch model definition into a readable, optimized step package.

Importing this package runs nothing and loads neither torch nor sympy: public names are looked up on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "mgraph.runtime.serving.llm",
    "MgraphError": "mgraph.errors",
    "SamplingParams": "mgraph.runtime.serving.parameters",
}

__all__ = ["LLM", "MgraphError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the module that defines the public name `name` and return the object."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mgraph' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
