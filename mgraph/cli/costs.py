"""The cost of nodes, in words: operations, and bytes between memory and the chip, as expressions over the dims."""

from __future__ import annotations

from collections.abc import Iterable

from mgraph.ir.dims import as_dim, dim_text
from mgraph.ir.graph import Node
from mgraph.ir.ops.cost import flops_of, traffic
from mgraph.passes.differentiation import VIEWS


def cost_text(nodes: Iterable[Node]) -> str:
    """The sum over nodes, such as `24576*B*S flops, 1024*B*S + 65536 bytes`.

    Views move nothing; a call costs what the function does that it calls, which is not counted here.
    """
    working = [node for node in nodes if node.op not in VIEWS and node.op != "call"]
    if not working:
        return "none: no data moves"
    flops, moved = (as_dim(sum(map(of, working))) for of in (flops_of, traffic))
    return f"{dim_text(flops)} flops, {dim_text(moved)} bytes"
