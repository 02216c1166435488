"""Kernel sites of a package: which op instances run a kernel of ours, under which name, with which template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mgraph.codegen.triton import adamw, rms_norm
from mgraph.codegen.triton.kernel import KernelSpec
from mgraph.ir.graph import Module, Node


class Template(NamedTuple):
    """What makes the kernels of an op: `problem` gives the instance that a node is, or says why there is no kernel for
    it; `build` makes the site of a name and an instance. Sites are called `stem` and a number."""

    stem: str
    problem: Callable[[Node], Any]
    build: Callable[[str, Any], KernelSpec]


ON_ALL_TARGETS: dict[str, Template] = {
    "rms_norm": Template("rms_norm_fwd", rms_norm.problem_of, rms_norm.forward),
    "rms_norm_grad": Template("rms_norm_bwd", rms_norm.problem_of, rms_norm.backward),
}
"""Ops that are kernel sites in every package: on the CPU their twin is faster than what torch has."""

ON_GPUS: dict[str, Template] = {
    "adamw": Template("adamw", adamw.problem_of, adamw.build),
}
"""Ops that are kernel sites in packages with binaries for a GPU."""


class KernelSites:
    """Collects the sites; equal instances (size, dtypes, attributes) share one. `gpu`: there are binaries for GPUs."""

    def __init__(self, *, gpu: bool = False) -> None:
        self._templates = {**ON_ALL_TARGETS, **ON_GPUS} if gpu else ON_ALL_TARGETS
        self._names: dict[tuple[str, Any], str] = {}
        self.specs: list[KernelSpec] = []
        self.refusals: dict[str, str] = {}

    def name(self, node: Node) -> str | None:
        """The name of the site that runs a node, or None if that is for torch."""
        op = node.op.removesuffix("_")
        template = self._templates.get(op)
        if template is None:
            return None
        problem = template.problem(node)
        if isinstance(problem, str):
            self.refusals[f"{op} at {node.origin}"] = problem
            return None
        key = (op, problem)
        if key not in self._names:
            number = sum(other == op for other, _ in self._names)
            self._names[key] = f"{template.stem}_{number}"
            self.specs.append(template.build(self._names[key], problem))
        return self._names[key]

    def spec(self, name: str) -> KernelSpec:
        """The site of a name."""
        return next(spec for spec in self.specs if spec.name == name)


def kernel_sites(module: Module, *, gpu: bool = False) -> KernelSites:
    """The sites of a module, in the order of its functions."""
    sites = KernelSites(gpu=gpu)
    for _, node in module.walk():
        sites.name(node)
    return sites
