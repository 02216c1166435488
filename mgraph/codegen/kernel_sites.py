"""Kernel sites of a package: which op instances run a kernel of ours, under which name, with which template."""

from __future__ import annotations

from mgraph.codegen.triton.kernel import KernelSpec
from mgraph.codegen.triton.rms_norm import RmsNorm, backward, forward
from mgraph.ir.graph import Module, Node

KERNEL_OPS = ("rms_norm", "rms_norm_grad")
"""Ops that every instance of is a kernel site."""


class KernelSites:
    """Collects the sites; equal instances (size, dtypes, attributes) share one."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, RmsNorm], str] = {}
        self.specs: list[KernelSpec] = []

    def name(self, node: Node) -> str:
        """The name of the site that runs a node."""
        is_forward = node.op == "rms_norm"
        x, weight = node.operands[:2] if is_forward else node.operands[1:3]
        size = x.tensor.shape[-1]
        assert isinstance(size, int), f"{node!r}: the normalised dim {size} is not a known number"
        problem = RmsNorm(
            size=size,
            x=x.tensor.dtype.text,
            weight=weight.tensor.dtype.text,
            eps=float(node.attrs["eps"]),  # type: ignore[arg-type]
            round=str(node.attrs.get("round", "product")),
            offset=float(node.attrs.get("offset", 0.0)),  # type: ignore[arg-type]
        )
        key = (node.op, problem)
        if key not in self._names:
            direction, build = ("fwd", forward) if is_forward else ("bwd", backward)
            number = sum(op == node.op for op, _ in self._names)
            self._names[key] = f"rms_norm_{direction}_{number}"
            self.specs.append(build(self._names[key], problem))
        return self._names[key]


def kernel_sites(module: Module) -> KernelSites:
    """The sites of a module, in the order of its functions."""
    sites = KernelSites()
    for _, node in module.walk():
        if node.op in KERNEL_OPS:
            sites.name(node)
    return sites
