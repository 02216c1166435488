"""Wrong input gives one clear message with the user's line; unsupported constructs are listed all at once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mgraph.capture import ModelSpec, capture, router_losses
from mgraph.capture.router_losses import weight_of
from mgraph.errors import CaptureError, MgraphError, ModelError
from tests.capture.models import llama_config, write_model
from tests.families.configs import eager


def failure(spec: str | ModelSpec, kind: type[MgraphError]) -> MgraphError:
    with pytest.raises(kind) as caught:
        capture(spec)
    assert "Traceback" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dens-tiny", "did you mean 'dense-tiny'?"),
        ("dense-huge", "unknown model 'dense-huge'"),
        ("missing/model.py:factory", "no file 'missing/model.py'"),
        ("missing/model.py", "no factory in"),
        ("hf:missing/config.json", "cannot read 'missing/config.json'"),
    ],
)
def test_unknown_models(text: str, message: str) -> None:
    assert message in str(failure(text, ModelError))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has no model_type"),
        (json.dumps({"model_type": "lama"}), "transformers has no model type 'lama'"),
        (json.dumps(llama_config(num_attention_heads=5)), "is not a multiple of the number of attention heads (5)"),
    ],
)
def test_wrong_configurations(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    error = failure(f"hf:{tmp_path}/config.json", ModelError)
    assert message in error.message
    assert "lama" not in text or error.where or error.hint


@pytest.mark.parametrize(
    ("source", "factory", "message", "where"),
    [
        ("def model(:\n", "model", "cannot be imported: SyntaxError", "user.py:1"),
        ("import nothing_of_this_name\n", "model", "cannot be imported: ModuleNotFoundError", "user.py:1"),
        ("import sys\nsys.exit(0)\n", "model", "cannot be imported: SystemExit: 0", "user.py:2"),
        (
            "import sys\ndef model():\n    sys.exit('bye')\n",
            "model",
            "building the model failed: SystemExit: bye",
            ":3",
        ),
        ("def model():\n    pass\n", "modle", "'modle' is not a function", "user.py"),
        ("def model():\n    return 3\n", "model", "the factory returned int", "user.py"),
        (
            "def model():\n    raise ValueError('seven')\n",
            "model",
            "building the model failed: ValueError: seven",
            ":2",
        ),
    ],
)
def test_wrong_files(tmp_path: Path, source: str, factory: str, message: str, where: str) -> None:
    (tmp_path / "user.py").write_text(source)
    error = failure(f"{tmp_path / 'user.py'}:{factory}", ModelError)
    assert message in error.message
    assert where in str(error.where)


@pytest.mark.parametrize("condition", ["if x.sum() > 0:", "for _ in range(int(x.sum().item())):"])
def test_data_dependent_control_flow_names_its_first_line(tmp_path: Path, condition: str) -> None:
    error = failure(write_model(tmp_path, f"{condition}\n    x = x + 1\nreturn self.head(x)"), CaptureError)
    assert "control flow depends on the values of a tensor" in error.message
    assert f"user.py:13: {condition}" in str(error.where)


def test_unsupported_constructs_are_listed_at_once(tmp_path: Path) -> None:
    body = """
x = torch.dropout(x + torch.randn_like(x), 0.1, True)
self.seen.add_(1)
picked = x[x > 0].sum()
with torch.autocast("cpu"):
    y = self.head(x + torch.bernoulli(x))
