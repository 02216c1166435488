"""Grouped products, gated units in them, and gradients of matrices: kernels and twins against float64, refusals."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgraph.codegen.triton import (
    KernelSpec,
    expert_glu,
    expert_sum,
    grouped,
    grouped_outer,
    kernels_text,
    reference_text,
)
from mgraph.codegen.triton.aot import build_kernels
from mgraph.codegen.triton.expert_glu import ExpertGlu
from mgraph.codegen.triton.expert_sum import ExpertSum
from mgraph.codegen.triton.glu import Glu
from mgraph.codegen.triton.grouped import Product, Tuning
from mgraph.codegen.triton.grouped_outer import Outer
from mgraph.codegen.triton.kernel import FLAT
from mgraph.runtime.kernels import evaluate
from tests.codegen.triton.interpret_cases import BROKEN_INTERPRETER, Case, interpret
from tests.codegen.triton.ptx_of import ptx_of
from tests.passes.raising import module_of
from tests.sampling import sampled

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BOUNDS = {"f32": 3e-3, "f16": 2e-3, "bf16": 1.2e-2}
"""Largest errors, relative: the interpreter cuts to bf16 where a GPU rounds."""
EXACT = 1e-6
"""Of what is f32 throughout."""

SMALL = Tuning(16, 16, 16, 4, 2, group=2)
LOOPED = replace(SMALL, programs=1)
ALONE = replace(SMALL, listed=False)
"""Each program looks for its tile."""
DESCRIBED = replace(SMALL, described=True)
ENDS = {"balanced": (4, 7, 12), "empty": (0, 0, 12), "hot": (38, 38, 40), "one": (0, 1, 1), "past": (2, 5, 7)}
"""Where the rows of three experts end, of rows as many as the last says; of `past` there are 12."""
ROWS = {"past": 12}

PRODUCTS = {
    "plain": (Product(3, 32, 48, "f16"), SMALL),
    "biased": (Product(3, 32, 16, "bf16", transposed=True, bias="f32"), LOOPED),
    "ragged": (Product(3, 48, 80, "f16", transposed=True), Tuning(16, 64, 32, 4, 2)),
    "sum": (Product(3, 16, 32, "bf16", transposed=True, second=True), LOOPED),
    "alone": (Product(3, 32, 48, "f16"), ALONE),
    "alone_looped": (Product(3, 16, 48, "bf16"), replace(ALONE, programs=1)),
    "exact": (Product(3, 48, 80, "f32", bias="f32"), replace(grouped.exact_tuning(80, 16), listed=False)),
    "exact_sum": (Product(3, 32, 48, "f32", transposed=True, second=True), SMALL),
    "described": (Product(3, 32, 48, "f16", bias="f32"), replace(DESCRIBED, columns=32, programs=1)),
    "described_sum": (Product(3, 16, 80, "bf16", transposed=True, second=True), replace(DESCRIBED, columns=64)),
    "described_alone": (Product(3, 32, 16, "f16"), replace(DESCRIBED, listed=False)),
    "flat": (Product(3, 32, 80, "f16"), replace(DESCRIBED, columns=32, programs=2, flat=True)),
}
SUMS = {
    "plain": (ExpertSum(Product(3, 32, 48, "f16"), 2), ALONE),
    "described": (ExpertSum(Product(3, 32, 48, "f16"), 2), DESCRIBED),
    "ended": (ExpertSum(Product(3, 16, 272, "bf16", transposed=True, bias="bf16"), 1, "bf16", "bf16", True), SMALL),
}
UNITS = {
    "silu": (ExpertGlu(3, 2, 32, 48, Glu(48, 1, "f16", "silu"), keep=True, weights="f32"), SMALL),
    "limited": (
        ExpertGlu(3, 1, 16, 32, Glu(32, 1, "f16", "quick_gelu", 1.7, 0.8, 1.0), True, True, "bf16"),
        LOOPED,
    ),
    "wide": (ExpertGlu(3, 2, 16, 272, Glu(272, 1, "f16", "silu"), weights="f32"), Tuning(16, 256, 16, 4, 2)),
    "gelu": (ExpertGlu(3, 4, 48, 16, Glu(16, 1, "f16", "gelu_tanh"), keep=False, weights="f16"), None),
    "alone": (ExpertGlu(3, 2, 32, 48, Glu(48, 1, "f16", "silu")), ALONE),
    "halves": (ExpertGlu(3, 2, 32, 48, Glu(48, 1, "bf16", "silu"), True, packed="halves", bias="f32"), ALONE),
    "pairs": (
        ExpertGlu(3, 1, 16, 80, Glu(80, 1, "f16", "quick_gelu", 1.7, 0.8, 1.0), packed="pairs", bias="f16"),
        Tuning(16, 64, 16, 4, 2),
    ),
    "turned_pairs": (ExpertGlu(3, 2, 16, 32, Glu(32, 1, "f16", "silu"), True, packed="pairs"), ALONE),
    "described": (
        ExpertGlu(3, 2, 32, 48, Glu(48, 1, "f16", "silu"), keep=True, weights="f32"),
        replace(DESCRIBED, columns=32),
    ),
    "described_cut": (
        ExpertGlu(3, 2, 32, 48, Glu(48, 1, "f16", "silu"), True, weights="f32"),
        replace(DESCRIBED, columns=64),
    ),
    "described_halves": (
        ExpertGlu(3, 2, 32, 48, Glu(48, 1, "bf16", "silu"), True, packed="halves", bias="f32"),
        DESCRIBED,
    ),
    "described_pairs": (ExpertGlu(3, 1, 16, 32, Glu(32, 1, "f16", "silu"), packed="pairs"), DESCRIBED),
    "straight_halves": (ExpertGlu(3, 1, 16, 48, Glu(48, 1, "f16", "silu"), packed="halves"), SMALL),
}
OUTERS = {
    "plain": (Outer(3, 32, 48, "f16"), SMALL),
    "left": (Outer(3, 32, 16, "bf16", "left", 2, "f32"), LOOPED),
    "right": (Outer(3, 16, 80, "f16", "right", 3, "f16"), Tuning(16, 64, 16, 4, 3)),
    "exact": (Outer(3, 16, 80, "f32", total="f32"), grouped.exact_tuning(80, 16)),
    "fresh": (Outer(3, 16, 48, "f16", "right", 2, "f32", fresh=True), SMALL),
    "described": (Outer(3, 48, 80, "f16"), replace(DESCRIBED, rows=32, columns=64)),
    "described_left": (Outer(3, 32, 48, "bf16", "left", 2, "f32"), replace(DESCRIBED, columns=32, programs=1)),
    "described_right": (Outer(3, 48, 16, "f16", "right", 3, "f16"), replace(DESCRIBED, rows=32)),
}


def ranges(ends: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip((0, *ends), ends, strict=False))


def normal(seed: int, *shape: int, dtype: str = "f16") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def matrices(seed: int, case: str, *shape: int, dtype: str) -> Tensor:
    """Those of experts; of one without rows nothing is to reach any result."""
    made = normal(seed, *shape, dtype=dtype)
    for e, (start, end) in enumerate(ranges(ENDS[case])):
        if start == end:
            made[e] = float("nan")
    return made


def offsets_of(case: str) -> tuple[Tensor, int]:
    return torch.tensor(ENDS[case], dtype=torch.int32), ROWS.get(case, ENDS[case][-1])


def multiplied(rows: Tensor, w: Tensor, case: str, transposed: bool) -> Tensor:
    """Each expert's rows by its matrix, in float64; rows past the last end, which nothing reads, are 0."""
    wide = w.double().transpose(1, 2) if transposed else w.double()
    out = torch.zeros(rows.shape[0], wide.shape[2], dtype=torch.float64)
    for e, (start, end) in enumerate(ranges(ENDS[case])):
        out[start:end] = rows[start:end].double() @ wide[e]
    return out


