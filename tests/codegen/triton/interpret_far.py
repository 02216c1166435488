"""Runs some programs of each launch on tensors of more than 2**31 elements, in Triton's interpreter.

A program of its own: `python interpret_far.py DIRECTORY NAME...` with TRITON_INTERPRET=1. The interpreter checks that
no sum and no product of 32 bits leaves them, as an offset does that should have been widened. Memory that no program
touches costs nothing. Of each site that fails `failed.json` has the name, and what was said.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy
import torch

from mgraph.codegen.triton import KernelSpec, build_kernels
from mgraph.runtime import kernels as runtime
from tests.codegen.triton.far_case import far
from tests.codegen.triton.far_cases import CASES as FAR
from tests.codegen.triton.interpret_cases import Interpreter, multiply_bf16
from tests.codegen.triton.test_gpu import CASES, LAST

WHOLE, SOME = 200, 10
"""Programs up to which all of a launch run; of others, so many at even distances, and as many of the last."""
CPU = torch.device("cpu")


class Wide(Interpreter):
    """So many multiprocessors that no program has many tiles."""

    multiprocessors = 20_000


def run_some(self: Any, *given: Any, **options: Any) -> None:
    """In place of the interpreter's launch, which copies all tensors and runs all programs."""
    from triton.runtime import interpreter

    known = inspect.getfullargspec(self.fn).args
    named = inspect.getcallargs(self.fn, *given, **{name: v for name, v in options.items() if name in known})
    arguments = {name: v if name in self.constexprs else interpreter._implicit_cvt(v) for name, v in named.items()}
    grid = (*self.grid, 1, 1)[:3]
    count = math.prod(grid)
    chosen = {*range(0, count, max(1, count // SOME)), *range(max(0, count - SOME), count)}
    scope = interpreter._patch_lang(self.fn)
    interpreter.interpreter_builder.set_grid_dim(*grid)
    for number in sorted(chosen) if count > WHOLE else range(count):
        interpreter.interpreter_builder.set_grid_idx(*map(int, numpy.unravel_index(number, grid)))
        self.fn(**arguments)
    scope.restore()


def drawn(name: str) -> tuple[KernelSpec, tuple[Any, ...]]:
    """A site and its large inputs."""
    if name in FAR:
        build, large, _ = FAR[name]
        case = build(*large)
        return case.spec, case.draw(CPU)[0]
    of_rows = CASES[name]
    tensors = [far(of_rows.rows, of_rows.columns, device=CPU, last=LAST) for _ in range(of_rows.count)]
    return of_rows.spec, tuple(of_rows.inputs(tensors))


def run(name: str, directory: Path) -> None:
    """One site."""
    spec, inputs = drawn(name)
    entries = build_kernels([spec], directory, archs=())
    twins = runtime._import_file(directory / "reference.py")
    site = getattr(runtime.bind(entries, directory, twins, Wide(), strict=True, jit=True), spec.name)
    site(*inputs)


def main(directory: Path, names: list[str]) -> None:
    """Each in a fork: what reads or writes where nothing is ends its process."""
    from triton.runtime import interpreter

    interpreter.GridExecutor.__call__ = run_some
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True)  # it asserts nothing without
    multiply_bf16()
    failed = {}
    for number, name in enumerate(names):
        own = directory / str(number)
        own.mkdir()
        child = os.fork()
        if child == 0:
            try:
                run(name, own)
                os._exit(0)
            except BaseException:
                (own / "said.txt").write_text(traceback.format_exc())
                os._exit(1)
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            said = own / "said.txt"
            failed[name] = said.read_text() if said.exists() else f"exit code {code}"
    (directory / "failed.json").write_text(json.dumps(failed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
