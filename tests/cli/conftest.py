"""A small package, compiled once, and a way to run the command line in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mgraph.cli import main

NEAR_NORM = '''
"""A norm whose rsqrt is read twice: no rms_norm can take its place."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, tokens):
        x = self.embed(tokens)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale * self.weight
        return (x + scale) @ self.embed.weight.T


def build():
    return Model()
'''


@dataclass(frozen=True)
class Run:
    """How a verb ended."""

    code: int
    out: str
    err: str


Mgraph = Callable[..., Run]


@pytest.fixture
def mgraph(capsys: pytest.CaptureFixture[str]) -> Mgraph:
    """Run the command line. No run may print a traceback, or write errors to stdout."""

    def run(*arguments: str | Path) -> Run:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err and "internal error" not in err, err
        assert code == 0 or "error: " in err
        return Run(code, out, err)

    return run


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A train package of dense-tiny, not to be written to."""
    path = tmp_path_factory.mktemp("cli") / "dense"
    assert main(["compile", "dense-tiny", "--arch", "none", "-o", str(path)]) == 0
    return path


@pytest.fixture
def package(compiled: Path, tmp_path: Path) -> Path:
    """A copy of the package that a test may damage."""
    return Path(shutil.copytree(compiled, tmp_path / "package"))


@pytest.fixture(scope="session")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of a model in which a norm almost matches."""
    folder = tmp_path_factory.mktemp("near")
    (folder / "near.py").write_text(NEAR_NORM)
    assert main(["compile", f"{folder}/near.py:build", "--arch", "none", "-o", str(folder / "package")]) == 0
    return folder / "package"
