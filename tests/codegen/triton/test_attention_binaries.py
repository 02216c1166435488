"""What Triton makes of attention and its gradient for sm_90a: Hopper's products, copies ahead, enough registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mgraph.codegen.triton import KernelSpec, attention, attention_grad
from mgraph.codegen.triton.attention_problem import Attention
from tests.codegen.triton.ptx_of import ptx_of

SINKS = Attention("bf16", 64, 64, 0.125, True, 128, more=(("sinks", "bf16"),), share=4)
WINDOW = Attention("bf16", 128, 128, 0.088, True, 1024, share=4)
SOFTCAP = Attention("bf16", 128, 128, 0.088, True, softcap=50.0, share=4)
DOCUMENTS = Attention("bf16", 128, 128, 0.088, True, more=(("segments", "i64"),), share=4)


def spilled(ptx: str, directory: Path) -> int:
    """Bytes that a thread keeps in memory for lack of registers."""
    from triton import knobs

    (directory / "kernel.ptx").write_text(ptx)
    done = subprocess.run(
        [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"(\d+) bytes spill stores", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        pytest.param(attention.forward("sinks", SINKS), 0, id="sinks"),
        pytest.param(attention_grad.backward("sinks_grad", SINKS), 0, id="sinks-grad", marks=pytest.mark.full),
        pytest.param(attention.forward("window", WINDOW), 64, id="window", marks=pytest.mark.full),
        pytest.param(attention_grad.backward("window_grad", WINDOW), 64, id="window-grad", marks=pytest.mark.full),
        pytest.param(attention.forward("cap", SOFTCAP), 64, id="softcap", marks=pytest.mark.full),
        pytest.param(attention_grad.backward("cap_grad", SOFTCAP), 256, id="softcap-grad", marks=pytest.mark.full),
        pytest.param(attention.forward("documents", DOCUMENTS), 64, id="documents", marks=pytest.mark.full),
        pytest.param(attention_grad.backward("doc_grad", DOCUMENTS), 64, id="documents-grad", marks=pytest.mark.full),
    ],
)
def test_binaries(spec: KernelSpec, most: int, tmp_path: Path) -> None:
    """Aligned kernels with products use wgmma, copy tiles ahead (by descriptors but for dq), and spill a few bytes."""
    for function, text in ptx_of([spec], tmp_path).items():
        assert "mma.sync" not in text
        if function.startswith((f"{spec.name}_queries", f"{spec.name}_keys")) or function == f"{spec.name}.aligned":
            assert "wgmma.mma_async" in text
        if function.endswith(".aligned"):
            assert spilled(text, tmp_path) <= most, function
            copied = "cp.async" if function.startswith(f"{spec.name}_queries") else "cp.async.bulk.tensor"
            assert "wgmma" not in text or copied in text
