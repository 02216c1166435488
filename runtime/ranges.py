"""Names what a step does, for profilers: a range around each statement of step.py, with its line and its origin.

    layer_fwd:120 layers.*.mlp models/decoder.py:88

step.py itself has no word of this: where ranges are asked for, its syntax tree is changed as it is loaded. In a loop
the range also has the number of the iteration, which is that of the layer. On a GPU ranges are NVTX's (Nsight Systems
shows them); on the CPU, and for `mgraph kernels --profile`, they are those of torch.profiler.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType

import torch

KINDS = ("nvtx", "record")
"""NVTX, or ranges of torch.profiler."""
NAME = re.compile(r"(\w+):(\d+)(?: \[[^\]]*\])?(?: .*)?")
"""Function and line of a range."""
CALLED = "__range__"
_COMMENT = re.compile(r"\s+# (\S+(?:  \S+)?)$")
_WORK = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare)
_Range = Callable[[str], AbstractContextManager[object]]


class Nvtx:
    """A range of NVTX."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        """Push it."""
        torch.cuda.nvtx.range_push(self._name)

    def __exit__(self, *error: object) -> None:
        """Pop it, also where an error passes."""
        torch.cuda.nvtx.range_pop()


def range_of(kind: str) -> _Range:
    """What makes a range of a name."""
    return Nvtx if kind == "nvtx" else torch.profiler.record_function


def compiled(file: Path) -> CodeType:
    """The code of a step.py, with a range around each statement of its functions; lines are those of the file."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text, str(file))
    origins = [found[1] if (found := _COMMENT.match(line)) else "" for line in text.splitlines()]
    for item in tree.body:
        if isinstance(item, ast.FunctionDef):
            item.body = _Ranges(item.name, origins, item.lineno).body(item.body, [])
    return compile(ast.fix_missing_locations(tree), str(file), "exec")


class _Ranges:
    """Wraps the statements of one function."""

    def __init__(self, function: str, origins: list[str], start: int) -> None:
        self._function, self._origins, self._start = function, origins, start

    def body(self, statements: list[ast.stmt], counters: list[str]) -> list[ast.stmt]:
        """The statements, wrapped; `counters` are the variables of the loops around them."""
        return [self._wrapped(statement, counters) for statement in statements]

    def _wrapped(self, statement: ast.stmt, counters: list[str]) -> ast.stmt:
        if isinstance(statement, ast.For):
            more = [statement.target.id] if isinstance(statement.target, ast.Name) else []
            statement.body = self.body(statement.body, [*counters, *more])
            return statement
        if isinstance(statement, ast.If | ast.With):
            statement.body = self.body(statement.body, counters)
            return statement
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.Return):
            works = statement.value is not None and any(isinstance(n, _WORK) for n in ast.walk(statement.value))
        else:
            works = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        if not works:
            return statement
        call = ast.Call(ast.Name(CALLED, ast.Load()), [self._name(statement.lineno, counters)], [])
        return ast.copy_location(ast.With([ast.withitem(call)], [statement]), statement)

    def _name(self, line: int, counters: list[str]) -> ast.expr:
        """`function:line [counters] origin`, as the nearest comment above says."""
        origin = next((o for o in reversed(self._origins[self._start : line]) if o), "")
        head, tail = f"{self._function}:{line}", f" {origin}" if origin else ""
        if not counters:
            return ast.Constant(head + tail)
        values: list[ast.expr] = [ast.Constant(head + " [")]
        for number, counter in enumerate(counters):
            values += [ast.Constant(", ")] if number else []
            values.append(ast.FormattedValue(ast.Name(counter, ast.Load()), -1))
        return ast.JoinedStr([*values, ast.Constant("]" + tail)])
