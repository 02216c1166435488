"""Attention: the kernel in Triton's interpreter against the op's body in float64, what is refused, and its binaries."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from mgraph.codegen.triton import KernelSpec, attention, kernels_text, reference_text
from mgraph.codegen.triton.attention import Tuning, further_of
from mgraph.codegen.triton.attention_problem import Attention, problem_of
from mgraph.codegen.triton.attention_reach import Reach
from mgraph.ir.graph import Node
from mgraph.ir.ops import attention as op
from tests.codegen.triton.attention_cases import DISPLACED, PROBLEMS, displaced, draw, error, results
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.passes.raising import module_of

CUT, SMALL = Tuning(64, 64, 4, 2), Tuning(32, 32, 4, 2)
"""The latter is small enough for three loops where the window is long."""


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """All masks alone and together, odd sizes, heads that share keys, permuted parts of projections."""
    specs = [attention.forward(n, problem, SMALL if "long" in n else CUT) for n, problem in PROBLEMS.items()]
    cases: list[Case] = [(name, draw(name)) for name in PROBLEMS]
    cases += [(name, displaced(draw(name))) for name in DISPLACED]
    for (name, inputs), ((out, lse), _) in zip(cases, interpret(specs, cases, tmp_path), strict=True):
        want, want_lse = results(name, inputs)
        bound = {"f16": 1e-3, "bf16": 1e-2}[PROBLEMS[name].dtype]  # The interpreter cuts to bf16 where a GPU rounds.
        assert out.dtype is inputs[0].dtype and lse.dtype is torch.float32
        assert error(out, want) <= bound, name
        assert error(lse, want_lse) <= 2e-6, name


REACHED = {
    "documents": Attention("bf16", 16, 16, 1.0, True, more=(("segments", "i64"),)),
    "documents_in_a_window": Attention("bf16", 16, 16, 1.0, True, 20, more=(("segments", "i64"),)),
    "documents_both_ways": Attention("bf16", 16, 16, 1.0, more=(("segments", "i32"),)),
    "padding": Attention("bf16", 16, 16, 1.0, True, more=(("keys", "bool"), ("segments", "i64"))),
    "padding_alone": Attention("bf16", 16, 16, 1.0, window=30, more=(("keys", "i64"),)),
}


def searches(name: str) -> list[KernelSpec]:
    """The searches of an instance as sites of their own: what blocks of queries see, and what sees blocks of keys."""
    problem, made = REACHED[name], []
    for of_keys in (False, True):
        search = Reach(f"{name}_{'by' * of_keys}", "reach", 64, of_keys=of_keys)
        inputs, outputs, launches = further_of(problem), (search.scratch(),), (search.launch(problem),)
        dims = {"S": "T"} if "segments" not in problem.extra else {} if "keys" in problem.extra else {"T": "S"}
        twin = f"def {search.function}(): ..."
        made.append(KernelSpec(search.function, search.source(problem), twin, inputs, outputs, (), launches, dims=dims))
    return made


def reach_of(name: str, more: tuple[torch.Tensor, ...], *, of_keys: bool) -> list[tuple[list[int], list[int]]]:
    """The first and one after the last that any of each block of 64 sees, or is seen by, and those of what all of it
    see, one batch after another."""
    problem, rows = REACHED[name], more[0].shape[1]
    given = tuple(zip(problem.extra, more, strict=True))
    zeros = torch.zeros(more[0].shape[0], 1, rows, 16)
    hidden = op._hidden(zeros, zeros, problem.causal, problem.window, given)
    seen = ~hidden.expand(more[0].shape[0], 1, 1, rows, rows)[:, 0, 0]
    blocks = (seen.mT if of_keys else seen).split(64, 1)
    return [(ends(block[batch].any(0)), ends(block[batch].all(0))) for batch in range(len(seen)) for block in blocks]


def ends(chosen: torch.Tensor) -> list[int]:
    """The first place and one after the last that are chosen; nothing where none is."""
    places = chosen.nonzero()
    return [int(places.min()), int(places.max()) + 1] if len(places) else []


@pytest.mark.skipif(BROKEN_INTERPRETER, reason="as above")
def test_blocks_reach_no_further_than_they_see(tmp_path: Path) -> None:
    """With documents one after another, of 30 rows or so, and with padding. The last block is of one row, but what all
    of it see is found as if it were whole."""
    generator = torch.Generator().manual_seed(5)
    specs, cases, wanted = [], [], []
    for name, problem in REACHED.items():
        ids = (torch.rand(2, 129, generator=generator) < 1 / 30).long().cumsum(1)
        keys = torch.arange(129) < torch.tensor([[128], [64]])
        drawn = {"segments": ids, "keys": keys}
        types = {"i64": torch.int64, "i32": torch.int32, "bool": torch.bool}
        more = tuple(drawn[kind].to(types[dtype]) for kind, dtype in problem.more)
        for of_keys, spec in enumerate(searches(name)):
            specs.append(spec)
            cases.append((spec.name, more))
            wanted.append(reach_of(name, more, of_keys=bool(of_keys)))
    for (name, _), want, ((reach,), _) in zip(cases, wanted, interpret(specs, cases, tmp_path), strict=True):
        found = [
            [pair if pair[0] < pair[1] else [] for pair in (row[:2], row[2:])] for row in reach.flatten(0, 1).tolist()
        ]
        assert [any_sees for any_sees, _ in found] == [any_sees for any_sees, _ in want], name
        for index, ((_, whole), (_, most)) in enumerate(zip(found, want, strict=True)):
            assert whole == most or (index % 3 == 2 and (not whole or most[0] <= whole[0] < whole[1] <= most[1])), name


@pytest.mark.parametrize("name", PROBLEMS)
def test_twin(name: str) -> None:
    module = types.ModuleType("twins")
    exec(reference_text([attention.forward("attend", PROBLEMS[name])]), module.__dict__)
    inputs = draw(name)
    out, lse = module.attend(*inputs)
    want, want_lse = results(name, inputs)
    assert error(out, want) <= {"f16": 1e-3, "bf16": 8e-3}[PROBLEMS[name].dtype]
    assert error(lse, want_lse) <= 1e-2


NODE = """
func @f(%q: bf16[B, 8, S, 64], %k: bf16[B, 2, S, 64], %v: bf16[B, 2, S, 64], %ids: i64[B, S], %sinks: bf16[8]) {
  %out: bf16[B, 8, S, 64], %lse: f32[B, 8, S] = attention(%q, %k, %v, %ids, %sinks) {ATTRS}
  return %out
}
""".replace("ATTRS", 'scale = 0.125, causal = true, window = 128, extra = ["segments", "sinks"]')


def node(*changes: tuple[str, str]) -> Node:
    """The node `attention` of a function with such types and attributes."""
    text = NODE
    for old, new in changes:
        text = text.replace(old, new)
    return module_of(text).functions["f"].nodes[0]


ALONE = ("%v, %ids, %sinks)", "%v)"), ('"segments", "sinks"', "")


def test_problem_of_a_node() -> None:
    want = Attention("bf16", 64, 64, 0.125, True, 128, None, (("segments", "i64"), ("sinks", "bf16")), share=4)
    assert problem_of(node()) == want
    fused = problem_of(node(*ALONE, (", window = 128", ""), ("64]", "72]")))
    assert fused == "cuDNN's kernel is faster"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([*ALONE, (", window = 128", "")], "cuDNN's kernel is faster"),
        ([("64]", "4*S]")], "are not known numbers"),
        ([("64]", "512]")], "heads are 512 wide"),
        ([("bf16", "f32")], "q is f32"),
        ([("%k: bf16", "%k: f16")], "k f16"),
        ([("scale = 0.125", "scale = -1.0")], "the scale -1.0 is not positive"),
        ([("%ids: i64", "%ids: u8")], "segments is u8"),
        ([("%ids: i64[B, S]", "%ids: i64[]"), ('"segments"', '"start"')], "start somewhere"),
    ],
)
def test_refusals_name_the_reason(changes: list[tuple[str, str]], reason: str) -> None:
    assert reason in str(problem_of(node(*changes)))


def test_emitted_lines_fit() -> None:
    specs = [attention.forward(name, problem) for name, problem in PROBLEMS.items()]
    for text in (kernels_text(specs), reference_text(specs)):
        assert max(map(len, text.splitlines())) <= 120
