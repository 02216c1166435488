"""The shims of emitted code against torch: grouped products, AdamW, and collectives on two real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgraph.runtime import v1

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(8, 16), (7, 5), (1, 1)])
@pytest.mark.parametrize("ends", [[2, 2, 9], [0, 0, 9], [9, 9, 9], [3, 5, 9]])
def test_grouped_mm(dtype: torch.dtype, inner: int, outer: int, ends: list[int]) -> None:
    """Empty groups, sizes that no fused kernel takes, transposed weights, and the weight gradient's form."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, inner, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, inner, outer, generator=generator, dtype=torch.float64)
    grad = torch.randn(9, outer, generator=generator, dtype=torch.float64)
    rows, weight, grad = (tensor.to(dtype).double() for tensor in (rows, weight, grad))
    slices = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    expected = torch.cat([rows[part] @ weight[index] for index, part in enumerate(slices)])
    expected_weight = torch.stack([rows[part].T @ grad[part] for part in slices])
    offsets = torch.tensor(ends, dtype=torch.int32)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]

    def check(actual: Tensor, wanted: Tensor) -> None:
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance)

    check(v1.grouped_mm(rows.to(dtype), weight.to(dtype), offsets), expected)
    turned = weight.to(dtype).mT.contiguous().mT
    check(v1.grouped_mm(rows.to(dtype), turned, offsets), expected)
    check(v1.grouped_mm(rows.to(dtype).T, grad.to(dtype), offsets), expected_weight)


def adamw_inputs(dtype: torch.dtype) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 5), (7,), (), (1, 1, 4)]
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    grads = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(5)]
    return params, grads


