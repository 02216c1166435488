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


def test_all_reduce_alone_changes_nothing() -> None:
    tensor = torch.randn(3)
    before = tensor.clone()
    assert v1.all_reduce([tensor], "dp")[0] is tensor
    assert torch.equal(tensor, before)


TWO_PROCESSES = """
import torch
from mgraph.errors import DataError, MgraphError
from mgraph.runtime import mesh, v1


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
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("checked") == 2  # the lines of two processes may run into each other
