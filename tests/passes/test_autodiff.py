"""The derived backward against torch autograd through the interpreter, in f32 and lifted."""

from __future__ import annotations

import pytest
import torch

from mgraph.compiler import build_module
from mgraph.errors import PassError
from mgraph.ir.graph import Module, StateKind
from mgraph.ir.interpreter import run
from mgraph.ir.verifier import verify
from mgraph.passes.autodiff import Autodiff
from mgraph.passes.base import Report
from mgraph.passes.calls import callers_first
from mgraph.passes.recompute import Recompute
from mgraph.recipe import Recipe
from tests.passes.models import mlp_module, random_batch, random_state

Tensors = dict[str, torch.Tensor]


def reference_gradients(module: Module, state: Tensors, batch: Tensors) -> tuple[torch.Tensor, Tensors]:
    leaves = {n: t.clone().requires_grad_() for n, t in state.items() if module.state[n].trainable}
    out, _ = run(module, "forward", batch, {**state, **leaves})
    out["loss_sum"].backward()
    return out["loss_sum"].detach(), {n: t.grad for n, t in leaves.items() if t.grad is not None}


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("lifted", [False, True])
def test_gradients_equal_autograd(mode: str, lifted: bool) -> None:
    forward = mlp_module(3)
    dtype = torch.float64 if lifted else torch.float32
    state = random_state(forward, dtype=dtype)
    batch = random_batch()
    loss, expected = reference_gradients(forward, state, batch)
    module = Recompute(mode).run(Autodiff().run(forward, Report()), Report())
    full = {**random_state(module, dtype=dtype), **state}
    out, new = run(module, "microbatch", batch, full, lifted=lifted)
    tolerance = 1e-12 if lifted else 1e-5
    torch.testing.assert_close(out["loss_sum"], loss, rtol=tolerance, atol=tolerance)
    for name, gradient in expected.items():
        torch.testing.assert_close(new[f"{name}.grad"], gradient, rtol=tolerance, atol=tolerance)
    assert new["acc.count"].item() == 9 == out["count"].item()


def test_gradients_accumulate_over_microbatches() -> None:
    module = Autodiff().run(mlp_module(), Report())
    state = random_state(module)
    sums: dict[str, torch.Tensor] = {}
    for seed in (1, 2):
        _, alone = run(module, "microbatch", random_batch(seed=seed), state)
        sums = {n: t + sums.get(n, 0) for n, t in alone.items()}
    _, first = run(module, "microbatch", random_batch(seed=1), state)
    _, both = run(module, "microbatch", random_batch(seed=2), {**state, **first})
    for name, total in sums.items():
        torch.testing.assert_close(both[name], total)


def test_one_derivative_serves_all_layers() -> None:
    few, many = (Autodiff().run(mlp_module(n), Report()) for n in (2, 12))
    assert set(few.functions) == set(many.functions)
    assert "layer.bwd" in few.functions
    calls = [n.attrs["callee"] for n in many.functions["microbatch"].nodes if n.op == "call"]
    assert calls == ["layer.fwd"] * 12 + ["layer.bwd"] * 12


def test_frozen_parameters_get_no_gradient() -> None:
    from dataclasses import replace

    forward = mlp_module()
    frozen = {n: replace(s, trainable=n != "layers.0.up") for n, s in forward.state.items()}
    module = Autodiff().run(replace(forward, state=frozen), Report())
    grads = {s.name for s in module.state.values() if s.kind is StateKind.GRAD}
    assert grads == {f"{n}.grad" for n in frozen if n != "layers.0.up"}
    state = random_state(module)
    _, expected = reference_gradients(forward, {n: state[n] for n in forward.state}, random_batch())
    _, new = run(module, "microbatch", random_batch(), state)
    torch.testing.assert_close(new["layers.1.down.grad"], expected["layers.1.down"])


def test_a_call_that_no_gradient_gets_through_is_not_called_backward() -> None:
    from dataclasses import replace

    from mgraph.ir.builder import FunctionBuilder

    forward = mlp_module(1)
    layer = forward.functions["layer"]
    builder = FunctionBuilder("layer", "capture", layer.names())
    with builder.at(layer.nodes[0]):
        held = builder.one("aten.detach.default", layer.params[0])
        out = builder.one("aten.mul.Tensor", held, held)
    closed = replace(layer, slots=(), nodes=tuple(builder.nodes), results=(out,))
    main = forward.functions["forward"]
    nodes = (replace(n, operands=n.operands[:1]) if n.op == "call" else n for n in main.nodes)
    forward = forward.with_function(closed).with_function(replace(main, nodes=tuple(nodes)))
    module = Autodiff().run(forward, Report())
    verify(module)
    assert [n.attrs["callee"] for n in module.functions["microbatch"].nodes if n.op == "call"] == ["layer.fwd"]


def test_a_loss_without_parameters_is_refused() -> None:
    from dataclasses import replace

    forward = mlp_module()
    frozen = {n: replace(s, trainable=False) for n, s in forward.state.items()}
    with pytest.raises(PassError, match="no trainable parameter"):
        Autodiff().run(replace(forward, state=frozen), Report())


def test_a_gradient_that_would_draw_anew_is_refused() -> None:
    """Torch's own dropout has a mask that a gradient traced from its formula would not get back."""
    from dataclasses import replace

    from mgraph.ir.builder import FunctionBuilder

    forward = mlp_module()
    layer = forward.functions["layer"]
    builder = FunctionBuilder("layer", "capture", layer.names())
    with builder.at(layer.nodes[-1]):
        out, _ = builder.emit("aten.native_dropout.default", layer.results, {"p": 0.5, "train": True})
    noisy = replace(layer, nodes=(*layer.nodes, *builder.nodes), results=(out,))
    with pytest.raises(PassError, match="draw its random numbers anew"):
        Autodiff().run(forward.with_function(noisy), Report())


@pytest.mark.parametrize(("model", "own"), [("moe-tiny-losses", True), ("moe-tiny", False)])
def test_predict_leaves_losses_of_layers_out(model: str, own: bool) -> None:
    """Layers have a function of their own for it only where they have losses, of which nothing is sent then."""
    module = build_module(Recipe(model=model, mesh="dp=2", arch="none")).module
    functions = callers_first(module, {"predict"})
    assert functions == ["predict", "layer.predict" if own else "layer"]
    ops = {node.op for name in functions for node in module.functions[name].nodes}
    assert not {"all_reduce", "all_reduce_start", "axis_share"} & ops
    others = {node.op for node in module.functions["layer"].nodes}
    assert ("axis_share" in others) is own
