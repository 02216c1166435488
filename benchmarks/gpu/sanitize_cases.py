"""Cases of `benchmarks.gpu.sanitize`: one or two of each family of kernels; rows, and where a kernel takes it widths,
that no block divides."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu import cases_adamw as adamw
from benchmarks.gpu import cases_append as append
from benchmarks.gpu import cases_attention as attention
from benchmarks.gpu import cases_embedding as embedding
from benchmarks.gpu import cases_exchange as exchange
from benchmarks.gpu import cases_experts as experts
from benchmarks.gpu import cases_few_rows as few
from benchmarks.gpu import cases_glu as glu
from benchmarks.gpu import cases_loss as loss
from benchmarks.gpu import cases_moe as moe
from benchmarks.gpu import cases_norm as norm
from benchmarks.gpu import cases_paged as paged
from benchmarks.gpu import cases_region as region
from benchmarks.gpu import cases_rope as rope
from benchmarks.gpu import cases_sampling as sampling
from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import RmsNorm, expert_glu, grouped, rms_norm
from mgraph.codegen.triton.attention_problem import Attention
from mgraph.codegen.triton.exchange import Exchange, Places
from mgraph.codegen.triton.expert_sum import ExpertSum
from mgraph.codegen.triton.few_rows import FewRows
from mgraph.codegen.triton.glu import Glu
from mgraph.codegen.triton.moe_order import Order
from mgraph.codegen.triton.moe_rows import MoeRows

LAYER = experts.Layer(37, 136, 72, 16, 4)
FITTING = experts.Layer(131, 256, 128, 5, 2, 6.0)
"""Widths that large tiles divide; an expert with more than one of them, and others with next to nothing."""
OVER = experts.Layer(131, 136, 128, 5, 2, 6.0)
"""Products of whose results large tiles go over the edge."""
UNDER = experts.Layer(131, 128, 136, 5, 2, 6.0)
"""Units of which they do, and products whose sums no step divides."""
SOME = experts.Layer(75, 384, 64, 64, 4)
"""More tiles of 128 columns than a GPU has multiprocessors."""
SUM = ExpertSum(experts.down_of(LAYER), LAYER.choices)
WINDOWED = Attention("bf16", 64, 64, 0.125, True, 48, more=(("sinks", "bf16"),))
NARROW = Attention("bf16", 80, 16, 80**-0.5, True)
PAGED = replace(paged.LLAMA_8B, heads=8, groups=2)
SOFTCAP = Attention("bf16", 64, 64, 0.125, True, softcap=3.0)
DOCUMENTS = Attention("bf16", 128, 128, 128**-0.5, True, more=(("segments", "i64"),))
FEW = rope._problem(1)
TURNS = Glu(1368, 1, "bf16", "silu", spaced=True)


def product_cases(name: str, layer: experts.Layer, turns: bool = False) -> list[Case]:
    """Products after units, also summed by token, and of gradients before them, in large tiles, whatever is in them;
    `turns`: in few programs, which take several."""
    down, back = experts.down_of(layer), experts.back_of(layer)
    cuts = [replace(cut, programs=1) if turns else cut for cut in (grouped.tuning(down), grouped.tuning(back))]
    return [
        experts.product_case(f"product-{name}", layer, down, cuts[0]),
        experts.product_case(f"product-back-{name}", layer, back, cuts[1]),
        experts.sum_case(f"sum-{name}", layer, ExpertSum(down, layer.choices), cuts[0]),
    ]


def units_cases(name: str, layer: experts.Layer, turns: bool = False) -> list[Case]:
    """Units and their gradients, as `product_cases`."""
    forward, backward = expert_glu.forward_cuts(layer.units)[-1][1], expert_glu.backward_tuning(layer.units)
    cuts = [replace(cut, programs=1) if turns else cut for cut in (forward, backward)]
    return [experts.units_case(name, layer, cuts[0]), experts.units_grad_case(name, layer, cuts[1])]


def outer_cases(name: str, layer: experts.Layer) -> list[Case]:
    """Gradients of matrices, one side of which is taken from tokens, or none; their tiles are always large."""
    before, after = experts.outers_of(layer)
    return [
        experts.outer_case(f"outer-before-{name}", layer, before),
        experts.outer_case(f"outer-after-{name}", layer, after),
        experts.outer_case(f"outer-{name}", layer, replace(before, taken="")),
    ]


def rms_norm_case(rows: int, size: int) -> Case:
    """A norm without a residual, of a width that no vector divides."""
    problem = RmsNorm(size, "bf16", "bf16", norm.EPS, round="normed")

    def reference(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.EPS)
        return x * rstd * weight, rstd

    return Case(
        id="rms-norm",
        workload=f"{rows} x {size} bf16",
        spec=rms_norm.forward("rms_norm", problem),
        inputs=lambda device: norm.draw(rows, size, 1, device),
        reference=reference,
        bound=5e-3,
    )


CASES = [
    adamw.case("small", *adamw.decoder_shapes(1, 66, 30, 133, 101), masters=True),
    adamw.case("small-sums", *adamw.decoder_shapes(1, 66, 30, 133, 101), masters=True, sums=True),
    adamw.norm_case("small", [(37, 130), (7,), (1001,)]),
    append.case("append", append.LLAMA_8B, 3, 19),
    append.case("append-norm", append.QWEN3_8B, 5, 19),
    *attention.cases("window", "sinks and window 48", WINDOWED, attention.Sizes(1, 4, 2, 201)),
    *attention.cases("softcap", "softcap 3", SOFTCAP, attention.Sizes(1, 4, 2, 145)),
    *attention.cases("documents", "documents", DOCUMENTS, attention.Sizes(2, 4, 2, 130, 40)),
    *attention.cases("narrow", "narrow values", NARROW, attention.Sizes(1, 4, 2, 77)),
    embedding.case(133, 61, 136),
    exchange.places_case("places", 333, Places(9, 1, 3)),
    exchange.places_case("places-many", 4359, Places(64, 2, 16)),
    exchange.pack_case("pack-odd", 37, Places(9, 1, 3), Exchange(264, 3, "bf16", fill=0)),
    exchange.pack_case("pack-numbers", 133, Places(8, 2, 4), Exchange(2, 4, "i64", fill=-1, part=0.35)),
    exchange.unpack_case("unpack-odd", 37, Places(9, 1, 3), Exchange(2568, 3, "bf16")),
    exchange.unpack_case("unpack-part", 133, Places(8, 2, 4), Exchange(6, 4, "f32", part=0.35)),
    exchange.weighted_case("sums-odd", 37, Exchange(264, 3, "bf16", None, 0.0, True)),
    experts.order_case(333, Order(9, 3)),
    experts.order_case(37, Order(130, 2, others=True)),
    experts.router_case(37),
    experts.router_grad_case(37),
    experts.units_case("small", LAYER),
    experts.units_grad_case("small", LAYER),
    experts.product_case("product", LAYER, experts.down_of(LAYER)),
    experts.product_case("product-back", LAYER, experts.back_of(LAYER)),
    experts.sum_case("sum", LAYER, SUM),
    experts.sum_case("sum-ended", LAYER, replace(SUM, ended=True)),
    *product_cases("large", FITTING),
    *product_cases("over", OVER),
    *product_cases("ragged", UNDER),
    *product_cases("turns", SOME, turns=True),
    *units_cases("large", FITTING),
    *units_cases("over", UNDER),
    *units_cases("turns", replace(SOME, width=SOME.inner, inner=SOME.width), turns=True),
    *outer_cases("odd", LAYER),
    *outer_cases("over", OVER),
    *outer_cases("large", replace(FITTING, width=136, inner=256)),
    few.case("odd", FewRows(136, 333, "bf16"), 3),
    few.case("odd-units", FewRows(136, 333, "bf16", glu=Glu(333, 1, "bf16", "silu")), 1),
    glu.forward_case("odd", (7, 1368), glu._problem((7, 1368), "silu")),
    glu.backward_case("odd", (7, 1368), glu._problem((7, 1368), "silu")),
    glu.joined_case("odd", (7, 1368), glu._problem((7, 1368), "silu")),
    glu.forward_case("odd-turns", (7, 1368), TURNS),
    glu.joined_case("odd-turns", (7, 1368), TURNS),
    *glu.relu_cases("relu-odd", (7, 1369)),
    *glu.relu_cases("relu-narrow", (3, 5, 66)),
    sampling.likeliest_case(3, 1001),
    sampling.keys_case(3, 1001),
    sampling.left_case(3, 1001),
    loss.both_case("odd", 7, loss.ODD),
    loss.loss_case("padded", 7, loss.PADDED),
    loss.gradient_case("padded", 7, loss.PADDED),
    moe.combine_case("odd", 37, moe.ODD),
    moe.gradient_case("odd", 37, moe.ODD),
    moe.dispatch_grad_case("two", 37, MoeRows(264, 4, "bf16", more=True)),
    norm.case("K1", 7, 2048),
    norm.case("K2", 7, 2048),
    rms_norm_case(7, 130),
    paged.case("paged-few", PAGED, 2, 1, 500),
    paged.case("paged-some", PAGED, 1, 1, 1000),
    paged.case("paged-long", PAGED, 2, 1, 777, longest=4096),
    paged.case("paged-narrow", replace(PAGED, value_width=16), 2, 1, 77),
    paged.case("paged-window", replace(paged.GPT_OSS, heads=8, groups=2), 3, 1, 177),
    paged.case("paged-chunk", replace(paged.GPT_OSS, heads=8, groups=2), 2, 19, 177),
    region.case("region-cap", "bf16", 7, [(1, 1001)], region._capped, lambda x: torch.tanh(x / 30.0) * 30.0),
    region.case("region-softmax", "f32", 7, [(1, 333)], region._softmax, lambda x: torch.softmax(x * 0.125, -1)),
    rope.case("rope", FEW, 2048),
    rope.join_case("rope-join", (2, 1, 1), 2048),
    rope.joined_case("rope-joined", (2, 1, 1), 2048),
    rope.norm_case("norm-rope", 1, 2048, backward=False),
    rope.norm_case("norm-rope-grad", 1, 2048, backward=True),
]
