"""Cases of attention over a paged cache (A3): single tokens of one and of many requests, and chunks of prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import paged_attention
from mgraph.codegen.triton.paged_attention import PagedAttention, Tuning, tunings
from mgraph.runtime.kernels import DTYPES
from mgraph.runtime.paged import paged_attention as on_torch

BLOCK = 16


def inputs(
    problem: PagedAttention, requests: int, new: int, length: int, longest: int = 0
) -> Callable[[torch.device], tuple[Any, ...]]:
    """`requests` of `new` tokens each, which have `length` rows of the cache then, in blocks in any order; tables have
    places for `longest`, if that is more."""

    def make(device: torch.device) -> tuple[Any, ...]:
        width, dtype = -(-length // BLOCK), DTYPES[problem.dtype]
        blocks = torch.zeros(requests, max(width, longest // BLOCK), dtype=torch.int32, device=device)
        blocks[:, :width] = (torch.randperm(requests * width, device=device) + 1).view(requests, width)
        rows = (requests * width + 1) * BLOCK
        q = torch.randn(requests * new, problem.heads, problem.width, device=device).to(dtype)
        caches = (torch.randn(rows, problem.groups, problem.width, device=device).to(dtype) for _ in range(2))
        starts = torch.arange(requests + 1, device=device, dtype=torch.int32) * new
        lengths = torch.full((requests,), length, device=device, dtype=torch.int32)
        sinks = (torch.randn(problem.heads, device=device).to(dtype),) if problem.sinks else ()
        return q, *caches, starts, lengths, blocks, *sinks

    return make


def reference(problem: PagedAttention) -> Callable[..., tuple[Tensor]]:
    """The runtime's own form, request by request."""

    def run(*given: Tensor) -> tuple[Tensor]:
        softcap = problem.softcap or None
        options = {"block_size": BLOCK, "scale": problem.scale, "window": problem.window or None, "softcap": softcap}
        return (on_torch(*given, **options),)  # type: ignore[arg-type]

    return run


def contiguous(requests: int, new: int, length: int, seen: int) -> Callable[..., Tensor]:
    """torch's attention on rows that lie together already: how fast it would be without blocks, and without sinks. Of
    single tokens with a window it is handed what they see alone."""
    length = seen if new == 1 else length

    def run(q: Tensor, keys: Tensor, values: Tensor, *_: Tensor) -> Tensor:
        rows = requests * length
        k, v = (t[:rows].view(requests, length, *t.shape[1:]).transpose(1, 2) for t in (keys, values))
        heads = q.view(requests, new, *q.shape[1:]).transpose(1, 2)
        mask = None
        if new > 1:
            mask = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(length - new)
        return F.scaled_dot_product_attention(heads, k, v, attn_mask=mask, enable_gqa=True)

    return run


def case(
    name: str,
    problem: PagedAttention,
    requests: int,
    new: int,
    length: int,
    cuts: tuple[Tuning, Tuning] | None = None,
    longest: int = 0,
) -> Case:
    """A case; the cache is what must be read."""
    seen = min(length, problem.window + new - 1) if problem.window else length
    item = DTYPES[problem.dtype].itemsize
    pairs = requests * problem.heads * new * (seen - (new - 1) / 2)
    return Case(
        id=name,
        workload=f"{requests} requests, {new} new of {length} tokens"
        + f", tables for {longest}" * bool(longest)
        + f", {problem}",
        spec=paged_attention.forward(name.replace("-", "_"), problem, cuts),
        inputs=inputs(problem, requests, new, length, longest),
        reference=reference(problem),
        peers={"sdpa without blocks": contiguous(requests, new, length, seen)},
        bytes=item * problem.width * (2 * requests * seen * problem.groups + 2 * requests * new * problem.heads),
        bound=1e-2,
        flops=4 * pairs * problem.width if new > 16 else 0.0,
    )


LLAMA_1B = PagedAttention("bf16", 32, 8, 64, 64, BLOCK, 64**-0.5)
LLAMA_8B = PagedAttention("bf16", 32, 8, 128, 128, BLOCK, 128**-0.5)
GPT_OSS = PagedAttention("bf16", 64, 8, 64, 64, BLOCK, 64**-0.5, 128, sinks="bf16")
CASES = [
    case("A3-one-1b", LLAMA_1B, 1, 1, 512),
    case("A3-one-8b", LLAMA_8B, 1, 1, 512),
    case("A3-one-8b-room", LLAMA_8B, 1, 1, 512, longest=8192),
    *(
        case(f"A3-{requests}x{length // 1024}k", LLAMA_8B, requests, 1, length)
        for requests, length in ((1, 1024), (1, 4096), (1, 32768), (16, 1024), (16, 4096), (64, 1024), (64, 4096))
    ),
    case("A3-long-8b", LLAMA_8B, 1, 1, 65536),
    case("A3-many-8b", LLAMA_8B, 128, 1, 2048),
    case("A3-window", GPT_OSS, 128, 1, 2048),
    case("A3-chunk-8b", LLAMA_8B, 2, 512, 4096),
]
SINGLES = [Tuning(16, keys, warps, stages) for keys, warps, stages in ((64, 4, 3), (64, 4, 2), (32, 4, 4), (128, 4, 2))]
CHUNKS = [
    Tuning(rows, keys, warps, stages)
    for rows, keys, warps, stages in ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3))
]
TUNINGS = [
    *(
        case(f"A3-{what}-{cut.keys}-{cut.num_warps}-{cut.num_stages}", LLAMA_8B, *sizes, (cut, tunings(LLAMA_8B)[1]))
        for what, sizes in (("one", (1, 1, 512)), ("long", (1, 1, 65536)), ("many", (128, 1, 2048)))
        for cut in SINGLES
    ),
    *(
        case(f"A3-chunk-{cut.rows}-{cut.keys}-{cut.num_stages}", LLAMA_8B, 2, 512, 4096, (tunings(LLAMA_8B)[0], cut))
        for cut in CHUNKS
    ),
]
