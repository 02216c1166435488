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
from benchmarks.gpu import cases_experts as experts
from benchmarks.gpu import cases_few_rows as few
from benchmarks.gpu import cases_glu as glu
from benchmarks.gpu import cases_likeliest as likeliest
from benchmarks.gpu import cases_loss as loss
from benchmarks.gpu import cases_moe as moe
from benchmarks.gpu import cases_norm as norm
from benchmarks.gpu import cases_paged as paged
from benchmarks.gpu import cases_region as region
from benchmarks.gpu import cases_rope as rope
from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import RmsNorm, rms_norm
from mgraph.codegen.triton.attention_problem import Attention
from mgraph.codegen.triton.few_rows import FewRows
from mgraph.codegen.triton.glu import Glu
from mgraph.codegen.triton.moe_rows import MoeRows

LAYER = experts.Layer(37, 136, 72, 16, 4)


WINDOWED = Attention("bf16", 64, 64, 0.125, True, 48, more=(("sinks", "bf16"),))
NARROW = Attention("bf16", 80, 16, 80**-0.5, True)
PAGED = replace(paged.LLAMA_8B, heads=8, groups=2)
DOCUMENTS = Attention("bf16", 128, 128, 128**-0.5, True, more=(("segments", "i64"),))
FEW = rope._problem(1)
TURNS = Glu(1368, 1, "bf16", "silu", spaced=True)


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
    adamw.norm_case("small", [(37, 130), (7,), (1001,)]),
    append.case("append", append.LLAMA_8B, 3, 19),
    append.case("append-norm", append.QWEN3_8B, 5, 19),
    *attention.cases("window", "sinks and window 48", WINDOWED, attention.Sizes(1, 4, 2, 201)),
    *attention.cases("documents", "documents", DOCUMENTS, attention.Sizes(2, 4, 2, 130, 40)),
    *attention.cases("narrow", "narrow values", NARROW, attention.Sizes(1, 4, 2, 77)),
    embedding.case(133, 61, 136),
    experts.router_case(37),
    experts.router_grad_case(37),
    experts.units_case("small", LAYER),
    experts.units_grad_case("small", LAYER),
    experts.product_case("product", LAYER, experts.down_of(LAYER)),
    experts.product_case("product-back", LAYER, experts.back_of(LAYER)),
    experts.outer_case("outer-before", LAYER, experts.outers_of(LAYER)[0]),
    experts.outer_case("outer-after", LAYER, experts.outers_of(LAYER)[1]),
    few.case("odd", FewRows(136, 333, "bf16"), 3),
    few.case("odd-units", FewRows(136, 333, "bf16", glu=Glu(333, 1, "bf16", "silu")), 1),
    glu.forward_case("odd", (7, 1368), glu._problem((7, 1368), "silu")),
    glu.backward_case("odd", (7, 1368), glu._problem((7, 1368), "silu")),
    glu.joined_case("odd", (7, 1368), glu._problem((7, 1368), "silu")),
    glu.forward_case("odd-turns", (7, 1368), TURNS),
    glu.joined_case("odd-turns", (7, 1368), TURNS),
    likeliest.case(3, 1001),
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
    paged.case("paged-chunk", replace(paged.GPT_OSS, heads=8, groups=2), 2, 19, 177),
    region.case("region-cap", "bf16", 7, [(1, 1001)], region._capped, lambda x: torch.tanh(x / 30.0) * 30.0),
    region.case("region-softmax", "f32", 7, [(1, 333)], region._softmax, lambda x: torch.softmax(x * 0.125, -1)),
    rope.case("rope", FEW, 2048),
    rope.join_case("rope-join", (2, 1, 1), 2048),
    rope.joined_case("rope-joined", (2, 1, 1), 2048),
    rope.norm_case("norm-rope", 1, 2048, backward=False),
    rope.norm_case("norm-rope-grad", 1, 2048, backward=True),
]
