"""Which updates may write over the state they update, and that the numbers stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Entry, Module, Origin, State, StateKind, Value
from mgraph.ir.interpreter import run
from mgraph.ir.types import DType, TensorType
from mgraph.passes.base import Report
from mgraph.passes.in_place import InPlace
from tests.passes.models import tensor

SIZE = 3


def started(name: str) -> FunctionBuilder:
    builder = FunctionBuilder(name, "capture")
    builder.origin = Origin("", "model.py", 1)
    return builder


def total_state(name: str = "total") -> State:
    return State.make(name, tensor(SIZE), StateKind.GRAD, init=(("zeros_",),), persist=False)


def module_of(main: FunctionBuilder, results: list[Value], total: State) -> Module:
    """An entry `step` whose last result is the new value of the state."""
    functions = {main.name: main.build(results)}
    names = tuple(f"out{i}" for i in range(len(results) - 1))
    return Module(
        "test",
        state={"total": total},
        functions=functions,
        entries={"step": Entry("step", main.name, names, ("total",))},
    )


def ops(module: Module) -> list[str]:
    return [node.op for _, node in module.walk()]


def assert_same(before: Module, after: Module, x: torch.Tensor) -> None:
    state = {"total": torch.arange(3.0)}
    for old, new in zip(run(before, "step", {"x": x}, state), run(after, "step", {"x": x}, state), strict=True):
        assert old.keys() == new.keys() and all(torch.equal(t, new[n]) for n, t in old.items())


def test_an_update_that_nothing_reads_over_is_made_in_place() -> None:
    total, main, report = total_state(), started("step"), Report()
    x = main.param("x", tensor(SIZE))
    first = main.one("accumulate", total.value, x)
    second = main.one("accumulate", first, x)
    module = module_of(main, [second], total)
    found = InPlace().run(module, report)
    assert ops(found) == ["accumulate_", "accumulate_"]
    assert not report.near_misses
    assert_same(module, found, torch.randn(SIZE))


def test_state_that_is_read_again_is_not_written_over() -> None:
    total, main, report = total_state(), started("step"), Report()
    x = main.param("x", tensor(SIZE))
    new = main.one("accumulate", total.value, x)
    old = main.one("aten.mul.Scalar", total.value, other=2)
    module = module_of(main, [old, new], total)
    found = InPlace().run(module, report)
    assert found is module
    (miss,) = report.near_misses
    assert (miss.pattern, miss.guard, miss.detail) == ("accumulate", "is read again later", "@total")


def test_what_is_no_state_is_not_written_over() -> None:
    total, main, report = total_state(), started("step"), Report()
    x = main.param("x", tensor(SIZE))
    mine = main.one("accumulate", x, x)
    new = main.one("accumulate", total.value, mine)
    found = InPlace().run(module_of(main, [new], total), report)
    assert ops(found) == ["accumulate", "accumulate_"]
    assert [m.guard for m in report.near_misses] == ["is not an old value of state"]


def test_sums_of_many_are_made_in_place_together() -> None:
    total, main = total_state(), started("step")
    x = main.param("x", tensor(SIZE))
    other = total_state("other")
    results = main.emit("accumulate_each", [other.value, total.value, x, x])
    module = replace(module_of(main, list(results), total), state={"total": total, "other": other})
    assert ops(InPlace().run(module, Report())) == ["accumulate_each_"]
    given, part = {"total": torch.arange(3.0).double(), "other": torch.ones(SIZE).bfloat16()}, torch.randn(SIZE)
    outputs, updates = run(module, "step", {"x": part}, given)
    assert torch.equal(updates["total"], given["total"] + part)
    assert torch.equal(outputs["out0"], given["other"] + part.bfloat16()), "the sum is in the dtype of the total"
    with pytest.raises(ValueError, match="as many parts as totals, and was given 3 tensors"):
        main.emit("accumulate_each", [total.value, other.value, x])


def test_a_part_of_state_is_written_over_where_nothing_of_it_is_read_afterwards() -> None:
    def updated(read_whole: bool, read_part: bool, read_before: bool = False) -> tuple[Module, Module]:
        total, main = State.make("total", tensor(2 * SIZE), StateKind.PARAM, init=(("zeros_",),)), started("step")
        x, index = main.param("x", tensor(SIZE)), main.param("index", TensorType(DType.I64))
        outs = [main.one("aten.mul.Scalar", total.value, other=2)] if read_before else []
        (part,) = main.emit("part_of", [total.value, index], {"dim": 0, "parts": 2}, types=[tensor(SIZE)])
        made = main.one("accumulate", part, x)
        whole = main.one("aten.repeat.default", made, repeats=(2,))
        outs += [main.one("aten.mul.Scalar", total.value, other=2)] if read_whole else []
        outs += [main.one("aten.mul.Scalar", part, other=2)] if read_part else []
        module = module_of(main, [*outs, whole], total)
        return module, InPlace().run(module, Report())

    assert ops(updated(False, False)[1]) == ["part_of", "accumulate_", "aten.repeat.default"]
    assert "accumulate_" in ops(updated(False, False, read_before=True)[1])
    for read_whole, read_part in ((True, False), (False, True)):
        before, after = updated(read_whole, read_part)
        assert after is before


def called_module(read_after: bool, twice: bool = False) -> Module:
    """A function that adds to its slot, called on the state; the caller may read the old state, or pass it twice."""
    body = started("body")
    x = body.param("x", tensor(SIZE))
    slots = [body.slot(n, tensor(SIZE)) for n in (("slot", "other") if twice else ("slot",))]
    made = body.build([body.one("accumulate", slots[0], x if not twice else slots[1])])
    total, main = total_state(), started("step")
    x = main.param("x", tensor(SIZE))
    operands = [x, *([total.value] * len(slots))]
    (new,) = main.emit("call", operands, {"callee": "body"}, types=[tensor(SIZE)], names=["new"])
    outs = [main.one("aten.mul.Scalar", total.value, other=2)] if read_after else []
    module = module_of(main, [*outs, new], total)
    return module.with_function(made)


def test_a_slot_is_written_over_only_where_no_caller_reads_the_state_again() -> None:
    free, read, twice = (called_module(*flags) for flags in ((False,), (True,), (False, True)))
    assert "accumulate_" in ops(InPlace().run(free, Report()))
    assert InPlace().run(read, Report()) is read
    assert InPlace().run(twice, Report()) is twice
    x = torch.randn(SIZE)
    assert_same(free, InPlace().run(free, Report()), x)


def test_other_ops_are_left_alone() -> None:
    total, main = total_state(), started("step")
    x = main.param("x", tensor(SIZE))
    new = main.one("aten.add.Tensor", total.value, x)
    module = module_of(main, [new], total)
    assert InPlace().run(module, Report()) is module