@pytest.mark.parametrize("as_tensor", [False, True])
def test_adamw_equals_torch_bit_for_bit(as_tensor: bool) -> None:
    params, grads = adamw_inputs(torch.float32)
    references = [torch.nn.Parameter(param.clone()) for param in params]
    optimizer = torch.optim.AdamW(references, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    means, squares = ([torch.zeros_like(param) for param in params] for _ in range(2))
    for index, step_grads in enumerate(grads):
        for reference, grad in zip(references, step_grads, strict=True):
            reference.grad = grad.clone()
        optimizer.step()
        lr = torch.tensor(0.01, dtype=torch.float64) if as_tensor else 0.01
        v1.adamw_(params, step_grads, means, squares, torch.tensor(index + 1), lr, 0.9, 0.95, 1e-8, 0.1)
        assert all(torch.equal(a, b) for a, b in zip(params, references, strict=True))


def test_adamw_of_mixed_dtypes() -> None:
    """bf16 gradients for fp32 parameters: the update is that of the same gradients in fp32."""
    params, grads = adamw_inputs(torch.float32)
    references = [torch.nn.Parameter(param.double()) for param in params]
    optimizer = torch.optim.AdamW(references, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    means, squares = ([torch.zeros_like(param) for param in params] for _ in range(2))
    for index, step_grads in enumerate(grads):
        rough = [grad.bfloat16() for grad in step_grads]
        for reference, grad in zip(references, rough, strict=True):
            reference.grad = grad.double()
        optimizer.step()
        v1.adamw_(params, rough, means, squares, torch.tensor(index + 1.0), torch.tensor(0.01), 0.9, 0.95, 1e-8, 0.1)
    for param, reference in zip(params, references, strict=True):
        torch.testing.assert_close(param.double(), reference.data, rtol=1e-5, atol=1e-6)


def test_adamw_scales_gradients() -> None:
    params, grads = adamw_inputs(torch.float32)
    expected = [param.clone() for param in params]
    means, squares, wanted_means, wanted_squares = ([torch.zeros_like(param) for param in params] for _ in range(4))
    for index, step_grads in enumerate(grads):
        scale, step = torch.tensor(0.3 + index), torch.tensor(index + 1)
        scaled = [grad * scale for grad in step_grads]
        v1.adamw_(expected, scaled, wanted_means, wanted_squares, step, 0.01, 0.9, 0.95, 1e-8, 0.1)
        v1.adamw_(params, step_grads, means, squares, step, 0.01, 0.9, 0.95, 1e-8, 0.1, scale=scale)
    found, wanted = [params, means, squares], [expected, wanted_means, wanted_squares]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_adam_adds_the_decay_to_the_gradient() -> None:
    params, grads = adamw_inputs(torch.float64)
    references = [torch.nn.Parameter(param.clone()) for param in params]
    optimizer = torch.optim.Adam(references, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    means, squares = ([torch.zeros_like(param) for param in params] for _ in range(2))
    for index, step_grads in enumerate(grads):
        for reference, grad in zip(references, step_grads, strict=True):
            reference.grad = grad.double() * 0.5
        optimizer.step()
        lr, half = torch.tensor(0.01, dtype=torch.float64), torch.tensor(0.5)
        step = torch.tensor(index + 1)
        v1.adamw_(params, step_grads, means, squares, step, lr, 0.9, 0.95, 1e-8, 0.1, scale=half, decoupled=False)
    torch.testing.assert_close(params, [reference.data for reference in references], rtol=1e-10, atol=1e-12)


def test_an_update_that_is_not_finite_changes_nothing() -> None:
    params, grads = adamw_inputs(torch.float32)
    means, squares = ([torch.rand_like(param) for param in params] for _ in range(2))
    before = [[tensor.clone() for tensor in tensors] for tensors in (params, means, squares)]
    grads[0][0].view(-1)[0] = torch.inf
    finite = v1.all_finite([torch.tensor(1.0), torch.tensor(torch.nan)])
    for decoupled in (True, False):
        scale = torch.tensor(torch.nan)
        v1.adamw_(
            params, grads[0], means, squares, torch.tensor(0), torch.tensor(0.1), 0.9, 0.95, 1e-8, 0.1, scale=scale,
            decoupled=decoupled, finite=finite,
        )  # fmt: skip
    for tensors, old in zip((params, means, squares), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors, old, strict=True))


def test_adamw_of_low_precision_parameters_and_of_none() -> None:
    params, grads = adamw_inputs(torch.bfloat16)
    before = [param.clone() for param in params]
    means, squares = ([torch.zeros(param.shape) for param in params] for _ in range(2))
    v1.adamw_(params, grads[0], means, squares, torch.tensor(1), 0.5, 0.9, 0.95, 1e-8, 0.0)
    for param, old, grad in zip(params, before, grads[0], strict=True):
        torch.testing.assert_close(param, (old.float() - 0.5 * grad.sign()).bfloat16(), rtol=1e-2, atol=1e-2)
    v1.adamw_([], [], [], [], torch.tensor(1), 0.5, 0.9, 0.95, 1e-8, 0.0)


def test_parts_are_added_to_totals_of_any_dtype() -> None:
    totals = [torch.ones(2, 3), torch.ones((), dtype=torch.float64), torch.ones(4, dtype=torch.int64)]
    parts = [torch.full((2, 3), 2**-9, dtype=torch.bfloat16), torch.tensor(0.1), torch.arange(4)]
    v1.accumulate_each_(totals, parts)
    assert torch.equal(totals[0], torch.full((2, 3), 1 + 2**-9)), "the sum is that of the total's dtype"
    assert totals[1].item() == 1 + parts[1].item() and totals[2].tolist() == [1, 2, 3, 4]


TWO_PROCESSES = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from mgraph.errors import DataError, MgraphError
from mgraph.runtime import collectives, mesh, v1
from mgraph.runtime.export import Weights, export_weights
from mgraph.runtime.package import StateSpec
from mgraph.runtime.shards import Split
from mgraph.runtime.state import create_state, whole_tensor
from mgraph.runtime.weights import load_weights

# What every rank has, in the order of ranks: awkward shapes, dims and dtypes, in one call.
SHAPES = [(6, 3, 2), (4, 1), (2,), (8, 5), (2, 0, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.int64]
EVERYWHERE = [
    [torch.randn(shape, generator=torch.Generator().manual_seed(7 * rank)).mul(9).to(dtype)
     for shape, dtype in zip(SHAPES, DTYPES)]
    for rank in range(2)
]


def same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        assert one.dtype == other.dtype and torch.equal(one, other), (one, other)


def check_parts(rank):
    mine = EVERYWHERE[rank]
    before = [tensor.clone() for tensor in mine]
    pairs = list(zip(*EVERYWHERE))
    same(v1.all_gather(mine, "dp", 0), [torch.cat(pair, 0) for pair in pairs])
    turned = [tensor.t() for tensor in (mine[1], mine[3])]
    pending = v1.all_gather_start(turned, "dp", 1)
    (alone,) = v1.all_gather([mine[0]], "dp", 2)  # another one meanwhile
    same(v1.wait(pending), [torch.cat([a.t(), b.t()], 1) for a, b in (pairs[1], pairs[3])])
    assert pending.messages == [] and pending.results == {}
    same([alone], [torch.cat(pairs[0], 2)])
    # Those that are together are one tensor to `joined`.
    rows = [torch.arange(8.0).reshape(2, 4) + 10 * rank, torch.arange(12.0).reshape(3, 4) - rank]
    wholes = v1.wait(v1.all_gather_start(rows, "dp", 0, together=True))
    first, second = rows[0] - 10 * rank, rows[1] + rank
    same(wholes, [torch.cat([first, first + 10]), torch.cat([second, second - 1])])
    same([v1.joined(*wholes)], [torch.cat(wholes)])
    # One contiguous tensor along dim 0 is used where it was received.
    (gathered,) = v1.all_gather([mine[3]], "dp", 0)
    assert gathered.is_contiguous() and gathered.untyped_storage().nbytes() == 2 * mine[3].untyped_storage().nbytes()

    sums = [(a + b).chunk(2)[rank] for a, b in pairs]
    same(v1.reduce_scatter(mine, "dp", 0), sums)
    (turned,) = v1.reduce_scatter([mine[3].t()], "dp", 1)
    same([turned], [sums[3].t()])
    same(v1.reduce_scatter([mine[4]], "dp", 0, "max"), [torch.maximum(*pairs[4]).chunk(2)[rank]])
    wide = [(a.float() + b.float()).chunk(2)[rank] for a, b in pairs[:-1]] + sums[-1:]
    pending = v1.reduce_scatter_start(mine, "dp", 0, wide=True)
    same(v1.wait(pending), wide)
    assert any(not torch.equal(a, b.float()) for a, b in zip(wide, sums)), "narrow sums are rounded"
    middle = torch.arange(24).view(2, 4, 3)
    same(v1.reduce_scatter([middle, mine[3].view(2, 10, 2)], "dp", 1), [
        2 * middle.chunk(2, 1)[rank],
        (pairs[3][0] + pairs[3][1]).view(2, 10, 2).chunk(2, 1)[rank],
    ])
    same(mine, before)
    try:
        v1.reduce_scatter([torch.ones(3)], "dp", 0)
    except AssertionError as error:
        assert "does not divide" in str(error)
    else:
        raise AssertionError("unequal parts were sent")


def check_rows(rank):
    # Equal parts, and rows by sizes: of the first rank 4 and 2 go, of the second 1 and 3, which come back.
    mine = EVERYWHERE[rank]
    pairs = list(zip(*EVERYWHERE))
    wanted = [torch.cat([tensor.chunk(2)[rank] for tensor in pair]) for pair in pairs]
    same(v1.all_to_all(mine, "dp"), wanted)
    counts = [[4, 2], [1, 3]]
    sizes = torch.tensor([counts[rank], [row[rank] for row in counts]])
    rows = [
        [torch.arange(3.0 * sum(row)).view(-1, 3) + 100 * index,
         torch.arange(sum(row)) - 100 * index,
         torch.arange(2.0 * sum(row)).view(-1, 1, 2) - index]
        for index, row in enumerate(counts)
    ]
    before = [tensor.clone() for tensor in rows[rank]]
    sent = v1.all_to_all(rows[rank], "dp", sizes)
    same(sent, [torch.cat([a.split(counts[0])[rank], b.split(counts[1])[rank]]) for a, b in zip(*rows)])
    same(v1.wait(v1.all_to_all_start(sent, "dp", sizes, back=True)), rows[rank])
    same(rows[rank], before)


def check_shares(here, directory):
    # Every rank has parts of the state: what is exported is the whole, and a failure of one rank is raised on all.
    halved, packed, padded = (Split("dp", 1),), (Split("dp", 0, 1),), (Split("dp", 0),)
    make = lambda name, shape, **more: StateSpec(
        name, "param", torch.float32, shape, True, True, (("normal_", 0.0, 1.0),), name, **more
    )
    specs = [make("packed", (8, 3), placement=packed, factors=((0, (2, 4)),)), make("padded", (5,), placement=padded)]
    specs += [make("halved", (2, 4), placement=halved), make("whole", (3,))]
    layout = [
        {"tensor": f"part.{i}", "shape": [3, 4], "parts": [
            {"state": "packed", "shape": [3, 4], "from": [12 * i, 1, 3], "to": [0, 4, 1]}
        ]}
        for i in range(2)
    ]
    alone, mine = create_state(specs, 1, "cpu"), create_state(specs, 1, "cpu", mesh=here)
    for spec in specs:
        found = whole_tensor(spec, mine[spec.name], here)
        assert torch.equal(found, alone[spec.name]), spec.name
        assert spec.axes(here) == (() if spec.name == "whole" else ("dp",))
    weights = Weights(mine, specs, layout, mesh=here)
    export_weights(directory / "out", weights, directory / "none", 60)
    here.largest(0)  # all wait for the one that writes
    again = create_state(specs, 1, "cpu", [spec.name for spec in specs], here)
    load_weights(directory / "out", again, specs, layout, mesh=here)
    assert all(torch.equal(again[name], mine[name]) for name in mine)
    files = {n: t for file in (directory / "out").glob("*.safetensors") for n, t in load_file(file).items()}
    assert torch.equal(files["part.1"], alone["packed"][4:].t()) and torch.equal(files["padded"], alone["padded"])
    try:
        here.together(lambda: export_weights(directory / "out", weights, directory / "none"))
    except MgraphError as error:
        assert "there is something already" in error.message
    else:
        raise AssertionError("something was written over")


def check():
    here = mesh.start(lambda: (torch.device("cpu"), mesh.bind_axes({"dp": "*", "tp": 1}, 2), {"what": "same"}))
    rank = here.rank
    assert (here.size("dp"), here.size("tp"), here.size("none"), here.index("dp")) == (2, 1, 1, rank)
    base = torch.arange(6.0).view(2, 3)
    turned = (base + rank).t()
    whole = torch.tensor([rank, 5])
    half = torch.full((3,), 1.0 + rank, dtype=torch.bfloat16)
    alone = torch.full((2, 2), float(rank), dtype=torch.float64)
    out = v1.all_reduce([turned, base[:, 0], whole, half, alone], "dp")
    assert out[0] is turned
    assert torch.equal(turned, (2 * torch.arange(6.0).view(2, 3) + 1).t())
    assert base.tolist() == [[0.0, 1.0, 2.0], [6.0, 4.0, 5.0]]
    assert whole.tolist() == [1, 10] and half.tolist() == [3.0] * 3 and alone.tolist() == [[1.0, 1.0]] * 2
    pending = v1.all_reduce_start([torch.tensor([rank, -rank])], "dp", op="max")
    assert v1.wait(pending)[0].tolist() == [1, 0]
    assert v1.all_reduce([torch.tensor([rank + 3])], "dp", op="min")[0].item() == 3
    check_parts(rank)
    check_rows(rank)
    # As groups of messages, which is how GPUs send them.
    collectives._sent_as_they_are = lambda tensors: len(tensors) > 1 and all(t.is_contiguous() for t in tensors)
    check_parts(rank)
    summed = v1.all_reduce([torch.full((3,), rank + 1.0), torch.full((2, 2), 5.0 * rank)], "dp")
    same(summed, [torch.full((3,), 3.0), torch.full((2, 2), 5.0)])
    check_shares(here, Path(sys.argv[1]))
    assert here.gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert here.largest(rank * 7) == 7
    assert here.together(lambda: rank) == rank

    def fail():
        if rank == 1:
            raise DataError("only here", hint="none")

    try:
        here.together(fail)
    except DataError as error:
        assert error.message == "only here"
    else:
        raise AssertionError("rank 0 went on")
    here.agree({"what": "same"})
    try:
        here.agree({"what": str(rank)})
    except MgraphError as error:
        assert "rank 1: what is 1, not 0" in error.message
    else:
        raise AssertionError("a difference was not seen")
    return rank

# Nothing of the mesh may outlive `stop`: a gloo thread that lives on while the interpreter ends aborts the process.
rank = check()
mesh.stop()
print("checked", rank)
"""


def test_collectives_on_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(script),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("checked") == 2  # the lines of two processes may run into each other
