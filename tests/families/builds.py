"""Packages of the families and their eager models, with the masks of dropout replayed in eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mgraph.compiler import Compilation, compile_package
from mgraph.ir.graph import Module, Static
from mgraph.recipe import Recipe
from tests.families.configs import eager, write_config

RNG = {"rng.seed": 5, "rng.step": 3, "rng.sample": 2}


@dataclass(frozen=True)
class Family:
    """A compiled family: the compilation, the package's directory, and a factory of the eager model."""

    name: str
    compilation: Compilation
    path: Path
    eager: Callable[..., nn.Module]


def compile_family(name: str, directory: Path, **options: Any) -> Family:
    """Compile a family into a package under `directory`, without GPU kernels."""
    spec = write_config(name, directory / name)
    recipe = Recipe(model=spec, output=str(directory / f"{name}-package"), arch="none", beta2=0.999, **options)
    compilation = compile_package(recipe)
    assert compilation.package is not None
    return Family(name, compilation, compilation.package, lambda **changes: eager(name, **changes))


def masks(module: Module, state: dict[str, Tensor], tokens: Tensor) -> list[tuple[int, Tensor]]:
    """The dropout masks of a microbatch, keep / (1 - p), and its uniform numbers, in the order of the forward:
    (how many, values).

    Read off the entry's own nodes and those of the functions it calls, and drawn by the definition: no emitted code.
    """
    from mgraph import philox
    from mgraph.ir.dims import evaluate

    dims = {"B": tokens.shape[0], "S": tokens.shape[1]}
    found: list[tuple[int, Tensor]] = []

    def walk(name: str, statics: dict[str, Any]) -> None:
        for node in module.functions[name].nodes:
            if node.phase.value != "forward":
                continue
            if node.op == "call":
                given = {k.removeprefix("static."): v for k, v in node.attrs.items() if k.startswith("static.")}
                walk(str(node.attrs["callee"]), given)
            elif node.op in ("dropout", "random"):
                attrs: dict[str, Any] = {
                    k: statics[v.name] if isinstance(v, Static) else v for k, v in node.attrs.items()
                }
                shape = [int(evaluate(d, dims)) for d in node.result.tensor.shape]
                key = philox.sample_key(state["rng.seed"], attrs["site"], attrs.get("call", 0))
                samples, counters = int(evaluate(attrs["samples"], dims)), (state["rng.step"], state["rng.sample"])
                if node.op == "random":
                    drawn = philox.uniform_by_sample(shape, samples, key, *counters)
                else:
                    keep = philox.keep_by_sample(shape, samples, key, *counters, attrs["p"])
                    drawn = keep.double() / (1 - attrs["p"])
                found.append((drawn.numel(), drawn))

    walk(module.entries["microbatch"].function, {})
    return found


@contextmanager
def replayed(found: list[tuple[int, Tensor]]) -> Iterator[None]:
    """Eager dropout, attention with dropout, and `torch.rand_like` take these in turn."""
    original, fused, uniform, left = F.dropout, F.scaled_dot_product_attention, torch.rand_like, iter(found)

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        count, mask = next(left)
        assert count == x.numel()
        return x * mask.view_as(x).to(x.dtype)

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        if not dropout_p:
            return fused(q, k, v, attn_mask, 0.0, is_causal, scale=scale, **_)
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        if attn_mask is not None:
            assert attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        return dropout(scores.softmax(-1), dropout_p) @ v

    def rand_like(x: Tensor) -> Tensor:
        count, numbers = next(left)
        assert count == x.numel()
        return numbers.view_as(x).to(x.dtype)

    F.dropout, F.scaled_dot_product_attention = dropout, attention  # type: ignore[assignment]
    torch.rand_like = rand_like  # type: ignore[assignment]
    try:
        yield
        assert next(left, None) is None, "eager drew fewer masks"
    finally:
        F.dropout, F.scaled_dot_product_attention = original, fused
        torch.rand_like = uniform


def prepared(family: Family, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with its random ops placed somewhere in a run."""
    for name, value in RNG.items():
        if name in state:
            state[name].fill_(value)
    return state
