"""Adapters end to end: against eager modules with adapters of their own, in runs, and in what runs write."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from mgraph.passes.serve_samples import step_inputs
from mgraph.runtime.checkpoint import latest, load
from mgraph.runtime.mesh import current
from mgraph.runtime.options import parse
from mgraph.runtime.package import load_package
from mgraph.runtime.state import create_state
from mgraph.runtime.train import run
from tests.end_to_end.builds import adamw, batches, build, eager_step, fill, loss_of, relative
from tests.families.builds import Family, compile_family, masks, prepared, replayed

RULES = {
    "dense-tiny": ("*.attn.q|*.attn.v|*.ffn.down: rank=4, alpha=8", "layers.0.ffn.up|head: rank=2, alpha=3, rslora"),
    "llama": ("*.q_proj|*.v_proj: rank=8, alpha=16",),
    "gpt2": ("*.c_attn|*.c_proj: rank=3, alpha=6, dropout=0.2",),
}
EPSILON = 1e-6
"""Above the rounding of gradients: Adam's first steps are as large as the rate, whatever the gradient."""
SCALES = {"dense-tiny": (2.0, 3 / math.sqrt(2)), "llama": (2.0,), "gpt2": (2.0,)}


class Adapted(nn.Module):
    """A linear (or transformers' Conv1D) with an adapter beside it: y = base(x) + scale (dropout(x) Aᵀ) Bᵀ."""

    def __init__(self, base: nn.Module, state: dict[str, Tensor], name: str, scale: float, dropout: float) -> None:
        super().__init__()
        self.base, self.scale, self.dropout = base, scale, dropout
        a, b = (state[f"{name}.lora_{side}.weight"] for side in "AB")
        self.lora_A = nn.Linear(a.shape[1], a.shape[0], bias=False)
        self.lora_B = nn.Linear(b.shape[1], b.shape[0], bias=False)
        self.lora_A.weight.data, self.lora_B.weight.data = a.clone(), b.clone()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        x = functional.dropout(x, self.dropout, self.training)
        update: Tensor = self.lora_B(self.lora_A(x))
        return out + self.scale * update


