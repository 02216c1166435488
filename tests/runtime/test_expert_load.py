"""What the log says of the load of experts, counted by hand."""

from __future__ import annotations

import torch

from mgraph.runtime.expert_load import expert_loads, load_text

LAYERS = [{"layer": "a", "experts": 4, "choices": 2}, {"layer": "b", "experts": 2, "choices": 1}]


def test_fields_of_a_step() -> None:
    """10 tokens: 20 choices in one layer, of which 18 are taken, and 10 in the other."""
    made = expert_loads(torch.tensor([9, 3, 6, 0, 3, 7]), LAYERS, 10)
    assert made["expert_load"] == {"a": [9, 3, 6, 0], "b": [3, 7]}
    assert made["expert_imbalance"] == 2.0
    assert made["expert_dropped"] == round(2 / 30, 6)
    assert load_text(made) == "  experts up to 2.00x, 6.7% dropped"


def test_nothing_was_dropped_or_nothing_counted() -> None:
    even = expert_loads(torch.tensor([5, 5, 5, 5, 5, 5]), LAYERS, 10)
    assert (even["expert_imbalance"], even["expert_dropped"]) == (1.0, 0.0)
    assert load_text(even) == "  experts up to 1.00x"
    assert expert_loads(torch.zeros(6, dtype=torch.int64), LAYERS, 0)["expert_imbalance"] == 0.0
    assert load_text({"loss": 1.0}) == ""
