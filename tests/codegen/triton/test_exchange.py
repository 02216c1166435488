"""Rows for other ranks: kernels in Triton's interpreter and twins against loops, what they load at once, refusals."""

from __future__ import annotations

import math
import re
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgraph.codegen.kernel_sites import kernel_sites
from mgraph.codegen.triton import KernelSpec, exchange, kernels_text, reference_text
from mgraph.codegen.triton.exchange import Exchange, Places
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.codegen.triton.ptx_of import ptx_of
from tests.passes.raising import module_of

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "i64": torch.int64}
PACKS = {
    "wide": Exchange(2560, 2, "bf16"),
    "narrow": Exchange(6, 3, "f32"),
    "numbers": Exchange(2, 4, "i64", fill=-1),
    "budget": Exchange(24, 3, "bf16", part=0.4),
    "budget_numbers": Exchange(2, 4, "i64", fill=-1, part=0.35),
}
UNPACKS = {"wide": Exchange(2560, 2, "bf16"), "narrow": Exchange(6, 3, "f32"), "alone": Exchange(16, 1, "f32")}
UNPACKS["budget"] = PACKS["budget"]
COMBINES = {"wide": Exchange(2560, 2, "bf16", None, 0.0, True), "narrow": Exchange(6, 3, "f32", None, 0.0, True)}
PLACES = {"two": Places(8, 3, 2), "three": Places(9, 1, 3), "many": Places(64, 8, 16)}
TOKENS = (1, 5, 350)
MANY = exchange.COUNTED * (exchange.CHUNK + 1) + 7
"""Tokens whose programs are more than one chunk."""


