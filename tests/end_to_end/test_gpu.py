"""Packages on a GPU, with their cubins, against the same packages on the CPU: the steps of a short run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.compiler import compile_package
from mgraph.recipe import Recipe
from mgraph.runtime import attention
from mgraph.runtime.mesh import Mesh
from mgraph.runtime.package import Package, load_package
from mgraph.runtime.pieces import Tape
from mgraph.runtime.state import create_state
from tests.end_to_end.builds import ZOO, batches, relative
from tests.families.configs import write_config

LORA = ("*.q_proj|*.v_proj: rank=4, alpha=8, dropout=0.1",)
BUILDS: dict[str, tuple[str, dict[str, Any]]] = {
    "all-aten": ("dense-tiny", {"disable": "raise-*"}),
    "moe": ("moe-tiny", {}),
    "fp16": ("dense-tiny", {"precision": "fp16", "loss_scale": 1024.0}),
    "bf16": ("moe-tiny", {"precision": "bf16"}),
    "recompute": ("dense-tiny", {"recompute": "full"}),
    "packed, sinks and windows": ("gpt-oss-tiny", {"packed": True}),
    "packed, softcap": ("dense-tiny-capped", {"packed": True}),
    "packed, hf": ("gemma3", {"packed": True}),
    "packed, experts": ("moe-tiny", {"packed": True}),
    "dropout, layer_norm": ("gpt2", {}),
    "both ways": ("bert", {}),
    "adapters": ("llama", {"lora": LORA}),
    "hf experts": ("qwen3-moe", {}),
    "hf experts with a loss of routers": ("qwen3-moe", {}),
}
CHANGES: dict[str, dict[str, Any]] = {
    "hf experts with a loss of routers": {"output_router_logits": True, "router_aux_loss_coef": 0.02}
}
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 3e-3}


def inputs(package: Package, step: int) -> list[torch.Tensor]:
    """A microbatch by the names that the package wants; packed, each row has documents of 1, 7 and 9 positions, and 4
    of padding."""
    tokens, labels = batches(1, seed=step)[0]
    lengths = torch.tensor([1, 7, 9, 4])
    positions = torch.cat([torch.arange(int(n)) for n in lengths]).expand_as(tokens).contiguous()
    segments = torch.repeat_interleave(torch.tensor([1, 2, 3, 0]), lengths).expand_as(tokens).contiguous()
    if "segment_ids" in package.manifest["entries"]["microbatch"]["inputs"]:
        labels = labels.masked_fill(segments == 0, -100)
    given = {"tokens": tokens, "labels": labels, "position_ids": positions, "segment_ids": segments}
    return [given[name] for name in package.manifest["entries"]["microbatch"]["inputs"]]


def run(path: Path, device: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses of three steps; the gradients of the first; the trained parameters. A step that is not finite fails."""
    package = load_package(path, device)
    state = create_state(package.state_specs, 3, device)
    losses, gradients = [], {}
    for step in range(3):
        for name, value in {"rng.step": step, "rng.sample": 0}.items():
            if name in state:
                state[name].fill_(value)
        package.call("microbatch", state, *(tensor.to(device) for tensor in inputs(package, step)))
        if not step:
            gradients = {name: t.cpu().clone() for name, t in state.items() if name.endswith(".grad")}
        out = package.call("finish", state, torch.tensor(1e-3, device=device))
        assert int(out["skipped"]) == 0
        losses.append(float(out["loss"]))
    trained = {name: t.cpu() for name, t in state.items() if f"{name}.grad" in gradients}
    return losses, gradients, trained


@pytest.mark.gpu
@pytest.mark.parametrize("case", BUILDS)
def test_a_gpu_trains_as_the_cpu_does(case: str, tmp_path: Path) -> None:
    name, options = BUILDS[case]
    spec = name if name in ZOO else write_config(name, tmp_path / name, **CHANGES.get(case, {}))
    recipe = Recipe(model=spec, output=str(tmp_path / "package"), arch="sm_90a", eps=1e-5, **options)
    compilation = compile_package(recipe)
    assert compilation.package is not None
    torch.backends.cuda.matmul.allow_tf32 = False
    bound = TOLERANCE[recipe.precision]
    losses, gradients, trained = run(compilation.package, "cpu")
    found_losses, found_gradients, found_trained = run(compilation.package, "cuda")
    torch.testing.assert_close(torch.tensor(found_losses), torch.tensor(losses), rtol=bound, atol=0)
    # The gradients of biases of keys are zero but for rounding, and so is where they go from zero.
    least = 1e-6 * max(float(t.double().norm()) for t in gradients.values())
    for gradient, expected in gradients.items():
        assert relative(found_gradients[gradient], expected, least) <= bound, gradient
    for parameter, expected in trained.items():
        assert relative(found_trained[parameter], expected, least=1e-3) <= bound, parameter


Found = list[dict[str, torch.Tensor]]
"""Tensors by name, after one step or after each."""
CUDNN: dict[str, Any] = {"precision": "bf16", "provider": ("attention=cudnn",)}


def differing(one: Found, other: Found) -> list[str]:
    """Names of what is not the same to the bit."""
    pairs = zip(one, other, strict=True)
    return [name for left, right in pairs for name in left if not torch.equal(left[name], right[name])]


