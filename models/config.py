"""The shape and the options of a decoder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

__all__ = ["Linear", "Llama3", "ModelConfig", "RopeScaling", "Yarn"]


@dataclass(frozen=True)
class Linear:
    """Rotary angles divided by `factor`, as if positions lay closer together."""

    factor: float


@dataclass(frozen=True)
class Llama3:
    """Low rotary frequencies divided by `factor`, high ones kept, a linear blend between (Llama 3.1).

    A frequency is high where `original_length` holds more than `high` of its waves, low where fewer than `low`.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class Yarn:
    """Rotary frequencies blended by the number of turns in `original_length`, cosine and sine made larger.

    Below `slow` turns a frequency is divided by `factor`, above `fast` it is kept; where the blend begins and ends is
    rounded to whole dims if `rounded`.
    """

    factor: float
    original_length: int = 4096
    fast: float = 32.0
    slow: float = 1.0
    rounded: bool = True


RopeScaling = Linear | Llama3 | Yarn

_SIZES = (
    "vocab_size",
    "d_model",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "d_ff",
    "top_k",
    "num_groups",
    "top_groups",
)
_OR_NONE = ("head_width", "window", "num_experts", "shared_d_ff")
"""Sizes of which 0 means that there is none."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a decoder-only transformer; `num_experts` = 0 means a dense one."""

    vocab_size: int = 256
    d_model: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_width: int = 0
    """Width of one attention head; 0: d_model / num_heads."""
    d_ff: int = 176
    """Width of the feed-forward layer; of one expert in a mixture."""
    tie_embeddings: bool = False
    embed_scale: bool = False
    """Multiply embeddings by sqrt(d_model)."""
    init_std: float = 0.02

    # Norms.
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    """Added to the weight of a norm, which then begins at 1 - norm_offset."""
    norm_wide: bool = False
    """Multiply by the weight of a norm in float32 and round afterwards, instead of the other way round."""
    sandwich_norm: bool = False
    """Norms behind attention and feed-forward too, before they are added to the residual stream."""
    qk_norm: bool = False
    """Norms over each head of queries and keys, before the rotation."""

    # Attention.
    qkv_bias: bool = False
    output_bias: bool = False
    attention_scale: float = 0.0
    """Factor of the scores; 0: 1 / sqrt(head width)."""
    window: int = 0
    """Positions that a query sees, itself included, in windowed layers; 0: all before it."""
    window_pattern: int | tuple[bool, ...] = 0
    """Which layers have the window: a flag per layer, or N: all but every N-th; 0: all."""
    sinks: Literal["none", "fixed", "learned"] = "none"
    """A key without a value that each head attends to as well, of score 0 or learned."""
    attention_softcap: float = 0.0
    """Scores s become c tanh(s / c); 0: they stay."""
    logit_softcap: float = 0.0
    """The same for the logits."""

    # Rotary positions.
    rope_theta: float = 10000.0
    local_rope_theta: float = 0.0
    """That of windowed layers, which are then not scaled; 0: as all others."""
    rope_fraction: float = 1.0
    """Part of a head that is rotated: its first dims."""
    rope_interleaved: bool = False
    """Rotate neighbours (2i, 2i + 1), instead of (i, i + half)."""
    rope_scaling: RopeScaling | None = None

    # Feed-forward.
    act: str = "silu"
    """A key of `feed_forward.ACTIVATIONS`; `relu_squared` has no gate."""
    mlp_bias: bool = False
    gate_clamp: float = 0.0
    """Bound of the gate from above and of the other factor from both sides; 0: none."""
    gate_offset: float = 0.0
    """Added to the factor that the gate multiplies."""

    # Experts.
    num_experts: int = 0
    top_k: int = 2
    """Experts a token goes to."""
    router: Literal["softmax", "topk_softmax", "sigmoid"] = "softmax"
    """Scores of experts: softmax over all; softmax over the chosen; each by itself."""
    renormalize: bool = True
    """Divide the weights of the chosen experts by their sum (`topk_softmax` always gives 1)."""
    routed_scale: float = 1.0
    """Factor of the weights."""
    num_groups: int = 1
    """Groups of neighbouring experts; a token goes to experts of its `top_groups` best ones."""
    top_groups: int = 1
    router_bias: bool = False
    selection_bias: bool = False
    """A buffer per expert that counts for the choice but not for the weight: balance without a loss."""
    capacity_factor: float = 0.0
    """Experts take at most ceil(T * K / E * this) of the T tokens of a batch and drop the rest; 0: they take all."""
    capacity_keeps: Literal["weight", "position"] = "weight"
    """A full expert keeps the tokens of largest weight, or the first ones."""
    jitter: float = 0.0
    """In training, the router's input is multiplied by random numbers in 1 - jitter .. 1 + jitter; below 1."""
    choice_jitter: float = 0.0
    """As `jitter`, of the scores by which experts are chosen, and of them alone: weights have no noise."""
    balance_loss: float = 0.0
    """Coefficient of the load-balancing loss; see `router.balance_loss`."""
    z_loss: float = 0.0
    """Coefficient of the mean of logsumexp(router logits)**2."""
    shared_d_ff: int = 0
    """Width of the expert that every token passes through besides; 0: none."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_width or self.d_model // self.num_heads

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that are rotated."""
        return int(self.head_dim * self.rope_fraction)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer, 0 where it sees everything before it."""
        pattern, layers = self.window_pattern, range(1, self.num_layers + 1)
        if isinstance(pattern, int):
            return tuple(self.window if not pattern or layer % pattern else 0 for layer in layers)
        return tuple(self.window if windowed else 0 for windowed in pattern)

    @property
    def has_router_loss(self) -> bool:
        """Whether the model gives a loss besides its logits."""
        return bool(self.num_experts and (self.balance_loss or self.z_loss))

    def __post_init__(self) -> None:
        self._check_words()
        self._check_sizes()
        if (not self.head_width and self.d_model % self.num_heads) or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"d_model {self.d_model} must be a multiple of num_heads {self.num_heads} (or head_width be given), "
                f"and num_heads of num_kv_heads {self.num_kv_heads}"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rope_fraction {self.rope_fraction} rotates {self.rotary_dim} of {self.head_dim} dims; "
                "it must be an even number of them"
            )
        self._check_windows()
        self._check_feed_forward()
        if self.num_experts:
            self._check_experts()
        elif (
            self.shared_d_ff
            or self.balance_loss
            or self.z_loss
            or self.selection_bias
            or self.jitter
            or self.choice_jitter
            or self.capacity_factor
        ):
            raise ValueError(
                "shared_d_ff, balance_loss, z_loss, selection_bias, jitters and capacity_factor need num_experts"
            )

    def _check_windows(self) -> None:
        if isinstance(self.window_pattern, tuple) and len(self.window_pattern) != self.num_layers:
            raise ValueError(f"window_pattern has {len(self.window_pattern)} flags for {self.num_layers} layers")
        if not self.window and (self.window_pattern or self.local_rope_theta):
            raise ValueError("window_pattern and local_rope_theta need a window")

    def _check_feed_forward(self) -> None:
        if self.act == "relu_squared" and (self.gate_clamp or self.gate_offset):
            raise ValueError("relu_squared has no gate: gate_clamp and gate_offset must be 0")

    def _check_experts(self) -> None:
        self._check_router_numbers()
        experts, groups = self.num_experts, self.num_groups
        if not 1 <= self.top_k <= experts:
            raise ValueError(f"top_k {self.top_k} must lie in 1..{experts}, the number of experts")
        if self.top_k == 1 and (self.router == "topk_softmax" or self.renormalize):
            raise ValueError(
                "with top_k 1 the only weight would always be 1: use renormalize=False, and no topk_softmax"
            )
        if self.selection_bias and self.router != "sigmoid":
            raise ValueError(f"selection_bias needs the sigmoid router, not {self.router}")
        if groups == 1:
            return
        if experts % groups or experts // groups < 2:
            raise ValueError(f"{experts} experts do not make {groups} equal groups of two or more")
        if not 1 <= self.top_groups <= groups or self.top_k > self.top_groups * experts // groups:
            raise ValueError(
                f"top_groups {self.top_groups} of {groups} must be fewer, and hold top_k {self.top_k} experts"
            )
        if self.router == "topk_softmax":
            raise ValueError("groups are chosen by scores: num_groups needs the softmax or the sigmoid router")

    def _check_words(self) -> None:
        for name, hint in get_type_hints(ModelConfig).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ValueError(f"{name} is {getattr(self, name)!r}, and must be one of {', '.join(get_args(hint))}")

    def _check_sizes(self) -> None:
        for name in (*_SIZES, *_OR_NONE):
            value, least = getattr(self, name), 0 if name in _OR_NONE else 1
            if not isinstance(value, int) or value < least:
                none = "" if least else ", or 0 for none"
                raise ValueError(f"{name} is {value!r}, and must be a whole number of at least 1{none}")

    def _check_router_numbers(self) -> None:
        for name in ("capacity_factor", "balance_loss", "z_loss"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:  # written so that nan fails too
                raise ValueError(f"{name} is {value}, and must be positive and finite, or 0 for none")
        for name in ("jitter", "choice_jitter"):
            value = getattr(self, name)
            if not 0 <= value < 1:  # from 1 on a factor could be 0, or turn the sign
                raise ValueError(f"{name} is {value}, and must be at least 0, for none, and less than 1")
        if not math.isfinite(self.routed_scale):
            raise ValueError(f"routed_scale is {self.routed_scale}, and must be finite")
