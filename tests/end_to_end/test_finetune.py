"""From pretrained weights and back: a checkpoint of `transformers` is trained, exported, and loaded by it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mgraph.compiler import compile_package
from mgraph.errors import CheckpointError, OptionError
from mgraph.recipe import Recipe
from mgraph.runtime import checkpoint
from mgraph.runtime.options import parse
from mgraph.runtime.package import State, load_package
from mgraph.runtime.state import create_state
from mgraph.runtime.train import run
from mgraph.runtime.weights import load_weights
from tests.end_to_end.builds import LLAMA

Pretrained = tuple[Path, Path, bool]
"""The directory that transformers wrote, the package compiled from its configuration, whether embeddings are tied."""


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def pretrained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("finetune")
    settings = {k: v for k, v in LLAMA.items() if k not in ("architectures", "tie_word_embeddings")}
    torch.manual_seed(11)
    LlamaForCausalLM(LlamaConfig(**settings, tie_word_embeddings=request.param)).save_pretrained(directory / "llama")
    recipe = Recipe(model=f"hf:{directory / 'llama'}", output=str(directory / "package"), arch="none")
    compilation = compile_package(recipe)
    assert compilation.package is not None
    return directory / "llama", compilation.package, request.param


def finetune(pretrained: Pretrained, directory: Path, *arguments: str) -> Path:
    """Train 3 steps on bytes from the pretrained weights; the directory of the exported ones."""
    text = directory / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(600)))
    common = ["--steps", "3", "--batch-size", "2", "--seq-len", "33", "--sample-length", "0", "--eval-batches", "1"]
    paths = ["--data", str(text), "--out", str(directory / "run"), "--export", str(directory / "exported")]
    run(parse([*common, *paths, "--init", str(pretrained[0]), *arguments], "train.py"), pretrained[1])
    return directory / "exported"


def state_of(package_dir: Path, run_dir: Path) -> State:
    """The state at the end of a run, from its checkpoint."""
    package = load_package(package_dir, "cpu")
    state = create_state(package.state_specs, 0, "cpu")
    found = checkpoint.latest(run_dir / "checkpoints")
    assert found is not None
    checkpoint.load_parameters(found, state, package.state_specs)
    return state


def test_transformers_loads_what_was_trained(pretrained: Pretrained, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, package_dir, _ = pretrained
    exported = finetune(pretrained, tmp_path, "--lr", "0.01", "--warmup", "1")
    load: Any = AutoModelForCausalLM.from_pretrained  # typed as if it gave a model alone
    model, info = load(exported, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = torch.randint(256, (3, 29))
    with torch.no_grad():
        expected = model.eval()(tokens).logits
        before = load(source).eval()(tokens).logits
        found = load_package(package_dir, "cpu").call("predict", state_of(package_dir, tmp_path / "run"), tokens)
    torch.testing.assert_close(found["logits"], expected, rtol=0, atol=1e-5)
    assert (expected - before).abs().max() > 0.05, "nothing was learned: the comparison would prove little"


def test_weights_come_back_bit_for_bit(pretrained: Pretrained, tmp_path: Path) -> None:
    exported = finetune(pretrained, tmp_path, "--lr", "0", "--min-lr", "0")
    given, found = load_file(pretrained[0] / "model.safetensors"), load_file(exported / "model.safetensors")
    assert sorted(found) == sorted(given)
    assert all(torch.equal(found[name], given[name]) for name in given)


def test_a_run_does_not_begin_where_the_export_could_not_end(pretrained: Pretrained, tmp_path: Path) -> None:
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "mine").write_text("mine")
    with pytest.raises(OptionError, match="there is something already"):
        finetune(pretrained, tmp_path)
    assert not (tmp_path / "run").exists()
    for places in (["--export", "r", "--out", "r"], ["--export", "r/a", "--export-adapter", "r"]):
        with pytest.raises(OptionError, match="is the same place or lies in it"):
            run(parse(["--steps", "1", *places], "train.py"), pretrained[1])
    assert not Path("r").exists()


def test_only_copies_of_tied_tensors_may_be_there_besides(pretrained: Pretrained, tmp_path: Path) -> None:
    source, package_dir, tied = pretrained
    tensors = load_file(source / "model.safetensors")
    specs = load_package(package_dir, "cpu").state_specs
    state = create_state(specs, 0, "cpu")
    if tied:
        assert "lm_head.weight" not in tensors
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, tmp_path / "model.safetensors")
        load_weights(tmp_path, state, specs, [])
        assert torch.equal(state["model.embed_tokens.weight"], tensors["lm_head.weight"])
    tensors["lm_head.weight" if tied else "lm_head.bias"] = torch.randn(256, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 not in the package \(lm_head\.(weight|bias)\)"):
        load_weights(tmp_path, state, specs, [])
