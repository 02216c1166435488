"""Work after capture does not grow with depth: counted, not timed."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from mgraph.codegen.step import step_text
from mgraph.ir import printer, problem, verifier
from mgraph.ir.builder import FunctionBuilder
from mgraph.ir.changes import same_signature, unchanged_functions
from mgraph.ir.graph import Entry, Module, Origin
from mgraph.ir.printer import print_module, print_parts
from mgraph.ir.types import DType, TensorType
from mgraph.ir.verifier import VerifierError, verify
from mgraph.passes.instrument import Snapshots, VerifyEach
from mgraph.passes.pipeline import run_pipeline
from tests.passes.build import stacked

PIPELINE = "outline,canonicalize,constant-fold,cse,dce,autodiff,adamw,data-parallel,cse,dce,in-place"


def training(layers: int) -> Module:
    """A deep model whose entry gives a loss sum and a count, as capture does."""
    module = stacked(layers)
    body = module.functions["forward"]
    builder = FunctionBuilder("forward", "capture", body.names())
    builder.origin = Origin("", "model.py", 40)
    builder.params, builder.nodes = list(body.params), list(body.nodes)
    loss = builder.one("aten.sum.default", body.results[0], name="loss_sum")
    count = builder.one("aten.full.default", size=(), fill_value=1, dtype=DType.I64, name="count")
    entry = Entry("forward", "forward", ("loss_sum", "count"))
    return replace(module, functions={"forward": builder.build([loss, count])}, entries={"forward": entry})


class Counts:
    """How many functions and states the verifier looks at, and how many functions are printed, over a pipeline."""

    def __init__(self, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verified: Counter[str] = Counter()
        self.printed: Counter[str] = Counter()
        self.states = 0
        scope_of, function_lines = problem.scope_of, printer.function_lines

        def counted_scope(module, known=None):  # type: ignore[no-untyped-def]
            scope = scope_of(module, known)
            self.verified.update(list(scope.functions))
            self.states += len(scope.states)
            return scope

        def counted_lines(function, functions):  # type: ignore[no-untyped-def]
            self.printed[function.name] += 1
            return function_lines(function, functions)

        with monkeypatch.context() as patch:
            patch.setattr(verifier, "scope_of", counted_scope)
            patch.setattr(printer, "function_lines", counted_lines)
            self.module, self.results = run_pipeline(training(layers), PIPELINE, (VerifyEach(), Snapshots()))


def test_work_does_not_grow_with_passes_times_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    shallow, deep = Counts(2, monkeypatch), Counts(24, monkeypatch)
    assert deep.verified == shallow.verified and deep.printed == shallow.printed
    changed = sum(result.changed for result in deep.results)
    functions = len(deep.module.functions)
    assert changed >= 5 and functions >= 5
    assert sum(deep.verified.values()) < changed * functions
    # A state is looked at where it appears, and once more where a pass changes states: not after every pass.
    assert deep.states <= 4 * len(deep.module.state)


def test_emitted_text_does_not_grow_with_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [step_text(Counts(layers, monkeypatch).module) for layers in (6, 24)]
    masked = [re.sub(r"\d+", "0", text) for text in texts]
    assert "for i in range(24)" in texts[1]
    assert masked[0] == masked[1]


def test_parts_are_printed_as_the_whole() -> None:
    seen: list[Module] = []
    snapshots = Snapshots()

    class Keep(VerifyEach):
        def after(self, result, before, after):  # type: ignore[no-untyped-def]
            seen.append(after)

    run_pipeline(training(3), PIPELINE, (snapshots, Keep()))
    assert len(seen) == len(snapshots.snapshots) - 1 > 5
    for module, text in zip(seen, snapshots.texts()[1:], strict=True):
        assert text == print_module(module)


def test_a_changed_signature_reaches_the_callers() -> None:
    module, _ = run_pipeline(training(3), "outline")
    layer = module.functions["layer"]
    narrowed = module.with_function(replace(layer, slots=layer.slots[:-1]))
    assert not same_signature(layer, narrowed.functions["layer"])
    assert unchanged_functions(narrowed, module) == set()
    with pytest.raises(VerifierError):
        verify(narrowed, known=module)
    renamed = module.with_function(replace(layer, nodes=layer.nodes[::-1]))
    assert unchanged_functions(renamed, module) == {"forward"}
    with pytest.raises(VerifierError, match="not defined before it is read"):
        verify(renamed, known=module)


def test_what_functions_refer_to_is_checked_again() -> None:
    module = training(2)
    for broken in (
        replace(module, dims={"S": module.dims["S"]}),
        replace(module, state=dict(list(module.state.items())[1:])),
        replace(module, entries={}),
    ):
        with pytest.raises(VerifierError):
            verify(broken, known=module)


def test_printing_follows_the_callee() -> None:
    module, _ = run_pipeline(training(3), "outline")
    known = print_parts(module)
    layer = module.functions["layer"]
    wide = replace(layer.results[0], type=TensorType(DType.F64))
    changed = module.with_function(replace(layer, results=(wide,)))
    assert print_parts(changed, known).text == print_module(changed) != known.text
