"""How the tensors of a model lie in the files of its checkpoints, where those are not its `state_dict` as it is.

transformers writes one tensor an expert where its modules hold all experts in one; a model of the zoo is written as the
transformers class that equals it. Each says so by a function from its tensors to those of a file. Here that function
runs on tensors without values, and where it takes views and puts them together, each part of a file's tensor is known
as a part of the model's:

    tensors["experts.3.up.weight"] = weights["experts.up"][3]
    ->  {"tensor": "experts.3.up.weight", "shape": [F, N],
         "parts": [{"state": "experts.up", "shape": [F, N], "from": [3 * F * N, N, 1], "to": [0, N, 1]}]}

`from` and `to` are offset and strides, in elements, in the model's tensor and in the file's. What lies in a file under
its own name and in its own shape is left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mgraph.errors import ModelError
from mgraph.models import Decoder, huggingface

Form = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
"""From the tensors of a model, by name, to those of a file."""


@dataclass(frozen=True)
class CheckpointForm:
    """What the files of a model's checkpoints hold: the layout of the tensors, and the text of its config.json."""

    layout: list[dict[str, Any]] = field(default_factory=list)
    configuration: str | None = None


def checkpoint_form(module: nn.Module, names: Sequence[str], configuration: str | None) -> CheckpointForm:
    """The form of a model that was built, whose tensors have these names, tied ones once.

    `configuration` is the text of the config.json that it was built from, if it was. Raises ModelError where the form
    is made by more than views and concatenation.
    """
    if _is_zoo(module):
        settings = huggingface.configuration(module.config)
        configuration = None if settings is None else json.dumps(settings, indent=2) + "\n"
    form = _form_of(module)
    state = module.state_dict()
    shapes = {name: tuple(state[name].shape) for name in names if name in state}
    return CheckpointForm(layout(form, shapes) if form is not None else [], configuration)


def _is_zoo(module: nn.Module) -> TypeGuard[Decoder]:
    """Whether it is a decoder as it is: a class made from it, or a part of a user's own (a router), may have other
    parameters, or compute something else."""
    ours = (f"{Decoder.__module__.rpartition('.')[0]}.", "torch.")
    return type(module) is Decoder and all(type(part).__module__.startswith(ours) for part in module.modules())


def _form_of(module: nn.Module) -> Form | None:
    """The function that the model's library has for it; None where a checkpoint is the `state_dict`."""
    if _is_zoo(module):
        return lambda weights: huggingface.checkpoint(module.config, weights)
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(module, transformers.PreTrainedModel):
        from transformers.core_model_loading import revert_weight_conversion

        return lambda weights: revert_weight_conversion(module, weights)
    return None


def layout(form: Form, shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    """The tensors of a file whose parts are of the tensors with these names and shapes. Raises ModelError."""
    weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with _Rearranging(weights) as rearranging:
        tensors = form(dict(weights))
    entries = [{"tensor": n, "shape": list(t.shape), "parts": rearranging.parts(n, t)} for n, t in tensors.items()]
    return [entry for entry in entries if not _is_itself(entry, shapes)]


@dataclass(frozen=True)
class _Placed:
    """A part of a new tensor: where it lies there, and the view that was put there."""

    shape: tuple[int, ...]
    place: tuple[int, ...]
    view: Tensor


class _Rearranging(TorchFunctionMode):
    """While entered, remembers what concatenations are made of; a copy is the view that it would be a copy of."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {_storage(tensor): name for name, tensor in weights.items()}
        self.made: dict[int, list[_Placed]] = {}
        self.kept: list[Tensor] = list(weights.values())  # a storage that is freed may give its number to another

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.contiguous, Tensor.clone):
            return args[0]
        result = func(*args, **kwargs)
        if func in (torch.cat, torch.stack):
            self._remember(result, args, kwargs, stacked=func is torch.stack)
        return result

    def _remember(self, result: Tensor, args: Any, kwargs: Any, *, stacked: bool) -> None:
        tensors = args[0] if args else kwargs["tensors"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        places = result.unbind(dim) if stacked else result.split([t.shape[dim] for t in tensors], dim)
        self.made[_storage(result)] = [
            _Placed(tuple(p.shape), (p.storage_offset(), *p.stride()), t) for p, t in zip(places, tensors, strict=True)
        ]
        self.kept += [result, *tensors]

    def parts(self, name: str, tensor: Tensor) -> list[dict[str, Any]]:
        """What a tensor of a file is made of."""
        placed = self.made.get(_storage(tensor))
        if placed is None:
            plain = torch.empty(tensor.shape, device="meta")
            placed = [_Placed(tuple(tensor.shape), (0, *plain.stride()), tensor)]
        elif not tensor.is_contiguous() or tensor.numel() != sum(part.view.numel() for part in placed):
            raise _unknown(name)
        if any(_storage(part.view) not in self.names for part in placed):
            raise _unknown(name)
        return [
            {
                "state": self.names[_storage(part.view)],
                "shape": list(part.shape),
                "from": [part.view.storage_offset(), *part.view.stride()],
                "to": list(part.place),
            }
            for part in placed
        ]


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _is_itself(entry: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a tensor of a file is a whole one of the model under its own name."""
    (first, *others) = entry["parts"]
    same = entry["tensor"] == first["state"] and tuple(entry["shape"]) == shapes[first["state"]]
    return same and not others and first["from"] == first["to"]


def _unknown(name: str) -> ModelError:
    return ModelError(
        f"the tensor '{name}' of the model's checkpoints is computed, not put together from parts of its parameters",
        None,
        "convert the weights to the names and shapes of the model's state_dict",
    )
