"""The dense decoder: grouped-query attention, rotary positions, RMS norm, gated MLP (the Llama family)."""

from __future__ import annotations

from .config import ModelConfig
from .layers import Decoder, GatedMLP


class Dense(Decoder):
    """Every token passes through one gated MLP a layer. `forward(tokens, position_ids=None)` gives logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, GatedMLP)