z = torch.view_as_complex(x.double().view(*x.shape[:2], 4, 2))
return y + picked + z.real.sum().float()
"""
    error = failure(write_model(tmp_path, body), CaptureError)
    lines = error.message.splitlines()
    assert lines[0] == "6 constructs are not supported:"
    for number, text in (
        (13, "random numbers in forward (aten.randn_like.default)"),
        (14, "'seen' is changed in place"),
        (15, "a size that depends on the values of a tensor"),
        (17, "a region of autocast"),
        (17, "random numbers in forward"),
        (18, "the dtype complex128"),
    ):
        assert any(text in line and f"user.py:{number}" in line for line in lines), (number, text, lines)


def test_a_line_of_transformers(tmp_path: Path) -> None:
    """A line of a library cannot be rewritten; a setting may leave it out."""
    from transformers import PhimoeConfig

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = PhimoeConfig(**sizes, num_key_value_heads=2, vocab_size=64, pad_token_id=None)
    config.architectures = ["PhimoeForCausalLM"]
    config.save_pretrained(tmp_path)
    error = failure(f"hf:{tmp_path / 'config.json'}", CaptureError)
    assert "random numbers in forward" in error.message and "a setting of config.json" in str(error)
    assert "transformers/models/phimoe/modeling_phimoe.py" in str(error)


def test_a_loss_of_transformers_with_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the class multiplies its routers' losses by is not known."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    model = eager("mixtral")
    given, other = MoeCausalLMOutputWithPast(logits=torch.zeros(1)), SimpleNamespace()
    assert weight_of(model, given, "config.json") == weight_of(torch.nn.Sequential(model), given, "user.py") == 0.001
    assert weight_of(model, other, "user.py") == 1.0
    monkeypatch.setattr(router_losses, "WEIGHTS", ("its_factor",))
    with pytest.raises(ModelError, match="MixtralForCausalLM gives a loss of its own, and no its_factor"):
        weight_of(model, given, "config.json")


def test_a_quotient_of_sizes(tmp_path: Path) -> None:
    body = "twice = torch.cat([x, x])\nreturn self.head(x * (twice.shape[0] / x.shape[0]))"
    error = failure(write_model(tmp_path, body), CaptureError)
    assert "a number that is a quotient of sizes" in error.message and "user.py:14" in str(error)


@pytest.mark.parametrize(
    ("body", "op"),
    [
        ("return self.head(x.double())", "aten.linear.default"),
        ("return self.head(x) + (x @ self.head.weight.double().t()).float()", "aten.matmul.default"),
    ],
)
def test_products_of_several_dtypes(tmp_path: Path, body: str, op: str) -> None:
    error = failure(write_model(tmp_path, body), CaptureError)
    assert error.message.startswith("unsupported: a product of float")
    assert {"float64", "float32"} <= set(error.message.split()) and op in error.message
    assert "user.py:1" in str(error.where)


def test_dropout_is_nothing_in_evaluation(tmp_path: Path) -> None:
    spec = write_model(tmp_path, "return self.head(F.dropout(x, 0.5, self.training))")
    nodes = capture(ModelSpec(spec, training=False)).functions["forward"].nodes
    assert not any("dropout" in n.op for n in nodes)
    trained = capture(spec)
    assert [n.op for n in trained.functions["forward"].nodes].count("dropout") == 1
    assert not any("dropout" in n.op for n in trained.entry_function("evaluation").nodes)


def test_dropout_of_transposed_sequences_is_refused(tmp_path: Path) -> None:
    spec = write_model(tmp_path, "return self.head(F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1))")
    error = failure(spec, CaptureError)
    assert "first dim is not the batch" in error.message
    assert "user.py:13" in str(error.where)


def test_a_size_that_forward_fixes(tmp_path: Path) -> None:
    error = failure(write_model(tmp_path, "x = x + 1 if x.shape[1] % 2 == 0 else x\nreturn self.head(x)"), CaptureError)
    assert "does not take every batch size and length: it needs Eq(Mod(S, 2), 0)" in error.message


def test_a_table_narrows_the_range(tmp_path: Path) -> None:
    module = capture(write_model(tmp_path, "return self.head(x + self.table[: x.shape[1]])"))
    assert module.dims["S"].maximum == 40


def test_an_error_in_forward_names_the_line(tmp_path: Path) -> None:
    error = failure(write_model(tmp_path, "x = x @ self.table\nreturn self.head(x)"), CaptureError)
    assert "forward failed while it was traced: RuntimeError" in error.message
    assert "user.py:13: x = x @ self.table" in str(error.where)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return self.head(x).sum(), 3", "forward returned tuple, not logits"),
        ("return self.head(x).sum(-1)", "of rank 2, not logits"),
    ],
)
def test_no_logits(tmp_path: Path, body: str, message: str) -> None:
    assert message in failure(write_model(tmp_path, body), ModelError).message


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ("def inputs(B, S):\n    return [1]\n", "inputs(B, S) returned list"),
        ("def inputs(B, S):\n    return {'tokens': 3}\n", "input 'tokens' is 3"),
        ("def inputs(B, S):\n    return {'tokens': (torch.int64, (B, S * S))}\n", "input 'tokens' is"),
        ("def loss(outputs, batch):\n    return outputs.sum()\n", "must return two 0-d tensors"),
        ("def loss(outputs, batch):\n    return outputs.sum(), outputs.mean()\n", "count must be i64"),
    ],
)
def test_wrong_inputs_and_loss(tmp_path: Path, tail: str, message: str) -> None:
    spec = write_model(tmp_path, "return self.head(x)")
    with (tmp_path / "user.py").open("a") as file:
        file.write(tail)
    assert message in failure(spec, ModelError).message


def test_an_input_that_forward_does_not_take(tmp_path: Path) -> None:
    spec = ModelSpec(write_model(tmp_path, "return self.head(x)"), packed=True)
    assert "takes no 'position_ids'" in failure(spec, ModelError).message


def test_an_argument_that_no_input_is_for(tmp_path: Path) -> None:
    spec = write_model(tmp_path, "return self.head(x) * scale")
    file = Path(spec.rpartition(":")[0])
    file.write_text(
        file.read_text().replace("def forward(self, tokens):", "def forward(self, ids, scale):\n        tokens = ids")
    )
    error = failure(spec, ModelError)
    assert error.message == "forward of Model needs 'scale', which is no input"
    assert error.where and error.hint and "default" in error.hint
