"""The proof's last step: the text of step.py issues the collectives of the graph, in the order that was proved.

Emission moves nodes (accumulations), inlines them and rolls calls up into loops. So the order is read back off the text
(`mgraph.step_order`) and compared with the graph's, function by function, each call of a function standing for itself.
"""

from __future__ import annotations

from itertools import zip_longest

from mgraph.codegen.names import identifier
from mgraph.codegen.prepare import callees_first
from mgraph.codegen.step import function_names
from mgraph.errors import PackageError
from mgraph.ir.collectives import CollectiveOrder, Issued
from mgraph.ir.graph import Module
from mgraph.step_order import FILE, Step, expanded, read_step_order


def check_step(module: Module, text: str) -> None:
    """Raise PackageError where the text does not issue the collectives of the module's entries, each in its place."""
    issued = CollectiveOrder(module).items
    if not issued:
        return
    written = read_step_order(text)
    names = function_names(module, callees_first(module))
    functions = {identifier(entry.name): entry.function for entry in module.entries.values()}
    called = [name for name in names if name in issued and name not in functions.values()]
    functions |= {names[name]: name for name in called}
    for name in functions:
        graph = issued.get(functions[name], ())
        for item, step in zip_longest(graph, expanded(written.get(name, ()))):
            if _of_graph(item, names) != _of_step(step):
                raise _error(functions[name], item, step)


def _of_graph(item: Issued | str | None, names: dict[str, str]) -> str | None:
    if isinstance(item, Issued):
        return f"{item.kind}@{item.axis}"
    return item if item is None else names[item]


def _of_step(step: Step | None) -> str | None:
    return None if step is None else step.text


def _error(function: str, item: Issued | str | None, step: Step | None) -> PackageError:
    if isinstance(item, Issued):
        wanted = f"{item.node.op} over {item.axis}, node %{item.node.id} from {item.node.origin}"
    else:
        wanted = "nothing more" if item is None else f"what @{item} does"
    found = "nothing more" if step is None else step.text
    line = "" if step is None else f":{step.line}"
    return PackageError(
        f"step.py issues other collectives than the graph: in @{function} the graph has {wanted}, the text {found}",
        where=f"{FILE}{line}",
        hint="report this: the text was written from the graph",
    )
