"""The semantic ops of every family, function by function: what should be found, and what is.

python -m tests.families.table          write docs/families.md
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from mgraph.compiler import build_module
from mgraph.ir.graph import Module
from mgraph.recipe import Recipe
from tests.families.configs import CONFIGS, write_config

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
SEMANTIC = (
    "attention",
    "rms_norm",
    "layer_norm",
    "rope",
    "glu",
    "moe_route",
    "moe_dispatch",
    "grouped_matmul",
    "moe_combine",
    "dropout",
    "cross_entropy",
)
Table = dict[str, dict[str, int]]
"""Kind of function to semantic op to how often; `layer` stands for each function of a kind of layer."""

_LLAMA: Table = {
    "layer": {"attention": 1, "rms_norm": 2, "rope": 2, "glu": 1},
    "model": {"rms_norm": 1, "cross_entropy": 1},
}
_EXPERTS = {"moe_route": 1, "moe_dispatch": 1, "grouped_matmul": 2, "glu": 1, "moe_combine": 1}
_MIXTURE: Table = {**_LLAMA, "layer": {"attention": 1, "rms_norm": 2, "rope": 2, **_EXPERTS}}
EXPECTED: dict[str, Table] = {
    "llama": _LLAMA,
    "llama3": _LLAMA,
    "qwen3": {**_LLAMA, "layer": {**_LLAMA["layer"], "rms_norm": 4}},
    "qwen3-moe": {**_MIXTURE, "layer": {**_MIXTURE["layer"], "rms_norm": 4}},
    "mixtral": _MIXTURE,
    "gpt-oss": _MIXTURE,
    "deepseek-v3": {**_MIXTURE, "layer": {**_MIXTURE["layer"], "rms_norm": 4, "glu": 2}},
    "gemma3": {**_LLAMA, "layer": {**_LLAMA["layer"], "rms_norm": 6}},
    "gpt2": {
        "layer": {"attention": 1, "layer_norm": 2},
        "model": {"layer_norm": 1, "cross_entropy": 1},
    },
    "bert": {
        "layer": {"attention": 1, "layer_norm": 2},
        "model": {"layer_norm": 2, "cross_entropy": 1},
    },
}
"""What should be found in the forward that is evaluated: in training, dropout keeps attention's products apart."""


def found(name: str, precision: str, directory: Path) -> Table:
    """The semantic ops of a family's evaluation, per kind of function. Functions of one kind must agree."""
    spec = write_config(name, directory / name)
    module = build_module(Recipe(model=spec, precision=precision, arch="none")).module
    top = module.entries["evaluate"].function
    table: Table = {"model": counted(module, top)}
    for callee in dict.fromkeys(str(n.attrs["callee"]) for n in module.functions[top].nodes if n.op == "call"):
        counts = counted(module, callee)
        assert table.setdefault("layer", counts) == counts, f"{name}: {table['layer']} and {counts}"
    return table


def counted(module: Module, function: str) -> dict[str, int]:
    """How often each semantic op stands in a function."""
    counts = Counter(node.op for node in module.functions[function].nodes)
    return {op: counts[op] for op in SEMANTIC if counts[op]}


def page(tables: dict[str, Table]) -> str:
    """The page of the documentation."""
    lines = [
        "# Families",
        "",
        "What the raise passes find in unmodified `transformers` classes when the model is evaluated: in one layer's",
        "function, and in the model around the layers; the same in bf16 and fp32. While a model with dropout trains,",
        "its attention stays products around a softmax. `python -m tests.families.table` writes this page, and a test",
        "compares it with what is found.",
        "",
        "| family | function | found | expected |",
        "|---|---|---|---|",
    ]
    for name, table in tables.items():
        for kind in ("layer", "model"):
            cells = (_text(table.get(kind, {})), _text(EXPECTED[name][kind]))
            lines.append(f"| {name} | {kind} | {cells[0]} | {'as found' if cells[0] == cells[1] else cells[1]} |")
    return "\n".join(lines) + "\n"


def _text(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[op]} `{op}`" for op in SEMANTIC if counts.get(op))


def main() -> int:
    """Write the page."""
    with tempfile.TemporaryDirectory() as directory:
        PAGE.write_text(page({name: found(name, "fp32", Path(directory)) for name in CONFIGS}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
