"""Adapters: what they compute and their gradients, what stays frozen, and why a weight gets none."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from mgraph import philox
from mgraph.errors import OptionError, PassError
from mgraph.ir.graph import Module
from mgraph.ir.interpreter import run
from mgraph.ir.verifier import verify
from mgraph.passes.autodiff import Autodiff
from mgraph.passes.base import Report
from mgraph.passes.lora import Lora
from mgraph.passes.pipeline import parse_pipeline, print_pipeline
from mgraph.passes.samples import random_state
from mgraph.passes.verify import verify_pipeline
from tests.passes.models import INNER, WIDTH, mlp_module, random_batch
from tests.passes.raising import inputs_of, module_of

LINEARS = ("*.up: rank=3, alpha=6", "*.down: rank=2, alpha=8, rslora")
SCALES = {"up": 2.0, "down": 8 / math.sqrt(2)}


def adapted(module: Module, *rules: str, train: str = "") -> tuple[Module, Report]:
    report = Report()
    made = Lora(rules, train).run(module, report)
    verify(made)
    return made, report


def merged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of `mlp_module` with their adapters in them, float64."""
    made = {n: t.double() for n, t in state.items()}
    for name in [n for n in state if f"{n}.lora_A.weight" in state]:
        scale = SCALES[name.rpartition(".")[2]]
        made[name] = made[name] + scale * made[f"{name}.lora_B.weight"] @ made[f"{name}.lora_A.weight"]
    return made


def test_loss_and_gradients_are_those_of_merged_weights() -> None:
    """Independent of the pass: autograd through the module before it, with W + scale B A in place of W."""
    before = mlp_module(3)
    after, _ = adapted(before, *LINEARS)
    after = Autodiff().run(after, Report())
    state, batch = random_state(after, 4), random_batch()
    trained = {n: t.double().requires_grad_() for n, t in state.items() if ".lora_" in n and not n.endswith(".grad")}
    assert len(trained) == 12
    out, _ = run(before, "forward", batch, merged({**state, **trained}), lifted=True)
    out["loss_sum"].backward()
    with torch.no_grad():
        found, new = run(after, "microbatch", batch, state, lifted=True)
    torch.testing.assert_close(found["loss_sum"], out["loss_sum"].detach(), rtol=1e-9, atol=0)
    for name, leaf in trained.items():
        assert leaf.grad is not None and leaf.grad.norm() > 0
        torch.testing.assert_close(new[f"{name}.grad"] - state[f"{name}.grad"], leaf.grad, rtol=1e-9, atol=1e-11)


def test_without_b_nothing_changes() -> None:
    before = mlp_module()
    after, _ = adapted(before, *LINEARS)
    state = random_state(after, 1)
    state |= {n: torch.zeros_like(t) for n, t in state.items() if ".lora_B" in n}
    for name, tensor in run(before, "forward", random_batch(), state)[0].items():
        assert torch.equal(tensor, run(after, "forward", random_batch(), state)[0][name])


def test_the_states() -> None:
    before = mlp_module()
    after, report = adapted(before, *LINEARS)
    a, b = (after.state[f"layers.1.up.lora_{x}.weight"] for x in "AB")
    assert a.type.shape == (3, WIDTH) and b.type.shape == (INNER, 3)
    # torch.nn.init.kaiming_uniform_(a=sqrt(5)): gain sqrt(2 / (1 + 5)), bound gain sqrt(3 / in) = 1 / sqrt(in)
    assert a.init == (("uniform_", -(WIDTH**-0.5), WIDTH**-0.5),) and b.init == (("zeros_",),)
    assert {n for n, s in after.state.items() if s.trainable} == after.state.keys() - before.state.keys()
    assert report.counts == {"adapters": 4, "frozen": 5}
    assert [m.detail for m in report.matches] == ["up: rank 3, scale 2", f"down: rank 2, scale {8 / math.sqrt(2):g}"]


def test_parameters_that_are_trained_besides() -> None:
    after, report = adapted(mlp_module(), "*.up: rank=1", train="embed|*.0.down|*.bias")
    assert {n for n, s in after.state.items() if s.trainable and "lora" not in n} == {"embed", "layers.0.down"}
    assert report.counts["frozen"] == 3
    with pytest.raises(OptionError, match=r"'\*\.norm\|\*\.bias' matches no parameter"):
        adapted(mlp_module(), "*.up: rank=1", train="*.norm|*.bias")


def test_layers_without_adapters_keep_their_function() -> None:
    before = mlp_module(4)
    after, report = adapted(before, "layers.1.*: rank=2", "layers.3.up: rank=1", "layers.2.*: rank=2, alpha=2")
    calls = [n.attrs["callee"] for n in after.functions["forward"].nodes if n.op == "call"]
    assert calls == ["layer", "layer_1", "layer_1", "layer_2"]
    assert after.functions["layer"] is before.functions["layer"]
    assert report.counts["adapters"] == 5
    state = random_state(after, 2)
    own = dict(state)
    for layer, name in ((1, "up"), (1, "down"), (2, "up"), (2, "down"), (3, "up")):
        weight = f"layers.{layer}.{name}"
        own[weight] = state[weight] + state[f"{weight}.lora_B.weight"] @ state[f"{weight}.lora_A.weight"]
    out = run(after, "forward", random_batch(), state)[0]
    for name, expected in run(before, "forward", random_batch(), own)[0].items():
        torch.testing.assert_close(out[name], expected, rtol=1e-5, atol=1e-5)


