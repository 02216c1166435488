"""`mgraph explain`: history, origin, kernel, and why a fusion did not fire."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import Mgraph


def test_overview(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("explain", compiled).out
    assert text.startswith("dense-tiny, for train: entries microbatch, ")
    assert "kernel rms_norm_fwd_0: no binary; the torch twin runs" in text
    assert re.search(r"^  6 raise-norm: .* s, changed the graph, rms_norm 3$", text, re.MULTILINE)
    assert re.search(r"^ 16 recompute: .* s, no change$", text, re.MULTILINE)


def test_a_pass_that_did_not_run(mgraph: Mgraph, compiled: Path) -> None:
    run = mgraph("explain", compiled, "offload")
    assert run.code == 0 and run.out.startswith("the pass offload is none of the package's")


def test_node(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("explain", compiled, "layer.fwd:rms_norm_1").out
    assert text.startswith("@layer.fwd %rms_norm_1\n")
    assert "from     models/norm.py:30, module layers.*.ffn_norm" in text
    assert "made by  raise-norm" in text
    assert "6 raise-norm: matched rms_norm at layers.*.ffn_norm (models/norm.py:30)" in text
    assert re.search(
        r"6 raise-norm: in place of %\w+ aten.pow.Tensor_Scalar, .*, %\w+ aten.mul.Tensor$", text, re.MULTILINE
    )
    assert "15 autodiff: copied it from @layer, with its function" in text
    assert "18 data-parallel: changed its types f32[B, S, 64], f32[B, S, 1] -> f32[B, S, 64]{dp=S(0)}" in text
    # 5 operations for each of 64 features; x and y of 64 f32 each a token, rstd of one, and the weight.
    assert "cost     320*B*S flops, 516*B*S+256 bytes" in text
    assert re.search(r"emitted  step.py:\d+  rms_norm\w*, rstd\w* = K.rms_norm_fwd_0\(", text)
    assert "kernel   rms_norm_fwd_0: no binary" in text


def test_emitted_line_is_the_one_in_the_file(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("explain", compiled, "@layer.fwd:%glu").out
    number, line = re.findall(r"emitted  step.py:(\d+)  (.*)", text)[0]
    assert (compiled / "step.py").read_text().splitlines()[int(number) - 1].strip() == line


def test_node_that_is_gone(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("explain", compiled, "layer:rsqrt").out
    assert "gone later" in text
    assert "6 raise-norm: removed it" in text
    assert "1 outline: moved it here from @forward" in text


def test_op_and_limit(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("explain", compiled, "rms_norm_grad").out
    assert text.count("@layer.bwd %") == 2
    assert "more nodes (--limit)" in mgraph("explain", compiled, "aten.*", "--limit", "2").out


def test_call(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("explain", compiled, "call").out
    assert "cost     that of @layer.fwd" in text
    assert re.search(r"1 outline: matched layers.\d calls layer", text)
    assert re.search(r"emitted  step.py:\d+  .*layer_fwd\(", text)


def test_layer(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("explain", compiled, "layers.1").out
    assert text.startswith("module layers.1, one of 2 layers.*\n")
    assert text.count("module ") == 1
    state = mgraph("dump", compiled).out
    assert (
        re.search(r"holds     [\d,]+ numbers in attn_norm.weight f32\[64\], ", text)
        and "@layers.1.attn_norm.weight" in state
    )
    assert re.search(r"@layer.fwd, forward: .*rms_norm 2, .*attention 1", text)
    assert re.search(r"@layer.bwd, backward: .*attention_grad 1", text)
    assert re.search(r"called  as %\w+ by @microbatch, step.py:\d+", text)
    assert "matched   6 raise-norm: rms_norm at layers.*.ffn_norm (models/norm.py:30)" in text
    number = int(re.findall(r"called  as %\w+ by @microbatch, step.py:(\d+)", text)[0])
    assert "layer_fwd(" in (compiled / "step.py").read_text().splitlines()[number - 1]


def test_modules_by_glob_and_by_their_ends(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("explain", compiled, "layers.*.attn").out
    assert text.startswith("module layers.*.attn: 2 of them, layers.0.attn … layers.1.attn\n")
    assert "called  2 times by @microbatch" in text and "raise-glu" not in text
    assert mgraph("explain", compiled, "*.attn").out == text == mgraph("explain", compiled, "attn").out
    one = mgraph("explain", compiled, "layers.0.attn").out
    assert one.startswith("module layers.0.attn, one of 2 layers.*.attn\n") and "as %" in one
    assert "more modules (--limit)" in mgraph("explain", compiled, "layers.*.*", "--limit", "2").out


def test_pass(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("explain", compiled, "raise-norm").out
    assert "at @layer %mul_2: rms_norm at layers.*.attn_norm (models/norm.py:30)" in text
    assert "no near misses" in text


def test_why_a_fusion_did_not_fire(mgraph: Mgraph, near: Path) -> None:
    by_pattern = mgraph("explain", near, "rms_norm").out
    assert "raise-norm: rms_norm did not apply at @forward %" in by_pattern
    (line,) = [x for x in by_pattern.splitlines() if "did not apply" in x]
    assert "`rsqrt` has 2 users, expected 1" in line and "near.py:16" in line
    assert line in mgraph("explain", near, "raise-norm").out and line in mgraph("explain", near, "6").out
    node = re.findall(r"did not apply at @forward %(\w+)", by_pattern)[0]
    assert f"  {line}\n" in mgraph("explain", near, node).out


def test_verified_passes_say_so(mgraph: Mgraph, near: Path, tmp_path: Path) -> None:
    model = f"{near.parent}/near.py:build"
    run = mgraph("compile", model, "--arch", "none", "--verify", "-o", tmp_path / "out")
    assert run.code == 0
    assert "every pass on the reduced twin: " in run.err
    lines = mgraph("explain", tmp_path / "out").out.splitlines()
    passes = [line for line in lines if re.match(r" *\d+ ", line)]
    assert len(passes) == 22 and all(", verified" in line for line in passes)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rms_nrm", "rms_norm"),
        ("raise-rop", "raise-rope"),
        ("layers.7", "layers.1"),
        ("layer.fwd:attenton", "attention"),
    ],
)
def test_unknown_name(mgraph: Mgraph, compiled: Path, name: str, meant: str) -> None:
    run = mgraph("explain", compiled, name)
    assert (run.code, run.out) == (2, "")
    assert f"did you mean '{meant}'?" in run.err


def test_a_pattern_that_nothing_came_near(mgraph: Mgraph, compiled: Path) -> None:
    done = mgraph("explain", compiled, "layer_norm")
    assert done.code == 0
    assert done.out == "no layer_norm in any graph of the package, and no place that was nearly one\n"
