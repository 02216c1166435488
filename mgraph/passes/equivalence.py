"""Do two modules, before and after a pass, compute the same? Checks by running both with the interpreter.

An entry that both have is run on both, on all ranks of the mesh. An entry that a pass derives has its own reference:

    microbatch          torch's autograd through the interpreted forward, and the forward's own outputs
    finish              torch.optim.AdamW or Adam and clip_grad_norm_, three steps in float64
    step (serving)      the logits of whole sequences, against chunks over the cache
    over a data axis    one rank that runs the microbatches of all ranks; all at once where losses count them together
    over any other axis the ranks there were before, with whole states, over the entries of a step

Tiers: `bitwise` is torch.equal in the module's own dtypes. `reassociating` is at most 1e-9 apart, relative to the
largest element, on the lifted (float64) graph; and in the module's own dtypes the error against the lifted reference
is at most 1.5 times that of the reference (root mean square over all outputs of the relative 2-norms).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mgraph.ir.dims import evaluate
from mgraph.ir.graph import Module, StateKind
from mgraph.ir.interpreter import Hook, run, run_ranks
from mgraph.ir.local import bound_dims, data_axes, part
from mgraph.ir.mesh import coordinates_of, rank_of
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.types import Placement, Shard
from mgraph.parameter_groups import assign
from mgraph.passes.autodiff import COUNT_TOTAL, EVALUATION, LOGITS, LOSS_SCALE, LOSS_TOTAL
from mgraph.passes.base import Pass, Tier
from mgraph.passes.cache_groups import cache_groups
from mgraph.passes.overlap_gradients import LAST
from mgraph.passes.samples import (
    CHOICES,
    Margins,
    Shapes,
    Tensors,
    generator,
    mesh_of,
    random_inputs,
    random_state,
    ranks_of,
    zero_accumulators,
)
from mgraph.passes.serve_entries import SAMPLING
from mgraph.passes.serve_samples import CACHE_DIMS, block_rows, step_inputs

LIFTED_BOUND, NATIVE_BOUND, MARGIN = 1e-9, 1.5, 1e-3
_ROUNDINGS = 4  # a choice must also be so many roundings of the coarsest dtype away from another
_DRAWS, _MORE = 200, 7
_ALIKE = 1e-2  # ranks round alike but for the order of their sums
_TINY = 1e-6  # differences are relative to the largest element, or to this where all are smaller
_CHUNKS = (4, 1, 3, 1)
_RATES = (0.01, 0.02, 0.005)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one check measured: the worst error, its bound, and the native error over the reference's own (if run)."""

    method: str
    error: float
    bound: float
    native: float | None = None


@dataclass(eq=False)
class Mismatch(Exception):
    """An output that differs by more than its bound."""

    entry: str
    output: str
    error: float
    bound: float
    kind: str


class Unverified(Exception):
    """A check that cannot be made; the message says why."""


Runner = Callable[[bool], Tensors]  # lifted -> named tensors
Trial = Callable[[int], tuple[Runner, Runner]]  # seed -> reference and actual


def check(pass_: Pass, before: Module, after: Module, shapes: Shapes) -> list[Evidence]:
    """Check every entry of `after`. Raises Mismatch, or Unverified where an entry has no reference."""
    if after is before:
        return [Evidence("the pass left the graph as it was", 0.0, 0.0)]
    new = set(after.entries) - set(before.entries)
    if "forward" in before.entries and "microbatch" in new:
        evidence, covered = _training(pass_, before, after, shapes), {"microbatch", "evaluate", "predict"}
    elif "forward" in before.entries and "step" in new:
        evidence, covered = [_serving(before, after, shapes)], {"step", *SAMPLING}  # alike for all models
    elif pass_.whole_steps:
        evidence, covered = [_whole_step(before, after, shapes)], {"microbatch", "finish"}
        for entry in sorted(set(after.entries) - covered - new):
            evidence.append(_same_entry(pass_, before, after, entry, shapes))
            covered.add(entry)
    elif len(after.mesh) > len(before.mesh):
        evidence, covered = [_spread(before, after, shapes)], set(after.entries)
    else:
        covered = set(after.entries) - new
        evidence = [_same_entry(pass_, before, after, entry, shapes) for entry in sorted(covered)]
        if "finish" in new:
            evidence.append(_optimizer(pass_, after))
            covered.add("finish")
        if LAST in new:
            evidence.append(_last(before, after, shapes))
            covered.add(LAST)
    missing = sorted(set(after.entries) - covered)
    if missing:
        raise Unverified(f"entry {missing[0]!r} has no independent reference")
    added = [name for entry in sorted(covered & set(before.entries)) for name in _added(before, after, entry)]
    if added:
        raise Unverified(f"all else is equal, but {added[0]!r} is updated besides and has no independent reference")
    return evidence