def test_dropout_is_drawn_by_counter_and_only_in_training() -> None:
    """The linear's input is dropped by the key of (seed, site, layer), its elements counted within their sequence."""
    text = """
state @layers.3.q.weight: f32[4, 8] = param trainable init [["zeros_"]]
func @forward(%x: f32[B, S, 8]) {
  %y: f32[B, S, 4] = call @layer(%x; @layers.3.q.weight)
  return %y
}
func @layer(%x: f32[B, S, 8]; %q.weight: f32[4, 8]) {
  %y: f32[B, S, 4] = aten.linear.default(%x, %q.weight)
  return %y
}
"""
    after, _ = adapted(module_of(text), "*.q: rank=2, alpha=6, dropout=0.4")
    assert list(after.entries) == ["forward", "evaluation"]
    state = random_state(after, 0) | {"rng.seed": torch.tensor(7), "rng.step": torch.tensor(2)}
    state |= {"rng.sample": torch.tensor(5)}
    inputs = inputs_of(after, {})
    x, w = inputs["x"], state["layers.3.q.weight"]
    a, b = (state[f"layers.3.q.lora_{name}.weight"] for name in "AB")
    key = philox.sample_key(state["rng.seed"], "layers.*.q.lora_dropout", 3)
    keep = philox.keep_by_sample(x.shape, 3, key, state["rng.step"], state["rng.sample"], 0.4)
    for entry, dropped in (("forward", x * keep / 0.6), ("evaluation", x)):
        (found,) = run(after, entry, inputs, state)[0].values()
        torch.testing.assert_close(found, x @ w.T + 3.0 * (dropped @ a.T) @ b.T)


def test_functions_within_functions() -> None:
    """Adapters come down through both calls; the layer's number too, and the number within it is part of the site."""
    text = """
state @layers.{0..1}.parts.0.w: f32[4, 4] = param trainable init [["zeros_"]]
state @layers.{0..1}.parts.1.w: f32[4, 4] = param trainable init [["zeros_"]]
func @forward(%x: f32[B, 4]) {
  %y: f32[B, 4] = call @layer(%x; @layers.0.parts.0.w, @layers.0.parts.1.w)
  %z: f32[B, 4] = call @layer(%y; @layers.1.parts.0.w, @layers.1.parts.1.w)
  return %z
}
func @layer(%x: f32[B, 4]; %parts.0.w: f32[4, 4], %parts.1.w: f32[4, 4]) {
  %y: f32[B, 4] = call @part(%x; %parts.0.w)
  %z: f32[B, 4] = call @part(%y; %parts.1.w)
  return %z
}
func @part(%x: f32[B, 4]; %w: f32[4, 4]) {
  %y: f32[B, 4] = aten.linear.default(%x, %w)
  return %y
}
"""
    before = module_of(text)
    after, report = adapted(before, "*: rank=2, dropout=0.5")
    assert report.counts["adapters"] == 4
    drops = [n for _, n in after.walk() if n.op == "dropout"]
    assert {n.attrs["site"] for n in drops} == {f"layers.*.parts.{i}.w.lora_dropout" for i in range(2)}
    calls = [n for n in after.entry_function("forward").nodes if n.op == "call"]
    assert [n.attrs["static.call"] for n in calls] == [0, 1] and len({n.attrs["callee"] for n in calls}) == 1
    state, inputs = random_state(after, 0), inputs_of(before, {})
    own = dict(state)
    for name in before.state:
        own[name] = state[name] + state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
    (expected,) = run(before, "forward", inputs, own)[0].values()
    (found,) = run(after, "evaluation", inputs, state)[0].values()
    torch.testing.assert_close(found, expected)
    first, second = (run(after, "forward", inputs, state | {"rng.step": torch.tensor(s)})[0] for s in (0, 1))
    assert not torch.equal(first["out0"], second["out0"])


def test_verify_compares_it_with_merged_weights() -> None:
    statuses = [
        verify_pipeline(mlp_module(), (Lora(("*.up: rank=2, alpha=4" + more,)),))[0].measured["verify"]
        for more in ("", ", dropout=0.1")
    ]
    assert (statuses[0]["status"], statuses[0]["method"]) == ("verified", "both graphs")
    assert statuses[1]["status"] == "unverified" and "random numbers" in statuses[1]["why"]


