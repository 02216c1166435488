"""How others train the same model on one GPU: eager PyTorch, torch.compile, transformers compiled or with Liger.

Parameters and gradients are in the model's dtype, AdamW runs on f32 masters with f32 moments, as a package has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.training_models import Batch, Shape
from mgraph.models import ModelConfig
from mgraph.models.huggingface import checkpoint, configuration

LR, BETAS = 1e-4, (0.9, 0.95)
Step = Callable[[Batch], Tensor]
"""Trains a step on a batch; the loss, on the device."""


class Masters:
    """AdamW on f32 masters of parameters, which become `dtype`, as a package has it; on themselves where that is f32.

    Masters are the parameters as they are given, so these are to be f32. Distributed tensors and others are updated
    apart, since torch's fused kernels take no mixed lists. With `update` torch.compile makes the update and both copies
    in one pass, where torch's fused kernel takes gradients of the masters' dtype alone.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], device: torch.device, dtype: torch.dtype, update: bool = False
    ) -> None:
        kinds: dict[type, list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault(type(parameter.data), []).append(parameter)
        made = _Compiled if update else _Group
        self.groups = [made(held, device, dtype) for held in kinds.values()]

    def step(self) -> None:
        """One update from the gradients of the parameters, which are dropped."""
        for group in self.groups:
            group.step()


class _Group:
    """Parameters of one kind."""

    def __init__(self, parameters: list[nn.Parameter], device: torch.device, dtype: torch.dtype) -> None:
        assert all(p.dtype is torch.float32 for p in parameters), "masters would have been rounded"
        self.parameters = parameters
        self.low = parameters if dtype is not torch.float32 else []
        copies = {id(p): p.detach().clone() for p in self.low}
        for parameter in self.low:  # whole: of a distributed tensor, new data would say one dtype and have another
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to(dtype)))
        self.copies = [copies[id(p)] for p in self.low]
        self._begin([copies.get(id(p), p) for p in parameters], device)

    def _begin(self, trained: list[Tensor], device: torch.device) -> None:
        for copy in self.copies:
            copy.grad = torch.zeros_like(copy)
        self.optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, weight_decay=0.0, fused=device.type == "cuda")

    @torch.no_grad()
    def step(self) -> None:
        self._update()
        for parameter in self.parameters:
            parameter.grad = None

    def _update(self) -> None:
        _copy([c.grad for c in self.copies], [p.grad for p in self.low])
        self.optimizer.step()
        _copy([p.data for p in self.low], self.copies)


def update(
    masters: Sequence[Tensor],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: tuple[Sequence[Tensor], Sequence[Tensor]],
    count: Tensor,
) -> None:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) without decay, on f32 masters, from gradients of the
    parameters, which become the masters in their dtype; `count` f32[] is that of this step."""
    first_part, second_part = 1 - BETAS[0] ** count, 1 - BETAS[1] ** count
    for master, low, gradient, first, second in zip(masters, parameters, gradients, *moments, strict=True):
        wide = gradient.float()
        first.lerp_(wide, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(wide, wide, value=1 - BETAS[1])
        master.sub_(LR * (first / first_part) / ((second / second_part).sqrt() + 1e-8))
        low.copy_(master)


class _Compiled(_Group):
    """Parameters of one kind that are not f32, whose update is compiled whole."""

    def _begin(self, trained: list[Tensor], device: torch.device) -> None:
        assert self.low, "f32 has no masters beside"
        first, second = ([torch.zeros_like(copy) for copy in self.copies] for _ in range(2))
        self._moments = first, second
        self._count = torch.zeros((), device=device)
        self._compiled = torch.compile(update, dynamic=False)

    def _update(self) -> None:
        self._count += 1
        gradients = [p.grad for p in self.low if p.grad is not None]
        self._compiled(self.copies, [p.data for p in self.low], gradients, self._moments, self._count)


def _copy(targets: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> None:
    """Copy lists; distributed tensors have no fused form of it."""
    if all(type(t) is Tensor for t in targets) and targets:
        torch._foreach_copy_([t for t in targets if t is not None], [s for s in sources if s is not None])
        return
    for target, source in zip(targets, sources, strict=True):
        assert target is not None and source is not None
        target.copy_(source)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy, in f32."""
    logits = model(batch[0])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


