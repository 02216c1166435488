"""What the manifest says of a state that ranks hold parts of."""

from __future__ import annotations

import json

import torch

from mgraph.codegen.manifest import manifest
from mgraph.ir.graph import Axis, Module, State, StateKind
from mgraph.ir.types import DType, Partial, Shard, TensorType
from mgraph.runtime.package import DTYPES
from mgraph.runtime.shards import Split, share_of


def test_placements_in_order_over_basic_axes() -> None:
    mesh = (Axis("fsdp", 2), Axis("kv", 2), Axis("rep", 2), Axis("tp", None, ("kv", "rep")))
    packed = TensorType(DType.F32, (12, 8), factors=((0, (2, 6)),)).place("tp", Shard(0, 1)).place("fsdp", Shard(1))
    grad = TensorType(DType.F32, (5,)).place("fsdp", Partial())
    states = {
        name: State.make(name, type_, StateKind.PARAM, init=(("zeros_",),))
        for name, type_ in (("packed", packed), ("grad", grad))
    }
    module = Module("m", mesh=mesh, state=states)
    written = json.loads(json.dumps(manifest(module, "train", "", {}, {}, [], {})))
    assert "placement" not in written["state"][1] and "factors" not in written["state"][1]
    item = written["state"][0]
    splits = tuple(Split(**split) for split in item["placement"])
    assert splits == (Split("kv", 0, 1), Split("rep", 0, 1), Split("fsdp", 1))
    assert DTYPES[item["dtype"]] is torch.float32 and item["shape"] == [12, 8]
    factors = tuple((dim, tuple(extents)) for dim, extents in item["factors"])
    sizes = {"fsdp": 2, "kv": 2, "rep": 3}
    share = share_of((12, 8), splits, factors, sizes, {"fsdp": 1, "kv": 1, "rep": 2})
    assert [(p.whole, p.sizes) for p in share.pieces] == [((5, 4), (1, 4)), ((11, 4), (1, 4))]