# judging


def judge(entry: str, tier: Tier, method: str, seeds: Iterator[int], trial: Trial) -> Evidence:
    """Compare what the two runners of a trial give, by a tier's bounds.

    A native error beyond its bound is measured again over more seeds, for one draw may be lucky.
    """
    import torch

    if tier is Tier.PRECISION_CHANGING:
        raise Unverified("passes that change the precision have bounds of their own")
    reference, actual = trial(next(seeds))
    native = reference(False)
    if tier is Tier.BITWISE:
        found = actual(False)
        for name in _shared(entry, native, found):
            if not torch.equal(native[name], found[name]):
                raise Mismatch(entry, name, _error(native[name], found[name]), 0.0, "must be bitwise equal")
        return Evidence(method, 0.0, 0.0)
    exact = reference(True)
    worst = compare(entry, exact, actual(True))
    errors = [_native_error(exact, native)], [_native_error(exact, actual(False))]
    # Where the reference happens to be as good as the dtype allows, one more rounding is no fault.
    floor = 2 * max(map(_epsilon, native.values()))
    if not errors[1][0] <= max(NATIVE_BOUND * errors[0][0], floor):
        for reference, actual in map(trial, itertools.islice(seeds, _MORE)):
            exact = reference(True)
            for measured, runner in zip(errors, (reference, actual), strict=True):
                measured.append(_native_error(exact, runner(False)))
    before, after = (math.sqrt(sum(e * e for e in measured) / len(measured)) for measured in errors)
    allowed = max(NATIVE_BOUND * before, floor)
    if not after <= allowed:
        raise Mismatch(entry, "all outputs", after, allowed, "error in the module's own dtypes")
    return Evidence(method, worst, LIFTED_BOUND, after / before if before else None)


def compare(entry: str, exact: Tensors, found: Tensors) -> float:
    """The worst relative difference of lifted tensors; raises Mismatch above the bound. Integers must be equal."""
    worst = 0.0
    for name in _shared(entry, exact, found):
        error = _error(exact[name], found[name])
        if not error <= (LIFTED_BOUND if exact[name].is_floating_point() else 0.0):
            raise Mismatch(entry, name, error, LIFTED_BOUND, "relative error on the lifted graph")
        worst = max(worst, error)
    return worst


def _shared(entry: str, expected: Tensors, found: Tensors) -> list[str]:
    for name in expected.keys() ^ found.keys():
        raise Mismatch(entry, name, math.inf, 0.0, "exists on one side only")
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            raise Mismatch(entry, name, math.inf, 0.0, f"shape {list(found[name].shape)}, not {list(tensor.shape)}")
    return sorted(expected)


def _error(expected: Any, found: Any) -> float:
    if not expected.numel():
        return 0.0
    scale = max(float(expected.double().abs().max()), _TINY)
    error = float((expected.double() - found.double()).abs().max()) / scale
    return math.inf if math.isnan(error) else error


def _native_error(exact: Tensors, native: Tensors) -> float:
    """Root mean square over the float outputs of the relative 2-norms of their errors."""
    squares = []
    for name, tensor in exact.items():
        if tensor.is_floating_point():
            scale = max(float(tensor.norm()), _TINY)
            squares.append((float((native[name].double() - tensor).norm()) / scale) ** 2)
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def _epsilon(tensor: Any) -> float:
    import torch

    return float(torch.finfo(tensor.dtype).eps) if tensor.is_floating_point() else 0.0


