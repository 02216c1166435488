"""Routers of mixtures of experts and the order of their rows, as Triton source and torch twin.

    scores            softmax or sigmoid of logits [T, E], or the logits themselves; a bias moves the choice alone
    weights, indices  the K experts of the largest scores, within the best groups where there are some; at equal scores
                      the first expert
    order, offsets    of the rows of experts (`moe_order.py`)

A program has some tiles of tokens, one after the other, with all experts. Scores are compared as integers that order as
they do, so that a choice is of K experts whatever the scores are, NaN among them. Of 16-bit logits without a bias the
integer has the number of the expert, too: what is best is then found in one pass, not in two. How rows get their order
is told in `moe_order.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mgraph.codegen.triton.kernel import TRITON_LANGUAGE_DTYPES, KernelSpec, Launch, TensorSpec
from mgraph.codegen.triton.moe_order import (
    END,
    ENDS,
    MOST_EXPERTS,
    Tuning,
    count_lines,
    outputs_of,
    place_launch,
    place_source,
    power,
    programs_of,
    scratch_of,
    tile_lines,
    tuning,
)
from mgraph.codegen.triton.rope import lines_of
from mgraph.ir.graph import Node
from mgraph.ir.ops.route import CHOOSING, WEIGHING
from mgraph.ir.types import DType

MOST_CHOICES = 32
"""Experts a token, each found by a pass of its own over the scores."""

PART = 64
"""Experts next to each other: 8 threads load them of a token, 16 bytes each of 16-bit logits."""

LOWEST = -(2**31)
"""What an expert is marked with once it is chosen."""

CLOSED = LOWEST + 1
"""What an expert is marked with that may not be chosen. All scores are above."""


@dataclass(frozen=True)
class Router:
    """One instance: experts, experts a token, dtypes, and the attributes of the op."""

    experts: int
    choices: int
    logits: str
    weights: str = "f32"
    bias: str = ""
    score: str = "softmax"
    renormalize: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    ended: bool = False
    """Whether tokens from `starts[-1]` on only fill a step up: they come last in the order, and are of no expert."""

    @property
    def columns(self) -> int:
        """Experts, rounded up to a power of two."""
        return power(self.experts)

    @property
    def packed(self) -> bool:
        """Whether logits and numbers of experts fit into one integer, and the choice is that of the logits."""
        return self.logits in ("bf16", "f16") and not self.bias and self.groups == 1


def problem_of(node: Node) -> Router | str:
    """The instance that a node `moe_route`, `moe_route_order` or `moe_route_grad` is, or why there is no kernel."""
    gradient = node.op == "moe_route_grad"
    logits, bias = (node.operands[1], None) if gradient else (node.operands[0], None)
    ended = bool(node.attrs.get("ended", False))
    if not gradient and len(node.operands) > 1 + ended:
        bias = node.operands[1]
    tensors = {"logits": logits.tensor, **({"the bias": bias.tensor} if bias else {})}
    tensors["the weights"] = node.operands[0].tensor if gradient else node.results[0].tensor
    for role, tensor in tensors.items():
        if tensor.dtype.text not in TRITON_LANGUAGE_DTYPES:
            return f"{role} are {tensor.dtype.text}; the kernel takes {', '.join(TRITON_LANGUAGE_DTYPES)}"
    experts, choices = logits.tensor.shape[1], tensors["the weights"].shape[1]
    if not isinstance(experts, int) or experts > MOST_EXPERTS:
        return f"there are {experts} experts; the kernel takes a known number up to {MOST_EXPERTS}"
    if not isinstance(choices, int) or choices > min(MOST_CHOICES, experts):
        return f"a token has {choices} experts; the kernel takes up to {min(MOST_CHOICES, experts)}"
    names = WEIGHING if gradient else {**WEIGHING, **CHOOSING}
    attrs: dict[str, Any] = {name: node.attrs.get(name, default) for name, default in names.items()}
    groups = attrs.get("groups", 1)
    if groups > 1 and (power(groups) != groups or power(experts) != experts):
        return f"{experts} experts in {groups} groups; the kernel takes powers of two"
    return Router(
        experts,
        choices,
        logits.tensor.dtype.text,
        tensors["the weights"].dtype.text,
        bias.tensor.dtype.text if bias else "",
        **attrs,
        ended=ended,
    )


def route(name: str, problem: Router, cut: Tuning | None = None) -> KernelSpec:
    """The site `weights, indices = name(logits[, bias])`: logits [T, E], bias [E] → weights [T, K], indices i64
    [T, K]."""
    cut = cut or tuning(problem.experts)
    return _spec(name, problem, cut, order=False)


def route_order(name: str, problem: Router, cut: Tuning | None = None) -> KernelSpec:
    """The site `weights, indices, order, offsets = name(logits[, bias][, starts])`: as `route`, with order i64 [T * K]
    and offsets i32 [E]; starts i32 [R + 1] where a step may be `ended` before its last token."""
    cut = cut or tuning(problem.experts)
    return _spec(name, problem, cut, order=True)


def _spec(name: str, problem: Router, cut: Tuning, *, order: bool) -> KernelSpec:
    inputs: tuple[TensorSpec, ...] = (TensorSpec("logits", problem.logits, ("T", problem.experts)),)
    if problem.bias:
        inputs = (*inputs, TensorSpec("bias", problem.bias, (problem.experts,)))
    if problem.ended:
        inputs = (*inputs, TensorSpec("starts", "i32", (ENDS,)))
    outputs: tuple[TensorSpec, ...] = (
        TensorSpec("weights", problem.weights, ("T", problem.choices)),
        TensorSpec("indices", "i64", ("T", problem.choices)),
    )
    names = tuple(tensor.name for tensor in (*inputs, *outputs))
    scratch = scratch_of("T", problem.experts, cut) if order else ()
    end = (ENDS,) * problem.ended
    args = (*names, *(tensor.name for tensor in scratch), "T", *end)
    launches = [Launch(f"{name}_choose", args, ("programs",), cut.num_warps, 1, _aligned(problem), spread=True)]
    source = _choose_source(name, problem, cut, args, counted=order)
    if order:
        outputs = (*outputs, *outputs_of(("mul", "T", problem.choices), problem.experts))
        launches.append(place_launch(name, "T", ("starts", *end) if end else ()))
        source += place_source(name, problem.experts, problem.choices, cut, "T", problem.experts, ended=problem.ended)
    return KernelSpec(
        name=name,
        source=source,
        twin=_twin(name, problem, order=order),
        inputs=inputs,
        outputs=outputs,
        scratch=scratch,
        launches=tuple(launches),
        dims={"programs": programs_of("T", cut)},
    )


def _aligned(problem: Router) -> bool:
    """Whether all rows of the logits start on 16-byte boundaries when the tensor does."""
    return problem.experts % 8 == 0 and problem.choices % 4 == 0


def _key(key: str, score: str) -> list[str]:
    """Integers that order as the scores do, above CLOSED."""
    return [
        f"{key} = {score}.to(tl.int32, bitcast=True)",
        f"{key} = tl.maximum({key} ^ (({key} >> 31) & 0x7FFFFFFF), {CLOSED + 1})",
    ]


def _score_lines(problem: Router, masked: bool) -> list[str]:
    """`logits` and `scores` of a tile; experts that are none have no share."""
    real = f"(expert < {problem.experts})[None, :]"
    inside = f"(token < T)[:, None]{f' & {real}' if masked else ''}"
    lines = [
        f"element = token.to(tl.int64)[:, None] * {problem.experts} + expert[None, :]",
        f"inside = {inside}",
        "logits = tl.load(logits_ptr + element, mask=inside, other=0.0).to(tl.float32)",
    ]
    if problem.score == "sigmoid":
        return [*lines, "scores = 1.0 / (1.0 + tl.exp(-logits))"]
    if masked:
        lines.append(f'logits = tl.where({real}, logits, float("-inf"))')
    if problem.score == "softmax":
        lines += [
            "scores = tl.exp(logits - tl.max(logits, axis=1)[:, None])",
            "scores = scores / tl.sum(scores, axis=1)[:, None]",
        ]
    else:
        lines.append("scores = logits")
    return lines


def _group_lines(problem: Router, cut: Tuning) -> list[str]:
    """Experts of groups that are not among the best are lowest."""
    size, groups = problem.experts // problem.groups, problem.groups
    lines = [
        f"grouped = tl.reshape(key, ({cut.tokens}, {groups}, {size}))",
        f"member = tl.arange(0, {size})",
        f"best = tl.zeros([{cut.tokens}, {groups}], dtype=tl.float32)",
        "left = grouped",
    ]
    for _ in range(problem.group_best):
        lines += [
            "most = tl.max(left, axis=2)",
            "best += (most ^ ((most >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)",
            f"which = tl.min(tl.where(left == most[:, :, None], member[None, None, :], {size}), axis=2)",
            f"left = tl.where(member[None, None, :] == which[:, :, None], {LOWEST}, left)",
        ]
    lines += [*_key("rank", "best"), f"group = tl.arange(0, {groups})"]
    for _ in range(problem.top_groups):
        lines += [
            f"which = tl.min(tl.where(rank == tl.max(rank, axis=1)[:, None], group[None, :], {groups}), axis=1)",
            f"rank = tl.where(group[None, :] == which[:, None], {LOWEST}, rank)",
        ]
    return [
        *lines,
        f"grouped = tl.where((rank == {LOWEST})[:, :, None], grouped, {CLOSED})",
        f"key = tl.reshape(grouped, ({cut.tokens}, {problem.experts}))",
    ]


def _choose_source(name: str, problem: Router, cut: Tuning, args: tuple[str, ...], *, counted: bool) -> str:
    experts, choices, columns = problem.experts, problem.choices, problem.columns
    masked, places = columns > experts, power(choices)
    few = f" & (place < {choices})[None, :]" if places > choices else ""
    lines = [
        f"pair = token.to(tl.int64)[:, None] * {choices} + place[None, :]",
        f"known = (token < T)[:, None]{few}",
        *(_packed_lines(problem, cut, masked) if problem.packed else _score_choice_lines(problem, cut, masked)),
        *_weigh_lines(problem),
        f"tl.store(weights_ptr + pair, weight.to(tl.{TRITON_LANGUAGE_DTYPES[problem.weights]}), mask=known)",
        "tl.store(indices_ptr + pair, chosen.to(tl.int64), mask=known)",
    ]
    count, store = [], ""
    if counted:
        mask = f", mask=expert < {experts}" if masked else ""
        bits = (
            [
                "bits = tl.sum(tl.where(key >= best[None, :, None], bit[None, :, None], 0), axis=1)",
                f"bits = tl.reshape(bits, ({columns},))",
            ]
            if problem.packed
            else [f"bits = tl.sum(tl.where(key == {LOWEST}, bit[:, None], 0), axis=0)"]
        )
        lines += count_lines(bits, "real" if problem.ended else "T", experts, cut)
        count = [f"count = tl.zeros([{columns}], dtype=tl.int32)"]
        store = lines_of(f"tl.store(counts_ptr + tl.program_id(0) * {experts} + expert, count{mask})")
    head = lines_of(
        f"expert = tl.arange(0, {columns})",
        f"place = tl.arange(0, {places})",
        *count,
        END if problem.ended else "",
        *tile_lines("T", cut),
    )
    return f'''
@triton.jit
def {name}_choose(
    {_parameters(args)}
):
    """The {choices} best of {experts} experts of each token and their weights, {cut.tokens} tokens at a time."""
{head}{lines_of(*lines, depth=2)}{store}
'''


def _packed_lines(problem: Router, cut: Tuning, masked: bool) -> list[str]:
    """`chosen` and `weight` of 16-bit logits, and `key`, of which those from `best` on are chosen.

    Integers without a sign wrap around: less what was chosen last, all that was chosen before is least, so that nothing
    has to be marked. Experts lie in parts, for fewer threads have a token then.
    """
    experts, part = problem.experts, min(problem.columns, PART)
    parts = problem.columns // part
    real = f"expert_of < {experts}"
    lines = [
        f"expert_of = (tl.arange(0, {parts}) * {part})[:, None, None] + tl.arange(0, {part})[None, None, :]",
        f"element = token.to(tl.int64)[None, :, None] * {experts} + expert_of",
        f"inside = (token < T)[None, :, None]{f' & ({real})' if masked else ''}",
        "logits = tl.load(logits_ptr + element, mask=inside, other=0.0)",
        "key = logits.to(tl.uint16, bitcast=True).to(tl.int32) << 16",
        f"key = (key ^ ((key >> 31) & 0x7FFF0000)) ^ ({LOWEST} + {experts} - expert_of)",
        f"key = tl.where({real}, key, 0).to(tl.uint32, bitcast=True)"
        if masked
        else "key = key.to(tl.uint32, bitcast=True)",
        "best = tl.max(tl.max(key, axis=0), axis=1)",
        f"chosen = tl.zeros([{cut.tokens}, {power(problem.choices)}], dtype=tl.uint32) + best[:, None]",
        f"for choice in tl.static_range(1, {problem.choices}):",
        "    best += tl.max(tl.max(key - best[None, :, None], axis=0), axis=1)",
        "    chosen = tl.where(place[None, :] == choice, best[:, None], chosen)",
        "tl.store(indices_ptr + pair, chosen.to(tl.int64), mask=known)",
        "tl.debug_barrier()",
        "chosen = tl.load(indices_ptr + pair, mask=known, other=0).to(tl.int32)",
        "tl.debug_barrier()",
        f"weight = (chosen ^ {LOWEST}) >> 16",
        "weight = (weight ^ ((weight >> 15) & 0x7FFF)).to(tl.int16)",
        f"weight = weight.to(tl.{TRITON_LANGUAGE_DTYPES[problem.logits]}, bitcast=True).to(tl.float32)",
        f"chosen = {experts} - (chosen & 0xFFFF)",
    ]
    if problem.score == "sigmoid":
        lines.append("weight = 1.0 / (1.0 + tl.exp(-weight))")
    elif problem.score == "softmax" and not _of_chosen(problem):
        lines += [
            "wide = logits.to(tl.float32)",
            f'wide = tl.where({real}, wide, float("-inf"))' if masked else "",
            "most = tl.max(tl.max(wide, axis=0), axis=1)",
            "total = tl.sum(tl.sum(tl.exp(wide - most[None, :, None]), axis=0), axis=1)",
            "weight = tl.exp(weight - most[:, None]) * (1.0 / total)[:, None]",
        ]
    if power(problem.choices) > problem.choices:
        lines.append(f"weight = tl.where((place < {problem.choices})[None, :], weight, 0.0)")
    return lines


def _score_choice_lines(problem: Router, cut: Tuning, masked: bool) -> list[str]:
    """`chosen` and `weight` of any scores; `key` marks what was chosen."""
    experts, columns, places = problem.experts, problem.columns, power(problem.choices)
    lines = _score_lines(problem, masked)
    if problem.bias:
        bias_mask = f", mask=expert < {experts}, other=0.0" if masked else ""
        lines.append(f"steered = scores + tl.load(bias_ptr + expert{bias_mask}).to(tl.float32)[None, :]")
    lines += _key("key", "steered" if problem.bias else "scores")
    if problem.groups > 1:
        lines += _group_lines(problem, cut)
    if masked:
        lines.append(f"key = tl.where((expert < {experts})[None, :], key, {CLOSED})")
    return [
        *lines,
        f"chosen = tl.zeros([{cut.tokens}, {places}], dtype=tl.int32)",
        f"weight = tl.zeros([{cut.tokens}, {places}], dtype=tl.float32)",
        f"for choice in tl.static_range({problem.choices}):",
        "    most = tl.max(key, axis=1)",
        f"    which = tl.min(tl.where(key == most[:, None], expert[None, :], {columns}), axis=1)",
        "    taken = expert[None, :] == which[:, None]",
        f"    key = tl.where(taken, {LOWEST}, key)",
        "    value = tl.sum(tl.where(taken, scores, 0.0), axis=1)"
        if problem.bias
        else "    value = (most ^ ((most >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)",
        "    chosen = tl.where(place[None, :] == choice, which[:, None], chosen)",
        "    weight = tl.where(place[None, :] == choice, value[:, None], weight)",
    ]


def _of_chosen(problem: Router) -> bool:
    """Whether weights are a softmax of the chosen logits alone: what was not chosen falls out of the division."""
    divided = problem.score == "softmax" and problem.renormalize and problem.epsilon == 0
    return divided or problem.score == "softmax_chosen"


def _weigh_lines(problem: Router) -> list[str]:
    """Chosen scores become weights; places that are none weigh nothing."""
    real = f"(place < {problem.choices})[None, :]"
    few = power(problem.choices) > problem.choices
    lines = []
    alone = problem.score == "softmax_chosen" or (problem.packed and _of_chosen(problem))
    if alone:
        if few:
            lines.append(f'weight = tl.where({real}, weight, float("-inf"))')
        lines += [
            "weight = tl.exp(weight - tl.max(weight, axis=1)[:, None])",
            "weight = weight * (1.0 / tl.sum(weight, axis=1))[:, None]",
        ]
    if problem.renormalize and not (alone and problem.score == "softmax"):
        more = f" + {problem.epsilon!r}" if problem.epsilon else ""
        lines.append(f"weight = weight * (1.0 / (tl.sum(weight, axis=1){more}))[:, None]")
    if problem.scale != 1.0:
        lines.append(f"weight = weight * {problem.scale!r}")
    return lines


def grad(name: str, problem: Router, cut: Tuning | None = None) -> KernelSpec:
    """The site `dlogits = name(dweights, logits, indices)`: dweights [T, K], logits [T, E], indices i64 [T, K] →
    dlogits like logits."""
    cut = cut or tuning(problem.experts)
    args = ("dweights", "logits", "indices", "dlogits", "T")
    return KernelSpec(
        name=name,
        source=_grad_source(name, problem, cut, args),
        twin=f'''
def {name}(dweights, logits, indices):
    """The gradient of a router's weights for its logits, the choice held fixed."""
    return rt.moe_route_grad(dweights, logits, indices{_options(problem, WEIGHING)})
