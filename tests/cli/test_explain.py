"""`mgraph explain`: history, origin, kernel, and why a fusion did not fire."""

from __future__ import annotations

import re
from pathlib import Path

from .conftest import Mgraph


def test_overview(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("explain", compiled).out
    assert text.startswith("dense-tiny, for train: entries microbatch, ")
    assert "kernel rms_norm_fwd_0: no binary; the torch twin runs" in text
    assert re.search(r"^  6 raise-norm: .* s, changed the graph, rms_norm 3$", text, re.MULTILINE)
    assert re.search(r"^ 15 recompute: .* s, no change$", text, re.MULTILINE)


def test_node(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("explain", compiled, "layer.fwd:rms_norm_1").out
    assert text.startswith("@layer.fwd %rms_norm_1\n")
    assert "from     models/norm.py:30, module layers.*.ffn_norm" in text
    assert "made by  raise-norm" in text
    assert "6 raise-norm: matched rms_norm at layers.*.ffn_norm (models/norm.py:30)" in text
    assert "14 autodiff: added it" in text
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


def test_op_module_and_limit(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("explain", compiled, "rms_norm_grad").out
    assert text.count("@layer.bwd %") == 2
    assert "layers.*.ffn_norm" in mgraph("explain", compiled, "layers.[*].ffn_norm").out
    assert "more nodes (--limit)" in mgraph("explain", compiled, "aten.*", "--limit", "2").out


def test_pass(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("explain", compiled, "raise-norm").out
    assert "at @layer %mul_2: rms_norm at layers.*.attn_norm (models/norm.py:30)" in text
    assert "no near misses" in text


def test_why_a_fusion_did_not_fire(mgraph: Mgraph, near: Path) -> None:
    by_pattern = mgraph("explain", near, "rms_norm").out
    assert "raise-norm: rms_norm did not apply at @forward %" in by_pattern
    by_pass = mgraph("explain", near, "raise-norm").out
    assert by_pattern.strip().splitlines()[-1] in by_pass
    node = re.findall(r"did not apply at @forward %(\w+)", by_pattern)[0]
    assert by_pattern.strip().splitlines()[-1] in mgraph("explain", near, node).out


def test_verified_passes_say_so(mgraph: Mgraph, near: Path, tmp_path: Path) -> None:
    model = f"{near.parent}/near.py:build"
    run = mgraph("compile", model, "--arch", "none", "--verify", "-o", tmp_path / "out")
    assert run.code == 0
    assert "every pass on the reduced twin: " in run.err
    lines = mgraph("explain", tmp_path / "out").out.splitlines()
    passes = [line for line in lines if re.match(r" *\d+ ", line)]
    assert len(passes) == 20 and all(", verified" in line for line in passes)


def test_unknown_name(mgraph: Mgraph, compiled: Path) -> None:
    run = mgraph("explain", compiled, "rms_nrm")
    assert (run.code, run.out) == (2, "")
    assert "did you mean 'rms_norm'?" in run.err