# drawing


def _steady(module: Module, reference: Callable[[int, Hook], Any]) -> Iterator[int]:
    """Seeds whose lifted reference run makes no choice (top-k) within the margin of another outcome."""
    import torch

    if not any(node.op in CHOICES for _, node in module.walk()):
        yield from range(_DRAWS)
        return
    dtypes = {s.type.dtype for s in module.state.values() if s.type.dtype.is_float}
    margin = max(MARGIN, *(_ROUNDINGS * float(torch.finfo(to_torch_dtype(d)).eps) for d in dtypes))
    found = False
    for seed in range(_DRAWS):
        margins = Margins()
        reference(seed, margins)
        if margins.least > margin:
            found = True
            yield seed
    if not found:
        raise Unverified(f"no draw of {_DRAWS} keeps every routing choice {margin:.0e} away from another outcome")


@dataclass(frozen=True)
class _Run:
    """One entry on all ranks with its inputs and states; states that are whole are laid out over the mesh."""

    module: Module
    entry: str
    inputs: Sequence[Tensors]
    states: Sequence[Tensors]
    sizes: Mapping[str, int]

    def __call__(self, lifted: bool, hook: Hook | None = None) -> Tensors:
        outputs, updates = self.apart(lifted, hook)
        return {
            name if len(outputs) == 1 else f"{name} on rank {rank}": tensor
            for rank, both in enumerate(zip(outputs, updates, strict=True))
            for part in both
            for name, tensor in part.items()
        }

    def apart(self, lifted: bool, hook: Hook | None = None) -> tuple[list[Tensors], list[Tensors]]:
        """Outputs and updates per rank."""
        import torch

        states = [self._laid_out(rank, state) for rank, state in enumerate(self.states)]
        with torch.no_grad():
            return run_ranks(self.module, self.entry, self.inputs, states, self.sizes, lifted=lifted, hook=hook)

    def _laid_out(self, rank: int, state: Tensors) -> Tensors:
        place = dict(zip(self.sizes, coordinates_of(rank, list(self.sizes.values())), strict=True))
        types = {n: s.type for n, s in self.module.state.items() if s.type.placement and n in state}
        whole = {
            n: t for n, t in types.items() if tuple(state[n].shape) == tuple(evaluate(d, CACHE_DIMS) for d in t.shape)
        }
        return {**state, **{n: part(state[n], t, self.sizes, place) for n, t in whole.items()}}


def _same_entry(pass_: Pass, before: Module, after: Module, entry: str, shapes: Shapes) -> Evidence:
    """The entry of both modules with the same inputs, and states that the pass says mean the same."""
    sizes = mesh_of(after)
    ranks = _data_ranks(after, sizes)
    functions = after.entry_function(entry), before.entry_function(entry)

    def given(rank: int, seed: int) -> Tensors:
        return {n: t for function in functions for n, t in random_inputs(function, shapes, seed, rank).items()}

    def of(seed: int) -> _Run:
        inputs = [dict(pass_.inputs_after(given(rank, seed))) for rank in ranks]
        states = [{**random_state(after, seed, rank), **random_state(before, seed, rank)} for rank in ranks]
        return _Run(after, entry, inputs, states, sizes)

    def reference(seed: int, lifted: bool, hook: Hook | None = None) -> Tensors:
        run_ = of(seed)
        states = []
        for own in run_.states:
            own = {n: t.double() if lifted and t.is_floating_point() else t for n, t in own.items()}
            given = pass_.states_before(before, own)
            if given is None:
                raise Unverified("no states of the module before mean the same, since the pass adds random numbers")
            states.append(dict(given))
        return replace(run_, module=before, states=states)(lifted, hook)

    besides = {*_added(before, after, entry), *after.entries[entry].outputs} - set(before.entries[entry].outputs)

    def actual(seed: int, lifted: bool) -> Tensors:
        return {n: t for n, t in of(seed)(lifted).items() if n.partition(" on rank ")[0] not in besides}

    seeds = _steady(before, lambda seed, hook: reference(seed, True, hook))
    where = f"both graphs on {len(ranks)} ranks" if len(ranks) > 1 else "both graphs"
    return judge(entry, pass_.tier, where, seeds, functools.partial(_pair, reference, actual))


