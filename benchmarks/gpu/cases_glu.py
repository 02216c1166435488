"""Cases of gated units (K3): forward and backward of gate and up apart, as the halves of a packed projection, and as
its columns in turns; and of the squared ReLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import glu
from mgraph.codegen.triton.glu import Glu, Tuning

Shape = tuple[int, ...]


def inputs(
    shape: Shape, names: int, *, packed: bool, turns: bool = False
) -> Callable[[torch.device], tuple[Tensor, ...]]:
    """Gate and up in bf16, `packed`: halves of one tensor, `turns`: its columns; before them dy of three names."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        tensors = [torch.randn(shape, device=device).bfloat16() for _ in range(names)]
        if packed:
            tensors[-2:] = torch.cat(tensors[-2:], -1).chunk(2, -1)
        if turns:
            tensors[-2:] = torch.stack(tensors[-2:], -1).flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
        return tuple(tensors)

    return make


def act(problem: Glu, gate: Tensor) -> Tensor:
    """The activation, by torch's own functions."""
    if problem.act == "silu":
        return functional.silu(gate)
    if problem.act == "quick_gelu":
        return gate * torch.sigmoid(problem.alpha * gate)
    return functional.gelu(gate, approximate="tanh" if problem.act == "gelu_tanh" else "none")


def forward_of(problem: Glu) -> Callable[..., tuple[Tensor, ...]]:
    """y in f32 at least, rounded to the dtype of gate."""

    def forward(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        wide = gate if gate.dtype == torch.float64 else gate.float()
        if problem.limit:
            wide, up = wide.clamp(max=problem.limit), up.clamp(-problem.limit, problem.limit)
        return ((act(problem, wide) * (up.to(wide.dtype) + problem.offset)).to(gate.dtype),)

    return forward


def backward_of(problem: Glu) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients, by autograd of the forward; a compiler sees both and keeps what the gradients need."""

    def backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        leaves = [gate.detach().requires_grad_(), up.detach().requires_grad_()]
        with torch.enable_grad():
            (y,) = forward_of(problem)(*leaves)
            return torch.autograd.grad(y, leaves, dy)

    return backward


def silu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """The formula for silu in f32, rounded at the end: what a compiler makes of it with all it may know."""
    grad, wide = dy.float(), gate.float()
    part = torch.sigmoid(wide)
    dgate = grad * up.float() * (part + wide * part * (1 - part))
    return dgate.to(gate.dtype), (grad * wide * part).to(up.dtype)


def liger_forward(gate: Tensor, up: Tensor) -> Any:
    """Liger's kernel."""
    from liger_kernel.ops import swiglu  # type: ignore[import-not-found]

    return swiglu.swiglu_forward(gate, up)[2]


def liger_backward(dy: Tensor, gate: Tensor, up: Tensor) -> Any:
    """Liger's kernel, which writes over gate and up."""
    from liger_kernel.ops import swiglu

    return swiglu.swiglu_backward(gate, up, dy)


def forward_case(name: str, shape: Shape, problem: Glu, *, packed: bool = False, cut: Tuning | None = None) -> Case:
    """The forward on tensors of a shape."""
    elements = torch.Size(shape).numel()
    plain = forward_of(problem)
    liger = {"liger": liger_forward} if problem.act == "silu" and not packed and not problem.limit else {}
    return Case(
        id=f"K3-forward-{name}",
        workload=_workload(problem, shape, packed),
        spec=glu.forward(f"glu_fwd_{name.replace('-', '_')}", problem, cut),
        inputs=inputs(shape, 2, packed=packed, turns=problem.spaced),
        reference=plain,
        peers={"compile": plain, **liger},
        bytes=3 * 2 * elements,
        bound=3e-3,
    )


def backward_case(name: str, shape: Shape, problem: Glu, *, packed: bool = False, cut: Tuning | None = None) -> Case:
    """The backward on tensors of a shape."""
    elements = torch.Size(shape).numel()
    plain = backward_of(problem)
    silu = problem.act == "silu" and not problem.limit
    liger = {"liger": liger_backward} if silu and not packed else {}
    return Case(
        id=f"K3-backward-{name}",
        workload=_workload(problem, shape, packed),
        spec=glu.backward(f"glu_bwd_{name.replace('-', '_')}", problem, cut),
        inputs=inputs(shape, 3, packed=packed),
        reference=plain,
        peers={"compile": silu_backward, **liger} if silu else {"eager": plain},
        bytes=5 * 2 * elements,
        bound=3e-3,
    )


def joined_case(name: str, shape: Shape, problem: Glu) -> Case:
    """The backward of the parts of one projection, whose gradients lie as they do."""
    problem = replace(problem, joined=True, layout="interleaved" if problem.spaced else "halves")

    def one(backward: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor]]:
        if problem.spaced:
            return lambda *given: (torch.stack(backward(*given), -1).flatten(-2),)
        return lambda *given: (torch.cat(backward(*given), -1),)

    return Case(
        id=f"K3-joined-{name}",
        workload=f"{_workload(problem, shape, True)}, both gradients in one",
        spec=glu.backward(f"glu_joined_{name.replace('-', '_')}", problem),
        inputs=inputs(shape, 3, packed=not problem.spaced, turns=problem.spaced),
        reference=one(backward_of(problem)),
        peers={"compile": one(silu_backward)} if problem.act == "silu" else {},
        bytes=5 * 2 * torch.Size(shape).numel(),
        bound=3e-3,
    )


