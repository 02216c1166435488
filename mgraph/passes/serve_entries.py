"""The entries of a serve package that make tokens of logits, of ops in `mgraph/ir/ops/sampling.py`.

likeliest        every row takes the likeliest token, and nobody asks for others
draw             temperature, of all tokens
draw_cut         top-k, top-p and min-p, too
sample           and the likeliest tokens
sample_changed   the same after penalties and a bias
"""

from __future__ import annotations

from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.dims import Dim, NamedDim, symbol
from mgraph.ir.graph import Entry, Function, Origin, Phase, Value
from mgraph.ir.types import DType, TensorType

ROWS, HISTORY = "N", "K"
"""The dims of rows of logits, and of tokens of penalised texts."""
ALTERNATIVES = 20
"""How many of the likeliest tokens are given, in models that have so many."""
SAMPLING = ("likeliest", "draw", "draw_cut", "sample", "sample_changed")
DIMS = (NamedDim(ROWS, 1), NamedDim(HISTORY, 1))

_TEMPERATURE, _TARGETS = (("temperature", DType.F32),), (("targets", DType.I64),)
_CUTS = (("top_k", DType.I32), ("top_p", DType.F32), ("min_p", DType.F32))
_NOISE = (("seeds", DType.I64), ("draws", DType.I64))
_PENALTIES = tuple((name, DType.F32) for name in ("repetition", "presence", "frequency"))
_TEXT = (("tokens", DType.I64), ("owners", DType.I64), ("written", DType.BOOL))
_RESULTS = ("token", "logprob", "top_tokens", "top_logprobs")


def sampling_entries(classes: Dim, origin: Origin, made_by: str) -> list[tuple[Entry, Function]]:
    """The entries and their functions, for logits f32 [N, classes] that are made at `origin`."""
    return [
        (Entry(name, name, _RESULTS[: len(function.results)]), function)
        for name, function in ((name, _function(name, classes, origin, made_by)) for name in SAMPLING)
    ]


def _function(name: str, classes: Dim, origin: Origin, made_by: str) -> Function:
    builder = FunctionBuilder(name, made_by, phase=Phase.DECODE)
    builder.origin = origin
    rows = symbol(ROWS)
    logits = builder.param("logits", TensorType(DType.F32, (rows, classes)))

    def given(params: tuple[tuple[str, DType], ...], extent: Dim = rows) -> list[Value]:
        return [builder.param(n, TensorType(dtype, (extent,))) for n, dtype in params]

    if name == "likeliest":
        return builder.build(builder.emit(name, [logits, *given(_TARGETS)], names=_RESULTS[:2]))
    (temperature,) = given(_TEMPERATURE)
    cuts = given(_CUTS) if name != "draw" else []
    noise, targets = given(_NOISE), given(_TARGETS)
    scores = logits
    if name == "sample_changed":
        penalties = given(_PENALTIES)
        bias = builder.param("bias", TensorType(DType.F32, (rows, classes)))
        text = given(_TEXT, symbol(HISTORY))
        scores = builder.one("change_scores", logits, *penalties, bias, *text, name="scores")
    keys = builder.one("perturb", scores, temperature, *noise, name="keys")
    if cuts:
        keys = builder.one("cut_keys", scores, keys, temperature, *cuts, name="left")
    drawn, _ = builder.emit("likeliest", [keys, *targets], names=("drawn", "largest"))
    results = builder.emit("likeliest", [logits, drawn], names=_RESULTS[:2])
    if name.startswith("sample"):
        many = min(ALTERNATIVES, classes) if isinstance(classes, int) else ALTERNATIVES
        results = (*results, *builder.emit("top_logprobs", [logits], {"count": many}, names=_RESULTS[2:]))
    return builder.build(results)
