"""Messages by copies: with ranks that are threads here, and on a GPU with streams for ranks, launched and replayed."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mgraph.runtime import kernels, outbox
from mgraph.runtime.outbox import PLACES, UNIT, Links, Outbox, new_flags
from tests.runtime.test_kernels import ENTRY, Recorder

SIZE = 1 << 16
PATIENCE = 20.0
DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.uint8)


class Threads(Links):
    """Links between threads: a flag is waited for by the thread itself."""

    def __init__(self, rank: int, places: Sequence[Sequence[Tensor]], shared: Tensor, changed: threading.Condition):
        super().__init__(rank, places, [owner * shared[0].numel() for owner in range(len(shared))])
        self.shared, self._shared, self._changed = shared, shared.view(-1), changed

    def _address(self, owner: int, kind: int, place: int, rank: int) -> int:
        return self.flags[owner] + (kind * PLACES + place) * len(self.flags) + rank

    def _await(self, address: int, stream: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._shared[address] == 1, PATIENCE), "nobody writes the flag"
            self._shared[address] = 0

    def _write(self, address: int, value: int, stream: Any) -> None:
        with self._changed:
            assert self._shared[address] != value, "a flag is written that says so already"
            self._shared[address] = value
            self._changed.notify_all()


@pytest.fixture
def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued on a GPU is done at once."""

    class Nothing:
        def record(self, stream: Any) -> None: ...
        def wait_stream(self, stream: Any) -> None: ...

    monkeypatch.setattr(torch.cuda, "current_stream", Nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Nothing)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def of_threads(ranks: int) -> list[Outbox]:
    flags = new_flags(ranks).repeat(ranks, 1)  # of each owner
    places = [[torch.zeros(SIZE, dtype=torch.uint8) for _ in range(ranks)] for _ in range(PLACES)]
    changed = threading.Condition()
    return [Outbox(Threads(rank, places, flags, changed), SIZE, torch.cuda.current_stream()) for rank in range(ranks)]


def flags_of(box: Outbox) -> Tensor:
    """The flags of the rank of an outbox."""
    assert isinstance(box.links, Threads)
    return box.links.shared[box.links.rank]


