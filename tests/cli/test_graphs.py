"""`mgraph dump` and `mgraph diff` on a real package, and on damaged ones."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mgraph.ir.parser import parse_module
from mgraph.ir.printer import print_module

from .conftest import Mgraph


def test_text_is_the_last_graph(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("dump", compiled).out
    assert print_module(parse_module(text)) == text
    assert "microbatch" in parse_module(text).entries


def test_pass_by_name_and_number(mgraph: Mgraph, compiled: Path) -> None:
    by_name, by_number = mgraph("dump", compiled, "raise-norm"), mgraph("dump", compiled, "6")
    assert by_name.out == by_number.out
    assert "rms_norm(" in by_name.out and "rms_norm(" not in mgraph("dump", compiled, "0").out
    again = mgraph("dump", compiled, "cse")
    assert "ran more than once" in again.err


def test_one_function(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("dump", compiled, "outline", "--fn", "layer").out
    assert text.startswith("func @layer(") and text.count("func @") == 1
    assert text in mgraph("dump", compiled, "outline").out
    data = json.loads(mgraph("dump", compiled, "outline", "--fn", "layer", "--format", "json").out)
    assert len(data["nodes"]) == text.count(" by ")


def test_formats(mgraph: Mgraph, compiled: Path) -> None:
    data = json.loads(mgraph("dump", compiled, "--format", "json").out)
    assert {f["name"] for f in data["functions"]} >= {"layer.fwd", "layer.bwd", "microbatch", "finish"}
    assert mgraph("dump", compiled, "--format", "dot").out.startswith("digraph {")
    svg = ElementTree.fromstring(mgraph("dump", compiled, "--format", "svg", "--fn", "layer.fwd").out)
    assert svg.tag.endswith("svg")
    assert "layer.fwd" in mgraph("dump", compiled, "--format", "html").out


def test_diff_of_one_pass_and_of_all(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("diff", compiled, "raise-norm").out
    assert text.startswith("# 5 dce -> 6 raise-norm\n")
    assert "rms_norm: 0 -> 3 (+3)" in text
    assert mgraph("diff", compiled, "dce", "raise-norm").out.startswith("# 21 dce -> 6 raise-norm\n")
    assert mgraph("diff", compiled).out.startswith("# 0 capture -> 22 in-place\n")
    assert mgraph("diff", compiled, "recompute").out.endswith("no difference\n")
    data = json.loads(mgraph("diff", compiled, "raise-norm", "--format", "json").out)
    assert data["ops"]["rms_norm"] == [0, 3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dump", "{}", "raise-nrm"], "did you mean 'raise-norm'?"),
        (["dump", "{}", "--fn", "layer.fw"], "did you mean 'layer.fwd'?"),
        (["dump", "{}", "--format", "sgv"], "did you mean 'svg'?"),
        (["dump", "{}", "--format", "svg"], "svg draws one function"),
        (["diff", "{}", "cse", "autodif"], "did you mean 'autodiff'?"),
        (["diff", "{}", "--format", "html"], "one of json, text"),
        (["diff", "{}", "--limit", "0"], "--limit"),
        (["dump"], "PKG"),
        (["dump", "{}/nowhere"], "mgraph compile"),
        (["diff", "{}/nowhere"], "mgraph compile"),
    ],
)
def test_wrong_usage(mgraph: Mgraph, compiled: Path, arguments: list[str], said: str) -> None:
    run = mgraph(*(a.format(compiled) for a in arguments))
    assert (run.code, run.out) == (2, "")
    assert said in run.err


@pytest.mark.parametrize("verb", ["dump", "diff", "explain"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("no manifest", "manifest.json, written last, is missing"),
        ("half a manifest", "manifest.json"),
        ("empty manifest", "the manifest lacks schema"),
        ("other schema", "schema 7"),
        ("other form", "'providers' of the manifest is no list of tables"),
        ("other launches", "kernel k of the manifest has launches or binaries that are none"),
        ("no launches", "kernel k of the manifest has launches or binaries that are none"),
        ("other name", "a kernel of the manifest is called 3, which is no name"),
        ("other lines", "the lines of finish in the manifest are no table of nodes"),
        ("other arch", "kernel k has a binary for 'gfx90a'"),
        ("no graphs", "lacks graphs"),
        ("not gzip", "022_in-place.mg.gz"),
        ("not a graph", "022_in-place.mg.gz"),
        ("missing graph", "lacks graphs"),
    ],
)
def test_damaged_package(mgraph: Mgraph, package: Path, verb: str, damage: str, said: str) -> None:
    manifest, graph = package / "manifest.json", package / "graphs" / "022_in-place.mg.gz"
    text = manifest.read_text()
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "half a manifest":
        manifest.write_text(text[: len(text) // 2])
    elif damage == "empty manifest":
        manifest.write_text("{}")
    elif damage == "other schema":
        manifest.write_text(json.dumps({**json.loads(text), "schema": 7}))
    elif damage == "other form":
        manifest.write_text(json.dumps({**json.loads(text), "providers": None}))
    elif damage == "other launches":
        manifest.write_text(json.dumps({**json.loads(text), "kernels": [{"name": "k", "launches": [None]}]}))
    elif damage in ("no launches", "other name"):
        kernel = {"name": "k"} if damage == "no launches" else {"name": 3, "launches": []}
        manifest.write_text(json.dumps({**json.loads(text), "kernels": [kernel]}))
    elif damage == "other lines":
        manifest.write_text(json.dumps({**json.loads(text), "lines": {"finish": {"441": {}}}}))
    elif damage == "other arch":
        binaries = [{"binaries": [{"arch": "gfx90a"}]}]
        manifest.write_text(json.dumps({**json.loads(text), "kernels": [{"name": "k", "launches": binaries}]}))
    elif damage == "no graphs":
        for file in (package / "graphs").iterdir():
            file.unlink()
    elif damage == "not gzip":
        graph.write_bytes(b"mgraph-ir 1")
    elif damage == "not a graph":
        graph.write_bytes(gzip.compress(b"mgraph-ir 1\nmodule"))
    elif damage == "missing graph":
        (package / "graphs" / "004_cse.mg.gz").unlink()
    run = mgraph(verb, package, *(["rms_norm"] if verb == "explain" else []), *(["--format=json"] * (verb == "dump")))
    assert (run.code, run.out.count("%")) == (2, 0)
    assert said in run.err


def test_edited_file_is_noted(mgraph: Mgraph, package: Path) -> None:
    (package / "step.py").write_text("# mine\n")
    run = mgraph("dump", package)
    assert run.code == 0
    assert "step.py" in run.err


@pytest.mark.parametrize("arguments", [["dump"], ["diff", "raise-norm"], ["explain", "rms_norm"]])
def test_needs_no_torch(compiled: Path, arguments: list[str]) -> None:
    code = (
        "import sys; from mgraph.cli import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'triton'} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, arguments[0], str(compiled), *arguments[1:]]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == "[]\n"


def test_broken_pipe_and_full_disk(compiled: Path) -> None:
    command = f"{sys.executable} -m mgraph dump {compiled}"
    result = subprocess.run(["bash", "-c", f"{command} | head -1"], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("mgraph-ir 1\n", "")
    result = subprocess.run(["bash", "-c", f"{command} > /dev/full"], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (2, "error: cannot write: the disk is full\n")


@pytest.mark.parametrize("text", ["{", "[]", '{"fit": 3}'])
def test_damaged_notes_of_a_compilation(mgraph: Mgraph, package: Path, text: str) -> None:
    (package / "graphs" / "compilation.json").write_text(text)
    run = mgraph("explain", str(package))
    assert (run.code, run.out) == (2, "")
    assert "compilation.json" in run.err and "compile the package again" in run.err
