"""Prompts that bring out how an engine is set up, and what the model of `transformers` says of the answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mgraph.runtime.serving.llm import LLM, RequestOutput
from mgraph.runtime.serving.parameters import SamplingParams
from mgraph.runtime.serving.step import Batch, Pending, Sampling, Stepper

CELLS = list(itertools.product(["whole", "chunks"], [False, True], ["ample", "tight"]))
"""Prompts a step at a time or in chunks, whether the cache finds beginnings again, and how large it is."""
CHUNK, OUTPUT, MARGIN = 7, 12, 1e-3
"""Tokens of a step of chunks; of an answer; between the two likeliest tokens, where rounding may choose for less."""

_SHARED = [(0, 1), (33, 1), (0, 2), (0, 14), (0, 1), (33, 2), (0, 2)]
"""Prompts: how many tokens of a common beginning they have, and how many of their own."""

Exact = Callable[[tuple[int, ...]], Tensor]
"""Of a text, the log-probabilities [tokens, vocab] of what follows each of its tokens, f32 on the CPU."""


def answers(llm: LLM, seed: int, shared: Sequence[tuple[int, int]] = _SHARED) -> list[RequestOutput]:
    """Greedy answers to prompts that are asked at once, most of which begin as one that was served before them. Of some
    the log-probabilities of the prompt are asked for, too."""
    draw = torch.Generator().manual_seed(seed)
    common = torch.randint(256, (33,), generator=draw).tolist()
    inputs = [common[:cut] + torch.randint(256, (new,), generator=draw).tolist() for cut, new in shared]
    asked = [None if at % 3 else 0 for at in range(len(inputs))]
    likeliest = {"temperature": 0, "logprobs": 2, "ignore_eos": True}
    params = [SamplingParams.of({**likeliest, "max_tokens": OUTPUT, "prompt_logprobs": count}) for count in asked]
    llm.generate([common], SamplingParams(temperature=0, max_tokens=1))  # from now on its blocks may be found
    return llm.generate(inputs, params)


def dense(model: nn.Module) -> Exact:
    """The model itself: whole texts, one at a time, each computed once."""
    device = next(model.parameters()).device
    seen: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def exact(text: tuple[int, ...]) -> Tensor:
        if text not in seen:
            seen[text] = model(torch.tensor([text], device=device)).logits[0].float().log_softmax(-1).cpu()
        return seen[text]

    return exact


def worst(exact: Exact, outputs: Sequence[RequestOutput]) -> float:
    """The largest error of a log-probability of answers and prompts. Asserts that tokens are the model's, after the
    same text, wherever one of them clearly leads."""
    error = 0.0
    for output in outputs:
        (one,) = output.outputs
        text, first = (*output.prompt_token_ids, *one.token_ids), len(output.prompt_token_ids)
        scores = exact(text)
        assert one.logprobs is not None and len(one.token_ids) == len(one.logprobs) == OUTPUT
        for at, (token, score) in enumerate(zip(one.token_ids, one.logprobs, strict=True), first - 1):
            best = scores[at].topk(2)
            error = max(error, abs(score.logprob - float(scores[at, token])))
            assert token == int(best.indices[0]) or float(best.values[0] - best.values[1]) <= MARGIN, (
                f"token {at + 1 - first} of the answer to {first} tokens"
            )
        for at, of_prompt in enumerate((output.prompt_logprobs or ())[1:]):
            assert of_prompt is not None
            error = max(error, abs(of_prompt.logprob - float(scores[at, text[at + 1]])))
    return error


class Ahead:
    """A package with its results looked at one step late, as on a GPU: till then its tokens are unknown."""

    asynchronous = True

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self.unknown = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)

    def run(self, batch: Batch, sampling: Sampling) -> Pending:
        self.unknown += int((batch.tokens < 0).sum())
        return self._stepper.run(batch, sampling)
