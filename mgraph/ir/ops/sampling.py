"""How logits become tokens: penalties, temperature, cuts of the distribution, and random numbers of each request's own.

A token is drawn by the largest of its row's scores with Gumbel noise, of all tokens or of those that cuts leave. The
noise of a request is a function of its seed and of how many tokens it has drawn before (Philox, as in `mgraph.philox`),
so that it does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgraph.ir.graph import Node
from mgraph.ir.opdef import REQUIRED, define_op
from mgraph.ir.ops.cost import per_element, traffic
from mgraph.ir.torch_bridge import promote
from mgraph.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


def change_scores(
    logits: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    bias: Tensor,
    tokens: Tensor,
    owners: Tensor,
    written: Tensor,
) -> Tensor:
    """Logits [N, V] with the penalties of each row, in at least f32.

    repetition, presence, frequency f32 [N], bias f32 [N, V]. Entry i of tokens i64 [K] is one of row `owners[i]`'s
    text, i64 [K] (N: of none), and was written by the model where written bool [K]. Logits of tokens of the text are
    divided by the repetition where positive, multiplied elsewhere; those written lose the presence once, and the
    frequency each time; then the bias is added.
    """
    rows, classes = logits.shape
    places = owners * classes + tokens
    counts = [logits.new_zeros((rows + 1) * classes, dtype=tokens.dtype) for _ in range(2)]
    for count, weight in zip(counts, (tokens.new_ones(tokens.shape), written.to(tokens.dtype)), strict=True):
        count.scatter_add_(0, places, weight)
    present, mine = (count.view(rows + 1, classes)[:rows] for count in counts)
    scores = promote(logits)
    factor = repetition[:, None]
    scores = scores.where(present == 0, (scores / factor).where(scores > 0, scores * factor))
    changed: Tensor = scores - presence[:, None] * (mine > 0) - frequency[:, None] * mine + bias
    return changed


def likeliest(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row, or its target where that is not negative; and its log-probability.

    logits f32 [N, V], targets i64 [N] → tokens i64 [N], logprobs f32 [N].
    """
    tokens = logits.argmax(-1).where(targets < 0, targets)
    return tokens, (logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)).float()


def perturb(scores: Tensor, temperature: Tensor, seeds: Tensor, draws: Tensor) -> Tensor:
    """Scores [N, V] divided by the temperature of their row, with Gumbel noise: the largest is where a token is that is
    drawn from their softmax, as far as f32 tells scores apart. Temperature 0 leaves them as they are.

    temperature f32 [N], seeds and draws i64 [N] → like scores, in at least f32.
    """
    from mgraph import philox

    wide, cold = promote(scores), (temperature == 0)[:, None]
    noise = philox.gumbel_by_row(seeds, draws, scores.shape[-1])
    perturbed: Tensor = wide.where(cold, wide / temperature[:, None].where(~cold, 1.0) + noise)
    return perturbed


