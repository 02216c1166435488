"""Tracing the adapter with torch.export, on fake tensors, with named dynamic dims B and S.

Torch traces the forward once with small hints for B and S and proves the range of each dim for which the trace holds.
Where it proves a smaller range than asked (a position table of T rows), the export is repeated with that range.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn
from torch._dynamo.exc import UserError
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from mgraph.capture.adapter import Adapter, InputSpec
from mgraph.capture.frames import error_frame
from mgraph.capture.probe import Findings, probe
from mgraph.capture.replay import NotReplayed, Replay
from mgraph.capture.shapes import MINIMA
from mgraph.capture.source import PACKED, InputsFunction, LossFunction, ModelSpec
from mgraph.errors import CaptureError, MgraphError, ModelError
from mgraph.ir.dims import as_dim, names_in, symbol

_HINTS = {"B": 2, "S": 16}  # below the length of any position table


@dataclass(frozen=True)
class Exported:
    """A traced model: torch's program, the inputs in order, the names of the outputs, and how its layers were traced:
    per list, a line."""

    program: Any
    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    traced_nodes: int
    layers: tuple[str, ...]


def input_specs(spec: ModelSpec, inputs: InputsFunction | None, where: str) -> tuple[InputSpec, ...]:
    """The inputs of a model: those its file defines, else tokens, labels and the asked-for extras."""
    batch, sequence = symbol("B"), symbol("S")
    extras = ("loss_mask",) * spec.loss_mask + PACKED * spec.packed
    if inputs is None:
        return tuple(InputSpec(n, torch.int64, (batch, sequence)) for n in ("tokens", "labels", *extras))
    given = inputs(batch, sequence)
    hint = 'return {"tokens": (torch.int64, (B, S)), ...}'
    if not isinstance(given, Mapping) or not given:
        raise ModelError(f"inputs(B, S) returned {type(given).__name__}, not a dict of inputs", where, hint)
    absent = [name for name in extras if name not in given]
    if absent:
        flag = "--loss-mask" if absent[0] == "loss_mask" else "--packed"
        raise ModelError(f"inputs(B, S) has no '{absent[0]}'", where, f"add it, or leave {flag} out")
    return tuple(_input(name, entry, where, hint) for name, entry in given.items())


def _input(name: str, entry: Any, where: str, hint: str) -> InputSpec:
    try:
        dtype, shape = entry
        dims = tuple(map(as_dim, shape))
    except (TypeError, ValueError, AttributeError):
        raise ModelError(f"input '{name}' is {entry!r}, not (dtype, shape)", where, hint) from None
    linear = all(len(names_in(d)) <= 1 and sympy.degree(sympy.sympify(d)) <= 1 for d in dims if not isinstance(d, int))
    if not isinstance(dtype, torch.dtype) or not linear:
        raise ModelError(
            f"input '{name}' is {entry!r}", where, f"{hint}; a dim is an int, B, S, or linear in one of them"
        )
    return InputSpec(name, dtype, dims)


def export(
    model: nn.Module,
    spec: ModelSpec,
    inputs: InputsFunction | None,
    loss: LossFunction | None,
    where: str,
    replay: bool = True,
) -> Exported:
    """Trace a model; with `replay`, layers that do the same are traced once (`mgraph.capture.replay`).

    Raises CaptureError with the user's source line where it cannot be traced.
    """
    specs = input_specs(spec, inputs, where)
    adapter = Adapter(model.train(spec.training), specs, loss, where).train(spec.training)
    maximum = spec.max_length or getattr(getattr(model, "config", None), "max_position_embeddings", None)
    dims = {
        "B": torch.export.Dim("B", min=MINIMA["B"]),
        "S": torch.export.Dim("S", min=MINIMA["S"], max=maximum),
    }
    hints = {symbol("B"): _HINTS["B"], symbol("S"): min(_HINTS["S"], maximum or _HINTS["S"])}
    arguments = tuple(
        torch.zeros([d if isinstance(d, int) else int(d.subs(hints)) for d in s.shape], dtype=s.dtype) for s in specs
    )
    shapes: Any = {"inputs": tuple({i: _torch_dim(d, dims) for i, d in enumerate(s.shape)} for s in specs)}
    with _quiet():
        program, traced, layers = _Tracer(adapter, arguments, shapes, where).run(replay)
    made = len(program.graph_signature.user_outputs)
    return Exported(program, specs, Adapter.OUTPUTS[:made], traced, layers)


def _torch_dim(dim: Any, dims: Mapping[str, Any]) -> Any:
    """A dim as torch.export takes it; `a*S + b` becomes a derived dim."""
    if isinstance(dim, int):
        return None
    (name,) = names_in(dim)
    if dim == symbol(name):
        return dims[name]
    factor, offset = sympy.Poly(dim, symbol(name)).all_coeffs()
    return int(factor) * dims[name] + int(offset) if offset else int(factor) * dims[name]


@dataclass
class _Tracer:
    """Traces one adapter with these arguments; `shapes` are what torch.export calls dynamic shapes."""

    adapter: Adapter
    arguments: tuple[torch.Tensor, ...]
    shapes: Any
    where: str

    def run(self, replay: bool) -> tuple[Any, int, tuple[str, ...]]:
        """The program, the number of nodes that torch traced, and how layers were traced."""
        found = probe(self.adapter, self.arguments) if replay else Findings({}, {}, {})
        reason = ""
        if found.kinds:
            replayed = Replay(self.adapter, found.kinds)
            try:
                program = self.trace(replayed.active)
                traced = len(program.graph.nodes)
                return program, traced, found.lines(replayed.expand(program))
            except (MgraphError, NotReplayed) as error:  # an error of the model's is one of the whole trace too
                reason = str(error)
        program = self.trace(nullcontext)
        return program, len(program.graph.nodes), found.lines({}, reason)

    def trace(self, active: Callable[[], AbstractContextManager[None]]) -> Any:
        """Torch's program. Each trace runs within a context of its own."""
        shapes, deferred = self.shapes, False
        while True:
            try:
                with active():
                    return torch.export.export(
                        self.adapter,
                        self.arguments,
                        strict=False,
                        dynamic_shapes=shapes,
                        prefer_deferred_runtime_asserts_over_guards=deferred,
                    )
            except MgraphError:
                raise
            except UserError as error:
                narrowed = _narrowed(str(error), shapes)
                if narrowed is not None and str(narrowed) != str(shapes):
                    shapes = narrowed
                elif not deferred and "Constraints violated" in str(error):
                    deferred = True  # leave conditions that torch cannot prove in the trace: the importer proves them
                else:
                    raise _explain(error, self.where) from error
            except Exception as error:  # the user's forward may raise anything
                raise _explain(error, self.where) from error


