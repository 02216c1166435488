"""`mgraph kernels`: each node once, who runs it, and what it takes, predicted and measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.cli.kernel_times import line_times, site_lines
from mgraph.cli.kernels import call_counts
from mgraph.cli.snapshots import open_package
from mgraph.codegen.profile import read_profile
from mgraph.codegen.providers import family_of
from mgraph.passes.differentiation import VIEWS

from .conftest import Mgraph

SIZES = ("--batch-size", "2", "--seq-len", "32")


@pytest.fixture
def listed(mgraph: Mgraph, compiled: Path) -> Any:
    """The tables as data, for options."""

    def run(*options: str, rates: str = "h100") -> Any:
        return json.loads(mgraph("kernels", compiled, "--format", "json", "--rates", rates, *options).out)

    return run


@pytest.fixture(scope="module")
def for_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with kernels for a GPU, which is not needed to build it."""
    from mgraph.cli import main

    path = tmp_path_factory.mktemp("kernels") / "gpu"
    given = ["compile", "dense-tiny", "--precision", "bf16", "--provider", "rope=torch", "-o", str(path)]
    assert main(given) == 0
    return path


def test_each_node_that_works_is_there_once(listed: Any, compiled: Path) -> None:
    module = open_package(compiled).snapshots[-1].module
    nodes = listed()["nodes"]
    places = [(line["function"], line["node"]) for line in nodes]
    assert len(set(places)) == len(places)
    functions = {function for function, _ in places}
    assert functions == {"layer.fwd", "layer.bwd", "microbatch", "finish"}
    idle = VIEWS | {"call", "wait"}
    for name in functions:
        expected = {n.id for n in module.functions[name].nodes if n.op not in idle}
        absorbed = {n.operands[1].name for n in module.functions[name].nodes if n.op == "accumulate_"}
        found = {node for function, node in places if function == name}
        assert found <= expected and expected - found <= absorbed
    sums = [line for line in nodes if line["op"] == "aten.mm.default +="]
    assert len(sums) == 8 and all(line["provider"] == "torch" and line["step_line"] for line in sums)


def test_layers_count_by_their_calls(listed: Any, compiled: Path) -> None:
    counts = call_counts(open_package(compiled).snapshots[-1].module, ["microbatch", "finish"])
    assert counts == {"microbatch": 1, "layer.fwd": 2, "layer.bwd": 2, "finish": 1}
    assert {(line["function"], line["calls"]) for line in listed()["nodes"]} == set(counts.items())


def test_sizes_and_rates_count(listed: Any) -> None:
    def product(data: Any) -> Any:
        return next(n for n in data["nodes"] if n["op"] == "aten.linear.default" and n["function"] == "layer.fwd")

    small, large = product(listed(*SIZES)), product(listed("--batch-size", "4096", "--seq-len", "32"))
    # f32 at 5e13 operations a second, of which 0.85 are reached, and 2 us to launch: the roofline by hand.
    rows, (width, out) = 4096 * 32, (64, 64)
    moved = 4 * (rows * width + width * out + rows * out)
    expected = max(moved / (3.02e12 * 0.8), 2 * rows * width * out / (5e13 * 0.85)) * 1e6 + 2
    assert large["bytes"] == moved and large["microseconds"] == pytest.approx(expected, rel=1e-4)
    assert small["microseconds"] < 3
    faster = product(listed("--batch-size", "4096", "--seq-len", "32", rates="h200"))
    assert faster["microseconds"] < large["microseconds"]


def test_collectives_cost_what_is_sent(mgraph: Mgraph, listed: Any, tmp_path: Path) -> None:
    alone = [n for n in listed()["nodes"] if n["provider"] == "nccl"]
    assert alone and all(n["microseconds"] == 0 for n in alone)
    two = tmp_path / "two"
    assert mgraph("compile", "dense-tiny", "--arch", "none", "--mesh", "dp=2", "-o", two).code == 0
    nodes = json.loads(mgraph("kernels", two, "--format", "json", "--rates", "h100").out)["nodes"]
    (reduced,) = [n for n in nodes if n["op"] == "all_reduce_start" and n["bytes"] > 1000]
    assert reduced["microseconds"] == pytest.approx((reduced["bytes"] / 3.27e11 * 1e6 + 2) / 2, rel=1e-3)


