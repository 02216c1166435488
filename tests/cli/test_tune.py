"""`mgraph tune` with a timer of the test: each provider is compared and timed, and what it wrote decides the choice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.cli import candidates, routed_inputs, tune
from mgraph.cli.routed_inputs import is_routed
from mgraph.codegen.profile import Profile, read_profile
from mgraph.codegen.providers import Providers
from mgraph.compiler import build_module
from mgraph.ir.graph import Module
from mgraph.ir.parser import parse_module
from mgraph.passes.activations import extents
from mgraph.recipe import Recipe

from .conftest import Mgraph

SIZES = {"B": 2, "S": 32}
CPU = torch.device("cpu")


@functools.cache
def final(model: str) -> Module:
    return build_module(Recipe(model=model, precision="bf16")).module


def fake(torch_seconds: float, other: float) -> tuple[tune.Timer, list[str]]:
    """A timer that runs each call once and gives torch one time, and all others another."""
    heard: list[str] = []

    def timer(call: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> float:
        call(*sets[0])
        heard.append(getattr(call, "__name__", ""))
        return torch_seconds if heard[-1] == "<lambda>" else other

    return timer, heard


def tuned(module: Module, timer: tune.Timer) -> tuple[Profile, list[tuple[str, ...]], dict[str, str]]:
    return tune.tuned(module, read_profile("h100"), SIZES, CPU, timer)


EXPERTS = {
    *("moe_route_order", "expert_glu", "grouped_matmul", "moe_combine", "expert_glu_grad", "gathered_outer"),
    *("grouped_matmul_sum", "moe_dispatch_grad", "moe_route_grad"),
}


@pytest.mark.parametrize("model", ["dense-tiny", "moe-tiny"])
def test_every_provider_is_compared_and_timed(model: str) -> None:
    timer, heard = fake(2e-6, 5e-6)
    profile, lines, left = tuned(final(model), timer)
    assert not [line for line in lines if line[3] == "wrong"], lines
    assert len(heard) == len(lines) and {line[2] for line in lines} >= {"torch", "triton", "cudnn", "flash"}
    units = {"glu", "glu_grad_joined"} if model == "dense-tiny" else EXPERTS
    assert {"attention", "attention_grad", "rope_join", "rope_joined", "add_rms_norm_grad", *units} <= {
        line[0] for line in lines
    }
    assert "adamw" in left and "state" in left["adamw"] and "list" in left["global_norm"]
    rows = [row for row in profile.measured if row.source.startswith("mgraph tune")]
    assert len(rows) == len(lines) and all(row.card == profile.card and row.date for row in rows)
    # What runs on torch alone was faster here, so that is what is chosen now, and it is no estimate.
    chosen = Providers(final(model), profile, extents(final(model), SIZES))
    for _, node, choice in chosen.nodes():
        if node.op in ("glu", "rope", "rms_norm"):
            assert (choice.chosen.provider, choice.chosen.time.basis) == ("torch", "measured")
            assert choice.chosen.time.microseconds == pytest.approx(2.0)


def test_a_provider_that_is_wrong_is_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = candidates.candidates

    def off(call: Callable[..., Any], *inputs: Any) -> Any:
        return call(*inputs) * 1.1

    def broken(*given: Any) -> Any:
        for found in right(*given):
            runs = dict(found.runs)
            if found.instance.op == "glu":
                runs["triton"] = functools.partial(off, runs["triton"])
            yield candidates.Candidate(found.choice, found.node, runs)

    monkeypatch.setattr(candidates, "candidates", broken)
    profile, lines, _ = tuned(final("dense-tiny"), fake(2e-6, 1e-6)[0])
    assert [line[:1] + line[2:4] for line in lines if line[3] == "wrong"] == [("glu", "triton", "wrong")]
    row = next(row for row in profile.measured if "WRONG by 1.0e-01" in row.source)
    assert (row.op, row.provider, row.microseconds) == ("glu", "triton", tune.WRONG_MICROSECONDS)
    chosen = Providers(final("dense-tiny"), profile, extents(final("dense-tiny"), SIZES))
    picked = {node.op: choice.chosen.provider for _, node, choice in chosen.nodes()}
    assert picked["glu"] == "torch" and picked["rms_norm"] == "triton"


HAND = """mgraph-ir 1
module "hand"
dim B 1..
dim S 1..

func @main(%d: bf16[B, 4, S, 16], %q: bf16[B, 4, S, 16], %k: bf16[B, 2, S, 16], %v: bf16[B, 2, S, 16], \
%out: bf16[B, 4, S, 16], %lse: f32[B, 4, S], %ids: i64[B, S], %keys: i64[B, S]) {
  %dq: bf16[B, 4, S, 16], %dk: bf16[B, 2, S, 16], %dv: bf16[B, 2, S, 16] = \
attention_grad(%d, %q, %k, %v, %out, %lse, %ids, %keys) {causal = true, extra = ["segments", "keys"], scale = 0.25} \
backward at "a" "m.py":1 by capture
  return %dq
}

