"""Documents that share a row, in transformers models: what makes each token see its own document only.

The classes make their masks with the functions of `transformers.masking_utils`, which guess from position_ids where
documents begin. While a forward is traced here, they are told: documents are where segment_ids are equal. Within one,
the order of the row is that of the positions, so masks need not be written over positions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _KNOWN_LAYERS
    convolutions = [name for name, part in model.named_modules() if isinstance(part, nn.Conv1d)]
    found = [f"{kind} layers" for kind in sorted(kinds)] or [f"the convolution '{name}'" for name in convolutions]
    if found:
        raise ModelError(f"{found[0]} of {type(model).__name__} would mix the documents of a row", where, _LEAVE_OUT)


@contextmanager
def own_segments(model: nn.Module, segment_ids: Tensor, where: str) -> Iterator[None]:
    """Within, masks that a transformers model makes part the row by segment_ids i64[B, S].

    Raises ModelError if it makes none that could.
    """
    from transformers import masking_utils

    asked = []

    def segments(position_ids: Tensor) -> Tensor:
        asked.append(position_ids)
        return segment_ids

    def in_order_of_the_row(mask_function: Any, position_ids: Tensor) -> Any:
        return mask_function

    with (
        patch.object(masking_utils, "find_packed_sequence_indices", segments),
        patch.object(masking_utils, "remap_positions_for_packed_sequence", in_order_of_the_row, create=True),
    ):
        yield
    if not asked:
        raise ModelError(
            f"{type(model).__name__} makes no mask from position_ids: the documents of a row would see each other",
            where,
            _LEAVE_OUT,
        )
