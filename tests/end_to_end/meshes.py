"""Training steps of a final graph over a mesh, all ranks in one process, beside the same steps of one device.

Both get the same microbatches: those that the data ranks of the mesh run side by side, one device runs one after the
other. What is compared is what each microbatch gives, all gradients before each update, and all states after it. Losses
of routers count the tokens of each rank here, as one device does; test_joint_losses.py has those of all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mgraph.compiler import build_module
from mgraph.ir.graph import Module, StateKind
from mgraph.ir.interpreter import run_ranks
from mgraph.ir.opdef import op_def
from mgraph.passes.samples import IGNORED, Margins, Shapes, random_inputs, random_state, zero_accumulators
from mgraph.recipe import MESH_AXES, Recipe
from tests.all_ranks import Tensors, difference, joined, laid_out, places
from tests.families.configs import write_config

MESH_OPTIONS = (
    "place",
    "sequence_parallel",
    "pad",
    "zero",
    "keep_gathered",
    "wide_sums",
    "overlap",
    "dispatch",
    "ep_chunks",
    "pad_to_capacity",
    "expert_extent",
    "expert_budget",
    "router_loss_counts",
)
"""Fields of the recipe that only say how a mesh is used."""
AS_ONE = {"arch": "none"}
OF_EACH = {"router_loss_counts": "local"}
"""What rows have unless they say otherwise: all of them, and those of models with experts."""
EXPERTS = ("moe", "limited", "mixtral", "gpt-oss", "deepseek")
"""What names of models with experts have in them."""
DATA_AXES = ("dp", "ep", "fsdp")
"""Axes whose ranks see different rows."""
BATCH, SEQUENCE = 2, 12
LEAST = 1e-5
"""Values below it may be zero but for rounding: softmax forgets a bias of the keys."""
LEAST_MARGIN = 1e-6
"""How near the routers' choices may come to other ones."""
THREES = '''
"""A decoder whose extents three ranks divide."""

from mgraph import models


def model():
    return models.get(
        "dense", "tiny", d_model=96, num_heads=12, num_kv_heads=6, d_ff=192, vocab_size=96, qk_norm=True, mlp_bias=True
    )
'''
ODD = '''
"""A decoder whose heads and vocabulary no even number of ranks divides, or at most two."""

from mgraph import models


def model():
    return models.get("dense", "tiny", d_model=48, num_heads=6, num_kv_heads=2, vocab_size=259, qk_norm=True)
'''
LIMITED = '''
"""Experts with room for fewer tokens than come to them, which keep the {keeps}."""

from mgraph import models


def model():
    return models.get("moe", "tiny-grouped", capacity_factor={factor}, capacity_keeps="{keeps}")
'''
MANY = '''
"""Experts of which each token has more than there are ranks."""

from mgraph import models


def model():
    return models.get("moe", "tiny-losses", top_k=5)
'''
MODEL_FILES = {
    "many-choices": MANY,
    "threes": THREES,
    "odd": ODD,
    "limited-weight": LIMITED.format(factor=0.75, keeps="weight"),
    "limited-position": LIMITED.format(factor=1.25, keeps="position"),
}


@dataclass(frozen=True)
class Row:
    """A line of the table: a model, a mesh, and other fields of the recipe."""

    model: str
    mesh: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.model, self.mesh, *(f"{name}={value}" for name, value in self.options)])

    @property
    def alone(self) -> Row:
        """The row of one device: without the mesh, and without what only says how a mesh is used."""
        return Row(self.model, "dp=1", tuple(option for option in self.options if option[0] not in MESH_OPTIONS))

    @property
    def sizes(self) -> dict[str, int]:
        """The axes and their sizes, major first."""
        given = dict(part.split("=") for part in self.mesh.split(","))
        return {axis: int(given[axis]) for axis in MESH_AXES if given.get(axis, "").isdecimal()}

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    def recipe(self, directory: Path, **more: Any) -> Recipe:
        """The recipe of the row; files that its model needs are written to a directory."""
        model = self.model
        if model in MODEL_FILES:
            (directory / f"{model}.py").write_text(MODEL_FILES[model])
            model = f"{directory}/{model}.py:model"
        elif model.startswith("hf:"):
            model = write_config(model.removeprefix("hf:"), directory / model.removeprefix("hf:"))
        as_one = AS_ONE | (OF_EACH if any(part in self.model for part in EXPERTS) else {})
        return Recipe(model=model, mesh=self.mesh, **{**as_one, **dict(self.options), **more})


