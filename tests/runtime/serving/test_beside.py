"""What lies beside weights: tokenizers, chat templates, tokens that end a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mgraph.errors import DataError
from mgraph.runtime.serving.beside import (
    check_configuration,
    ends_of_text,
    find_template,
    find_tokenizer,
    is_padded,
    open_tokenizer,
)
from mgraph.runtime.tokenizer import ByteTokenizer, Tokenizer


def run(directory: Path, **said: Any) -> Path:
    """A training run whose newest checkpoint says this."""
    whole = directory / "checkpoints" / "step_00000007"
    whole.mkdir(parents=True)
    (whole / "run.json").write_text(json.dumps({"step": 7, "run": said, "layout": {}, "files": {}}))
    return directory


def test_a_training_run_names_its_tokenizer_and_template(tmp_path: Path) -> None:
    place, template = tmp_path / "tokenizer", tmp_path / "chat.jinja"
    trained = run(tmp_path / "run", places={"tokenizer": str(place), "chat_template": str(template)})
    for find, file in ((find_tokenizer, place), (find_template, template)):
        with pytest.raises(DataError, match=f"trained with --.* {file}, which is not there") as caught:
            find(trained)
        assert "step_00000007" in str(caught.value) and "PATH" in str(caught.value)
        file.touch()
        assert find(trained) == find(trained / "checkpoints") == file
    (trained / "tokenizer.json").touch()
    assert find_tokenizer(trained) == trained


def test_runs_of_before_and_runs_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").touch()
    of_before = run(tmp_path / "before", options={"tokenizer": "mine", "chat_template": "None"})
    of_bytes = run(tmp_path / "bytes", places={"tokenizer": None, "chat_template": None}, options={"tokenizer": "x"})
    assert find_tokenizer(of_before) == Path("mine") and find_template(of_before) is None
    assert find_tokenizer(of_bytes) is find_template(of_bytes) is find_tokenizer(None) is None


def test_of_weights_without_a_tokenizer_all_tokens_may_come(tmp_path: Path) -> None:
    """Of parameters drawn anew, and of a run that was trained on bytes, those beyond bytes are padding."""
    tokenizer = ByteTokenizer()
    assert is_padded(tokenizer, None, 300)
    assert is_padded(tokenizer, run(tmp_path / "run", places={"tokenizer": None}), 300)
    with pytest.warns(RuntimeWarning, match="has no tokenizer: texts are bytes, and tokens from 256 on have no text"):
        assert not is_padded(tokenizer, tmp_path / "model.safetensors", 300)
    assert not is_padded(tokenizer, tmp_path / "model.safetensors", 256)


def test_of_fewer_tokens_than_bytes_there_is_no_text(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="the model has 211 tokens, fewer than bytes: without --tokenizer FILE"):
        assert open_tokenizer(None, None, 211) is None
    assert open_tokenizer(None, None, 256) is not None
    with pytest.raises(DataError, match="no such file"):
        open_tokenizer(tmp_path / "absent", None, 211)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert ends_of_text(None, tmp_path, 211) == (5,) and is_padded(None, tmp_path, 211)


def test_a_configuration_that_computes_something_else_is_warned_of(tmp_path: Path) -> None:
    package, weights = tmp_path / "package", tmp_path / "weights"
    said = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 5e5}, "dtype": "float32", "hidden_size": 8}
    for place in (package, weights):
        place.mkdir()
        (place / "config.json").write_text(json.dumps(said))
    check_configuration(package, weights)
    (weights / "config.json").write_text(json.dumps({**said, "dtype": "bfloat16", "hidden_size": None, "newer": 1}))
    check_configuration(package, weights / "model.safetensors")
    (weights / "config.json").write_text(
        json.dumps({**said, "rms_norm_eps": 0.1, "rope_parameters": {"rope_theta": 1e4}})
    )
    with pytest.warns(RuntimeWarning, match=r'rms_norm_eps 0.1 \(1e-06\), rope_parameters {"rope_theta": 10000.0}'):
        check_configuration(package, weights)
    for broken, why in (("[]", "it is no JSON object"), ("{", "Expecting property name"), ("[" * 10**5, "recursion")):
        (weights / "config.json").write_text(broken)
        with pytest.warns(RuntimeWarning, match=rf"weights/config.json cannot be read, .*not compared: .*{why}"):
            check_configuration(package, weights)
    (weights / "config.json").unlink()
    check_configuration(package, weights)
    check_configuration(package, None)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"])
def test_part_of_a_tokenizer_among_the_weights_is_not_taken_for_bytes(tmp_path: Path, name: str) -> None:
    weights = (tmp_path, tmp_path / "model.safetensors")
    assert [find_tokenizer(each) for each in weights] == [None, None]
    (tmp_path / name).write_text("{}")
    assert [find_tokenizer(each) for each in weights] == [tmp_path, tmp_path]


def test_a_template_without_a_tokenizer_is_for_bytes(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").touch()
    assert find_tokenizer(tmp_path) is None
    assert find_template(tmp_path / "model.safetensors") == tmp_path / "chat_template.jinja"
    (tmp_path / "tokenizer.json").touch()  # which then reads the template itself
    assert find_template(tmp_path) is None


def test_tokens_that_end_a_text(tmp_path: Path) -> None:
    class WithEnd(ByteTokenizer):
        special_tokens: Mapping[str, str] = {"eos_token": "$"}

    tokenizer: Tokenizer = WithEnd()
    assert ends_of_text(tokenizer, None, 256) == (36,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert ends_of_text(tokenizer, tmp_path, 256) == (7, 9, 36)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert ends_of_text(ByteTokenizer(), tmp_path / "model.safetensors", 256) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert ends_of_text(ByteTokenizer(), tmp_path, 256) == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 999999]}')
    with pytest.warns(RuntimeWarning, match="eos_token_id 999999 never comes: the model has the tokens 0 to 255"):
        assert ends_of_text(ByteTokenizer(), tmp_path, 256) == (7,)
    for wrong in ('"x"', "[7, 1.5]", "-1", "true"):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(DataError, match=r"generation_config.json: eos_token_id is .* is no token id"):
            ends_of_text(ByteTokenizer(), tmp_path, 256)
