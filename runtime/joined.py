"""Tensors that lie one after another in memory, as one: so one product makes what several weights make of an input."""

from __future__ import annotations

import torch
from torch import Tensor

from mgraph.errors import PackageError
from mgraph.runtime.ops import glu_grad, rope


def joined(*tensors: Tensor, gathered: bool = False) -> Tensor:
    """Contiguous tensors [n_i, ...], each of which begins where the one before ends, as one view [sum n_i, ...].

    Raises PackageError where they lie otherwise: what a package's manifest says of its states, `create_state` does.
    What is `gathered`, and only read, is copied there: over an axis of one rank nothing is gathered, and a CUDA graph
    of a function reads copies of what it is handed.
    """
    first = tensors[0]
    end = first.storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        lies = same and tensor.storage_offset() == end and tensor.is_contiguous()
        if not lies and gathered:
            return torch.cat(tensors)
        if not lies:
            raise PackageError(
                "states that one product reads do not lie one after another",
                hint="make the state with create_state, and write into its tensors instead of replacing them",
            )
        end += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def glu_grad_joined(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    act: str,
    alpha: float = 1.702,
    limit: float = 0.0,
    offset: float = 0.0,
    layout: str = "halves",
) -> Tensor:
    """The gradients of `glu` for gate and up [..., f] in one tensor [..., 2f]: `halves` (`dgate | dup`), `swapped`
    (`dup | dgate`), or `interleaved` (dgate in even columns, dup in odd)."""
    dgate, dup = glu_grad(dy, gate, up, act=act, alpha=alpha, limit=limit, offset=offset)
    if layout == "interleaved":
        return torch.stack((dgate, dup), -1).flatten(-2)
    return torch.cat((dup, dgate) if layout == "swapped" else (dgate, dup), -1)


def rope_join(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, style: str = "half", inverse: bool = False
) -> Tensor:
    """The heads of q [B, H, S, D], k [B, G, S, D] and v [B, J, S, D] beside each other, [B, S, (H + G + J) D], those of
    q and k turned as by `rope`."""
    turned = [rope(x, cos, sin, style=style, inverse=inverse) for x in (q, k)]
    return torch.cat([x.transpose(1, 2).flatten(2) for x in (*turned, v)], -1)


def rope_joined(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    width: int,
    style: str = "half",
    inverse: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [B, S, n width] whose first `heads` heads are turned as by `rope`; in the memory of `out` (x), if given."""
    made = x.clone() if out is None else out
    turned = made[..., : heads * width].unflatten(-1, (heads, width)).transpose(1, 2)
    turned.copy_(rope(turned, cos, sin, style=style, inverse=inverse))
    return made
