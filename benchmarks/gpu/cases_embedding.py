"""Cases of the embedding's gradient: tokens as text has them, a few of which make up most of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import embedding_grad
from mgraph.codegen.triton.embedding_grad import EmbeddingGrad
from mgraph.runtime import v1 as rt


def draw_tokens(count: int, vocabulary: int) -> Tensor:
    """Tokens whose frequency falls with their rank as 1 / rank; the first is about one in fifteen."""
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (uniform * math.log(vocabulary)).exp().long().clamp(max=vocabulary) - 1


def inputs(tokens: Tensor, vocabulary: int, width: int) -> Callable[[torch.device], tuple[Tensor, ...]]:
    """The total, the gradient, and the tokens sorted."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        total = torch.randn(vocabulary, width, device=device)
        grad = torch.randn(len(tokens), width, device=device).bfloat16()
        return total, grad, *rt.by_token(tokens.to(device))

    return make


def reference(total: Tensor, grad: Tensor, ids: Tensor, order: Tensor) -> tuple[Tensor]:
    """The total with all rows added."""
    return (total.index_add(0, ids, grad[order]),)


def peers(tokens: Tensor) -> Mapping[str, Callable[..., Any]]:
    """Sums by atomic additions, and torch's own gradient; both take the tokens as they come, and torch's sorts them."""
    held: dict[torch.device, Tensor] = {}

    def on(device: torch.device) -> Tensor:
        if device not in held:
            held[device] = tokens.to(device)
        return held[device]

    def index_add(total: Tensor, grad: Tensor, ids: Tensor, order: Tensor) -> Tensor:
        return total.index_add_(0, on(total.device), grad.to(total.dtype))

    def backward(total: Tensor, grad: Tensor, ids: Tensor, order: Tensor) -> Tensor:
        return total.add_(torch.ops.aten.embedding_dense_backward(grad, on(total.device), len(total), -1, False))

    return {"index_add": index_add, "eager": backward}


def case(tokens: int, vocabulary: int, width: int) -> Case:
    """The gradient of so many tokens in bf16, added to an f32 total."""
    drawn = draw_tokens(tokens, vocabulary)
    touched = len(drawn.unique())
    return Case(
        id=f"embedding-{tokens}x{width}",
        workload=f"embedding gradient: {tokens} rows of {width} bf16 onto {touched} of {vocabulary} rows f32, sorted",
        spec=embedding_grad.build(f"embedding_grad_{width}", EmbeddingGrad(width, "bf16")),
        inputs=inputs(drawn, vocabulary, width),
        reference=reference,
        peers=peers(drawn),
        bytes=tokens * width * 2 + 2 * touched * width * 4,
        bound=1e-6,
    )


CASES = [case(16384, 32768, 2048), case(8192, 128256, 4096)]
