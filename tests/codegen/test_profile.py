"""Profiles: what is committed is read, measured rows win, near ones are scaled, and what is wrong is said."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgraph.codegen.profile import Instance, Profile, Row, committed_profiles, read_profile
from mgraph.errors import OptionError
from mgraph.ir.opdef import op_def
from mgraph.ir.parser import parse_module

TEXT = """mgraph-ir 1
module "norms"
dim B 1..
dim S 1..

func @main(%x: bf16[B, S, 4096], %r: bf16[B, S, 4096], %w: bf16[4096]) {
  %t: bf16[B, S, 4096], %y: bf16[B, S, 4096], %s: f32[B, S, 1] = add_rms_norm(%x, %r, %w) \
{eps = 1e-05, round = "normed"} forward at "a" "m.py":1 by capture
  return %t, %y, %s
}
"""


def instance(batch: int, seq: int) -> Instance:
    node = parse_module(TEXT).functions["main"].nodes[0]
    return Instance.of(node, {"B": batch, "S": seq})


def test_an_instance_is_a_node_at_given_sizes() -> None:
    found = instance(2, 512)
    assert found.sizes == ("bf16[2,512,4096]", "bf16[2,512,4096]", "bf16[4096]")
    assert found.bytes == 4 * 2 * 512 * 4096 * 2 + 4096 * 2 + 2 * 512 * 4
    assert found.flops == 6 * 2 * 512 * 4096
    assert found.attrs == {"eps": 1e-5, "offset": 0.0, "round": "normed"}


PINS = {"NVIDIA H100 80GB HBM3": 3.36e12, "NVIDIA H200": 4.8e12}
"""Bytes per second that a card's memory can give, as its maker says."""


@pytest.mark.parametrize("name", committed_profiles())
def test_committed_profiles_say_where_times_come_from(name: str) -> None:
    profile = read_profile(name)
    assert profile.name == name and profile.arch == "sm_90a" and profile.rates["bytes_per_second"] > 3e12
    assert all(row.source and row.date and row.card for row in profile.measured)
    for row in profile.measured:
        assert row.attrs.keys() == op_def(row.op).complete(row.attrs).keys(), "else it is no node's"
        if row.provider == "triton" and not row.op.startswith("attention"):
            assert row.bytes / row.microseconds * 1e6 < PINS[row.card], f"{row} is faster than the memory"


def test_times_are_measured_near_or_modelled() -> None:
    profile = read_profile("h100")
    bare = replace(profile, measured=())
    known = next(row for row in profile.measured if row.op == "add_rms_norm" and row.sizes[0] == "bf16[16384,4096]")
    assert str(profile.time(known, "triton")) == f"{known.microseconds:.1f}"
    far = instance(4, 8192)  # twice as many rows, of another rank
    near = profile.time(far, "triton")
    assert near.basis == "estimated" and near.microseconds == pytest.approx(2 * known.microseconds, rel=0.02)
    modelled = bare.time(far, "triton")
    assert modelled.microseconds == pytest.approx(1e6 * far.bytes / (3.02e12 * 0.92) + 2)
    other = replace(far, attrs={**far.attrs, "round": "product"})
    assert profile.time(other, "triton") == modelled, "a row of another kind says nothing"
    assert profile.time(far, "torch").microseconds > 2 * near.microseconds


def fastest(op: str, width: int, batch: int, length: int) -> str:
    """The provider that the profile of an H200 takes for causal attention of 32 heads on 8."""
    profile = read_profile("h200")
    known = (r for r in profile.measured if (r.op, r.provider) == (op, "cudnn"))
    heads = [f"bf16[4,{count},4096,{width}]" for count in (32, 8)]
    row = next(r for r in known if all(size in r.sizes for size in heads))
    sizes = tuple(size.replace("[4,", f"[{batch},").replace(",4096", f",{length}") for size in row.sizes)
    moved, share = batch * length / (4 * 4096), length / 4096
    wanted = Instance(row.op, row.attrs, sizes, int(row.bytes * moved), int(row.flops * moved * share))
    times = {provider: profile.time(wanted, provider).microseconds for provider in ("triton", "cudnn", "flash")}
    return min(times, key=times.__getitem__)


@pytest.mark.parametrize(
    ("batch", "length", "first"), [(8, 512, "triton"), (3, 1500, "triton"), (3, 3000, "cudnn"), (2, 16384, "cudnn")]
)
def test_providers_overtake_between_measured_sizes(batch: int, length: int, first: str) -> None:
    """The gradient of causal attention of 32 heads on 8, as an H200 ran it at sizes that the profile has no rows for:
    180, 411, 1,511 and 27,693 microseconds by the kernel, 235, 462, 1,378 and 21,772 by cuDNN's."""
    assert fastest("attention_grad", 128, batch, length) == first


