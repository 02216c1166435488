"""The layers of a model (members of its lists), and a way to stand between them and their callers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Forward = Callable[..., Any]
Between = Callable[[str, Forward, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""What is run instead of a layer's `forward`: gets the layer's path, `forward`, the module, and the arguments."""


def outermost_lists(model: nn.Module, least: int) -> dict[str, dict[str, nn.Module]]:
    """Lists of at least `least` layers that lie in no other such list: path → path of a layer → layer.

    A list is any module whose parts are numbered from 0: a ModuleList, or a Sequential.
    """
    found: dict[str, dict[str, nn.Module]] = {}
    for path, part in model.named_modules():
        members = dict(part.named_children())
        numbered = list(members) == [str(i) for i in range(len(members))]
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if numbered and len(members) >= least and not inside and path:
            found[path] = {f"{path}.{name}": member for name, member in members.items()}
    return found


@contextmanager
def between(layers: Mapping[str, nn.Module], run: Between) -> Iterator[None]:
    """While active, `run` is called in place of the `forward` of each of these layers.

    The class is changed, not the layer: torch's tracer may call it through an object of a class derived from it, which
    shares nothing with the layer but its `__dict__`.
    """
    paths = {id(vars(layer)): path for path, layer in layers.items()}
    classes = dict.fromkeys(type(layer) for layer in layers.values())
    own = {kind: vars(kind).get("forward") for kind in classes}
    running: set[int] = set()
    redirected = {kind: _redirected(kind.forward, paths, running, run) for kind in classes}
    try:
        for kind, forward in redirected.items():
            kind.forward = forward
        yield
    finally:
        for kind, before in own.items():
            if before is None:
                del kind.forward
            else:
                kind.forward = before


def _redirected(forward: Forward, paths: Mapping[int, str], running: set[int], run: Between) -> Forward:
    """`running` are the layers that run: a class may call the `forward` that it overrides, with the same layer."""

    def call(module: nn.Module, *args: Any, **keywords: Any) -> Any:
        key = id(vars(module))
        if key not in paths or key in running:
            return forward(module, *args, **keywords)
        running.add(key)
        try:
            return run(paths[key], forward, module, args, keywords)
        finally:
            running.discard(key)

    return call