def cut_keys(scores: Tensor, keys: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Keys [N, V] of the tokens that are left of each row, and minus infinity for all others.

    scores [N, V]; temperature, top_p, min_p f32 [N], top_k i32 [N]. Of the k largest scores (and what equals the last
    of them; k 0: all), divided by the temperature, those are left before which less than top_p of the probability lies,
    then those at least min_p times as probable as the likeliest. Equal scores stand in the order of tokens. Where the
    temperature is 0 all are left.
    """
    import torch

    cold = (temperature == 0)[:, None]
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    ordered = ordered.double()
    classes = scores.shape[-1]
    last = torch.where(top_k > 0, top_k.long(), classes).clamp(max=classes)
    kept = ordered >= ordered.gather(1, last[:, None] - 1)
    hot = (ordered - ordered[:, :1]) / torch.where(cold, 1.0, temperature.double()[:, None])
    mass = hot.exp() * kept
    before = mass.cumsum(-1) - mass
    part = top_p.double()[:, None]
    kept = kept & ((part >= 1) | (before < part * mass.sum(-1, keepdim=True)) | (before == 0))
    kept = kept & (mass >= min_p.double()[:, None] * mass[:, :1])
    left = torch.zeros_like(kept).scatter(1, order, kept)
    return keys.where(left | cold, -torch.inf)


def top_logprobs(logits: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, the likeliest first, and their log-probabilities.

    logits f32 [N, V] → tokens i64 [N, count], log-probabilities f32 [N, count].
    """
    top, ids = (logits - logits.logsumexp(-1, keepdim=True)).topk(count, -1)
    return ids, top.float()


def sample(
    logits: Tensor,
    scores: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    draws: Tensor,
    targets: Tensor,
    *,
    alternatives: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All of it at once, as graphs of packages of before have it: `perturb`, `cut_keys`, `likeliest` and
    `top_logprobs`."""
    keys = cut_keys(scores, perturb(scores, temperature, seeds, draws), temperature, top_k, top_p, min_p)
    return *likeliest(logits, likeliest(keys, targets)[0]), *top_logprobs(logits, count=alternatives)


def _infer_rows(types: Sequence[TensorType], columns: int) -> int | Any:
    """The number of rows, with which all operands begin."""
    rows = types[0].shape[0]
    if any(t.shape[:1] != (rows,) for t in types[:columns]):
        raise ValueError(f"not one row of each for each of {types[0]}: {', '.join(map(str, types))}")
    return rows


def _infer_change(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    _infer_rows(types, 5)
    if types[4].shape != types[0].shape or len({t.shape for t in types[5:]}) != 1:
        raise ValueError(f"change_scores: {types} do not fit")
    return (types[0],)


def _infer_likeliest(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    rows = _infer_rows(types, len(types))
    return TensorType(DType.I64, (rows,)), TensorType(DType.F32, (rows,))


def _infer_perturb(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    _infer_rows(types, 4)
    return (TensorType(DType.F64 if types[0].dtype is DType.F64 else DType.F32, types[0].shape),)


def _infer_cut(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    _infer_rows(types, 6)
    if types[1].shape != types[0].shape:
        raise ValueError(f"cut_keys: {types[0]} and {types[1]} do not fit")
    return (types[1],)


def _infer_top(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    shape = (types[0].shape[0], attrs["count"])
    return TensorType(DType.I64, shape), TensorType(DType.F32, shape)


def _infer_sample(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    _infer_rows(types, 9)
    return *_infer_likeliest(types[:1], attrs), *_infer_top(types, {"count": attrs["alternatives"]})


def _workspace(each: int) -> Callable[[Node, Sequence[Sequence[int]]], TensorType]:
    """So many bytes for each of the logits: what the runtime's form holds at its peak."""

    def workspace(node: Node, shapes: Sequence[Sequence[int]]) -> TensorType:
        return TensorType(DType.U8, (*shapes[0], each))

    return workspace


def _perturb_workspace(node: Node, shapes: Sequence[Sequence[int]]) -> TensorType:
    """Words, or what they become, of the rows that are computed at once; scores and noise of all."""
    from mgraph import philox

    rows, classes = shapes[0]
    at_once, words = philox.gumbel_at_once(rows, classes)
    return TensorType(DType.U8, (max(26 * words, 8 * words + 48 * at_once * classes) + 8 * rows * classes,))


define_op(
    "change_scores",
    change_scores,
    infer=_infer_change,
    flops=per_element(6),
    bytes=traffic,
    workspace=_workspace(20),
    compute_dtype="f32",
)
define_op("likeliest", likeliest, infer=_infer_likeliest, flops=per_element(3), bytes=traffic, compute_dtype="f32")
define_op(
    "perturb",
    perturb,
    infer=_infer_perturb,
    flops=per_element(60),
    bytes=traffic,
    workspace=_perturb_workspace,
    compute_dtype="f32",
)
define_op(
    "cut_keys",
    cut_keys,
    infer=_infer_cut,
    flops=per_element(200),
    bytes=traffic,
    workspace=_workspace(35),
    compute_dtype="f64",
)
define_op(
    "top_logprobs",
    top_logprobs,
    infer=_infer_top,
    attrs={"count": REQUIRED},
    flops=per_element(8),
    bytes=traffic,
    workspace=_workspace(4),
    compute_dtype="f32",
)
define_op(
    "sample",
    sample,
    infer=_infer_sample,
    attrs={"alternatives": REQUIRED},
    flops=per_element(250),
    bytes=traffic,
    workspace=_workspace(64),
    compute_dtype="f64",
)