def product_case(problem: Product, case: str) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    offsets, count = offsets_of(case)
    matrix = (problem.width, problem.inner) if problem.transposed else (problem.inner, problem.width)
    inputs, want = [], torch.zeros(count, problem.width, dtype=torch.float64)
    for seed in range(1 + problem.second):
        rows = normal(seed, count, problem.inner, dtype=problem.dtype)
        w = matrices(seed + 9, case, 3, *matrix, dtype=problem.dtype)
        inputs += [rows, w]
        want += multiplied(rows, w, case, problem.transposed)
    inputs.append(offsets)
    if problem.bias:
        inputs.append(normal(5, 3, problem.width, dtype=problem.bias))
        for e, (start, end) in enumerate(ranges(ENDS[case])):
            want[start:end] += inputs[-1][e].double()
    return tuple(inputs), [want]


def order_of(count: int, choices: int) -> tuple[Tensor, int]:
    """Pairs in any order, of the least number of tokens that has so many."""
    tokens = -(-count // choices)
    return torch.randperm(tokens * choices, generator=torch.Generator().manual_seed(count))[:count], tokens


def glu_of(problem: ExpertGlu, gate: Tensor, up: Tensor) -> Tensor:
    """The unit, in float64."""
    unit = problem.unit
    if unit.limit:
        gate, up = gate.clamp(max=unit.limit), up.clamp(-unit.limit, unit.limit)
    act = {"silu": gate * gate.sigmoid(), "quick_gelu": gate * (unit.alpha * gate).sigmoid()}
    act["gelu_tanh"] = torch.nn.functional.gelu(gate, approximate="tanh")
    y: Tensor = act[unit.act] * (up + unit.offset)
    return y


def joined(problem: ExpertGlu, gate: Tensor, up: Tensor, dim: int) -> Tensor:
    """Both in one tensor, as they are packed."""
    if problem.packed == "halves":
        return torch.cat((gate, up), dim)
    return torch.stack((gate, up), dim + 1).flatten(dim, dim + 1)


def added(rows: Tensor, bias: Tensor, case: str) -> Tensor:
    """With the bias of each row's expert."""
    rows = rows.clone()
    for e, (start, end) in enumerate(ranges(ENDS[case])):
        rows[start:end] += bias[e].double()
    return rows


def sum_case(problem: ExpertSum, case: str) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Rows of pairs in any order, those of the last tokens past the last end."""
    (rows, w, offsets, *bias), (out,) = product_case(problem.product, case)
    end, choices = int(offsets[-1]), problem.choices
    order = torch.cat((torch.randperm(end, generator=torch.Generator().manual_seed(3)), torch.arange(end, len(rows))))
    tokens = len(rows) // choices
    weights = normal(4, tokens, choices, dtype=problem.weights).abs()
    want = torch.zeros(tokens, problem.product.width, dtype=torch.float64)
    return (rows, w, weights, order, offsets, *bias), [
        want.index_add_(0, order // choices, out * weights.double().flatten()[order, None])
    ]


def unit_cases(problem: ExpertGlu, case: str) -> dict[str, tuple[tuple[Tensor, ...], list[Tensor]]]:
    """Inputs and results forward and backward; each token has all of its rows."""
    offsets, count = offsets_of(case)
    count += -count % problem.choices
    order, tokens = order_of(count, problem.choices)
    narrow = {"dtype": problem.dtype}
    matrix = (problem.width, problem.inner) if problem.transposed else (problem.inner, problem.width)
    x, wg, wu = (
        normal(1, tokens, problem.inner, **narrow),
        matrices(2, case, 3, *matrix, **narrow),
        matrices(3, case, 3, *matrix, **narrow),
    )
    wg, wu = wg / 4, wu / 4
    rows = x[order // problem.choices]
    gate, up = multiplied(rows, wg, case, problem.transposed), multiplied(rows, wu, case, problem.transposed)
    given = [wg, wu]
    if problem.packed:
        given = [joined(problem, wg, wu, 1 if problem.transposed else 2)]
    if problem.bias:
        bg, bu = (normal(seed, 3, problem.width, dtype=problem.bias) for seed in (7, 8))
        gate, up = added(gate, bg, case), added(up, bu, case)
        given += [joined(problem, bg, bu, 1)] if problem.packed else [bg, bu]
    forward = [glu_of(problem, gate, up), *([gate, up] if problem.keep else [])]
    weights = normal(4, tokens, problem.choices, dtype=problem.weights or "f32").abs()
    dy, w = normal(5, tokens, problem.inner, **narrow), matrices(6, case, 3, *matrix[::-1], **narrow) / 4
    low = [tensor.to(x.dtype) for tensor in (gate, up)]
    leaves = [tensor.double().requires_grad_() for tensor in (*low, weights)]
    y = glu_of(problem, leaves[0], leaves[1])
    share = leaves[2].flatten()[order, None]
    inside = (torch.arange(count) < offsets[-1])[:, None]
    total = torch.zeros(tokens, problem.inner, dtype=torch.float64)
    summed = multiplied_grad(y, w, case, problem.transposed) * share * inside
    total.index_add(0, order // problem.choices, summed).backward(dy.double())
    grads = [leaf.grad for leaf in leaves]
    assert all(grad is not None for grad in grads)
    weighted = (y * share).detach()
    backward = [grads[0], grads[1], weighted, grads[2]]
    return {
        "forward": ((x, order, offsets, *given), forward),
        "backward": ((dy, weights, order, offsets, w, *low), [t for t in backward if t is not None]),
    }


def multiplied_grad(rows: Tensor, w: Tensor, case: str, transposed: bool) -> Tensor:
    """As `multiplied`, for autograd."""
    wide = w.double().transpose(1, 2) if transposed else w.double()
    parts = [rows[start:end] @ wide[e] for e, (start, end) in enumerate(ranges(ENDS[case]))]
    return torch.cat([*parts, rows.new_zeros(rows.shape[0] - ENDS[case][-1], wide.shape[2])])


def outer_case(problem: Outer, case: str) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    offsets, count = offsets_of(case)
    order, tokens = order_of(count, problem.choices)
    sizes = {side: tokens if side == problem.taken else count for side in ("left", "right")}
    left = normal(1, sizes["left"], problem.left, dtype=problem.dtype)
    right = normal(2, sizes["right"], problem.right, dtype=problem.dtype)
    total = [normal(3, 3, problem.left, problem.right, dtype=problem.total)] if problem.total else []
    want = torch.zeros(3, problem.left, problem.right, dtype=torch.float64)
    if problem.fresh:
        total[0][:] = torch.nan  # as memory may be that nobody cleared
    elif total:
        want += total[0]
    rows = {"left": left, "right": right}
    if problem.taken:
        rows[problem.taken] = rows[problem.taken][order // problem.choices]
    for e, (start, end) in enumerate(ranges(ENDS[case])):
        want[e] += rows["left"][start:end].double().t() @ rows["right"][start:end].double()
    return (*total, left, right, *([order] if problem.taken else []), offsets), [want]


Checked = tuple[KernelSpec, tuple[Tensor, ...], list[Tensor]]


def all_cases(which: tuple[str, ...]) -> list[Checked]:
    """Every site on the given ends, in the tunings above."""
    found: list[Checked] = []
    for name, (problem, product_cut) in PRODUCTS.items():
        spec = grouped.product(f"product_{name}", problem, ((0, product_cut),))
        found += [(spec, *product_case(problem, case)) for case in which]
    for name, (summed, sum_cut) in SUMS.items():
        spec = expert_sum.build(f"sum_{name}", summed, ((0, sum_cut),))
        whole = [case for case in which if ENDS[case][-1] % summed.choices == 0]  # a token has all of its rows, or none
        found += [(spec, *sum_case(summed, case)) for case in whole if summed.ended or case != "past"]
    for name, (unit, cut) in UNITS.items():
        specs = {"forward": expert_glu.forward(f"fwd_{name}", unit, ((0, cut),) if cut else ())}
        if unit.weights:
            specs["backward"] = expert_glu.backward(f"bwd_{name}", unit, cut)
        for case in which[-1:] if unit.packed else which:
            cases = unit_cases(unit, case)
            found += [(spec, *cases[way]) for way, spec in specs.items()]
    for name, (outer, outer_cut) in OUTERS.items():
        spec = grouped_outer.outer(f"outer_{name}", outer, outer_cut)
        found += [(spec, *outer_case(outer, case)) for case in which]
    return found


def check(spec: KernelSpec, got: tuple[Tensor, ...], want: list[Tensor], inputs: tuple[Tensor, ...]) -> None:
    (end,) = [int(t[-1]) for given, t in zip(spec.inputs, inputs, strict=True) if given.name == "offsets"]
    for tensor, result, ideal in zip(spec.outputs, got, want, strict=True):
        if tensor.shape[0] == "R":  # rows of no expert are left alone
            result, ideal = result[:end], ideal[:end]
        assert result.dtype is DTYPES[tensor.dtype] and result.shape == ideal.shape, (spec.name, tensor.name)
        error = (result.double() - ideal).norm()
        exact = all(given.dtype in ("f32", "i32") for given in spec.inputs)
        bound = EXACT if exact else BOUNDS[tensor.dtype]
        assert error <= bound * ideal.norm() + 1e-6, (spec.name, tensor.name, error / ideal.norm())


@pytest.mark.skipif(
    BROKEN_INTERPRETER,
    reason="the interpreter of Triton before 3.7 makes numbers of arrays with a dim, which NumPy 2.5 no longer does",
)
@pytest.mark.parametrize("ends", sampled(["empty past", "one balanced", "hot"], 0, always=["empty past"]))
def test_kernels_in_the_interpreter(ends: str, tmp_path: Path) -> None:
    """Balanced and empty experts, a hot one, a single row, rows past the last end; a program a tile and one for all."""
    checked = all_cases(tuple(ends.split()))
    specs = list({spec.name: spec for spec, _, _ in checked}.values())
    cases: list[Case] = [(spec.name, tuple(t.clone() for t in inputs)) for spec, inputs, _ in checked]
    for (spec, inputs, want), (got, after) in zip(checked, interpret(specs, cases, tmp_path), strict=True):
        check(spec, got, want, inputs)
        written = {tensor.alias for tensor in spec.outputs}
        for tensor, before, now in zip(spec.inputs, inputs, after, strict=True):
            assert tensor.name in written or torch.equal(before.nan_to_num(), now.nan_to_num()), spec


@pytest.mark.parametrize("case", ["balanced", "empty", "hot", "past"])
def test_twins(case: str) -> None:
    checked = all_cases((case,))
    twins = types.ModuleType("twins")
    exec(reference_text([spec for spec, _, _ in checked]), twins.__dict__)
    for spec, inputs, want in checked:
        got = getattr(twins, spec.name)(*inputs)
        check(spec, got if isinstance(got, tuple) else (got,), want, inputs)


def test_few_rows_take_low_tiles() -> None:
    """Up to 20 rows for each expert on average 16, up to 56 of them 64; one way runs, never two."""
    spec = grouped.product("product", Product(8, 64, 32, "bf16"))
    for rows, way in ((1, 16), (160, 16), (161, 64), (448, 64), (449, 128), (4096, 128)):
        dims = {"R": rows, "sms": 132}
        for name, expression in spec.dims.items():
            dims[name] = evaluate(expression, dims)
        ran = [launch.function for launch in spec.launches if evaluate(launch.when, dims)]
        assert ran == [f"product_tiles_{way}"] * (way > 16) + [f"product_{way}"]


QWEN = ExpertGlu(128, 8, 2048, 768, Glu(768, 1, "bf16", "silu"), keep=True, weights="f32")


@pytest.mark.full
def test_products_run_on_tensor_cores_behind_their_loads(tmp_path: Path) -> None:
    """The sizes of Qwen3-30B-A3B: products are of warp groups, and what they read is copied past the registers."""
    specs = [
        expert_glu.forward("forward", QWEN),
        expert_glu.backward("backward", QWEN),
        grouped_outer.outer("outer", Outer(128, 2048, 768, "bf16", "left", 8, "bf16")),
    ]
    texts = ptx_of(specs, tmp_path)
    for spec in specs:
        text = texts.get(f"{spec.name}_128.aligned") or texts[f"{spec.name}.aligned"]
        assert "wgmma.mma_async" in text and "cp.async.cg.shared.global" in text, spec.name
        assert "ld.local" not in text, spec.name


def test_what_has_no_descriptor_is_one_form() -> None:
    """f32, matrices in pairs beside rows that are gathered, and depths that end elsewhere."""
    specs = [
        grouped.product("f32", Product(3, 32, 48, "f32"), ((0, DESCRIBED),)),
        expert_glu.forward("pairs", UNITS["described_pairs"][0], ((0, DESCRIBED),)),
        expert_glu.backward("deep", UNITS["silu"][0], replace(DESCRIBED, depth=64)),
    ]
    for spec in specs:
        assert "descriptor" not in spec.source and {launch.takes for launch in spec.launches} == {"all"}
    by_descriptors = grouped.product("two", Product(3, 32, 48, "f16"), ((0, DESCRIBED),))
    assert [launch.takes for launch in by_descriptors.launches] == ["all", "aligned", "others"]


def test_emitted_lines_fit() -> None:
    specs = [spec for spec, _, _ in all_cases(("one",))]
    for text in (kernels_text(specs), reference_text(specs)):
        assert max(map(len, text.splitlines())) <= 120


SERVED = """
func @f(%x: bf16[S, 64], %order: i64[2*S], %offsets: i32[4], %w: bf16[4, 96, 64], %b: bf16[4, 96], %d: bf16[4, 64, 48],
        %weights: f32[S, 2]) {
  %y: bf16[2*S, 48] = expert_glu(%x, %order, %offsets, %w, %b)
    {act = "silu", packed = "halves", top_k = 2, transpose_w = true}
  %sum: bf16[S, 64] = expert_sum(%y, %d, %weights, %order, %offsets)
    {dtype = bf16, ended = true, transpose_w = true}
  return %sum
}
"""


def problem_after(node: int, *changes: tuple[str, str]) -> object:
    text = SERVED.replace("\n    {", " {").replace("\n        %", " %")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    problem_of = (expert_glu.problem_of, expert_sum.problem_of)[node]
    return problem_of(module_of(text).functions["f"].nodes[node])


def test_problems_of_nodes() -> None:
    unit = Glu(48, 1, "bf16", "silu")
    assert problem_after(0) == ExpertGlu(4, 2, 64, 48, unit, transposed=True, packed="halves", bias="bf16")
    assert problem_after(1) == ExpertSum(Product(4, 48, 64, "bf16", True), 2, "f32", "bf16", True)


@pytest.mark.parametrize(
    ("node", "old", "new", "reason"),
    [
        (0, "%b: bf16", "%b: f64", "the biases are f64"),
        (1, "%weights: f32", "%weights: f64", "the weights are f64"),
        (1, "dtype = bf16", "dtype = f64", "the products are f64"),
        (1, "%d: bf16", "%d: f16", "the rows are bf16, the matrices f16"),
    ],
)
def test_refusals_name_the_reason(node: int, old: str, new: str, reason: str) -> None:
    assert reason in str(problem_after(node, (old, new)))


def test_large_tiles_fit_in_the_shared_memory_of_any_gpu(tmp_path: Path) -> None:
    """Where a package may be for a GPU with 99 KB, loops ask for nothing ahead; elsewhere they do."""
    site = grouped.product("large", Product(4, 128, 256, "bf16"))
    assert FLAT in site.source
    (entry,) = build_kernels([site], tmp_path, ["sm_86"])
    assert FLAT not in (tmp_path / "kernels.py").read_text("utf-8")
    shared = {launch["function"]: max(b["shared"] for b in launch["binaries"]) for launch in entry["launches"]}
    assert 64 * 1024 < shared["large_128"] <= 99 * 1024 and max(shared.values()) <= 99 * 1024
