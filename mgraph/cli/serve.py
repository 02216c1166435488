"""`mgraph serve`: the options are those of a package's serve.py, declared with the server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mgraph.errors import OptionError, PackageError


def run(arguments: Sequence[str]) -> None:
    """Serve the package that the first argument names, until a signal; another exit code than 0 is raised."""
    from mgraph.runtime.package import read_manifest
    from mgraph.runtime.serving.opening import check_kind
    from mgraph.runtime.serving.program import serve

    package, options = Path(arguments[0] if arguments else "-"), list(arguments[1:])
    if {"-h", "--help"} & set(arguments):
        options = ["--help"]
    elif str(package).startswith("-"):
        raise OptionError("the package is missing", where="mgraph serve", hint="mgraph serve PKG [options]")
    elif not package.is_dir():
        what = "this is a file, not a package's directory" if package.exists() else "there is no such directory"
        raise PackageError(what, where=str(package), hint="compile a model with --for serve")
    else:
        with suppress(PackageError):  # which is told of once the options are right
            check_kind(package, read_manifest(package.resolve())["kind"])
    code = serve(package, options, "mgraph serve PKG")
    if code:
        sys.exit(code)
