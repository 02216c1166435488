"""A small module written by hand: four layers with forward and backward functions, in-place accumulators, a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mgraph.ir.graph import Module
from mgraph.ir.parser import parse_module

LAYERS = 4

HEAD = """mgraph-ir 1
module "mlp"
dim B 1..
dim S 1..64
state @embed: f32[11, 6] = param trainable init [["normal_", 0.0, 0.5]]
state @layers.{0..3}.up.weight: f32[8, 6] = param trainable init [["normal_", 0.0, 0.5]]
state @layers.{0..3}.down.weight: f32[6, 8] = param trainable init [["normal_", 0.0, 0.5]]
state @embed.grad: f32[11, 6] = grad transient init [["zeros_"]]
state @layers.{0..3}.up.weight.grad: f32[8, 6] = grad transient init [["zeros_"]]
state @layers.{0..3}.down.weight.grad: f32[6, 8] = grad transient init [["zeros_"]]
state @loss: f32[] = scalar transient init [["zeros_"]]
state @step: i64[] = scalar init [["zeros_"]]
"""

LAYER_FWD = """
func @layer.fwd(%x: f32[B, S, 6]; %up.weight: f32[8, 6], %down.weight: f32[6, 8]) static (scale) {
  %up: f32[B, S, 8] = aten.linear.default(%x, %up.weight) forward at "layers.*.up" "mlp.py":10 by capture
  %tanh: f32[B, S, 8] = aten.tanh.default(%up) forward at "layers.*" "mlp.py":11 by capture
  %down: f32[B, S, 6] = aten.linear.default(%tanh, %down.weight) forward at "layers.*.down" "mlp.py":12 by capture
  %scaled: f32[B, S, 6] = aten.mul.Scalar(%down) {other = $scale} forward at "layers.*" "mlp.py":13 by capture
  %y: f32[B, S, 6] = aten.add.Tensor(%x, %scaled) forward at "layers.*" "mlp.py":13 by capture
  return %y, %x, %tanh
}
"""

LAYER_BWD = """
func @layer.bwd(%x: f32[B, S, 6], %tanh: f32[B, S, 8], %dy: f32[B, S, 6]; %up.weight: f32[8, 6], \
%down.weight: f32[6, 8], %grad.up.weight: f32[8, 6], %grad.down.weight: f32[6, 8]) static (scale) {
  %dscaled: f32[B, S, 6] = aten.mul.Scalar(%dy) {other = $scale} backward at "layers.*" "mlp.py":13 by autodiff
  %dtanh: f32[B, S, 8] = aten.matmul.default(%dscaled, %down.weight) backward at "layers.*.down" "mlp.py":12 by autodiff
  %rows: f32[B*S, 6] = reshape(%dscaled) {shape = [B*S, 6]} backward at "layers.*.down" "mlp.py":12 by autodiff
  %turned: f32[6, B*S] = aten.t.default(%rows) backward at "layers.*.down" "mlp.py":12 by autodiff
  %flat: f32[B*S, 8] = reshape(%tanh) {shape = [B*S, 8]} backward at "layers.*.down" "mlp.py":12 by autodiff
  %ddown: f32[6, 8] = aten.mm.default(%turned, %flat) backward at "layers.*.down" "mlp.py":12 by autodiff
  %dup: f32[B, S, 8] = aten.tanh_backward.default(%dtanh, %tanh) backward at "layers.*" "mlp.py":11 by autodiff
  %dx: f32[B, S, 6] = aten.matmul.default(%dup, %up.weight) backward at "layers.*.up" "mlp.py":10 by autodiff
  %rows_1: f32[B*S, 8] = reshape(%dup) {shape = [B*S, 8]} backward at "layers.*.up" "mlp.py":10 by autodiff
  %turned_1: f32[8, B*S] = aten.t.default(%rows_1) backward at "layers.*.up" "mlp.py":10 by autodiff
  %flat_1: f32[B*S, 6] = reshape(%x) {shape = [B*S, 6]} backward at "layers.*.up" "mlp.py":10 by autodiff
  %dup_weight: f32[8, 6] = aten.mm.default(%turned_1, %flat_1) backward at "layers.*.up" "mlp.py":10 by autodiff
  %new_up: f32[8, 6] = accumulate_(%grad.up.weight, %dup_weight) backward at "layers.*.up" "mlp.py":10 by autodiff
  %new_down: f32[6, 8] = accumulate_(%grad.down.weight, %ddown) backward at "layers.*.down" "mlp.py":12 by autodiff
  %sum: f32[B, S, 6] = aten.add.Tensor(%dy, %dx) backward at "layers.*" "mlp.py":13 by autodiff
  return %sum, %new_up, %new_down
}
"""


def _microbatch(scales: tuple[float, ...]) -> str:
    by = 'at "" "mlp.py":20 by capture'
    lines = [
        "func @microbatch(%tokens: i64[B, S]) {",
        f"  %h_0: f32[B, S, 6] = aten.embedding.default(@embed, %tokens) forward {by}",
    ]
    for i in range(LAYERS):
        slots = f"@layers.{i}.up.weight, @layers.{i}.down.weight"
        lines.append(
            f"  %h_{i + 1}, %x_{i}, %tanh_{i} = call @layer.fwd(%h_{i}; {slots}) "
            f'{{static.scale = {scales[i]}}} forward at "layers.{i}" "mlp.py":21 by capture'
        )
    lines += [
        f"  %square: f32[B, S, 6] = aten.square.default(%h_{LAYERS}) forward {by}",
        f"  %loss_sum: f32[] = aten.sum.default(%square) forward {by}",
        f"  %total: f32[] = accumulate_(@loss, %loss_sum) forward {by}",
        f"  %d_{LAYERS}: f32[B, S, 6] = aten.mul.Scalar(%h_{LAYERS}) {{other = 2}} backward {by}",
    ]
    for i in reversed(range(LAYERS)):
        weights = f"@layers.{i}.up.weight, @layers.{i}.down.weight"
        slots = f"{weights}, @layers.{i}.up.weight.grad, @layers.{i}.down.weight.grad"
        lines.append(
            f"  %d_{i}, %gu_{i}, %gd_{i} = call @layer.bwd(%x_{i}, %tanh_{i}, %d_{i + 1}; {slots}) "
            f'{{static.scale = {scales[i]}}} backward at "layers.{i}" "mlp.py":21 by autodiff'
        )
    results = ", ".join(["%total", "%g_embed", *(f"%gu_{i}, %gd_{i}" for i in range(LAYERS))])
    attrs = "{num_weights = 11, padding_idx = -1, scale_grad_by_freq = false}"
    lines += [
        f"  %d_embed: f32[11, 6] = aten.embedding_dense_backward.default(%d_0, %tokens) {attrs} backward {by}",
        f"  %g_embed: f32[11, 6] = accumulate_(@embed.grad, %d_embed) backward {by}",
        f"  return %loss_sum, {results}",
        "}",
    ]
    return "\n".join(lines)


ADVANCE = """
func @advance(%by: i64[]) {
  %next: i64[] = aten.add.Tensor(@step, %by) optimizer at "" "mlp.py":30 by capture
  return %next, %next
}
"""


def module(scales: tuple[float, ...] = (0.5,) * LAYERS) -> Module:
    """The module; layer i scales its branch by `scales[i]`, a static attribute of its calls."""
    updates = ", ".join(f"@layers.{i}.{n}.weight.grad" for i in range(LAYERS) for n in ("up", "down"))
    entries = (
        f"\nentry microbatch = @microbatch -> (loss_sum) updates (@loss, @embed.grad, {updates})\n"
        "entry advance = @advance -> (step) updates (@step)\n"
    )
    return parse_module(HEAD + LAYER_FWD + LAYER_BWD + "\n" + _microbatch(scales) + "\n" + ADVANCE + entries)


def state(of: Module) -> dict[str, Tensor]:
    """Random parameters, zeros elsewhere."""
    made: dict[str, Any] = {}
    for name, entry in of.state.items():
        shape = [int(d) for d in entry.type.shape]
        made[name] = torch.randn(shape) / 2 if entry.trainable else torch.zeros(shape)
    return {**made, "step": torch.tensor(3)}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Independent copies."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
