"""What GPUs are given beyond 2**31 elements, on small tensors: kernels in Triton's interpreter, and twins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from mgraph.codegen.triton import reference_text
from tests.codegen.triton.far_case import check, results
from tests.codegen.triton.far_cases import CASES
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.codegen.triton.test_gpu import CASES as LARGE
from tests.codegen.triton.test_gpu import LAST, check_last_rows

CPU = torch.device("cpu")
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
SMALL = {(build, small): name for name, (build, _, small) in CASES.items()}
"""Cases that differ in small sizes, too, and the name of one of each."""


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter cannot run with this NumPy")
@pytest.mark.parametrize("name", SMALL.values())
def test_kernels_in_the_interpreter(name: str, tmp_path: Path) -> None:
    build, _, small = CASES[name]
    case = build(*small)
    inputs, wanted = case.draw(CPU)
    ((made, after),) = interpret([case.spec], [(case.spec.name, inputs)], tmp_path)
    check(case, results(case, after, made), wanted)


@pytest.mark.parametrize("name", SMALL.values())
def test_twins(name: str) -> None:
    build, _, small = CASES[name]
    case = build(*small)
    twins = types.ModuleType("twins")
    exec(reference_text([case.spec]), twins.__dict__)
    inputs, wanted = case.draw(CPU)
    made = getattr(twins, case.spec.name)(*inputs)
    check(case, results(case, inputs, made), wanted)


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter cannot run with this NumPy")
def test_last_rows_in_the_interpreter(tmp_path: Path) -> None:
    """Of nine rows; the loss has too many columns for an interpreter."""
    large = [case for name, case in LARGE.items() if name != "cross entropy"]
    calls: list[Case] = []
    for case in large:
        rows = [torch.zeros(9, case.columns, dtype=torch.bfloat16) for _ in range(case.count)]
        for tensor in rows:
            tensor[-LAST:].normal_()
        calls += [(case.spec.name, tuple(case.inputs(given))) for given in (rows, [t[-LAST:].clone() for t in rows])]
    made = [results for results, _ in interpret([case.spec for case in large], calls, tmp_path)]
    for among, alone in zip(made[::2], made[1::2], strict=True):
        check_last_rows(among, alone, 9)


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="the interpreter cannot run with this NumPy")
@pytest.mark.skipif(MEMORY < 12 * 2**30, reason="systems may refuse tensors larger than all memory, touched or not")
def test_no_offset_of_rows_and_experts_leaves_32_bits(tmp_path: Path) -> None:
    """Some programs of each launch on the large tensors: a product that should have been made of 64 bits fails."""
    names = ["gated unit", "gated unit's gradient", "norm", "products, few rows", "append"]
    assert not overflowing(tmp_path, [*names, "gradients of sums", "joined heads turned"])


def overflowing(directory: Path, names: list[str]) -> dict[str, str]:
    """Cases that fail, and how."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).with_name("interpret_far.py")), str(directory), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    failed: dict[str, str] = json.loads((directory / "failed.json").read_text())
    return failed
