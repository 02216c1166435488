"""What the parts of a package's manifest are, as far as whoever reads it relies on that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TABLES = ("dims", "entries", "files", "lines", "mesh")
_LISTS = ("inputs", "kernels", "providers", "state")
_FORMS = {str: "text", int: "number", list: "list"}
_LAUNCH = {str: ("function",), int: ("num_warps", "num_stages"), list: ("args", "grid", "binaries")}
_BINARY = {str: ("file", "symbol"), int: ("cuda", "alignment", "threads", "shared"), list: ("hidden",)}
"""What is read of a launch and of a binary, by form."""
ARCH = re.compile(r"sm_(\d{1,2})(\d)(a?)")
"""An architecture: major and minor version of the GPU, and whether binaries are for exactly that one."""


def damage(manifest: Mapping[str, Any]) -> str | None:
    """What a manifest has that it cannot have been written with; None where it looks whole."""
    for name in _TABLES:
        if not isinstance(manifest.get(name, {}), dict):
            return f"'{name}' of the manifest is no table"
    for name in _LISTS:
        if not _are_tables(manifest.get(name, [])):
            return f"'{name}' of the manifest is no list of tables"
    for function, nodes in manifest.get("lines", {}).items():
        if not isinstance(nodes, dict) or not all(isinstance(node, str) for node in nodes.values()):
            return f"the lines of {function} in the manifest are no table of nodes"
    return next(filter(None, map(_damage_of_kernel, manifest.get("kernels", []))), None)


def _damage_of_kernel(kernel: Mapping[str, Any]) -> str | None:
    """The same of the launches of a kernel."""
    name: object = kernel.get("name")
    launches: Any = kernel.get("launches")
    if not isinstance(name, str):
        return f"a kernel of the manifest is called {name!r}, which is no name"
    if not _are_tables(launches) or not all(_are_tables(launch.get("binaries", [])) for launch in launches):
        return f"kernel {name} of the manifest has launches or binaries that are none"
    binaries = [binary for launch in launches for binary in launch.get("binaries", [])]
    for arch in (str(binary.get("arch")) for binary in binaries):
        if not ARCH.fullmatch(arch):
            return f"kernel {name} has a binary for {arch!r}, which is no architecture of GPUs"
    for what, tables, read in (("launch", launches, _LAUNCH), ("binary", binaries, _BINARY)):
        for field, form in ((field, form) for form, fields in read.items() for field in fields):
            if not all(isinstance(table.get(field), form) for table in tables):
                return f"'{field}' of a {what} of kernel {name} is no {_FORMS[form]}"
    return None


def _are_tables(listed: object) -> bool:
    return isinstance(listed, list) and all(isinstance(item, dict) for item in listed)
