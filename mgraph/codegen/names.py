"""Python names for values and functions: valid identifiers, short, free again when the value they stand for is dead."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

_NUMBER = re.compile(r"_\d+$")
_OTHER = re.compile(r"\W+")
_TAKEN = frozenset({"torch", "F", "rt", "K", "Tensor", "State", "state", "device", "i", "name"})


def identifier(text: str) -> str:
    """`text` as a Python identifier that hides no keyword, builtin or module of step.py."""
    name = _OTHER.sub("_", text).strip("_") or "value"
    if name[0].isdigit():
        name = f"v{name}"
    is_taken = keyword.iskeyword(name) or keyword.issoftkeyword(name) or name in _TAKEN or hasattr(builtins, name)
    return f"{name}_" if is_taken else name


def base_name(name: str) -> str:
    """An identifier from a value name without the number that made it unique in the graph."""
    return identifier(_NUMBER.sub("", name))


def slot_names(names: Iterable[str]) -> dict[str, str]:
    """Identifiers for dotted slot names: the shortest unique ends of at least two components, else the whole."""
    names = list(names)
    chosen: dict[str, str] = {}
    for name in names:
        parts = name.split(".")
        for count in range(min(2, len(parts)), len(parts) + 1):
            end = parts[-count:]
            if sum(other.split(".")[-count:] == end for other in names) == 1:
                break
        short = identifier("_".join(end))
        chosen[name] = short if short not in chosen.values() else identifier(name)
    return chosen


class NamePool:
    """Names in use within one function body."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._users: dict[str, int] = dict.fromkeys(reserved, 1)

    def take(self, base: str) -> str:
        """`base`, or the first free of `base_1`, `base_2`, …; it is in use until `release`."""
        name, number = base, 0
        while name in self._users:
            number += 1
            name = f"{base.rstrip('_')}_{number}"
        self._users[name] = 1
        return name

    def share(self, name: str) -> str:
        """One more value goes by a name in use."""
        self._users[name] += 1
        return name

    def release(self, name: str) -> bool:
        """One value of this name is dead; True if it was the last and the name is free."""
        self._users[name] -= 1
        if self._users[name]:
            return False
        del self._users[name]
        return True

    def alone(self, name: str) -> bool:
        """Whether only one value goes by a name."""
        return self._users[name] == 1
