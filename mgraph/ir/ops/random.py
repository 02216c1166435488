"""Random numbers that are the same on every mesh, under recompute, in graphs and after resume.

Numbers are drawn by counter (Philox, Salmon et al. 2011) and never from a generator: what an element gets follows from
the run's seed, the training step, which sequence of the step it belongs to, its place in that sequence, and the place
in the model (`site`, and `call` for the layer). Three states hold the first three (`STATES`); the runtime sets them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.dims import Dim, as_dim, divide, names_in, symbol
from mgraph.ir.opdef import REQUIRED, GradientRequest, define_op
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.ops.numeric import rounded
from mgraph.ir.torch_bridge import promote, to_torch_dtype
from mgraph.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from mgraph.ir.graph import Value

STATES = {"rng.seed": (("seed_",),), "rng.step": (("zeros_",),), "rng.sample": (("zeros_",),)}
"""The i64[] states that random ops read, and their initialisers: the run's seed, the number of finished steps, and the
number within the step of the first sequence of the microbatch."""

_PLACE = {"site": REQUIRED, "call": 0, "samples": REQUIRED}
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def place(path: str) -> tuple[str, int]:
    """The attributes `site` and `call` of a module path: the path with `*` for the layer, and the layer's number."""
    number = _LAYER_NUMBER.search(path)
    return (path, 0) if number is None else (_LAYER_NUMBER.sub("*", path, count=1), int(number.group()))


def sequences_in(shape: Sequence[Dim]) -> Dim | None:
    """The attribute `samples` for a tensor: B where its first dim has the batch, 1 where it has none; `None` where the
    batch is elsewhere, so that no element can be numbered within its sequence."""
    batch = symbol("B")
    if not any("B" in names_in(dim) for dim in shape):
        return 1
    return batch if divide(shape[0], batch) is not None else None


def random(
    seed: Tensor,
    step: Tensor,
    sample: Tensor,
    *,
    shape: Sequence[int],
    dtype: DType = DType.F32,
    site: str,
    call: int = 0,
    samples: int,
) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2^-24, of `shape`, rounded to `dtype`.

    seed, step, sample i64[]. The elements are those of `samples` sequences, one after the other, the first of which is
    number `sample` of the step.
    """
    from mgraph import philox

    key = philox.sample_key(seed, site, call)
    return philox.uniform_by_sample(shape, samples, key, step, sample).to(to_torch_dtype(dtype))


def dropout(
    x: Tensor, seed: Tensor, step: Tensor, sample: Tensor, *, p: float, site: str, call: int = 0, samples: int
) -> Tensor:
    """`y = x · keep / (1 - p)`, where keep is 1 with probability 1 - p, else 0 (Srivastava et al. 2014).

    x [...] → y [...] in x's dtype; seed, step, sample i64[]; numbering of the elements as for `random`. The gradient
    is the same op on the cotangent.
    """
    from mgraph import philox

    key = philox.sample_key(seed, site, call)
    keep = philox.keep_by_sample(x.shape, samples, key, step, sample, p)
    return rounded(promote(x) * (1.0 / (1.0 - p) if p < 1 else 0.0) * keep, x)


def dropout_part(
    x: Tensor,
    seed: Tensor,
    step: Tensor,
    sample: Tensor,
    index: Any,
    *,
    p: float,
    site: str,
    call: int = 0,
    samples: int,
    dim: int,
    parts: int,
) -> Tensor:
    """`dropout` of one of `parts` equal parts along `dim`, number `index` (i64[]), with the numbers that it has in the
    whole tensor. The first dim has the `samples`, and is not the one that is split."""
    from mgraph import philox

    key = philox.sample_key(seed, site, call)
    keep = philox.keep_part(x.shape, samples, key, step, sample, p, dim=dim, index=int(index), parts=parts)
    return rounded(promote(x) * (1.0 / (1.0 - p) if p < 1 else 0.0) * keep, x)


def _infer_random(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    return (TensorType(attrs["dtype"], tuple(map(as_dim, attrs["shape"]))),)


def _dropout_gradient(request: GradientRequest) -> Sequence[Value | None]:
    _, *numbers = request.node.operands
    dx = request.builder.one("dropout", request.cotangent, *numbers, name="dx", **request.node.attrs)
    return (dx, None, None, None)


define_op("random", random, attrs={"shape": REQUIRED, "dtype": DType.F32, **_PLACE}, infer=_infer_random, random=True)
define_op(
    "dropout",
    dropout,
    attrs={"p": REQUIRED, **_PLACE},
    infer=lambda types, attrs: (TensorType(types[0].dtype, types[0].shape),),
    gradient=_dropout_gradient,
    flops=per_element(2),
    bytes=traffic,
    compute_dtype="f32",
)
define_op(
    "dropout_part",
    dropout_part,
    attrs={"p": REQUIRED, **_PLACE, "dim": REQUIRED, "parts": REQUIRED},
    infer=lambda types, attrs: (TensorType(types[0].dtype, types[0].shape),),
    flops=per_element(2),
    bytes=traffic,
    compute_dtype="f32",
)