def check_graphs(run: Callable[[bool], Found], cudnn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `run` gives with graphs is bit for bit what it gives without, by deterministic algorithms, or as packages
    run, by attention of `cudnn`: then if launches give the same twice, else there is nothing to compare with."""
    if not cudnn:
        torch.use_deterministic_algorithms(True)
        try:
            launched, replayed = run(False), run(True)
        finally:
            torch.use_deterministic_algorithms(False)
        assert not differing(launched, replayed)
        return
    called: list[str] = []
    for way in ("forward", "backward"):
        monkeypatch.setattr(attention._CUDNN, way, _noting(called, way, getattr(attention._CUDNN, way)))
    runs = []
    for cuda_graphs in (False, False, True):
        called.clear()
        runs.append(run(cuda_graphs))
        assert {*called} == {"forward", "backward"}, "cuDNN did not run"
    launched, again, replayed = runs
    if names := differing(launched, again):
        pytest.skip(f"launched twice by cuDNN's attention from one state, {names[0]} is not the same to the bit")
    assert not differing(launched, replayed)


def _noting(called: list[str], way: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which adds `way` to what was called."""

    def noted(*given: Any) -> Any:
        called.append(way)
        return function(*given)

    return noted


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "cudnn"),
    [("bf16", False), ("dropout, layer_norm", False), ("recompute", False), ("bf16", True), ("recompute", True)],
)
def test_cuda_graphs_do_what_their_kernels_do(
    case: str, cudnn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps replayed, with dropout that differs from step to step, are bit for bit those launched one by one."""
    name, options = BUILDS[case]
    options = {**options, **(CUDNN if cudnn else {})}
    spec = name if name in ZOO else write_config(name, tmp_path / name)
    compilation = compile_package(Recipe(model=spec, output=str(tmp_path / "package"), arch="sm_90a", **options))
    assert compilation.package is not None
    path = compilation.package

    def run(cuda_graphs: bool) -> Found:
        package = load_package(path, "cuda", cuda_graphs=cuda_graphs)
        state = create_state(package.state_specs, 3, "cuda")
        for step in range(6):
            for name, value in {"rng.step": step, "rng.sample": 0}.items():
                if name in state:
                    state[name].fill_(value)
            package.call("microbatch", state, *(tensor.cuda() for tensor in inputs(package, step)))
            package.call("finish", state, torch.tensor(1e-3, device="cuda"))
        assert (sum(held is not None for held in package.graphs._held.values()) == 2) is cuda_graphs
        return [{name: tensor.cpu() for name, tensor in state.items()}]

    check_graphs(run, cudnn, monkeypatch)


PIECES: dict[str, tuple[str, dict[str, Any], int]] = {
    "rows that the host reads": ("moe-tiny", {"mesh": "ep=2", "expert_extent": "host", "precision": "bf16"}, 4),
    "in chunks, computed again": (
        "moe-tiny",
        {"mesh": "ep=2", "expert_extent": "host", "precision": "bf16", "ep_chunks": 2, "recompute": "full"},
        6,
    ),
    "layers": ("dense-tiny", {"cuda_graphs": "layers"}, 4),
    "layers, bf16, computed again": (
        "dense-tiny",
        {"cuda_graphs": "layers", "precision": "bf16", "recompute": "full"},
        4,
    ),
    "layers, dropout": ("gpt2", {"cuda_graphs": "layers"}, 4),
    "layers, packed": ("gpt-oss-tiny", {"cuda_graphs": "layers", "packed": True, "precision": "bf16"}, 4),
    "layers, away": ("dense-tiny", {"cuda_graphs": "layers", "offload": "activations,optimizer"}, 4),
    "experts of ranks": ("moe-tiny", {"mesh": "ep=2", "precision": "bf16"}, 0),
    "experts of ranks, a budget": ("moe-tiny", {"mesh": "ep=2", "precision": "bf16", "expert_budget": 1.5}, 0),
}
"""Models, options, and how many graphs a microbatch has; 0: it is one."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "cudnn"),
    [
        *((case, False) for case in PIECES),
        ("rows that the host reads", True),
        ("in chunks, computed again", True),
        ("layers, bf16, computed again", True),
        ("experts of ranks", True),
        ("experts of ranks, a budget", True),
    ],
)
def test_graphs_of_layers_do_what_their_kernels_do(
    case: str, cudnn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, gradients and state of six steps of two microbatches, in two lengths, are bit for bit those without.

    Of two ranks that share experts one is run by itself: what it sends comes back as what the other sent.
    """
    name, options, count = PIECES[case]
    options = {**options, **(CUDNN if cudnn else {})}
    spec = name if name in ZOO else write_config(name, tmp_path / name)
    compilation = compile_package(Recipe(model=spec, output=str(tmp_path / "package"), arch="sm_90a", **options))
    assert compilation.package is not None
    path = compilation.package

    def run(cuda_graphs: bool) -> Found:
        package = load_package(path, "cuda", cuda_graphs=cuda_graphs)
        axes = {"ep": 2} if "ep" in options.get("mesh", "") else {}
        lone = Mesh(0, 2 if axes else 1, torch.device("cuda"), axes)
        state = create_state(package.state_specs, 3, "cuda", mesh=lone)
        found: Found = []
        for step in range(6):
            for sample in range(2):
                for name, value in {"rng.step": step, "rng.sample": sample}.items():
                    if name in state:
                        state[name].fill_(value)
                given = [tensor.cuda() for tensor in inputs(package, 2 * step + sample)]
                given = [tensor[:, : 14 if step % 2 else 20].contiguous() for tensor in given]
                outputs = package.call("microbatch", state, *given)
                found.append({name: tensor.cpu().clone() for name, tensor in (state | outputs).items()})
            package.call("finish", state, torch.tensor(1e-3, device="cuda"))
        graphs = [held for held in package.graphs._held.values() if held is not None]
        tapes = [len(held._pieces) for held in graphs if isinstance(held, Tape)]
        assert tapes == [count, count] * (cuda_graphs and count > 0) and bool(graphs) is cuda_graphs
        return found

    check_graphs(run, cudnn, monkeypatch)
