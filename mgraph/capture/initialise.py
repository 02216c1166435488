"""Building a model without making its weights: shapes, recorded initialisation, and values of small constants.

The factory runs inside `recorder.recording`. Afterwards every parameter is a fake tensor (shape and dtype only) and
every buffer a real one if it is small, so that the exporter sees the constants that a forward computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mgraph.capture.frames import error_frame
from mgraph.capture.recorder import SMALL, Record, Recorder, recording
from mgraph.errors import MgraphError, ModelError
from mgraph.ir.graph import InitCall


@dataclass(frozen=True)
class Built:
    """A model of fake parameters and real small buffers, and the initialisation program of each tensor by name.

    A tied parameter stands once in `inits`, under its first name; `aliases` maps every name to the first one.
    """

    module: nn.Module
    inits: dict[str, tuple[InitCall, ...]]
    aliases: dict[str, str]


def build(factory: Callable[[], Any], where: str) -> Built:
    """Run a model factory; `where` names it in errors. Raises ModelError where the factory or a recording fails."""
    with recording() as recorder:
        module = _run(factory, where)
    inits: dict[str, tuple[InitCall, ...]] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in _tensors(module):
        aliases[name] = first.setdefault(id(tensor), name)
        if aliases[name] == name:
            inits[name] = _program(name, tensor, recorder)
    _make_fake(module)
    return Built(module, inits, aliases)


def _run(factory: Callable[[], Any], where: str) -> nn.Module:
    try:
        module = factory()
    except MgraphError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's constructor raises is theirs to see
        frame = error_frame(error)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"building the model failed: {type(error).__name__}: {reason}",
            str(frame) if frame else where,
            "construct the model once in plain Python; tensors of more than "
            f"{SMALL} elements have no values while it is built",
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"the factory returned {type(module).__name__}, not an nn.Module", where, "return the model")
    return module


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _program(name: str, tensor: Tensor, recorder: Recorder) -> tuple[InitCall, ...]:
    record = recorder.record(tensor) if recorder.known(tensor) else Record(tensor.untyped_storage(), None)
    if not tensor.is_meta and not record.random and record.calls != ():
        return values_program(tensor)
    if record.calls:
        return record.calls
    if record.calls == ():
        raise ModelError(
            f"'{name}' is never initialised", None, "give it values in the constructor, for example nn.init.normal_"
        )
    raise ModelError(
        f"the initialisation of '{name}' cannot be recorded: {record.lost_by or 'it is not made by torch factories'}"
        " leaves no program of in-place calls",
        record.lost_at or None,
        "initialise whole tensors with normal_, uniform_, zeros_, fill_ or nn.init functions made of them; "
        f"computed values are kept up to {SMALL} elements",
    )


def values_program(tensor: Tensor) -> tuple[InitCall, ...]:
    """The program that gives a small real tensor its values (row-major)."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.numel() and bool((flat == flat[0]).all()):
        value = flat[0].item()
        return (("zeros_",),) if value == 0 and str(value) != "-0.0" else (("fill_", value),)
    return (("copy_", tuple(flat.tolist())),)


def _make_fake(module: nn.Module) -> None:
    """Swap each parameter for a fake one of the same shape, once per parameter, so that ties hold; likewise for
    buffers that have no values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    made: dict[int, Tensor] = {}
    with mode:
        for part in module.modules():
            for slots in (part._parameters, part._buffers):
                for name, tensor in slots.items():
                    if tensor is None or (slots is part._buffers and not tensor.is_meta):
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = _fake(tensor)
                    slots[name] = made[id(tensor)]  # type: ignore[assignment]


def _fake(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
