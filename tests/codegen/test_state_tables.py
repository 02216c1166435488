"""Tables of state names: their text gives the names back."""

from __future__ import annotations

from mgraph.codegen.source import SourceWriter
from mgraph.codegen.state_tables import StateTables

NAMES = ["embed", *(f"layers.{i}.{n}" for i in range(3) for n in ("a", "b")), "norm", "blocks.1.c", "blocks.2.c"]


def test_folded_names_are_the_names() -> None:
    tables, writer = StateTables(), SourceWriter()
    assert tables.add("WEIGHTS", NAMES) == "WEIGHTS"
    assert tables.add("OTHER", NAMES) == "WEIGHTS"
    assert tables.add("WEIGHTS", NAMES[:4]) == "WEIGHTS_2"
    tables.write(writer)
    found: dict[str, list[str]] = {}
    exec(writer.text(), found)
    assert found["WEIGHTS"] == NAMES and found["WEIGHTS_2"] == NAMES[:4]
    assert "range(1, 3)" in writer.text()


def test_templates_of_names_are_folded_too() -> None:
    """Layers that hold lists of layers: the outer number is filled in later."""
    templates = [f"layers.{{}}.blocks.{i}.{n}" for i in range(2) for n in ("a", "b")]
    templates += [f"heads.{i}.{{}}.w" for i in range(3)]
    tables, writer = StateTables(), SourceWriter()
    tables.add("TEMPLATES", templates)
    tables.write(writer)
    found: dict[str, list[str]] = {}
    exec(writer.text(), found)
    assert found["TEMPLATES"] == templates


def test_tensors_reuse_a_table_with_an_ending() -> None:
    tables = StateTables()
    tables.add("W", NAMES)
    grads = [f"{n}.grad" for n in NAMES]
    assert tables.tensors(NAMES, "") == "[state[name] for name in W]"
    assert tables.tensors(grads, "G") == '[state[f"{name}.grad"] for name in W]'
    text = tables.tensors(["loss", *grads, "count"], "")
    state = {n: n for n in ["loss", *grads, "count"]}
    assert eval(text, {"state": state, "W": NAMES}) == list(state)
    assert tables.tensors(NAMES[:5], "PART") == "[state[name] for name in PART]"
