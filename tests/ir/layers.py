"""A module of layers over two mesh axes, at any depth and size, that uses every kind of collective."""

from __future__ import annotations

from mgraph.ir.graph import Module
from mgraph.ir.parser import parse_module

BY = 'forward at "layers.*" "model.py"'
TEXT = """\
mgraph-ir 1
module "layers"
dim B 1..
dim S 2..4096
axis dp = {dp}
axis tp = {tp}
axis all = dp*tp
fact "S % tp == 0"
state @up: f32[16, 32]{{tp=S(1)}} = param trainable init [["zeros_"]]
state @grad: f32[16, 32]{{dp=P(sum), tp=S(1)}} = grad transient init [["zeros_"]]

func @ahead(%x: f32[B, S, 16]{{dp=S(0), tp=S(1)}}) {{
  %whole: pending<f32[B, S, 16]{{dp=S(0)}}> = all_gather_start(%x) {{axis = "tp", dim = 1}} {by}:10 by test
  return %whole
}}

func @layer(%whole: pending<f32[B, S, 16]{{dp=S(0)}}>; %up: f32[16, 32]{{tp=S(1)}}) {{
  %h: f32[B, S, 16]{{dp=S(0)}} = wait(%whole) {by}:11 by test
  %a: f32[B, S, 32]{{dp=S(0), tp=S(2)}} = aten.matmul.default(%h, %up) {by}:12 by test
  %flat: f32[B, S, 16]{{dp=S(0), tp=P(sum)}} = aten.matmul.default(%a, %a) {by}:13 by test
  %y: f32[B, S, 16]{{dp=S(0), tp=S(1)}} = reduce_scatter(%flat) {{axis = "tp", dim = 1}} {by}:14 by test
  return %y
}}

func @main(%tokens: f32[B, S, 16]{{dp=S(0)}}) {{
  %h_0: f32[B, S, 16]{{dp=S(0), tp=S(1)}} = aten.slice.Tensor(%tokens) {by}:20 by test
{calls}
  %turned: f32[B, S, 16]{{dp=S(0), tp=S(2)}} = all_to_all(%h_{depth}) \
{{axis = "tp", join_dim = 1, split_dim = 2}} {by}:21 by test
  %part: f32[]{{all=P(sum)}} = aten.sum.default(%turned) {by}:22 by test
  %sum: pending<f32[]> = all_reduce_start(%part) {{axis = "all"}} {by}:23 by test
  %double: f32[16, 32]{{dp=P(sum), tp=S(1)}} = aten.mul.Scalar(@grad) {{other = 2}} {by}:24 by test
  %loss: f32[] = wait(%sum) {by}:25 by test
  return %loss
}}

entry main = @main -> (loss)
"""


def layers(depth: int = 3, dp: int | str = 2, tp: int = 4) -> Module:
    """The module. Each layer gathers its input over tp, begun in a function of its own, and scatters its output."""
    calls = [
        f"  %p_{i}: pending<f32[B, S, 16]{{dp=S(0)}}> = call @ahead(%h_{i}) {BY}:19 by test\n"
        f"  %h_{i + 1}: f32[B, S, 16]{{dp=S(0), tp=S(1)}} = call @layer(%p_{i}; @up) {BY}:20 by test"
        for i in range(depth)
    ]
    return parse_module(TEXT.format(dp=dp, tp=tp, by=BY, calls="\n".join(calls), depth=depth))
