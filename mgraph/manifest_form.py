"""What the parts of a package's manifest are, as far as whoever reads it relies on that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TABLES = ("dims", "entries", "files", "lines", "mesh")
_LISTS = ("inputs", "kernels", "providers", "state")
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
    for kernel in manifest.get("kernels", []):
        launches = kernel.get("launches", [])
        if not _are_tables(launches) or not all(_are_tables(launch.get("binaries", [])) for launch in launches):
            return f"kernel {kernel.get('name')} of the manifest has launches or binaries that are none"
        for arch in (str(binary.get("arch")) for launch in launches for binary in launch.get("binaries", [])):
            if not ARCH.fullmatch(arch):
                return f"kernel {kernel.get('name')} has a binary for {arch!r}, which is no architecture of GPUs"
    return None


def _are_tables(listed: object) -> bool:
    return isinstance(listed, list) and all(isinstance(item, dict) for item in listed)