def run(ranks: int, of_rank: Callable[[int], None]) -> None:
    """Run a function for each rank, in a thread each."""
    errors: list[BaseException] = []

    def kept(rank: int) -> None:
        try:
            of_rank(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=kept, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


def fill(value: float, target: Tensor) -> None:
    target.fill_(value)


def message(ranks: int, rank: int, number: int) -> list[Tensor]:
    """What a rank sends in a message: tensors of the same shapes on all."""
    shapes, values = random.Random(number), torch.Generator().manual_seed(number * ranks + rank)
    made = []
    for _ in range(shapes.randint(1, 4)):
        shape = (ranks * shapes.choice((0, 1, 3, 16)), *shapes.choice(((), (1,), (7,), (2, 32))))
        made.append(torch.randint(0, 100, shape, generator=values).to(shapes.choice(DTYPES)))
    return made


def parts(ranks: int, rank: int, number: int) -> list[Tensor]:
    """What a rank gets by a message."""
    everything = [message(ranks, sender, number) for sender in range(ranks)]
    return [torch.cat([tensor.chunk(ranks)[rank] for tensor in of_all]) for of_all in zip(*everything, strict=True)]


@pytest.mark.usefixtures("without_streams")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_rank_gets_its_parts_of_every_message(ranks: int) -> None:
    """However fast each rank is, and whether they write where they send from or have it put there."""
    boxes = of_threads(ranks)

    def of_rank(rank: int) -> None:
        same, own = random.Random(0), random.Random(rank)
        for number in range(60):
            tensors = message(ranks, rank, number)
            for index, tensor in enumerate(tensors):
                if same.random() < 0.5 and (there := boxes[rank].new(tensor.shape, tensor.dtype)) is not None:
                    tensors[index] = there.copy_(tensor)
            time.sleep(own.random() * 2e-3)
            exchanged = boxes[rank].exchange(tensors)
            assert exchanged is not None
            for here, there in zip(exchanged[0], parts(ranks, rank, number), strict=True):
                assert here.dtype == there.dtype and torch.equal(here, there), (rank, number)
            if number % 7 == 0:
                boxes[rank].rewind()

    run(ranks, of_rank)


@pytest.mark.usefixtures("without_streams")
def test_what_has_no_room_is_not_sent() -> None:
    """Nor does it cost the place: the next message takes it."""
    boxes = of_threads(2)

    def of_rank(rank: int) -> None:
        assert boxes[rank].new((SIZE + 1,), torch.uint8) is None
        assert boxes[rank].new((SIZE - UNIT,), torch.uint8) is not None
        assert boxes[rank].new((2 * UNIT,), torch.uint8) is None
        assert boxes[rank].exchange([torch.zeros(2 * UNIT, dtype=torch.uint8)]) is None
        exchanged = boxes[rank].exchange([torch.full((4,), rank, dtype=torch.uint8)])  # in the next place
        assert exchanged is not None
        assert exchanged[0][0].tolist() == [0, 0, 1, 1]

    run(2, of_rank)


@pytest.mark.usefixtures("without_streams")
@pytest.mark.parametrize("sent", [True, False])
def test_an_own_part_that_is_put_off_is_made_where_it_lands(monkeypatch: pytest.MonkeyPatch, sent: bool) -> None:
    """Where it is received; or in place, where the tensor goes another way, and leaves its place free."""
    boxes = of_threads(2)
    results: dict[int, list[Tensor]] = {}
    lock = threading.Lock()  # what is meant is the process's
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: group)
    monkeypatch.setattr(outbox._boxes, "by_group", dict(enumerate(boxes)))

    def of_rank(rank: int) -> None:
        with lock:
            monkeypatch.setattr(outbox._boxes, "meant", boxes[rank])
            result = outbox.new_result((4, 2), torch.float32)
            assert result is not None
            assert outbox.parts(result, 3) is None, "three rows are not for two ranks"
            assert outbox.parts(torch.zeros(4, 2), 4) is None, "it lies elsewhere"
            runs = outbox.parts(result, 4)
            assert runs == ((0, 2), [(2, 4)]) if rank == 0 else runs == ((2, 4), [(0, 2)])
            result.view(2, 2, 2)[1 - rank] = 10.0 + rank
            outbox.put_off(result, partial(fill, 20.0 + rank))
        boxes[rank].captured = True  # so that there is no larger one
        more = [] if sent else [torch.zeros(outbox.LEAST, dtype=torch.uint8)]
        exchanged = outbox.exchange(cast(dist.ProcessGroup, rank), [result, *more])
        assert (exchanged is not None) is sent
        results[rank] = [result.clone()] if exchanged is None else exchanged[0]

    run(2, of_rank)
    assert not outbox._boxes.put_off
    assert all(torch.equal(flags_of(box), new_flags(2)) for box in boxes)
    theirs = (11.0, 10.0) if sent else (10.0, 11.0)  # what comes in, or what would go out
    for rank, (got,) in results.items():
        parts_ = got.view(2, 4)
        assert parts_[rank].tolist() == [20.0 + rank] * 4
        assert parts_[1 - rank].tolist() == [theirs[rank]] * 4


