"""A rank of the table test of checkpoints: saves small states on each mesh, and loads each on every mesh.

python -m tests.runtime.resharding RANK WORLD DIRECTORY

Meshes of fewer ranks are made of the first ones. What a rank should have is sliced by hand from whole tensors, which
are functions of the mesh that saves. Writes `RANK.json` with `SAVER LOADER` → the states that came back bit for bit.
"""

from __future__ import annotations

import errno
import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from mgraph.errors import StorageError
from mgraph.runtime import checkpoint
from mgraph.runtime.mesh import Mesh
from mgraph.runtime.package import State, StateSpec
from mgraph.runtime.saving import Saver
from mgraph.runtime.shards import Split

MESHES: dict[str, dict[str, int]] = {
    "one": {},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "fsdp2": {"fsdp": 2},
    "fsdp2_tp2": {"fsdp": 2, "tp": 2},
    "dp2_tp2": {"dp": 2, "tp": 2},
    "dp2_fsdp2": {"dp": 2, "fsdp": 2},
    "fsdp4": {"fsdp": 4},
}

SPECS = tuple(
    StateSpec(name, "param", dtype, shape, True, True, (), name, placement=placement, factors=factors)
    for name, dtype, shape, placement, factors in (
        ("column", torch.float32, (12, 5), (Split("tp", 0), Split("fsdp", 0)), ()),
        ("column.exp_avg", torch.bfloat16, (12, 5), (Split("tp", 0), Split("fsdp", 0)), ()),
        ("row", torch.float32, (8, 6), (Split("tp", 1), Split("fsdp", 0)), ()),
        ("packed", torch.float32, (12, 8), (Split("tp", 0, 1), Split("fsdp", 1)), ((0, (2, 6)),)),
        ("uneven", torch.float64, (7, 3), (Split("fsdp", 0),), ()),
        ("zigzag", torch.int64, (8,), (Split("tp", 0, zigzag=True),), ()),
        ("step", torch.int64, (), (), ()),
        ("empty", torch.float32, (0, 4), (), ()),
    )
)


class Part(Mesh):
    """A mesh of the first ranks of the world, axes major first."""

    def index(self, axis: str) -> int:
        """This rank's position along `axis`."""
        left = self.rank
        for name in reversed(self.axes):
            left, found = divmod(left, self.axes[name])
            if name == axis:
                return found
        return 0

    def beside(self) -> Mesh:
        """The same: one save after the other needs one group."""
        return self


def wholes(name: str) -> State:
    """The whole tensors of a mesh's run."""
    generator = torch.Generator().manual_seed(list(MESHES).index(name) + 1)
    return {s.name: (torch.randn(s.shape, generator=generator, dtype=torch.float64) * 100).to(s.dtype) for s in SPECS}


def locals_of(whole: State, mesh: Mesh) -> State:
    """What this rank should have."""
    tp, t, fsdp, f = mesh.size("tp"), mesh.index("tp"), mesh.size("fsdp"), mesh.index("fsdp")

    def part(tensor: Tensor, count: int, index: int, dim: int = 0) -> Tensor:
        return tensor.chunk(count, dim)[index]

    found = dict(whole)
    for name in ("column", "column.exp_avg"):
        found[name] = part(part(whole[name], tp, t), fsdp, f)
    found["row"] = part(part(whole["row"], tp, t, 1), fsdp, f)
    halves = whole["packed"].reshape(2, 6, 8).chunk(tp, 1)[t].reshape(-1, 8)
    found["packed"] = part(halves, fsdp, f, 1)
    rows = math.ceil(7 / fsdp)
    padded = torch.zeros(rows * fsdp, 3, dtype=torch.float64)
    padded[:7] = whole["uneven"]
    found["uneven"] = padded[f * rows : (f + 1) * rows]
    if tp > 1:
        parts = whole["zigzag"].chunk(2 * tp)
        found["zigzag"] = torch.cat([parts[t], parts[2 * tp - 1 - t]])
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def full_disk_of_one(rank: int, mesh: Mesh, directory: Path) -> str:
    """The error that a save ends with whose second rank cannot write."""

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    written = FileSystemWriter.write_data
    if rank == 1:
        FileSystemWriter.write_data = fail  # type: ignore[method-assign,assignment]
    saver = Saver(directory, SPECS, mesh, 1)
    saver.save(8, locals_of(wholes("dp2"), mesh), {})
    try:
        saver.wait()
    except StorageError as error:
        return error.message
    finally:
        FileSystemWriter.write_data = written  # type: ignore[method-assign]
    return "none"


def main(rank: int, world: int, directory: Path) -> None:
    """All savers, then all loaders of each."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    meshes: dict[str, Part] = {}
    for name, axes in MESHES.items():
        count = math.prod(axes.values())
        group = dist.new_group(list(range(count)))
        if rank < count:
            meshes[name] = Part(rank, count, torch.device("cpu"), axes, host=group)
    for name, mesh in meshes.items():
        state = locals_of(wholes(name), mesh)
        with Saver(directory / name, SPECS, mesh, 1) as saver:
            saver.save(7, state, {"position": [1, 30]})
            for value in state.values():
                value.zero_()  # the copy is what is written
    dist.barrier()
    results: dict[str, list[str]] = {}
    for saved in MESHES:
        for name, mesh in meshes.items():
            found = checkpoint.latest(directory / saved)
            assert found is not None and found.step == 7 and found.run == {"position": [1, 30]}
            expected = locals_of(wholes(saved), mesh)
            state = {key: torch.zeros_like(value) for key, value in expected.items()}
            checkpoint.load(found, state, SPECS, mesh)
            results[f"{saved} {name}"] = [key for key in state if torch.equal(state[key], expected[key])]
    if "dp2" in meshes:
        results["failure"] = [full_disk_of_one(rank, meshes["dp2"], directory / "dp2")]
    (directory / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
