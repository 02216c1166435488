"""The training loop: against torch's own autograd and optimizer, interrupted anywhere, and on wrong input."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from mgraph.errors import CheckpointError, DataError, MgraphError, OptionError, PackageError, StorageError
from mgraph.runtime import checkpoint, shard_files, start
from mgraph.runtime import train as train_module
from mgraph.runtime.data import Stream
from mgraph.runtime.handshake import MeshError
from mgraph.runtime.mesh import current
from mgraph.runtime.options import Options, parse
from mgraph.runtime.package import load_package
from mgraph.runtime.schedule import learning_rate
from mgraph.runtime.serving.beside import find_template, find_tokenizer
from mgraph.runtime.state import create_state
from mgraph.runtime.text import load_text
from mgraph.runtime.tokenizer import ByteTokenizer
from mgraph.runtime.train import NonFiniteLossError, StopSignal, _problem, main, run, sizes_note

SMALL = ("--batch-size", "3", "--seq-len", "19", "--warmup", "3", "--lr", "0.02", "--sample-length", "0", "--seed", "5")


def train(package: Path, out: Path, data: Path | str, *arguments: str) -> None:
    run(parse([*SMALL, "--data", str(data), "--out", str(out), *arguments], "train.py"), package)


@pytest.mark.parametrize("given", [False, True], ids=["own", "init"])
def test_losses_equal_autograd_and_torch_optim(
    package_dir: Path, text_file: Path, tmp_path: Path, losses: Callable[[Path], list[float]], given: bool
) -> None:
    """12 steps of 3 microbatches, against one backward pass over their mean loss; from own weights and a file's."""
    state = create_state(load_package(package_dir, "cpu").state_specs, 7 if given else 5, "cpu")
    names = ("embed.weight", "hidden.weight", "head.weight")
    save_file({name: state[name] for name in names}, tmp_path / "weights.safetensors")
    init = ("--init", str(tmp_path / "weights.safetensors")) if given else ()
    train(package_dir, tmp_path / "run", text_file, "--steps", "12", "--accumulate", "3", *init)
    embed, hidden, head = parameters = [state[name].double().requires_grad_() for name in names]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    stream = Stream(load_text(str(text_file), ByteTokenizer(), 19).train, 3, 5)
    expected = []
    for step in range(12):
        optimizer.param_groups[0]["lr"] = learning_rate(step, 12, 0.02, 1e-4, 3, "cosine")
        batches = [stream.next() for _ in range(3)]
        logits = [torch.tanh(embed[batch["tokens"]] @ hidden.T) @ head.T for batch in batches]
        labels = torch.cat([batch["labels"] for batch in batches])
        loss = F.cross_entropy(torch.cat(logits).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        expected.append(loss.item())
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] - 0.2


NAMED = """

def checked(entry, order):
    def call(state, *inputs):
        given = dict(zip(order, inputs, strict=True))
        assert torch.equal(given["position_ids"], torch.arange(given["tokens"].shape[1]).expand_as(given["tokens"]))
        assert torch.equal(given["segment_ids"], torch.ones_like(given["tokens"]))
        return entry(state, *(given[name] for name in ("tokens", "labels") if name in given))
    return call

microbatch = checked(microbatch, ("segment_ids", "labels", "position_ids", "tokens"))
evaluate = checked(evaluate, ("labels", "segment_ids", "tokens", "position_ids"))
predict = checked(predict, ("position_ids", "segment_ids", "tokens"))
"""


