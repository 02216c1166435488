"""Recorded decisions in files: what is written is read, and what does not fit is told of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mgraph.errors import MgraphError
from mgraph.runtime.routing import INDEX, ROUTING, Decisions, Recording, Routers, RoutingError, Sizes

ROUTERS = Routers(("layers.0.router", "layers.1.router"), (8, 6), 2)
SIZES = Sizes(batch=2, seq=5, microbatches=3)


def tokens(number: int) -> torch.Tensor:
    return torch.arange(10).view(2, 5) + number


def decisions(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.rand(2, 5, 2, 6, generator=generator).topk(2).indices.to(torch.int16)


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    """Two whole steps."""
    made = Recording(tmp_path / "decisions", ROUTERS, SIZES)
    made.begin(resumed=False)
    for step in (1, 2):
        for number in range(3):
            made.write(step, number, tokens(number), decisions(10 * step + number))
    return made


def test_what_is_written_is_read(recording: Recording) -> None:
    recording.check()
    recording.check_steps(1, 2)
    for step in (1, 2):
        for number in range(3):
            assert torch.equal(recording.read(step, number, tokens(number)), decisions(10 * step + number))
    written = load_file(recording.file(2, 1))
    assert {name: (t.dtype, tuple(t.shape)) for name, t in written.items() if name != "tokens"} == dict.fromkeys(
        ROUTERS.layers, (torch.uint8, (2, 5, 2))
    )
    assert not list(recording.path.rglob("*.unfinished"))


def test_many_experts_take_two_bytes(tmp_path: Path) -> None:
    many = Recording(tmp_path / "many", replace(ROUTERS, experts=(300, 300)), SIZES)
    many.begin(resumed=False)
    high = decisions(0) + 290
    many.write(1, 0, tokens(0), high)
    assert torch.equal(many.read(1, 0, tokens(0)), high)


@pytest.mark.parametrize("number", [-1, 256])
def test_a_dropped_choice_is_not_recorded(tmp_path: Path, number: int) -> None:
    """A byte does not hold it beside 256 experts."""
    made = Recording(tmp_path / "dropped", replace(ROUTERS, experts=(256, 256)), SIZES)
    made.begin(resumed=False)
    decided = decisions(0)
    decided[1, 2, 1, 0] = number
    with pytest.raises(MgraphError, match=r"layers\.1\.router at step 1 chose none of its 256 experts for some"):
        made.write(1, 0, tokens(0), decided)
    assert not made.file(1, 0).exists()


@pytest.mark.parametrize(
    ("other", "sizes", "told"),
    [
        (replace(ROUTERS, layers=("layers.0.router", "layers.2.router")), SIZES, "layers.1.router was recorded where"),
        (replace(ROUTERS, layers=("layers.0.router",), experts=(8,)), SIZES, "2 routers were recorded"),
        (replace(ROUTERS, experts=(8, 7)), SIZES, "layers.1.router was recorded with 6 experts, and has 7"),
        (replace(ROUTERS, choices=3), SIZES, "2 experts a token, and here are 3"),
        (ROUTERS, replace(SIZES, batch=4), "2 sequences a microbatch, and here are 4"),
        (ROUTERS, replace(SIZES, seq=6), "5 tokens a sequence, and here are 6"),
        (ROUTERS, replace(SIZES, microbatches=4), "3 microbatches a step, and here are 4"),
    ],
)
def test_another_model_or_size_is_told_of(recording: Recording, other: Routers, sizes: Sizes, told: str) -> None:
    with pytest.raises(MgraphError, match=told):
        Recording(recording.path, other, sizes).check()


@pytest.mark.parametrize(("value", "told"), [("5", "'seq' is \"5\", not a whole number"), (None, "'seq' is null, not")])
def test_a_size_that_is_no_number_is_told_of(recording: Recording, value: object, told: str) -> None:
    index = json.loads((recording.path / INDEX).read_text())
    (recording.path / INDEX).write_text(json.dumps({**index, "seq": value}))
    with pytest.raises(RoutingError, match=told):
        recording.check()


def test_missing_steps_and_files_are_told_of(recording: Recording) -> None:
    with pytest.raises(MgraphError, match="no decisions of step 3"):
        recording.check_steps(1, 3)
    recording.file(2, 1).unlink()
    with pytest.raises(MgraphError, match="no decisions of microbatch 1 of step 2"):
        recording.check_steps(1, 2)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def spoilt(file: Path) -> None:
    file.write_bytes(b"\xff" * file.stat().st_size)


def of_fewer(file: Path) -> None:
    save_file({name: tensor[:1].clone() for name, tensor in load_file(file).items()}, file)


def of_others(file: Path) -> None:
    save_file({"tokens": load_file(file)["tokens"]}, file)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (cut, "decisions of step 2 cannot be read: "),
        (spoilt, "decisions of step 2 cannot be read: "),
        (of_fewer, r"layers\.0\.router at step 2 are uint8\[1, 5, 2\], expected uint8\[2, 5, 2\]"),
        (of_others, r"step 2 has no decisions of layers\.0\.router"),
    ],
)
def test_all_files_are_looked_at_before_the_first_step(
    recording: Recording, harm: Callable[[Path], None], told: str
) -> None:
    harm(recording.file(2, 1))
    recording.check_steps(1, 1)
    for check in (lambda: recording.check_steps(1, 2), lambda: recording.read(2, 1, tokens(1))):
        with pytest.raises(RoutingError, match=told) as caught:
            check()
        assert caught.value.where == str(recording.file(2, 1))
        assert caught.value.hint == "record them again, with --record-routing"


@pytest.mark.parametrize("below", ["", "more/decisions"])
def test_a_file_in_the_place_of_the_directory_is_told_of(tmp_path: Path, below: str) -> None:
    file = tmp_path / "decisions"
    file.write_text("")
    with pytest.raises(RoutingError, match=f"decisions cannot be written: {file} is a file") as caught:
        Recording(file / below, ROUTERS, SIZES).begin(resumed=False)
    assert caught.value.hint == "a directory that is new or empty"


def test_wrong_contents_name_layer_and_step(recording: Recording) -> None:
    file = recording.file(1, 0)
    whole = load_file(file)
    name = ROUTERS.layers[1]
    for change, told in [
        ({name: whole[name] + 6}, "layers.1.router at step 1 chose an expert that is none of its 6"),
        ({name: whole[name][..., :1].expand(-1, -1, 2).clone()}, "layers.1.router at step 1 chose an expert twice"),
        ({name: whole[name][:1].clone()}, r"layers.1.router at step 1 are uint8\[1, 5, 2\]"),
    ]:
        save_file({**whole, **change}, file)
        with pytest.raises(MgraphError, match=told):
            recording.read(1, 0, tokens(0))
    save_file({n: t for n, t in whole.items() if n != name}, file)
    with pytest.raises(MgraphError, match=r"step 1 has no decisions of layers\.1\.router"):
        recording.read(1, 0, tokens(0))
    save_file(whole, file)
    with pytest.raises(MgraphError, match="microbatch 0, are for other"):
        recording.read(1, 0, tokens(1))


def test_nothing_is_written_over(recording: Recording) -> None:
    with pytest.raises(MgraphError, match="there is something already"):
        recording.begin(resumed=False)
    recording.begin(resumed=True)
    index = json.loads((recording.path / INDEX).read_text())
    changed: list[object] = [{"format": "another"}, [], {"format": index["format"]}, {**index, "experts": [8]}]
    for wrong in changed:
        (recording.path / INDEX).write_text(json.dumps(wrong))
        with pytest.raises(MgraphError, match="no recorded decisions of a known form"):
            recording.begin(resumed=True)


def test_tokens_without_decisions_are_free() -> None:
    free = ROUTERS.free(tokens(0))
    assert free.shape == (2, 5, 2, 2) and free.dtype is torch.int16 and bool((free == -1).all())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_microbatches_count_through_all_ranks(tmp_path: Path, ranks: int) -> None:
    """Of 6 in a step, the n-th that a rank has is the n-th after `ranks` others: so any number of ranks replays it."""
    made = Recording(tmp_path / "decisions", ROUTERS, replace(SIZES, microbatches=6))

    def own(rank: int) -> list[int]:
        return [number for number in range(6) if number % ranks == rank]

    def batches(rank: int) -> list[dict[str, torch.Tensor]]:
        return [{"tokens": tokens(number)} for number in own(rank)]

    for rank in range(ranks):
        for writes in (True, False):  # of those that see the same, one does
            recorder = Decisions(ROUTERS, made, None, rank, ranks, writes)
            recorder.begin(1, 1, is_first=rank == 0 and writes)
            given = batches(rank)
            assert recorder.given(1, given) is given, "nothing is replayed"
            recorder.take(1, given, [decisions(number + (not writes)) for number in own(rank)])
    for number in range(6):
        assert torch.equal(made.read(1, number, tokens(number)), decisions(number))
    for rank in range(ranks):
        replayer = Decisions(ROUTERS, None, made, rank, ranks, True)
        replayer.begin(1, 1, is_first=rank == 0)
        for number, batch in zip(own(rank), replayer.given(1, batches(rank)), strict=True):
            assert torch.equal(batch["tokens"], tokens(number)) and torch.equal(batch[ROUTING], decisions(number))
