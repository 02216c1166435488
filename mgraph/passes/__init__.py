"""Passes: one file each, named as the pass, found through one literal table.

The table maps a pass name to `module:Class` and is resolved only when a pass is asked for, so that listing, parsing
and explaining pipelines imports no pass.
"""

from __future__ import annotations

import importlib

from mgraph.errors import PassError, did_you_mean
from mgraph.passes.base import Pass

PASSES: dict[str, str] = {
    # normalize
    "outline": "mgraph.passes.outline:Outline",
    "canonicalize": "mgraph.passes.canonicalize:Canonicalize",
    "constant-fold": "mgraph.passes.constant_fold:ConstantFold",
    "cse": "mgraph.passes.cse:CommonSubexpressions",
    "dce": "mgraph.passes.dce:DeadCode",
    # raise
    "raise-norm": "mgraph.passes.raise_norm:RaiseNorm",
    "raise-rope": "mgraph.passes.raise_rope:RaiseRope",
    "raise-attention": "mgraph.passes.raise_attention:RaiseAttention",
    "raise-glu": "mgraph.passes.raise_glu:RaiseGlu",
    "raise-moe": "mgraph.passes.raise_moe:RaiseMoe",
    "raise-loss": "mgraph.passes.raise_loss:RaiseLoss",
    # derive
    "lora": "mgraph.passes.lora:Lora",
    "freeze": "mgraph.passes.freeze:Freeze",
    "pad": "mgraph.passes.pad:Pad",
    "repeat-heads": "mgraph.passes.repeat_heads:RepeatHeads",
    "replayable-routing": "mgraph.passes.replayable_routing:ReplayableRouting",
    "pad-to-capacity": "mgraph.passes.pad_to_capacity:PadToCapacity",
    "expert-dispatch": "mgraph.passes.expert_dispatch:ExpertDispatch",
    "joint-losses": "mgraph.passes.joint_losses:JointLosses",
    "autodiff": "mgraph.passes.autodiff:Autodiff",
    "recompute": "mgraph.passes.recompute:Recompute",
    "derive-serve": "mgraph.passes.derive_serve:DeriveServe",
    "adamw": "mgraph.passes.adamw:AdamW",
    "expert-budget": "mgraph.passes.expert_budget:ExpertBudget",
    "expert-bias": "mgraph.passes.expert_bias:ExpertBias",
    # shard
    "data-parallel": "mgraph.passes.data_parallel:DataParallel",
    "tensor-parallel": "mgraph.passes.tensor_parallel:TensorParallel",
    "fully-shard": "mgraph.passes.fully_shard:FullyShard",
    "expert-parallel": "mgraph.passes.expert_parallel:ExpertParallel",
    # fuse
    "fuse-loss": "mgraph.passes.fuse_loss:FuseLoss",
    "chunk-loss": "mgraph.passes.chunk_loss:ChunkLoss",
    "fuse-residual": "mgraph.passes.fuse_residual:FuseResidual",
    "fuse-norm": "mgraph.passes.fuse_norm:FuseNorm",
    "fuse-append": "mgraph.passes.fuse_append:FuseAppend",
    "fuse-rope": "mgraph.passes.fuse_rope:FuseRope",
    "skip-padding": "mgraph.passes.skip_padding:SkipPadding",
    "fuse-experts": "mgraph.passes.fuse_experts:FuseExperts",
    "fuse-products": "mgraph.passes.fuse_products:FuseProducts",
    "fuse-linear": "mgraph.passes.fuse_linear:FuseLinear",
    "fuse-regions": "mgraph.passes.fuse_regions:FuseRegions",
    # schedule
    "by-layer": "mgraph.passes.by_layer:ByLayer",
    "late-gradients": "mgraph.passes.late_gradients:LateGradients",
    "overlap-experts": "mgraph.passes.overlap_experts:OverlapExperts",
    "overlap-gradients": "mgraph.passes.overlap_gradients:OverlapGradients",
    "write-gradients": "mgraph.passes.write_gradients:WriteGradients",
    "join-products": "mgraph.passes.join_products:JoinProducts",
    "offload": "mgraph.passes.offload:Offload",
    "overlap-update": "mgraph.passes.overlap_update:OverlapUpdate",
    "fuse-squares": "mgraph.passes.fuse_squares:FuseSquares",
    "in-place": "mgraph.passes.in_place:InPlace",
    "cuda-graphs": "mgraph.passes.cuda_graphs:CudaGraphs",
}


def pass_class(name: str) -> type[Pass]:
    """The class of a pass name. Raises PassError, with the nearest name, for an unknown one."""
    if name not in PASSES:
        raise PassError(f"unknown pass '{name}'", hint=did_you_mean(name, PASSES))
    where, _, class_name = PASSES[name].partition(":")
    found = getattr(importlib.import_module(where), class_name)
    assert isinstance(found, type) and issubclass(found, Pass) and found.name == name, f"{PASSES[name]} is not {name}"
    return found
