"""Documents that share a row, in transformers models: what makes each token see its own document only.

The classes leave the making of masks to `transformers.masking_utils`, which looks up a function for the kind of
attention and hands it a predicate over indices. While a forward is traced here, the predicate has one more part:
segment_ids are equal at query and key. Left to itself, the library guesses from position_ids where documents begin, in
classes that pass them on; here it is told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from mgraph.errors import ModelError

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_LEAVE_OUT = "leave --packed out: one document a row"


def is_transformers(model: nn.Module) -> bool:
    """Whether the model is a class of transformers."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def check_layers(model: nn.Module, where: str) -> None:
    """Raise ModelError where layers of a transformers model mix tokens by other means than a mask over the row."""
    config: Any = model.config
    if config.is_encoder_decoder:
        raise ModelError(f"{type(model).__name__} reads two rows, of an encoder and a decoder", where, _LEAVE_OUT)
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _KNOWN_LAYERS
    convolutions = [name for name, part in model.named_modules() if isinstance(part, nn.Conv1d)]
    found = [f"{kind} layers" for kind in sorted(kinds)] or [f"the convolution '{name}'" for name in convolutions]
    if found:
        raise ModelError(f"{found[0]} of {type(model).__name__} would mix the documents of a row", where, _LEAVE_OUT)


@contextmanager
def own_segments(model: nn.Module, segment_ids: Tensor, where: str) -> Iterator[None]:
    """Within, masks that a transformers model makes part the row by segment_ids i64[B, S].

    Raises ModelError if it makes none.
    """
    from transformers import masking_utils as masks

    interface: Any = type(masks.ALL_MASK_ATTENTION_FUNCTIONS)()
    made = []

    def parted(make: Callable[..., Any]) -> Callable[..., Any]:
        def mask(*, mask_function: Any, **options: Any) -> Any:
            made.append(mask_function)
            both = masks.and_masks(mask_function, masks.packed_sequence_mask_function(segment_ids))
            # A mask that says no more than causal, or nothing, may be skipped; this one says more.
            skips = {name: False for name in options if name.endswith("_skip")}
            return make(mask_function=both, **{**options, **skips})

        return mask

    for name in list(interface):
        interface[name] = parted(interface[name])
    with (
        patch.object(masks, "ALL_MASK_ATTENTION_FUNCTIONS", interface),
        patch.object(masks, "find_packed_sequence_indices", lambda position_ids: None),
    ):
        yield
    if not made:
        raise ModelError(
            f"{type(model).__name__} makes its masks itself: the documents of a row would see each other",
            where,
            _LEAVE_OUT,
        )
