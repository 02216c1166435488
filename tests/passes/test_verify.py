"""Every pass verifies on the small models; a pass of each kind that is wrong is caught, by name."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from mgraph.capture import capture
from mgraph.compiler import pipeline_text
from mgraph.errors import PassError
from mgraph.ir.builder import rebuild
from mgraph.ir.graph import Function, Module, Node, Origin
from mgraph.passes.adamw import AdamW
from mgraph.passes.autodiff import Autodiff
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.data_parallel import DataParallel
from mgraph.passes.derive_serve import DeriveServe
from mgraph.passes.pipeline import parse_pipeline, run_pipeline
from mgraph.passes.recompute import Recompute
from mgraph.passes.verify import TwinCheck, verify_pipeline, verify_table
from mgraph.recipe import Recipe
from tests.passes.build import stacked
from tests.passes.models import mlp_module
from tests.passes.test_by_layer import MODELS
from tests.sampling import sampled

LLAMA = {  # so many layers that capture replays some, and twins leave some out
    "model_type": "llama",
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 5,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 16,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
RAISED = "outline,canonicalize,constant-fold,cse,dce,raise-norm,raise-rope,raise-attention,raise-loss,cse,dce"


@functools.cache
def captured(model: str) -> Module:
    """A module is immutable: one capture serves all tests."""
    return capture(model)


def statuses(module: Module, text: str) -> dict[str, dict[str, object]]:
    results = verify_pipeline(module, text)
    table = verify_table(results)
    assert len(table.splitlines()) == len(results) + 1
    found = {f"{r.index} {r.name}": r.measured["verify"] for r in results}
    json.dumps(found)
    assert {v["status"] for v in found.values()} == {"verified"}, table
    assert all(v["error"] <= v["bound"] for v in found.values())
    return found


@pytest.mark.parametrize("model", ["dense-tiny", "moe-tiny", "llama"])
def test_every_pass_verifies(tmp_path: Path, model: str) -> None:
    if model == "llama":
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        model = f"hf:{tmp_path / 'config.json'}"
    module = captured(model)
    train = statuses(module, pipeline_text(Recipe(model=model, recompute="full")))
    methods = {str(v["method"]) for v in train.values()}
    assert "one rank with the microbatches of 2" in methods
    assert any("torch.optim.AdamW" in m for m in methods)
    assert any("torch autograd" in m for m in methods)
    serve = statuses(module, pipeline_text(Recipe(model=model, purpose="serve", max_length=24)))
    assert any("chunks of two sequences over the cache" in str(v["method"]) for v in serve.values())


# passes that are wrong


def edited(module: Module, name: str, edit: object) -> Module:
    """The module with one function's nodes changed: `edit(node)` gives a node."""
    function = module.functions[name]
    return module.with_function(replace(function, nodes=tuple(map(edit, function.nodes))))  # type: ignore[call-overload]


def first(function: Function, op: str) -> Node:
    return next(n for n in function.nodes if n.op == op)


@dataclass(frozen=True)
class SwappedOperands(Pass):
    name: ClassVar[str] = "swapped-operands"
    stage: ClassVar[Stage] = Stage.NORMALIZE

    def run(self, module: Module, report: Report) -> Module:
        target = first(module.functions["forward"], "aten.sub.Tensor")
        return edited(module, "forward", lambda n: replace(n, operands=n.operands[::-1]) if n is target else n)


@dataclass(frozen=True)
class DroppedScale(Pass):
    name: ClassVar[str] = "dropped-scale"
    stage: ClassVar[Stage] = Stage.RAISE
    tier: ClassVar[Tier] = Tier.REASSOCIATING

    def run(self, module: Module, report: Report) -> Module:
        def edit(node: Node) -> Node:
            return replace(node, attrs={**node.attrs, "scale": 1.0}) if node.op == "attention" else node

        return edited(module, "layer", edit)


class WrongGradient(Autodiff):
    name: ClassVar[str] = "wrong-gradient"

    def run(self, module: Module, report: Report) -> Module:
        made = super().run(module, report)

        def edit(node: Node) -> Node:
            return replace(node, operands=node.operands[:1] * 2) if node.op == "aten.silu_backward.default" else node

        assert any(n.op == "aten.silu_backward.default" for n in made.functions["layer.bwd"].nodes)
        return edited(made, "layer.bwd", edit)


class WrongRecompute(Recompute):
    name: ClassVar[str] = "wrong-recompute"

    def run(self, module: Module, report: Report) -> Module:
        made = super().run(module, report)

        def edit(node: Node) -> Node:
            return replace(node, op="aten.relu.default") if node.op == "aten.silu.default" else node

        assert any(n.op == "aten.silu.default" for n in made.functions["layer.bwd"].nodes)
        return edited(made, "layer.bwd", edit)


class NoClipping(AdamW):
    name: ClassVar[str] = "no-clipping"

    def run(self, module: Module, report: Report) -> Module:
        made = super().run(module, report)

        def edit(node: Node) -> Node:
            return replace(node, attrs={**node.attrs, "max_norm": 0.0}) if node.op == "gradient_scale" else node

        return edited(made, "finish", edit)


class MissingReduce(DataParallel):
    name: ClassVar[str] = "missing-reduce"

    def run(self, module: Module, report: Report) -> Module:
        made = super().run(module, report)
        finish = made.functions["finish"]
        builder = rebuild(finish, self.name)
        start, wait = first(finish, "all_reduce_start"), first(finish, "wait")
        for summed, own in zip(wait.results, start.operands, strict=True):
            builder.replace(summed, own)
        for node in finish.nodes:
            if node not in (start, wait):
                builder.keep(node)
        return made.with_function(builder.build(finish.results))


