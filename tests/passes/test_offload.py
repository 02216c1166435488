"""Activations and optimizer state on the host: what moves, what it frees, and that nothing changes by a bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mgraph.cli.snapshots import open_package
from mgraph.codegen.memory import RankMemory
from mgraph.compiler import compile_package
from mgraph.errors import OptionError
from mgraph.ir.graph import Module, Node
from mgraph.ir.verifier import verify
from mgraph.passes.activations import extents
from mgraph.passes.base import Report
from mgraph.passes.in_place import InPlace
from mgraph.passes.offload import Offload
from mgraph.recipe import Recipe
from mgraph.runtime import offload as offload_store
from mgraph.runtime.package import Package, load_package
from mgraph.runtime.state import create_state
from tests.codegen.test_memory import LiveBytes
from tests.passes.spread import trained
from tests.sampling import sampled

BATCH, SEQ = 2, 64
DEEP = """
from mgraph import models

def model():
    return models.get("{family}", "tiny", num_layers=5)
"""


def _compiled(path: Path, model: str, **settings: str) -> Package:
    compile_package(Recipe(model, output=str(path), arch="none", batch=BATCH, seq=SEQ, **settings))  # type: ignore[arg-type]
    return load_package(path, "cpu")


def _deep(directory: Path, family: str) -> str:
    file = directory / "deep.py"
    file.write_text(DEEP.format(family=family))
    return f"{file}:model"


def _steps(package: Package, count: int = 3) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The state after some steps, and what each gave, gradients too."""
    state = create_state(package.state_specs, 0, "cpu")
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        for _ in range(2):
            inputs = [torch.randint(256, (BATCH, SEQ), generator=generator) for _ in range(2)]
            given = package.call("microbatch", state, *inputs)
            given |= {name: tensor.clone() for name, tensor in state.items() if name.endswith(".grad")}
            found.append(given)
        found.append(package.call("finish", state, torch.tensor(1e-2)))
    return state, found


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize(
    ("family", "precision", "recompute"),
    sampled(
        [
            (family, precision, recompute)
            for family in ("dense", "moe", "gemma3", "gpt-oss")
            for precision in ("fp32", "bf16")
            for recompute in ("none", "full")
        ],
        0,
        always=[("dense", "bf16", "none"), ("moe", "fp32", "full")],
    ),
)
def test_not_a_bit_differs(tmp_path: Path, family: str, precision: str, recompute: str) -> None:
    model = _deep(tmp_path, family)
    settings = {"precision": precision, "recompute": recompute}
    plain = _steps(_compiled(tmp_path / "plain", model, **settings))
    package = _compiled(tmp_path / "moved", model, offload="activations,optimizer", **settings)
    moved = _steps(package)
    _same(plain[0], moved[0])
    for left, right in zip(plain[1], moved[1], strict=True):
        _same(left, right)
    text = (package.path / "step.py").read_text()
    alike = family in ("dense", "moe")  # the others' layers are of two kinds, by turns
    assert text.count("to_host_start") <= (6 if alike else 10), "layers are sent in a loop"
    hosts = {spec.name for spec in package.state_specs if spec.host}
    assert hosts == {s.name for s in package.state_specs if s.kind in ("master", "moment")}


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.full), "full"])
def test_what_is_measured(tmp_path: Path, recompute: str) -> None:
    """The prediction is that of live bytes, buffers of the host left out: these are there from the first call on."""
    peaks = {}
    for offload in ("", "activations", "optimizer"):
        package = _compiled(tmp_path / f"m{offload}", _deep(tmp_path, "dense"), offload=offload, recompute=recompute)
        module = open_package(package.path).snapshots[-1].module
        memory = RankMemory(module, extents(module, {"B": BATCH, "S": SEQ}), {})
        state = create_state(package.state_specs, 0, "cpu")
        for entry in ("microbatch", "finish"):
            names = package.manifest["entries"][entry]["inputs"]
            inputs = [torch.randint(256, (BATCH, SEQ)) if name != "lr" else torch.tensor(0.1) for name in names]
            package.call(entry, state, *inputs)
            buffers = [tensor for free in offload_store._free.values() for tensor in free]
            with LiveBytes(inputs, [*state.values(), *buffers]) as live:
                package.call(entry, state, *inputs)
            predicted = memory.entry(entry).bytes
            assert abs(predicted - live.peak) <= 0.05 * live.peak + 4096, (offload, entry, predicted, live.peak)
            peaks[offload, entry] = predicted
        if offload == "optimizer":
            moved = sum(t.nbytes for n, t in state.items() if n.endswith((".m", ".v")))
            assert memory.host()["state"] == moved
            assert sum(memory.state().values()) == sum(t.nbytes for t in state.values()) - moved
    assert peaks["activations", "microbatch"] < peaks["", "microbatch"]