def adapted(name: str, model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """The model with the weights and adapters of a state; nothing else is trained."""
    fill(model, state)
    model.requires_grad_(False)
    scales = SCALES[name]
    for module in [n.removesuffix(".lora_A.weight") for n in state if n.endswith(".lora_A.weight")]:
        owner, _, last = module.rpartition(".")
        scale = scales[len(scales) > 1 and last in ("head", "up")]
        made = Adapted(model.get_submodule(module), state, module, scale, 0.2 if name == "gpt2" else 0.0)
        setattr(model.get_submodule(owner), last, made)
    return model


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    @functools.cache
    def compiled(name: str) -> Family:
        directory = tmp_path_factory.mktemp(name)
        if name == "gpt2":
            return compile_family(name, directory, lora=RULES[name], eps=EPSILON)
        made = build(name, directory, lora=RULES[name], eps=EPSILON)
        return Family(name, made.compilation, made.path, made.eager)

    return compiled


@pytest.fixture(scope="module", params=RULES)
def built(request: pytest.FixtureRequest, compiled: Callable[[str], Family]) -> Family:
    return compiled(request.param)


def drawn(path: Path, seed: int = 0) -> dict[str, Tensor]:
    """The first state of a run, but with B drawn as well."""
    state = create_state(load_package(path, "cpu").state_specs, seed, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for name in [n for n in state if n.endswith(".lora_B.weight")]:
        state[name].normal_(0.0, 0.05, generator=generator)
    return state


def test_loss_and_gradients_equal_eager(built: Family) -> None:
    package, state = load_package(built.path, "cpu"), prepared(built, drawn(built.path))
    model = adapted(built.name, built.eager(), state)
    ((tokens, labels),) = batches(1)
    with replayed(masks(built.compilation.module, state, tokens)):
        loss = loss_of(model, tokens, labels)
    loss.backward()
    loss = loss.detach()
    found = package.call("microbatch", state, tokens, labels)["loss_sum"]
    assert abs(float(found) - float(loss)) <= 1e-5 * float(loss)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert {f"{n}.grad" for n in gradients} == {n for n in state if n.endswith(".grad")}
    for parameter, gradient in gradients.items():
        assert gradient is not None and gradient.norm() > 0
        assert relative(state[f"{parameter}.grad"], gradient) <= 1e-5, parameter


def test_five_steps_equal_adamw_and_leave_the_rest(built: Family) -> None:
    package, state = load_package(built.path, "cpu"), prepared(built, drawn(built.path))
    before = {n: t.clone() for n, t in state.items()}
    model = adapted(built.name, built.eager(), state)
    optimizer = adamw(model, eps=EPSILON)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
    for tokens, labels in batches(5):
        with replayed(masks(built.compilation.module, state, tokens)):
            expected = eager_step(model, optimizer, tokens, labels)
        package.call("microbatch", state, tokens, labels)
        loss = package.call("finish", state, torch.tensor(1e-3))["loss"]
        assert abs(float(loss) - float(expected)) <= 1e-5 * float(expected)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    for parameter in trained:
        assert relative(state[parameter], parameters[parameter]) <= 1e-4, parameter
        assert not torch.equal(state[parameter], before[parameter])
    frozen = [s.name for s in package.state_specs if s.kind == "param" and not s.trainable]
    assert len(frozen) > len(trained) / 2
    assert all(torch.equal(state[n], before[n]) for n in frozen)


def test_only_adapters_have_optimizer_state(built: Family) -> None:
    """The memory of training follows the adapters: two moments and a gradient each, and nothing for the rest."""
    specs = load_package(built.path, "cpu").state_specs
    adapters = sum(s.bytes for s in specs if s.kind == "param" and ".lora_" in s.name)
    assert sum(s.bytes for s in specs if s.kind in ("moment", "grad")) == 3 * adapters
    assert all(".lora_" in s.name for s in specs if s.kind in ("moment", "grad"))


def test_a_run_begins_as_the_model_without_adapters(built: Family) -> None:
    package = load_package(built.path, "cpu")
    state = create_state(package.state_specs, 0, "cpu")
    ((tokens, labels),) = batches(1)
    model = built.eager().eval()
    fill(model, state)
    with torch.no_grad():
        expected = loss_of(model, tokens, labels)
        found = package.call("evaluate", state, tokens, labels)["loss_sum"]
    assert abs(float(found) - float(expected)) <= 1e-6 * float(expected)
    bound = {n: t.abs().max() for n, t in state.items() if n.endswith(".lora_A.weight")}
    assert all(0.5 < float(most) * state[n].shape[1] ** 0.5 <= 1 for n, most in bound.items())


def test_bf16_with_dropout(tmp_path: Path) -> None:
    """Adapters alone have masters; recompute draws the same numbers again, and they follow step and sequence."""
    rules = ("*.attn.q|*.ffn.down: rank=4, alpha=8, dropout=0.3",)
    made = [build("dense-tiny", tmp_path / m, lora=rules, precision="bf16", recompute=m).path for m in ("none", "full")]
    specs = load_package(made[0], "cpu").state_specs
    adapters = {s.name for s in specs if ".lora_" in s.name and s.kind == "param"}
    assert {s.name for s in specs if s.kind == "master"} == {f"{name}.master" for name in adapters}
    assert {s.dtype for s in specs if s.kind == "param"} == {torch.bfloat16}
    ((tokens, labels),) = batches(1, batch=4)

    def gradients(path: Path, step: int, parts: int = 1) -> dict[str, Tensor]:
        package, state = load_package(path, "cpu"), drawn(path)
        state["rng.step"].fill_(step)
        for first in range(0, 4, 4 // parts):
            state["rng.sample"].fill_(8 + first)
            rows = slice(first, first + 4 // parts)
            package.call("microbatch", state, tokens[rows], labels[rows])
        return {n: t for n, t in state.items() if n.endswith(".grad")}

    whole = gradients(made[0], 3)
    again, halves, other = gradients(made[1], 3), gradients(made[0], 3, parts=2), gradients(made[0], 4)
    assert len(whole) == len(adapters)
    for name, gradient in whole.items():
        assert torch.equal(again[name], gradient), name
        # Rounding of bf16, against other elements that are dropped.
        assert relative(halves[name], gradient) < 0.05 < 0.3 < relative(other[name], gradient), name


@pytest.fixture(scope="module")
def pretrained(compiled: Callable[[str], Family], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that transformers wrote for the package of llama."""
    directory = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(3)
    model: Any = compiled("llama").eager()
    model.save_pretrained(directory)
    return directory


def train(package: Path, directory: Path, *arguments: str, steps: int = 4) -> dict[str, Tensor]:
    """Train on bytes; the state at the end, from the checkpoint."""
    text = directory / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(600)))
    common = ["--batch-size", "2", "--seq-len", "33", "--sample-length", "0", "--eval-batches", "1"]
    common += ["--lr", "0.01", "--warmup", "1", "--decay", "constant", "--steps", str(steps)]
    run(parse([*common, "--data", str(text), "--out", str(directory / "run"), *arguments], "train.py"), package)
    specs = load_package(package, "cpu").state_specs
    state, found = create_state(specs, 0, "cpu"), latest(directory / "run" / "checkpoints")
    assert found is not None
    load(found, state, specs, current())
    return state


def test_exports_give_the_logits_of_the_run(
    compiled: Callable[[str], Family], pretrained: Path, tmp_path: Path
) -> None:
    """The merged weights as transformers loads them; PEFT's files, applied as documented, and as it loads them."""
    from transformers import AutoModelForCausalLM

    package = compiled("llama").path
    paths = ["--export", str(tmp_path / "merged"), "--export-adapter", str(tmp_path / "adapter")]
    state = train(package, tmp_path, "--init", str(pretrained), *paths)
    tokens = torch.randint(256, (3, 29))
    load_model: Any = AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        expected = load_package(package, "cpu").call("predict", state, tokens)["logits"]
        base = load_model(pretrained)
        assert (base(tokens).logits - expected).abs().max() > 0.05, "nothing was learned"
        model, info = load_model(tmp_path / "merged", output_loading_info=True)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=1e-5)
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    given, found = (load_file(d / "model.safetensors") for d in (pretrained, tmp_path / "merged"))
    assert given.keys() == found.keys()
    for name, tensor in given.items():
        assert torch.equal(tensor, found[name]) is not name.endswith(("q_proj.weight", "v_proj.weight")), name
        assert torch.equal(tensor, state[name]), name

    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(pretrained) and settings["task_type"] == "CAUSAL_LM"
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for module_name, module in base.named_modules():
        if module_name.rpartition(".")[2] in settings["target_modules"]:
            a, b = (tensors.pop(f"base_model.model.{module_name}.lora_{side}.weight") for side in "AB")
            assert a.shape == (settings["r"], module.in_features) and b.shape == (module.out_features, settings["r"])
            module.weight.data += settings["lora_alpha"] / settings["r"] * (b @ a)
    assert not tensors and settings["peft_type"] == "LORA" and not settings["use_rslora"]
    with torch.no_grad():
        torch.testing.assert_close(base(tokens).logits, expected, rtol=0, atol=1e-5)
        if importlib.util.find_spec("peft"):  # in the development set-up; the check above does without
            with_adapter = importlib.import_module("peft").PeftModel.from_pretrained(
                load_model(pretrained), tmp_path / "adapter"
            )
            torch.testing.assert_close(with_adapter(tokens).logits, expected, rtol=0, atol=1e-5)
    # A run that is whole may be started again, and leaves both as they are.
    train(package, tmp_path, "--resume", "--init", str(pretrained), *paths)


def test_a_resumed_run_goes_on_as_it_would_have(compiled: Callable[[str], Family], tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    package = compiled("gpt2").path
    whole = train(package, tmp_path / "whole", steps=2)
    train(package, tmp_path / "parts", steps=1)
    parts = train(package, tmp_path / "parts", "--resume", steps=2)
    assert float(whole["transformer.h.1.attn.c_attn.lora_B.weight"].abs().max()) > 0
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


def test_a_served_package_has_the_adapters_of_a_run(compiled: Callable[[str], Family], tmp_path: Path) -> None:
    """The same recipe, for serving: its step gives the logits of `predict`."""
    trained = compiled("dense-tiny")
    state = drawn(trained.path)
    serving = build("dense-tiny", tmp_path, lora=RULES["dense-tiny"], purpose="serve", max_length=32)
    package = load_package(serving.path, "cpu", sizes={"P": 3})
    served = create_state(package.state_specs, 0, "cpu")
    served |= {name: state[name] for name in served.keys() & state.keys()}
    tokens = torch.randint(256, (1, 13))
    expected = load_package(trained.path, "cpu").call("predict", state, tokens)["logits"]
    found = package.call("step", served, *step_inputs(tokens.tolist(), [0], 2, 16).values())["logits"]
    torch.testing.assert_close(found.reshape(-1), expected[0, -1], rtol=0, atol=1e-5)
