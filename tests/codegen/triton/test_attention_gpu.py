"""Attention and its gradient on a GPU: every mask and width against float64, on 16-byte boundaries and off them.

The interpreter runs the same source, and cannot show what a compiler makes wrong of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mgraph.codegen.triton import attention, attention_grad, build_kernels
from mgraph.runtime import kernels as runtime
from tests.codegen.triton.attention_cases import DTYPES, EVERY, draw, error, gradients, heads, results

BOUND = {"bf16": 2e-2, "f16": 2e-3}


def placed(tensor: Tensor, elements: int) -> Tensor:
    """A tensor on the GPU, of several dims `elements` beyond a boundary, with the strides that it has."""
    if tensor.dim() < 3:
        return tensor.cuda()
    size = tensor.untyped_storage().nbytes() // tensor.element_size() + elements
    whole = torch.empty(size, dtype=tensor.dtype, device="cuda")
    return whole.as_strided(tensor.shape, tensor.stride(), elements).copy_(tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY)
def test_results_and_gradients(name: str, tmp_path: Path) -> None:
    problem = EVERY[name]
    specs = [attention.forward("attend", problem), attention_grad.backward("attend_grad", problem)]
    entries = build_kernels(specs, tmp_path, ["sm_90a"])
    (tmp_path / "manifest.json").write_text(json.dumps({"kernels": entries}), encoding="utf-8")
    runtime.set_device("cuda:0", strict=True)
    bound = runtime.kernels(tmp_path / "step.py")
    inputs = draw(name)
    out, lse = results(name, inputs)
    dout = heads(torch.Generator().manual_seed(3), (*out.shape,), DTYPES[problem.dtype])
    given = (dout, *inputs[:3], out.to(inputs[0].dtype), lse.float(), *inputs[3:])
    wanted = gradients(name, given)
    for elements in (0, 1):
        found: list[Tensor] = [*bound.attend(*(placed(tensor, elements) for tensor in inputs))]
        found += bound.attend_grad(*(placed(tensor, elements) for tensor in given))
        for got, want in zip(found, (out, lse, *wanted), strict=True):
            assert error(got.cpu(), want) <= BOUND[problem.dtype], (elements, got.shape)
