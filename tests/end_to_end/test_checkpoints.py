"""Checkpoints of every family, through packages of its transformers class and of its twin in the zoo.

save_pretrained -> --init -> logits -> --export -> from_pretrained: nothing is missing, only training changes anything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mgraph import models
from mgraph.compiler import compile_package
from mgraph.models import huggingface
from mgraph.recipe import Recipe
from mgraph.runtime import checkpoint
from mgraph.runtime.export import CONFIG, Weights, export_weights
from mgraph.runtime.options import parse
from mgraph.runtime.package import Package, State, load_package
from mgraph.runtime.serving.llm import LLM
from mgraph.runtime.state import create_state
from mgraph.runtime.train import run
from mgraph.runtime.weights import load_weights
from tests.families.configs import eager
from tests.sampling import sampled

TWINS = {
    "llama": ("llama3", "tiny"),
    "qwen3": ("qwen3", "tiny"),
    "qwen3-moe": ("qwen3", "moe-tiny"),
    "mixtral": ("mixtral", "tiny"),
    "gpt-oss": ("gpt-oss", "tiny"),
    "gemma3": ("gemma3", "tiny"),
}
CASES = [(family, kind) for family in TWINS for kind in ("transformers", "zoo")]
PER_EXPERT = {
    "qwen3-moe": "model.layers.1.mlp.experts.3.up_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w3.weight",
}
"""A tensor that checkpoints have where the modules of transformers hold all experts in one."""


def saved(family: str, kind: str, directory: Path) -> str:
    """Write a checkpoint of the family with random weights; what `mgraph compile` takes for it."""
    import transformers

    if kind == "transformers":
        model: Any = eager(family, seed=5)
    else:
        settings = huggingface.configuration(models.SIZES[TWINS[family][0]][TWINS[family][1]])
        assert settings is not None
        library: Any = transformers
        configuration = library.CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
        model = library.AutoModelForCausalLM.from_config(configuration)
    with torch.no_grad():  # far from the initial values: norms are not 1, biases not 0
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return f"hf:{directory}" if kind == "transformers" else "-".join(TWINS[family])


def loaded(directory: Path) -> nn.Module:
    """The model of a checkpoint, which lacks nothing and has nothing besides."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained  # typed as if it gave a model alone
    model, info = load(directory, output_loading_info=True, attn_implementation="eager")
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found: nn.Module = model.eval()
    return found


def tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(one: Path, two: Path) -> bool:
    """Whether two checkpoints have the same tensors, bit for bit."""
    found, expected = tensors(one), tensors(two)
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


def predict(package: Package, state: State, tokens: Tensor) -> Tensor:
    """The logits of a package."""
    with torch.no_grad():
        return package.call("predict", state, tokens)["logits"]


@pytest.mark.parametrize(("family", "kind"), sampled(CASES, 0, [("mixtral", "transformers"), ("gpt-oss", "zoo")]))
def test_in_and_out_again(family: str, kind: str, tmp_path: Path) -> None:
    source, exported, trained = (tmp_path / name for name in ("source", "exported", "trained"))
    recipe = Recipe(model=saved(family, kind, source), output=str(tmp_path / "package"), arch="none")
    path = compile_package(recipe).package
    assert path is not None
    package = load_package(path, "cpu")
    specs, layout = package.state_specs, package.weight_layout
    tokens = torch.randint(256, (3, 29))
    with torch.no_grad():
        expected = loaded(source)(tokens).logits

    state = create_state(specs, 0, "cpu")
    load_weights(source, state, specs, layout)
    bound = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(predict(package, state, tokens), expected, rtol=0, atol=bound)

    export_weights(exported, Weights(state, specs, layout), path / CONFIG, shard_bytes=100_000)
    assert same(exported, source)
    assert family not in PER_EXPERT or PER_EXPERT[family] in tensors(exported)
    with torch.no_grad():
        assert torch.equal(loaded(exported)(tokens).logits, expected)

    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(600)))
    sizes = ["--steps", "2", "--batch-size", "2", "--seq-len", "33", "--sample-length", "0", "--eval-batches", "1"]
    paths = ["--data", str(text), "--out", str(tmp_path / "run"), "--init", str(exported), "--export", str(trained)]
    run(parse([*sizes, *paths, "--lr", "0.01", "--warmup", "1"], "train.py"), path)
    found = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert found is not None
    checkpoint.load_parameters(found, state, specs)
    with torch.no_grad():
        learned = loaded(trained)(tokens).logits
    torch.testing.assert_close(predict(package, state, tokens), learned, rtol=0, atol=bound)
    assert (learned - expected).abs().max() > 0.05, "nothing was learned: the comparison would prove little"
    assert json.loads((trained / CONFIG).read_text())["dtype"] == "float32"