def _added(before: Module, after: Module, entry: str) -> list[str]:
    """The states that only the second module's entry updates."""
    return sorted(set(after.entries[entry].updates) - set(before.entries[entry].updates))


# derived entries


def _training(pass_: Pass, before: Module, after: Module, shapes: Shapes) -> list[Evidence]:
    """Loss, count and every gradient against autograd; evaluate and predict against the forward."""
    function = before.entry_function("forward")

    def forward(seed: int) -> _Run:
        return _Run(before, "forward", [random_inputs(function, shapes, seed)], [random_state(before, seed)], {})

    def gradients(seed: int) -> tuple[Runner, Runner]:
        inputs, state = random_inputs(function, shapes, seed), random_state(after, seed)
        reference = functools.partial(_autograd, before, inputs, state)
        return reference, _Run(after, "microbatch", [inputs], [state], {})

    def seeds() -> Iterator[int]:
        return _steady(before, lambda seed, hook: forward(seed)(True, hook))

    quiet = EVALUATION if EVALUATION in before.entries else "forward"
    evidence = [judge("microbatch", pass_.tier, "torch autograd of the forward", seeds(), gradients)]
    for entry in sorted(set(after.entries) & {"evaluate", "predict"}):
        outputs = after.entries[entry].outputs

        def parts(seed: int, entry: str = entry, outputs: tuple[str, ...] = outputs) -> tuple[Runner, Runner]:
            run_ = replace(forward(seed), entry=quiet)
            own = _Run(after, entry, run_.inputs, [random_state(after, seed)], {})
            return lambda lifted: {n: t for n, t in run_(lifted).items() if n in outputs}, own

        evidence.append(judge(entry, Tier.BITWISE, "the forward", seeds(), parts))
    return evidence


def _autograd(before: Module, inputs: Tensors, state: Tensors, lifted: bool) -> Tensors:
    """What `microbatch` should give: the forward's loss and count, and accumulators with torch's gradients added."""
    trained = {n: t for n, t in state.items() if n in before.state and before.state[n].trainable}
    leaves = {n: (t.double() if lifted else t).detach().clone().requires_grad_() for n, t in trained.items()}
    out, _ = run(before, "forward", inputs, {**state, **leaves}, lifted=lifted)
    seed = state.get(LOSS_SCALE)
    out["loss_sum"].backward(None if seed is None else seed.to(out["loss_sum"].dtype))
    wanted = {n: t.detach() for n, t in out.items() if n != LOGITS}
    start = {n: t.double() if lifted and t.is_floating_point() else t for n, t in state.items()}
    wanted[LOSS_TOTAL] = start[LOSS_TOTAL] + wanted["loss_sum"]
    wanted[COUNT_TOTAL] = start[COUNT_TOTAL] + wanted["count"]
    for name, leaf in leaves.items():
        gradient = 0 if leaf.grad is None else leaf.grad.to(start[f"{name}.grad"].dtype)
        wanted[f"{name}.grad"] = start[f"{name}.grad"] + gradient
    return wanted


