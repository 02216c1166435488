"""Who runs an op: the fastest that takes it, or the one that is asked for; and the text says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mgraph.codegen.kernel_sites import LIBRARIES, KernelSites
from mgraph.codegen.profile import read_profile
from mgraph.codegen.providers import Providers, families, family_of, parse_providers, providers_of, refusal
from mgraph.codegen.step import step_text
from mgraph.errors import OptionError
from mgraph.ir.graph import Module
from mgraph.ir.local import Division
from mgraph.ir.parser import parse_module

TEXT = """mgraph-ir 1
module "attends"
dim B 1..
dim S 1..

func @main(%q: bf16[B, 8, S, WIDTH], %k: bf16[B, 2, S, WIDTH], %v: bf16[B, 2, S, WIDTH], %w: bf16[WIDTH]) {
  %out: bf16[B, 8, S, WIDTH], %lse: f32[B, 8, S] = attention(%q, %k, %v) \
{causal = true, scale = 0.125MASK} forward at "a" "m.py":1 by capture
  %y: bf16[B, 8, S, WIDTH], %r: f32[B, 8, S, 1] = rms_norm(%out, %w) {eps = 1e-05} forward at "a" "m.py":2 by capture
  return %y
}

entry main = @main -> (y)
"""
SIZES = {"B": 4, "S": 4096}


def module(width: int = 64, mask: str = "", dtype: str = "bf16") -> Module:
    text = TEXT.replace("WIDTH", str(width)).replace("MASK", mask)
    return parse_module(text.replace("bf16", dtype))


def choose(given: Module, *rules: str) -> Providers:
    return Providers(given, read_profile("h100"), SIZES, parse_providers(rules))


def text_of(given: Module, *rules: str) -> str:
    sites = KernelSites(gpu=True, division=Division.of(given, {}), chosen=choose(given, *rules).chosen)
    return step_text(given, sites)


@pytest.mark.parametrize(
    ("given", "rules", "chosen", "refused"),
    [
        (module(), (), ["cudnn", "triton", "flash", "efficient", "torch"], {}),
        (module(), ("attention=flash",), ["flash", "cudnn", "triton", "efficient", "torch"], {}),
        (module(256), (), ["triton", "flash", "efficient", "torch"], {"cudnn": "256 wide"}),
        (module(mask=", window = 128"), (), ["triton", "torch"], dict.fromkeys(LIBRARIES, "window")),
        (module(dtype="f32"), (), ["efficient", "torch"], {"triton": "bf16 or f16", "flash": "f32", "cudnn": "f32"}),
    ],
    ids=["causal", "forced", "wide", "window", "f32"],
)
def test_candidates_are_ordered_and_the_others_say_why(
    given: Module, rules: tuple[str, ...], chosen: list[str], refused: dict[str, str]
) -> None:
    found = choose(given, *rules).choice(given.functions["main"].nodes[0])
    assert [c.provider for c in found.candidates] == chosen and found.forced == bool(rules)
    assert found.refused.keys() == refused.keys()
    assert all(reason in found.refused[name] for name, reason in refused.items())
    times = [c.time.microseconds for c in found.candidates][bool(rules) :]
    assert times == sorted(times)


def test_the_text_is_what_was_chosen() -> None:
    plain = text_of(module())
    assert 'scale=0.125, by="cudnn")' in plain and "K.rms_norm_fwd_0(" in plain and "K.attention" not in plain
    assert 'by="flash")' in text_of(module(), "attention=flash")
    assert "K.attention_fwd_0(" in text_of(module(), "attention=triton")
    torch = text_of(module(), "attention=torch", "rms_norm=torch")
    assert 'by="torch")' in torch and "rt.rms_norm(" in torch and "K." not in torch
    assert "K.attention_fwd_0(" in text_of(module(mask=", window = 128"))
    # Where nothing was chosen, the runtime finds a kernel by itself.
    assert "by=" not in step_text(module(), KernelSites(gpu=True))


def test_what_is_unverified_runs_only_where_it_is_asked_for() -> None:
    windowed = module(mask=", window = 128")
    node = windowed.functions["main"].nodes[0]
    profile = read_profile("h100")
    fast = replace(profile.measured[0], **vars(choose(windowed).choice(node).instance), provider="flash-attn")
    tuned = profile.with_rows([replace(fast, microseconds=0.1)])
    found = Providers(windowed, tuned, SIZES).choice(node)
    assert "flash-attn" not in [c.provider for c in found.candidates] and "flash-attn" not in found.refused
    assert 'by="flash-attn")' in text_of(windowed, "attention=flash-attn")
    with pytest.raises(OptionError, match=r"flash-attn takes no attention of this model: q is f32"):
        choose(module(dtype="f32"), "attention=flash-attn").check_forced()


def test_a_norm_of_rows_that_are_too_long_is_run_by_torch_and_says_so() -> None:
    given = module(65536)
    found = choose(given).choice(given.functions["main"].nodes[1])
    assert [c.provider for c in found.candidates] == ["torch"] and "up to 16384" in found.refused["triton"]
    assert "K.rms_norm" not in text_of(given) and "K.rms_norm" in text_of(module())


PRODUCTS = """mgraph-ir 1
module "experts"
dim S 1..

func @main(%rows: bf16[S, 64], %w: bf16[4, 64, 32], %offsets: i32[4], %bias: bf16[4, 32]) {
  %y: bf16[S, 32] = grouped_matmul(%rows, %w, %offsets, %bias) forward at "a" "m.py":1 by capture
  return %y
}

