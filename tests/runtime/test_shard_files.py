"""Any mesh loads what any other has saved, bit for bit, over real processes."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mgraph.runtime.shard_files import Box, read_boxes, write_boxes
from tests.runtime.resharding import MESHES, SPECS

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_any_mesh_loads_what_any_other_saved(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.runtime.resharding"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "4", str(tmp_path)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, "\n".join(outputs)
    names = [spec.name for spec in SPECS]
    for rank in range(4):
        loaders = [name for name, axes in MESHES.items() if rank < math.prod(axes.values())]
        expected = {f"{saver} {loader}": names for saver, loader in itertools.product(MESHES, loaders)}
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        if rank < 2:
            (failure,) = found.pop("failure")
            assert "could not be written or read: No space left on device" in failure, "each rank learns of it"
        assert found == expected
    assert [path.name for path in (tmp_path / "dp2").iterdir()] == ["step_00000007"]
    files = {name: sorted(p.name[:3] for p in (tmp_path / name).rglob("*.distcp")) for name in MESHES}
    assert files["one"] == ["__0"] and files["dp2"] == ["__0", "__1"], "ranks with the same state share the writing"
    assert files["fsdp2_tp2"] == ["__0", "__1", "__2", "__3"]


def test_boxes_are_tensors_of_the_library(tmp_path: Path) -> None:
    """What is written is an ordinary checkpoint of torch's: whole tensors in boxes."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    whole = torch.arange(20.0).reshape(4, 5)
    write_boxes([Box("w", (4, 5), (0, 0), whole[:3]), Box("w", (4, 5), (3, 0), whole[3:])], tmp_path / "c", None)
    saved = FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata["w"]
    assert isinstance(saved, TensorStorageMetadata)
    assert saved.size == (4, 5) and [tuple(chunk.sizes) for chunk in saved.chunks] == [(3, 5), (1, 5)]
    across = torch.zeros(4, 2)
    read_boxes([Box("w", (4, 5), (0, 2), across)], tmp_path / "c", None)
    assert torch.equal(across, whole[:, 2:4])