def _offloaded(module: Module, **options: Any) -> tuple[Module, Report]:
    report = Report()
    module = Offload(batch=BATCH, seq=SEQ, **options).run(module, report)
    verify(module)
    return InPlace().run(module, report), report


def test_what_stays(tmp_path: Path) -> None:
    """Of two layers the first one's tensors travel, each once, and tables that both layers read do not."""
    module, report = _offloaded(trained("dense-tiny"), activations=True)
    entry = module.entry_function("microbatch")
    sent = [v for node in entry.nodes if node.op == "to_host_start" for v in node.operands]
    assert len(sent) == len(set(sent)) > 5
    makers = entry.producers()
    assert {str(makers[v].origin.path) for v in sent} <= {"embed", "layers.0"}
    assert not {"cos", "sin"} & {v.name for v in sent}
    sizes = extents(module, {"B": BATCH, "S": SEQ})
    memory = RankMemory(module, sizes, {})
    assert report.counts["bytes_on_host"] == sum(memory.bytes(v.type) for v in sent) == memory.host()["activations"]


def test_no_more_than_a_limit_of_a_layer(tmp_path: Path) -> None:
    """The largest tensors first, the same ones on the twin of --verify, whose sizes are others."""
    module = trained("dense-tiny")
    everything, report = _offloaded(module, activations=True)
    limit = report.counts["bytes_on_host"] // 2
    fewer, half = _offloaded(module, activations=True, limit=limit)
    assert limit // 2 < half.counts["bytes_on_host"] <= limit
    sent = [{v.name: v for n in _sends(m) for v in n.operands} for m in (everything, fewer)]
    sizes = {name: math.prod(v.tensor.shape) for name, v in sent[0].items()}
    assert sent[1].keys() < sent[0].keys() and max(sizes, key=sizes.__getitem__) in sent[1]
    chosen = Offload(activations=True, limit=limit, batch=BATCH, seq=SEQ).on_twin(module)
    again = chosen.run(module, Report())
    assert [v.name for n in _sends(again) for v in n.operands] == [v.name for n in _sends(fewer) for v in n.operands]


def _sends(module: Module) -> list[Node]:
    return [n for n in module.entry_function("microbatch").nodes if n.op == "to_host_start"]


def test_the_update_is_cut_by_layers_and_by_bytes() -> None:
    module, report = _offloaded(trained("dense-tiny"), optimizer=True)
    updates = [n for n in module.entry_function("finish").nodes if n.op == "adamw_"]
    layers = [{v.name.split(".weight")[0].rpartition(".")[0] for v in n.operands if v.is_state} for n in updates]
    assert len(updates) == 5 and report.counts["states_on_host"] == len([s for s in module.state.values() if s.host])
    assert [names for names in layers if any(name.startswith("layers.1") for name in names)] == [layers[2]]
    halves = Offload(optimizer=True, chunk=2**15).run(trained("dense-tiny"), Report())
    parts = [n for n in halves.entry_function("finish").nodes if n.op == "adamw"]
    assert len(parts) > 10 and sum(map(_count, parts)) == sum(map(_count, updates))


def _count(node: Node) -> int:
    assert isinstance(node.attrs["n"], int)
    return node.attrs["n"]


def test_mistakes() -> None:
    with pytest.raises(OptionError, match="'activation' cannot be offloaded"):
        Recipe("dense-tiny", offload="activation")
    for text in ("optimizer=1GiB", "activations=", "activations=much", "activations=0B"):
        with pytest.raises(OptionError, match=f"offload is '{text}'") as found:
            Recipe("dense-tiny", offload=text)
        assert found.value.hint is not None and "activations=200MiB" in found.value.hint
    limited = Recipe("dense-tiny", offload="optimizer,activations=1.5MiB")
    assert (limited.offload, limited.offload_limit) == ("activations=1.5MiB,optimizer", 3 * 2**19)
    with pytest.raises(OptionError, match="offload is for training"):
        Recipe("dense-tiny", offload="optimizer", purpose="serve")
    assert Recipe("dense-tiny", offload="optimizer, activations").offload == "activations,optimizer"
