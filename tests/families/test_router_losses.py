"""Losses of routers in unmodified transformers classes: loss and gradients are the class's own, over all data ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mgraph.compiler import build_module, compile_package
from mgraph.ir.graph import StateKind
from mgraph.recipe import Recipe
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from tests.all_ranks import difference
from tests.end_to_end.builds import Lift, batches, fill
from tests.end_to_end.meshes import Batch, Ranks, initial_state, steps_of
from tests.families.configs import eager, write_config
from tests.sampling import sampled

WEIGHT = 0.05
CHANGES: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": WEIGHT}
MESHES = ("dp=1", "dp=2", "ep=2", "fsdp=2,ep=fsdp", "dp=2,tp=2")
USER = """
import json, torch, transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

class Inherited(Qwen3MoeForCausalLM):
    pass

class Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, tokens):
        return self.inner(tokens, use_cache=False)

def inherited():
    return Inherited._from_config(Qwen3MoeConfig(**json.load(open("{config}"))), experts_implementation="mgraph")

def wrapped():
    return Wrapped(inherited())
"""
CASES = [(name, mesh) for name in ("mixtral", "qwen3-moe", "gpt-oss") for mesh in MESHES]


def own(name: str, state: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The loss sum and all gradients of the class itself in float64, with the loss that it gives."""
    model = eager(name, **CHANGES).double().train()
    model.config._experts_implementation = "eager"  # type: ignore[union-attr]
    fill(model, state)
    with Lift():  # type: ignore[no-untyped-call]
        out = model(tokens)
        loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss + WEIGHT * out.aux_loss * (labels != -100).sum()
        loss.backward()
    assert float(out.aux_loss.detach()) > 0.5
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss_sum": loss.detach(), **gradients}


def whole(batches: list[Batch], name: str) -> Tensor:
    """What all ranks get, as one batch."""
    return torch.cat([batch.inputs[name] for batch in batches])


@pytest.mark.parametrize(("name", "mesh"), sampled(CASES, 3))
def test_all_ranks_have_the_loss_of_the_class(name: str, mesh: str, tmp_path: Path) -> None:
    module = build_module(Recipe(model=write_config(name, tmp_path, **CHANGES), mesh=mesh, arch="none")).module
    ranks = Ranks(module, {axis.name: axis.size or 1 for axis in module.mesh if not axis.of}, initial_state(module))
    given = steps_of(module, max(ranks.data_rank(at) for at in ranks.at) + 1, 1)[0][0]
    state = ranks.whole(StateKind.PARAM, StateKind.BUFFER)
    expected = own(name, state, whole(given, "tokens"), whole(given, "labels"))
    outputs = ranks.run_batches("microbatch", 0, given)
    found = {"loss_sum": sum(out["loss_sum"] for out in outputs), **ranks.whole(StateKind.GRAD)}
    assert expected.keys() == found.keys()
    for parameter, tensor in expected.items():
        assert difference(tensor, found[parameter], 1e-6) <= 1e-9, parameter


def test_a_package_has_the_loss_of_the_class(tmp_path: Path) -> None:
    """Also of a class that is the model of another class's, and part of a user's module."""
    config = write_config("qwen3-moe", tmp_path, **CHANGES)
    file = tmp_path / "user.py"
    file.write_text(USER.format(config=str(tmp_path / "config.json")))
    (tokens, labels), *_ = batches(1)
    for model, prefix in ((config, ""), (f"{file}:inherited", ""), (f"{file}:wrapped", "inner.")):
        done = compile_package(Recipe(model=model, arch="none", output=str(tmp_path / "package")), force=True)
        assert done.package is not None
        package = load_package(done.package, "cpu")
        state = create_state(package.state_specs, 3, "cpu")
        expected = own("qwen3-moe", {n.removeprefix(prefix): t for n, t in state.items()}, tokens, labels)
        found = package.call("microbatch", state, tokens, labels) | state
        for name, tensor in expected.items():
            at = name if name == "loss_sum" else prefix + name
            assert difference(tensor, found[at].double(), 1e-4) <= 1e-4, (model, name)


def test_a_model_with_such_a_loss_is_served(tmp_path: Path) -> None:
    """Nothing of the loss is left in what is served."""
    module = build_module(Recipe(model=write_config("qwen3-moe", tmp_path, **CHANGES), purpose="serve", arch="none"))
    assert not {"aten.index_add.default", "aten.mean.dim"} & {node.op for _, node in module.module.walk()}


def test_what_fills_rows_up_is_not_in_the_loss(tmp_path: Path) -> None:
    """As with the class, to which an attention mask says what fills up."""
    config = write_config("qwen3-moe", tmp_path, **CHANGES)
    compilation = compile_package(Recipe(model=config, packed=True, arch="none", output=str(tmp_path / "package")))
    assert compilation.package is not None
    package = load_package(compilation.package, "cpu")
    state = create_state(package.state_specs, 3, "cpu")
    (tokens, labels), *_ = batches(1)
    real = torch.arange(tokens.shape[1]) < torch.tensor([[tokens.shape[1] - 2], [3], [tokens.shape[1]]])
    labels = labels.masked_fill(~real, -100)
    model = eager("qwen3-moe", **CHANGES).train()
    fill(model, state)
    out = model(tokens, attention_mask=real.long())
    loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = loss + WEIGHT * out.aux_loss * (labels != -100).sum()
    loss.backward()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    found = package.call("microbatch", state, tokens, labels, positions, real.long())["loss_sum"]
    assert difference(loss.detach(), found, 1e-6) <= 1e-5
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert difference(parameter.grad, state[f"{name}.grad"], 1e-5) <= 1e-4, name
    assert float(loss.detach()) != float(
        package.call("microbatch", state, tokens, labels, positions, 1 + real.long())["loss_sum"]
    )
