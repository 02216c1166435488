"""Builds that the end-to-end tests share: a package per model, its eager twin, and the eager model in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from mgraph import models
from mgraph.compiler import Compilation, compile_package
from mgraph.recipe import Recipe

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
ZOO: dict[str, Callable[[], nn.Module]] = {
    f"{family}-{size}": partial(models.get, family, size)
    for family, sizes in models.SIZES.items()
    for size in sizes
    if "tiny" in size
}
MODELS = ["dense-tiny", "dense-tiny-geglu", "moe-tiny", "llama"]


@dataclass(frozen=True)
class Build:
    """A compiled model: the compilation, the package's directory, and a factory of the eager model."""

    compilation: Compilation
    path: Path
    eager: Callable[[], nn.Module]


def build(name: str, directory: Path, **options: Any) -> Build:
    """Compile a model into a package under `directory`, without GPU kernels."""
    spec, eager = name, ZOO.get(name)
    if eager is None:
        config = directory / "llama" / "config.json"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps(LLAMA))
        spec, eager = f"hf:{config}", llama
    options = {**({} if options.get("purpose") == "serve" else {"beta2": 0.999}), **options}
    recipe = Recipe(model=spec, output=str(directory / f"{name}-package"), arch="none", **options)
    compilation = compile_package(recipe)
    assert compilation.package is not None
    return Build(compilation, compilation.package, eager)


def llama() -> nn.Module:
    """The unmodified transformers class."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "architectures"}))
    model.config.use_cache = False
    return model


def loss_of(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss sum, as the trainer defines it: `count` times a loss of the model's own, which is added to the mean."""
    out = model(tokens)
    logits = getattr(out, "logits", out)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    own = getattr(out, "aux_loss", None)
    return loss if own is None else loss + (labels != -100).sum() * own


def fill(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Give a model the weights of a state."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])


def relative(found: torch.Tensor, expected: torch.Tensor, least: float = 1e-30) -> float:
    """|found - expected| / |expected|, in the 2-norm; `least` is the smallest norm that counts as one."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=least))


def adamw(model: nn.Module, eps: float = 1e-8) -> torch.optim.AdamW:
    """The optimizer that a package has by default: parameters of two dims or more decay by 0.01."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, eps=eps)


def eager_step(model: nn.Module, optimizer: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One clipped step on the mean loss, as `microbatch` and `finish` make it; the loss before it, f32[]."""
    model.zero_grad()
    loss = loss_of(model, tokens, labels) / (labels != -100).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def batches(count: int, batch: int = 3, seq: int = 21, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random tokens and shifted labels, one label of each batch masked."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        rows = torch.randint(256, (batch, seq + 1), generator=generator)
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].clone()
        labels[0, 0] = -100
        made.append((tokens, labels))
    return made


class Lift(TorchDispatchMode):
    """Every cast to a float dtype becomes a cast to float64, and what was made in a smaller one takes part as float64:
    eager PyTorch under the lift of the interpreter."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if dtype is not None and dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        if not func._schema.is_mutable:
            args, kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