def choices_of(problem: Places, tokens: int) -> tuple[Tensor, Tensor]:
    """Choices of experts, some of which dropped their tokens, and where each token lies for each rank: one by one."""
    generator = torch.Generator().manual_seed(tokens)
    indices = torch.rand(tokens, problem.experts, generator=generator).topk(problem.choices, -1).indices
    indices[torch.rand(indices.shape, generator=generator) < 0.2] = problem.experts
    counts, rows = [0] * problem.ranks, []
    for chosen in indices.tolist():
        goes = {expert // (problem.experts // problem.ranks) for expert in chosen if expert < problem.experts}
        rows.append([counts[rank] if rank in goes else -1 for rank in range(problem.ranks)])
        counts = [count + (rank in goes) for rank, count in enumerate(counts)]
    return indices, torch.tensor(rows)


def room_of(problem: Exchange, tokens: int) -> int:
    """For how many tokens a rank has room."""
    return math.ceil(problem.part * tokens - 1e-9)


def places_of(problem: Exchange, tokens: int) -> Tensor:
    """As `expert_places` and `within_room` count them; some tokens go nowhere."""
    goes = torch.rand(tokens, problem.ranks, generator=torch.Generator().manual_seed(tokens)) < 0.6
    places = (goes.long().cumsum(0) - 1).where(goes, -1)
    return places.where(places < room_of(problem, tokens), -1)


def packed(problem: Exchange, tokens: int) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Inputs, what is packed, and which rows are of any meaning."""
    places, room = places_of(problem, tokens), room_of(problem, tokens)
    x = (torch.randn(tokens, problem.width, generator=torch.Generator().manual_seed(1)) * 9).to(DTYPES[problem.dtype])
    y = torch.full((problem.ranks * room, problem.width), problem.fill or 0, dtype=x.dtype)
    used = torch.full((len(y),), problem.fill is not None)
    for token, row in enumerate(places.tolist()):
        for rank, place in enumerate(row):
            if place >= 0:
                y[rank * room + place] = x[token]
                used[rank * room + place] = True
    return (x, places), y, used


def unpacked(problem: Exchange, tokens: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Inputs, in which rows that no token has are no numbers, and the sums."""
    places, room = places_of(problem, tokens), room_of(problem, tokens)
    rows = torch.full((problem.ranks * room, problem.width), torch.nan, dtype=DTYPES[problem.dtype])
    total = torch.zeros(tokens, problem.width)
    for token, row in enumerate(places.tolist()):
        for rank, place in enumerate(row):
            if place >= 0:
                rows[rank * room + place] = torch.randn(problem.width).to(rows.dtype)
                total[token] += rows[rank * room + place].float()
    return (rows, places), total.to(rows.dtype)


def combined(problem: Exchange, tokens: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Inputs, in which each pair has a row of its own or none, and the weighted sums."""
    generator = torch.Generator().manual_seed(tokens)
    pairs = tokens * problem.ranks
    rows = torch.randn(pairs + 5, problem.width, generator=generator).to(DTYPES[problem.dtype])
    places = torch.randperm(pairs, generator=generator).view(tokens, problem.ranks)
    places[torch.rand(places.shape, generator=generator) < 0.3] = -1
    weights = torch.rand(places.shape, generator=generator)
    total = torch.zeros(tokens, problem.width, dtype=torch.float64)
    for token, chosen in enumerate(places.tolist()):
        for choice, row in enumerate(chosen):
            if row >= 0:
                total[token] += weights[token, choice].double() * rows[row].double()
    return (rows, weights, places), total.to(rows.dtype)


def _few(problems: dict[str, Exchange], tokens: int) -> list[tuple[str, Exchange]]:
    """Those of which a program has all of few tokens: the others' programs are alike."""
    return [(name, problem) for name, problem in problems.items() if tokens < 100 or problem.tokens > 1]


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    specs = [exchange.pack(f"pack_{name}", problem) for name, problem in PACKS.items()]
    specs += [exchange.unpack(f"unpack_{name}", problem) for name, problem in UNPACKS.items()]
    specs += [exchange.places(f"places_{name}", problem) for name, problem in PLACES.items()]
    specs += [exchange.unpack(f"combine_{name}", problem) for name, problem in COMBINES.items()]
    cases: list[Case] = []
    wanted: list[tuple[Tensor, Tensor | None]] = []
    for name, tokens in [*((name, tokens) for name in PLACES for tokens in TOKENS), ("two", MANY)]:
        indices, expected = choices_of(PLACES[name], tokens)
        cases.append((f"places_{name}", (indices,)))
        wanted.append((expected, torch.ones(tokens, dtype=torch.bool)))
    for tokens in TOKENS:
        for name, problem in _few(PACKS, tokens):
            inputs, y, used = packed(problem, tokens)
            cases.append((f"pack_{name}", inputs))
            wanted.append((y, used))
        for name, problem in _few(UNPACKS, tokens):
            inputs, y = unpacked(problem, tokens)
            cases.append((f"unpack_{name}", inputs))
            wanted.append((y, None))
        for name, problem in _few(COMBINES, tokens):
            weighted, y = combined(problem, tokens)
            cases.append((f"combine_{name}", weighted))
            wanted.append((y, None))
    for (name, _), (want, real), (got, _) in zip(cases, wanted, interpret(specs, cases, tmp_path), strict=True):
        assert got[0].shape == want.shape and got[0].dtype is want.dtype, name
        if real is not None:
            assert torch.equal(got[0][real], want[real]), name
        else:
            torch.testing.assert_close(got[0], want, rtol=8e-3 if want.dtype is torch.bfloat16 else 1e-6, atol=1e-6)


def test_twins() -> None:
    twins = types.ModuleType("twins")
    exec(reference_text([exchange.places(f"places_{name}", p) for name, p in PLACES.items()]), twins.__dict__)
    for name, of_places in PLACES.items():
        indices, expected = choices_of(of_places, 350)
        assert torch.equal(getattr(twins, f"places_{name}")(indices), expected)
    exec(reference_text([exchange.pack(f"pack_{name}", p) for name, p in PACKS.items()]), twins.__dict__)
    exec(reference_text([exchange.unpack(f"unpack_{name}", p) for name, p in UNPACKS.items()]), twins.__dict__)
    for name, problem in PACKS.items():
        inputs, y, used = packed(problem, 5)
        assert torch.equal(getattr(twins, f"pack_{name}")(*inputs)[used], y[used])
    for name, problem in UNPACKS.items():
        operands, y = unpacked(problem, 5)
        torch.testing.assert_close(getattr(twins, f"unpack_{name}")(*operands), y)
    exec(reference_text([exchange.unpack(f"combine_{name}", p) for name, p in COMBINES.items()]), twins.__dict__)
    for name, problem in COMBINES.items():
        weighted, y = combined(problem, 5)
        torch.testing.assert_close(getattr(twins, f"combine_{name}")(*weighted), y)


def test_sixteen_bytes_at_a_time(tmp_path: Path) -> None:
    specs = [exchange.pack("pack", Exchange(2048, 2, "bf16")), exchange.unpack("unpack", Exchange(2048, 2, "bf16"))]
    texts = ptx_of(specs, tmp_path)
    for name, loads, stores in (("pack", 1, 2), ("unpack", 2, 1)):
        text = texts[f"{name}.aligned"]
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", text)) == loads, name
        assert len(re.findall(r"st\.global\S*\.v4\.b32", text)) == stores, name


NODES = """
func @f(%x: bf16[S, 48], %i: i64[S, 2]) {
  %places: i64[S, 2] = expert_places(%i) {num_experts = 8, ranks = 2}
  %p: bf16[2*S, 48] = pack_rows(%x, %places) {rows = "R"}
  %j: i64[2*S, 2] = pack_rows(%i, %places) {fill = -1, rows = "R"}
  %y: bf16[S, 48] = unpack_rows(%p, %places)
  return %j, %y
}
"""


RAGGED = "R 0.. ragged <= 2*S by bound"
MORE = "%places: i64[S, 65] = expert_places(%i) {num_experts = 65, ranks = 65}"


def test_sites_in_packages_for_a_gpu() -> None:
    module = module_of(NODES.replace("2*S", "R"), ragged=RAGGED)
    places, pack, numbers, unpack = module.functions["f"].nodes
    assert exchange.places_problem_of(places) == Places(8, 2, 2)
    assert exchange.problem_of(pack) == exchange.problem_of(unpack) == Exchange(48, 2, "bf16")
    assert exchange.problem_of(numbers) == Exchange(2, 2, "i64", -1)
    names = [spec.name for spec in kernel_sites(module, gpu=True).specs]
    assert names == ["expert_places_0", "pack_rows_0", "pack_rows_1", "unpack_rows_0"]
    assert not kernel_sites(module).specs
    combine = NODES.replace("unpack_rows(%p, %places)", "padded_combine(%p, %w, %places) {dtype = f32}")
    combine = combine.replace("2*S", "R").replace("%i: i64[S, 2])", "%i: i64[S, 2], %w: f32[S, 2])")
    last = module_of(combine, ragged=RAGGED).functions["f"].nodes[-1]
    assert exchange.problem_of(last) == Exchange(48, 2, "bf16", None, 0.0, True)
    last = module_of(combine.replace("{dtype = f32}", "{dtype = bf16}"), ragged=RAGGED).functions["f"].nodes[-1]
    assert "the kernel has f32" in str(exchange.problem_of(last))
    within = module_of(NODES.replace("2*S", "R").replace('rows = "R"', 'part = 0.25, rows = "R"'), ragged=RAGGED)
    assert exchange.problem_of(within.functions["f"].nodes[2]) == Exchange(2, 2, "i64", -1, 0.25)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("bf16", "f64", "rows are f64"),
        ("48", "B", "is not a known number"),
        ("%places: i64[S, 2] = expert_places(%i) {num_experts = 8, ranks = 2}", MORE, "there are 65 ranks"),
    ],
)
def test_refusals_name_the_reason(old: str, new: str, reason: str) -> None:
    module = module_of(NODES.replace("2*S", "R").replace(old, new), ragged=RAGGED)
    assert reason in str(exchange.problem_of(module.functions["f"].nodes[1]))


def test_emitted_lines_fit() -> None:
    specs: list[KernelSpec] = [exchange.pack("pack", p) for p in PACKS.values()]
    specs += [exchange.unpack("unpack", p) for p in UNPACKS.values()]
    specs += [exchange.places("places", p) for p in PLACES.values()]
    specs += [exchange.unpack("combine", p) for p in COMBINES.values()]
    for text in (kernels_text(specs), reference_text(specs)):
        assert max(map(len, text.splitlines())) <= 120
