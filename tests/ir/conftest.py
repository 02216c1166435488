"""A valid module that uses every feature of the IR, as text and parsed."""

from __future__ import annotations

import pytest

from mgraph.ir.graph import Module
from mgraph.ir.parser import parse_module

SAMPLE = """\
mgraph-ir 1
module "sample"
dim B 1..
dim S 2..4096
dim R 0.. ragged <= 2*B*S by bound
axis dp = *
axis tp = 4
axis ep = dp*tp
fact "S % tp == 0" proved
fact "B*S >= 2"
state @layers.{0..1}.norm.weight: f32[64] = param trainable init [["fill_", 1.0]]
state @layers.{0..1}.norm.weight.grad: f32[64] = grad transient init [["zeros_"]]
state @rope.cos: f32[S, 16] = buffer init [["normal_", 0.0, 0.02], ["mul_", 0.5], ["clamp_", -1, 1]]
state @norm.master: f32[64] = master seed layers.0.norm.weight init [["copy_from", "layers.0.norm.weight"]]
state @inverse: f32[3] = buffer init [["copy_", [1.0, 0.5, 0.25]]]
state @moment: f32[64] = moment init [["zeros_"]]
state @step: i64[] = scalar init [["zeros_"]]
state @cache: bf16[B, S, 64] = cache transient init [["zeros_"]]

func @layer(%x: f32[B, S, 64], %cos: f32[S, 16]; %norm.weight: f32[64]) static (window) {
  %y: f32[B, S, 64], %rstd: f32[B, S, 1] = rms_norm(%x, %norm.weight) {eps = 1e-05, round = "normed"} \
forward at "layers.*.norm" "models/layers.py":31 by capture
  %cut: f32[B, S, 64] = aten.slice.Tensor(%y) {dim = 1, end = $window} \
forward at "layers.*.attn" "models/layers.py":32 by capture
  %flat: f32[B*S, (2 32)] = reshape(%cut) {shape = [B*S, 64]} \
forward at "layers.*.mlp" "models/layers.py":33 by raise-glu
  %stored: bf16[B*S, 64]<pad[B*S, 128] as f8e4m3 scale f8e8m0[1, 32]> = cast(%flat) {dtype = bf16} \
forward at "layers.*.mlp" "models/layers.py":34 by quantize
  %ragged: f32[R, 64]{tp=S(1)} = aten.index_select.default(%flat, %rstd) {dim = 0} \
forward at "layers.*.mlp" "models/layers.py":35 by capture
  return %y, %rstd
}

func @main(%tokens: i64[B, S], %h: f32[B, S, 64], %part: f32[B, 64]{dp=P(sum)}) {
  %h_1: f32[B, S, 64], %r: f32[B, S, 1] = call @layer(%h, @rope.cos; @layers.0.norm.weight) {static.window = 128} \
forward at "layers.0" "models/model.py":10 by outline
  %h_2, %r_1 = call @layer(%h_1, @rope.cos; @layers.1.norm.weight) {static.window = 64} \
forward at "layers.1" "models/model.py":10 by outline
  %begun: pending<f32[B, 64]> = all_reduce_start(%part) {axis = "dp"} \
backward at "head" "models/model.py":12 by data-parallel
  %sum: f32[B, 64] = wait(%begun) backward at "head" "models/model.py":12 by data-parallel
  %grad: f32[64] = accumulate(@layers.0.norm.weight.grad, @moment) \
backward at "layers.0.norm" "models/model.py":13 by autodiff
  %grad_1: f32[64] = accumulate(@layers.1.norm.weight.grad, @moment) \
backward at "layers.1.norm" "models/model.py":14 by autodiff
  return %h_2, %sum, %grad, %grad_1
}

entry microbatch = @main -> (h, total) updates (@layers.{0..1}.norm.weight.grad)
"""


@pytest.fixture
def sample_text() -> str:
    """The text of the sample module."""
    return SAMPLE


@pytest.fixture
def sample() -> Module:
    """The sample module, freshly parsed."""
    return parse_module(SAMPLE)