def _optimizer(pass_: Any, after: Module) -> Evidence:
    """Three steps of `finish` on random accumulators, large and small (so that clipping acts and does not)."""
    import torch

    state = {n: t.double() if t.is_floating_point() else t for n, t in random_state(after, 0).items()}
    grads = {n.removesuffix(".grad"): n for n, s in after.state.items() if s.kind is StateKind.GRAD}
    state |= {n: torch.zeros_like(t) for n, t in state.items() if after.state[n].kind is StateKind.MOMENT}
    state |= {n: torch.zeros_like(t) for n, t in state.items() if n == "step"}
    leaves = {n: state[n].clone().requires_grad_() for n in grads}
    state |= {f"{n}.master": t.detach().clone() for n, t in leaves.items() if f"{n}.master" in state}
    rules = assign(pass_.groups, [s.name for s in after.state.values() if s.kind is StateKind.PARAM])
    groups = [
        {"params": [leaf], "weight_decay": rules[name].decay(pass_.weight_decay, leaf.dim()), "rate": rules[name].lr}
        for name, leaf in leaves.items()
    ]
    kind = torch.optim.AdamW if pass_.optimizer == "adamw" else torch.optim.Adam
    optimizer = kind(groups, betas=(pass_.beta1, pass_.beta2), eps=pass_.eps, foreach=False)
    loss_scale = state.get(LOSS_SCALE, torch.tensor(1.0))
    worst = 0.0
    for step, (rate, size) in enumerate(zip(_RATES, (30.0, 1e-4, 3.0), strict=True)):
        loss, count = torch.tensor(7.0 + step, dtype=torch.float64), torch.tensor(3 + step)
        state |= {LOSS_TOTAL: loss, COUNT_TOTAL: count}
        for name, gradient in grads.items():
            noise = torch.randn(state[gradient].shape, generator=generator(step, gradient), dtype=torch.float64)
            state[gradient] = size * noise * loss_scale
            leaves[name].grad = size * noise / count
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), pass_.max_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["rate"]
        optimizer.step()
        with torch.no_grad():
            lr = torch.tensor(rate, dtype=torch.float64)
            out, new = run(after, "finish", {"lr": lr}, state, lifted=True)
        state = {**state, **new}
        wanted = {"loss": loss / count, "grad_norm": norm, "count": count, "skipped": state["skipped"]}
        wanted |= {n: loss_scale for n in out if n == LOSS_SCALE}
        worst = max(worst, compare("finish", wanted, out))
        expected, found = _after_step(after, optimizer, leaves, grads, state)
        worst = max(worst, compare("finish", expected, found))
    return Evidence(f"torch.optim.{kind.__name__}, 3 steps in float64", worst, LIFTED_BOUND)


def _after_step(
    after: Module, optimizer: Any, leaves: Tensors, grads: Mapping[str, str], state: Tensors
) -> tuple[Tensors, Tensors]:
    """Parameters, masters, moments and reset accumulators: as torch has them, and as the graph has them."""
    expected: Tensors = {}
    for name, leaf in leaves.items():
        expected[name] = leaf.detach()
        expected[f"{name}.m"] = optimizer.state[leaf]["exp_avg"]
        expected[f"{name}.v"] = optimizer.state[leaf]["exp_avg_sq"]
        if f"{name}.master" in after.state:
            expected[f"{name}.master"] = leaf.detach()
    for name in (*grads.values(), LOSS_TOTAL, COUNT_TOTAL):
        expected[name] = state[name].new_zeros(state[name].shape)
    return expected, {name: state[name] for name in expected}


def _last(before: Module, after: Module, shapes: Shapes) -> Evidence:
    """The last microbatch and the end of a step in one, against one after the other."""
    sizes = mesh_of(after)
    numbers = _data_ranks(after, sizes)
    function = after.entry_function(LAST)

    def given(seed: int) -> tuple[list[Tensors], list[Tensors]]:
        inputs = [random_inputs(function, shapes, seed, number) for number in numbers]
        return inputs, [random_state(before, seed, number) for number in numbers]

    def named(ranks: Sequence[Tensors]) -> Tensors:
        return {f"{name} on rank {rank}": t for rank, tensors in enumerate(ranks) for name, t in tensors.items()}

    def apart(seed: int, lifted: bool, hook: Hook | None = None) -> Tensors:
        inputs, states = given(seed)
        made, updates = _Run(before, "microbatch", inputs, states, sizes).apart(lifted, hook)
        states = [{**s, **u} for s, u in zip(states, updates, strict=True)]
        outputs, new = _Run(before, "finish", inputs, states, sizes).apart(lifted)
        besides = [{n: t for n, t in own.items() if n in after.entries[LAST].outputs} for own in made]
        return named([{**m, **u, **n, **o} for m, u, n, o in zip(besides, updates, new, outputs, strict=True)])

    def joined(seed: int, lifted: bool) -> Tensors:
        inputs, states = given(seed)
        outputs, updates = _Run(after, LAST, inputs, states, sizes).apart(lifted)
        return named([{**u, **o} for u, o in zip(updates, outputs, strict=True)])

    seeds = _steady(before, lambda seed, hook: apart(seed, True, hook))
    pair = functools.partial(_pair, apart, joined)
    return judge(LAST, Tier.REASSOCIATING, "the microbatch, then the end of the step", seeds, pair)


