"""What a user did wrong: each class is one kind of mistake, each message says what, where and what to do.

Our own mistakes are `assert`s with a message; a `MgraphError` that reaches a person is never a bug report. The command
line prints `str(error)` on stderr and exits with `error.exit_code`; no traceback is shown.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Sequence

_MOST = 100  # names of a hint


class MgraphError(Exception):
    """Base of every error a user can cause.

    `message` says what is wrong, in one sentence or a short list; `where` is the place (`file:line`, a node, a flag);
    `hint` is the next thing to try. `str(error)` gives all three:

        error: what
          at file:line
          try: what to do
    """

    exit_code = 2

    def __init__(self, message: str, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        lines = [f"error: {self.message}"]
        if self.where:
            lines.append(f"  at {self.where}")
        if self.hint:
            lines.append(f"  try: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[type[MgraphError], tuple[str, str | None, str | None]]:
        # Errors cross process borders (test workers, data loaders); the default would lose `where` and `hint`.
        return type(self), (self.message, self.where, self.hint)


class OptionError(MgraphError):
    """A command line flag, recipe field or environment variable has a wrong name or value."""


class ModelError(MgraphError):
    """The model cannot be found, built or loaded, or does not follow the model contract."""


class CaptureError(MgraphError):
    """The model builds but cannot be traced: unsupported operators, data-dependent control flow, wrong dims."""


class GraphError(MgraphError):
    """IR text does not parse, or a graph breaks a rule of the verifier."""


class PassError(MgraphError):
    """A pass or pipeline is unknown, wrongly ordered, or cannot do what was asked for on this graph."""


class PackageError(MgraphError):
    """A step package is missing, incomplete, edited, or was written for another version or machine."""


class DataError(MgraphError):
    """Training or evaluation text, a tokenizer or a corpus cannot be read or is too small."""


class CheckpointError(MgraphError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class StorageError(MgraphError):
    """Writing failed: disk full, no permission, not a directory."""


def storage_hint(failure: BaseException) -> str:
    """What to do where a write failed, up to the name of the place: only a full disk or quota asks for space.

    Anything that says no reason (torch's writer, of a short write) is taken for a full disk.
    """
    reason = failure.errno if isinstance(failure, OSError) else None
    return "free some space or give another" if reason in (None, errno.ENOSPC, errno.EDQUOT) else "give another"


def some_of(names: Sequence[str], most: int = 5) -> str:
    """Names in a sentence, of many the first."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for the unknown `name`: the nearest of `known`; where none is near, all (of very many, the first)."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean '{near[0]}'?"
    more = f", and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return "one of " + ", ".join(names[:_MOST]) + more
