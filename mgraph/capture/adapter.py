"""The module that is really traced: the user's model with a flat signature, and the loss behind it.

Default loss: `labels[b, s]` is the target of position s, -100 is ignored, and so is a position whose `loss_mask` is 0:

    loss_sum = sum over (b, s) of -log softmax(float32(logits[b, s]))[labels[b, s]],    count = number of such (b, s)

A loss of the model's own beside it, such as that of routers, is the output's `aux_loss` f32[]. It is added to the mean,
so `loss_sum` takes count times it; of transformers classes, times their own factor, as they do it themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mgraph.capture import packed, router_losses
from mgraph.capture.source import LossFunction
from mgraph.errors import ModelError

IGNORE_INDEX = -100
_LOSS_INPUTS = ("labels", "loss_mask")


@dataclass(frozen=True)
class InputSpec:
    """One input of the model: dtype, and the shape in ints and sympy expressions over B and S."""

    name: str
    dtype: torch.dtype
    shape: tuple[Any, ...]


def masked_cross_entropy(logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The default loss: logits [B, S, V], `labels` i64[B, S], optional `loss_mask` [B, S] -> sum f32[], count i64[]."""
    labels = batch["labels"]
    if "loss_mask" in batch:
        labels = torch.where(batch["loss_mask"] != 0, labels, IGNORE_INDEX)
    total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
    return total, (labels != IGNORE_INDEX).sum()


def logits_of(outputs: Any) -> Tensor | None:
    """The logits in what a model returned: a tensor, or the `logits` of an output object."""
    found = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    return found if isinstance(found, Tensor) else None


class Adapter(nn.Module):
    """`forward` takes the inputs in the order of `names` and returns the first two or all of `OUTPUTS`."""

    PREFIX = "model"
    """The attribute that holds the user's model: the first part of every module path in the trace."""
    OUTPUTS = ("loss_sum", "count", "logits")

    def __init__(self, model: nn.Module, inputs: tuple[InputSpec, ...], loss: LossFunction | None, where: str) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(i.name for i in inputs)
        self.where = where
        self.loss = loss
        self._masked = False  # whether the masks of a transformers model are given the segments
        self._keywords, self._fixed = self._binding()

    def _binding(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Inputs that the model takes by keyword, and its fixed arguments. `tokens` comes first and has any name."""
        parameters = inspect.signature(self.model.forward).parameters
        candidates = [n for n in self.names if n not in _LOSS_INPUTS]
        if "segment_ids" in candidates and "segment_ids" not in parameters and packed.is_transformers(self.model):
            packed.check_layers(self.model, self.where)
            self._masked = True
            candidates.remove("segment_ids")
        if candidates and candidates[0] == "tokens" and "tokens" not in parameters:
            candidates = candidates[1:]
        missing = [n for n in candidates if n not in parameters and self.loss is None]
        if missing:
            raise ModelError(
                f"forward of {type(self.model).__name__} takes no '{missing[0]}'",
                self.where,
                "leave the input out, or add the argument",
            )
        self._check_required(parameters, candidates)
        fixed = {"use_cache": False} if "use_cache" in parameters else {}
        return tuple(n for n in candidates if n in parameters), fixed

    def _check_required(self, parameters: Mapping[str, inspect.Parameter], given: Sequence[str]) -> None:
        """Every argument without a default is given; the first is the tokens, whatever its name."""
        required = [
            n
            for n, p in parameters.items()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and n not in given
        ]
        if "tokens" in self.names and "tokens" not in given and next(iter(parameters), "") in required[:1]:
            required = required[1:]
        if required:
            raise ModelError(
                f"forward of {type(self.model).__name__} needs '{required[0]}', which is no input",
                self.where,
                "give the argument a default, or define inputs(B, S) in the file and name it there",
            )

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The loss sum, the count of targets, and the logits where the model has them."""
        batch = dict(zip(self.names, inputs, strict=True))
        keywords = {n: batch[n] for n in self._keywords}
        first = () if "tokens" in keywords or "tokens" not in batch else (batch["tokens"],)
        documents = packed.own_segments(self.model, batch["segment_ids"], self.where) if self._masked else nullcontext()
        real = batch["segment_ids"] != 0 if self._masked else None
        with documents, router_losses.traceable(self.model, real):
            outputs = self.model(*first, **keywords, **self._fixed)
        logits = logits_of(outputs)
        if self.loss is not None:
            made = self.loss(outputs, batch)
        else:
            made = self._with_own_loss(masked_cross_entropy(self._checked(outputs, logits), batch), outputs)
        self._check_loss(made)
        return made if logits is None else (*made, logits)

    def _with_own_loss(self, made: tuple[Tensor, Tensor], outputs: Any) -> tuple[Tensor, Tensor]:
        """The loss sum and count, with the model's own loss added to the mean."""
        total, count = made
        own = getattr(outputs, "aux_loss", None)
        if own is None:
            return total, count
        return total + router_losses.weight_of(self.model, outputs, self.where) * own * count, count

    def _check_loss(self, made: Any) -> None:
        scalars = (
            isinstance(made, tuple) and len(made) == 2 and all(isinstance(t, Tensor) and t.dim() == 0 for t in made)
        )
        hint = "return (sum of the losses, number of targets)"
        if not scalars:
            raise ModelError("loss(outputs, batch) must return two 0-d tensors", self.where, hint)
        if not made[0].is_floating_point() or made[1].dtype != torch.int64:
            raise ModelError(f"of loss(outputs, batch), the count must be i64, not {made[1].dtype}", self.where, hint)

    def _checked(self, outputs: Any, logits: Tensor | None) -> Tensor:
        if logits is None or logits.dim() != 3:
            shape = "" if logits is None else f" of rank {logits.dim()}"
            raise ModelError(
                f"forward returned {type(outputs).__name__}{shape}, not logits [B, S, V]",
                self.where,
                "return the logits, or an object with .logits, or define loss(outputs, batch) in the file",
            )
        return logits
