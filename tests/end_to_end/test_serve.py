"""A serve package generates what `transformers` generates, token for token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mgraph.errors import CheckpointError, OptionError
from mgraph.runtime.serve import Generator, open_generator
from tests.end_to_end.builds import Build, build, llama


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Build, torch.nn.Module, Path]:
    """A serve package of the tiny Llama, the eager model with spread-out weights, and its weights on disk."""
    directory = tmp_path_factory.mktemp("serve")
    built = build("llama", directory, purpose="serve", max_length=64)
    torch.manual_seed(0)
    model = llama().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    save_file({n: p.detach().clone() for n, p in model.named_parameters()}, directory / "model.safetensors")
    return built, model, directory / "model.safetensors"


def generate(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """What transformers' own greedy generation gives."""
    out = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [1, 2, 13, 40])
def test_greedy_equals_transformers_generate(served: tuple[Build, torch.nn.Module, Path], length: int) -> None:
    built, model, weights = served
    prompt = torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    generator = open_generator(built.path, weights, "cpu")
    found = list(generator.greedy(prompt, 24))
    assert found == generate(model, prompt, 24)
    assert len(set(found)) > 3, "a constant continuation would prove little"


def test_what_does_not_fit_in_the_cache_is_refused(served: tuple[Build, torch.nn.Module, Path]) -> None:
    generator: Generator = open_generator(served[0].path, served[2], "cpu")
    assert len(list(generator.greedy([1] * 60, 5))) == 5
    with pytest.raises(OptionError, match="cache of 64"):
        list(generator.greedy([1] * 60, 6))
    with pytest.raises(OptionError, match="prompt is empty"):
        list(generator.greedy([], 1))


def test_wrong_weights_are_named(served: tuple[Build, torch.nn.Module, Path], tmp_path: Path) -> None:
    built, model, _ = served
    tensors = {n: p.detach().clone() for n, p in model.named_parameters()}
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing \(model\.norm\.weight\)"):
        open_generator(built.path, tmp_path, "cpu")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is \[3\], not \[64\]"):
        open_generator(built.path, tmp_path, "cpu")
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        open_generator(built.path, tmp_path, "cpu")


def test_the_generated_driver(served: tuple[Build, torch.nn.Module, Path]) -> None:
    built, model, weights = served
    command = [sys.executable, str(built.path / "serve.py"), "--weights", str(weights), "--prompt", "The cat"]
    done = subprocess.run([*command, "--max-new-tokens", "8"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = bytes(generate(model, list(b"The cat"), 8)).decode(errors="replace")
    assert done.stdout == "The cat" + expected + "\n"
    wrong = subprocess.run([*command, "--max-new-tokens", "800"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr and "cache" in wrong.stderr
    unknown = subprocess.run([*command, "--promt", "a"], capture_output=True, text=True, timeout=120)
    assert unknown.returncode == 2
    assert unknown.stderr == "error: unrecognized arguments: --promt a\n  try: did you mean '--prompt'?\n"
    none = subprocess.run([*command, "--max-new-tokens", "0"], capture_output=True, text=True, timeout=120)
    assert none.returncode == 2 and "--max-new-tokens 0: must be at least 1" in none.stderr
