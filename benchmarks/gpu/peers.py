"""How others train the same model on one GPU: eager PyTorch, torch.compile, transformers with Liger's kernels.

Parameters and gradients are in the model's dtype, AdamW runs on f32 masters with f32 moments, as a package has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.training_models import Batch, Shape

LR = 1e-4
Step = Callable[[Batch], Tensor]
"""Trains a step on a batch; the loss, on the device."""


class Masters:
    """AdamW on f32 copies of low-precision parameters, as a package has it; on the parameters where they are f32.

    Distributed tensors and others are updated apart, since torch's fused kernels take no mixed lists.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        kinds: dict[type, list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault(type(parameter.data), []).append(parameter)
        self.groups = [_Group(held, device) for held in kinds.values()]

    def step(self) -> None:
        """One update from the gradients of the parameters, which are dropped."""
        for group in self.groups:
            group.step()


class _Group:
    """Parameters of one kind."""

    def __init__(self, parameters: list[nn.Parameter], device: torch.device) -> None:
        self.parameters = parameters
        self.low = [p for p in parameters if p.dtype != torch.float32]
        copies = {id(p): p.detach().float().clone() for p in self.low}
        self.copies = [copies[id(p)] for p in self.low]
        for copy in self.copies:
            copy.grad = torch.zeros_like(copy)
        trained = [copies.get(id(p), p) for p in parameters]
        self.optimizer = torch.optim.AdamW(
            trained, lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
        )

    @torch.no_grad()
    def step(self) -> None:
        _copy([c.grad for c in self.copies], [p.grad for p in self.low])
        self.optimizer.step()
        _copy([p.data for p in self.low], self.copies)
        for parameter in self.parameters:
            parameter.grad = None


def _copy(targets: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> None:
    """Copy lists; distributed tensors have no fused form of it."""
    if all(type(t) is Tensor for t in targets) and targets:
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        assert target is not None and source is not None
        target.copy_(source)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy, in f32."""
    logits = model(batch[0])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


def plain(shape: Shape, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, mode: str) -> Step:
    """The zoo's model, eager (`mode` "") or compiled with a mode of torch.compile; the loss is compiled with it."""
    torch._dynamo.reset()
    model = shape.make().to(device)
    for name, parameter in model.named_parameters():  # buffers stay f32, as a package has them
        parameter.data = weights[name].to(device, dtype)
    optimizer = Masters(model.parameters(), device)
    run: Callable[[nn.Module, Batch], Tensor] = loss_of
    if mode:
        run = torch.compile(loss_of, mode=None if mode == "default" else mode)

    def step(batch: Batch) -> Tensor:
        loss = run(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


_NAMES = {
    "embed.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    "head.": "lm_head.",
    ".attn_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".attn.": ".self_attn.",
    ".ffn.": ".mlp.",
}


def _renamed(name: str) -> str:
    """A dense decoder's parameter as transformers' Llama calls it."""
    for ours, theirs in _NAMES.items():
        if name.startswith(ours):
            name = theirs + name[len(ours) :]
            break
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs) if ours.startswith(".") else name
    *head, kind, weight = name.split(".")
    return ".".join([*head, f"{kind}_proj" if kind in ("q", "k", "v", "o", "gate", "up", "down") else kind, weight])


def liger(shape: Shape, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Step:
    """transformers' Llama with Liger's kernels: rotary embedding, norms, gated unit, fused linear and cross entropy."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found]
    from transformers import LlamaConfig, LlamaForCausalLM

    apply_liger_kernel_to_llama(rope=True, swiglu=True, rms_norm=True, fused_linear_cross_entropy=True)
    wide: dict[str, Any] = shape.changes
    ours = shape.make_empty()
    config = LlamaConfig(
        vocab_size=wide["vocab_size"],
        hidden_size=wide["d_model"],
        intermediate_size=wide["d_ff"],
        num_hidden_layers=wide["num_layers"],
        num_attention_heads=wide["num_heads"],
        num_key_value_heads=wide["num_kv_heads"],
        head_dim=wide["head_width"],
        rms_norm_eps=ours.config.norm_eps,
        tie_word_embeddings=False,
        max_position_embeddings=shape.length,
        rope_parameters={"rope_type": "default", "rope_theta": ours.config.rope_theta},
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(device)
    missing = model.load_state_dict({_renamed(n): t for n, t in weights.items()}, strict=False)
    assert not missing.unexpected_keys and not missing.missing_keys, missing
    model.to(dtype).train()
    optimizer = Masters(model.parameters(), device)

    def step(batch: Batch) -> Tensor:
        loss = model(input_ids=batch[0], labels=batch[1], shift_labels=batch[1]).loss
        loss.backward()
        optimizer.step()
        return torch.as_tensor(loss).detach()

    return step
