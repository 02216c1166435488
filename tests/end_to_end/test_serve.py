"""A serve package generates what `transformers` generates, token for token, however its engine is set up."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import openai
import pytest
import torch
from safetensors.torch import save_file

from mgraph.compiler import compile_package
from mgraph.errors import CheckpointError, OptionError
from mgraph.recipe import Recipe
from mgraph.runtime.package import read_manifest
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.llm import LLM
from mgraph.runtime.serving.parameters import RequestError, SamplingParams
from mgraph.runtime.serving.step import Stepper
from tests.end_to_end.builds import Build, build, llama
from tests.end_to_end.cells import CELLS, CHUNK, Ahead, answers, dense, worst
from tests.end_to_end.windows import save_weights, spread
from tests.families.configs import eager, write_config
from tests.sampling import sampled


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


def greedy(model: LLM, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens after a prompt."""
    params = SamplingParams(temperature=0, max_tokens=count)
    return list(model.generate([prompt], params)[0].outputs[0].token_ids)


@pytest.mark.parametrize("length", [1, 2, 13, 40])
def test_greedy_equals_transformers_generate(served: tuple[Build, torch.nn.Module, Path], length: int) -> None:
    built, model, weights = served
    prompt = torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    found = greedy(LLM(built.path, weights, device="cpu"), prompt, 24)
    assert found == generate(model, prompt, 24)
    assert len(set(found)) > 3, "a constant continuation would prove little"


def test_what_does_not_fit_in_the_cache_is_refused(served: tuple[Build, torch.nn.Module, Path]) -> None:
    model = LLM(served[0].path, served[2], device="cpu")
    assert len(greedy(model, [1] * 60, 4)) == 4
    with pytest.raises(RequestError, match="maximum context length is 64"):
        greedy(model, [1] * 60, 5)
    with pytest.raises(RequestError, match="prompt is empty"):
        model.generate([[]])
    with pytest.raises(OptionError, match="a cache of 1 blocks"):
        LLM(served[0].path, served[2], device="cpu", num_blocks=1)
    with pytest.raises(
        OptionError, match=r"a cache of 1000000000 blocks of 8KiB: 7.451TiB are needed, and cpu has"
    ) as caught:
        LLM(served[0].path, served[2], device="cpu", num_blocks=10**9)
    assert caught.value.hint == "a smaller --num-blocks or --cache-memory (num_blocks, cache_memory in Python)"
    small = LLM(served[0].path, served[2], device="cpu", cache_memory=4 * 16 * 2 * 2 * 2 * 16 * 4 / 2**30)
    assert small.engine.stepper.num_blocks == 4 and small.engine.longest == 3 * 16 + 1


def test_wrong_weights_are_named(served: tuple[Build, torch.nn.Module, Path], tmp_path: Path) -> None:
    built, model, _ = served
    tensors = {n: p.detach().clone() for n, p in model.named_parameters()}
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing \(model\.norm\.weight\)"):
        LLM(built.path, tmp_path, device="cpu")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is \[3\], not \[64\]"):
        LLM(built.path, tmp_path, device="cpu")
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        LLM(built.path, tmp_path, device="cpu")