@pytest.mark.parametrize("kind", sampled(["transformers", "zoo"], 0))
def test_published_gpt_oss_has_experts_in_four_bits(kind: str, tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source, exported = tmp_path / "source", tmp_path / "exported"
    name = saved("gpt-oss", kind, source)
    found = tensors(source)
    packed: dict[str, Tensor] = {}
    for weight in [n for n in found if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = found[weight].shape
        if inputs % 32:  # the twin's down_proj: so many numbers have one scale
            continue
        packed[f"{weight}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16)).to(torch.uint8)
        packed[f"{weight}_scales"] = torch.randint(121, 126, (experts, outputs, inputs // 32)).to(torch.uint8)
        found[weight] = convert_moe_packed_tensors(packed[f"{weight}_blocks"], packed[f"{weight}_scales"]).float()
    save_file(found, source / "model.safetensors", {"format": "pt"})
    tokens = torch.randint(256, (3, 29))
    with torch.no_grad():
        expected = loaded(source)(tokens).logits

    plain = {n: t for n, t in found.items() if f"{n}_blocks" not in packed}
    save_file(plain | packed, source / "model.safetensors", {"format": "pt"})
    settings = json.loads((source / CONFIG).read_text())
    (source / CONFIG).write_text(json.dumps({**settings, "quantization_config": {"quant_method": "mxfp4"}}))
    path = compile_package(Recipe(model=name, output=str(tmp_path / "package"), arch="none")).package
    assert path is not None
    package = load_package(path, "cpu")
    state = create_state(package.state_specs, 0, "cpu")
    load_weights(source, state, package.state_specs, package.weight_layout)
    bound = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(predict(package, state, tokens), expected, rtol=0, atol=bound)
    export_weights(exported, Weights(state, package.state_specs, package.weight_layout), path / CONFIG)
    with torch.no_grad():
        assert torch.equal(loaded(exported)(tokens).logits, expected)


@pytest.mark.parametrize("kind", sampled(["transformers", "zoo"], 0, ["zoo"]))
def test_mixed_precision_keeps_what_files_have(kind: str, tmp_path: Path) -> None:
    """A checkpoint in float32 -> bf16 parameters with copies of full precision -> both, as --export-dtype says."""
    source = tmp_path / "source"
    recipe = Recipe(
        model=saved("qwen3-moe", kind, source), output=str(tmp_path / "package"), arch="none", precision="bf16"
    )
    path = compile_package(recipe).package
    assert path is not None
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(600)))
    sizes = ["--steps", "1", "--batch-size", "2", "--seq-len", "33", "--sample-length", "0", "--eval-batches", "1"]
    for dtype, torch_dtype in (("param", torch.bfloat16), ("f32", torch.float32)):
        exported = tmp_path / dtype
        paths = ["--data", str(text), "--out", str(tmp_path / f"run-{dtype}"), "--export", str(exported)]
        still = ["--init", str(source), "--lr", "0", "--min-lr", "0", "--export-dtype", dtype]
        run(parse([*sizes, *paths, *still], "train.py"), path)
        found, given = tensors(exported), tensors(source)
        assert found.keys() == given.keys()
        assert all(torch.equal(found[name], given[name].to(torch_dtype)) for name in given)
        assert all(p.dtype == torch_dtype for p in loaded(exported).parameters())


@pytest.mark.parametrize("kind", sampled(["transformers", "zoo"], 0))
def test_serving_reads_them_too(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    name = saved("mixtral", kind, source)
    recipe = Recipe(model=name, output=str(tmp_path / "package"), arch="none", purpose="serve", max_length=64)
    path = compile_package(recipe).package
    assert path is not None
    prompt = torch.randint(256, (7,)).tolist()
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    found = list(LLM(path, source, device="cpu").generate([prompt], params)[0].outputs[0].token_ids)
    model, expected = loaded(source), list(prompt)
    with torch.no_grad():
        for _ in range(12):
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    assert found == expected[7:]
