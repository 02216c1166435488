"""Hand-built modules for the tests of passes, and the interpreter as their judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.dims import NamedDim, symbol
from mgraph.ir.graph import Entry, Function, Module, Origin, State, StateKind
from mgraph.ir.interpreter import run
from mgraph.ir.types import DType, TensorType

B, S = symbol("B"), symbol("S")


def started(name: str = "forward") -> FunctionBuilder:
    """A builder whose nodes have an origin, as the verifier asks."""
    builder = FunctionBuilder(name, "capture")
    builder.origin = Origin("", "model.py", 1)
    return builder


def f32(*shape: Any) -> TensorType:
    return TensorType(DType.F32, shape)


def i64(*shape: Any) -> TensorType:
    return TensorType(DType.I64, shape)


def module_of(*functions: Function, state: Mapping[str, State] | None = None, outputs: int | None = None) -> Module:
    """A module whose entry `forward` is the first function, with dims B and S."""
    count = len(functions[0].results) if outputs is None else outputs
    entry = Entry("forward", functions[0].name, tuple(f"out{i}" for i in range(count)))
    return Module(
        "test",
        dims={"B": NamedDim("B"), "S": NamedDim("S", 2)},
        state=dict(state or {}),
        functions={f.name: f for f in functions},
        entries={"forward": entry},
    )


def stacked(
    layers: int, *, width: int = 8, list_path: str = "layers", repeats: int = 1, windows: tuple[int, ...] = ()
) -> Module:
    """`layers` equal layers on `x: f32[B, width]` with one shared scale; `windows` clamps per layer."""
    builder = FunctionBuilder("forward", "capture")
    x, shared = builder.param("x", f32(B, width)), builder.param("shared", f32(width))
    state: dict[str, State] = {}
    for index in range(layers):
        path = f"{list_path}.{index}"
        for name in ("up", "down"):
            key = f"{path}.mlp.{name}.weight"
            state[key] = State.make(key, f32(width, width), StateKind.PARAM, trainable=True)
        for repeat in range(repeats):
            builder.origin = Origin(f"{path}.norm", "model.py", 10)
            y = builder.one("aten.mul.Tensor", x, shared, name=f"scaled_{index}_{repeat}")
            builder.origin = Origin(f"{path}.mlp", "model.py", 20)
            y = builder.one("aten.linear.default", y, state[f"{path}.mlp.up.weight"].value)
            y = builder.one("aten.clamp.default", y, max=float(windows[index % len(windows)]) if windows else 2.0)
            y = builder.one("aten.linear.default", y, state[f"{path}.mlp.down.weight"].value)
            builder.origin = Origin(path, "model.py", 30)
            x = builder.one("aten.add.Tensor", x, y)
    return module_of(builder.build([x]), state=state)


def random_state(module: Module, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn([int(d) for d in state.type.shape], generator=generator)
        for name, state in module.state.items()
    }


def assert_same_results(before: Module, after: Module, inputs: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Interpreting both gives bitwise equal outputs."""
    old, _ = run(before, "forward", inputs, state)
    new, _ = run(after, "forward", inputs, state)
    assert old.keys() == new.keys() and old
    for name, tensor in old.items():
        assert torch.equal(tensor, new[name]), name
