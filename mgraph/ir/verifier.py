"""The verifier: a table of named rules, and the error that says which one a graph breaks, where, and from which line.

`RULES` (rules on functions and nodes in `mgraph.ir.rules`, on declarations in `mgraph.ir.module_rules`) is in the order
in which they are checked: later rules rely on earlier ones. The docs print the same table.
"""

from __future__ import annotations

from collections.abc import Iterator

from mgraph.errors import GraphError
from mgraph.ir.graph import Function, Module, Node
from mgraph.ir.module_rules import ENTRY_RULES, MODULE_RULES
from mgraph.ir.printer import header_text, node_text
from mgraph.ir.problem import Problem, Rule, scope_of
from mgraph.ir.rules import CALL_RULES, FUNCTION_RULES, TYPE_RULES

RULES: tuple[Rule, ...] = (*MODULE_RULES, *FUNCTION_RULES, *TYPE_RULES, *CALL_RULES, *ENTRY_RULES)

_BEFORE, _AFTER, _WIDTH = 4, 5, 140


class VerifierError(GraphError):
    """A module breaks a rule of the verifier."""


def verify(module: Module, known: Module | None = None) -> None:
    """Check every rule; what `known`, a module that has passed, holds in the same form is not checked again.

    Raises VerifierError on the first problem: what, in which function and node, from which source line, and up to ten
    lines of graph around it.
    """
    scope = scope_of(module, known)
    for rule in RULES:
        for problem in rule.check(scope):
            raise _error(module, rule, problem)


def _error(module: Module, rule: Rule, problem: Problem) -> VerifierError:
    message = f"{_short(problem.message)} [{rule.name}: {rule.says}]"
    return VerifierError(message, place_of(module, problem), problem.hint)


def place_of(module: Module, problem: Problem) -> str:
    """Where a problem is: function, node, source line, and up to ten lines of graph around it."""
    if problem.function is None:
        return f"module {module.name!r}"
    place = f"function @{problem.function.name}"
    if problem.node is not None:
        node = problem.node
        named = f"node %{node.id}" if node.results else f"a {node.op} node without results"
        layer = f" ({node.origin.path})" if node.origin.path else ""
        place += f", {named}, from {node.origin}{layer}, made by {node.made_by or 'nobody'}"
    excerpt = "\n".join(_excerpt(module, problem.function, problem.node))
    return f"{place}\n{excerpt}"


def _excerpt(module: Module, function: Function, node: Node | None) -> Iterator[str]:
    """At most ten lines of the function around the node, which is marked `>>`; long lines are cut."""
    index = next((i for i, n in enumerate(function.nodes) if n is node), -1)
    first = max(0, index - _BEFORE)
    if first == 0:
        yield f"  {'>>' if node is None else '  '} {_short(header_text(function))}"
    for number, near in enumerate(function.nodes[first : max(index, 0) + _AFTER], first):
        yield f"  {'>>' if number == index else '  '}   {_short(node_text(near, module.functions))}"


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
