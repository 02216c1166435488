"""Tables over lists of tensors: every element is in one chunk, in a part of the right unit; what is kept, and when."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mgraph.runtime.multi_tensor import MOST_KEPT, UNIT, Part, Tables, places

CHUNK = 64
CPU = torch.device("cpu")


def parts_of(tables: Tables, lists: dict[str, list[Tensor]]) -> tuple[Part, ...] | None:
    """As a site asks for them."""
    key = places(lists)
    return tables.known(key) or tables.make(key, lists)


def views(sizes: list[int], shift: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of these sizes in one memory, each so many elements behind an even place."""
    starts = [sum(sizes[:i]) + 32 * i for i in range(len(sizes))]
    whole = torch.arange(sum(sizes) + 64 * len(sizes)).to(dtype)
    places = [-(-start // UNIT) * UNIT + more for start, more in zip(starts, shift, strict=True)]
    return [whole[place : place + size] for place, size in zip(places, sizes, strict=True)]


def chunks_of(part: Part, name: str, tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Address and number of elements of each program's chunk of a list, as a kernel computes them."""
    first, item = tensors[part.base], tensors[0].element_size()
    tables = {key: table.tolist() for key, table in part.tables.items()}
    found = []
    for owner, chunk in zip(tables["owners"], tables["chunks"], strict=True):
        start = chunk * CHUNK
        place = tables[f"{name}_at"][owner] * part.unit + start
        found.append((first.data_ptr() + place * item, min(CHUNK, tables["sizes"][owner] * part.unit - start)))
    assert len(found) == part.blocks
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_element_is_in_one_chunk(dtype: torch.dtype) -> None:
    sizes = [16, 129, 0, 1, 64, 65, 320, 192, 7]
    wide = views(sizes, [0, 0, 0, 0, 0, 0, 0, 0, 0], torch.float32)
    low = views(sizes, [0, 0, 0, 0, 0, 0, 0, 1, 3], dtype)
    parts = parts_of(Tables(CHUNK, {}, CPU), {"wide": wide, "low": low})
    assert parts is not None and [part.unit for part in parts] == [UNIT, 1]
    assert [part.before for part in parts] == [0, parts[0].blocks]
    for name, tensors in {"wide": wide, "low": low}.items():
        item = tensors[0].element_size()
        found = [chunk for part in parts for chunk in chunks_of(part, name, tensors)]
        elements = [place + item * i for place, count in found for i in range(count)]
        assert sorted(elements) == sorted(t.data_ptr() + item * i for t in tensors for i in range(t.numel()))
        even = {place for place, _ in chunks_of(parts[0], name, tensors)}
        assert even >= {tensors[i].data_ptr() for i in (0, 4, 6)}
        assert not even & {tensors[i].data_ptr() for i in (1, 3, 5, 7, 8)}


def test_entries_of_lists_go_together() -> None:
    """A program's chunks of two lists belong to one entry, and begin equally far behind its start."""
    sizes = [130, 32, 64]
    first, second = views(sizes, [0, 0, 0], torch.float32), views(sizes, [0, 0, 1], torch.bfloat16)
    for part in parts_of(Tables(CHUNK, {}, CPU), {"a": first, "b": second}) or ():
        for (left, count), (right, same) in zip(chunks_of(part, "a", first), chunks_of(part, "b", second), strict=True):
            entry = max(i for i, tensor in enumerate(first) if tensor.data_ptr() <= left)
            assert (left - first[entry].data_ptr()) // 4 == (right - second[entry].data_ptr()) // 2 and count == same


@pytest.mark.parametrize("gap", [16, 3])
def test_a_view_with_gaps_is_taken_row_by_row(gap: int) -> None:
    """Part of the columns of one list's entry; the other list's is contiguous, as a moment is."""
    memory = torch.zeros(64 + 4 * 3 * (32 + gap))
    whole = memory[-memory.data_ptr() // 4 % UNIT :][: 4 * 3 * (32 + gap)].view(4, 3, 32 + gap)
    flat = torch.zeros(64 + 4 * 3 * 32)
    wide, narrow = whole[..., :32], flat[-flat.data_ptr() // 4 % UNIT :][: 4 * 3 * 32].view(4, 3, 32)
    after = torch.zeros(80)
    lists = {"a": [wide, after], "b": [narrow, after]}
    parts = parts_of(Tables(CHUNK, {"n": [(1.0, 1), (2.0, 1)]}, CPU), lists) or ()
    assert [part.unit for part in parts] == ([UNIT] if gap == 16 else [UNIT, 1])
    rows = parts[-1] if gap == 3 else parts[0]
    for name, view in (("a", wide), ("b", narrow)):
        found = chunks_of(rows, name, lists[name])[:12]
        assert found == [(view[i, j].data_ptr(), 32) for i in range(4) for j in range(3)]
    assert rows.tables["n"].tolist()[:12] == [1.0] * 12


def test_numbers_belong_to_entries() -> None:
    tensors = views([5, 32, 9, 16], [0, 0, 0, 0], torch.float32)
    numbers = {"decays": [(0.5, 1), (0.25, 2), (2.0, 1)]}
    even, odd = parts_of(Tables(CHUNK, numbers, CPU), {"x": tensors}) or ()
    assert even.tables["decays"].tolist() == [0.25, 2.0] and odd.tables["decays"].tolist() == [0.5, 0.25]
    assert even.tables["decays"].dtype is torch.float32


def test_nothing_is_no_part() -> None:
    assert parts_of(Tables(CHUNK, {}, CPU), {"x": [torch.empty(0)]}) == ()
    assert parts_of(Tables(CHUNK, {}, CPU), {"x": []}) == ()


def test_sizes_past_32_bits() -> None:
    """Places are computed and nothing is read, so the memory is never touched."""
    tensors = [torch.empty(2**31 + 32, dtype=torch.bfloat16), torch.empty(48, dtype=torch.bfloat16)]
    (part,) = parts_of(Tables(2**20, {}, CPU), {"x": tensors}) or ()
    assert part.tables["sizes"].tolist() == [(2**31 + 32) // UNIT, 3] and part.blocks == 2**11 + 2


def test_equal_places_are_made_once() -> None:
    tensors = views([16, 33], [0, 0], torch.float32)
    tables = Tables(CHUNK, {}, CPU)
    parts = parts_of(tables, {"x": tensors})
    assert parts_of(tables, {"x": [t.view(-1) for t in tensors]}) is parts
    assert parts_of(tables, {"x": tensors[:1]}) is not parts


def test_a_capture_takes_known_tables_and_keeps_them() -> None:
    tables = Tables(CHUNK, {}, CPU)
    memory = torch.zeros(4 * MOST_KEPT)
    known = parts_of(tables, {"x": [memory[:4]]})
    tables._capturing = lambda: True
    assert parts_of(tables, {"x": [memory[1:5]]}) is None
    assert parts_of(tables, {"x": [memory[:4]]}) is known
    tables._capturing = lambda: False
    for i in range(2 * MOST_KEPT):
        parts_of(tables, {"x": [memory[i : i + 2]]})
    assert parts_of(tables, {"x": [memory[:4]]}) is known
