"""The order of collectives of step texts, against what running them records."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from mgraph import step_order
from mgraph.errors import PackageError
from mgraph.ir.collectives import kind_of
from mgraph.ir.opdef import declared_ops
from mgraph.step_order import expanded, order_text, read_step_order

STEP = """
K = rt.kernels(__file__)

def nothing(x):
    if x:
        return x
    return [y for y in x]

def gather(x):
    return rt.wait(rt.all_gather_start([x], "tp", dim=1))[0]

def layer(x, *, window):
    x = gather(x)
    for i in range(2):
        nothing(x)
        (x,) = rt.reduce_scatter([rt.all_to_all([x], axis="tp")[0]], "all", 1)
    return x

def microbatch(state, tokens):
    x = nothing(tokens)
    names = [name for name in state]
    for i in reversed(range(1, 4)):
        x = layer(x, window=i)
        x = layer(x, window=0)
    with no_grad():
        (state["x"],) = rt.all_reduce([gather(x)], "dp", "max")
    return x
"""


class Recorder:
    """A runtime that notes the collectives which are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def collective(tensors: list[Any], axis: str, *rest: Any, **more: Any) -> list[Any]:
            self.calls.append(f"{name.removesuffix('_start')}@{axis}")
            return tensors

        plain = {"wait": lambda tensors: tensors, "kernels": lambda file: None}
        return plain.get(name, collective)


def sequence(order: step_order.StepOrder, function: str) -> list[str]:
    """Every collective of a function, those of the functions it calls in their places."""
    found = []
    for step in expanded(order[function]):
        found += [step.text] if step.axis else sequence(order, step.name)
    return found


def test_the_order_is_that_of_a_run() -> None:
    from contextlib import nullcontext

    rt = Recorder()
    scope: dict[str, Any] = {"rt": rt, "__file__": "", "no_grad": nullcontext}
    exec(STEP, scope)
    scope["microbatch"]({}, [1])
    order = read_step_order(STEP)
    assert sequence(order, "microbatch") == rt.calls
    assert len(rt.calls) == 6 * 5 + 2


def test_text() -> None:
    assert order_text(read_step_order(STEP)) == {
        "gather": "all_gather@tp",
        "layer": "gather 2*(all_to_all@tp reduce_scatter@all)",
        "microbatch": "3*(layer layer) gather all_reduce@dp",
    }
    assert order_text(read_step_order("\n\n" + STEP)) == order_text(read_step_order(STEP))


REFUSED = {
    "if x.sum() > 0:\n    reduce(x)": (2, "reduce, which issues collectives, stands under a condition"),
    'if rank == 0:\n    x = rt.all_reduce([x], "dp")': (2, "rt.all_reduce over dp stands under a condition"),
    "y = reduce(x) if x else x": (1, "stands under a condition"),
    "y = x and reduce(x)": (1, "stands under a condition"),
    "for y in x:\n    reduce(y)": (2, "in a loop that has a length that is not written there"),
    "for i in range(n):\n    reduce(x)": (2, "in a loop that has a length that is not written there"),
    "for i in range(3):\n    reduce(x)\n    if x:\n        break": (2, "in a loop that may end early"),
    "while x:\n    reduce(x)": (2, "in a loop that has a length that is not written there"),
    "y = [reduce(z) for z in x]": (1, "stands in a comprehension"),
    "try:\n    reduce(x)\nexcept ValueError:\n    pass": (2, "stands where an error may skip it"),
    "match x:\n    case 1:\n        reduce(x)": (3, "stands under a condition"),
    "f = lambda: reduce(x)": (1, "stands in a function within a function"),
    "if x:\n    return x\nreduce(x)": (1, "may end early"),
    'rt.all_reduce([x], "dp" if x else "tp")': (1, "the axis of a collective is no text"),
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_some_ranks_might_leave_out_is_refused(body: str) -> None:
    line, said = REFUSED[body]
    text = 'def reduce(x):\n    return rt.all_reduce([x], "dp")\n\ndef main(x):\n' + textwrap.indent(body, "    ")
    with pytest.raises(PackageError) as caught:
        read_step_order(text, "here/step.py")
    assert said in caught.value.message
    assert caught.value.where == f"here/step.py:{4 + line}"


def test_the_same_forms_around_other_calls_pass() -> None:
    for body in REFUSED:
        if "reduce(" in body and "rt." not in body:
            text = "def reduce(x):\n    return x\n\ndef main(x):\n" + textwrap.indent(body, "    ")
            assert read_step_order(text) == {}


def test_not_python() -> None:
    with pytest.raises(PackageError, match="not Python"):
        read_step_order("def f(:\n")


def test_kinds_are_those_of_the_graph() -> None:
    """`keep_shard` is a collective only in what it means: each rank takes its part, and nothing is sent."""
    kinds = {kind_of(name) for name, op in declared_ops().items() if op.collective}
    assert kinds - {"keep_shard"} == set(step_order.KINDS)
