"""Tables that are read at positions bound the length of a sequence, in whatever way they are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mgraph.capture import ModelSpec, capture
from mgraph.capture.source import resolve
from mgraph.errors import OptionError
from tests.capture.models import write_model
from tests.sampling import sampled

READS = {  # self.table has 40 rows
    "embedding": ("F.embedding(torch.arange(tokens.shape[1]), self.table)", 40),
    "of a batch": ("F.embedding(torch.arange(tokens.shape[1]).unsqueeze(0).expand(tokens.shape), self.table)", 40),
    "after two rows": ("F.embedding(torch.arange(tokens.shape[1]) + 2, self.table)", 38),
    "from the second": ("F.embedding(torch.arange(3, tokens.shape[1] + 3) - 2, self.table)", 39),
    "index": ("self.table[torch.arange(tokens.shape[1], dtype=torch.int32).long()]", 40),
    "index_select": ("self.table.index_select(0, torch.arange(tokens.shape[1]))", 40),
    "another dim": ("self.table.view(8, 5, 8)[:, torch.arange(tokens.shape[1]) % 5].sum(0)", None),
    "columns": ("self.table.t()[:, torch.arange(tokens.shape[1])].t()", 40),
    "sum of ones": ("F.embedding(torch.ones_like(tokens).float().cumsum(1).long() - 1, self.table)", 40),
    "masked by nothing": (
        "F.embedding((lambda m: ((m.cumsum(1) * m).long() - 1) + 2)(torch.ones(tokens.shape)), self.table)",
        38,
    ),
    "batch": ("F.embedding(torch.ones_like(tokens).cumsum(0), self.table)", None),
    "remainder": ("F.embedding(torch.arange(tokens.shape[1]) % 40, self.table)", None),
}


@pytest.mark.parametrize(("read", "most"), sampled(list(READS.values()), 1, always=[READS["after two rows"]]))
def test_length_of_a_table(tmp_path: Path, read: str, most: int | None) -> None:
    """The bound is that of the eager model: it runs at the longest sequence, and fails at one token more."""
    spec = ModelSpec(write_model(tmp_path, f"return self.head(x + {read})"))
    assert capture(spec).dims["S"].maximum == most
    model = resolve(spec).factory()
    model(torch.zeros(1, most or 100, dtype=torch.int64))
    if most is not None:
        with pytest.raises(IndexError):
            model(torch.zeros(1, most + 1, dtype=torch.int64))


def test_a_length_that_the_table_has_not_is_refused_with_its_place(tmp_path: Path) -> None:
    spec = ModelSpec(write_model(tmp_path, f"return self.head(x + {READS['after two rows'][0]})"))
    assert capture(replace(spec, max_length=38)).dims["S"].maximum == 38
    with pytest.raises(OptionError) as caught:
        capture(replace(spec, max_length=39))
    assert "max_length is 39" in caught.value.message and "table has rows for 38 positions" in caught.value.message
    assert "user.py:13" in caught.value.message
    assert (caught.value.where, caught.value.hint) == ("--max-length", "at most 38")


def test_a_length_that_torch_proves_impossible_is_refused(tmp_path: Path) -> None:
    spec = ModelSpec(write_model(tmp_path, "return self.head(x + self.table[: tokens.shape[1]])"), max_length=41)
    with pytest.raises(OptionError, match="at most 40 positions: its forward holds for no more"):
        capture(spec)


def test_positions_of_packed_documents_are_read_too(tmp_path: Path) -> None:
    body = "return self.head(x + F.embedding(position_ids, self.table))"
    spec = write_model(tmp_path, body)
    file = Path(spec.rpartition(":")[0])
    file.write_text(
        file.read_text().replace("def forward(self, tokens):", "def forward(self, tokens, position_ids, segment_ids):")
    )
    assert capture(ModelSpec(spec, packed=True)).dims["S"].maximum == 40
