"""The command line: `main` runs one verb and turns every way it can end into an exit code.

0 ok, 1 the graph that was given is wrong, 2 wrong usage, model or package, 3 an error of ours, 130 interrupted. What a
verb was asked for (IR, JSON, tables, a path) goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

from mgraph.errors import GraphError, MgraphError, OptionError, StorageError, did_you_mean
from mgraph.runtime.start import INTERRUPTED, importing, stop_at_signals

__all__ = ["main"]

INTERNAL_ERROR = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (None: that of the process) and return the exit code."""
    if arguments is None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)
        if sys.argv[1:2] == ["serve"]:
            stop_at_signals()
    try:
        _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except MgraphError as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, GraphError) else error.exit_code
    except BrokenPipeError:
        _drop_stdout()  # the reader (`| head`) has all it wants
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            _report(error)
            return INTERNAL_ERROR
        _drop_stdout()
        print("error: cannot write: the disk is full", file=sys.stderr)
        return StorageError.exit_code
    except Exception as error:  # whatever is left is a mistake of ours
        _report(error)
        return INTERNAL_ERROR
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    """After Ctrl-C. While something is imported the process ends at once: libraries that are half there drop the
    exception, or raise others."""
    if importing(frame):
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def _run(arguments: list[str]) -> None:
    import typer

    from mgraph.cli.app import command

    # The base of all usage errors: its own module differs between versions of typer, that of a subclass does not.
    usage_error = cast(type[Exception], typer.BadParameter.__bases__[0])
    group: Any = command()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in group.commands:
        raise OptionError(f"no verb '{arguments[0]}'", hint=did_you_mean(arguments[0], group.commands))
    try:
        with group.make_context("mgraph", arguments or ["--help"]) as context:
            group.invoke(context)
    except typer.Exit:
        return  # after --help
    except usage_error as error:
        verb = arguments[0] if arguments and arguments[0] in group.commands else ""
        raise _usage(error, f"mgraph {verb}".strip()) from error


def _usage(error: Any, asked: str) -> OptionError:
    """The framework's error as one of ours, with the nearest flag for an unknown one; `asked` is what was called."""
    context = error.ctx
    verb = context.command_path if context is not None else asked
    hint = f"{verb} --help"
    unknown = getattr(error, "option_name", None)
    if context is not None and unknown:
        flags = [flag for item in context.command.params for flag in (*item.opts, *item.secondary_opts)]
        near = did_you_mean(unknown, flags)
        hint = near if near.startswith("did you mean") else hint
        return OptionError(f"{error.message.rstrip('.')}", where=verb, hint=hint)
    return OptionError(error.format_message().rstrip("."), where=verb, hint=hint)


def _drop_stdout() -> None:
    """Nothing more can be written; Python would complain once more when it closes stdout."""
    with suppress(OSError, ValueError):  # stdout may be no file, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: Exception) -> None:
    """Say that mgraph is at fault; the traceback goes to stderr with MGRAPH_DEBUG, else into a file."""
    text = "".join(traceback.format_exception(error))
    summary = str(error).splitlines()[0] if str(error) else ""
    print(f"internal error: {type(error).__name__}: {summary}; please report it", file=sys.stderr)
    if os.environ.get("MGRAPH_DEBUG"):
        print(text, file=sys.stderr, end="")
        return
    handle, path = tempfile.mkstemp(prefix="mgraph-error-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    print(f"  the traceback is in {Path(path)}; MGRAPH_DEBUG=1 prints it instead", file=sys.stderr)
