"""What the parts of a package's manifest are, as far as whoever reads it relies on that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TABLES = ("dims", "entries", "files", "lines", "mesh")
_LISTS = ("inputs", "kernels", "providers", "state")
_ARCH = re.compile(r"sm_\d{2,3}a?")


def damage(manifest: Mapping[str, Any]) -> str | None:
    """What a manifest has that it cannot have been written with; None where it looks whole."""
    for name in _TABLES:
        if not isinstance(manifest.get(name, {}), dict):
            return f"'{name}' of the manifest is no table"
    for name in _LISTS:
        listed = manifest.get(name, [])
        if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
            return f"'{name}' of the manifest is no list of tables"
    for kernel in manifest.get("kernels", []):
        for launch in kernel.get("launches", []):
            for arch in (str(binary.get("arch")) for binary in launch.get("binaries", [])):
                if not _ARCH.fullmatch(arch):
                    return f"kernel {kernel.get('name')} has a binary for {arch!r}, which is no architecture of GPUs"
    return None