def _narrowed(message: str, shapes: Any) -> Any:
    """The dims with the ranges torch suggests; `None` where it suggests none, or a single extent."""
    lines = _suggestions(message)
    if not lines or not all(re.fullmatch(r"[BS] = Dim\(.*\)", line) for line in lines):
        return None
    return refine_dynamic_shapes_from_suggested_fixes("Suggested fixes:\n" + "\n".join(lines), shapes)


def _suggestions(message: str) -> list[str]:
    """The lines `S = Dim('S', max=100)` of a constraint violation."""
    return [line.strip() for line in message.partition("Suggested fixes:")[2].splitlines() if " = " in line]


def _explain(error: Exception, where: str) -> CaptureError:
    """The error of a failed trace, in our words, at the user's line."""
    frame = error_frame(error)
    place = str(frame) if frame else where
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in first.lower():
        return CaptureError(
            "control flow depends on the values of a tensor",
            place,
            "compute both branches and choose with torch.where, or decide from shapes and configuration",
        )
    if isinstance(error, UserError):
        fixed = "; ".join(_suggestions(str(error)))
        reasons = [line.strip(" -") for line in str(error).splitlines() if line.startswith("  - ")]
        return CaptureError(
            f"the model does not take every batch size and length: {reasons[0] if reasons else first}",
            place,
            f"it would hold for {fixed}" if fixed else "remove what fixes a size in forward",
        )
    return CaptureError(f"forward failed while it was traced: {type(error).__name__}: {first}", place)


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs and prints whole graphs when a trace fails; our error says what matters."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
