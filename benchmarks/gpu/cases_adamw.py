"""Cases of the update of all parameters: AdamW on f32 masters of bf16 params, or f32 params; and the norm before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import adamw, square_sum
from mgraph.codegen.triton.adamw import AdamW
from mgraph.codegen.triton.square_sum import SquareSum

BETAS, EPS, DECAY, LR, STEP = (0.9, 0.95), 1e-8, 0.1, 3e-4, 7
Shape = tuple[int, ...]


def decoder_shapes(layers: int, width: int, keys: int, hidden: int, vocabulary: int) -> tuple[list[Shape], list[Shape]]:
    """The parameters of a dense decoder: those that decay (embedding, head and projections), and the norms."""
    projections = [(width, width), (keys, width), (keys, width), (width, width)]
    projections += [(hidden, width), (hidden, width), (width, hidden)]
    return [(vocabulary, width), *projections * layers, (vocabulary, width)], [(width,)] * (2 * layers + 1)


def inputs(shapes: Sequence[Shape], masters: bool) -> Callable[[torch.device], tuple[Any, ...]]:
    """The lists in the order of the site, then rate, scale (1, so that peers need not know of it), step, finite."""

    def make(device: torch.device) -> tuple[Any, ...]:
        weights = [torch.randn(shape, device=device).mul_(0.02) for shape in shapes]
        firsts = [torch.randn(shape, device=device).mul_(1e-3) for shape in shapes]
        seconds = [torch.rand(shape, device=device).mul_(1e-6) for shape in shapes]
        grads = [torch.randn(shape, device=device).mul_(1e-3) for shape in shapes]
        params = [[weight.bfloat16() for weight in weights]] if masters else []
        scalars = [torch.tensor(LR, device=device), torch.ones((), device=device)]
        scalars += [torch.tensor(STEP, device=device), torch.tensor(True, device=device)]
        return weights, firsts, seconds, *params, grads, *scalars

    return make


def reference(decayed: int) -> Callable[..., tuple[list[Tensor], ...]]:
    """Weights, moments and params by the formula; the first `decayed` of them decay."""

    def update(weights: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor], *rest: Any) -> Any:
        *low, grads, lr, scale, step, _ = rest
        made: list[tuple[Tensor, ...]] = []
        for i, (w, m, v, grad) in enumerate(zip(weights, firsts, seconds, grads, strict=True)):
            g = grad * scale
            m = BETAS[0] * m + (1 - BETAS[0]) * g
            v = BETAS[1] * v + (1 - BETAS[1]) * g * g
            root = (v / (1 - BETAS[1] ** int(step))).sqrt_().add_(EPS)
            w = w * (1 - lr * (DECAY if i < decayed else 0.0)) - lr / (1 - BETAS[0] ** int(step)) * m / root
            made.append((w, m, v, *[w] * len(low)))
        return tuple(list(results) for results in zip(*made, strict=True))

    return update


def with_sums(decayed: int) -> Callable[..., tuple[Any, ...]]:
    """The same, and the sum of the squares of the gradients of those that decay, and of the others."""

    def update(*operands: Any) -> tuple[Any, ...]:
        grads = operands[-5]
        sums = [
            torch.stack([grad.square().sum() for grad in part]).sum() for part in (grads[:decayed], grads[decayed:])
        ]
        return *reference(decayed)(*operands), torch.stack(sums)

    return update


def peer(decayed: int, *, scaled: bool) -> Callable[..., None]:
    """torch's fused optimizer on the weights, one call a group, and a copy of all masters into the params. `scaled`: it
    is handed the scale, as a loss scaler does, and writes the scaled gradients back."""

    update: Any = torch._fused_adamw_

    def run(weights: list[Tensor], firsts: list[Tensor], seconds: list[Tensor], *rest: Any) -> None:
        *low, grads, lr, scale, step, finite = rest
        options: dict[str, Any] = {
            "beta1": BETAS[0],
            "beta2": BETAS[1],
            "eps": EPS,
            "amsgrad": False,
            "maximize": False,
        }
        if scaled:
            options |= {"grad_scale": scale, "found_inf": finite.logical_not().float()}
        for part, decay in ((slice(0, decayed), DECAY), (slice(decayed, None), 0.0)):
            lists = [listed[part] for listed in (weights, grads, firsts, seconds)]
            steps = [step.float()] * len(lists[0])
            if steps:
                update(*lists, [], steps, lr=lr, weight_decay=decay, **options)
        for params in low:
            torch._foreach_copy_(params, weights)

    return run


def case(name: str, decayed: Sequence[Shape], others: Sequence[Shape], *, masters: bool, sums: bool = False) -> Case:
    """The update of parameters of these shapes; `masters`: they are f32 masters of bf16 params; `sums`: it gives the
    sums of the squares of the gradients of those that decay, and of the others, which its peers do not."""
    shapes = [*decayed, *others]
    groups = tuple((decay, 1.0, len(part)) for decay, part in ((DECAY, decayed), (0.0, others)) if part)
    problem = AdamW(groups, "f32", "f32", "bf16" if masters else "", *BETAS, EPS, sums=(0, 1) if sums else ())
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    kind = "f32 masters of bf16 params" if masters else "f32 params"
    peers = {"fused": peer(len(decayed), scaled=False), "fused, scaling": peer(len(decayed), scaled=True)}
    return Case(
        id=f"AdamW-{name}",
        workload=f"AdamW on {elements / 1e6:.0f}M {kind} in {len(shapes)} tensors, f32 gradients, two decays"
        + ", sums of squares" * sums,
        spec=adamw.build(f"adamw_{name.replace('-', '_').replace('.', '_')}", problem),
        inputs=inputs(shapes, masters),
        reference=(with_sums if sums else reference)(len(decayed)),
        peers={} if sums else peers,
        bytes=elements * (7 * 4 + 2 * masters),
        bound=3e-3 if masters else 1e-6,  # a bf16 param is the master, rounded
    )


def norm_case(name: str, shapes: Sequence[Shape]) -> Case:
    """The norm of f32 gradients of these shapes."""
    elements = sum(torch.Size(shape).numel() for shape in shapes)

    def foreach(tensors: list[Tensor]) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))
        return norm

    return Case(
        id=f"norm-{name}",
        workload=f"norm of {elements / 1e6:.0f}M f32 gradients in {len(shapes)} tensors",
        spec=square_sum.build(f"global_norm_{name.replace('.', '_')}", SquareSum("f32", root=True)),
        inputs=lambda device: ([torch.randn(shape, device=device) for shape in shapes],),
        reference=lambda tensors: (torch.stack([t.square().sum() for t in tensors]).sum().sqrt(),),
        peers={"foreach": foreach},
        bytes=4 * elements,
        bound=1e-6,
    )


DENSE = decoder_shapes(16, 2048, 1024, 5632, 32768)
CASES = [
    case("0.9b-masters", *DENSE, masters=True),
    case("0.1b-f32", *decoder_shapes(12, 768, 768, 2048, 32768), masters=False),
    case("small-masters", *decoder_shapes(4, 130, 30, 333, 1001), masters=True),
    norm_case("0.9b", [*DENSE[0], *DENSE[1]]),
]
