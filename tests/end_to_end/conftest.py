"""One build per model and session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.builds import MODELS, Build, build


@pytest.fixture(scope="session", params=MODELS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """A training package of each family."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    return build(request.param, directory)
