"""Hand-built modules that several pass tests share: an embedding, calls of one MLP layer function, a loss."""

from __future__ import annotations

from typing import Any

import torch

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.dims import NamedDim, symbol
from mgraph.ir.graph import Entry, Module, Origin, State, StateKind
from mgraph.ir.types import DType, TensorType

B, S = symbol("B"), symbol("S")
WIDTH, INNER, VOCAB = 6, 10, 11


def tensor(*shape: Any, dtype: DType = DType.F32) -> TensorType:
    """A replicated tensor type."""
    return TensorType(dtype, shape)


def mlp_module(layers: int = 2) -> Module:
    """`forward(tokens, labels)`: embedding, `layers` calls of one residual MLP, tied head, cross entropy by parts."""
    body = FunctionBuilder("layer", "capture")
    body.origin = Origin("layers.*", "model.py", 10)
    x = body.param("x", tensor(B, S, WIDTH))
    up, down = body.slot("up", tensor(INNER, WIDTH)), body.slot("down", tensor(WIDTH, INNER))
    hidden = body.one("aten.silu.default", body.one("aten.linear.default", x, up, name="up_out"))
    layer = body.build([body.one("aten.add.Tensor", x, body.one("aten.linear.default", hidden, down))])

    names = ["embed"] + [f"layers.{i}.{p}" for i in range(layers) for p in ("up", "down")]
    shapes = [tensor(VOCAB, WIDTH)] + [tensor(INNER, WIDTH), tensor(WIDTH, INNER)] * layers
    state = {
        n: State.make(n, t, StateKind.PARAM, init=(("normal_", 0.0, 0.5),), trainable=True)
        for n, t in zip(names, shapes, strict=True)
    }
    main = FunctionBuilder("forward", "capture")
    main.origin = Origin("", "model.py", 20)
    tokens, labels = (main.param(n, tensor(B, S, dtype=DType.I64)) for n in ("tokens", "labels"))
    h = main.one("aten.embedding.default", state["embed"].value, tokens)
    for i in range(layers):
        slots = [state[f"layers.{i}.{p}"].value for p in ("up", "down")]
        (h,) = main.emit("call", [h, *slots], {"callee": "layer"}, types=[h.type], names=["h"])
    logits = main.one("aten.linear.default", h, state["embed"].value, name="logits")
    flat = main.one("reshape", logits, shape=(B * S, VOCAB))
    target = main.one("reshape", labels, shape=(B * S,))
    loss = main.one("aten.cross_entropy_loss.default", flat, target, reduction=2, name="loss_sum")
    kept = main.one("aten.ne.Scalar", target, other=-100)
    count = main.one("aten.sum.default", kept, name="count")
    function = main.build([loss, count, logits])
    return Module(
        "mlp",
        dims={"B": NamedDim("B"), "S": NamedDim("S", 2)},
        state=state,
        functions={"layer": layer, "forward": function},
        entries={"forward": Entry("forward", "forward", ("loss_sum", "count", "logits"))},
    )


def random_state(module: Module, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random values for params, zeros for everything else."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, declared in module.state.items():
        shape = [int(d) for d in declared.type.shape]
        if declared.kind is StateKind.PARAM:
            made[name] = torch.randn(shape, generator=generator, dtype=dtype) * 0.5
        else:
            integer = declared.type.dtype is DType.I64
            made[name] = torch.zeros(shape, dtype=torch.int64 if integer else dtype)
    return made


def random_batch(batch: int = 2, seq: int = 5, seed: int = 1, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """Tokens and labels, with one label masked."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (batch, seq), generator=generator)
    labels = torch.randint(vocab, (batch, seq), generator=generator)
    labels[0, 0] = -100
    return {"tokens": tokens, "labels": labels}
