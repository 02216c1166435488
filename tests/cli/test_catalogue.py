"""`mgraph passes`, `ops`, `env`, `version`."""

from __future__ import annotations

import dataclasses
from importlib import metadata

import mgraph as package
from mgraph.cli.environment import EXTRAS
from mgraph.ir.opdef import declared_ops
from mgraph.passes import PASSES
from mgraph.recipe import Recipe, flag_of
from mgraph.runtime.options import Options, flag

from .conftest import Mgraph


def test_passes(mgraph: Mgraph) -> None:
    lines = mgraph("passes").out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(PASSES)
    (adamw,) = (line for line in lines if line.startswith("adamw "))
    assert "derive" in adamw and "reassociating" in adamw and "beta2=0.999" in adamw


def test_ops(mgraph: Mgraph) -> None:
    lines = mgraph("ops").out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(declared_ops())


def test_environment(mgraph: Mgraph) -> None:
    text = mgraph("env").out
    assert metadata.version("torch") in text and "MGRAPH_DEBUG" in text and "\ncpu " in text
    assert all(flag_of(field.name) in text for field in dataclasses.fields(Recipe))
    assert all(flag(field.name) in text for field in dataclasses.fields(Options))
    for extra in EXTRAS:
        (line,) = (line for line in text.splitlines() if f" {extra.distribution} " in line)
        assert ("unverified" in line) == extra.adapter


def test_version(mgraph: Mgraph) -> None:
    assert mgraph("version").out == package.__version__ + "\n"