def _whole_step(before: Module, after: Module, shapes: Shapes) -> Evidence:
    """A step of one microbatch from cleared accumulators, against one from what those held that are not cleared."""
    sizes = mesh_of(after)
    numbers = _data_ranks(after, sizes)
    function = before.entry_function("microbatch")
    kept = set(before.entries["finish"].updates) - set(after.entries["finish"].updates)

    def step(module: Module, seed: int, lifted: bool, hook: Hook | None = None) -> Tensors:
        inputs = [random_inputs(function, shapes, seed, number) for number in numbers]
        ends = [random_inputs(before.entry_function("finish"), shapes, seed, number) for number in numbers]
        held = [random_state(before, seed, number) for number in numbers]
        states = [{**zero_accumulators(before, s), **{n: s[n] for n in kept if module is after}} for s in held]
        first, updates = _Run(module, "microbatch", inputs, states, sizes).apart(lifted, hook)
        states = [{**s, **u} for s, u in zip(states, updates, strict=True)]
        outputs, new = _Run(module, "finish", ends, states, sizes).apart(lifted)
        made = [{**f, **o, **n} for f, o, n in zip(first, outputs, new, strict=True)]
        return {f"{n} on rank {r}": t for r, tensors in enumerate(made) for n, t in tensors.items() if n not in kept}

    seeds = _steady(before, lambda seed, hook: step(before, seed, True, hook))
    pair = functools.partial(_pair, functools.partial(step, before), functools.partial(step, after))
    return judge("finish", Tier.REASSOCIATING, "whole steps of one microbatch", seeds, pair)


def _data_ranks(module: Module, sizes: Mapping[str, int]) -> list[int]:
    """For each rank of a mesh its number among those with other data: ranks that divide the work have the same."""
    data = data_axes(module.mesh, bound_dims(module))
    counted = {axis: size if axis in data else 1 for axis, size in sizes.items()}
    numbers = []
    for rank in range(ranks_of(sizes)):
        number = 0
        for size, at in zip(counted.values(), coordinates_of(rank, list(sizes.values())), strict=True):
            number = number * size + (at if size > 1 else 0)
        numbers.append(number)
    return numbers


