"""Cases of attention over a paged cache (A3): single tokens of one and of many requests, and chunks of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.cases_attention import flex
from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import paged_attention
from mgraph.codegen.triton.paged_attention import PagedAttention, Tuning, tunings
from mgraph.runtime.kernels import DTYPES
from mgraph.runtime.paged import paged_attention as on_torch

BLOCK = 16
FEW_BYTES = 256e6
"""What is less is to be as fast as the best peer; what is more, as a copy."""


def inputs(
    problem: PagedAttention, lengths: Sequence[int], new: int, longest: int
) -> Callable[[torch.device], tuple[Any, ...]]:
    """Requests of `new` tokens each, which have `lengths` rows of the cache then, in blocks in any order; tables have
    places for `longest`, if that is more."""

    def make(device: torch.device) -> tuple[Any, ...]:
        requests, width, dtype = len(lengths), -(-max(lengths) // BLOCK), DTYPES[problem.dtype]
        blocks = torch.zeros(requests, max(width, longest // BLOCK), dtype=torch.int32, device=device)
        blocks[:, :width] = (torch.randperm(requests * width, device=device) + 1).view(requests, width)
        rows = (requests * width + 1) * BLOCK
        q = torch.randn(requests * new, problem.heads, problem.width, device=device).to(dtype)
        widths = (problem.width, problem.value_width)
        caches = (torch.randn(rows, problem.groups, width, device=device).to(dtype) for width in widths)
        starts = torch.arange(requests + 1, device=device, dtype=torch.int32) * new
        sinks = (torch.randn(problem.heads, device=device).to(dtype),) if problem.sinks else ()
        return q, *caches, starts, torch.tensor(lengths, dtype=torch.int32, device=device), blocks, *sinks

    return make


def reference(problem: PagedAttention) -> Callable[..., tuple[Tensor]]:
    """The runtime's own form in float64, request by request."""

    def run(
        q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, blocks: Tensor, *sinks: Tensor
    ) -> tuple[Tensor]:
        options = {"scale": problem.scale, "window": problem.window or None, "softcap": problem.softcap or None}
        out = []
        for begin, end, length, table in zip(starts[:-1], starts[1:], lengths, blocks, strict=True):
            own = table[: -(-int(length) // BLOCK)].long()
            caches = (cache.view(-1, BLOCK, *cache.shape[1:])[own].double().flatten(0, 1) for cache in (keys, values))
            alone = (
                torch.stack([begin - begin, end - begin]),
                length[None],
                torch.arange(len(own), device=q.device)[None],
            )
            given = (q[begin:end].double(), *caches, *alone, *(sink.double() for sink in sinks))
            out.append(on_torch(*given, block_size=BLOCK, **options))  # type: ignore[arg-type]
        return (torch.cat(out),)

    return run


def contiguous(requests: int, new: int, length: int, seen: int, attention: Callable[..., Any]) -> Callable[..., Tensor]:
    """torch's attention on rows that lie together already: how fast it would be without blocks, and without sinks. Of
    single tokens with a window it is handed what they see alone."""
    length = seen if new == 1 else length

    def run(q: Tensor, keys: Tensor, values: Tensor, *_: Tensor) -> Tensor:
        rows = requests * length
        k, v = (t[:rows].view(requests, length, *t.shape[1:]).transpose(1, 2) for t in (keys, values))
        heads = q.view(requests, new, *q.shape[1:]).transpose(1, 2)
        more: dict[str, Any] = {}
        if new > 1:
            more["attn_mask"] = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(length - new)
        return cast(Tensor, attention(heads, k, v, **more, enable_gqa=True))

    return run


def flex_attention(*given: Tensor, **options: Any) -> Any:
    """torch's FlexAttention, to be compiled."""
    return flex().flex_attention(*given, **options)


def case(
    name: str,
    problem: PagedAttention,
    requests: int,
    new: int,
    length: int,
    ways: Mapping[str, Tuning] | None = None,
    longest: int = 0,
    least: int = 0,
    any_order: bool = False,
) -> Case:
    """A case; the cache is what must be read. Lengths of requests are evenly from `length` to `least`, if given: the
    longest first, as the engine has them, or in `any_order`."""
    lengths = [length] * requests
    if least:
        lengths = [length - (length - least) * at // (requests - 1) for at in range(requests)]
    if any_order:
        lengths = [lengths[7 * at % requests] for at in range(requests)]
        assert gcd(7, requests) == 1, "of each length one"
    seen = [min(each, problem.window + new - 1) if problem.window else each for each in lengths]
    item = DTYPES[problem.dtype].itemsize
    widths = problem.width + problem.value_width
    pairs = sum(problem.heads * new * (each - (new - 1) / 2) for each in seen)
    size = item * widths * sum(each * problem.groups + new * problem.heads for each in seen)
    shape = (requests, new, length, seen[0])
    peers = {} if least else {"sdpa without blocks": contiguous(*shape, F.scaled_dot_product_attention)}
    if peers and new == 1 and not problem.window and size < FEW_BYTES:
        peers["compiled flex without blocks"] = contiguous(*shape, flex_attention)
    return Case(
        id=name,
        workload=f"{requests} requests, {new} new of {length} tokens"
        + f", the least of {least}" * bool(least)
        + ", in any order" * any_order
        + f", tables for {longest}" * bool(longest)
        + f", {problem}",
        spec=paged_attention.forward("attend", problem, ways),
        inputs=inputs(problem, lengths, new, longest),
        reference=reference(problem),
        narrow=True,
        peers=peers,
        bytes=size,
        bound=1e-2,
        flops=2 * pairs * widths if new > 16 else 0.0,
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
        for requests in (1, 16, 64, 256)
        for length in (1024, 4096, 32768)
    ),
    case("A3-1-odd", LLAMA_8B, 1, 1, 4001),
    case("A3-16-odd", LLAMA_8B, 16, 1, 1001),
    case("A3-10x1k", LLAMA_8B, 10, 1, 1024),
    case("A3-12x2k", LLAMA_8B, 12, 1, 2048),
    case("A3-long-8b", LLAMA_8B, 1, 1, 65536),
    case("A3-many-8b", LLAMA_8B, 128, 1, 2048),
    case("A3-ragged-8b", LLAMA_8B, 128, 1, 2560, least=16),
    case("A3-ragged-any", LLAMA_8B, 128, 1, 2560, least=16, any_order=True),
    case("A3-ragged-48", LLAMA_8B, 48, 1, 2560, least=16),
    case("A3-ragged-few", LLAMA_8B, 12, 1, 4096, least=64),
    case("A3-window", GPT_OSS, 128, 1, 2048),
    case("A3-chunk-8b", LLAMA_8B, 2, 512, 4096),
]
SINGLES = [Tuning(16, keys, warps, stages) for keys, warps, stages in ((64, 4, 3), (64, 4, 2), (32, 4, 4), (128, 4, 2))]
LONGS = [
    Tuning(16, keys, warps, stages, per_sm)
    for keys, warps, stages, per_sm in ((128, 4, 5, 1), (128, 8, 5, 1), (64, 4, 9, 1), (64, 2, 7, 2))
]
NARROW_LONGS = [
    Tuning(16, keys, warps, stages, per_sm)
    for keys, warps, stages, per_sm in ((128, 4, 5, 1), (128, 4, 5, 2), (256, 4, 5, 1), (128, 4, 9, 1), (256, 8, 5, 1))
]
CHUNKS = [
    Tuning(rows, keys, warps, stages, 2)
    for rows, keys, warps, stages in ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3))
]
TUNINGS = [
    case(
        f"A3-{way}-{requests}x{length}-{what}-{cut.keys}-{cut.num_warps}-{cut.num_stages}-{cut.per_sm}",
        problem,
        requests,
        new,
        length,
        {**tunings(problem), way: cut},
        longest,
    )
    for way, what, problem, cuts, shapes in (
        ("single", "8b", LLAMA_8B, SINGLES, ((1, 1, 512, 0), (128, 1, 2048, 0))),
        ("long", "8b", LLAMA_8B, LONGS, ((1, 1, 4096, 0), (1, 1, 65536, 0), (16, 1, 1024, 8192))),
        (
            "long",
            "1b",
            LLAMA_1B,
            NARROW_LONGS,
            ((1, 1, 512, 8192), (1, 1, 4096, 0), (1, 1, 65536, 0), (16, 1, 4096, 0)),
        ),
        ("chunk", "8b", LLAMA_8B, CHUNKS, ((2, 512, 4096, 0),)),
    )
    for requests, new, length, longest in shapes
    for cut in cuts
]
