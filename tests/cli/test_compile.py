"""`mgraph compile`: what it writes and says, and every way to use it wrongly."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from mgraph.cli.compile import unfit_lines

from .conftest import Mgraph

THREE_OPS = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + torch.nonzero(tokens).sum()
        x = x + torch.unique(tokens).sum()
        x = x + torch.masked_select(x, x > 0).sum()
        return x @ self.embed.weight.T


def build():
    return Model()
"""
CONTROL_FLOW = """
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)

    def forward(self, tokens):
        x = self.embed(tokens)
        if x.sum() > 0:
            x = x * 2
        return x @ self.embed.weight.T


def build():
    return Model()
"""


def test_writes_a_package_and_reports_stages(mgraph: Mgraph, tmp_path: Path) -> None:
    target = tmp_path / "out"
    run = mgraph("compile", "dense-tiny", "--arch", "none", "--max-norm", "0.5", "-o", target)
    assert (run.code, run.out) == (0, f"{target}\n")
    manifest = json.loads((target / "manifest.json").read_text())
    assert manifest["fingerprint"]["options"]["max_norm"] == 0.5
    assert "adamw{beta2=0.95,max_norm=0.5}" in manifest["pipeline"]
    stages = [line.split()[0] for line in run.err.splitlines()]
    assert [s for s in stages if s in ("capture", "autodiff", "in-place", "emit")] == [
        "capture",
        "emit",
        "capture",
        "autodiff",
        "in-place",
        "emit",
    ]
    times = json.loads((target / "graphs" / "compilation.json").read_text())
    assert set(times["seconds"]) == {"capture", "passes"}
    assert times["capture"]["nodes"] > 50
    shares = [int(line.split()[3].rstrip("%")) for line in run.err.splitlines() if line.startswith("  ")]
    assert 90 <= sum(shares) <= 110


