"""An `LLM` on a stepper without a model, and what it must give."""

from __future__ import annotations

from mgraph.runtime.chat import ChatTemplate
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.llm import LLM
from mgraph.runtime.serving.parameters import SamplingParams
from mgraph.runtime.tokenizer import ByteTokenizer
from tests.runtime.serving.fake_stepper import FakeStepper, alone

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def fresh_llm() -> LLM:
    """It speaks bytes."""
    stepper = FakeStepper(vocab_size=256, num_blocks=40, max_length=128)
    return LLM.over(Engine(stepper, ByteTokenizer()), ChatTemplate(TEMPLATE, {}, "the test"))


def expected(llm: LLM, prompt: bytes, count: int = 8) -> tuple[int, ...]:
    """The tokens of a prompt that is served alone."""
    stepper = llm.engine.stepper
    assert isinstance(stepper, FakeStepper)
    return tuple(alone(stepper.logits, list(prompt), GREEDY, count)[0])


def nothing_left(llm: LLM) -> None:
    """No request, no block."""
    pool = llm.engine.scheduler.pool
    llm._driver.ask(lambda: None)  # what was dropped before is ended now
    assert not llm.engine.unfinished and pool.available == pool.usable and not llm._driver._requests