@dataclass(frozen=True)
class Batch:
    """What one data rank gets for a microbatch, and where it stands in the step."""

    inputs: Tensors
    sample: int


def steps_of(module: Module, data_ranks: int, steps: int) -> list[list[list[Batch]]]:
    """Per step and microbatch a batch for each data rank. The first step alone has two microbatches, and labels are
    masked to another number on each rank."""
    shapes = Shapes({"B": BATCH, "S": SEQUENCE}, Shapes.of(module).vocab)
    function, made, number = module.entry_function("microbatch"), [], 0
    for step in range(steps):
        microbatches = []
        for index in range(2 if step == 0 else 1):
            batches = []
            for rank in range(data_ranks):
                inputs = random_inputs(function, shapes, number)
                inputs["labels"].view(-1)[: rank + 1] = IGNORED
                batches.append(Batch(inputs, (index * data_ranks + rank) * BATCH))
                number += 1
            microbatches.append(batches)
        made.append(microbatches)
    return made


class Ranks:
    """The ranks of a mesh (of no axes: one device) and what each holds."""

    def __init__(self, module: Module, sizes: Mapping[str, int], state: Tensors) -> None:
        self.module, self.sizes, self.margins = module, sizes, Margins()
        self.at = places(sizes)
        self.held: list[Tensors] = [{} for _ in self.at]
        for name, tensor in state.items():
            for rank, own in zip(self.held, laid_out(tensor, module.state[name].type, sizes), strict=True):
                rank[name] = own

    def data_rank(self, at: Mapping[str, int]) -> int:
        """Which of the batches a rank gets."""
        index = 0
        for axis in DATA_AXES:
            index = index * self.sizes.get(axis, 1) + at.get(axis, 0)
        return index

    def run_batches(self, entry: str, step: int, batches: Sequence[Batch]) -> list[Tensors]:
        """An entry on each data rank's batch: the outputs by data rank, equal on all ranks that have its batch."""
        outputs = self._on_batches(entry, step, batches)
        found: dict[int, Tensors] = {}
        for at, out in zip(self.at, outputs, strict=True):
            first = found.setdefault(self.data_rank(at), out)
            assert all(difference(first[name], tensor) <= 1e-12 for name, tensor in out.items())
        return [found[index] for index in range(len(found))]

    def finish(self) -> Tensors:
        """The update: its outputs, equal on all ranks."""
        return self._equal(self._run("finish", [RATE] * len(self.at)))

    def last(self, step: int, batches: Sequence[Batch]) -> Tensors:
        """The last microbatch and the update in one: the outputs of the update."""
        return self._equal(self._on_batches("last", step, batches))

    def _on_batches(self, entry: str, step: int, batches: Sequence[Batch]) -> list[Tensors]:
        mine = [batches[self.data_rank(at)] for at in self.at]
        for held, batch in zip(self.held, mine, strict=True):
            for name, value in (("rng.step", step), ("rng.sample", batch.sample)):
                if name in held:
                    held[name] = torch.tensor(value)
        return self._run(entry, [batch.inputs | RATE for batch in mine])

    @staticmethod
    def _equal(outputs: Sequence[Tensors]) -> Tensors:
        for out in outputs[1:]:
            assert all(difference(outputs[0][name], tensor) <= 1e-12 for name, tensor in out.items())
        return outputs[0]

    def whole(self, *kinds: StateKind) -> Tensors:
        """The states of some kinds, put together."""
        chosen = {n: s for n, s in self.module.state.items() if s.kind in kinds and not n.startswith("rng.")}
        return {n: joined([rank[n] for rank in self.held], s.type, self.sizes) for n, s in chosen.items()}

    def _run(self, entry: str, inputs: Sequence[Tensors]) -> list[Tensors]:
        given = [{p.name: own[p.name] for p in self.module.entry_function(entry).params} for own in inputs]
        outputs, updates = run_ranks(self.module, entry, given, self.held, self.sizes, lifted=True, hook=self.margins)
        for held, new in zip(self.held, updates, strict=True):
            held |= new
        return outputs


RATE = {"lr": torch.tensor(0.01)}
GRADIENTS = (StateKind.GRAD,)
STATES = (StateKind.PARAM, StateKind.BUFFER, StateKind.MASTER, StateKind.MOMENT, StateKind.SCALAR)


