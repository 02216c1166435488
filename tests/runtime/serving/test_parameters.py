"""What a request may ask for: ranges, what stands for another value, and what each error names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mgraph.runtime.serving.parameters import RequestError, SamplingParams

WRONG: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 1.5),
    ("n", True),
    ("n", 1000),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1"),
    ("top_k", -2),
    ("logit_bias", {math.inf: 1}),
    ("top_k", 1.0),
    ("top_p", 0),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("min_p", 2),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e300),
    ("temperature", 1e300),
    ("seed", 2**63),
    ("seed", -2),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", 21),
    ("logprobs", -2),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -2),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", 3),
    ("stop", ["a"] * 65),
    ("stop", ["a", "a" * 1025]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "12"),
    ("stop_token_ids", [True]),
    ("logit_bias", {"x": 1}),
    ("logit_bias", [1]),
    *(("logit_bias", {key: 1}) for key in (1.7, True, "1_0", " 7 ", "٣", "7.0", "9" * 5000)),
    ("stop_token_ids", {}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: math.nan}),
    ("allowed_token_ids", []),
    ("bad_words", [""]),
    ("bad_words", ["a" * 1025]),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name and name in caught.value.message


def test_values_that_stand_for_others() -> None:
    assert SamplingParams(temperature=1e-6).temperature == 0 and SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=0.005).temperature == 0.01
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop="a" * 1024).stop == ("a" * 1024,)
    assert SamplingParams(stop="a").stop == ("a",) and SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(logit_bias={"5": 1000, 6: -1000}).logit_bias == {5: 100.0, 6: -100.0}  # type: ignore[dict-item]
    assert SamplingParams(temperature=1).temperature == 1


def test_numbers_of_numpy() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(5), stop_token_ids=[np.int32(7)])  # type: ignore[arg-type, list-item]
    assert (params.temperature, params.top_k, params.stop_token_ids) == (0.5, 5, (7,))
    assert type(params.temperature) is float and type(params.top_k) is type(params.stop_token_ids[0]) is int
    with pytest.raises(ValueError, match="top_k must be an integer"):  # as other engines say it
        SamplingParams(top_k=np.float32(5))  # type: ignore[arg-type]


def test_values_that_do_not_go_together() -> None:
    with pytest.raises(RequestError, match="n is 2, and with temperature 0"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(RequestError, match="detokenize is false"):
        SamplingParams(stop="a", detokenize=False)


def test_of_a_dict() -> None:
    assert SamplingParams.of({"top_p": 0.5, "n": 2}) == SamplingParams(top_p=0.5, n=2)
    with pytest.raises(RequestError, match="no sampling parameter 'temprature'") as caught:
        SamplingParams.of({"temprature": 1})
    assert "did you mean 'temperature'" in str(caught.value)


@pytest.mark.parametrize("digits", [400, 5000])
def test_numbers_of_many_digits(digits: int) -> None:
    """More than floats hold, and than Python writes."""
    with pytest.raises(RequestError, match=r"top_k is .*: it must be at least -1"):
        SamplingParams(top_k=10**digits)
    with pytest.raises(RequestError, match="logit_bias must map"):
        SamplingParams(logit_bias={1: 10**digits})
