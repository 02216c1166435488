"""Fine-tuning on conversations: the loss on the assistant's words, against transformers one conversation at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from mgraph.compiler import compile_package
from mgraph.recipe import Recipe
from mgraph.runtime.corpus import load_corpus
from mgraph.runtime.options import parse
from mgraph.runtime.packing import PackedExamples
from mgraph.runtime.tokenizer import load_tokenizer
from mgraph.runtime.train import run
from tests.end_to_end.builds import LLAMA
from tests.runtime.chats import BLOCKS, PLAIN, write_jsonl, write_tokenizer

LENGTH = 125
VOCABULARY = 320


class Sample(NamedTuple):
    """A data file, the directory of a model with its tokenizer, and each conversation's loss sum and targets."""

    data: Path
    model: Path
    sums: list[float]
    counts: list[int]


def conversation(n: int) -> list[dict[str, str]]:
    """One to three questions and answers; every fourth has a system turn."""
    turns = [{"role": "system", "content": "says brown fox"}] if n % 4 == 3 else []
    for k in range(1 + n % 3):
        turns.append({"role": "user", "content": f"the {n} + {k}?" + " quick" * (n % 5)})
        turns.append({"role": "assistant", "content": f"yes fox {n + k}" + " says" * (k + n % 4)})
    return turns


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("chat")
    torch.manual_seed(3)
    settings = {k: v for k, v in LLAMA.items() if k != "architectures"}
    model: Any = LlamaForCausalLM(LlamaConfig(**{**settings, "vocab_size": VOCABULARY}))
    model.save_pretrained(directory / "llama")
    tokenizer = write_tokenizer(directory / "llama", PLAIN["chatml"])
    chats = [conversation(n) for n in range(20)]
    sums, counts = [], []
    for chat in chats:
        encoded = tokenizer.apply_chat_template(
            chat, chat_template=BLOCKS["chatml"], return_assistant_tokens_mask=True, return_dict=True
        )
        ids, mask = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"], dtype=torch.bool)
        with torch.no_grad():
            logits = model.double()(ids[None, :-1]).logits[0]
        sums.append(float(F.cross_entropy(logits[mask[1:]], ids[1:][mask[1:]], reduction="sum")))
        counts.append(int(mask.sum()))
    return Sample(
        write_jsonl(directory / "chats.jsonl", [{"messages": c} for c in chats]), directory / "llama", sums, counts
    )


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "packed"])
def package(request: pytest.FixtureRequest, sample: Sample) -> tuple[Path, bool]:
    """A package of the model, and whether several conversations may share a row."""
    output = sample.model.parent / f"package-{request.param}"
    compilation = compile_package(
        Recipe(model=f"hf:{sample.model}", output=str(output), arch="none", packed=request.param)
    )
    assert compilation.package is not None
    return compilation.package, request.param


def test_first_loss_is_that_of_each_conversation_alone(
    sample: Sample, package: tuple[Path, bool], tmp_path: Path
) -> None:
    """The first step sees every conversation for training once; then the loss falls."""
    directory, packed = package
    arguments = [
        "--data",
        str(sample.data),
        "--tokenizer",
        str(sample.model),
        "--seq-len",
        str(LENGTH),
        "--long",
        "error",
    ]
    corpus = load_corpus(parse(arguments, "train.py"), load_tokenizer(sample.model, VOCABULARY), packed)
    assert isinstance(corpus.train, PackedExamples) and isinstance(corpus.validation, PackedExamples)
    rows = len(corpus.train.rows(None))
    assert rows < 12 if packed else rows == 18
    more = ["--init", str(sample.model), "--steps", "8", "--batch-size", str(rows), "--out", str(tmp_path / "run")]
    rate = ["--lr", "0.01", "--warmup", "0", "--sample-length", "0", "--device", "cpu", "--threads", "1"]
    run(parse([*arguments, *more, *rate], "train.py"), directory)
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    train = corpus.train.chosen.tolist()
    count = sum(sample.counts[n] for n in train)
    assert steps[0]["count"] == count
    assert steps[0]["loss"] == pytest.approx(sum(sample.sums[n] for n in train) / count, rel=1e-5)
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    assert records[-1]["validation_loss"] < 0.8 * steps[0]["loss"]


def test_validation_loss_is_that_of_each_conversation_alone(
    sample: Sample, package: tuple[Path, bool], tmp_path: Path
) -> None:
    """With a rate of 0 nothing is learned, so the last evaluation is of the weights that were given."""
    common = ["--data", str(sample.data), "--tokenizer", str(sample.model), "--seq-len", str(LENGTH), "--steps", "1"]
    more = ["--init", str(sample.model), "--lr", "0", "--min-lr", "0", "--sample-length", "0", "--device", "cpu"]
    options = parse([*common, *more, "--threads", "1", "--batch-size", "3", "--out", str(tmp_path / "run")], "train.py")
    run(options, package[0])
    corpus = load_corpus(options, load_tokenizer(sample.model, VOCABULARY), takes_segments=package[1])
    assert isinstance(corpus.validation, PackedExamples)
    held_out = corpus.validation.chosen.tolist()
    assert len(held_out) == 2
    last = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])
    expected = sum(sample.sums[n] for n in held_out) / sum(sample.counts[n] for n in held_out)
    assert last["validation_loss"] == pytest.approx(expected, rel=1e-5)
