"""How evenly the experts of a step were loaded: what `finish` tells, as the log has it.

A load is how many tokens of a step, on all ranks and in all microbatches, an expert got.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

LOADS = "expert_loads"
"""The output of `finish` with the loads of all layers, and the key of the manifest that says whose they are."""
OVERRUN = ".overrun"
"""The end of the names of states in which the device counts them."""
OVERRUNS = "expert_overruns"
"""The same for tokens that found no room within a budget."""


def expert_loads(loads: Tensor, layers: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, Any]:
    """The fields of a step's record, from the loads i64[sum of experts] of its layers and its number of tokens.

    `expert_load` has each layer's counts by expert; `expert_imbalance` is the largest ratio of a layer's largest count
    to its mean (1 in balance), 0 where nothing was counted; `expert_dropped` the share of choices that no expert took.
    """
    counts: dict[str, list[int]] = {}
    worst, taken, chosen, start, values = 0.0, 0, 0, 0, loads.tolist()
    for layer in layers:
        own = counts[layer["layer"]] = values[start : start + layer["experts"]]
        start += layer["experts"]
        total = sum(own)
        worst = max(worst, max(own) * len(own) / total if total else 0.0)
        taken, chosen = taken + total, chosen + tokens * layer["choices"]
    dropped = 1 - taken / chosen if chosen else 0.0
    return {"expert_load": counts, "expert_imbalance": round(worst, 4), "expert_dropped": round(dropped, 6)}


def overrun_text(counts: Tensor, layers: Sequence[Mapping[str, Any]], step: int) -> str:
    """What is wrong with a step in which tokens found no room, "" where all did; counts i64[sum of ranks] of layers."""
    found, start, values = [], 0, counts.tolist()
    for layer in layers:
        own = values[start : start + layer["ranks"]]
        start += layer["ranks"]
        found += [f"{n} of rank {rank} of ep in {layer['layer']}" for rank, n in enumerate(own) if n]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"step {step}: tokens found no room on their way to experts: {', '.join(found[:3])}{more}" if found else ""


def load_text(record: Mapping[str, Any]) -> str:
    """What the line of a step says of its experts: the fullest of any layer, and what was dropped."""
    if "expert_imbalance" not in record:
        return ""
    dropped = f", {record['expert_dropped']:.1%} dropped" if record["expert_dropped"] else ""
    return f"  experts up to {record['expert_imbalance']:.2f}x{dropped}"
