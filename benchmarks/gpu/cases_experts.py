"""Cases of mixtures of experts: routers with the order of rows (K8), the products of experts and whole layers forward
(K9), with gradients (K10), and of few tokens (K11).

A layer is given its logits; what it takes for them is the same for all. Scores of a token are distinct, so that what is
right does not hang on rounding. Of skewed routing, the first expert has several times the rows of the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernel_case import Case, Halves
from mgraph.codegen.triton import expert_glu, expert_sum, grouped, grouped_outer, moe_order, moe_route, moe_rows
from mgraph.codegen.triton.expert_glu import ExpertGlu
from mgraph.codegen.triton.expert_sum import ExpertSum
from mgraph.codegen.triton.glu import Glu
from mgraph.codegen.triton.grouped import Product, Tuning
from mgraph.codegen.triton.grouped_outer import Outer
from mgraph.codegen.triton.moe_order import Order
from mgraph.codegen.triton.moe_route import Router
from mgraph.codegen.triton.moe_rows import MoeRows
from mgraph.ir.ops import experts, moe, route
from mgraph.ir.types import DType
from mgraph.runtime import v1 as rt

grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


@dataclass(frozen=True)
class Layer:
    """Sizes: tokens, width, width of a unit, experts, experts a token, and how unequal the experts' shares are."""

    tokens: int
    width: int
    inner: int
    experts: int
    choices: int
    skew: float = 0.0

    @property
    def router(self) -> Router:
        """The kernel of its router."""
        return Router(self.experts, self.choices, "bf16", renormalize=True)

    @property
    def units(self) -> ExpertGlu:
        """The kernel of its units."""
        unit = Glu(self.inner, 1, "bf16", "silu")
        return ExpertGlu(self.experts, self.choices, self.width, self.inner, unit, keep=True, weights="f32")

    @property
    def rows(self) -> int:
        """Pairs of a token and one of its experts."""
        return self.tokens * self.choices

    @property
    def read(self) -> float:
        """Experts that some token takes, as expected where all are alike."""
        return self.experts * (1 - (1 - self.choices / self.experts) ** self.tokens)

    @property
    def product(self) -> float:
        """Floating-point operations of one product of all rows."""
        return 2.0 * self.rows * self.width * self.inner

    def logits(self, device: torch.device) -> Tensor:
        """bf16 [T, E]: a permutation of the same numbers for each token; the skewed prefer the first experts."""
        share = (torch.arange(self.experts, device=device) + 1.0) ** -self.skew
        keys = torch.rand(self.tokens, self.experts, device=device).log() / share
        return ((keys.argsort(1).argsort(1) - self.experts // 2) / 16).to(torch.bfloat16)

    def routed(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """weights, order and offsets."""
        weights, indices = rt.moe_route(self.logits(device), top_k=self.choices, renormalize=True)
        return weights, *rt.moe_order(indices, num_experts=self.experts)

    def normal(self, device: torch.device, *shape: int) -> Tensor:
        """bf16, of which products have values of about 1."""
        return torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(shape[-2] ** -0.5 if len(shape) > 2 else 1)

    def weights(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Matrices of gates, ups and what follows."""
        up = (self.experts, self.width, self.inner)
        down = (self.experts, self.inner, self.width)
        return self.normal(device, *up), self.normal(device, *up), self.normal(device, *down)


QWEN = Layer(32768, 2048, 768, 128, 8)
E64 = Layer(16384, 2048, 1024, 64, 8)


def router_case(tokens: int) -> Case:
    """K8: weights, indices, order and offsets of given logits."""
    layer = replace(QWEN, tokens=tokens)

    def reference(logits: Tensor) -> tuple[Tensor, ...]:
        weights, indices = route.moe_route(logits, top_k=layer.choices, renormalize=True)
        return weights, indices, *rt.moe_order(indices, num_experts=layer.experts)

    def torch_form(logits: Tensor) -> tuple[Tensor, ...]:
        weights, indices = rt.moe_route(logits, top_k=layer.choices, renormalize=True)
        return weights, indices, *rt.moe_order(indices, num_experts=layer.experts)

    return Case(
        id=f"K8-router-{tokens}",
        workload=f"softmax, top {layer.choices} of {layer.experts}, weights, order; {tokens} tokens, logits bf16",
        spec=moe_route.route_order("router", layer.router),
        inputs=lambda device: (layer.logits(device),),
        reference=reference,
        peers={"eager": torch_form, "compile": torch_form},
        bytes=tokens * (2 * layer.experts + 28 * layer.choices),
        bound=1e-5,
    )


def grouped_router_case(tokens: int) -> Case:
    """K8 of DeepSeek-V3: sigmoids, a bias for the choice, the best 4 of 8 groups, 8 of 256 experts. In float64 some of
    the choices differ that are closer than f32 tells."""
    problem = moe_route.Router(256, 8, "bf16", "f32", "f32", "sigmoid", True, 1e-20, 2.5, 8, 4, 2)
    layer = replace(QWEN, tokens=tokens, experts=problem.experts)
    given: dict[str, Any] = {"top_k": 8, "score": "sigmoid", "renormalize": True, "epsilon": 1e-20, "scale": 2.5}
    given |= {"groups": 8, "top_groups": 4, "group_best": 2}

    def form(logits: Tensor, bias: Tensor, made: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        weights, indices = made(logits, bias, **given)
        return weights, indices, *rt.moe_order(indices, num_experts=problem.experts)

    torch_form = partial(form, made=rt.moe_route)
    return Case(
        id=f"K8-router-grouped-{tokens}",
        workload=f"sigmoid, bias, 4 of 8 groups, top 8 of 256, weights, order; {tokens} tokens, logits bf16",
        spec=moe_route.route_order("router", problem),
        inputs=lambda device: (layer.logits(device), 0.1 * torch.randn(problem.experts, device=device)),
        reference=partial(form, made=route.moe_route),
        peers={"eager": torch_form, "compile": torch_form},
        bytes=tokens * (2 * problem.experts + 28 * problem.choices),
        bound=1e-2,
    )


def router_grad_case(tokens: int) -> Case:
    """K8: the gradient of the weights for the logits."""
    layer = replace(QWEN, tokens=tokens)

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        logits = layer.logits(device)
        indices = rt.moe_route(logits, top_k=layer.choices)[1]
        return torch.randn(tokens, layer.choices, device=device), logits, indices

    form = partial(rt.moe_route_grad, renormalize=True)
    return Case(
        id=f"K8-router-grad-{tokens}",
        workload=f"gradient of the weights, {tokens} tokens, logits bf16",
        spec=moe_route.grad("router_grad", layer.router),
        inputs=inputs,
        reference=lambda *inputs: (route.moe_route_grad(*inputs, renormalize=True),),
        peers={"eager": form, "compile": form},
        bytes=tokens * (4 * layer.experts + 12 * layer.choices),
    )


def order_case(tokens: int, problem: Order) -> Case:
    """K8: order and offsets of given choices, some of which, where there are `others`, are of no expert."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        least = -1 if problem.others else 0
        size = (tokens, problem.choices)
        return (torch.randint(least, problem.experts + problem.others, size, device=device),)

    return Case(
        id=f"K8-order-{tokens}",
        workload=f"order of {problem.choices} of {problem.experts} experts for each of {tokens} tokens",
        spec=moe_order.order("order", problem),
        inputs=inputs,
        reference=partial(moe.moe_order, num_experts=problem.experts, others=problem.others),
        bytes=16 * tokens * problem.choices,
        bound=0.0,
    )


def units_case(name: str, layer: Layer, cut: Tuning | None = None) -> Case:
    """K9: gates, ups and what is activated, of rows taken from tokens."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        _, order, offsets = layer.routed(device)
        return layer.normal(device, layer.tokens, layer.width), order, offsets, *layer.weights(device)[:2]

    def form(x: Tensor, order: Tensor, offsets: Tensor, wg: Tensor, wu: Tensor) -> tuple[Tensor, ...]:
        rows = x[order // layer.choices]
        gate, up = grouped_mm(rows, wg, offs=offsets), grouped_mm(rows, wu, offs=offsets)
        return torch.nn.functional.silu(gate) * up, gate, up

    return Case(
        id=f"K9-units-{name}",
        workload=f"{layer}",
        spec=expert_glu.forward("units", layer.units, () if cut is None else ((0, cut),)),
        inputs=inputs,
        reference=partial(_units, layer),
        peers={"eager": form, "compile": form} if cut is None else {},
        bytes=2
        * (layer.tokens * layer.width + 3 * layer.rows * layer.inner + 2 * layer.experts * layer.width * layer.inner),
        flops=2 * layer.product,
    )


def _units(layer: Layer, x: Tensor, order: Tensor, offsets: Tensor, wg: Tensor, wu: Tensor) -> tuple[Tensor, ...]:
    rows = x[order // layer.choices]
    gate, up = moe.grouped_matmul(rows, wg, offsets), moe.grouped_matmul(rows, wu, offsets)
    return torch.nn.functional.silu(gate) * up, gate, up


def product_case(id_: str, layer: Layer, problem: Product, cut: Tuning | None = None) -> Case:
    """Products of rows, or the sum of two of them."""
    matrix = (problem.width, problem.inner) if problem.transposed else (problem.inner, problem.width)

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        _, _, offsets = layer.routed(device)
        pairs = [
            tensor
            for _ in range(1 + problem.second)
            for tensor in (
                layer.normal(device, layer.rows, problem.inner),
                layer.normal(device, layer.experts, *matrix),
            )
        ]
        return *pairs, offsets

    def reference(*given: Tensor) -> tuple[Tensor, ...]:
        *pairs, offsets = given
        product = partial(moe.grouped_matmul, transpose_w=problem.transposed)
        products = [product(rows, w, offsets) for rows, w in zip(pairs[::2], pairs[1::2], strict=True)]
        return (sum(products[1:], products[0]),)

    def form(*given: Tensor) -> Tensor:
        *pairs, offsets = given
        matrices = [w.transpose(1, 2) if problem.transposed else w for w in pairs[1::2]]
        products = [grouped_mm(rows, w, offs=offsets) for rows, w in zip(pairs[::2], matrices, strict=True)]
        total: Tensor = sum(products[1:], products[0])
        return total

    return Case(
        id=id_,
        workload=f"{layer}, {problem}",
        spec=grouped.product("product", problem, () if cut is None else ((0, cut),)),
        inputs=inputs,
        reference=reference,
        peers={"eager": form, "compile": form} if cut is None else {},
        bytes=int(2 * (1 + problem.second) * (layer.rows + layer.read * problem.width) * problem.inner)
        + 2 * layer.rows * problem.width,
        flops=(1 + problem.second) * layer.product,
    )


def sum_case(id_: str, layer: Layer, problem: ExpertSum, cut: Tuning | None = None) -> Case:
    """K9: what experts give, weighed and summed by token; where it is `ended`, one token in four has no expert."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        weights, indices = rt.moe_route(layer.logits(device), top_k=layer.choices, renormalize=True)
        if problem.ended:
            indices[-layer.tokens // 4 :] = layer.experts
        order, offsets = rt.moe_order(indices, num_experts=layer.experts, others=problem.ended)
        return layer.normal(device, layer.rows, layer.inner), layer.weights(device)[2], weights, order, offsets

    return Case(
        id=id_,
        workload=f"{layer}, {problem}",
        spec=expert_sum.build("sum", problem, () if cut is None else ((0, cut),)),
        inputs=inputs,
        reference=lambda *given: (experts.expert_sum(*given, dtype=DType.F64, ended=problem.ended),),
        bytes=2 * (layer.rows * layer.inner + layer.tokens * layer.width)
        + int(2 * layer.read * layer.width * layer.inner),
        flops=layer.product,
    )


def units_grad_case(name: str, layer: Layer, cut: Tuning | None = None) -> Case:
    """K10: gradients of units and weights."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        weights, order, offsets = layer.routed(device)
        gate, up = (layer.normal(device, layer.rows, layer.inner) for _ in range(2))
        dy = layer.normal(device, layer.tokens, layer.width)
        return dy, weights, order, offsets, layer.weights(device)[2], gate, up

    def reference(
        dy: Tensor, weights: Tensor, order: Tensor, offsets: Tensor, w: Tensor, gate: Tensor, up: Tensor
    ) -> tuple[Tensor, ...]:
        products = moe.grouped_matmul(dy[order // layer.choices], w, offsets, transpose_w=True)
        share, part = weights.flatten()[order][:, None], gate.sigmoid()
        y, slope = gate * part * up, part * (1 + gate * (1 - part))
        dweights = torch.empty_like(weights)
        dweights.view(-1)[order] = (products * y).sum(1)
        return share * products * up * slope, share * products * gate * part, share * y, dweights

    return Case(
        id=f"K10-units-grad-{name}",
        workload=f"{layer}",
        spec=expert_glu.backward("units_grad", layer.units, cut),
        inputs=inputs,
        reference=reference,
        bytes=2
        * (layer.tokens * layer.width + 5 * layer.rows * layer.inner + layer.experts * layer.width * layer.inner),
        flops=layer.product,
    )


def outer_case(id_: str, layer: Layer, problem: Outer, cut: Tuning | None = None) -> Case:
    """K10: the gradient of the matrices, added to their sum."""
    names = ("left", "right")
    widths = dict(zip(names, (problem.left, problem.right), strict=True))

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        _, order, offsets = layer.routed(device)
        sides = [
            layer.normal(device, layer.tokens if side == problem.taken else layer.rows, width)
            for side, width in widths.items()
        ]
        total = layer.normal(device, layer.experts, problem.left, problem.right)
        return total, *sides, *([order] if problem.taken else []), offsets

    def rows(left: Tensor, right: Tensor, *order: Tensor) -> Sequence[Tensor]:
        sides = {"left": left, "right": right}
        if problem.taken:
            sides[problem.taken] = sides[problem.taken][order[0] // layer.choices]
        return sides["left"], sides["right"]

    def reference(total: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        return (total + moe.grouped_outer(*rows(*given[:-1]), given[-1]),)

    def form(total: Tensor, *given: Tensor) -> Tensor:
        left, right = rows(*given[:-1])
        return total.add_(grouped_mm(left.t(), right, offs=given[-1]))

    return Case(
        id=id_,
        workload=f"{layer}, {problem}",
        spec=grouped_outer.outer("outer", problem, cut),
        inputs=inputs,
        reference=reference,
        # Compiled, torch's product asserts that the rows of each expert are a multiple of some number.
        peers={"eager": form} if cut is None else {},
        bytes=2 * (2 * layer.experts * problem.left * problem.right + layer.rows * min(widths.values())),
        flops=layer.product,
    )


def down_of(layer: Layer) -> Product:
    """The product after the units."""
    return Product(layer.experts, layer.inner, layer.width, "bf16")


def back_of(layer: Layer) -> Product:
    """The gradient of rows, of both products before the units."""
    return Product(layer.experts, layer.inner, layer.width, "bf16", transposed=True, second=True)


def outers_of(layer: Layer) -> tuple[Outer, Outer]:
    """The gradients of matrices before the units and after."""
    before = Outer(layer.experts, layer.width, layer.inner, "bf16", "left", layer.choices, "bf16")
    return before, Outer(layer.experts, layer.inner, layer.width, "bf16", "right", layer.choices, "bf16")


def layer_inputs(layer: Layer, trained: bool, device: torch.device) -> tuple[Tensor, ...]:
    """x, logits and matrices; with a cotangent and sums of gradients where it is trained."""
    matrices = layer.weights(device)
    given = (layer.normal(device, layer.tokens, layer.width), layer.logits(device), *matrices)
    if not trained:
        return given
    return *given, layer.normal(device, layer.tokens, layer.width), *map(torch.zeros_like, matrices)


def eager_layer(layer: Layer, x: Tensor, logits: Tensor, wg: Tensor, wu: Tensor, wd: Tensor) -> Tensor:
    """The layer as written in torch, with its product of groups."""
    weights, indices = logits.float().softmax(-1).topk(layer.choices, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    chosen, order = indices.flatten().sort(stable=True)
    offsets = torch.searchsorted(chosen, torch.arange(layer.experts, device=x.device), right=True, out_int32=True)
    rows = x[order // layer.choices]
    hidden = torch.nn.functional.silu(grouped_mm(rows, wg, offs=offsets)) * grouped_mm(rows, wu, offs=offsets)
    out = grouped_mm(hidden, wd, offs=offsets)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=x.device))
    pairs = out[places].view(layer.tokens, layer.choices, -1)
    y: Tensor = (pairs * weights[..., None].to(pairs.dtype)).sum(1)
    return y


def exact_layer(layer: Layer, x: Tensor, logits: Tensor, wg: Tensor, wu: Tensor, wd: Tensor) -> Tensor:
    """The layer in the dtype of its inputs, one expert after the other."""
    weights, indices = route.moe_route(logits, top_k=layer.choices, renormalize=True)
    y = torch.zeros_like(x)
    for e in range(layer.experts):
        token, choice = (indices == e).nonzero(as_tuple=True)
        rows = x[token]
        hidden = torch.nn.functional.silu(rows @ wg[e]) * (rows @ wu[e])
        y = y.index_add(0, token, (hidden @ wd[e]) * weights[token, choice].to(x.dtype)[:, None])
    return y


def layer_case(id_: str, layer: Layer, peers: Sequence[str] = ("eager", "compile")) -> Case:
    """K9 and K11: a whole layer forward."""
    units = replace(layer.units, keep=False)

    def joined(kernels: Any) -> Callable[..., Any]:
        def run(x: Tensor, logits: Tensor, wg: Tensor, wu: Tensor, wd: Tensor) -> Tensor:
            weights, _, order, offsets = kernels.router(logits)
            rows = kernels.units(x, order, offsets, wg, wu)
            y: Tensor = kernels.sum(rows, wd, weights, order, offsets)
            return y

        return run

    form = partial(eager_layer, layer)
    return Case(
        id=id_,
        workload=f"{layer}, forward",
        spec=moe_route.route_order("router", layer.router),
        more=(
            expert_glu.forward("units", units),
            expert_sum.build("sum", ExpertSum(down_of(layer), layer.choices)),
        ),
        joined=joined,
        inputs=partial(layer_inputs, layer, False),
        reference=lambda *given: (exact_layer(layer, *given),),
        peers=dict.fromkeys(peers, form),
        bytes=int(2 * 3 * layer.read * layer.width * layer.inner),
        flops=3 * layer.product,
    )


def trained_case(id_: str, layer: Layer) -> Case:
    """K10: a whole layer, forward and backward, gradients of matrices added to their sums."""
    before, after = outers_of(layer)
    rows = MoeRows(layer.width, layer.choices, "bf16", "f32")

    def joined(kernels: Any) -> Halves:
        def forward(x: Tensor, logits: Tensor, wg: Tensor, wu: Tensor, wd: Tensor) -> tuple[Tensor, list[Any]]:
            weights, indices, order, offsets = kernels.router(logits)
            hidden, gate, up = kernels.units(x, order, offsets, wg, wu)
            rows = kernels.down(hidden, wd, offsets)
            del hidden
            return kernels.combine(rows, weights, order), [weights, indices, order, offsets, gate, up]

        def backward(y: Tensor, kept: list[Any], *inputs: Tensor) -> tuple[Tensor, ...]:
            x, logits, wg, wu, wd, dy, sg, su, sd = inputs
            weights, indices, order, offsets, gate, up = kept
            kept.clear()
            dgate, dup, weighted, dweights = kernels.units_grad(dy, weights, order, offsets, wd, gate, up)
            del gate, up
            kernels.after(sd, weighted, dy, order, offsets)
            del weighted
            kernels.before(sg, x, dgate, order, offsets)
            kernels.before(su, x, dup, order, offsets)
            drows = kernels.back(dgate, wg, dup, wu, offsets)
            del dgate, dup
            dx = kernels.dispatch_grad(drows, order)
            return y, dx, kernels.router_grad(dweights, logits, indices), sg, su, sd

        return Halves(5, forward, backward)

    return Case(
        id=id_,
        workload=f"{layer}, forward and backward",
        spec=moe_route.route_order("router", layer.router),
        more=(
            moe_route.grad("router_grad", layer.router),
            expert_glu.forward("units", layer.units),
            expert_glu.backward("units_grad", layer.units),
            grouped.product("down", down_of(layer)),
            grouped.product("back", back_of(layer)),
            grouped_outer.outer("before", before),
            grouped_outer.outer("after", after),
            moe_rows.combine("combine", rows),
            moe_rows.dispatch_grad("dispatch_grad", replace(rows, weights="")),
        ),
        joined=joined,
        inputs=partial(layer_inputs, layer, True),
        reference=_trained(partial(exact_layer, layer)),
        peers={
            "eager": _trained(partial(eager_layer, layer)),
            "formula compiled": _trained(_Compiled(partial(eager_layer, layer))),
        },
        bytes=2 * 9 * layer.experts * layer.width * layer.inner,
        flops=9 * layer.product,
    )


def _trained(form: Callable[..., Tensor]) -> Halves:
    """The result of a layer and all gradients, those of matrices added to their sums."""

    def forward(*inputs: Tensor) -> tuple[Tensor, list[Any]]:
        leaves: list[Any] = [tensor.detach().requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            return form(*leaves), leaves

    def backward(y: Tensor, leaves: list[Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        dy, sg, su, sd = inputs[len(leaves) :]
        dx, dlogits, *more = torch.autograd.grad(y, leaves, dy)
        sums = [total.add_(grad) for total, grad in zip((sg, su, sd), more, strict=True)]
        return y.detach(), dx, dlogits, *sums

    return Halves(5, forward, backward)


class _Compiled:
    """A function that torch compiles at its first call, its gradient too."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._compiled: Callable[..., Tensor] | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self._compiled is None:
            self._compiled = torch.compile(self._function, dynamic=False)
        return self._compiled(*inputs)


SKEWED = replace(QWEN, skew=0.7)

CASES = [
    router_case(32768),
    router_case(256),
    grouped_router_case(32768),
    grouped_router_case(256),
    router_grad_case(32768),
    units_case("qwen", QWEN),
    units_case("e64", E64),
    product_case("K9-down-qwen", QWEN, down_of(QWEN)),
    product_case("K9-down-e64", E64, down_of(E64)),
    layer_case("K9-layer", QWEN),
    layer_case("K9-layer-skewed", SKEWED),
    layer_case("K9-layer-e64", E64),
    units_grad_case("qwen", QWEN),
    units_grad_case("e64", E64),
    product_case("K10-back-qwen", QWEN, back_of(QWEN)),
    product_case("K10-back-e64", E64, back_of(E64)),
    outer_case("K10-before-qwen", QWEN, outers_of(QWEN)[0]),
    outer_case("K10-after-qwen", QWEN, outers_of(QWEN)[1]),
    outer_case("K10-before-e64", E64, outers_of(E64)[0]),
    outer_case("K10-after-e64", E64, outers_of(E64)[1]),
    trained_case("K10-layer", QWEN),
    trained_case("K10-layer-skewed", SKEWED),
    trained_case("K10-layer-e64", E64),
    *(layer_case(f"K11-layer-{tokens}", replace(QWEN, tokens=tokens), ("eager",)) for tokens in (1, 8, 32, 64, 128)),
    *(
        product_case(f"K11-{way}-{tokens}", replace(QWEN, tokens=tokens), problem)
        for tokens in (1, 8, 64)
        for way, problem in (("up", Product(QWEN.experts, QWEN.width, QWEN.inner, "bf16")), ("down", down_of(QWEN)))
    ),
]

_ROUTERS = [
    moe_order.Tuning(*cut)
    for cut in (
        (8, 2, 4),
        (8, 4, 4),
        (16, 1, 4),
        (16, 2, 4),
        (16, 3, 4),
        (16, 4, 4),
        (32, 1, 4),
        (32, 2, 4),
        (32, 2, 8),
    )
]
_UNITS = [
    Tuning(*cut)
    for cut in (
        (128, 128, 64, 8, 3, 16),
        (128, 128, 64, 8, 3, 16, 0, True, True),
        (128, 128, 64, 8, 3, 16, 4, True, True),
        (128, 128, 64, 8, 4, 16, 4, True, True),
    )
]
_PRODUCTS = [
    Tuning(*cut)
    for cut in (
        (128, 256, 64, 8, 3, 8),
        (128, 256, 64, 8, 3, 8, 1, True, True, True),
        (128, 256, 64, 8, 3, 8, 2, True, True, True),
        (128, 256, 64, 8, 3, 8, 4, True, True, True),
        (128, 256, 64, 8, 3, 8, 4, True, True),
        (128, 256, 64, 8, 3, 8, 8, True, True, True),
    )
]
_UNITS_GRAD = [
    Tuning(*cut)
    for cut in (
        (128, 256, 64, 8, 3, 16),
        (128, 256, 64, 8, 3, 16, 4, True, True),
        (128, 128, 64, 8, 3, 16, 0, True, True),
    )
]
_OUTERS = [
    Tuning(*cut)
    for cut in (
        (128, 256, 64, 8, 3, 8, 4, True, True),
        (128, 256, 64, 8, 3, 8, 2, True, True),
        (256, 128, 64, 8, 3),
        (256, 128, 64, 8, 3, 8, 0, True, True),
        (256, 128, 64, 8, 3, 8, 4, True, True),
    )
]


def _tuned(case: Case, cut: Any) -> Case:
    """The case, with its tuning in its id."""
    return replace(case, id=f"{case.id}-{'-'.join(str(value) for value in vars(cut).values())}")


TUNINGS = [
    *(
        _tuned(replace(router_case(tokens), spec=moe_route.route_order("router", QWEN.router, cut), peers={}), cut)
        for tokens in (32768, 256)
        for cut in _ROUTERS
    ),
    *(
        _tuned(case, cut)
        for name, layer in (("qwen", QWEN), ("e64", E64))
        for cuts, make in (
            (_UNITS, partial(units_case, name, layer)),
            (_PRODUCTS, partial(product_case, f"K9-down-{name}", layer, down_of(layer))),
            (_UNITS_GRAD, partial(units_grad_case, name, layer)),
            (_PRODUCTS, partial(product_case, f"K10-back-{name}", layer, back_of(layer))),
            *(
                (_OUTERS, partial(outer_case, f"K10-{way}-{name}", layer, problem))
                for way, problem in zip(("before", "after"), outers_of(layer), strict=True)
            ),
        )
        for cut in cuts
        for case in (make(cut),)
    ),
]