def _spread(before: Module, after: Module, shapes: Shapes) -> Evidence:
    """A step over one more mesh axis, against the ranks that there were.

    Where ranks along the new axis see different microbatches, a rank of before runs those of all of them, one after the
    other, or as one where losses count the tokens of all ranks; else the same ones. What they hold together must be
    what it holds.
    """
    axis, *more = [axis.name for axis in after.mesh if axis.name not in {old.name for old in before.mesh}]
    if more:
        raise Unverified(f"{axis}, {', '.join(more)} come at once, and one axis at a time is checked")
    sizes, old = mesh_of(after), mesh_of(before)
    numbers = _data_ranks(after, sizes)
    groups: dict[int, list[int]] = {}
    for rank in range(ranks_of(sizes)):
        coordinates = dict(zip(sizes, coordinates_of(rank, list(sizes.values())), strict=True))
        groups.setdefault(rank_of([coordinates[a] for a in old], list(old.values())), []).append(rank)
    is_data = axis in data_axes(after.mesh, bound_dims(after))
    at_once = is_data and _counts_together(before, axis)
    entries = sorted(after.entries, key=lambda entry: (entry == "finish", entry))

    def inputs(entry: str, seed: int, ranks: Iterable[int]) -> list[Tensors]:
        return [random_inputs(before.entry_function(entry), shapes, seed, numbers[rank]) for rank in ranks]

    def states(seed: int, ranks: Iterable[int]) -> list[Tensors]:
        return [zero_accumulators(before, random_state(before, seed, numbers[rank])) for rank in ranks]

    def single(seed: int, lifted: bool, hook: Hook | None = None) -> Tensors:
        held = states(seed, (group[0] for _, group in sorted(groups.items())))
        made: Tensors = {}
        for entry in entries:
            for turn in range(sizes[axis] if is_data and entry != "finish" and not at_once else 1):
                given = inputs(entry, seed, (group[turn] for _, group in sorted(groups.items())))
                if at_once and entry != "finish":
                    of_group = [inputs(entry, seed, group) for _, group in sorted(groups.items())]
                    given = [_at_once(after, entry, axis, each) for each in of_group]
                outputs, updates = _Run(before, entry, given, held, old).apart(lifted, hook)
                held = [{**s, **u} for s, u in zip(held, updates, strict=True)]
                for rank, tensors in enumerate(outputs):
                    made |= {f"{named(entry, name, rank)}{said(turn, entry)}": t for name, t in tensors.items()}
            made |= {named(entry, n, r): u[n] for r, u in enumerate(updates) for n in compared(entry)}
        return made

    def named(entry: str, name: str, rank: int) -> str:
        return f"{'' if entry == 'finish' else f'{entry} '}{name} on rank {rank}"

    def said(turn: int, entry: str) -> str:
        return f", microbatch {turn}" if is_data and entry != "finish" else ""

    def compared(entry: str) -> tuple[str, ...]:
        return after.entries[entry].updates if entry == "finish" or not is_data else ()

    def spread(seed: int, lifted: bool) -> Tensors:
        held = states(seed, range(len(numbers)))
        if at_once:
            _count_sequences(held, groups.values(), int(shapes.dims["B"]))
        made: Tensors = {}
        for entry in entries:
            outputs, updates = _Run(after, entry, inputs(entry, seed, range(len(numbers))), held, sizes).apart(lifted)
            held = [{**s, **u} for s, u in zip(held, updates, strict=True)]
            for rank, group in groups.items():
                for name in after.entries[entry].outputs:
                    found = [outputs[r][name] for r in group]
                    turns = found if is_data and entry != "finish" else [_agreed(name, found)]
                    if at_once and entry != "finish":
                        turns = [_together(after, entry, name, axis, found)]
                    made |= {f"{named(entry, name, rank)}{said(turn, entry)}": t for turn, t in enumerate(turns)}
                for name in compared(entry):
                    parts = [updates[r][name] for r in group]
                    made[named(entry, name, rank)] = _joined(name, parts, after.state[name].type.on(axis))
        return made

    seeds = _steady(before, lambda seed, hook: single(seed, True, hook))
    method = f"one rank with the microbatches of {sizes[axis]}" if is_data else f"the same step without {axis}"
    method += ", as one" if at_once else ""
    return judge("finish", Tier.REASSOCIATING, method, seeds, functools.partial(_pair, single, spread))


def _count_sequences(states: list[Tensors], groups: Iterable[Sequence[int]], batch: int) -> None:
    """Say to random ops which sequences of the batch of its group a rank has, `batch` of them."""
    import torch

    for group in groups:
        for place, rank in enumerate(group):
            if "rng.sample" in states[rank]:
                states[rank]["rng.sample"] = torch.full_like(states[rank]["rng.sample"], place * batch)


def _counts_together(module: Module, axis: str) -> bool:
    """Whether losses count the tokens of all ranks along an axis to come."""
    ops = {node.op for _, node in module.walk() if node.op != "joint_sum" or node.attrs["axis"] == axis}
    if "joint_sum" in ops and "moe_capacity" in ops:
        raise Unverified("losses are of all ranks' tokens and a capacity of each rank's: one rank has no such step")
    return "joint_sum" in ops


