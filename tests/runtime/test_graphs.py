"""Graphs of entries: when they are made, replayed, made again and given up, on a stand-in for the GPU.

What a GPU replays is compared in tests/end_to_end/test_gpu.py.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from mgraph.runtime import graphs
from mgraph.runtime.graphs import EntryGraphs


class StandIn(EntryGraphs):
    """Captures by keeping the function: a replay runs it on the captured inputs."""

    def __init__(self) -> None:
        super().__init__(["microbatch"])
        self.captures = 0
        self.fails = ""

    def _capture(self, entry: Any, state: Any, inputs: Any) -> Any:
        self.captures += 1
        if self.fails:
            raise RuntimeError(self.fails)
        own = tuple(t.clone() for t in inputs)
        outputs = tuple(torch.zeros(()) for _ in range(1))

        class Graph:
            def replay(self) -> None:
                outputs[0].copy_(entry(state, *own)[0])

        return graphs._Captured(Graph(), own, outputs, tuple(state.values()))


def entry(state: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Adds to the state, and returns the sum."""
    state["total"].add_(x.sum())
    return (state["total"].clone(),)


def test_first_call_is_a_step_and_later_ones_are_replayed() -> None:
    held, state = StandIn(), {"total": torch.zeros(())}
    results = [held.call("microbatch", entry, state, [torch.full((2,), float(i))])[0] for i in range(4)]
    assert [float(r) for r in results] == [0.0, 2.0, 6.0, 12.0]  # results of earlier calls stay what they were
    assert held.captures == 1
    held.call("microbatch", entry, state, [torch.ones(3)])
    assert held.captures == 1  # other shapes begin anew
    held.call("microbatch", entry, state, [torch.ones(3)])
    assert held.captures == 2


def test_other_state_is_captured_again() -> None:
    held = StandIn()
    for _ in range(2):
        held.call("microbatch", entry, {"total": torch.zeros(())}, [torch.ones(2)])
    state = {"total": torch.zeros(())}
    (result,) = held.call("microbatch", entry, state, [torch.ones(2)])
    assert held.captures == 2 and float(result) == float(state["total"]) == 2.0


def test_what_is_not_captured_just_runs() -> None:
    held, state = StandIn(), {"total": torch.zeros(())}
    for _ in range(3):
        held.call("evaluate", entry, state, [torch.ones(2)])
    assert held.captures == 0 and float(state["total"]) == 6.0


def test_a_failed_capture_is_said_once_and_the_entry_runs() -> None:
    held, state = StandIn(), {"total": torch.zeros(())}
    held.fails = "operation not permitted\nmore"
    held.call("microbatch", entry, state, [torch.ones(2)])
    with pytest.warns(RuntimeWarning, match="microbatch runs without a CUDA graph: operation not permitted"):
        held.call("microbatch", entry, state, [torch.ones(2)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held.call("microbatch", entry, state, [torch.ones(2)])
    assert held.captures == 1 and float(state["total"]) == 6.0


def test_too_many_shapes_run_op_by_op() -> None:
    held, state = StandIn(), {"total": torch.zeros(())}
    for size in range(graphs.MOST_SHAPES):
        held.call("microbatch", entry, state, [torch.ones(size)])
    for _ in range(2):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            held.call("microbatch", entry, state, [torch.ones(100)])
    assert held.captures == 0 and float(state["total"]) == sum(range(graphs.MOST_SHAPES)) + 200