class WrongPositions(DeriveServe):
    name: ClassVar[str] = "wrong-positions"

    def run(self, module: Module, report: Report) -> Module:
        made = super().run(module, report)
        step = made.functions["step"]
        positions, tokens = (next(p for p in step.params if p.name == name) for name in ("positions", "tokens"))
        builder = rebuild(step, self.name)
        for node in step.nodes:
            if positions in node.operands and node.op != "call":
                node = replace(node, operands=tuple(tokens if v is positions else v for v in node.operands))
            builder.keep(node)
        return made.with_function(builder.build(step.results))


def difference() -> Module:
    """The layers of `stacked`, with the residual sum a difference."""
    module = stacked(2)
    return edited(module, "forward", lambda n: replace(n, op="aten.sub.Tensor") if n.op == "aten.add.Tensor" else n)


def deep(layers: int) -> Module:
    """`stacked` with a loss: the sum of the squares of what comes out."""
    module = stacked(layers)
    function = module.functions["forward"]
    builder = rebuild(function, "capture")
    for node in function.nodes:
        builder.keep(node)
    builder.origin = Origin("", "model.py", 40)
    squares = builder.one("aten.mul.Tensor", function.results[0], function.results[0])
    loss = builder.one("aten.sum.default", squares, name="loss_sum")
    count = builder.one("aten.sum.default", builder.one("aten.ne.Scalar", squares, other=0), name="count")
    entry = replace(module.entries["forward"], outputs=("loss_sum", "count"))
    return replace(module, entries={"forward": entry}).with_function(builder.build([loss, count]))


@pytest.mark.parametrize(
    ("broken", "model", "earlier", "says"),
    [
        (SwappedOperands(), "difference", "", "entry 'forward', output 'out0': must be bitwise equal"),
        (DroppedScale(), "dense-tiny", RAISED, "entry 'forward', output 'l"),
        (WrongGradient(), "mlp", "", r"entry 'microbatch', output '.*\.grad': relative error on the lifted graph"),
        (WrongRecompute("full"), "mlp", "autodiff", "entry 'microbatch', output '.*': must be bitwise equal"),
        (NoClipping(), "mlp", "autodiff", "entry 'finish', output '"),
        (MissingReduce(), "mlp", "autodiff,adamw", "entry 'finish', output '.* on rank 0'"),
        (WrongPositions(24), "dense-tiny", RAISED, "entry 'step', output 'logits of token"),
    ],
)
def test_wrong_passes_are_caught(broken: Pass, model: str, earlier: str, says: str) -> None:
    made = {"difference": difference, "mlp": mlp_module}.get(model)
    module = made() if made else captured(model)
    with pytest.raises(PassError, match=rf"pass '{broken.name}' changes the numbers: {says}") as caught:
        verify_pipeline(module, (*parse_pipeline(earlier), broken))
    assert caught.value.exit_code == 2
    assert "on the twin: " in str(caught.value)


# what cannot be checked


@dataclass(frozen=True)
class OnlyLarge(Pass):
    name: ClassVar[str] = "only-large"
    stage: ClassVar[Stage] = Stage.NORMALIZE

    def run(self, module: Module, report: Report) -> Module:
        def edit(node: Node) -> Node:
            wide = node.op == "aten.clamp.default" and node.result.tensor.shape[-1] == 64
            return replace(node, op="aten.clamp_max.default") if wide else node

        return edited(module, "forward", edit)


@dataclass(frozen=True)
class Coarse(SwappedOperands):
    tier: ClassVar[Tier] = Tier.PRECISION_CHANGING


def test_a_pass_that_treats_the_twin_otherwise_is_unverified() -> None:
    _, (result,) = run_pipeline(stacked(2, width=64), [OnlyLarge()], [TwinCheck()])
    assert result.measured["verify"]["status"] == "unverified"
    assert "something else on the twin: @forward" in result.measured["verify"]["why"]


def test_a_tier_without_a_bound_is_unverified() -> None:
    (result,) = verify_pipeline(difference(), [Coarse()])
    assert result.measured["verify"]["status"] == "unverified"
    assert "unverified" in verify_table([result])


def test_noise_under_losses_of_all_ranks_is_that_of_each_sequence(tmp_path: Path) -> None:
    """One rank with the tokens of both draws for the second's sequences what that one does."""
    file = tmp_path / "noisy.py"
    file.write_text(
        "from dataclasses import replace\nfrom mgraph import models\n\ndef model():\n"
        '    config = models.get("moe", "tiny-losses").config\n'
        "    return models.Decoder(replace(config, jitter=0.1, num_layers=1))\n"
    )
    text = "outline,canonicalize,constant-fold,joint-losses,autodiff,adamw,data-parallel"
    results = verify_pipeline(captured(f"{file}:model"), text)
    assert results[-1].measured["verify"]["status"] == "verified", verify_table(results)
    assert "as one" in str(results[-1].measured["verify"]["method"])


@pytest.mark.parametrize("name", sampled(("Sizes", "Mixed"), 1))
def test_models_that_have_a_number_for_each_layer_verify(name: str, tmp_path: Path) -> None:
    """What is taken apart or put together in as many parts as there are layers keeps its size on the twin."""
    file = tmp_path / "user.py"
    file.write_text(f"{MODELS}\ndef made():\n    return {name}()\n")
    statuses(captured(f"{file}:made"), pipeline_text(Recipe(model=f"{file}:made", arch="none")))


def test_deep_models_are_checked_on_few_layers() -> None:
    check = TwinCheck()
    text = "outline,autodiff,recompute{mode=full},adamw,data-parallel,cse,dce,in-place"
    _, results = run_pipeline(deep(12), text, [check])
    assert check.reduction is not None
    assert check.reduction.layers == (12, 4)
    assert {r.measured["verify"]["status"] for r in results} == {"verified"}, verify_table(results)
