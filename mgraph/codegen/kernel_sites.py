"""Kernel sites of a package: which op instances run a kernel of ours, under which name, with which template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mgraph.codegen.triton import (
    adamw,
    attention,
    attention_grad,
    attention_problem,
    cross_entropy,
    cut_keys,
    embedding_grad,
    exchange,
    expert_glu,
    expert_sum,
    few_rows,
    glu,
    grouped,
    grouped_outer,
    likeliest,
    moe_order,
    moe_route,
    moe_rows,
    norm_rope,
    paged_attention,
    perturb,
    region,
    residual_norm,
    rms_norm,
    rope,
    rope_append,
    rope_join,
    square_sum,
)
from mgraph.codegen.triton.kernel import KernelSpec
from mgraph.ir.graph import Module, Node, Value
from mgraph.ir.local import WHOLE, Division, declared_sizes


class Template(NamedTuple):
    """What makes the kernels of an op: `problem` gives the instance that a node is, or says why there is no kernel for
    it; `build` makes the site of a name and an instance. Sites are called `stem` and a number. `able` is a `problem`
    that does not refuse what another provider does better."""

    stem: str
    problem: Callable[[Node], Any]
    build: Callable[[str, Any], KernelSpec]
    able: Callable[[Node], Any] | None = None

    def instance(self, node: Node) -> Any:
        """The instance that a node is, or why the kernel cannot run it."""
        return (self.able or self.problem)(node)


class SumTemplate(NamedTuple):
    """As `Template`, for the sum of a node to a total; `problem` takes both, and whether the total counts as zeros."""

    stem: str
    problem: Callable[[Node, Value, bool], Any]
    build: Callable[[str, Any], KernelSpec]


ON_ALL_TARGETS: dict[str, Template] = {
    "rms_norm": Template("rms_norm_fwd", rms_norm.problem_of, rms_norm.forward),
    "rms_norm_grad": Template("rms_norm_bwd", rms_norm.problem_of, rms_norm.backward),
    "region": Template("region", region.problem_of, region.forward),
}
"""Ops that are kernel sites in every package: on the CPU their twin is faster than what torch has, or all there is."""

ON_GPUS: dict[str, Template] = {
    "adamw": Template("adamw", adamw.problem_of, adamw.build),
    "global_norm": Template("global_norm", square_sum.problem_of, square_sum.build),
    "square_sum": Template("square_sum", square_sum.problem_of, square_sum.build),
    "add_rms_norm": Template("add_rms_norm_fwd", residual_norm.problem_of, residual_norm.forward),
    "add_rms_norm_grad": Template("add_rms_norm_bwd", residual_norm.problem_of, residual_norm.backward),
    "attention": Template(
        "attention_fwd", attention_problem.problem_of, attention.forward, attention_problem.instance_of
    ),
    "attention_grad": Template(
        "attention_bwd", attention_problem.problem_of, attention_grad.backward, attention_problem.instance_of
    ),
    "cross_entropy": Template("cross_entropy_fwd", cross_entropy.problem_of, cross_entropy.forward),
    "cross_entropy_grad": Template("cross_entropy_bwd", cross_entropy.problem_of, cross_entropy.backward),
    "cross_entropy_with_grad": Template("cross_entropy", cross_entropy.problem_of, cross_entropy.forward_backward),
    "cut_keys": Template("cut_keys", likeliest.problem_of, cut_keys.build),
    "expert_places": Template("expert_places", exchange.places_problem_of, exchange.places),
    "expert_glu": Template("expert_glu_fwd", expert_glu.problem_of, expert_glu.forward),
    "expert_glu_grad": Template("expert_glu_bwd", expert_glu.problem_of, expert_glu.backward),
    "expert_sum": Template("expert_sum", expert_sum.problem_of, expert_sum.build),
    "gathered_outer": Template("grouped_outer", grouped_outer.problem_of, grouped_outer.outer),
    "glu": Template("glu_fwd", glu.problem_of, glu.forward),
    "glu_grad": Template("glu_bwd", glu.problem_of, glu.backward),
    "glu_grad_joined": Template("glu_bwd", glu.problem_of, glu.backward),
    "grouped_matmul": Template("grouped_matmul", grouped.problem_of, grouped.product),
    "grouped_matmul_sum": Template("grouped_matmul", grouped.problem_of, grouped.product),
    "grouped_outer": Template("grouped_outer", grouped_outer.problem_of, grouped_outer.outer),
    "linear_cross_entropy_with_grad": Template(
        "cross_entropy", cross_entropy.chunk_problem_of, cross_entropy.forward_backward
    ),
    "likeliest": Template("likeliest", likeliest.problem_of, likeliest.build),
    "linear": Template("few_rows", few_rows.problem_of, few_rows.forward),
    "linear_glu": Template("few_rows", few_rows.problem_of, few_rows.forward),
    "moe_combine": Template("moe_combine_fwd", moe_rows.problem_of, moe_rows.combine),
    "moe_combine_grad": Template("moe_combine_bwd", moe_rows.problem_of, moe_rows.combine_grad),
    "moe_dispatch_grad": Template("moe_dispatch_bwd", moe_rows.problem_of, moe_rows.dispatch_grad),
    "moe_order": Template("moe_order", moe_order.order_problem_of, moe_order.order),
    "moe_route": Template("moe_route_fwd", moe_route.problem_of, moe_route.route),
    "moe_route_grad": Template("moe_route_bwd", moe_route.problem_of, moe_route.grad),
    "moe_route_order": Template("moe_route_order", moe_route.problem_of, moe_route.route_order),
    "norm_rope": Template("norm_rope_fwd", norm_rope.problem_of, norm_rope.forward),
    "norm_rope_grad": Template("norm_rope_bwd", norm_rope.problem_of, norm_rope.backward),
    "pack_rows": Template("pack_rows", exchange.problem_of, exchange.pack),
    "padded_combine": Template("padded_combine", exchange.problem_of, exchange.unpack),
    "paged_attention": Template("paged_attention", paged_attention.problem_of, paged_attention.forward),
    "perturb": Template("perturb", likeliest.problem_of, perturb.build),
    "rope": Template("rope", rope.problem_of, rope.rotate),
    "rope_join": Template("rope_join", rope_join.problem_of, rope_join.join),
    "rope_joined": Template("rope_joined", rope_join.turn_problem_of, rope_join.turn),
    "rope_kv_append": Template("rope_kv_append", rope_append.problem_of, rope_append.append),
    "squared_relu": Template("squared_relu_fwd", glu.problem_of, glu.forward),
    "squared_relu_grad": Template("squared_relu_bwd", glu.problem_of, glu.backward),
    "unpack_rows": Template("unpack_rows", exchange.problem_of, exchange.unpack),
}
"""Ops that are kernel sites in packages with binaries for a GPU."""

FIXED_ON_GPUS: dict[str, Template] = {
    "aten.addmm.default": Template("fixed_rows", few_rows.instance_of, few_rows.fixed),
    "expert_glu": Template("expert_glu_fwd", expert_glu.problem_of, expert_glu.fixed),
    "expert_sum": Template("expert_sum", expert_sum.problem_of, expert_sum.fixed),
    "grouped_matmul": Template("grouped_matmul", grouped.problem_of, grouped.fixed),
    "grouped_matmul_sum": Template("grouped_matmul", grouped.problem_of, grouped.fixed),
    "linear": Template("fixed_rows", few_rows.instance_of, few_rows.fixed),
    "linear_glu": Template("fixed_rows", few_rows.instance_of, few_rows.fixed),
    "paged_attention": Template("paged_attention", paged_attention.fixed_problem_of, paged_attention.forward),
    "rope_kv_append": Template("rope_kv_append", rope_append.problem_of, rope_append.fixed),
}
"""Instead of those of `ON_GPUS` where nothing may depend on how many rows there are (`--batch-invariant`): all others
have one way for any number of rows."""

SUMS_ON_GPUS: dict[str, SumTemplate] = {
    "aten.embedding_dense_backward.default": SumTemplate(
        "embedding_grad", embedding_grad.problem_of, embedding_grad.build
    ),
    "embedding_part_grad": SumTemplate("embedding_grad", embedding_grad.problem_of, embedding_grad.build),
    "gathered_outer": SumTemplate("grouped_outer", grouped_outer.problem_of_sum, grouped_outer.outer),
    "grouped_outer": SumTemplate("grouped_outer", grouped_outer.problem_of_sum, grouped_outer.outer),
}
"""Ops whose sum to a total (`accumulate`) is a kernel site in packages with binaries for a GPU."""


TRITON = "triton"
"""The provider of all sites."""

LIBRARIES = ("cudnn", "flash", "efficient")
"""Providers of attention besides ours: fused kernels of torch, which the runtime is told by name."""

UNVERIFIED = {"attention": ("flash-attn",), "grouped_matmul": ("te",), "linear": ("tensorrt",)}
"""Libraries, by family of ops, that have never run what we emit; taken only where they are asked for."""

Chooser = Callable[[Node, "Value | None"], str]
"""Gives the provider of a node, or of its sum to a total (`providers.py`)."""


class KernelSites:
    """Collects the sites; equal instances (size, dtypes, attributes) share one. `gpu`: there are binaries for GPUs;
    `division` says what one rank has of each tensor, which is what its kernels are made for; `chosen` gives the
    provider of each node (none: the kernel, wherever a template takes it); `fixed`: what a row gives does not depend on
    how many there are."""

    def __init__(
        self,
        *,
        gpu: bool = False,
        division: Division | None = None,
        chosen: Chooser | None = None,
        fixed: bool = False,
    ) -> None:
        self._division, self._chosen, self.fixed = division or WHOLE, chosen, fixed
        self._templates = {**ON_ALL_TARGETS, **ON_GPUS, **(FIXED_ON_GPUS if fixed else {})} if gpu else ON_ALL_TARGETS
        self._sums = SUMS_ON_GPUS if gpu else {}
        self._names: dict[tuple[str, Any], str] = {}
        self.specs: list[KernelSpec] = []
        self.refusals: dict[str, str] = {}

    def name(self, node: Node) -> str | None:
        """The name of the site that runs a node, or None if that is for torch."""
        template = self._templates.get(node.op.removesuffix("_"))
        if template is None or self._is_for_others(node):
            return None
        problem = template.problem if self._chosen is None else template.instance
        return self._named(template, problem(self._division.local_node(node)), node)

    def provider(self, node: Node) -> str:
        """The provider that was chosen for a node; empty where the runtime finds one by itself."""
        return "" if self._chosen is None else self._chosen(node, None)

    def _is_for_others(self, node: Node, total: Value | None = None) -> bool:
        return self._chosen is not None and self._chosen(node, total) != TRITON

    def name_of_sum(self, part: Node, total: Value, fresh: bool = False) -> str | None:
        """The name of the site that adds what a node makes to a total in place, or writes it there if the total is
        `fresh`; None if that is for torch."""
        template = self._sums.get(part.op)
        if template is None or self._is_for_others(part, total):
            return None
        local = self._division.local_node(part), self._division.local_value(total)
        return self._named(template, template.problem(*local, fresh), part)

    def _named(self, template: Template | SumTemplate, problem: Any, node: Node) -> str | None:
        if isinstance(problem, str):
            self.refusals[f"{node.op.removesuffix('_')} at {node.origin}"] = problem
            return None
        key = (template.stem, problem)
        if key not in self._names:
            number = sum(stem == template.stem for stem, _ in self._names)
            self._names[key] = f"{template.stem}_{number}"
            self.specs.append(template.build(self._names[key], problem))
        return self._names[key]

    def spec(self, name: str) -> KernelSpec:
        """The site of a name."""
        return next(spec for spec in self.specs if spec.name == name)


def kernel_sites(module: Module, *, gpu: bool = False, fixed: bool = False) -> KernelSites:
    """The sites of a module, in the order of its functions."""
    sites = KernelSites(gpu=gpu, division=Division.of(module, declared_sizes(module)), fixed=fixed)
    for function in module.functions.values():
        makers = function.producers()
        for node in function.nodes:
            sites.name(node)
            if node.op == "accumulate_" and node.operands[1] in makers:
                sites.name_of_sum(makers[node.operands[1]], node.operands[0], bool(node.attrs.get("fresh")))
    return sites
