"""Memory of loading and of exporting: the parameters, one tensor of a file, and what a mapping may hold of the file."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from mgraph.runtime.weight_files import INDEX

ROWS, COLUMNS = 2048, 2048
TENSOR = 2 * ROWS * COLUMNS
MIB = 2**20

MEASURED = """
import sys
from pathlib import Path
import torch, rich.progress, safetensors
from mgraph.runtime import weight_files
from mgraph.runtime.export import Weights, export_weights
from mgraph.runtime.package import StateSpec
from mgraph.runtime.weights import load_weights

source, target, count, mapped, rows, columns = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])
weight_files.MAPPED = mapped
names = [f"w{n}" for n in range(count)]
specs = [StateSpec(n, "param", torch.bfloat16, (rows, columns), True, True, (("zeros_",),), n) for n in names]
turned = [
    {"tensor": f"file.{n}", "shape": [columns, rows],
     "parts": [{"state": n, "shape": [columns, rows], "from": [0, 1, columns], "to": [0, rows, 1]}]}
    for n in names
]

def peak():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])

warm = torch.zeros(2, 2, dtype=torch.bfloat16)
warm.copy_(warm.t().clone())
before = peak()
state = {spec.name: torch.empty(spec.shape, dtype=spec.dtype) for spec in specs}
load_weights(source, state, specs, turned)
loaded = peak()
export_weights(target, Weights(state, specs, turned), source / "config.json", shard_bytes=16 * rows * columns)
print(before, loaded, peak())
"""


def write_sparse(directory: Path, count: int, per_file: int) -> None:
    """A checkpoint of tensors of zeros, in files that take no space on the disk."""
    weight_map: dict[str, str] = {}
    for start in range(0, count, per_file):
        names = [f"file.w{n}" for n in range(start, min(start + per_file, count))]
        header = {
            name: {"dtype": "BF16", "shape": [COLUMNS, ROWS], "data_offsets": [i * TENSOR, (i + 1) * TENSOR]}
            for i, name in enumerate(names)
        }
        text = json.dumps(header).encode()
        file = directory / f"{start}.safetensors"
        file.write_bytes(struct.pack("<Q", len(text)) + text)
        with file.open("r+b") as stream:
            stream.truncate(8 + len(text) + len(names) * TENSOR)
        weight_map |= dict.fromkeys(names, file.name)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("total", "mapped", "allowed"),
    [
        (128 * MIB, 16 * MIB, 64 * MIB),  # what the allocator keeps comes to some 20; whole files would be 128
        pytest.param(2048 * MIB, 256 * MIB, 500 * MIB, marks=pytest.mark.full),
    ],
    ids=["128 MiB", "2 GiB"],
)
def test_one_tensor_at_a_time(tmp_path: Path, total: int, mapped: int, allowed: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    write_sparse(source, total // TENSOR, per_file=total // TENSOR // 2)
    numbers = (total // TENSOR, mapped, ROWS, COLUMNS)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(source), str(target), *map(str, numbers)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    before, loaded, exported = map(int, done.stdout.split())
    over = [peak - before - total - TENSOR for peak in (loaded, exported)]
    print(f"over the parameters and one tensor, in MiB: {[n / MIB for n in over]}")
    assert max(over) <= allowed
    assert loaded - before >= total, "the parameters were not touched: the measurement would prove nothing"
    assert sum(file.stat().st_size for file in target.glob("*.safetensors")) >= total