entry main = @main -> (y)
"""


def test_products_of_groups_by_transformer_engine() -> None:
    given = parse_module(PRODUCTS)
    assert "te" not in [c.provider for c in choose(given).choice(given.functions["main"].nodes[0]).candidates]
    assert 'rt.grouped_mm(rows, w, offsets, bias, by="te")' in text_of(given, "grouped_matmul=te")
    assert "by=" not in text_of(given, "grouped_matmul=torch")
    wide = parse_module(PRODUCTS.replace("bf16", "f32"))
    with pytest.raises(OptionError, match="te takes no grouped_matmul of this model: rows are f32"):
        choose(wide, "grouped_matmul=te").check_forced()


LINEAR = """mgraph-ir 1
module "served"
dim S 1..

func @main(%x: bf16[S, 64], %w: bf16[32, 64], %gate: bf16[48, 32], %up: bf16[48, 32]) {
  %y: bf16[S, 32] = linear(%x, %w) forward at "a" "m.py":1 by capture
  %unit: bf16[S, 48] = linear_glu(%y, %gate, %up) {act = "silu"} forward at "b" "m.py":2 by capture
  return %unit
}

entry main = @main -> (unit)
"""


def test_products_by_tensorrt() -> None:
    given = parse_module(LINEAR)
    chosen = choose(given)
    for node in given.functions["main"].nodes:
        assert "tensorrt" not in [c.provider for c in chosen.choice(node).candidates]
    text = text_of(given, "linear=tensorrt")
    assert 'rt.linear(x, w, by="tensorrt")' in text and 'rt.linear_glu(y, gate, up, act="silu"' in text
    assert text.count('by="tensorrt")') + text.count('by="tensorrt",') == 2 and "few=" not in text
    assert "tensorrt" not in text_of(given)
    wide = parse_module(LINEAR.replace("bf16", "f64"))
    with pytest.raises(OptionError, match="tensorrt takes no linear of this model: rows are f64"):
        choose(wide, "linear=tensorrt").check_forced()


def test_what_is_said_of_each_node() -> None:
    attention, norm = choose(module(256)).data()
    assert (attention["function"], attention["node"], attention["op"]) == ("main", "out", "attention")
    assert attention["provider"] == "triton" and attention["next"]["provider"] == "flash"
    assert attention["basis"] == "estimated" and "256 wide" in attention["refused"]["cudnn"]
    assert (norm["provider"], norm["next"]["provider"], norm["refused"]) == ("triton", "torch", {})


def test_a_measured_row_decides() -> None:
    given = module()
    providers = choose(given)
    node = given.functions["main"].nodes[0]
    instance = providers.choice(node).instance
    profile = read_profile("h100")
    row = replace(profile.measured[0], **vars(instance), provider="flash", microseconds=1.0)
    tuned = Providers(given, profile.with_rows([row]), SIZES).choice(node)
    assert (tuned.chosen.provider, tuned.chosen.time.basis) == ("flash", "measured")
    assert tuned.next is not None and tuned.next.provider == "cudnn"


def test_rules_are_checked() -> None:
    assert parse_providers(["attention=flash", "rope = torch"]) == {"attention": "flash", "rope": "torch"}
    cases: dict[str, Any] = {
        "atention=flash": "did you mean 'attention'",
        "attention=cublas": "one of cudnn, flash, efficient, triton, torch, flash-attn",
        "rope=flash": "one of triton, torch",
        "rope": "'rope' does not say who is to run rope\n  at --provider\n  try: rope=PROVIDER, of triton, torch",
        "nix=triton": f"try: FAMILY=PROVIDER; one of {', '.join(sorted(families()))}",
    }
    for rule, said in cases.items():
        with pytest.raises(OptionError) as caught:
            parse_providers([rule])
        assert said in str(caught.value) and "--provider" in str(caught.value)
    with pytest.raises(OptionError, match="given triton and torch"):
        parse_providers(["rope=triton", "rope=torch"])


def test_a_provider_that_takes_no_node_is_an_error() -> None:
    choose(module(), "attention=cudnn").check_forced()
    with pytest.raises(OptionError, match=r"cudnn takes no attention of this model: heads are 256 wide") as caught:
        choose(module(256), "attention=cudnn").check_forced()
    assert "triton runs it" in str(caught.value)
    with pytest.raises(OptionError, match="triton takes no grouped_matmul: this package has none") as caught:
        choose(module(), "grouped_matmul=triton", "attention=cudnn").check_forced()
    assert "it has attention, rms_norm" in str(caught.value)


def test_families_have_names() -> None:
    known = families()
    assert {"attention", "rms_norm", "residual_norm", "rope", "norm_rope", "glu", "moe_rows", "adamw"} <= known.keys()
    assert {"cross_entropy", "embedding_grad", "global_norm"} <= known.keys()
    assert not any("aten" in name or name.endswith("grad") for name in known if name != "embedding_grad")
    assert family_of("aten.embedding_dense_backward.default") == "embedding_grad"
    assert (family_of("glu_grad"), family_of("adamw_"), family_of("moe_dispatch_grad")) == ("glu", "adamw", "moe_rows")
    assert providers_of("aten.mm.default") == ("torch",) and providers_of("all_reduce_start") == ("nccl",)
    assert providers_of("region") == ("triton",)


def test_a_sum_needs_a_total() -> None:
    text = """mgraph-ir 1
module "embeds"
dim B 1..

func @main(%g: bf16[B, 64], %t: i64[B]) {
  %d: bf16[32, 64] = aten.embedding_dense_backward.default(%g, %t) \
{num_weights = 32, padding_idx = -1, scale_grad_by_freq = false} backward at "a" "m.py":1 by capture
  return %d
}

entry main = @main -> (d)
"""
    node = parse_module(text).functions["main"].nodes[0]
    assert "adds to a total" in str(refusal("triton", node))
