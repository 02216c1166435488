"""Tiny models with sliding windows, served with blocks that nobody holds full of NaN, against the dense model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from mgraph.compiler import compile_package
from mgraph.recipe import Recipe
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.package_stepper import PackageStepper
from mgraph.runtime.serving.parameters import SamplingParams
from mgraph.runtime.serving.step import Batch, Pending, Sampling
from tests.families.configs import CONFIGS

WINDOW, BLOCK, LENGTH = 8, 4, 96
KINDS: dict[str, list[int | None]] = {"mistral": [WINDOW], "gpt-oss": [None, WINDOW], "gemma2": [None, WINDOW]}
"""Windows of the groups of layers: of all alike, and of sliding and full layers by turns."""

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 256,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": WINDOW,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 512,
}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
"""Of Gemma 2, small enough that scores and logits reach them."""


def dense(kind: str, **changes: Any) -> Any:
    """The unmodified class of transformers, with weights that are spread out; `changes` are of its configuration."""
    import transformers

    torch.manual_seed(3)
    if kind == "mistral":
        settings: dict[str, Any] = {**_SIZES, "num_hidden_layers": 3, "pad_token_id": None, **changes}
        model: Any = transformers.MistralForCausalLM(transformers.MistralConfig(**settings))
    elif kind == "gemma2":  # whose scores are capped where attention is eager alone
        sizes = {"num_hidden_layers": 4, "query_pre_attn_scalar": 24, "pad_token_id": 0}
        settings = {**_SIZES, **_CAPS, **sizes, "attn_implementation": "eager", **changes}
        model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**settings))
    else:
        config = CONFIGS["gpt-oss"]()  # of twice as many layers: those of two kinds by turns are a loop
        config.num_hidden_layers, config.layer_types = 4, ["sliding_attention", "full_attention"] * 2
        assert config.sliding_window == WINDOW and not changes
        model = transformers.GptOssForCausalLM(config)
    model.config.use_cache = False
    return spread(model).eval()


def spread(model: nn.Module) -> nn.Module:
    """A model whose drawn weights are made larger: it has preferences, and errors show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.mul_(4)
    return model


def build(kind: str, model: Any, directory: Path, **more: Any) -> tuple[Path, Path]:
    """The serve package of a model, and its weights on disk."""
    directory.mkdir(parents=True, exist_ok=True)
    written = directory / "config.json"
    settings = {**model.config.to_dict(), "architectures": [type(model).__name__], "torch_dtype": "float32"}
    written.write_text(json.dumps(settings, default=str))
    sizes = {"max_length": LENGTH, "block_size": BLOCK, "arch": "none"}
    recipe = Recipe(model=f"hf:{written}", purpose="serve", output=str(directory / "package"), **{**sizes, **more})
    package = compile_package(recipe).package
    assert package is not None
    save_weights(model, directory / "model.safetensors")
    return package, directory / "model.safetensors"


def save_weights(model: Any, file: Path) -> None:
    """Write a model's tensors, one that is tied once."""
    tied = getattr(model.config, "tie_word_embeddings", False)
    save_file({n: t.contiguous() for n, t in model.state_dict().items() if not (tied and "lm_head" in n)}, file)


class Poisoned(PackageStepper):
    """Before each step, rows of the cache that nothing may read are NaN: those of blocks that nobody holds and that are
    not remembered, and block 0."""

    engine: Engine
    poisoned = 0

    def run(self, batch: Batch, sampling: Sampling) -> Pending:
        pool = self.engine.scheduler.pool
        free = [b for b in range(self.num_blocks) if pool._holders[b] == 0 and b not in pool._content]
        rows = (np.array(free)[:, None] * self.block_size + np.arange(self.block_size)).ravel()
        for name in self.state:
            if name.startswith("cache."):
                self.state[name][torch.from_numpy(rows).to(self.device)] = float("nan")
        self.poisoned += len(free)
        return super().run(batch, sampling)


@dataclass
class Answer:
    """Tokens after a prompt and their log-probabilities."""

    prompt: list[int]
    tokens: list[int]
    scores: list[float]
    greedy: bool


def prompts(count: int) -> list[list[int]]:
    """Some of several windows, whose beginnings are shared; the first ones are short and grow, all at once."""
    source = torch.Generator().manual_seed(9)
    common = torch.randint(256, (60,), generator=source).tolist()
    own = torch.randint(256, (count, 30), generator=source).tolist()
    sizes = [(0, 1), (0, 2), (0, 3), (0, 23), (60, 7), (60, 2), (41, 11), (60, 7)]
    return [common[: sizes[at % 8][0]] + own[at][: sizes[at % 8][1]] for at in range(count)]


def served(engine: Engine, asked: Sequence[Sequence[int]], count: int) -> tuple[list[Answer], int]:
    """What the engine says to each, one arriving every other step, and the most blocks that a request held. Of most
    the tokens are drawn, so that texts are not all alike."""
    found: dict[int, Answer] = {}
    step, most, waiting = 0, 0, list(asked)
    while waiting or engine.unfinished:
        if waiting and step % 2 == 0:
            prompt = list(waiting.pop(0))
            drawn = int(len(prompt) % 3 > 0)
            params = SamplingParams(temperature=drawn, seed=len(prompt), max_tokens=count, logprobs=0)
            found[engine.submit(prompt, params)] = Answer(prompt, [], [], not drawn)
        for delta in engine.step():
            assert delta.error is None, delta.error
            found[delta.group].tokens += delta.tokens
            found[delta.group].scores += [score.logprob for score in delta.scores]
        engine.scheduler.check()
        most = max([most, *(request.tables.held for request in engine.scheduler.running)])
        step += 1
    pool = engine.scheduler.pool
    assert pool.available == pool.usable
    return list(found.values()), most


def worst(model: Any, answers: Sequence[Answer]) -> float:
    """The largest error of a log-probability. Asserts that tokens are the dense model's where it has a clear choice."""
    error = 0.0
    device = next(model.parameters()).device
    for answer in answers:
        whole = torch.tensor([answer.prompt + answer.tokens], device=device)
        with torch.no_grad():
            exact = model(whole).logits[0].float().log_softmax(-1).cpu()[len(answer.prompt) - 1 : -1]
        assert len(answer.tokens) == len(answer.scores) == len(exact)
        chosen = exact.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        error = max(error, float((chosen - torch.tensor(answer.scores)).abs().max()))
        best = exact.topk(2)
        for token, (first, second), (top, _) in zip(answer.tokens, best.values, best.indices, strict=True):
            assert not answer.greedy or float(first - second) <= 1e-3 or token == int(top)
    return error
