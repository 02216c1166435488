"""Kernels that come while others end: what is launched waits first, in packages whose architectures all know how."""

from __future__ import annotations

import ast
import ctypes
import math
import re
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.codegen.triton import build_kernels, paged_attention, rms_norm
from mgraph.codegen.triton.early import HELPER, HERE, can_come_early, coming_early
from mgraph.codegen.triton.kernel import KernelSpec
from mgraph.codegen.triton.rms_norm import RmsNorm
from mgraph.runtime.kernels import _jit_module
from mgraph.runtime.launch import CubinLauncher

PROBLEM = RmsNorm(64, "bf16", "bf16", 1e-6)


def spec() -> KernelSpec:
    """Two launches: rows of the gradient, and sums over them."""
    return rms_norm.backward("norm_grad", PROBLEM)


def test_architectures() -> None:
    assert can_come_early(["sm_90a"]) and can_come_early(["sm_90", "sm_100a", "sm_120"])
    assert not can_come_early([]) and not can_come_early(["sm_80"]) and not can_come_early(["sm_90a", "sm_80"])
    assert not can_come_early(["gfx942"])


def test_what_is_launched_waits_first() -> None:
    plain, early = spec(), coming_early(spec())
    functions = {node.name: node for node in ast.parse(early.source).body if isinstance(node, ast.FunctionDef)}
    launched = {launch.function for launch in early.launches}
    assert len(launched) == 2 and early.source.count("come_early()") == 2
    for name, function in functions.items():
        first = function.body[1] if ast.get_docstring(function) else function.body[0]
        assert (ast.unparse(first) == "come_early()") == (name in launched)
    assert early.source.replace("    come_early()\n", "") == plain.source
    assert early.launches == plain.launches


def test_a_kernel_that_says_where_waits_there() -> None:
    """Reads of tables come before; a launched function that says nothing waits first, as ever."""
    problem = paged_attention.PagedAttention("bf16", 8, 2, 64, 64, 16, 0.125)
    plain = paged_attention.forward("attention", problem)
    source = coming_early(plain).source
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for launch in plain.launches:
        statements = [ast.unparse(statement) for statement in functions[launch.function].body[1:]]
        walks = "lengths" in launch.args
        before = statements[: statements.index("come_early()" if walks else "wait_for_before()")]
        loads = {text for statement in before for text in re.findall(r"tl.load\((\w+)", statement)}
        reads = {"starts_ptr", "lengths_ptr", "blocks_ptr"} if launch.large else {"starts_ptr", "lengths_ptr"}
        assert loads == (reads if walks else {"starts_ptr"}), launch.function
        assert not any("tl.store" in statement for statement in before)
        assert ("let_next_come()" in before) == (not walks) and sum("come" in text for text in statements) == 1
    calls = ("come_early()", "wait_for_before()", "let_next_come()")
    assert "".join(line for line in source.splitlines(True) if line.strip() not in calls) == plain.source


def test_what_lets_the_next_one_come_waits_as_well() -> None:
    """A kernel that said no more than `AHEAD` would let two others work beside each other."""
    plain = paged_attention.forward("attention", paged_attention.PagedAttention("bf16", 8, 2, 64, 64, 16, 0.125))
    with pytest.raises(AssertionError, match="waits nowhere"):
        coming_early(replace(plain, source=plain.source.replace(f"    {HERE}\n", "")))


@pytest.mark.parametrize("grid", [(1, 1, 1), (132, 32, 1), (5000, 1, 1), (3, 2000, 1), (7, 11, 130)])
def test_only_the_last_programs_let_what_follows_come(grid: tuple[int, int, int]) -> None:
    """The helper's own text, run once for each program: all wait, and then the last 4,224 ask."""
    asked: list[str] = []
    place = [0, 0, 0]
    cuda = types.SimpleNamespace(
        gdc_wait=lambda: asked.append("wait"), gdc_launch_dependents=lambda: asked.append("launch_dependents")
    )
    language = types.SimpleNamespace(
        constexpr=bool,
        num_programs=grid.__getitem__,
        program_id=place.__getitem__,
        extra=types.SimpleNamespace(cuda=cuda),
    )
    names: dict[str, Any] = {"tl": language, "triton": types.SimpleNamespace(jit=lambda function: function)}
    exec(HELPER, names)
    last = []
    for program in range(math.prod(grid)):  # x is the fastest
        place[:] = program % grid[0], program // grid[0] % grid[1], program // grid[0] // grid[1]
        asked.clear()
        names["come_early"]()
        assert asked[0] == "wait"
        last.append(asked[1:] == ["launch_dependents"])
    assert last == [False] * (len(last) - 4224) + [True] * min(len(last), 4224)


@pytest.mark.parametrize(("archs", "early"), [(["sm_90a"], True), (["sm_90a", "sm_80"], False)])
def test_binaries(archs: list[str], early: bool, tmp_path: Path) -> None:
    (entry,) = build_kernels([spec()], tmp_path, archs)
    text = (tmp_path / "kernels.py").read_text()
    assert ("def come_early():" in text, text.count("    come_early()")) == ((True, 2) if early else (False, 0))
    binaries = [binary for launch in entry["launches"] for binary in launch["binaries"]]
    assert {binary["early"] for binary in binaries} == {early}
    assert all((tmp_path / binary["file"]).stat().st_size > 1000 for binary in binaries)


@pytest.mark.parametrize(("capability", "waits"), [((8, 0), False), ((9, 0), True)])
def test_what_is_compiled_where_it_runs(capability: tuple[int, int], waits: bool, tmp_path: Path) -> None:
    """The text of a package for sm_90a, compiled as --jit does it for an older GPU, which lacks the instructions."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    build_kernels([spec()], tmp_path, ["sm_90a"])
    module = _jit_module(tmp_path, types.SimpleNamespace(capability=capability))
    (launch, *_), given = spec().launches, spec()
    source = ASTSource(getattr(module, launch.function), given.argument_types(launch), {}, {})
    made = triton.compile(source, GPUTarget("cuda", capability[0] * 10, 32), {"num_warps": launch.num_warps})
    asked = re.findall(r"griddepcontrol\.(\w+)|(%nctaid\.z)", made.asm["ptx"])
    assert asked == ([("wait", ""), ("", "%nctaid.z"), ("launch_dependents", "")] if waits else [])


def test_a_launch_says_so() -> None:
    """A device that records stands for CUDA: `early` reaches it, from the binary that is launched."""
    launcher = CubinLauncher.__new__(CubinLauncher)
    seen: list[bool] = []

    class Recorder:
        torch_device = torch.device("cpu")
        multiprocessors = 2

        def launch(self, *given: object) -> None:
            seen.append(bool(given[-1]))

    slots = (ctypes.c_uint64 * 1)()
    for early in ({"early": True}, {"early": False}, {}):
        binary = {"threads": 32, "shared": 0, "hidden": [], "alignment": 1, **early}
        launcher.__dict__.update(
            _device=Recorder(), _aligned=(1, binary), _generic=(1, binary), _slots=slots, _args=[], _address=0
        )
        launcher.__dict__.update(_lock=threading.Lock(), _room={})
        launcher.launch({}, {}, (1, 1, 1), True)
    assert seen == [True, False, False]
