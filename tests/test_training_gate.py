"""The gate of the training benchmarks: what trains as eager bf16 passes, what does not fails by what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu import peers, training_gate, training_models
from benchmarks.gpu.training import Packaged, drawn
from benchmarks.gpu.training_gate import MOST_NOISE, Gradients, Reference, Weights
from benchmarks.gpu.training_models import SHAPES, Batch
from mgraph.compiler import compile_package
from mgraph.recipe import Recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["dense", "moe"])
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, as the benchmarks compile theirs, but for the CPU alone."""
    directory = tmp_path_factory.mktemp("gate") / f"small-{request.param}"
    recipe = Recipe(
        model=f"{training_models.__file__}:small_{request.param}",
        precision="bf16",
        max_norm=0.0,
        weight_decay=0.0,
        grad_dtype="param",
        one_microbatch=True,
        output=str(directory),
    )
    compile_package(recipe)
    return directory


@pytest.fixture(scope="module", autouse=True)
def fewer_streams() -> Iterator[None]:
    """Half of what GPUs are given; and a thread, whatever ran before: small products are slow on many."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_gate, "STREAMS", 4)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def weights(package: Path) -> dict[str, Tensor]:
    """What the package starts from."""
    return drawn(package, CPU)


@pytest.fixture(scope="module")
def reference(package: Path, weights: dict[str, Tensor]) -> Reference:
    """What eager gives."""
    return training_gate.reference(SHAPES[package.name], weights, CPU)


class Faulty:
    """A package whose losses and gradients are not what they were."""

    def __init__(self, package: Path, loss: Callable[[Tensor, int], Tensor], gradient: Callable[[str], float]) -> None:
        self._ours, self._loss, self._gradient, self._steps = Packaged(package, CPU), loss, gradient, 0

    def __call__(self, batch: Batch) -> Tensor:
        self._steps += 1
        return self._loss(self._ours(batch), self._steps)

    def gradients(self, batch: Batch) -> Gradients:
        return {name: grad * self._gradient(name) for name, grad in self._ours.gradients(batch).items()}

    def restart(self, weights: Weights) -> None:
        self._ours.restart(weights)
        self._steps = 0


def test_a_package_passes(package: Path, weights: dict[str, Tensor], reference: Reference) -> None:
    usual = sorted(reference.gradient_noise.values())[len(reference.gradient_noise) // 2]
    assert 1e-6 < reference.noise < 1e-3 and 1e-4 < usual < 3e-2, "bf16 rounds, and no more"
    ours = Packaged(package, CPU)
    judged = reference.judge(ours, weights)
    assert judged["is_near"], judged
    assert reference.judge(ours, weights) == judged, "what was trained before is forgotten"


PARTS = ("attn.q.weight", "ffn_norm.weight", "router.proj.weight", "embed.weight", "norm.weight")


def test_one_wrong_gradient_is_far(package: Path, weights: dict[str, Tensor], reference: Reference) -> None:
    """Of a parameter of each kind: none, the other way, or too large."""
    ours = Packaged(package, CPU)
    ours.restart(weights)
    found = ours.gradients(training_gate.together(reference.streams))
    assert reference.farthest(found, reference.gradients)[0] <= MOST_NOISE
    wrong = [next((name for name in found if name.endswith(part)), "") for part in PARTS]
    assert len(list(filter(None, wrong))) == len(PARTS) - (package.name == "small-dense"), "which has no router"
    for name in filter(None, wrong):
        for factor in (0.0, -1.0, 1.3, float("nan")):
            worst, where = reference.farthest({**found, name: found[name] * factor}, reference.gradients)
            assert worst > MOST_NOISE and where == name, (name, factor)


def test_wrong_gradients_fail(package: Path, weights: dict[str, Tensor], reference: Reference) -> None:
    faulty = Faulty(package, lambda loss, _: loss, lambda name: 0.0 if name.endswith("0.attn.k.weight") else 1.0)
    judged = reference.judge(faulty, weights)
    assert not judged["is_near"] and judged["distance_from_f32"] <= MOST_NOISE * reference.noise, judged


LOSSES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "all a little": lambda loss, _: loss * 1.001,
    "the last no number": lambda loss, step: loss * float("nan") if step == training_gate.STEPS else loss,
    "the last too large": lambda loss, step: loss * 1.5 if step == training_gate.STEPS else loss,
}


@pytest.mark.parametrize("wrong", LOSSES)
def test_wrong_losses_fail(wrong: str, package: Path, weights: dict[str, Tensor], reference: Reference) -> None:
    judged = reference.judge(Faulty(package, LOSSES[wrong], lambda _: 1.0), weights)
    assert not judged["is_near"] and judged["gradients_times_eager"] <= MOST_NOISE, judged


def test_an_update_that_is_too_large_fails(package: Path, weights: dict[str, Tensor], reference: Reference) -> None:
    ours = Packaged(package, CPU)
    ours._lr *= 1.03
    judged = reference.judge(ours, weights)
    assert not judged["is_near"] and judged["gradients_times_eager"] <= MOST_NOISE, judged


def test_peers_of_transformers_take_the_weights(package: Path, weights: dict[str, Tensor]) -> None:
    shape = SHAPES[package.name]
    model = peers._transformers(shape, weights, CPU)
    ours = shape.make()
    ours.load_state_dict(weights, strict=False)
    tokens = shape.batches(0, 1, CPU)[0][0]
    with torch.no_grad():
        assert float((model(input_ids=tokens).logits - ours(tokens)).abs().max()) < 1e-4


def test_the_update_of_a_peer_that_is_compiled_is_torchs() -> None:
    """Masters of parameters in bf16, over three steps, as torch.optim has them from gradients in f32."""
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape in ((5, 7), (3,))]
    gradients = [[torch.randn_like(start).bfloat16() for start in starts] for _ in range(3)]
    wanted = [nn.Parameter(start.clone()) for start in starts]
    optimizer = torch.optim.AdamW(wanted, lr=peers.LR, betas=peers.BETAS, weight_decay=0.0)
    masters, low = [start.clone() for start in starts], [start.bfloat16() for start in starts]
    first, second = ([torch.zeros_like(start) for start in starts] for _ in range(2))
    for count, of_step in enumerate(gradients, 1):
        for parameter, gradient in zip(wanted, of_step, strict=True):
            parameter.grad = gradient.float()
        optimizer.step()
        peers.update(masters, low, of_step, (first, second), torch.tensor(float(count)))
    torch.testing.assert_close(masters, [parameter.detach() for parameter in wanted], rtol=1e-6, atol=1e-7)
    assert all(bool((a == b.bfloat16()).all()) for a, b in zip(low, masters, strict=True))