def test_of_rows_as_far_the_one_with_as_much_work_says_more() -> None:
    """Causal attention of narrow heads: of 8,192 tokens the kernel is ahead for one sequence and cuDNN's for four; of
    two of 16,384 tokens, the work of eight of 8,192, an H200 took 5,358 and 5,051 microseconds."""
    assert [fastest("attention", 64, *sizes) for sizes in ((1, 8192), (4, 8192), (2, 16384))] == [
        "triton",
        "cudnn",
        "cudnn",
    ]


def test_rows_replace_those_of_the_same_instance(tmp_path: Path) -> None:
    profile = read_profile("h100")
    first = profile.measured[0]
    again = replace(first, microseconds=1.0, source="again")
    other = replace(first, provider="torch", microseconds=9.0)
    made = profile.with_rows([again, other])
    assert len(made.measured) == len(profile.measured) + 1 and made.time(first, "triton").microseconds == 1.0
    file = tmp_path / "mine.json"
    file.write_text(made.text())
    read = read_profile(str(file))
    assert read == made and isinstance(read.measured[0], Row) and isinstance(read, Profile)


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("rates", {}, "rates lacks bytes_per_second, link_bytes_per_second, launch_seconds, flops_per_second"),
        ("rates", 3, "rates is 3; it must be a mapping"),
        ("rates.bytes_per_second", 0, "rates.bytes_per_second is 0; it must be a number from 1e-12 to 1e+24"),
        ("rates.link_bytes_per_second", math.nan, "rates.link_bytes_per_second is nan; it must be a number"),
        ("rates.launch_seconds", True, "rates.launch_seconds is True; it must be a number"),
        ("rates.flops_per_second.bf16", math.inf, "rates.flops_per_second.bf16 is inf; it must be a number"),
        ("rates.flops_per_second.f16", "8e14", "rates.flops_per_second.f16 is '8e14'; it must be a number"),
        ("rates.flops_per_second", {"bf16": 8e14}, "rates.flops_per_second lacks f32"),
        ("models", None, "models is None; it must be a list"),
        ("models.1", {"of": 1}, "models[1] has 'of', and no more than op, provider, memory"),
        ("models.0.memory", 0.0, "models[0].memory is 0.0; it must be a number"),
        ("models.3.math", -0.7, "models[3].math is -0.7; it must be a number"),
        ("models.3.passes", 10**400, "models[3].passes is 1000"),
        ("models.3.launches", 1.5, "models[3].launches is 1.5; it must be a whole number from 1"),
        ("measured.1", {"op": "glu"}, "measured[1] lacks provider, attrs, sizes, microseconds, bytes, flops"),
        ("measured.0.microseconds", math.inf, "measured[0].microseconds is inf; it must be a number"),
        ("measured.0.flops", -1, "measured[0].flops is -1; it must be a whole number from 0"),
        ("measured.2.sizes", "bf16[8]", "measured[2].sizes is 'bf16[8]'; it must be a list"),
        ("measured.2.sizes.1", "bf16[8,x]", "measured[2].sizes[1] is 'bf16[8,x]'; it must be a dtype and extents"),
        ("measured.2.sizes.0", 8, "measured[2].sizes[0] is 8; it must be a dtype"),
        ("measured.2.sizes.0", "f33[8]", "measured[2].sizes[0] is 'f33[8]'; it must be a dtype"),
        ("measured.0.attrs", [], "measured[0].attrs is []; it must be a mapping"),
        ("card", 7, "card is 7; it must be a text"),
        ("versions.torch", 2.11, "versions.torch is 2.11; it must be a text"),
        ("", [1], "the file is [1]; it must be a mapping"),
    ],
)
def test_damaged_files(tmp_path: Path, place: str, value: object, reason: str) -> None:
    file = tmp_path / "mine.json"
    holder: Any = {"": json.loads(read_profile("h100").text())}
    *path, last = ["", *place.split(".")] if place else [""]
    within = holder
    for part in path:
        within = within[int(part) if isinstance(within, list) else part]
    within[int(last) if isinstance(within, list) else last] = value
    file.write_text(json.dumps(holder[""]))
    with pytest.raises(OptionError, match=re.escape(reason)) as caught:
        read_profile(str(file))
    assert caught.value.where == str(file) and caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"name": ' + "1" * 5000 + "}", "\udcff"])
def test_what_is_no_json(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(OptionError, match="the profile cannot be read: ") as caught:
        read_profile(str(file))
    assert caught.value.where == str(file)


def test_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no profile 'h10'") as caught:
        read_profile("h10")
    assert "h100" in str(caught.value)
    with pytest.raises(OptionError, match="No such file"):
        read_profile(str(tmp_path / "none.json"))