def test_recipe_file_and_flags(mgraph: Mgraph, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: dense-tiny\nfor: train\narch: none\neps: 1e-6\nweight-decay: 0\noutput: {tmp_path}/a\n")
    assert mgraph("compile", "-c", recipe, "--eps", "1e-7").out == f"{tmp_path}/a\n"
    options = json.loads((tmp_path / "a" / "manifest.json").read_text())["fingerprint"]["options"]
    assert (options["eps"], options["weight_decay"], options["purpose"]) == (1e-7, 0.0, "train")


def test_disabled_pass_is_left_out(mgraph: Mgraph, tmp_path: Path) -> None:
    assert mgraph("compile", "dense-tiny", "--arch", "none", "--disable", "raise-*", "-o", tmp_path / "a").code == 0
    pipeline = json.loads((tmp_path / "a" / "manifest.json").read_text())["pipeline"]
    assert "raise-" not in pipeline and "autodiff" in pipeline


def test_flags_of_several_parts_may_be_given_again(mgraph: Mgraph, tmp_path: Path) -> None:
    given = ("--disable", "raise-norm", "--disable", "raise-rope,raise-glu", "--mesh", "dp=2", "--mesh", "tp=2")
    assert mgraph("compile", "dense-tiny", "--arch", "none", *given, "-o", tmp_path / "a").code == 0
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    pipeline, options = manifest["pipeline"], manifest["fingerprint"]["options"]
    assert not [name for name in ("raise-norm", "raise-rope", "raise-glu") if name in pipeline]
    assert "raise-attention" in pipeline and options["mesh"] == "dp=2,tp=2"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compile"], ["no model is named", "dense-tiny"]),
        (["compile", "dense-tinny"], ["unknown model 'dense-tinny'", "did you mean 'dense-tiny'?"]),
        (["compile", "nowhere.py:build"], ["no file 'nowhere.py'"]),
        (["compile", "hf:nowhere/config.json"], ["cannot read", "No such file"]),
        (["compile", "dense-tiny", "--precison", "bf16"], ["--precison", "did you mean '--precision'?"]),
        (["compile", "dense-tiny", "--precision", "bf61"], ["'bf61'", "--precision", "did you mean 'bf16'?"]),
        (["compile", "dense-tiny", "--for", "trian"], ["'trian'", "--for", "did you mean 'train'?"]),
        (["compile", "dense-tiny", "--eps", "small"], ["--eps", " a valid "]),
        (["compile", "dense-tiny", "--beta1", "1.5"], ["beta1 is 1.5", "from 0 to 0.999999"]),
        (
            ["compile", "dense-tiny", "--mesh", "tp=3"],
            ["tp=3 does not divide the 256 entries of the vocabulary", "models/decoder.py"],
        ),
        (["compile", "dense-tiny", "--mesh", "pp=2"], ["'pp' is not supported", "dp", "tp"]),
        (["compile", "dense-tiny", "--mesh", "fsdp=2", "--for", "serve"], ["fsdp is for training", "--mesh"]),
        (["compile", "dense-tiny", "--mesh", "dp=0"], ["dp=0", "--mesh"]),
        (["compile", "dense-tiny", "--disable", "raise-nrom"], ["raise-nrom", "did you mean 'raise-norm'?"]),
        (["compile", "dense-tiny", "--disable", "autodiff"], ["requires"]),
        (["compile", "dense-tiny", "--arch", "sm90", "-o", "{}/a"], ["sm90", "--arch"]),
        (["compile", "dense-tiny", "extra"], ["extra"]),
        (["compile", "-c", "{}/none.yaml"], ["none.yaml", "No such file"]),
        (["cmpile"], ["no verb 'cmpile'", "did you mean 'compile'?"]),
    ],
    ids=lambda value: " ".join(value) if value[0] in ("compile", "cmpile") else "",
)
def test_wrong_usage(mgraph: Mgraph, tmp_path: Path, arguments: list[str], said: list[str]) -> None:
    run = mgraph(*(a.format(tmp_path) for a in arguments))
    assert (run.code, run.out) == (2, "")
    assert all(text in run.err for text in said), run.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: [", "not YAML"),
        ("- model", "a mapping of fields"),
        ("model: dense-tiny\nprecison: bf16", "did you mean 'precision'?"),
        ("model: dense-tiny\nprecision: bf61", "field precision"),
        ("model: dense-tiny\neps: tiny", "give a number"),
        ("model: dense-tiny\nverify: 1", "give true or false"),
    ],
)
def test_wrong_recipe(mgraph: Mgraph, tmp_path: Path, text: str, said: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    run = mgraph("compile", "-c", recipe, "-o", tmp_path / "out")
    assert run.code == 2
    assert said in run.err and str(recipe) in run.err
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"]


def test_unsupported_ops_are_named_together(mgraph: Mgraph, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(THREE_OPS)
    run = mgraph("compile", f"{tmp_path}/model.py:build", "-o", tmp_path / "out")
    assert run.code == 2
    for number, line in enumerate(THREE_OPS.splitlines(), 1):
        if "nonzero" in line or "unique" in line or "masked_select" in line:
            assert f"model.py:{number}" in run.err, run.err
    assert not (tmp_path / "out").exists()


def test_control_flow_names_its_line(mgraph: Mgraph, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(CONTROL_FLOW)
    run = mgraph("compile", f"{tmp_path}/model.py:build", "-o", tmp_path / "out")
    line = next(n for n, text in enumerate(CONTROL_FLOW.splitlines(), 1) if "if x.sum()" in text)
    assert run.code == 2
    assert f"model.py:{line}" in run.err
    assert not (tmp_path / "out").exists()


def test_full_disk_leaves_nothing(mgraph: Mgraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Path.write_bytes

    def write_bytes(path: Path, data: bytes) -> int:
        if path.name.startswith("010_"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    run = mgraph("compile", "dense-tiny", "--arch", "none", "-o", tmp_path / "out")
    assert run.code == 2
    assert "the disk is full" in run.err
    assert not list(tmp_path.iterdir())


def test_edited_package_is_refused_and_kept(mgraph: Mgraph, package: Path) -> None:
    step = package / "step.py"
    step.write_text(step.read_text() + "# mine\n")
    command = ("compile", "dense-tiny", "--arch", "none", "-o", package)
    run = mgraph(*command)
    assert run.code == 2
    assert "step.py" in run.err and "--force" in run.err
    assert step.read_text().endswith("# mine\n")
    assert mgraph(*command, "--force").code == 0
    assert not step.read_text().endswith("# mine\n")
    assert (package / "step.py.edited").read_text().endswith("# mine\n")


def test_other_directory_is_not_overwritten(mgraph: Mgraph, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert mgraph("compile", "dense-tiny", "--arch", "none", "-o", tmp_path).code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_package_of_another_model_is_replaced_with_a_word(mgraph: Mgraph, tmp_path: Path) -> None:
    target = str(tmp_path / "package")
    first = mgraph("compile", "dense-tiny", "--arch", "none", "-o", target)
    again = mgraph("compile", "dense-tiny", "--arch", "none", "-o", target)
    served = mgraph("compile", "dense-tiny", "--for", "serve", "--arch", "none", "-o", target)
    assert (first.code, again.code, served.code) == (0, 0, 0)
    assert "takes the place" not in first.err + again.err
    assert "note: takes the place of the package of dense-tiny --for train\n" in served.err


def test_kernels_that_an_architecture_has_no_room_for_are_named(tmp_path: Path) -> None:
    def kernel(name: str, *binaries: tuple[str, int]) -> dict[str, Any]:
        return {"name": name, "launches": [{"binaries": [{"arch": a, "shared": s} for a, s in binaries]}] * 2}

    kernels = [kernel("attend", ("sm_90a", 200_000), ("sm_120a", 110_000)), kernel("norm", ("sm_120a", 0))]
    (tmp_path / "manifest.json").write_text(json.dumps({"kernels": kernels}), encoding="utf-8")
    assert unfit_lines(tmp_path) == [
        "note: attend: not enough shared memory on sm_120a, their twins run there, op by op"
    ]