def relu_cases(name: str, shape: Shape) -> list[Case]:
    """The squared ReLU, which has no gate, forward and backward."""
    problem, elements = _problem(shape, "squared_relu"), torch.Size(shape).numel()
    forward = Case(
        id=f"K3-forward-{name}",
        workload=_workload(problem, shape, False),
        spec=glu.forward("squared_relu", problem),
        inputs=inputs(shape, 1, packed=False),
        reference=lambda x: (functional.relu(x).square(),),
        bytes=2 * 2 * elements,
        bound=3e-3,
    )
    return [
        forward,
        replace(
            forward,
            id=f"K3-backward-{name}",
            spec=glu.backward("squared_relu_grad", problem),
            inputs=inputs(shape, 2, packed=False),
            reference=lambda dy, x: (2 * dy * functional.relu(x),),
            bytes=3 * 2 * elements,
        ),
    ]


def _workload(problem: Glu, shape: Shape, packed: bool) -> str:
    numbers = f", limit {problem.limit}, offset {problem.offset}" if problem.limit else ""
    parts = ", columns in turns" if problem.spaced else ", packed" * packed
    return f"{problem.act}{numbers}, {'x'.join(map(str, shape))} bf16{parts}"


def _problem(shape: Shape, act: str, **numbers: Any) -> Glu:
    return Glu(shape[-1], len(shape) - 1, "bf16", act, **numbers)


WIDE, DECODER, SMALL, ODD = (8192, 14336), (4, 8192, 5632), (4096, 2880), (8191, 1368)
LIMITED = {"alpha": 1.702, "limit": 7.0, "offset": 1.0}

CASES = [
    make(name, shape, _problem(shape, act, **numbers), packed=packed)
    for name, shape, act, numbers, packed in (
        ("silu", WIDE, "silu", {}, False),
        ("silu-packed", WIDE, "silu", {}, True),
        ("silu-decoder", DECODER, "silu", {}, False),
        ("gelu-tanh", WIDE, "gelu_tanh", {}, False),
        ("gelu-erf", WIDE, "gelu_erf", {}, False),
        ("limited", SMALL, "quick_gelu", LIMITED, False),
        ("odd", ODD, "silu", {}, False),
    )
    for make in (forward_case, backward_case)
]
CASES.append(joined_case("silu-decoder", DECODER, _problem(DECODER, "silu")))
TURNS = replace(_problem(DECODER, "silu"), spaced=True)
CASES += [forward_case("silu-turns", DECODER, TURNS), joined_case("silu-turns", DECODER, TURNS)]

TUNINGS = [
    make(f"silu-{rows}x{columns}-{num_warps}", WIDE, _problem(WIDE, "silu"), cut=Tuning(rows, columns, num_warps))
    for make in (forward_case, backward_case)
    for rows, columns, num_warps in ((1, 1024, 4), (1, 2048, 4), (1, 2048, 8), (2, 2048, 8), (2, 1024, 4), (1, 1024, 2))
]
"""The first of the cases, cut in other ways: what the tuning functions are to choose from."""
