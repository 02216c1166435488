"""A rank of several that compares messages by copies with NCCL's; started by `test_outbox.py`."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from mgraph.runtime import collectives, mesh, outbox

SIZES = ((1, 1), (5, 3), (16384, 2048), (7, 129), (256, 64), (0, 4))
MESSAGES, REPLAYS, OF_A_GRAPH = 60, 20, 5


def by_nccl(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Each tensor's parts from all ranks."""
    received = [torch.empty_like(tensor) for tensor in tensors]
    for target, tensor in zip(received, tensors, strict=True):
        dist.all_to_all_single(target.view(-1), tensor.reshape(-1), group=group)
    return received


def eager(group: dist.ProcessGroup, ranks: int, device: torch.device) -> None:
    """Messages of many sizes, some of them written where they are sent from; ranks are early and late."""
    same = random.Random(0)
    for number in range(MESSAGES):
        rows, width = same.choice(SIZES)
        tensors = [
            torch.randn(ranks * rows, width, device=device).bfloat16(),
            torch.randn(ranks * rows, 8, device=device),
            torch.randint(0, 99, (ranks * rows, 8), device=device),
        ][: same.randint(1, 3)]
        wanted = by_nccl(tensors, group)
        if same.random() < 0.4:
            tensors[0] = outbox.sendable(group, meant_copy, tensors[0])
        if same.randint(0, ranks - 1) == dist.get_rank():
            time.sleep(0.01)
        for got, sent in zip(collectives.all_to_all(tensors, "ep"), wanted, strict=True):
            assert torch.equal(got, sent), (number, rows, width)
    assert outbox._boxes.by_group[group] is not None, "no copies were made"


def meant_copy(tensor: Tensor) -> Tensor:
    """A copy where results of kernels go."""
    there = outbox.new_result(tensor.shape, tensor.dtype) if outbox.is_meant() else None
    return tensor.clone() if there is None else there.copy_(tensor)


def replayed(group: dist.ProcessGroup, ranks: int, device: torch.device) -> None:
    """A CUDA graph of messages, replayed in turns with the same launched one by one."""
    x, y = torch.empty(ranks * 256, 512, device=device), torch.ones(ranks * 256, 4, device=device)

    def steps(*, nccl: bool) -> Tensor:
        a, b = x, y
        for number in range(OF_A_GRAPH):
            a, b = by_nccl([a, b], group) if nccl else collectives.all_to_all([a, b], "ep")
            a = a + b[0, 0] * number
        return a

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        outbox.rewind()
        result = steps(nccl=False)
    for replay in range(REPLAYS):
        x.normal_()
        graph.replay()
        got = result.clone()
        outbox.rewind()
        assert torch.equal(got, steps(nccl=replay % 3 > 0)), replay


def main() -> None:
    """Join the others and compare."""
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.manual_seed(rank)
    devices = init_device_mesh("cuda", (ranks,), mesh_dim_names=("ep",))
    mesh._current = mesh.Mesh(rank, ranks, device, {"ep": ranks}, devices)
    group = mesh.current().group("ep")
    outbox.LEAST = 0
    outbox.use(True)
    eager(group, ranks, device)
    replayed(group, ranks, device)
    torch.cuda.synchronize()
    print("as NCCL's", flush=True)
    mesh.stop()


if __name__ == "__main__":
    main()