def trajectory(ranks: Ranks, steps: Sequence[Sequence[Sequence[Batch]]], *, side_by_side: bool) -> Iterator[Tensors]:
    """What each microbatch gives, the gradients of each step, its outputs, and the states after it; at last what the
    entries that change nothing give. Where there is an entry `last`, it is all that the last step shows."""

    def outputs(entry: str, step: int, batches: Sequence[Batch]) -> Tensors:
        groups = [batches] if side_by_side else [[batch] for batch in batches]
        made = [out for group in groups for out in ranks.run_batches(entry, step, group)]
        return {f"{entry}: {name} of data rank {i}": t for i, out in enumerate(made) for name, t in out.items()}

    entries = ranks.module.entries.keys()
    for number, step in enumerate(steps):
        ends_with_it = "last" in entries and step is steps[-1]
        for microbatch in step:
            yield {} if ends_with_it else outputs("microbatch", number, microbatch)
        yield {} if ends_with_it else ranks.whole(*GRADIENTS)
        yield ranks.last(number, step[0]) if ends_with_it else ranks.finish()
        yield ranks.whole(*STATES)
    for entry in sorted(entries - {"microbatch", "finish", "last"}):
        yield outputs(entry, len(steps), steps[-1][-1])


def initial_state(module: Module) -> Tensors:
    """Random parameters, and everything else as at the beginning of a run, in float64."""
    state = zero_accumulators(module, random_state(module, 0))
    for name, declared in module.state.items():
        counts = declared.kind is StateKind.SCALAR and not declared.type.dtype.is_float
        if counts or declared.kind is StateKind.MOMENT:
            state[name] = torch.zeros_like(state[name])
    return {n: t.double() if t.is_floating_point() else t for n, t in state.items()}


class Table:
    """The rows of a table, with what they share kept: single-device graphs and their steps."""

    def __init__(self, directory: Path, steps: int = 3) -> None:
        self.directory, self.steps = directory, steps
        self._modules: dict[Row, Module] = {}
        self._expected: dict[tuple[Row, int], list[Tensors]] = {}

    def alone(self, row: Row) -> Module:
        """The graph of one device."""
        if row.alone not in self._modules:
            recipe = row.alone.recipe(self.directory, disable="data-parallel")
            self._modules[row.alone] = build_module(recipe).module
        return self._modules[row.alone]

    def expected(self, row: Row, data_ranks: int) -> list[Tensors]:
        """The steps of one device."""
        key = row.alone, data_ranks
        if key not in self._expected:
            module = self.alone(row)
            ranks = Ranks(module, {}, initial_state(module))
            steps = steps_of(module, data_ranks, self.steps)
            self._expected[key] = list(trajectory(ranks, steps, side_by_side=False))
            assert ranks.margins.least > LEAST_MARGIN, "rounding decides a choice of experts: take another seed"
        return self._expected[key]

    def worst(self, row: Row) -> float:
        """The largest difference of a row's mesh from one device, in anything."""
        data_ranks = math.prod(row.sizes.get(axis, 1) for axis in DATA_AXES)
        alone, module = self.alone(row), build_module(row.recipe(self.directory)).module
        used = {n.attrs["axis"] for _, n in module.walk() if op_def(n.op).collective}
        products = {axis.name for axis in module.mesh if axis.of}
        assert used == row.sizes.keys() | products, f"{row}: collectives over {used}"
        state = initial_state(alone)
        assert module.state.keys() >= state.keys()
        more = {n: s.type.shape for n, s in module.state.items() if n.endswith(".overrun")}  # of a mesh alone
        state |= {n: torch.zeros([int(str(d)) for d in shape], dtype=torch.int64) for n, shape in more.items()}
        ranks = Ranks(module, row.sizes, state)
        worst = 0.0
        steps = steps_of(alone, data_ranks, self.steps)
        found = trajectory(ranks, steps, side_by_side=True)
        for expected, own in zip(self.expected(row, data_ranks), found, strict=True):
            assert not own.pop("expert_overruns", torch.zeros(1)).any(), f"{row}: tokens found no room"
            own = {name: tensor for name, tensor in own.items() if name not in more}
            assert expected.keys() == own.keys() or not own
            for name, tensor in own.items():
                error = difference(expected[name], tensor, LEAST)
                assert error <= 1e-9, f"{row}: {name} differs by {error}"
                worst = max(worst, error)
        return worst