def test_entries_get_their_inputs_by_name(
    package_dir: Path,
    make_package: Callable[..., Path],
    text_file: Path,
    tmp_path: Path,
    losses: Callable[[Path], list[float]],
) -> None:
    entries = json.loads((package_dir / "manifest.json").read_text())["entries"]
    entries["microbatch"]["inputs"] = ["segment_ids", "labels", "position_ids", "tokens"]
    entries["evaluate"]["inputs"] = ["labels", "segment_ids", "tokens", "position_ids"]
    entries["predict"]["inputs"] = ["position_ids", "segment_ids", "tokens"]
    inputs = [{"name": name, "dtype": "i64", "shape": ["B", "S"]} for name in entries["microbatch"]["inputs"]]
    named = make_package(entries=entries, inputs=inputs)
    step = named / "step.py"
    step.write_text(step.read_text() + NAMED)
    arguments = ("--steps", "3", "--accumulate", "2", "--sample-length", "4")
    for package, out in ((package_dir, "plain"), (named, "named")):
        train(package, tmp_path / out, text_file, *arguments)
    assert losses(tmp_path / "named") == losses(tmp_path / "plain")
    assert (tmp_path / "named" / "sample.txt").read_text() == (tmp_path / "plain" / "sample.txt").read_text()


@pytest.mark.parametrize(("crowds", "what"), [("predict", "sample"), ("evaluate", "evaluation")])
def test_what_has_no_room_beside_steps_is_told(
    package_dir: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crowds: str, what: str
) -> None:
    call = train_module.Trainer.call

    def crowded(trainer: train_module.Trainer, entry: str, *rest: Any) -> dict[str, torch.Tensor]:
        if entry == crowds:
            trainer.state["router.overrun"] = torch.tensor([0, 1])
        return call(trainer, entry, *rest)

    monkeypatch.setattr(train_module.Trainer, "call", crowded)
    with pytest.raises(train_module.BudgetError, match=f"step 1: tokens of the {what} found no room") as caught:
        train(package_dir, tmp_path / "run", text_file, "--steps", "1", "--sample-length", "2")
    assert "--expert-budget" in str(caught.value.hint) and not (tmp_path / "run" / "sample.txt").exists()


CROWDED = """

plain = finish

def finish(state, lr):
    lost = 5 * (int(state["step"]) == 1)
    return *plain(state, lr), torch.tensor([0, 0, 0, lost])
"""


def test_a_step_without_room_ends_the_run(
    package_dir: Path,
    make_package: Callable[..., Path],
    text_file: Path,
    tmp_path: Path,
    losses: Callable[[Path], list[float]],
) -> None:
    """The second of three: it names the layer and the rank, and nothing from that step on is logged or saved."""
    entries = json.loads((package_dir / "manifest.json").read_text())["entries"]
    entries["finish"]["outputs"] += ["expert_overruns"]
    layers = [{"layer": f"layers.{index}.router", "ranks": 2} for index in range(2)]
    package = make_package(entries=entries, expert_overruns=layers)
    step = package / "step.py"
    step.write_text(step.read_text() + CROWDED)
    told = r"step 2: tokens found no room on their way to experts: 5 of rank 1 of ep in layers\.1\.router\n"
    with pytest.raises(train_module.BudgetError, match=told) as caught:
        train(package, tmp_path / "run", text_file, "--steps", "3", "--save-every", "1")
    assert "compile with a larger --expert-budget" in str(caught.value.hint)
    assert len(losses(tmp_path / "run")) == 1
    saved = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert saved is not None and saved.step == 1


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "message"),
    [
        (
            "loss_mask",
            "f32",
            ["B", "S"],
            r"takes the input loss_mask f32\[B, S\]; (?s:.*)compile it without --loss-mask",
        ),
        ("images", "f32", ["B", 3, 8, 8], r"takes the input images f32\[B, 3, 8, 8\]; (?s:.*)change inputs\(B, S\)"),
        ("position_ids", "i32", ["B", "S"], r"position_ids i32\[B, S\]; the data gives tokens, .* each i64\[B, S\]"),
        ("segment_ids", "i64", ["B", "1 + S"], r"the input segment_ids i64\[B, 1 \+ S\]"),
    ],
)
@pytest.mark.parametrize("entry", ["microbatch", "evaluate", "predict"])
def test_inputs_that_the_data_does_not_give_are_refused(
    package_dir: Path,
    make_package: Callable[..., Path],
    text_file: Path,
    tmp_path: Path,
    entry: str,
    name: str,
    dtype: str,
    shape: list[object],
    message: str,
) -> None:
    manifest = json.loads((package_dir / "manifest.json").read_text())
    manifest["entries"][entry]["inputs"].append(name)
    inputs = [*manifest["inputs"], {"name": name, "dtype": dtype, "shape": shape}]
    package = make_package(entries=manifest["entries"], inputs=inputs)
    with pytest.raises(PackageError, match=message) as caught:
        train(package, tmp_path / "run", text_file, "--steps", "1")
    assert str(caught.value).count(f"{entry} takes") == 1
    assert not (tmp_path / "run").exists()


