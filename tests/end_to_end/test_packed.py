"""Documents that share rows equal the same documents one by one, in eager and in a package: loss and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mgraph.compiler import Compilation, compile_package
from mgraph.recipe import Recipe
from mgraph.runtime.examples import Examples
from mgraph.runtime.package import Package, load_package
from mgraph.runtime.packing import PackedExamples
from mgraph.runtime.state import create_state
from tests.end_to_end.builds import ZOO, fill, loss_of, relative
from tests.families import configs
from tests.sampling import sampled

LENGTHS = (1, 11, 2, 23, 1, 7, 13, 3)  # shorter and longer than the windows, which are 7 to 9
SEQ = 24
ZOO_NAMES = ("dense-tiny", "dense-tiny-capped", "moe-tiny", "gpt-oss-tiny", "gemma3-tiny")
WITHOUT_DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
FAMILIES = ("llama", "qwen3", "qwen3-moe", "mixtral", "gpt-oss", "gemma3", "gpt2", "bert")
CASES = [(name, disable) for name in ZOO_NAMES + FAMILIES for disable in ("", "raise-*")]


def compiled(name: str, directory: Path, **options: Any) -> tuple[Compilation, Package, Callable[[], nn.Module]]:
    """A model of the zoo or of transformers, its package, and a factory of the eager model."""
    changes = WITHOUT_DROPOUT.get(name, {})
    spec = name if name in ZOO else configs.write_config(name, directory / name, **changes)
    compilation = compile_package(Recipe(model=spec, output=str(directory / "package"), arch="none", **options))
    assert compilation.package is not None

    def eager() -> nn.Module:
        # The loop over experts of transformers; the compiled model has grouped products.
        return ZOO[name]() if name in ZOO else configs.eager(name, _experts_implementation="eager", **changes)

    return compilation, load_package(compilation.package, "cpu"), eager


def documents() -> Examples:
    """Documents of LENGTHS positions: one token more than that each, all but the first a target."""
    offsets = np.cumsum([0, *(length + 1 for length in LENGTHS)], dtype=np.int64)
    tokens = torch.randint(256, (int(offsets[-1]),), generator=torch.Generator().manual_seed(4)).numpy()
    targets = np.ones(len(tokens), np.bool_)
    targets[offsets[:-1]] = False
    return Examples(tokens, targets, offsets)


def rows_of(examples: Examples) -> dict[str, Tensor]:
    """All documents, packed: [rows, SEQ] of each input."""
    packed = PackedExamples(examples, np.arange(len(examples)), SEQ, pack=True).rows(None)
    rows = [packed[index] for index in range(len(packed))]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def each_alone(examples: Examples) -> list[tuple[Tensor, Tensor]]:
    """(tokens, labels), [1, n] each, of every document."""
    pieces = [torch.from_numpy(t) for t in np.split(examples.tokens, examples.offsets[1:-1])]
    return [(piece[None, :-1], piece[None, 1:]) for piece in pieces]


def run(package: Package, state: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add a microbatch to the accumulators of the state; its results."""
    names = package.manifest["entries"]["microbatch"]["inputs"]
    return package.call("microbatch", state, *(batch[name] for name in names))


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Some gradients are zero but for rounding: softmax forgets a bias of the keys."""
    least = 1e-6 * max(float(t.norm()) for t in expected.values())
    for name, gradient in expected.items():
        assert relative(found[f"{name}.grad"], gradient, least) <= 1e-5, name


@pytest.mark.parametrize(("name", "disable"), sampled(CASES, 1, always=[("gpt-oss", "")]))
def test_packed_documents_equal_eager_on_each_alone(name: str, disable: str, tmp_path: Path) -> None:
    compilation, package, eager = compiled(name, tmp_path, packed=True, disable=disable)
    attention = [n for _, n in compilation.module.walk() if n.op == "attention"]
    assert all("segments" in n.attrs["extra"] for n in attention)  # type: ignore[operator]
    assert bool(attention) == (not disable)
    state = create_state(package.state_specs, 3, "cpu")
    model, examples = eager(), documents()
    fill(model, state)
    loss = torch.stack([loss_of(model, *alone) for alone in each_alone(examples)]).sum()
    loss.backward()
    batch = rows_of(examples)
    assert max(int(row.max()) for row in batch["segment_ids"]) >= 3
    out = run(package, state, batch)
    assert relative(out["loss_sum"], loss.detach()) <= 1e-5
    assert int(out["count"]) == sum(LENGTHS)
    assert_gradients(state, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("name", sampled(("dense-tiny", "moe-tiny", "gpt-oss-tiny", "llama", "qwen3", "gemma3"), 1))
def test_packed_documents_equal_the_package_that_takes_one_a_row(name: str, tmp_path: Path) -> None:
    _, packed, _ = compiled(name, tmp_path / "packed", packed=True)
    _, plain, _ = compiled(name, tmp_path / "plain")
    states = [create_state(package.state_specs, 3, "cpu") for package in (packed, plain)]
    examples = documents()
    found = run(packed, states[0], rows_of(examples))["loss_sum"]
    total = torch.zeros(())
    for tokens, labels in each_alone(examples):
        # A package takes rows of two tokens and more: a causal model does not look at what is behind.
        padded = torch.nn.functional.pad(tokens, (0, 1)), torch.nn.functional.pad(labels, (0, 1), value=-100)
        total += run(plain, states[1], dict(zip(("tokens", "labels"), padded, strict=True)))["loss_sum"]
    assert relative(found, total) <= 1e-5
    trained = [spec.name for spec in packed.state_specs if spec.trainable]
    assert_gradients(states[0], {name: states[1][f"{name}.grad"] for name in trained})


def test_a_document_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    """Bit for bit, and though its neighbours take its positions: documents are told apart by segment_ids."""
    _, package, _ = compiled("dense-tiny-capped", tmp_path, packed=True)
    state = create_state(package.state_specs, 3, "cpu")
    tokens = torch.arange(10)[None] * 7
    batch = {
        "tokens": tokens,
        "position_ids": torch.arange(10)[None],
        "segment_ids": torch.tensor([[1, 1, 1, 2, 2, 2, 2, 1, 3, 3]]),
    }
    names = package.manifest["entries"]["predict"]["inputs"]

    def logits(**changes: Tensor) -> Tensor:
        return package.call("predict", state, *({**batch, **changes}[name] for name in names))["logits"]

    other = tokens.clone()
    other[batch["segment_ids"] != 2] += 1
    before, after = logits(), logits(tokens=other)
    second = batch["segment_ids"] == 2
    assert torch.equal(before[second], after[second])
    assert not torch.isclose(before[~second], after[~second]).all(-1).any()
    assert not torch.allclose(logits(segment_ids=torch.zeros_like(tokens))[second], before[second])


@pytest.mark.parametrize(
    ("name", "options"),
    sampled(
        [
            ("moe-tiny-losses", {"expert_load": True}),
            ("moe-tiny-losses", {"disable": "raise-*"}),
            ("gpt-oss-tiny", {"recompute": "full", "expert_load": True}),
        ],
        2,
    ),
    ids=str,
)
def test_what_fills_rows_up_changes_nothing(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Losses of routers, gradients and loads are those of shorter rows: no expert gets padding."""
    _, package, _ = compiled(name, tmp_path, packed=True, **options)
    batch = rows_of(documents())
    filling = {"tokens": 3, "labels": -100, "position_ids": 5, "segment_ids": 0}
    longer = {n: torch.nn.functional.pad(t, (0, 9), value=filling[n]) for n, t in batch.items()}
    states = [create_state(package.state_specs, 3, "cpu") for _ in range(2)]
    outs = [run(package, state, given) for state, given in zip(states, (batch, longer), strict=True)]
    assert relative(outs[1]["loss_sum"], outs[0]["loss_sum"]) <= 1e-6
    assert_gradients(states[1], {n.removesuffix(".grad"): t for n, t in states[0].items() if n.endswith(".grad")})
    loads = [n for n in states[0] if n.endswith(".load")]
    assert bool(loads) == ("expert_load" in options)
    choices = package.manifest["expert_loads"][0]["choices"] if loads else 0
    for load in loads:
        assert torch.equal(states[0][load], states[1][load])
        assert int(states[0][load].sum()) == choices * int((batch["segment_ids"] > 0).sum())
