"""Files of weights: what is written is what safetensors reads, four-bit experts, and files that are not whole."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mgraph.errors import CheckpointError
from mgraph.runtime import weight_files
from mgraph.runtime.weight_files import INDEX, WeightFiles, write_file

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool]


def test_written_files_are_read_by_the_library(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.randint(0, 2, (7, 11)).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    file = tmp_path / "model.safetensors"
    declared = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    size = write_file(file, declared, tensors.values())
    assert size == sum(tensor.nbytes for tensor in tensors.values())
    found = load_file(file)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())


def test_all_tensors_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "MAPPED", 100)  # files are mapped anew after every few tensors
    tensors = {f"{n}": torch.randn(n + 1, 3) for n in range(12)}
    for part in range(3):
        save_file({n: t for n, t in tensors.items() if int(n) % 3 == part}, tmp_path / f"{part}.safetensors")
    files = WeightFiles(tmp_path)
    assert sorted(files.names()) == sorted(tensors)
    assert all(torch.equal(files.read(name), tensors[name]) for name in files.names())
    assert files.bytes == sum(file.stat().st_size for file in tmp_path.iterdir())


@pytest.mark.parametrize("apart", [False, True], ids=["one file", "two files"])
def test_four_bits(tmp_path: Path, apart: bool) -> None:
    """Every byte, with scales from the smallest to the largest that the numbers stay finite with."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(2 * 6 * 5 * 16).reshape(2, 6, 5, 16).to(torch.uint8)
    scales = torch.linspace(3, 250, 2 * 6 * 5).reshape(2, 6, 5).to(torch.uint8)
    packed = {"up_blocks": blocks, "up_scales": scales}
    plain = {"up_bias": torch.randn(2, 6)}
    if apart:
        save_file({"up_blocks": blocks, **plain}, tmp_path / "1.safetensors")
        save_file({"up_scales": scales}, tmp_path / "2.safetensors")
    else:
        save_file(packed | plain, tmp_path / "1.safetensors")
    files = WeightFiles(tmp_path)
    assert sorted(files.names()) == ["up", "up_bias"]
    expected = convert_moe_packed_tensors(blocks, scales)
    found = files.read("up")
    assert found.shape == (2, 160, 6) and found.dtype == torch.bfloat16 and found.is_contiguous()
    assert torch.equal(found, expected) and expected.isfinite().all()


@pytest.mark.parametrize("shape", [(2, 6, 5, 8), (2, 6, 4, 16), (6, 5, 16)])
def test_four_bits_of_another_form(tmp_path: Path, shape: tuple[int, ...]) -> None:
    packed = {"up_blocks": torch.zeros(shape, dtype=torch.uint8), "up_scales": torch.zeros(2, 6, 5, dtype=torch.uint8)}
    save_file(packed, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"'up' is not in four bits as it should be"):
        WeightFiles(tmp_path).read("up")


def _indexed(path: Path) -> None:
    for name in "ab":
        save_file({name: torch.zeros(3)}, path / f"{name}.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in "ab"}}))


def _cut(path: Path) -> None:
    (path / "b.safetensors").write_bytes((path / "b.safetensors").read_bytes()[:-4])


def _cut_header(path: Path) -> None:
    (path / "b.safetensors").write_bytes((path / "b.safetensors").read_bytes()[:11])


def _absent(path: Path) -> None:
    (path / "b.safetensors").unlink()


def _other_tensor(path: Path) -> None:
    save_file({"c": torch.zeros(3)}, path / "b.safetensors")


def _no_index(path: Path) -> None:
    (path / INDEX).write_text("[]")


def _no_json(path: Path) -> None:
    (path / INDEX).write_text("x")


def _of_run(path: Path) -> None:
    _emptied(path)
    (path / "run.json").write_text("{}")


def _emptied(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def _pickled(path: Path) -> None:
    _emptied(path)
    torch.save({"a": torch.zeros(3)}, path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_cut, "not a whole safetensors file"),
        (_cut_header, "not a whole safetensors file"),
        (_absent, r"b\.safetensors is absent"),
        (_other_tensor, r"the index names tensors that the files do not have: b"),
        (_no_index, r"(?s)not an index of weights: it maps no names.*remove it"),
        (_no_json, r"(?s)not an index of weights: Expecting value"),
        (_of_run, r"(?s)no weights at .*give the run, .*, whose newest one is served"),
        (_emptied, "no weights at"),
        (_pickled, r"(?s)pytorch_model\.bin at .* safetensors files alone.*convert them"),
    ],
)
def test_what_is_not_whole(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    _indexed(tmp_path)
    assert sorted(WeightFiles(tmp_path).names()) == ["a", "b"]
    spoil(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        WeightFiles(tmp_path)
    assert re.search(message, str(caught.value))


def test_which_of_two_files_counts(tmp_path: Path) -> None:
    """The index says it; without one there is no telling."""
    for name, number in (("one", 1.0), ("two", 2.0)):
        save_file({"w": torch.full((3,), number), name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"two files have the tensor 'w': one\.safetensors and two\.safetensors"):
        WeightFiles(tmp_path)
    for name, number in (("one", 1.0), ("two", 2.0)):
        weight_map = {"w": f"{name}.safetensors", "one": "one.safetensors", "two": "two.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        files = WeightFiles(tmp_path)
        assert files.read("w").tolist() == [number] * 3 and sorted(files.names()) == ["one", "two", "w"]


def test_a_file_of_another_format(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="safetensors files alone"):
        WeightFiles(tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="no weights at"):
        WeightFiles(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json is no file of weights: only \.safetensors files are read"):
        WeightFiles(tmp_path / "config.json")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(Path, "open", refuse)  # whoever runs the tests may be allowed to read all files
    with pytest.raises(CheckpointError, match="weights cannot be read: Permission denied"):
        WeightFiles(tmp_path)
