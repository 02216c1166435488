"""Named dims as Python text, and the lines that bind them."""

from __future__ import annotations

import pytest
import sympy

from mgraph.codegen.dim_text import DimScope, python_text
from mgraph.codegen.source import SourceWriter
from mgraph.ir.dims import evaluate, parse_dim, symbol
from mgraph.ir.graph import Value
from mgraph.ir.local import Division
from mgraph.ir.types import DType, Shard, TensorType

TEXTS = "B*S", "2*B*S+1", "B-S", "(B+1)*S", "S//2", "(B*S)//4+B", "S%7", "Max(B,S)*2", "B**2*S", "ceiling(S/3)"


@pytest.mark.parametrize("text", TEXTS)
def test_text_means_the_dim(text: str) -> None:
    dim = parse_dim(text)
    for sizes in ({"B": 3, "S": 8}, {"B": 16, "S": 5}):
        assert eval(python_text(dim), {}, dict(sizes)) == evaluate(dim, sizes)


def test_unknown_functions_are_refused() -> None:
    with pytest.raises(AssertionError, match="no Python text"):
        python_text(sympy.log(symbol("S")))


def test_bindings() -> None:
    batch, length = symbol("B"), symbol("S")
    both = Value("x", TensorType(DType.F32, (batch, length, 4)))
    double = Value("y", TensorType(DType.F32, (2 * symbol("T"),)))
    scope, writer = DimScope([both, double]), SourceWriter()
    assert scope.text(batch * length) == "B * S"
    scope.text(symbol("T"))
    scope.bind(writer, {both: "x", double: "y"})
    assert writer.text() == "B, S, _ = x.shape\nT = y.shape[0] // 2\n"
    lost = DimScope([])
    lost.text(symbol("R"))
    with pytest.raises(AssertionError, match="no input tells the extent of R"):
        lost.bind(SourceWriter(), {})


def test_a_part_tells_the_whole() -> None:
    """Of a dim that is split over 4 ranks, an input has a quarter."""
    division = Division({"tp": 4}, frozenset(), {"S": 4})
    split = Value("x", TensorType(DType.F32, (symbol("B"), symbol("S"), 6)).place("tp", Shard(1)))
    scope, writer = DimScope([split], division), SourceWriter()
    assert scope.text(symbol("S") / 4) == "S // 4"
    scope.bind(writer, {split: "x"})
    assert writer.text() == "S = x.shape[1] * 4\n"


def test_an_extent_that_the_host_reads_is_bound_where_it_is_made() -> None:
    rows = Value("rows", TensorType(DType.F32, (2 * symbol("R"), 8)))
    division = Division({}, frozenset(), {}, {}, frozenset({"R"}))
    scope, writer = DimScope([], division, {"R"}), SourceWriter()
    assert scope.text(3 * symbol("R")) == "3 * R"
    scope.bind(writer, {})
    assert scope.bind_made(writer, rows, "rows", {"R", "Q"}) == {"R"}
    assert writer.text().splitlines() == ["R = rows.shape[0] // 2"]