def _at_once(module: Module, entry: str, axis: str, ranks: Sequence[Tensors]) -> Tensors:
    """The inputs of ranks along an axis as those of one."""
    import torch

    places = {p.name: p.tensor.on(axis) for p in module.entry_function(entry).params}
    return {
        name: torch.cat([own[name] for own in ranks], place.dim) if isinstance(place, Shard) else ranks[0][name]
        for name, place in places.items()
    }


def _together(module: Module, entry: str, name: str, axis: str, ranks: Sequence[Any]) -> Any:
    """What the outputs of ranks along an axis are together: sums, or parts of one tensor."""
    results = module.entry_function(entry).results
    place = results[module.entries[entry].outputs.index(name)].tensor.on(axis)
    return _joined(name, ranks, place) if isinstance(place, Shard) else sum(ranks)


def _joined(name: str, parts: Sequence[Any], place: Placement | None) -> Any:
    """What ranks along an axis hold together."""
    import torch

    return torch.cat(list(parts), place.dim) if isinstance(place, Shard) else _agreed(name, parts)


def _agreed(name: str, ranks: Sequence[Any]) -> Any:
    """What all ranks have alike."""
    for other in ranks[1:]:
        error = _error(ranks[0], other)
        if error > (LIFTED_BOUND if other.dtype.itemsize == 8 and other.is_floating_point() else _ALIKE):
            raise Mismatch("step", name, error, LIFTED_BOUND, "ranks that must hold the same do not")
    return ranks[0]


def _serving(before: Module, after: Module, shapes: Shapes) -> Evidence:
    """Two sequences, the second a step behind, in chunks over the cache, against both whole."""
    length, function = sum(_CHUNKS), before.entry_function("forward")
    ends = [0, *itertools.accumulate(_CHUNKS)]
    whole_shapes = Shapes({**shapes.dims, "B": 2, "S": length}, shapes.vocab)
    block_size = block_rows(after)
    width, groups = -(-length // block_size), len(cache_groups(after))

    def whole(seed: int, lifted: bool, hook: Hook | None = None) -> Tensors:
        inputs = random_inputs(function, whole_shapes, seed)
        made = _Run(before, "forward", [inputs], [random_state(before, seed)], {})(lifted, hook)
        return {f"logits of token {end} of {b}": made["logits"][b, end - 1] for b in range(2) for end in ends[1:]}

    def chunks(seed: int, lifted: bool) -> Tensors:
        state = random_state(after, seed)
        tokens = random_inputs(function, whole_shapes, seed)["tokens"].tolist()
        made: Tensors = {}
        for step in range(len(_CHUNKS) + 1):
            parts = [ends[max(0, i) : i + 2] if 0 <= i < len(_CHUNKS) else [0, 0] for i in (step, step - 1)]
            rows = [tokens[b][begin:end] for b, (begin, end) in enumerate(parts)]
            starts = [begin for begin, _ in parts]
            inputs = step_inputs(rows, starts, width, block_size, padding=1, groups=groups)
            outputs, updates = _Run(after, "step", [inputs], [state], {}).apart(lifted)
            state = {**state, **updates[0]}
            taken = [(b, end) for b, (_, end) in enumerate(parts) if end]
            pairs = zip(taken, outputs[0]["logits"], strict=True)
            made |= {f"logits of token {end} of {b}": logits for (b, end), logits in pairs}
        return made

    seeds = _steady(before, lambda seed, hook: whole(seed, True, hook))
    method = "chunks of two sequences over the cache against both whole"
    return judge("step", Tier.REASSOCIATING, method, seeds, functools.partial(_pair, whole, chunks))


def _pair(reference: Callable[..., Tensors], actual: Callable[..., Tensors], seed: int) -> tuple[Runner, Runner]:
    return functools.partial(reference, seed), functools.partial(actual, seed)
