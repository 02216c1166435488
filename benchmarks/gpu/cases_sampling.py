"""Cases of what makes tokens of logits: the likeliest, draws of all tokens, and what cuts leave to draw from; of one
request and of as many as a full engine has.

A draw is perturbed keys, their largest and its log-probability. Peers give that as well, by numbers of their own; the
reference draws by those of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import cut_keys, likeliest, perturb
from mgraph.codegen.triton.likeliest import Likeliest
from mgraph.runtime import v1 as rt

CLASSES = 128256


def logits(rows: int, classes: int, device: torch.device, spread: float = 1.0) -> Tensor:
    """f32 [rows, classes]."""
    return spread * torch.randn(rows, classes, device=device)


def likeliest_case(rows: int, classes: int = CLASSES) -> Case:
    """All logits are read once."""
    return Case(
        id=f"likeliest-{rows}",
        workload=f"the likeliest of {classes} tokens and its log-probability, {rows} rows f32",
        spec=likeliest.build(f"likeliest_{rows}", Likeliest(classes, "f32")),
        inputs=lambda device: (logits(rows, classes, device), torch.full((rows,), -1, device=device)),
        reference=rt.likeliest,
        peers={"eager": rt.likeliest, "compile": rt.likeliest},
        bytes=rows * classes * 4,
        bound=1e-6,
    )


def numbers(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Temperatures, seeds, draws and no targets."""
    each = torch.arange(rows, device=device)
    return torch.full((rows,), 0.8, device=device), each + 2**40, each * 7, torch.full_like(each, -1)


def exponential(x: Tensor, temperature: Tensor) -> Tensor:
    """As others draw: probabilities over exponential noise, the largest (torch.multinomial does so, too)."""
    chances = (x / temperature[:, None]).softmax(-1)
    return chances.div_(torch.empty_like(chances).exponential_()).argmax(-1)


def draw_case(rows: int) -> Case:
    """Logits are read twice, and once at a place; keys are written and read."""
    problem = Likeliest(CLASSES, "f32")

    def reference(x: Tensor, temperature: Tensor, seeds: Tensor, draws: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        keys = rt.perturb(x.float(), temperature.float(), seeds, draws)
        return rt.likeliest(x, rt.likeliest(keys, targets)[0])

    def joined(kernels: Any) -> Callable[..., Any]:
        def run(x: Tensor, temperature: Tensor, seeds: Tensor, draws: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            token, _ = kernels.largest(kernels.perturb(x, temperature, seeds, draws), targets)
            found: tuple[Tensor, Tensor] = kernels.largest(x, token)
            return found

        return run

    def peer(x: Tensor, temperature: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        token = exponential(x, temperature)
        return token, x.log_softmax(-1).gather(1, token[:, None])[:, 0]

    return Case(
        id=f"draw-{rows}",
        workload=f"one of {CLASSES} tokens by its probability, and its log-probability, {rows} rows f32",
        spec=perturb.build("perturb", problem),
        more=(likeliest.build("largest", problem),),
        joined=joined,
        inputs=lambda device: (logits(rows, CLASSES, device), *numbers(rows, device)),
        reference=reference,
        peers={"eager": peer, "compile": peer},
        bytes=rows * CLASSES * 4,
        bound=1e-6,
    )


def cut_case(rows: int, top_k: int, top_p: float) -> Case:
    """Keys of what is left; peers sort. Logits of a model that is rather sure."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        x, ones = logits(rows, CLASSES, device, 3.0), torch.ones(rows, device=device)
        counts = torch.full((rows,), top_k, device=device, dtype=torch.int32)
        return x, torch.randn_like(x), ones, counts, ones * top_p, torch.zeros_like(ones)

    def left(*given: Tensor) -> tuple[Tensor]:
        """Whether each is left, of which the error is told."""
        return ((rt.cut_keys(*given) > -torch.inf).double(),)

    def joined(kernels: Any) -> Callable[..., Any]:
        return lambda *given: (kernels.cut(*given) > -torch.inf).double()

    return Case(
        id=f"cut-{rows}-{top_k}-{top_p}",
        workload=f"top-k {top_k}, top-p {top_p} of {CLASSES} tokens, {rows} rows f32, with what tells what is left",
        spec=cut_keys.build("cut", Likeliest(CLASSES, "f32")),
        joined=joined,
        inputs=inputs,
        reference=left,
        peers={"eager": left},
        bytes=3 * rows * CLASSES * 4,
        bound=2e-2,
    )


def keys_case(rows: int, classes: int) -> Case:
    """Perturbed keys alone."""
    return Case(
        id=f"perturb-{rows}",
        workload=f"scores of {classes} tokens with noise, {rows} rows f32",
        spec=perturb.build("perturb", Likeliest(classes, "f32")),
        inputs=lambda device: (logits(rows, classes, device), *numbers(rows, device)[:3]),
        reference=lambda x, temperature, *given: (rt.perturb(x.float(), temperature.float(), *given),),
        bytes=rows * classes * 8,
        bound=1e-6,
    )


def left_case(rows: int, classes: int) -> Case:
    """Cuts that leave all: k is one less than there are, the least two are equal, and what is beyond p is less than any
    has."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        x, ones = logits(rows, classes, device, 0.01), torch.ones(rows, device=device)
        x[:, :2] = -1.0
        counts = torch.full((rows,), classes - 1, device=device, dtype=torch.int32)
        return x, torch.randn_like(x), ones, counts, ones * (1 - 1e-6), ones * 0.01

    return Case(
        id=f"left-{rows}",
        workload=f"cuts that leave all of {classes} tokens, {rows} rows f32",
        spec=cut_keys.build("cut", Likeliest(classes, "f32")),
        inputs=inputs,
        reference=lambda scores, keys, *cuts: (keys,),
        bytes=rows * classes * 12,
        bound=0.0,
    )


CASES = [
    *(likeliest_case(rows) for rows in (1, 128)),
    *(draw_case(rows) for rows in (1, 128)),
    *(cut_case(rows, *cuts) for rows in (1, 128) for cuts in ((0, 0.9), (50, 1.0), (50, 0.9))),
]
