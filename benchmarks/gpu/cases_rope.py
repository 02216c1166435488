"""Cases of rotary embedding: queries and keys as projections give them, the gradient's inverse, and with QK-norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu.kernel_case import Case
from mgraph.codegen.triton import RmsNorm, norm_rope, rope, rope_join
from mgraph.codegen.triton.norm_rope import NormRope
from mgraph.codegen.triton.rope import Rope
from mgraph.codegen.triton.rope_join import RopeJoin, RopeJoined
from mgraph.runtime.kernels import DTYPES

SEQUENCE = 2048
HEAD = 128
BASE = 10000.0


def tables(problem: Rope, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [1, S, D] or [1, S, D/2] of positions from 0."""
    frequency = BASE ** (-torch.arange(0, problem.width, 2, device=device) / problem.width)
    angle = torch.arange(SEQUENCE, device=device)[:, None] * frequency
    if problem.table_width == problem.width:
        angle = torch.cat((angle, angle), -1) if problem.style == "half" else angle.repeat_interleave(2, -1)
    dtype = DTYPES[problem.table]
    return angle.cos().to(dtype)[None], angle.sin().to(dtype)[None]


def inputs(problem: Rope, tokens: int, permuted: bool) -> Callable[[torch.device], tuple[Tensor, ...]]:
    """x [B, H, S, D], in memory [B, S, H, D] if `permuted`, and its tables."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        batch, heads = tokens // SEQUENCE, problem.heads
        shape = (batch, SEQUENCE, heads) if permuted else (batch, heads, SEQUENCE)
        x = torch.randn(*shape, problem.width, device=device).to(DTYPES[problem.x])
        return x.permute(0, 2, 1, 3) if permuted else x, *tables(problem, device)

    return make


def rotation(problem: Rope) -> Callable[..., tuple[Tensor]]:
    """The map by complex numbers: a rotation by the angle of (cos, sin)."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
        half, narrow = problem.style == "half", problem.table_width * 2 == problem.width
        pairs = x.unflatten(-1, (2, -1)).mT if half else x.unflatten(-1, (-1, 2))
        cos, sin = (t if narrow else t[..., : t.shape[-1] // 2] if half else t[..., ::2] for t in (cos, sin))
        turn = torch.complex(cos, -sin if problem.inverse else sin)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        return ((turned.mT if half else turned).flatten(-2),)

    return rotate


def written_out(problem: Rope) -> Callable[..., Tensor]:
    """The map as models write it, in x's dtype."""
    half = problem.style == "half"

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if cos.shape[-1] * 2 == x.shape[-1]:
            cos, sin = ((torch.cat((t, t), -1) if half else t.repeat_interleave(2, -1)) for t in (cos, sin))
        sin = -sin if problem.inverse else sin
        first, second = x.chunk(2, -1) if half else (x[..., ::2], x[..., 1::2])
        turned = torch.cat((-second, first), -1) if half else torch.stack((-second, first), -1).flatten(-2)
        return (x * cos + turned * sin).to(x.dtype)

    return rotate


def case(name: str, problem: Rope, tokens: int, permuted: bool = True) -> Case:
    """A case of some tokens, in sequences of 2,048."""
    item, wide = DTYPES[problem.x].itemsize, DTYPES[problem.table].itemsize
    layout = "[B, S, H, D]" if permuted else "[B, H, S, D]"
    what = f"{problem.style}{', inverse' if problem.inverse else ''}, tables {problem.table} x {problem.table_width}"
    return Case(
        id=name,
        workload=f"rope {what}: {tokens} tokens x {problem.heads} x {problem.width} {problem.x}, {layout} in memory",
        spec=rope.rotate(name.replace("-", "_"), problem),
        inputs=inputs(problem, tokens, permuted),
        reference=rotation(problem),
        peers={"eager": written_out(problem), "compile": written_out(problem)},
        bytes=2 * tokens * problem.heads * problem.width * item + 2 * SEQUENCE * problem.table_width * wide,
        bound={"f32": 1e-6, "bf16": 2.5e-3, "f16": 4e-4}[problem.x],
    )


def norm_inputs(problem: NormRope, tokens: int, backward: bool) -> Callable[[torch.device], tuple[Tensor, ...]]:
    """x [B, S, H, D], weight, and tables [1, S, 1, D]; backward dy comes before them, and rstd after."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        rotation, dtype = problem.rope, DTYPES[problem.rope.x]
        shape = (tokens // SEQUENCE, SEQUENCE, rotation.heads, rotation.width)
        x, dy = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        weight = (1 + 0.3 * torch.randn(rotation.width, device=device)).to(DTYPES[problem.norm.weight])
        given = (x, weight, *(table[:, :, None] for table in tables(rotation, device)))
        if not backward:
            return given
        return dy, *given, torch.rsqrt(x.float().square().mean(-1, keepdim=True) + problem.norm.eps)

    return make


def norm_reference(problem: NormRope) -> Callable[..., tuple[Tensor, ...]]:
    """y and rstd."""

    def run(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + problem.norm.eps)
        return *rotation(problem.rope)(x * rstd * weight, cos, sin), rstd

    return run


def norm_gradient(problem: NormRope) -> Callable[..., tuple[Tensor, ...]]:
    """dx and dweight, computed in at least f32."""
    back = written_out(replace(problem.rope, inverse=True))

    def run(dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
        wide = torch.promote_types(x.dtype, torch.float32)
        normed, turned = x.to(wide) * rstd, back(dy.to(wide), cos.to(wide), sin.to(wide))
        grad = turned * weight.to(wide)
        dx = (grad - normed * (grad * normed).mean(-1, keepdim=True)) * rstd
        return dx.to(x.dtype), (turned * normed).flatten(0, -2).sum(0).to(weight.dtype)

    return run


def norm_written_out(problem: NormRope) -> Callable[..., Tensor]:
    """The norm and the rotation as models write them."""
    rotate = written_out(problem.rope)

    def run(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + problem.norm.eps)
        return rotate(weight * normed.to(x.dtype), cos, sin)

    return run


def norm_case(name: str, heads: int, tokens: int, backward: bool) -> Case:
    """A case of QK-norm and rotation in bf16, half style, full tables."""
    turn = Rope("bf16", "bf16", HEAD, HEAD, ("B", "S", "H"), ("", "S", ""), heads)
    problem = NormRope(RmsNorm(HEAD, "bf16", "bf16", 1e-6, round="normed"), turn)
    build = norm_rope.backward if backward else norm_rope.forward
    peer = norm_gradient(problem) if backward else norm_written_out(problem)
    size = 2 * tokens * heads * HEAD
    return Case(
        id=name,
        workload=f"QK-norm and rope{', gradient' * backward}: {tokens} tokens x {heads} x {HEAD} bf16",
        spec=build(name.replace("-", "_"), problem),
        inputs=norm_inputs(problem, tokens, backward),
        reference=norm_gradient(problem) if backward else norm_reference(problem),
        peers={"eager": peer, "compile": peer},
        bytes=(3 if backward else 2) * size + 4 * tokens * heads + 4 * SEQUENCE * HEAD,
        bound=6e-3,
    )


def join_case(name: str, heads: tuple[int, int, int], tokens: int) -> Case:
    """Heads of the gradients of q, k and v, turned back and put beside each other; each [B, H, S, D] as attention's
    backward leaves them, contiguous."""
    turn = _problem(heads[0], inverse=True)

    def make(device: torch.device) -> tuple[Tensor, ...]:
        shapes = ((tokens // SEQUENCE, count, SEQUENCE, HEAD) for count in heads)
        return *(torch.randn(shape, device=device).bfloat16() for shape in shapes), *tables(turn, device)

    def beside(rotate: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor]]:
        def run(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
            parts = (rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None]), v)
            return (torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1),)

        return run

    return Case(
        id=name,
        workload=f"heads {heads} turned and joined: {tokens} tokens x {HEAD} bf16",
        spec=rope_join.join(name.replace("-", "_"), RopeJoin(turn, heads)),
        inputs=make,
        reference=beside(lambda x, cos, sin: rotation(turn)(x, cos, sin)[0]),
        peers={"eager": beside(written_out(turn)), "compile": beside(written_out(turn))},
        bytes=2 * tokens * sum(heads) * HEAD * 2 + 4 * SEQUENCE * HEAD,
        bound=2.5e-3,
    )


def joined_case(name: str, heads: tuple[int, int, int], tokens: int) -> Case:
    """The first heads of what a joined projection gave [B, S, nD], turned where they lie."""
    turned = heads[0] + heads[1]
    turn = _problem(turned)

    def make(device: torch.device) -> tuple[Tensor, ...]:
        shape = (tokens // SEQUENCE, SEQUENCE, sum(heads) * HEAD)
        return torch.randn(shape, device=device).bfloat16(), *tables(turn, device)

    def inside(rotate: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor]]:
        def run(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
            x = x.unflatten(-1, (-1, HEAD))
            first = rotate(x[:, :, :turned].transpose(1, 2), cos[:, None], sin[:, None]).transpose(1, 2)
            return (torch.cat((first, x[:, :, turned:]), 2).flatten(2),)

        return run

    return Case(
        id=name,
        workload=f"{turned} of {sum(heads)} heads turned in place: {tokens} tokens x {HEAD} bf16",
        spec=rope_join.turn(name.replace("-", "_"), RopeJoined(turn, turned, sum(heads) * HEAD)),
        inputs=make,
        reference=inside(lambda x, cos, sin: rotation(turn)(x, cos, sin)[0]),
        peers={"eager": inside(written_out(turn)), "compile": inside(written_out(turn))},
        bytes=2 * tokens * turned * HEAD * 2 + 4 * SEQUENCE * HEAD,
        bound=2.5e-3,
    )


def _problem(heads: int, table: str = "bf16", table_width: int = HEAD, **options: object) -> Rope:
    return Rope("bf16", table, HEAD, table_width, ("B", "H", "S"), ("", "S"), heads, **options)  # type: ignore[arg-type]


CASES = [
    case("rope-q16", _problem(16), 16384),
    case("rope-q16-inverse", _problem(16, inverse=True), 16384),
    case("rope-q16-inverse-heads-first", _problem(16, inverse=True), 16384, permuted=False),
    case("rope-q32", _problem(32), 16384),
    case("rope-k4", _problem(4), 16384),
    case("rope-k8", _problem(8), 16384),
    case("rope-q16-f32-half-tables", _problem(16, "f32", HEAD // 2), 16384),
    case("rope-q16-interleaved", _problem(16, "f32", HEAD // 2, style="interleaved"), 16384),
    case("rope-q16-small", _problem(16), 2048),
    norm_case("norm-rope-q16", 16, 16384, backward=False),
    norm_case("norm-rope-q16-grad", 16, 16384, backward=True),
    norm_case("norm-rope-k8", 8, 16384, backward=False),
    norm_case("norm-rope-k8-grad", 8, 16384, backward=True),
    join_case("rope-join-16-8", (16, 8, 8), 16384),
    joined_case("rope-joined-16-8", (16, 8, 8), 16384),
]