def test_examples_are_learned_and_gone_on_with(
    package_dir: Path,
    tmp_path: Path,
    losses: Callable[[Path], list[float]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every epoch has 9 rows, so that steps of 3 rows are thirds of it; against the mean over targets alone."""
    texts = [(f"what is {n}? ", f"it is {n * n}") for n in range(10)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in texts))
    arguments = ("--steps", "8", "--seq-len", "24", "--accumulate", "1", "--lr", "0", "--min-lr", "0")
    train(package_dir, tmp_path / "whole", data, *arguments)
    whole = losses(tmp_path / "whole")
    messages = " ".join(capsys.readouterr().err.split())
    assert "examples: 9 to train on, 1 to validate with; " in messages
    assert "% of the positions are padding" in messages
    state = state_of(package_dir, tmp_path / "whole")
    sums = []
    for prompt, completion in texts:
        tokens = torch.tensor(list((prompt + completion).encode()))
        logits = torch.tanh(state["embed.weight"][tokens[:-1]] @ state["hidden.weight"].T) @ state["head.weight"].T
        first = len(prompt) - 1
        sums.append(F.cross_entropy(logits[first:].double(), tokens[first + 1 :], reduction="sum").item())
    counts = [len(completion) for _, completion in texts]
    records = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    left = min(range(10), key=lambda n: abs(sums[n] / counts[n] - records[-1]["validation_loss"]))
    assert sums[left] / counts[left] == pytest.approx(records[-1]["validation_loss"], rel=1e-5)
    for first in (0, 3):
        steps = [record for record in records if "loss" in record][first : first + 3]
        assert sum(record["count"] for record in steps) == sum(counts) - counts[left]
        total = sum(record["loss"] * record["count"] for record in steps)
        assert total == pytest.approx(sum(sums) - sums[left], rel=1e-5)
    for stop_at in (1, 4, 8):
        monkeypatch.setenv("TEST_STOP_AT", str(stop_at))
        train(package_dir, tmp_path / "cut", data, *arguments, "--resume")
        assert losses(tmp_path / "cut") == whole[:stop_at]
    with pytest.raises(CheckpointError, match="option '--long' is cut in it and drop here"):
        train(package_dir, tmp_path / "cut", data, *arguments, "--resume", "--long", "drop")


@pytest.fixture
def whole_run(package_dir: Path, text_file: Path, tmp_path: Path, losses: Callable[[Path], list[float]]) -> list[float]:
    """The losses of 20 uninterrupted steps; an epoch has about 300."""
    train(package_dir, tmp_path / "whole", text_file, "--steps", "20", "--accumulate", "2", "--eval-every", "6")
    return losses(tmp_path / "whole")


def test_signal_saves_and_resume_is_exact(
    package_dir: Path,
    text_file: Path,
    tmp_path: Path,
    losses: Callable[[Path], list[float]],
    whole_run: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One run, stopped and resumed several times: at its first step, in the middle, between evaluations, at its end."""
    arguments = ("--steps", "20", "--accumulate", "2", "--eval-every", "6")
    for stop_at in (1, 7, 12, 20):
        monkeypatch.setenv("TEST_STOP_AT", str(stop_at))
        train(package_dir, tmp_path / "cut", text_file, *arguments, "--resume")
        assert losses(tmp_path / "cut") == whole_run[:stop_at]
        assert not (tmp_path / "cut" / "loss.png").exists()
    monkeypatch.delenv("TEST_STOP_AT")
    train(package_dir, tmp_path / "cut", text_file, *arguments, "--resume")
    assert losses(tmp_path / "cut") == whole_run  # bit for bit
    assert (tmp_path / "cut" / "loss.png").exists()


def test_crash_between_checkpoints(
    package_dir: Path, text_file: Path, tmp_path: Path, losses: Callable[[Path], list[float]], whole_run: list[float]
) -> None:
    """What a crash leaves: a log that is ahead of the newest whole checkpoint, and one that was being written."""
    arguments = ("--steps", "20", "--accumulate", "2", "--eval-every", "6", "--save-every", "8", "--keep", "3")
    train(package_dir, tmp_path / "cut", text_file, *arguments)
    checkpoints = tmp_path / "cut" / "checkpoints"
    (checkpoints / "step_00000020").rename(checkpoints / "step_00000020.unfinished")
    shutil.rmtree(checkpoints / "step_00000016")
    train(package_dir, tmp_path / "cut", text_file, *arguments, "--resume")
    assert losses(tmp_path / "cut") == whole_run
    assert sorted(path.name for path in checkpoints.iterdir()) == [f"step_{n:08d}" for n in (8, 16, 20)]


def test_results_of_a_run(
    package_dir: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = ("--steps", "150", "--eval-every", "50", "--sample-length", "30", "--sample-prompt", "the ")
    train(package_dir, out, text_file, *arguments)
    *_, summary = capsys.readouterr().out.splitlines()
    words = summary.split()
    assert words[0:2] == ["train", "loss"] and words[3:5] == ["validation", "loss"] and words[-1] == "nats/byte"
    train_loss, validation_loss, unigram = float(words[2]), float(words[5]), float(words[8])
    assert train_loss < unigram - 0.5 and validation_loss < unigram - 0.5
    assert (out / "sample.txt").read_text().startswith("the ")
    assert len((out / "sample.txt").read_text()) == len("the ") + 30 + 1
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "validation_loss" in record] == [50, 100, 150]
    assert {"step", "loss", "grad_norm", "count", "learning_rate", "tokens_per_second"} <= set(records[0])
    assert all(path.exists() for path in (out / "loss.png", out / "tensorboard", out / "checkpoints/step_00000150"))
    train(package_dir, out, text_file, *arguments, "--resume")  # nothing is left to train: the same results again
    assert capsys.readouterr().out.splitlines()[-1] == summary


def test_validation_loss_is_the_mean_over_tokens(
    package_dir: Path, text_file: Path, tmp_path: Path, losses: Callable[[Path], list[float]]
) -> None:
    train(package_dir, tmp_path / "run", text_file, "--steps", "2", "--eval-batches", "1000")
    state = state_of(package_dir, tmp_path / "run")
    raw = torch.tensor(list(text_file.read_bytes()))
    tokens = raw[len(raw) - round(len(raw) / 10) :]
    count = (len(tokens) - 1) // 19 * 19
    assert count // 19 % 3, "the last batch is not full"
    logits = torch.tanh(state["embed.weight"][tokens[:count]] @ state["hidden.weight"].T) @ state["head.weight"].T
    expected = F.cross_entropy(logits.double(), tokens[1 : count + 1]).item()
    last = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])
    assert last["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_tokenizer_file_and_nats_per_byte(
    package_dir: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tokenizers import Tokenizer, models, trainers

    library = Tokenizer(models.BPE())
    library.train_from_iterator([text_file.read_text()], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    library.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    arguments = ("--tokenizer", "tokenizer.json", "--steps", "30", "--sample-length", "5", "--export", "exported")
    train(package_dir, tmp_path / "run", text_file, *arguments)
    monkeypatch.undo()
    assert find_tokenizer(tmp_path / "run") == tmp_path / "tokenizer.json"
    assert find_template(tmp_path / "run") is None
    assert find_tokenizer(tmp_path / "exported") == tmp_path / "exported"
    assert (tmp_path / "exported" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    per_byte = load_text(str(text_file), ByteTokenizer(), 19)
    words = capsys.readouterr().out.splitlines()[-1].split()
    assert float(words[8]) == pytest.approx(per_byte.unigram_entropy, abs=1e-4)
    last = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])
    tokens = len(library.encode(text_file.read_text()).ids)
    assert float(words[5]) == pytest.approx(last["validation_loss"] * tokens / text_file.stat().st_size, abs=1e-3)


def test_non_finite_loss(
    package_dir: Path,
    text_file: Path,
    tmp_path: Path,
    losses: Callable[[Path], list[float]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TEST_NAN_AT", "7")
    out = tmp_path / "run"
    with pytest.raises(NonFiniteLossError, match=r"the loss of step 7 is nan"):
        train(package_dir, out, text_file, "--steps", "20", "--save-every", "4", "--log-every", "50")
    assert len(losses(out)) == 6 and all(map(math.isfinite, losses(out)))
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_00000004"]
    capsys.readouterr()
    arguments = [*SMALL, "--data", str(text_file), "--out", str(out), "--steps", "20", "--resume"]
    with pytest.raises(SystemExit) as caught:
        main(package_dir, arguments)
    assert caught.value.code == 3
    assert "error: the loss of step 7 is nan" in capsys.readouterr().err


def state_of(package_dir: Path, out: Path) -> dict[str, torch.Tensor]:
    """The state of a run's newest checkpoint."""
    package = load_package(package_dir, "cpu")
    state = create_state(package.state_specs, 0, "cpu")
    found = checkpoint.latest(out / "checkpoints")
    assert found is not None
    checkpoint.load(found, state, package.state_specs, current())
    return state


def test_non_finite_steps_may_be_skipped(
    package_dir: Path,
    make_package: Callable[..., Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Parameters, moments and step are as before the step; the log has no loss for it, and counts it."""
    arguments = ("--non-finite", "skip", "--decay", "constant", "--eval-batches", "1")
    train(package_dir, tmp_path / "before", text_file, "--steps", "3", *arguments)
    monkeypatch.setenv("TEST_NAN_AT", "4")
    train(package_dir, tmp_path / "after", text_file, "--steps", "4", *arguments)
    before, after = (state_of(package_dir, tmp_path / name) for name in ("before", "after"))
    assert (int(before.pop("skipped")), int(after.pop("skipped"))) == (0, 1)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    capsys.readouterr()
    train(package_dir, tmp_path / "after", text_file, "--steps", "6", *arguments, "--resume")
    records = [json.loads(line) for line in (tmp_path / "after" / "log.jsonl").read_text().splitlines()]
    steps = [(r["step"], r["skipped"], "loss" in r) for r in records if "skipped" in r]
    assert steps == [(1, 0, True), (2, 0, True), (3, 0, True), (4, 1, False), (5, 1, True), (6, 1, True)]
    train(package_dir, tmp_path / "again", text_file, "--steps", "6", *arguments)
    assert "1 step skipped, not finite (1 in all)" in capsys.readouterr().err
    finish = {"inputs": ["lr"], "outputs": ["loss", "grad_norm", "count"]}
    entries = load_package(package_dir, "cpu").manifest["entries"]
    with pytest.raises(PackageError, match="cannot skip steps"):
        train(
            make_package(entries={**entries, "finish": finish}), tmp_path / "other", text_file, "--non-finite", "skip"
        )


def test_a_package_that_looks_at_the_loss_alone_skips_no_steps(
    make_package: Callable[..., Path], text_file: Path, tmp_path: Path
) -> None:
    package = make_package(fingerprint={"ir": "0", "options": {"check_finite": "loss"}})
    with pytest.raises(PackageError, match="cannot skip steps whose gradients are not finite"):
        train(package, tmp_path / "out", text_file, "--non-finite", "skip")


def test_a_gradient_that_is_not_finite_ends_the_run_too() -> None:
    finite = {"step": 3, "loss": 1.0, "grad_norm": 2.0}
    assert _problem(finite) == ""
    assert _problem({**finite, "grad_norm": math.inf}) == "the gradient norm of step 3 is inf"
    assert _problem({**finite, "grad_norm": math.inf, "loss_scale": 2.0}) == ""
    assert _problem({**finite, "loss": math.nan, "loss_scale": 2.0}) == "the loss of step 3 is nan"


def test_accumulated_microbatches_equal_one_big_batch(
    package_dir: Path, text_file: Path, tmp_path: Path, losses: Callable[[Path], list[float]]
) -> None:
    arguments = ("--steps", "8", "--eval-batches", "1")
    train(package_dir, tmp_path / "big", text_file, *arguments, "--batch-size", "6")
    train(package_dir, tmp_path / "small", text_file, *arguments, "--batch-size", "2", "--accumulate", "3")
    big, small = losses(tmp_path / "big"), losses(tmp_path / "small")
    assert small == pytest.approx(big, rel=1e-5)
    states = [state_of(package_dir, tmp_path / name) for name in ("big", "small")]
    torch.testing.assert_close(states[0], states[1], rtol=1e-3, atol=1e-5)


def test_what_differs_in_a_resumed_run_is_said(
    package_dir: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    train(package_dir, out, text_file, "--steps", "3")
    capsys.readouterr()
    train(package_dir, out, text_file, "--steps", "5", "--resume", "--batch-size", "2", "--lr", "0.01")
    said = capsys.readouterr().err
    assert "resumed with --steps 5 (before: 3), --batch-size 2 (before: 3), --lr 0.01 (before: 0.02)" in said
    train(package_dir, out, text_file, "--steps", "4", "--resume", "--batch-size", "2", "--lr", "0.01")
    assert "nothing is left to train: saved at step 5, --steps 4" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"'--seq-len' is 19 in it and 20 here; option '--seed' is 5 in it and 6"):
        train(package_dir, out, text_file, "--steps", "6", "--resume", "--seq-len", "20", "--seed", "6")


def ended(code: int) -> None:
    """In the place of what ends a process."""
    raise SystemExit(code)


def test_second_interrupt_ends_at_once(
    package_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", ended)

    def interrupted(*_: object) -> None:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.requested
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on after the second Ctrl-C")

    monkeypatch.setattr(train_module, "run", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        main(package_dir, [])
    assert caught.value.code == 130 and "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_before_anything_is_loaded(
    package_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "mgraph.runtime.train":
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "mgraph.runtime.train")
    monkeypatch.delattr("mgraph.runtime.train")
    with pytest.raises(SystemExit) as caught:
        start.main(package_dir, ["--device", "cpu"])
    assert caught.value.code == 130 and capsys.readouterr().err.startswith("interrupted")


def test_wrong_input(
    package_dir: Path,
    text_file: Path,
    tmp_path: Path,
    make_package: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each mistake a person may type gives its own message, before anything is written."""
    out = tmp_path / "run"
    cases: list[tuple[type[MgraphError], str, tuple[str, ...]]] = [
        (OptionError, "--seq-len 65 is outside", ("--seq-len", "65")),
        (OptionError, "--seq-len 1 is outside", ("--seq-len", "1")),
        (DataError, "absent.txt: no such file", ("--data", "absent.txt")),
        (DataError, "--tokenizer absent.json: no such file", ("--tokenizer", "absent.json")),
        (OptionError, "--pack is for examples", ("--pack", "no")),
        (MeshError, "no CUDA device", ("--device", "cuda")),
        (OptionError, f"{text_file} is a file", ("--out", str(text_file / "run"))),
        (OptionError, f"{text_file} is a file", ("--out", str(text_file))),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for kind, message, arguments in cases:
        with pytest.raises(kind, match=message) as caught:
            train(package_dir, out, text_file, "--steps", "2", *arguments)
        assert "free some space" not in str(caught.value)
        assert not out.exists()
    serving = make_package(kind="serve", entries={"predict": {"inputs": ["tokens"], "outputs": ["logits"]}})
    with pytest.raises(PackageError, match=r"no entry 'microbatch' .it is for serve"):
        train(serving, out, text_file)


def test_a_save_that_fails_ends_the_run(
    package_dir: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes has an error: the run ends with it, and the checkpoint before is whole."""
    write = shard_files.write_boxes
    calls: list[tuple[Any, ...]] = []

    def second_fails(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments)

    monkeypatch.setattr(shard_files, "write_boxes", second_fails)
    with pytest.raises(StorageError, match="No space left on device"):
        train(package_dir, tmp_path / "run", text_file, "--steps", "14", "--save-every", "2")
    found = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert found is not None and found.step == 2 and len(calls) == 2
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]


def test_a_run_is_neither_overwritten_nor_resumed_with_other_data(
    package_dir: Path, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train(package_dir, out, text_file, "--steps", "2", "--resume")  # nothing to resume yet: starts at 0
    with pytest.raises(OptionError, match=r"already holds a run, saved at step 2"):
        train(package_dir, out, text_file, "--steps", "4")
    with pytest.raises(CheckpointError, match=r"option '--seq-len' is 19 in it and 20 here"):
        train(package_dir, out, text_file, "--steps", "4", "--resume", "--seq-len", "20")
    with pytest.raises(CheckpointError, match=r"option '--seed' is 5 in it and 6 here"):
        train(package_dir, out, text_file, "--steps", "4", "--resume", "--seed", "6")
    text_file.write_text(text_file.read_text() + "more")
    with pytest.raises(CheckpointError, match=r"option '--data"):
        train(package_dir, out, text_file, "--steps", "4", "--resume")


@pytest.mark.full
def test_no_thread_of_the_process_group_outlives_the_run(
    package_dir: Path, text_file: Path, tmp_path: Path, trainer: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """A gloo thread that releases a tensor while the interpreter ends aborts the process."""
    driver = tmp_path / "driver"
    driver.mkdir()
    (driver / "train.py").write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from mgraph.runtime.train import main\n"
        "def gloo():\n"
        "    names = (Path(f'/proc/self/task/{t}/comm').read_text().strip() for t in os.listdir('/proc/self/task'))\n"
        "    return [name for name in names if 'gloo' in name]\n"
        "try:\n"
        f"    main({str(package_dir)!r})\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "print('left:', gloo())\n"
    )
    arguments = [*SMALL, "--data", text_file, "--out", tmp_path / "run", "--steps", "2"]
    done = trainer(driver, *arguments, processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left: []") == 2, done.stdout


def test_a_package_that_writes_gradients_takes_one_microbatch(
    package_dir: Path, text_file: Path, tmp_path: Path
) -> None:
    manifest = package_dir / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "one_microbatch": True}))
    with pytest.raises(OptionError, match="a step of this package has one microbatch on each of 1 ranks"):
        train(package_dir, tmp_path / "run", text_file, "--steps", "2", "--accumulate", "2")
    train(package_dir, tmp_path / "run", text_file, "--steps", "2", "--accumulate", "1")


@pytest.mark.parametrize(
    ("batch", "seq", "op", "said"),
    [
        (8, 2048, "attention", ""),
        (5, 3000, "attention_grad", ""),
        (1, 2048, "attention", "chosen for 8 x 2048 tokens; for 1 x 2048 others may be faster"),
        (8, 8192, "attention_grad", "mgraph compile --batch 8 --seq 8192"),
        (8, 8192, "linear", ""),
    ],
)
def test_other_sizes_than_providers_were_chosen_for_are_told(batch: int, seq: int, op: str, said: str) -> None:
    rival = {"provider": "flash", "microseconds": 2.0, "basis": "measured"}
    manifest = {
        "fingerprint": {"options": {"batch": 8, "seq": 2048}},
        "providers": [{"op": op, "provider": "cudnn", "next": rival}],
    }
    note = sizes_note(manifest, Options(batch_size=batch, seq_len=seq))
    assert said in note and bool(note) == bool(said)
    manifest["providers"] = [{"op": op, "provider": "cudnn", "next": None}]
    assert not sizes_note(manifest, Options(batch_size=batch, seq_len=seq))
    assert not sizes_note({}, Options(batch_size=batch, seq_len=seq))
