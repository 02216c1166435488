"""What the raise passes find in each family is what should be found, in both precisions, and what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.families.configs import CONFIGS
from tests.families.table import EXPECTED, PAGE, found, page
from tests.sampling import sampled

CASES = [(name, precision) for name in CONFIGS for precision in ("fp32", "bf16")]


@pytest.mark.parametrize(("name", "precision"), sampled(CASES, 4))
def test_expected_ops_are_found(name: str, precision: str, tmp_path: Path) -> None:
    assert found(name, precision, tmp_path) == {k: dict(v) for k, v in EXPECTED[name].items()}


def test_the_page_is_what_is_expected() -> None:
    assert PAGE.read_text() == page(EXPECTED)