@pytest.mark.usefixtures("without_streams")
def test_what_an_entry_leaves_is_free_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that was taken and not sent; of one that a failed capture took no flag was taken down."""
    (box, _) = of_threads(2)
    for _ in range(2 * PLACES):
        assert box.new((8,), torch.float32) is not None
        assert not torch.equal(flags_of(box), new_flags(2))
        box.rewind()
        assert torch.equal(flags_of(box), new_flags(2))
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        capturing.setattr(box.links, "wait_free", lambda place, stream: None)
        assert box.new((8,), torch.float32) is not None
    box.rewind()
    assert torch.equal(flags_of(box), new_flags(2)) and box.captured


@pytest.mark.usefixtures("without_streams")
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_kernel_makes_the_rows_of_others_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int) -> None:
    """Each launch is for a run of rows; that for the rank's own comes when the message is under way, to where it is
    received."""
    entry = {
        **ENTRY,
        "inputs": [
            {"name": "x", "dtype": "f32", "shape": ["T", 8]},
            {"name": "factor", "dtype": "f32", "shape": ["T", 4]},
        ],
        "outputs": [{"name": "y", "dtype": "f32", "shape": ["T", 8]}],
        "scratch": [{"name": "room", "dtype": "f32", "shape": ["T", 4]}],
        "dims": {},
        "launches": [
            {**ENTRY["launches"][0], "args": ["x", "factor", "y", "room", "T"], "grid": [["mul", "T", 2]]},
        ],
    }
    (tmp_path / "cubin").mkdir()
    for binary in entry["launches"][0]["binaries"]:
        (tmp_path / binary["file"]).write_bytes(binary["file"].encode())
    entry["launches"][0]["by_row"] = {"factor": 4, "room": 4, "y": 8}
    device = Recorder()
    twins = ModuleType("reference")
    vars(twins)["scale"] = torch.mul
    site = kernels.bind([entry], tmp_path, twins, device, strict=True, jit=False).scale
    box = of_threads(3)[rank]
    monkeypatch.setattr(outbox._boxes, "meant", box)
    x, factor = torch.zeros(6, 8), torch.zeros(6, 4)
    y = site(x, factor)
    assert isinstance(y, Tensor)
    target = torch.zeros(16)
    outbox._boxes.put_off.pop(y.data_ptr())(target)
    runs = [run for run in ((0, 2 * rank), (2 * rank + 2, 6)) if run[0] < run[1]]
    wanted = [(begin, end, y.data_ptr() + 32 * begin) for begin, end in runs]
    wanted.append((2 * rank, 2 * rank + 2, target.data_ptr()))
    seen = []
    for launch in device.launches:
        values = launch["values"]
        assert values[0] == x.data_ptr(), "what is not by row is whole"
        begin = (values[1] - factor.data_ptr()) // 16
        seen.append((begin, begin + values[4], values[2]))
        assert launch["grid"] == (2 * values[4], 1, 1)
    assert seen == wanted


@pytest.mark.gpu
def test_flags_and_copies_of_a_gpu_launched_and_replayed() -> None:
    """A rank that is its own neighbour: what it tells the other it tells itself; in the other's places lies the same
    for each message."""
    device = torch.device("cuda", torch.cuda.current_device())
    flags = new_flags(2).to(device)
    places = [[torch.zeros(SIZE, dtype=torch.uint8, device=device) for _ in range(2)] for _ in range(PLACES)]
    x, y = torch.empty(64, 32, device=device), torch.empty(64, dtype=torch.int64, device=device)
    for _, other in places:
        other[: x.nbytes].view(x.dtype).fill_(0.5)
        other[x.nbytes : x.nbytes + y.nbytes].view(y.dtype).fill_(7)
    box = Outbox(Links(0, places, [flags.data_ptr(), flags.data_ptr() + 4]), SIZE, torch.cuda.Stream())

    def send() -> list[Tensor]:
        """Seven messages of what came by the one before, of which every other one is written where it is sent from."""
        tensors = [x, y]
        box.rewind()
        for number in range(7):
            if number % 2 and (there := box.new(x.shape, x.dtype)) is not None:
                tensors = [there.copy_(tensors[0]), tensors[1]]
            exchanged = box.exchange(tensors)
            assert exchanged is not None
            beside = x.sum()
            torch.cuda.current_stream().wait_event(exchanged[1])
            tensors = [exchanged[0][0] * 2 + 0 * beside, exchanged[0][1] + number]
        return tensors

    def check(tensors: Sequence[Tensor]) -> None:
        torch.cuda.synchronize()
        floats, numbers = x, y
        for number in range(7):
            floats = torch.cat([floats[:32], torch.full_like(x[:32], 0.5)]) * 2
            numbers = torch.cat([numbers[:32], torch.full_like(y[:32], 7)]) + number
        assert torch.equal(tensors[0], floats) and torch.equal(tensors[1], numbers)
        assert torch.equal(flags.cpu(), new_flags(2)), "all flags are as they began"

    graph = torch.cuda.CUDAGraph()
    for replay in range(12):
        x.normal_()
        y.random_(0, 99)
        if replay == 1:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                results = send()
        if replay % 3 == 1:
            graph.replay()
            check(results)
        else:
            check(send())


@pytest.mark.multi_gpu
def test_gpus_send_by_copies_what_nccl_sends() -> None:
    """Messages of several sizes and dtypes, eager and replayed, are bitwise those of torch's all_to_all."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    run = subprocess.run(
        [*command, str(Path(__file__).with_name("copying.py"))],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("as NCCL's") == 2