@pytest.mark.parametrize(
    ("line", "shape", "transposed"),
    [
        ("aten.linear.default(%x, @w)", "5, 4", False),
        ('aten.linear.default(%x, @w, @bias) {args = ["input", "weight", "bias"]}', "5, 4", False),
        ("aten.addmm.default(@bias, %x, @w)", "4, 5", True),
        ("aten.mm.default(%x, @w)", "4, 5", True),
        ("aten.matmul.default(%x, @w)", "4, 5", True),
    ],
)
def test_forms_of_a_linear(line: str, shape: str, transposed: bool) -> None:
    text = f"""
state @w: f32[{shape}] = param trainable init [["zeros_"]]
state @bias: f32[5] = param trainable init [["zeros_"]]
func @forward(%x: f32[B, 4]) {{
  %y: f32[B, 5] = {line}
  return %y
}}
"""
    before = module_of(text)
    after, _ = adapted(before, "w: rank=3, alpha=12")
    state, inputs = random_state(after, 0), inputs_of(before, {})
    assert state["w.lora_A.weight"].shape == (3, 4) and state["w.lora_B.weight"].shape == (5, 3)
    (base,), (found,) = (run(m, "forward", inputs, state)[0].values() for m in (before, after))
    update = 4.0 * (inputs["x"] @ state["w.lora_A.weight"].T) @ state["w.lora_B.weight"].T
    torch.testing.assert_close(found, base + update)
    own = Lora(("w: rank=3, alpha=12",)).states_before(before, state)
    assert own is not None
    (again,) = run(before, "forward", inputs, own)[0].values()
    torch.testing.assert_close(again, found)
    assert Lora(("w: rank=3",)).targets(before, Report())["w"].transposed is transposed


@pytest.mark.parametrize(
    ("change", "guard", "says"),
    [
        ({"%x, @w)": "%x, @w)\n  %z: f32[S, B, 5] = aten.linear.default(%x, @w)"}, "one reader", "read 2 times"),
        ({"f32[5, 4]": "f32[4]", "f32[S, B, 5]": "f32[S, B]", "linear": "matmul"}, "a matrix", "1 dims"),
        (
            {
                "aten.linear.default(%x, @w)": "aten.matmul.default(%x, %t)",
                "  %y": "  %t: f32[4, 5] = aten.permute.default(@w) {dims = [1, 0]}\n  %y",
            },
            "a linear",
            "aten.permute.default reads it",
        ),
        (
            {"  %y": "  %u: f32[S, B, 4] = aten.mul.Tensor(%x) {other = 2.0}\n  %y", "%x, @w": "%u, @v"},
            "one reader",
            "read 0 times",
        ),
        ({}, "batch first", "the batch is not the first dim"),
        ({"state @v": "state @w.lora_A.weight"}, "free names", "w.lora_A.weight already"),
    ],
)
def test_near_misses(change: dict[str, str], guard: str, says: str) -> None:
    text = """
state @w: f32[5, 4] = param trainable init [["zeros_"]]
state @v: f32[5, 4] = param trainable init [["zeros_"]]
func @forward(%x: f32[S, B, 4]) {
  %y: f32[S, B, 5] = aten.linear.default(%x, @w)
  return %y
}
"""
    for old, new in change.items():
        text = text.replace(old, new)
    report = Report()
    with pytest.raises(PassError, match="fits no linear: w: "):
        Lora(("w: rank=2, dropout=0.1",)).run(module_of(text), report)
    (miss,) = report.near_misses
    assert (miss.guard, miss.pattern) == (guard, "lora")
    assert says in miss.detail


def test_an_addmm_with_factors_is_a_near_miss() -> None:
    text = """
state @w: f32[4, 5] = param trainable init [["zeros_"]]
func @forward(%b: f32[5], %x: f32[B, 4]) {
  %y: f32[B, 5] = aten.addmm.default(%b, %x, @w) {alpha = 2}
  return %y
}
"""
    report = Report()
    with pytest.raises(PassError, match=r"aten\.addmm\.default has alpha"):
        Lora(("w: rank=2",)).run(module_of(text), report)
    assert [m.guard for m in report.near_misses] == ["no factors"]


def test_one_near_miss_stands_for_all_layers_and_the_others_are_adapted() -> None:
    after, report = adapted(mlp_module(3), "*: rank=1")
    assert report.counts["adapters"] == 6
    assert [re.sub(r" \(.*", "", m.detail) for m in report.near_misses] == [
        "lora at embed: it is read 2 times, expected 1"
    ]
    assert after.state["embed"].trainable is False


def test_names_that_fit_nothing() -> None:
    with pytest.raises(OptionError, match=r"the adapter 'layers\.\*\.upp: rank=1, alpha=1' matches no parameter"):
        adapted(mlp_module(), "layers.*.upp: rank=1")
    with pytest.raises(OptionError, match="has no parameters left"):
        adapted(mlp_module(), "*.up: rank=1", "layers.0.up: rank=2")
    assert adapted(mlp_module(), "*.up: rank=1", "*.up: rank=1")[1].counts["adapters"] == 2


def test_its_text() -> None:
    pipeline = (Lora(("a.*|b: rank=2, alpha=4, dropout=0.1",), "*norm*"),)
    assert parse_pipeline(print_pipeline(pipeline)) == pipeline