def plain(
    shape: Shape,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    mode: str,
    update: bool = False,
) -> Trained:
    """The zoo's model, eager (`mode` "") or compiled with a mode of torch.compile; the loss is compiled with it, and
    with `update` the optimizer. `weights` has parameters, and buffers if need be."""
    if mode:
        torch._dynamo.reset()
    with torch.device(device):
        model = shape.make()
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].to(device, copy=True)
    for name, buffer in model.named_buffers():
        buffer.copy_(weights.get(name, buffer))
    return Trained(model, dtype, device, mode, update)


class Trained:
    """A model in f32 that maps tokens to logits, as a step, eager or compiled with a mode of torch.compile. Parameters
    become `dtype`; buffers stay f32, as a package has them."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, device: torch.device, mode: str, update: bool = False
    ) -> None:
        self._model = model
        self._optimizer = Masters(model.parameters(), device, dtype, update)
        self._loss: Callable[[nn.Module, Batch], Tensor] = loss_of
        if mode:
            self._loss = torch.compile(loss_of, mode=None if mode == "default" else mode)

    def __call__(self, batch: Batch) -> Tensor:
        """Train a step; the loss."""
        loss = self._loss(self._model, batch)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """The gradients of the loss, with no update."""
        self._loss(self._model, batch).backward()
        found = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}
        self._model.zero_grad(set_to_none=True)
        return found


def _packed(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of transformers' model in memory, where a layer's experts are in two: gate and up, [E, 2 F, H], and
    down, [E, H, F]. A checkpoint has a tensor for every expert."""
    tensors = {
        name.replace("block_sparse_moe", "mlp"): tensor
        for name, tensor in checkpoint(config, weights).items()
        if ".experts." not in name
    }
    for layer in range(config.num_layers if config.num_experts else 0):
        gate, up, down = (weights[f"layers.{layer}.ffn.{part}.weight"] for part in ("gate", "up", "down"))
        place = f"model.layers.{layer}.mlp.experts"
        tensors[f"{place}.gate_up_proj"] = torch.cat((gate, up), -1).transpose(1, 2)
        tensors[f"{place}.down_proj"] = down.transpose(1, 2)
    return tensors


def _transformers(shape: Shape, weights: Mapping[str, Tensor], device: torch.device) -> Any:
    """The class of transformers that computes the model, its experts by torch's grouped product, with these weights in
    f32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = shape.make_empty().config
    settings = configuration(config)
    assert settings is not None, "a class of transformers computes it"
    kind = settings.pop("model_type")
    made = AutoConfig.for_model(kind, **settings, max_position_embeddings=shape.length, use_cache=False)
    experts = {"experts_implementation": "grouped_mm"} if config.num_experts else {}
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            made, attn_implementation="sdpa", dtype=torch.float32, **experts
        )
    parameters = [name for name, _ in shape.make_empty().named_parameters()]
    model.load_state_dict(_packed(config, {name: weights[name].to(device) for name in parameters}))
    return model.train()


def transformers_compiled(
    shape: Shape, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Step:
    """transformers' model under torch.compile, the loss with it."""
    torch._dynamo.reset()
    model = _transformers(shape, weights, device)
    optimizer = Masters(model.parameters(), device, dtype)

    @torch.compile
    def run(batch: Batch) -> Tensor:
        logits = model(input_ids=batch[0]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())

    def step(batch: Batch) -> Tensor:
        loss: Tensor = run(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def liger(
    shape: Shape, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, *, experts: bool
) -> Step:
    """transformers' model with Liger's kernels: rotary embedding, norms, gated units, fused linear and cross entropy.
    `experts`: those of Liger, too, whose first step tries tunings for minutes; else torch's grouped product."""
    import liger_kernel.transformers as kernels  # type: ignore[import-not-found]

    kind = (configuration(shape.make_empty().config) or {})["model_type"]
    apply = getattr(kernels, f"apply_liger_kernel_to_{kind}")
    units = experts or not shape.make_empty().config.num_experts
    apply(rope=True, swiglu=units, rms_norm=True, fused_linear_cross_entropy=True)
    model = _transformers(shape, weights, device)
    optimizer = Masters(model.parameters(), device, dtype)

    def step(batch: Batch) -> Tensor:
        loss = model(input_ids=batch[0], labels=batch[1], shift_labels=batch[1]).loss
        loss.backward()
        optimizer.step()
        return torch.as_tensor(loss).detach()

    return step