entry main = @main -> (dq)
"""


def test_inputs_fit_each_other() -> None:
    module = parse_module(HAND)
    ((choice, node),), left = candidates.instances(Providers(module, read_profile("h100"), {"B": 2, "S": 600}))
    assert not left and choice.instance.sizes[6] == "i64[2,600]"
    dout, q, k, v, out, lse, ids, keys = candidates.inputs(node, CPU)
    assert dout.shape == q.shape == (2, 4, 600, 16) and k.shape == v.shape == (2, 2, 600, 16)
    assert bool(keys.all()) and ids.tolist()[0] == [0] * 512 + [1] * 88
    # The out and lse of a gradient, by hand in float64.
    scores = 0.25 * q.double() @ k.double().repeat_interleave(2, 1).mT
    seen = (ids[:, None, :, None] == ids[:, None, None, :]) & torch.ones(600, 600).tril().bool()
    scores = scores.masked_fill(~seen, -torch.inf)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-4)
    expected = scores.softmax(-1) @ v.double().repeat_interleave(2, 1)
    assert torch.allclose(out.double(), expected, atol=2e-2)
    again, other = candidates.inputs(node, CPU), candidates.inputs(node, CPU, seed=1)
    assert torch.equal(q, again[1]) and not torch.equal(q, other[1])


def test_rows_of_experts_fit_each_other() -> None:
    """Each token has different experts, rows lie by expert and then by token, and all ends are those of the rows."""
    module = final("moe-tiny")
    found, _ = candidates.instances(Providers(module, read_profile("h100"), extents(module, SIZES)))
    seen = set()
    for _, node in found:
        if not is_routed(node):
            continue
        seen.add(node.op)
        given = candidates.inputs(node, CPU)
        types = [(v.tensor.dtype.text, len(v.tensor.shape)) for v in node.operands]
        named = dict(zip(types, given, strict=True))
        order, ends, choice = (named.get(kind) for kind in (("i64", 1), ("i32", 1), ("i64", 2)))
        if node.op.startswith("moe_route_order"):
            assert all(len(set(row)) == len(row) for row in given[0].tolist())
        if choice is not None:
            assert all(len(set(row)) == len(row) and max(row) < 8 for row in choice.tolist())
        if order is not None:
            assert sorted(order.tolist()) == list(range(len(order)))
        if ends is not None:
            assert len(ends) == 8 and ends[-1] == (given[0].shape[0] if order is None else len(order))
        if order is not None and ends is not None:
            for first, last in zip([0, *ends.tolist()], ends.tolist(), strict=False):
                tokens = (order[first:last] // 2).tolist()
                assert tokens == sorted(set(tokens)), node.op
    assert seen == EXPERTS


def test_a_choice_between_equals_is_not_compared() -> None:
    logits = routed_inputs._distinct(torch.zeros(5, 300, dtype=torch.bfloat16), torch.Generator().manual_seed(0))
    assert logits.dtype is torch.bfloat16 and all(len(set(row)) == 300 for row in logits.tolist())


def test_errors_are_relative_and_finite() -> None:
    one = torch.ones(4)
    assert candidates.largest_error((one, one * 1.5), (one, one)) == pytest.approx(0.5)
    assert candidates.largest_error(one * float("nan"), one) == float("inf")


def test_without_a_gpu_it_says_so(mgraph: Mgraph, compiled: Path, tmp_path: Path) -> None:
    run = mgraph("tune", compiled, "-o", tmp_path / "mine.json")
    assert run.code == 2 and "measures on a GPU, and torch sees none" in run.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nope",), "unknown model 'nope'"),
        (("dense-tiny", "--precision", "bf8"), "precision is 'bf8'"),
        (("dense-tiny", "-o", "nowhere/mine.json"), "cannot write the profile"),
        (("dense-tiny", "--profile", "h300"), "no profile 'h300'"),
    ],
)
def test_what_is_wrong_without_a_gpu_too(mgraph: Mgraph, arguments: tuple[str, ...], said: str) -> None:
    run = mgraph("tune", *arguments)
    assert run.code == 2 and said in run.err and "GPU" not in run.err


def test_a_package_or_a_model(compiled: Path) -> None:
    module, sizes = tune.opened(str(compiled), {"B": 3, "S": 0}, "bf16")
    assert sizes == {"B": 3, "S": 2048} and "microbatch" in module.entries
    again, given = tune.opened("dense-tiny", {"B": 0, "S": 64}, "fp32")
    assert given == {"B": 8, "S": 64} and again.entries.keys() >= module.entries.keys()