def test_without_kernels_nothing_is_predicted(mgraph: Mgraph, compiled: Path) -> None:
    text = mgraph("kernels", compiled).out
    assert "no kernels for a GPU in this package" in text and "--rates h100" in text
    assert "H100" not in text and "~" not in text and " us" not in text.splitlines()[3]
    nodes = json.loads(mgraph("kernels", compiled, "--format", "json").out)["nodes"]
    assert nodes and all(node["microseconds"] is None and node["bytes"] >= 0 for node in nodes)
    wrong = mgraph("kernels", compiled, "--rates", "foo")
    assert wrong.code == 2 and "at --rates" in wrong.err


def test_the_manifest_and_the_tables_agree(mgraph: Mgraph, for_gpu: Path) -> None:
    manifest = json.loads((for_gpu / "manifest.json").read_text())
    chosen = {(p["function"], p["node"]): p for p in manifest["providers"]}
    assert {p["provider"] for p in chosen.values()} == {"triton", "cudnn", "torch"}
    assert all(p["provider"] == "torch" and p["forced"] for p in chosen.values() if p["op"].startswith("rope"))
    assert "rt.rope_joined(" in (for_gpu / "step.py").read_text() and 'by="cudnn"' in (for_gpu / "step.py").read_text()
    nodes = json.loads(mgraph("kernels", for_gpu, "--format", "json").out)["nodes"]
    for line in nodes:
        if known := chosen.get((line["function"], line["node"])):
            assert line["provider"] == known["provider"]
            assert line["microseconds"] == pytest.approx(known["microseconds"], abs=0.01)
            assert line["runner_up"] == (known["next"]["provider"] if known["next"] else "")
    text = mgraph("kernels", for_gpu, "--limit", "3").out
    assert "@layer.fwd, 2 a step: " in text and "models/attention.py:" in text and "more (--limit)" in text
    assert text.index("@layer.bwd") < text.index("@layer.fwd") and "in all" in text


