"""Names of step.py that may be read, or deleted, where they are not bound: two turns of each loop, no branches."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def unbound(text: str) -> list[str]:
    """`function:line name` for each local name that is not bound where it is used."""
    found: dict[str, None] = {}
    for function in ast.parse(text).body:
        if isinstance(function, ast.FunctionDef):
            bound = {argument.arg for argument in function.args.args}
            local = {*bound, *_names(function, ast.Store)}
            for line, name in _uses(function.body, local, bound):
                found[f"{function.name}:{line} {name}"] = None
    return list(found)


def _uses(body: list[ast.stmt], local: set[str], bound: set[str]) -> Iterator[tuple[int, str]]:
    """What is used and not bound; `bound` is kept up to date."""
    for statement in body:
        if isinstance(statement, ast.For):
            for _ in range(2):
                bound.update(_names(statement.target, ast.Store))
                yield from _uses(statement.body, local, bound)
            continue
        own = {name for part in ast.walk(statement) if isinstance(part, ast.comprehension)
               for name in _names(part.target, ast.Store)}  # fmt: skip
        for use in (ast.Load, ast.Del):
            yield from ((statement.lineno, n) for n in _names(statement, use) if n in local - bound - own)
        bound.difference_update(_names(statement, ast.Del))
        bound.update(set(_names(statement, ast.Store)) - own)


def _names(node: ast.AST, context: type[ast.expr_context]) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)]
