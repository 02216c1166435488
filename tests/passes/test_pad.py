"""Padded heads and vocabularies: ranks give the numbers of one rank, the states are those of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgraph.compiler import pipeline_text
from mgraph.errors import OptionError, PassError
from mgraph.ir.graph import Module
from mgraph.ir.types import Shard
from mgraph.ir.verifier import verify
from mgraph.passes.adamw import AdamW
from mgraph.passes.autodiff import Autodiff
from mgraph.passes.base import Report
from mgraph.passes.pad import Pad
from mgraph.passes.pipeline import run_pipeline
from mgraph.passes.repeat_heads import RepeatHeads
from mgraph.passes.tensor_parallel import TensorParallel
from mgraph.passes.verify import TwinCheck
from mgraph.recipe import Recipe
from tests.end_to_end.meshes import Row
from tests.passes.spread import trained, worst_difference


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Module:
    """Two groups of three heads, and 259 entries in the vocabulary."""
    return forward(tmp_path_factory.mktemp("odd"), "odd")


def forward(directory: Path, model: str, after: str = "raise-loss", **options: object) -> Module:
    """The graph of a model of the table of meshes before it is differentiated."""
    return trained(Row(model, "dp=1").recipe(directory).model, after=after, **options)


def spread(before: Module, ranks: int, pad: Pad) -> tuple[Module, Module, Report]:
    """The training graph of one rank, and that over an axis, and what was padded."""
    alone, _ = run_pipeline(before, [Autodiff(), AdamW()])
    after, results = run_pipeline(before, [pad, RepeatHeads(ranks), Autodiff(), AdamW(), TensorParallel(size=ranks)])
    verify(after)
    return alone, after, results[0].report


def attention_heads(module: Module) -> list[int]:
    """The heads of queries, keys and values in the layer's attention."""
    (attention,) = (n for n in module.functions["layer.fwd"].nodes if n.op == "attention")
    assert all(v.tensor.on("tp") == Shard(1) for v in attention.operands[:3])
    return [int(str(v.tensor.shape[1])) for v in attention.operands[:3]]


def test_groups_get_the_heads_that_they_miss(odd: Module) -> None:
    alone, after, report = spread(odd, 4, Pad(4, heads=True, vocab=True))
    said = sorted(match.detail for match in report.matches)
    assert (
        said == ["query heads by key/value head 2 x 3 -> 2 x 4 for 4 ranks"] + ["vocabulary 259 -> 260 for 4 ranks"] * 2
    )
    assert not report.near_misses
    assert {n: s.type.shape for n, s in after.state.items()} == {n: s.type.shape for n, s in alone.state.items()}
    assert attention_heads(after) == [8, 4, 4]
    assert after.entry_function("predict").results[0].tensor.shape[-1] == 259
    assert worst_difference(alone, after, "tp", 4, steps=2) <= 1e-9


def test_more_key_value_heads(tmp_path: Path) -> None:
    alone, after, report = spread(forward(tmp_path, "threes"), 4, Pad(4, heads=True, vocab=True))
    assert [match.detail for match in report.matches] == ["key/value heads 6 -> 8 for 4 ranks"]
    assert attention_heads(after) == [16, 8, 8]
    assert worst_difference(alone, after, "tp", 4, steps=1) <= 1e-9


def test_what_is_not_named_is_refused(odd: Module) -> None:
    with pytest.raises(PassError, match="does not divide the 6 heads"):
        spread(odd, 4, Pad(4, vocab=True))
    with pytest.raises(PassError, match="does not divide the 259 entries"):
        spread(odd, 4, Pad(4, heads=True))


def test_what_divides_stays(odd: Module) -> None:
    report = Report()
    assert Pad(7, vocab=True).run(odd, report) is odd and Pad(2, heads=True).run(odd, report) is odd
    assert report == Report()


def test_dropout_of_heads_is_refused(tmp_path: Path) -> None:
    """Its numbers are those of places in the whole tensor."""
    adapted = forward(tmp_path, "odd", "lora", lora=("*.o.*: rank=2, dropout=0.1",))
    with pytest.raises(PassError, match=r"2 x 3 -> 2 x 4 of .*attn cannot be padded: dropout"):
        Pad(4, heads=True).run(adapted, Report())


@pytest.mark.parametrize(("size", "padded"), [(4, {"heads", "vocab"}), (2, {"vocab"}), (7, set())])
def test_twin(odd: Module, size: int, padded: set[str]) -> None:
    """The twin is padded where the model is, whatever its own extents are."""
    check = TwinCheck(ranks=size, parts=2)
    _, results = run_pipeline(odd, [Pad(size, heads=size != 7, vocab=True)], [check])
    assert results[0].measured["verify"]["status"] == "verified", results[0].measured["verify"]
    assert {"vocab" if "vocabulary" in match.detail else "heads" for match in results[0].report.matches} == padded


def test_recipe() -> None:
    text = pipeline_text(Recipe(model="dense-tiny", mesh="tp=4", pad=" vocab, heads"))
    assert "pad{size=4,heads=true,vocab=true},repeat-heads{size=4},autodiff" in text
    assert "pad{" not in pipeline_text(Recipe(model="dense-tiny", mesh="tp=4"))
    assert Recipe(model="dense-tiny", mesh="tp=4", pad="vocab,heads").pad == "heads,vocab"
    with pytest.raises(OptionError, match="'vocabulary' cannot be padded"):
        Recipe(model="dense-tiny", mesh="tp=4", pad="vocabulary")
    with pytest.raises(OptionError, match="no axis tp"):
        Recipe(model="dense-tiny", mesh="dp=2", pad="vocab")
