"""How the fused ops of experts are written where no kernel takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mgraph.ir.opdef import op_def

if TYPE_CHECKING:
    from mgraph.codegen.torch_provider import Site


def outer_operands(site: Site) -> str:
    """Operands of `grouped_outer` or `gathered_outer`, the rows of the latter taken: left, right and offsets."""
    if site.node.op == "grouped_outer":
        return ", ".join(site.operands)
    sides = dict(zip(("left", "right"), site.operands, strict=False))
    side, top_k = str(site.node.attrs["side"]), site.literal(site.node.attrs["top_k"])
    sides[side] = f"{sides[side]}[{site.operands[2]} // {top_k}]"
    return f"{sides['left']}, {sides['right']}, {site.operands[3]}"


def _outer(site: Site) -> str:
    left, right, offsets = outer_operands(site).rsplit(", ", 2)
    return f"rt.grouped_mm({left}.t(), {right}, {offsets})"


def _turned(weight: str, transposed: object) -> str:
    return f"{weight}.transpose(1, 2)" if transposed else weight


def _options(site: Site) -> list[str]:
    """Attributes that are not as they are if nothing is said, but for those of the form itself."""
    defaults = op_def(site.node.op).attrs
    given = {k: v for k, v in site.node.attrs.items() if k not in ("transpose_w", "packed", "keep")}
    return [f"{k}={site.literal(v)}" for k, v in given.items() if not (k in defaults and defaults[k] == v)]


def _units(site: Site) -> str:
    transposed, packed = site.node.attrs.get("transpose_w", False), str(site.node.attrs.get("packed", ""))
    count = 1 if packed else 2
    weights = [_turned(weight, transposed) for weight in site.operands[3 : 3 + count]]
    biases = list(site.operands[3 + count :])
    if packed:
        weights, biases = ([part for both in given for part in _parts(both, packed)] for given in (weights, biases))
    more = [f"biases=({', '.join(biases)})"] if biases else []
    call = f"rt.expert_glu({', '.join([*site.operands[:3], *weights, *_options(site), *more])})"
    return call if site.node.attrs.get("keep", False) else f"{call}[0]"


def _parts(both: str, packed: str) -> tuple[str, str]:
    """Gates and ups of what has both in its last dim."""
    if packed == "pairs":
        return f"{both}[..., ::2]", f"{both}[..., 1::2]"
    return f"{both}.chunk(2, -1)[0]", f"{both}.chunk(2, -1)[1]"


def _real(site: Site) -> str:
    experts = site.literal(site.node.attrs["num_experts"])
    return f"rt.real_choice({', '.join(site.operands)}, num_experts={experts})"


def _weighed(site: Site) -> str:
    rows, weight, *others = site.operands
    options = [*_options(site), *(f"bias={bias}" for bias in others[3:])]
    turned = _turned(weight, site.node.attrs.get("transpose_w", False))
    return f"rt.expert_sum({', '.join([rows, turned, *others[:3], *options])})"


def _units_grad(site: Site) -> str:
    operands = list(site.operands)
    operands[4] = _turned(operands[4], not site.node.attrs.get("transpose_w", False))
    return f"rt.expert_glu_grad({', '.join([*operands, *_options(site)])})"


def _sum(site: Site) -> str:
    first, first_weight, second, second_weight, offsets = site.operands
    first_weight, second_weight = (
        _turned(weight, site.node.attrs.get("transpose_w", False)) for weight in (first_weight, second_weight)
    )
    product = f"rt.grouped_mm({first}, {first_weight}, {offsets})"
    return f"{product}.add_(rt.grouped_mm({second}, {second_weight}, {offsets}))"


EXPERT_FORMS: Mapping[str, Callable[[Site], str]] = {
    "expert_glu": _units,
    "expert_glu_grad": _units_grad,
    "expert_sum": _weighed,
    "gathered_outer": _outer,
    "grouped_matmul_sum": _sum,
    "real_choice": _real,
}
"""Expressions by op."""