def test_joined_weights_cost_nothing_and_their_sums_are_products(mgraph: Mgraph, for_gpu: Path) -> None:
    """A view of state is not written; what a product adds to several gradients is read with it once."""
    module = open_package(for_gpu).snapshots[-1].module
    backward = {node.id: node for node in module.functions["layer.bwd"].nodes}
    assert {"joined", "accumulate_joined_"} <= {node.op for node in backward.values()}
    nodes = json.loads(mgraph("kernels", for_gpu, "--format", "json").out)["nodes"]
    lines = {line["node"]: line for line in nodes if line["function"] == "layer.bwd"}
    assert not any(line["op"].startswith(("joined", "accumulate_joined")) for line in lines.values())
    sums = [node for node in backward.values() if node.op == "accumulate_joined_"]
    for node in sums:
        *totals, part = node.operands
        product = next(n for n in backward.values() if part in n.results)
        assert lines[node.id]["op"] == "aten.mm.default +=" and product.id not in lines
        widths = [int(str(total.tensor.numel)) * total.tensor.dtype.bits // 8 for total in totals]
        assert lines[node.id]["bytes"] > sum(widths)


def test_the_profile_goes_with_the_package(mgraph: Mgraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another directory, which later has other times, and then is gone."""
    monkeypatch.chdir(tmp_path)
    profile = read_profile("h100")
    marks = []
    for name, launch in (("one", 3e-6), ("two", 7e-6)):
        slower = replace(profile, name="mine", card="a card", rates={**profile.rates, "launch_seconds": launch})
        Path("mine.json").write_text(slower.text())
        given = ["--arch", "none", "--profile", "mine.json", "-o", name]
        assert mgraph("compile", "dense-tiny", *given).code == 0
        manifest = json.loads(Path(name, "manifest.json").read_text())
        assert "profile.json" in manifest["files"] and read_profile(str(Path(name, "profile.json"))) == slower
        marks.append(manifest["fingerprint"])
    assert marks[0]["profile"] != marks[1]["profile"] and marks[0]["ir"] == marks[1]["ir"]
    Path("mine.json").unlink()
    monkeypatch.chdir("/")
    assert "no times are predicted" in mgraph("kernels", tmp_path / "one").out
    with_kernels = json.loads((tmp_path / "one" / "manifest.json").read_text())
    with_kernels["providers"] = [{"function": "none", "node": "none", "provider": "triton"}]
    (tmp_path / "one" / "manifest.json").write_text(json.dumps(with_kernels))
    data = json.loads(mgraph("kernels", tmp_path / "one", "--format", "json").out)
    assert data["profile"] == "mine" and "predicted for a card" in data["notes"][0]
    assert min(n["microseconds"] for n in data["nodes"] if n["provider"] == "torch") >= 3
    (tmp_path / "one" / "profile.json").unlink()
    run = mgraph("kernels", tmp_path / "one")
    assert run.code == 2 and "does not hold the profile" in run.err and "--rates h100" in run.err


@pytest.mark.full
def test_all_providers_do_the_same(for_gpu: Path, tmp_path: Path) -> None:
    """On the CPU, where kernels are their twins: the numbers are those of torch's ops to the bit."""
    from mgraph.cli import main
    from mgraph.runtime.package import load_package
    from mgraph.runtime.state import create_state

    other = tmp_path / "torch"
    listed = json.loads((for_gpu / "manifest.json").read_text())["providers"]
    rules = [word for name in sorted({family_of(p["op"]) for p in listed}) for word in ("--provider", f"{name}=torch")]
    assert main(["compile", "dense-tiny", "--precision", "bf16", *rules, "-o", str(other)]) == 0
    assert set(re.findall(r"K\.(\w+)_\d", (other / "step.py").read_text())) == {"region"}
    made = []
    for path in (for_gpu, other):
        package = load_package(path, "cpu")
        state = create_state(package.state_specs, 0, "cpu")
        tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(1))
        package.call("microbatch", state, tokens, tokens.roll(-1, 1))
        package.call("finish", state, torch.tensor(1e-3))
        made.append(state)
    assert all(torch.equal(tensor, made[1][name]) for name, tensor in made[0].items())


def test_lines_are_those_of_the_nodes(for_gpu: Path) -> None:
    manifest, step = json.loads((for_gpu / "manifest.json").read_text()), (for_gpu / "step.py").read_text().splitlines()
    sites = {p["node"]: p for p in manifest["providers"] if p["function"] == "layer.fwd"}
    for number, node in manifest["lines"]["layer.fwd"].items():
        if node in sites and sites[node]["provider"] == "triton":
            assert "= K." in step[int(number) - 1]
    assert len(set(manifest["lines"]["layer.fwd"].values())) > len(sites)


def test_measured_on_the_cpu(listed: Any) -> None:
    data = listed(*SIZES, "--profile", "--device", "cpu", "--steps", "1")
    measured = {(n["function"], n["op"]): n["measured_microseconds"] for n in data["nodes"]}
    worked = [time for (_, op), time in measured.items() if not op.startswith(("zero", "all_reduce"))]
    assert sum(time > 0 for time in worked) > 0.9 * len(worked)
    assert measured["finish", "adamw"] > 1 and measured["layer.fwd", "attention"] > 1
    other = float(data["notes"][1].split(";")[1].split()[0])
    whole = sum(n["measured_microseconds"] * n["calls"] for n in data["nodes"])
    assert "the CPU, 1 steps" in data["notes"][1] and other < 0.2 * whole


def test_on_the_cpu_nothing_of_a_gpu_is_said_to_run(mgraph: Mgraph, for_gpu: Path) -> None:
    """No cuDNN, no Triton and no times of an H100 beside those of the CPU, unless they are asked for."""
    given = ("kernels", for_gpu, "--profile", "--device", "cpu", "--steps", "1", *SIZES)
    data = json.loads(mgraph(*given, "--format", "json").out)
    assert data["profile"] is None and not any("H100" in note for note in data["notes"])
    assert "these ran on the CPU, so no times are predicted; --rates h100" in data["notes"][1]
    ran = {(n["function"], n["op"]): n["provider"] for n in data["nodes"]}
    assert set(ran.values()) == {"twin", "torch"}
    assert ran["layer.fwd", "rope_joined"] == "torch"
    sites = [("layer.fwd", "attention"), ("layer.fwd", "rms_norm"), ("finish", "adamw")]
    assert {ran[site] for site in (*sites, ("microbatch", "cross_entropy_with_grad"))} == {"twin"}
    for node in data["nodes"]:
        assert node["measured_microseconds"] >= 0 and node["microseconds"] is None
        assert (node["runner_up"], node["runner_up_microseconds"], node["refused"]) == ("", None, {})
    asked = json.loads(mgraph(*given, "--rates", "h100", "--format", "json").out)
    assert "predicted for NVIDIA H100" in asked["notes"][0] and "ran elsewhere, by the providers" in asked["notes"][0]
    assert {(n["function"], n["op"]): n["provider"] for n in asked["nodes"]} == ran
    assert all(n["microseconds"] >= 0 for n in asked["nodes"])


def test_lines_of_kernel_sites() -> None:
    step = """def layer(x):
    y = rt.linear(
        x,
    )
    (
        y, _,
    ) = rt.cut(
        K.norm_0(y),
    )
    for part in y:
        K.adamw_0(part)
        part = rt.K(part)
    return y
"""
    assert site_lines(step) == {5, 11}


def test_of_what_is_served_a_step_ends_with_one_choice_of_tokens(mgraph: Mgraph, tmp_path: Path) -> None:
    package = tmp_path / "served"
    assert mgraph("compile", "dense-tiny", "--for", "serve", "--arch", "none", "-o", package).code == 0
    data = json.loads(mgraph("kernels", package, "--rates", "h100", "--format", "json", "--batch-size", "3").out)
    assert data["sizes"] == {"N": 3, "R": 3, "T": 3}
    assert {node["function"] for node in data["nodes"]} == {"step", "layer", "likeliest"}
    drawn = json.loads(mgraph("kernels", package, "--rates", "h100", "--format", "json", "--entry", "draw").out)
    assert {node["function"] for node in drawn["nodes"]} == {"draw"}
    for verb in ("kernels", "memory"):
        run = mgraph(verb, package, "--seq-len", "8")
        assert run.code == 2 and "has no sequences" in run.err


def test_it_is_said_what_providers_were_chosen_for(mgraph: Mgraph, for_gpu: Path) -> None:
    said = "providers were chosen for B=8, S=2048 by profile h100: where a runner-up is ahead here, it was not there"
    assert said in mgraph("kernels", for_gpu, *SIZES).out and said in mgraph("kernels", for_gpu, "--rates", "h200").out
    assert "providers were chosen" not in mgraph("kernels", for_gpu).out


def test_explain_says_who_runs_a_node(mgraph: Mgraph, for_gpu: Path) -> None:
    text = mgraph("explain", for_gpu, "layer.fwd:attention").out
    assert "  run by   triton, " in text and "estimated; next " in text
    assert "  run by   torch, " in mgraph("explain", for_gpu, "layer.fwd:turned").out
    assert "(asked for); next triton, " in mgraph("explain", for_gpu, "layer.fwd:turned").out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--provider", "atention=flash"), "did you mean 'attention'"),
        (("--provider", "attention=cublas"), "one of cudnn, flash, efficient, triton, torch"),
        (("--profile", "h10"), "no profile 'h10'"),
        (("--provider", "attention=cudnn"), "cudnn takes no attention of this model: q is f32"),
        (("--provider", "linear=triton"), "triton takes no linear: this package has none"),
        (("--provider", "grouped_matmul=te", "--target", "cpu"), "grouped_matmul=te is about kernels for a GPU"),
        (("--provider", "attention=flash", "--arch", "none"), "this package has none"),
    ],
)
def test_wrong_providers_and_profiles(mgraph: Mgraph, tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    run = mgraph("compile", "dense-tiny", *options, "-o", tmp_path / "p")
    assert run.code == 2 and said in run.err and not list(tmp_path.iterdir())


def event(cat: str, name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": more}


def test_kernels_belong_to_the_range_that_launched_them() -> None:
    """A layer's call around two statements; kernels run later, one launched by the driver and one by the runtime."""
    events = [
        event("user_annotation", "microbatch:30 [0] layers.*", 0, 100),
        event("user_annotation", "layer:12 up  m.py:3", 5, 20),
        event("cuda_runtime", "cudaLaunchKernel", 8, 2, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 12, 2, correlation=2),
        event("user_annotation", "layer:14 up  m.py:4", 30, 20),
        event("cuda_driver", "cuLaunchKernel", 33, 2, correlation=3),
        event("user_annotation", "ProfilerStep#1", 34, 2),
        event("cuda_runtime", "cudaMemcpyAsync", 60, 2, correlation=4),
        event("cuda_runtime", "cudaDeviceSynchronize", 120, 50, correlation=5),
        {**event("kernel", "gemm", 200, 7, correlation=1), "tid": 7},
        {**event("kernel", "epilogue", 210, 3, correlation=2), "tid": 7},
        {**event("kernel", "rms_norm_fwd_0", 220, 11, correlation=3), "tid": 7},
        {**event("gpu_memcpy", "copy", 240, 2, correlation=4), "tid": 7},
        {**event("gpu_memset", "of nobody", 250, 1, correlation=9), "tid": 7},
        {"ph": "M", "name": "process_name"},
    ]
    assert line_times(events, on_gpu=True) == {12: 10.0, 14: 11.0, 30: 2.0, 0: 1.0}


def test_ops_belong_to_the_range_they_run_in() -> None:
    events = [
        event("user_annotation", "layer:12 up", 0, 50),
        event("cpu_op", "aten::linear", 0, 20),
        event("cpu_op", "aten::mm", 2, 15),
        event("cpu_op", "aten::add", 20, 5),
        event("cpu_op", "aten::add", 50, 5),
    ]
    assert line_times(events, on_gpu=False) == {12: 25.0, 0: 5.0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--entry", "microbach"), "no entry 'microbach'"),
        (("--rates", "h10"), "no profile 'h10'"),
        (("--format", "svg"), "svg"),
        (("--profile", "--device", "cuda"), "no CUDA device"),
        (("--profile", "--device", "tpu"), "unknown device 'tpu'"),
        (("--device", "cpu"), "--device is about steps that are measured, and none are"),
        (("--steps", "3"), "try: with --profile"),
    ],
)
def test_wrong_options(mgraph: Mgraph, compiled: Path, options: tuple[str, ...], said: str) -> None:
    run = mgraph("kernels", compiled, *options)
    assert run.code == 2 and said in run.err and run.out == ""


def test_a_package_without_lines(mgraph: Mgraph, package: Path) -> None:
    manifest = json.loads((package / "manifest.json").read_text())
    del manifest["lines"]
    (package / "manifest.json").write_text(json.dumps(manifest))
    assert "@layer.fwd" in mgraph("kernels", package).out
    run = mgraph("kernels", package, "--profile")
    assert run.code == 2 and "compile it again" in run.err