def test_the_generated_driver(served: tuple[Build, torch.nn.Module, Path]) -> None:
    built, model, weights = served
    command = [sys.executable, str(built.path / "serve.py"), "--weights", str(weights), "--prompt", "The cat"]
    done = subprocess.run([*command, "--max-new-tokens", "8"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = bytes(generate(model, list(b"The cat"), 8)).decode(errors="replace")
    assert done.stdout == "The cat" + expected + "\n"
    wrong = subprocess.run([*command, "--max-new-tokens", "800"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr and "context length" in wrong.stderr
    unknown = subprocess.run([*command, "--promt", "a"], capture_output=True, text=True, timeout=120)
    assert unknown.returncode == 2
    assert unknown.stderr == "error: unrecognized arguments: --promt a\n  try: did you mean '--prompt'?\n"
    none = subprocess.run([*command, "--max-new-tokens", "0"], capture_output=True, text=True, timeout=120)
    assert none.returncode == 2 and "--max-new-tokens 0: must be at least 1" in none.stderr


def test_the_server_of_a_package(served: tuple[Build, torch.nn.Module, Path]) -> None:
    """Streamed through the client that people use; SIGTERM ends it."""
    built, model, weights = served
    command = [sys.executable, str(built.path / "serve.py"), "--weights", str(weights), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            (name,) = [item.id for item in client.models.list()]
            asked = client.completions.create(model=name, prompt="The cat", max_tokens=20, temperature=0, stream=True)
            pieces = [chunk.choices[0].text for chunk in asked]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert name == "llama-package" and len(pieces) > 5
    assert "".join(pieces) == bytes(generate(model, list(b"The cat"), 20)).decode(errors="replace")


FAMILIES = [(family, *cell) for family in ("qwen3", "qwen3-moe", "gpt-oss") for cell in CELLS]


@pytest.mark.parametrize(("prompts", "prefix_cache", "cache"), CELLS)
def test_many_requests(
    served: tuple[Build, torch.nn.Module, Path], prompts: str, prefix_cache: bool, cache: str
) -> None:
    built, model, weights = served
    compare(built.path, weights, model, prompts, prefix_cache, cache)


def test_a_part_of_a_beginning_is_found(served: tuple[Build, torch.nn.Module, Path]) -> None:
    """Prompts that leave a cached text within its first block, at the end of one, and within its second."""
    built, model, weights = served
    llm = LLM(built.path, weights, device="cpu", num_blocks=60, step_tokens=CHUNK, max_requests=5)
    found = answers(llm, 0, [(9, 11), (16, 16), (20, 11), (0, 9), (32, 1), (31, 2)])
    assert worst(dense(model), found) < 1e-4
    assert [output.cached_tokens for output in found] == [0, 16, 16, 0, 32, 16]


@pytest.mark.parametrize("cache", ["ample", "tight"])
def test_planned_before_tokens_are_known(served: tuple[Build, torch.nn.Module, Path], cache: str) -> None:
    """Sampled with penalties: the same as with a step at a time."""
    built, _, weights = served
    blocks = 5 if cache == "tight" else 60
    llm = LLM(built.path, weights, device="cpu", num_blocks=blocks, step_tokens=9, max_requests=4)
    inputs = [[at] * (5 + 4 * at) for at in range(6)]
    params = [SamplingParams(seed=at, max_tokens=12, repetition_penalty=1 + at / 4, logprobs=1) for at in range(6)]
    ahead = Ahead(llm.engine.stepper)
    late = LLM.over(Engine(cast(Stepper, ahead), llm.tokenizer, max_requests=4, max_tokens=9))
    found = [[o.outputs[0].token_ids for o in model.generate(inputs, params)] for model in (llm, late)]
    assert found[0] == found[1] and len({token for ids in found[0] for token in ids}) > 20
    assert ahead.unknown > 20
    assert (late.engine.scheduler.counts.preemptions > 0) == (cache == "tight")


@pytest.mark.parametrize(("family", "prompts", "prefix_cache", "cache"), sampled(FAMILIES, 2))
def test_many_requests_of_families(
    family: str, prompts: str, prefix_cache: bool, cache: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    package, weights, model = of_family(family, tmp_path_factory.getbasetemp() / f"serve-{family}")
    compare(package, weights, model, prompts, prefix_cache, cache)


def of_family(family: str, directory: Path) -> tuple[Path, Path, torch.nn.Module]:
    """A package of a `transformers` class, made once, with spread-out weights."""
    model = spread(eager(family, seed=3)).eval()
    weights = directory / "model.safetensors"
    if not weights.is_file():
        configuration = write_config(family, directory / "model")
        output = str(directory / "package")
        compile_package(Recipe(model=configuration, purpose="serve", output=output, arch="none", max_length=64))
        save_weights(model, weights)
    return directory / "package", weights, model


def compare(package: Path, weights: Path, model: torch.nn.Module, prompts: str, prefix_cache: bool, cache: str) -> None:
    """Tokens equal those of the model wherever two are not as likely, and log-probabilities do, prompts included."""
    groups = len(read_manifest(package).get("cache_groups", [None]))  # each holds the longest, or its window
    llm = LLM(
        package,
        weights,
        device="cpu",
        prefix_cache=prefix_cache,
        num_blocks=6 * groups if cache == "tight" else 60,
        step_tokens=CHUNK if prompts == "chunks" else 0,
        max_requests=5,
    )
    assert worst(dense(model), answers(llm, len(prompts))) < 1e-4
    scheduler = llm.engine.scheduler
    assert (scheduler.counts.preemptions > 0) == (cache == "tight")
    assert (scheduler.counts.prefix_hits > 0) == prefix_cache
    assert scheduler.pool.available == scheduler.pool.usable
