"""Recomputation: bitwise the same gradients for every budget and choice, and less is held."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.graph import Module, Origin, Phase
from mgraph.ir.interpreter import run
from mgraph.ir.parser import parse_module
from mgraph.ir.printer import print_module
from mgraph.ir.verifier import verify
from mgraph.passes.activations import held_bytes
from mgraph.passes.autodiff import Autodiff
from mgraph.passes.base import Report
from mgraph.passes.pipeline import parse_pipeline, print_pipeline
from mgraph.passes.recompute import Recompute, size_text
from tests.passes.models import mlp_module, random_batch, random_state

SIZES = {"B": 2, "S": 5}
TOKENS, WIDTH, INNER, VOCAB = 10, 6, 10, 11
INPUTS = 3 * TOKENS * WIDTH * 4  # of each of three layers
HEAD = TOKENS * (WIDTH + VOCAB) * 4  # what the head and the loss hold: their input, and the logits
UP_OUT = TOKENS * INNER * 4
EVERYTHING = INPUTS + HEAD + 3 * 2 * UP_OUT


def trained(layers: int = 3) -> Module:
    return Autodiff().run(mlp_module(layers), Report())


def selective(budget: int = 0, values: tuple[str, ...] = ()) -> Recompute:
    return Recompute("selective", budget, SIZES["B"], SIZES["S"], values)


def assert_same(before: Module, after: Module) -> None:
    verify(after)
    state, batch = random_state(before), random_batch()
    for old, new in zip(run(before, "microbatch", batch, state), run(after, "microbatch", batch, state), strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(tensor, new[name]) for name, tensor in old.items())


def test_what_is_held_is_counted_in_bytes() -> None:
    assert held_bytes(trained(), SIZES) == EVERYTHING
    assert held_bytes(trained(), {"B": 4, "S": 5}) == 2 * EVERYTHING
    assert held_bytes(Recompute("full").run(trained(), Report()), SIZES) == INPUTS + HEAD


@pytest.mark.parametrize("part", [1.0, 0.9, 0.7, 0.5, 0.0])
def test_every_budget_is_met_bit_for_bit(part: float) -> None:
    module, report = trained(), Report()
    budget = INPUTS + HEAD + int(part * (EVERYTHING - INPUTS - HEAD))
    found = selective(budget).run(module, report)
    assert held_bytes(found, SIZES) == report.counts["bytes_held"] <= budget
    assert report.counts["bytes_held_before"] == EVERYTHING
    assert (found is module) is (part == 1.0) is (report.counts["flops_added"] == 0)
    assert_same(module, found)


def test_what_is_cheap_is_given_up_first() -> None:
    """The product costs more than its activation, and both are as large."""
    report = Report()
    found = selective(EVERYTHING - 1).run(trained(), report)
    (match,) = report.matches
    assert match.function == "layer.bwd" and match.detail.startswith("silu computed again in 3 calls")
    assert [v.name for v in found.functions["layer.fwd"].results[1:]] == ["up_out"]
    assert report.counts["flops_added"] == 3 * TOKENS * INNER
    assert found.functions["layer.bwd"].nodes[0].made_by == "recompute"


def test_a_budget_that_cannot_be_met_names_the_least() -> None:
    with pytest.raises(PassError, match=r"holds at least 1.37KiB .* more than the budget of 100B") as caught:
        selective(100).run(trained(), Report())
    assert "--activation-budget 1.37KiB" in str(caught.value)
    selective(INPUTS + HEAD).run(trained(), Report())


def test_full_keeps_only_inputs() -> None:
    module = trained()
    found = Recompute("full").run(module, Report())
    assert len(module.functions["layer.fwd"].results) == 3
    assert len(found.functions["layer.fwd"].results) == 1
    assert_same(module, found)
    assert Recompute("none").run(module, Report()) is module


def test_the_choice_can_be_written_down() -> None:
    module = trained()
    found = selective(values=("layer.fwd:silu",)).run(module, Report())
    assert_same(module, found)
    chosen = selective(EVERYTHING - 1).on_twin(module)
    assert chosen == replace(selective(values=("layer.fwd:silu",)), budget=0)
    assert parse_pipeline(print_pipeline([chosen])) == (chosen,)
    assert selective(EVERYTHING).on_twin(module) == Recompute()
    with pytest.raises(PassError, match="no saved value") as caught:
        selective(values=("layer.fwd:sliu",)).run(module, Report())
    assert "did you mean 'layer.fwd:silu'" in str(caught.value)


def test_modules_read_from_text_are_changed_alike() -> None:
    module = trained()
    read = parse_module(print_module(module))
    for pass_ in (Recompute("full"), selective(EVERYTHING - 1)):
        assert print_module(pass_.run(read, Report())) == print_module(pass_.run(module, Report()))


def noisy_module() -> Module:
    """Layers that multiply their activation by torch's own random numbers."""
    forward = mlp_module()
    layer = forward.functions["layer"]
    builder = FunctionBuilder("layer", "capture", layer.names())
    builder.origin = Origin("layers.*", "model.py", 11)
    silu = next(n for n in layer.nodes if "silu" in n.op)
    noise = builder.one("aten.rand.default", size=silu.result.tensor.shape, name="noise")
    made = builder.one("aten.mul.Tensor", silu.result, noise, name="noisy")
    place = layer.nodes.index(silu) + 1
    after = tuple(
        replace(n, operands=tuple(made if v is silu.result else v for v in n.operands)) for n in layer.nodes[place:]
    )
    nodes = (*layer.nodes[:place], *builder.nodes, *after)
    return Autodiff().run(forward.with_function(replace(layer, nodes=nodes)), Report())


def test_numbers_that_cannot_be_drawn_again_are_kept() -> None:
    module = noisy_module()
    saved = {v.name for v in module.functions["layer.fwd"].results[1:]}
    assert {"up_out", "noise", "noisy"} <= saved
    found = Recompute("full").run(module, Report())
    assert [v.name for v in found.functions["layer.fwd"].results[1:]] == ["noise"]
    assert not [n for n in found.functions["layer.bwd"].nodes if "rand" in n.op]
    with pytest.raises(PassError, match="cannot be drawn again"):
        selective(values=("layer.fwd:noise",)).run(module, Report())
    state, batch = random_state(module), random_batch()
    gradients = []
    for one in (module, found):
        torch.manual_seed(3)
        gradients.append(run(one, "microbatch", batch, state)[1])
    assert all(torch.equal(tensor, gradients[1][name]) for name, tensor in gradients[0].items())


def test_recomputed_nodes_belong_to_the_backward() -> None:
    found = Recompute("full").run(trained(), Report())
    assert {n.phase for n in found.functions["layer.bwd"].nodes} == {Phase.BACKWARD}


def test_options_are_checked() -> None:
    with pytest.raises(PassError, match="unknown"):
        Recompute("half")
    with pytest.raises(PassError, match="without a budget"):
        Recompute("selective")


@pytest.mark.parametrize(
    ("number", "text", "up"),
    [(0, "0B", "0B"), (1000, "1000B", "1000B"), (1025, "1KiB", "1.01KiB"), (3 << 30, "3GiB", "3GiB")],
)
def test_sizes_as_text(number: int, text: str, up: str) -> None:
    assert (size_text(number), size_text(number, up=True)) == (text, up)
