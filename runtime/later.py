"""Work of which nothing in an entry waits: it is done while the next message is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_waiting: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
_put_off = True


def later(function: Callable[..., Any], *args: Any) -> None:
    """Call a function when the next exchange of tokens has begun, at the latest at the end of the entry. What it is
    given lives until then, and must not be written before."""
    if _put_off:
        _waiting.append((function, args))
    else:
        function(*args)


def catch_up() -> None:
    """Do what waits, in its order."""
    while _waiting:
        function, args = _waiting.pop(0)
        function(*args)


def forget() -> None:
    """An entry begins: what one that failed left is not its."""
    _waiting.clear()


@contextmanager
def at_once() -> Iterator[None]:
    """Nothing is put off meanwhile: what runs is a CUDA graph of its own."""
    global _put_off
    before, _put_off = _put_off, False
    try:
        yield
    finally:
        _put_off = before
