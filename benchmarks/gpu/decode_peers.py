"""Decode loops of others for E3: a plain Llama in torch with a static cache under torch.compile, and transformers.

Both have random weights in the dtype asked for, one request, and greedy tokens. A step takes the token that the step
before chose, so nothing waits for the host but the loop itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WARM_UP = 64
"""Steps before those that are timed; transformers' cache counts them, and has room for so many more."""

Config = Mapping[str, Any]
Step = Callable[[Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Attention of one request over a cache of a fixed length."""

    def __init__(self, config: Config, length: int) -> None:
        super().__init__()
        size, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.groups = config["num_key_value_heads"]
        self.width = config.get("head_dim") or size // self.heads
        self.qkv = nn.Linear(size, (self.heads + 2 * self.groups) * self.width, bias=False)
        self.out = nn.Linear(self.heads * self.width, size, bias=False)
        self.keys: Tensor
        self.values: Tensor
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, self.groups, length, self.width))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        """x [1, S, size] at positions `at` [S]; `seen` [S, length] says what each sees."""
        parts = self.qkv(x).view(1, -1, self.heads + 2 * self.groups, self.width).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.groups, self.groups], dim=1)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        self.keys[:, :, at] = k
        self.values[:, :, at] = v
        y = functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen, enable_gqa=True)
        made: Tensor = self.out(y.transpose(1, 2).reshape(1, -1, self.heads * self.width))
        return made


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads rotated by halves."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class Layer(nn.Module):
    """A layer of a Llama, with gate and up in one product."""

    def __init__(self, config: Config, length: int) -> None:
        super().__init__()
        size, wide, eps = config["hidden_size"], config["intermediate_size"], config["rms_norm_eps"]
        self.attention = Attention(config, length)
        self.first, self.second = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.gate_up = nn.Linear(size, 2 * wide, bias=False)
        self.down = nn.Linear(wide, size, bias=False)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        """x [1, S, size]."""
        x = x + self.attention(self.first(x), *rest)
        gate, up = self.gate_up(self.second(x)).chunk(2, -1)
        made: Tensor = x + self.down(functional.silu(gate) * up)
        return made


class Llama(nn.Module):
    """Tokens [1, S] at positions [S] → the likeliest next token [1, 1]."""

    def __init__(self, config: Config, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, length) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        if config.get("tie_word_embeddings"):
            self.head.weight = self.embed.weight
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        places = torch.arange(length)[:, None]
        angles = places * config["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("seen", torch.ones(length, length, dtype=torch.bool).tril())

    def forward(self, tokens: Tensor, at: Tensor) -> Tensor:
        """The likeliest token after the last."""
        x = self.embed(tokens)
        cos, sin, seen = self.cos[at], self.sin[at], self.seen[at]  # type: ignore[index]
        for layer in self.layers:
            x = layer(x, cos, sin, at, seen)
        made: Tensor = self.head(self.norm(x[:, -1:])).argmax(-1)
        return made


def plain_loop(config: Config, length: int, device: torch.device, dtype: torch.dtype, *, compiled: bool = True) -> Step:
    """A step of the plain Llama: (token [1, 1], position [1]) → token."""
    with torch.device(device):
        model = Llama(config, length).to(dtype).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    run = torch.compile(model, mode="reduce-overhead", fullgraph=True) if compiled else model
    return lambda token, at: run(token, at).clone()


def transformers_loop(
    config: Config, length: int, device: torch.device, dtype: torch.dtype, *, compiled: bool = True
) -> Step:
    """A step of transformers' Llama with its static cache, under torch.compile, as its users write it.

    The prompt runs uncompiled. It has to: the cache gets its memory there, and a step that gave it would be compiled
    twice, and be no CUDA graph since what it writes to would be its own.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    known = {k: v for k, v in config.items() if k not in ("architectures", "model_type", "torch_dtype", "dtype")}
    settings = LlamaConfig(**known)
    with torch.device(device):
        model: Any = LlamaForCausalLM(settings)
    model = model.to(dtype).eval()
    cache = StaticCache(config=settings, max_cache_len=length)
    with torch.inference_mode():
        prompt = torch.arange(length // 2, device=device)
        model(prompt[None], past_key_values=cache, position_ids=prompt[None], use_cache=True)

    def step(token: Tensor, at: Tensor) -> Tensor:
        made = model(token, past_key_values=cache, position_ids=at[None], use_cache=True)
        found: Tensor = made.logits[:, -1:].argmax(-1)
        return found

    run = torch.compile(step, mode="reduce-overhead", fullgraph=True) if compiled else step
    return lambda token, at: run(token, at).clone()


def ms_per_token(step: Step, context: int, tokens: int, device: torch.device) -> float:
    """Milliseconds of a step, of `tokens` after a context of a cache as it is."""
    with torch.inference_mode():  # tensors made outside of it would be of another kind, and compiled for once more
        token = torch.ones(1, 1, dtype=torch.long, device=device)
        places = torch.arange(context, context + tokens, device=device).split(1)
        for at in places[:WARM_UP]:  # compiled at the first, captured at the second
            token = step(token, at)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for at in places:
            token = step(token, at)
        end.record()
        torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / len(places)


PEERS = {"plain": plain_loop, "transformers": transformers_loop}
"""A plain Llama, and transformers' with a static cache, both under torch.compile."""