''',
        inputs=(
            TensorSpec("dweights", problem.weights, ("T", problem.choices)),
            TensorSpec("logits", problem.logits, ("T", problem.experts)),
            TensorSpec("indices", "i64", ("T", problem.choices)),
        ),
        outputs=(TensorSpec("dlogits", problem.logits, ("T", problem.experts)),),
        scratch=(),
        launches=(Launch(name, args, (("cdiv", "T", cut.tokens),), cut.num_warps, 1, _aligned(problem)),),
    )


def _grad_source(name: str, problem: Router, cut: Tuning, args: tuple[str, ...]) -> str:
    dense = problem.score == "softmax" and not _of_chosen(problem)
    lines = [
        f"token = tl.program_id(0) * {cut.tokens} + tl.arange(0, {cut.tokens})",
        f"expert = tl.arange(0, {problem.columns})",
        *(_dense_grad_lines(problem, cut) if dense else _sparse_grad_lines(problem, cut)),
    ]
    return f'''
@triton.jit
def {name}({_parameters(args)}):
    """dlogits of {cut.tokens} tokens: those of the weights of the chosen {problem.choices} of {problem.experts}."""
{lines_of(*lines)}
'''


def _dense_grad_lines(problem: Router, cut: Tuning) -> list[str]:
    """Of scores that are a softmax over all experts, every one of which has a gradient."""
    masked = problem.columns > problem.experts
    return [
        f"taken = tl.zeros([{cut.tokens}, {problem.columns}], dtype=tl.int32)",
        f"grad = tl.zeros([{cut.tokens}, {problem.columns}], dtype=tl.float32)",
        f"for choice in tl.static_range({problem.choices}):",
        f"    pair = token.to(tl.int64) * {problem.choices} + choice",
        "    which = tl.load(indices_ptr + pair, mask=token < T, other=-1).to(tl.int32)",
        "    dweight = tl.load(dweights_ptr + pair, mask=token < T, other=0.0).to(tl.float32)",
        "    here = expert[None, :] == which[:, None]",
        "    taken = tl.where(here, 1, taken)",
        f"    grad = tl.where(here, dweight[:, None]{_times(problem)}, grad)",
        *_score_lines(problem, masked),
        *_undivided(problem, "taken > 0"),
        "dlogits = scores * (grad - tl.sum(grad * scores, axis=1)[:, None])",
        f"tl.store(dlogits_ptr + element, dlogits.to({_dtype(problem)}), mask=inside)",
    ]


def _sparse_grad_lines(problem: Router, cut: Tuning) -> list[str]:
    """Of scores that hang on chosen logits alone: all others have none, and are cleared."""
    experts, places = problem.experts, power(problem.choices)
    few = f" & (place < {problem.choices})[None, :]" if places > problem.choices else ""
    some = f" & (expert < {experts})[None, :]" if problem.columns > experts else ""
    lines = [
        f"place = tl.arange(0, {places})",
        f"element = token.to(tl.int64)[:, None] * {experts} + expert[None, :]",
        f"none = tl.zeros([{cut.tokens}, {problem.columns}], dtype={_dtype(problem)})",
        f"tl.store(dlogits_ptr + element, none, mask=(token < T)[:, None]{some})",
        f"pair = token.to(tl.int64)[:, None] * {problem.choices} + place[None, :]",
        f"which = tl.load(indices_ptr + pair, mask=(token < T)[:, None]{few}, other={experts}).to(tl.int32)",
        f"real = (which >= 0) & (which < {experts})",
        f"grad = tl.load(dweights_ptr + pair, mask=real, other=0.0).to(tl.float32){_times(problem)}",
        f"chosen = token.to(tl.int64)[:, None] * {experts} + which",
        "logits = tl.load(logits_ptr + chosen, mask=real, other=0.0).to(tl.float32)",
    ]
    if problem.score == "sigmoid":
        lines += [
            "scores = tl.where(real, 1.0 / (1.0 + tl.exp(-logits)), 0.0)",
            *_undivided(problem, "real"),
            "grad = grad * scores * (1.0 - scores)",
        ]
    else:
        lines += [
            'most = tl.max(tl.where(real, logits, float("-inf")), axis=1)',
            "scores = tl.where(real, tl.exp(logits - most[:, None]), 0.0)",
            "scores = scores / tl.sum(scores, axis=1)[:, None]",
            *(_undivided(problem, "real") if problem.score == "softmax_chosen" else ()),
            "grad = scores * (grad - tl.sum(grad * scores, axis=1)[:, None])",
        ]
    return [*lines, "tl.debug_barrier()", f"tl.store(dlogits_ptr + chosen, grad.to({_dtype(problem)}), mask=real)"]


def _undivided(problem: Router, chosen: str) -> list[str]:
    """Where scores are divided by their sum: `grad` of chosen scores from that of the quotients."""
    if not problem.renormalize:
        return []
    more = f" + {problem.epsilon!r}" if problem.epsilon else ""
    return [
        f"total = tl.sum(tl.where({chosen}, scores, 0.0), axis=1){more}",
        "grad = grad - (tl.sum(grad * scores, axis=1) / total)[:, None]",
        f"grad = tl.where({chosen}, grad / total[:, None], 0.0)",
    ]


def _dtype(problem: Router) -> str:
    return f"tl.{TRITON_LANGUAGE_DTYPES[problem.logits]}"


def _times(problem: Router) -> str:
    return f" * {problem.scale!r}" if problem.scale != 1.0 else ""


def _parameters(args: tuple[str, ...]) -> str:
    return ", ".join(arg if arg in ("T", ENDS) else f"{arg}_ptr" for arg in args)


def _options(problem: Router, defaults: Any) -> str:
    given = {name: getattr(problem, name) for name, default in defaults.items() if getattr(problem, name) != default}
    return "".join(f', {name}="{v}"' if isinstance(v, str) else f", {name}={v!r}" for name, v in given.items())


def _twin(name: str, problem: Router, *, order: bool) -> str:
    names = "logits, bias" if problem.bias else "logits"
    given = f"{names}, starts" if problem.ended else names
    options = f", top_k={problem.choices}{_options(problem, WEIGHING)}"
    if DType.parse(problem.weights) is not DType.F32:
        options += f", dtype=torch.{TRITON_LANGUAGE_DTYPES[problem.weights]}"
    options += _options(problem, CHOOSING).replace(", ", ",\n        ", 1)
    call = f"    weights, indices = rt.moe_route(\n        {names}{options}\n    )\n"
    end = "    return weights, indices\n"
    if order:
        chosen, others = "indices", ""
        if problem.ended:
            chosen, others = f"rt.real_choice(indices, starts, num_experts={problem.experts})", ", others=True"
            chosen = f"\n        {chosen}"
        end = f"    return weights, indices, *rt.moe_order({chosen}, num_experts={problem.experts}{others})\n"
    return f'''
def {name}({given}):
    """The {problem.choices} best of {problem.experts} experts of each token and their weights."""
{call}{end}'''
