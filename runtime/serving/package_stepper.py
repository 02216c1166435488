"""Runs the steps of a serve package: its parameters and its cache on a device, and arrays in, tokens out.

The inputs of a step are padded to what a bucket holds where CUDA graphs replay it (`step_graphs.py`); on the CPU, and
where a step fits no bucket, they are as long as they are. A padding token writes to block 0, belongs to no request, and
is in no row of logits; so nothing that is padded is ever read.

Tokens that the host does not know yet (`unknown`) are taken from what the step before sampled, on the device: `run`
returns as soon as the work is queued, and `get` waits for an event behind the copy of the results.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mgraph.errors import CheckpointError, OptionError, PackageError, some_of
from mgraph.runtime import checkpoint
from mgraph.runtime.invariant import fixed_shapes
from mgraph.runtime.mesh import ALONE, Mesh, bind_axes
from mgraph.runtime.package import Package, State, StateSpec, load_package
from mgraph.runtime.room import free_bytes, room, size_text
from mgraph.runtime.serving.blocks import Windows, most_blocks
from mgraph.runtime.serving.choices import Sampler, inputs_of_sample, sampled
from mgraph.runtime.serving.dispatch import Bucket
from mgraph.runtime.serving.opening import check_kind
from mgraph.runtime.serving.proof import check_entries, check_place, rows_of_each_kind
from mgraph.runtime.serving.scheduler import most_rows
from mgraph.runtime.serving.step import Batch, Done, Pending, Sampled, Sampling
from mgraph.runtime.serving.step_graphs import Capture, CudaCapture, StepGraphs, known
from mgraph.runtime.state import create_state
from mgraph.runtime.weights import load_weights

BLOCKS, LONGEST = "P", "S"
"""The named dims of a serve package: blocks of the cache, tokens of a sequence."""
MAX_TOKENS, MAX_REQUESTS = 2048, 128
"""Of a step, where nothing else is asked for."""
MEMORY_PART = 0.9
"""How much of what is free beside steps and graphs the cache takes where no number of blocks is given."""
CPU_CACHE = 2**30
"""Bytes of the cache on the CPU where no number of blocks is given, at most."""


class PackageStepper:
    """A serve package with weights, a cache of `num_blocks` blocks, and its steps; see `mgraph.runtime.serving.step`.

    `weights` are a safetensors file or directory, or a training run's directory; None draws the parameters with `seed`.
    `num_blocks` 0 takes as many as `cache_bytes` hold, or (0) what the memory allows. A rank of a `mesh` has its shares
    of parameters and cache; all ranks then run the same steps. With `batch_invariant` what a request gets has the same
    bits whatever else is in a step (`runtime/invariant.py`). Raises OptionError, PackageError, CheckpointError.
    """

    def __init__(
        self,
        package: Package | Path | str,
        weights: Path | str | None = None,
        num_blocks: int = 0,
        device: torch.device | str = "cpu",
        *,
        seed: int = 0,
        max_tokens: int = MAX_TOKENS,
        max_requests: int = MAX_REQUESTS,
        strict: bool = False,
        jit: bool = False,
        cuda_graphs: bool = True,
        mesh: Mesh = ALONE,
        batch_invariant: bool = False,
        cache_bytes: int = 0,
    ) -> None:
        self.device, self.mesh = torch.device(device), mesh
        if self.device.index is not None:
            torch.cuda.set_device(self.device)
        loaded = package if isinstance(package, Package) else load_serving(package, self.device, strict, jit)
        if shared_axes(loaded.manifest):
            bind_axes(loaded.manifest["mesh"], mesh.world_size, "serve.py")
        caches = [spec for spec in loaded.state_specs if spec.kind == "cache"]
        self.block_size = caches[0].shape[0]
        self.max_length = loaded.bounds(LONGEST)[1] or 0
        self.vocab_size = loaded.vocab_size
        self.max_requests = max_requests
        self.max_tokens = max(max_tokens, max_requests)
        self.asynchronous = self.device.type == "cuda"
        self.package: Package = loaded
        self.state = _parameters(loaded, weights, seed, self.device, mesh)
        self._batch_invariant = batch_invariant
        self._last: Tensor | None = None
        groups = loaded.manifest.get("cache_groups", [{"window": None, "caches": [spec.name for spec in caches]}])
        self.windows: Windows = tuple(group["window"] for group in groups)
        self._shared = shared_caches(caches, [group["caches"] for group in groups])
        self.block_bytes = sum(math.prod(s.share(mesh).shape) * s.dtype.itemsize for s, *_ in self._shared)
        """Of the cache, on this rank."""
        self._captures = cuda_graphs and self.device.type == "cuda"
        self.graphs: StepGraphs | None = None
        self._steps = 0
        self.num_blocks = 0
        if cache_bytes and not num_blocks:
            num_blocks = max(1 + len(self.windows), cache_bytes // self.block_bytes)
        if not num_blocks:
            num_blocks = min(mesh.gather(mesh.together(lambda: self._blocks_that_fit(self.block_bytes))))
        mesh.together(lambda: self.resize(num_blocks))
        if batch_invariant:
            self._prove_invariant()

    def resize(self, num_blocks: int) -> None:
        """Give the cache another number of blocks, all empty. Raises OptionError where they are too few or too many."""
        least = 1 + len(self.windows)
        if num_blocks < least:
            raise OptionError(f"a cache of {num_blocks} blocks holds no request", hint=f"at least {least} blocks")
        self.num_blocks = num_blocks
        self.graphs = None  # which hold the cache of before
        for spec in (spec for shared in self._shared for spec in shared):
            self.state.pop(spec.name, None)
        asked = f"a cache of {num_blocks} blocks of {size_text(self.block_bytes)}"
        hint = "a smaller --num-blocks or --cache-memory (num_blocks, cache_memory in Python)"
        with room(self.device, num_blocks * self.block_bytes, asked, hint):
            for spec, *others in self._shared:
                shape = (num_blocks * self.block_size, *spec.share(self.mesh).shape[1:])
                self.state[spec.name] = torch.zeros(shape, dtype=spec.dtype, device=self.device)
                self.state.update((other.name, self.state[spec.name]) for other in others)
        self.graphs = self.graphs_of(CudaCapture()) if self._captures else None

    def release(self) -> None:
        """Drop the graphs; steps may still be run."""
        self.graphs = None
        gc.collect()

    def graphs_of(self, capture: Capture, buckets: Sequence[Bucket] | None = None) -> StepGraphs:
        """Graphs for these buckets, or those of the package's plan. Of those that hold more than a step may have, the
        smallest are still taken, and the others never captured."""
        if buckets is None:
            listed = self.package.manifest.get("graph_plan", {}).get("buckets", [])
            buckets = [Bucket(*b) for b in listed]
        width, groups = -(-self.max_length // self.block_size), len(self.windows)
        sizes, more = (most_rows(self.max_requests), width, self.block_size), (groups, self._batch_invariant)
        return StepGraphs(self._call, self._sample, buckets, *sizes, self.device, capture, *more)

    def _blocks_that_fit(self, block_bytes: int) -> int:
        """As many as memory and the package's budget allow, and no more than all requests of a step can use. Raises
        OptionError where there is no room for any beside what a step needs."""
        # One token of each request at a time, and beyond that what a step brings.
        wanted = 1 + self.max_requests * most_blocks(self.windows, self.block_size, self.max_length, 1)
        wanted += sum(w is not None for w in self.windows) * -(-self.max_tokens // self.block_size)
        plan = self.package.manifest.get("graph_plan", {})
        if plan.get("budget"):
            wanted = min(wanted, plan["memory"]["blocks"])
        there, beside = free_bytes(self.device), self._beside_the_cache(plan.get("memory", {}))
        left = int(MEMORY_PART * (there - beside))
        if self.device.type != "cuda":
            left = min(left, CPU_CACHE)
        least = 1 + len(self.windows)
        if left < least * block_bytes:
            raise OptionError(
                f"{size_text(there)} are free beside the weights: steps and their graphs need {size_text(beside)}, and "
                f"the cache {size_text(least * block_bytes)} at least",
                hint="fewer --step-tokens, ranks of tp, a package of a smaller --max-length, or --num-blocks",
            )
        return min(wanted, left // block_bytes)

    def _beside_the_cache(self, planned: Mapping[str, int]) -> int:
        """Bytes of the largest step, of logits and of graphs, by the package's plan, which is of MAX_TOKENS a step."""
        graphs = planned.get("pool", 0) + planned.get("graph", 0) * planned.get("graphs", 0)
        steps = planned.get("steps", 0) * self.max_tokens // MAX_TOKENS
        return steps + planned.get("logits", 0) + graphs * self._captures

    @property
    def launches(self) -> Mapping[str, int]:
        """Steps by how they were launched: as `graph`, or why not."""
        return {"there are no graphs": self._steps} if self.graphs is None else self.graphs.launches

    @torch.no_grad()
    def run(self, batch: Batch, sampling: Sampling) -> Pending:
        """Start a step. Tokens may be `unknown` where the one before has sampled them."""
        self._steps += 1
        if self.device.index is not None:
            torch.cuda.set_device(self.device)  # of this thread, which may not be the one that made the stepper
        results = None if self.graphs is None else self.graphs.run(batch, sampling)
        if results is None:
            results = self._op_by_op(batch, sampling)
            if self.graphs is not None and results:
                self.graphs.remember(results[0])
        if not results:
            return Done(_nothing(sampling))
        self._last = results[0]
        return _Results(results, sampling.alternatives) if self.asynchronous else Done(_sampled(results, sampling))

    def _op_by_op(self, batch: Batch, sampling: Sampling) -> Sequence[Tensor]:
        """The results of a step without a graph; none where no row is wanted."""
        inputs = {name: self._on_device(array) for name, array in batch.inputs().items()}
        inputs["tokens"] = self._known(inputs["tokens"])
        if not len(batch.rows):  # the logits of one token cost little, and nobody reads them
            inputs["rows"] = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._call("step", *inputs.values())
            return ()
        (logits,) = self._call("step", *inputs.values())
        return self._sample(logits, sampling)

    def _call(self, entry: str, *inputs: Tensor) -> Sequence[Tensor]:
        if entry in (Sampler.DRAW, Sampler.CUT) and entry not in self.package.entries:
            return self._call(Sampler.SAMPLE, *inputs_of_sample(Sampler(entry), inputs))[:2]
        with fixed_shapes(self._batch_invariant):
            return list(self.package.call(entry, self.state, *inputs).values())

    def _prove_invariant(self) -> None:
        """Run all entries, on a token and rows of no request, so that ops whose results depend on the batch are refused
        at start-up. Raises OptionError, PackageError."""
        check_place(self.package.manifest, self.device, self.mesh)
        groups, width = len(self.windows), -(-self.max_length // self.block_size)
        zero, none = np.zeros(1, np.int64), np.zeros((1, width), np.int32)
        bounds, one = np.array([0, 1], np.int32), np.ones(1, np.int32)
        batch = Batch(zero, zero, (zero,) * groups, bounds, one, (none,) * groups, zero, (0,))
        inputs = [self._on_device(array) for array in batch.inputs().values()]
        runs: dict[str, Callable[[], Any]] = {"step": partial(self._call, "step", *inputs)}
        logits = torch.zeros(1, self.vocab_size, device=self.device)
        for entry, row in rows_of_each_kind(self.vocab_size).items():
            runs[entry] = partial(self._sample, logits, row)
        with torch.no_grad():
            check_entries(runs)

    def _sample(self, logits: Tensor, sampling: Sampling) -> Sequence[Tensor]:
        return sampled(self._call, logits, sampling, self._on_device, self._known, self._batch_invariant)

    def _known(self, tokens: Tensor) -> Tensor:
        """The tokens, with what the step before sampled in the places of unknown ones."""
        return tokens if self._last is None else known(tokens, self._last)

    def _on_device(self, array: Any) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


class _Results:
    """What a step will have given: copies on the way to the host."""

    def __init__(self, results: Sequence[Tensor], alternatives: int) -> None:
        self._copies = [result.to("cpu", non_blocking=True) for result in results]
        self._alternatives = alternatives
        self._ready = torch.cuda.Event()
        self._ready.record()

    def get(self) -> Sampled:
        """Wait for them."""
        self._ready.synchronize()
        return _arrays(self._copies, self._alternatives)


def _sampled(results: Sequence[Tensor], sampling: Sampling) -> Sampled:
    return _arrays(results, sampling.alternatives)


def _arrays(results: Sequence[Tensor], alternatives: int) -> Sampled:
    tokens, logprobs, *tops = (result.numpy() for result in results)
    if not tops:
        tops = [np.zeros((len(tokens), 0), np.int64), np.zeros((len(tokens), 0), np.float32)]
    return Sampled(tokens, logprobs, tops[0][:, :alternatives], tops[1][:, :alternatives])


def _nothing(sampling: Sampling) -> Sampled:
    none = np.zeros(0, np.int64)
    empty = np.zeros((0, sampling.alternatives))
    return Sampled(none, none.astype(np.float32), empty.astype(np.int64), empty.astype(np.float32))


def load_serving(path: Path | str, device: torch.device, strict: bool = False, jit: bool = False) -> Package:
    """The package at `path`. Raises OptionError for one that is not for serving, or whose mesh no server has, and
    PackageError for a damaged one."""
    loaded = load_package(path, device, strict=strict, jit=jit, cuda_graphs=False, sizes={BLOCKS: 1})
    check_kind(loaded.path, loaded.manifest["kind"])
    if "step" not in loaded.entries:
        what, hint = "the package cannot be served: it has no entry 'step'", "mgraph compile MODEL --for serve"
        raise PackageError(what, where=str(loaded.path), hint=hint)
    others = [axis for axis in shared_axes(loaded.manifest) if axis != "tp"]
    if others:
        problem = f"{loaded.path} is for a mesh with the axis {others[0]}, and ranks share what is served over tp"
        raise OptionError(problem, hint="compile it with --mesh tp=N, and start a server for each copy of the model")
    return loaded


def shared_caches(caches: Sequence[StateSpec], groups: Sequence[Sequence[str]]) -> list[list[StateSpec]]:
    """The caches that lie in the same memory: a block is of one group of layers at a time, so the first of each group
    do, then the second ones, among those of the same shape and dtype. `groups` are their names."""
    by_name = {spec.name: spec for spec in caches}
    found: dict[tuple[Any, ...], list[StateSpec]] = {}
    for names in groups:
        counts: Counter[tuple[Any, ...]] = Counter()
        for spec in map(by_name.__getitem__, names):
            kind = spec.dtype, spec.shape
            found.setdefault((*kind, counts[kind]), []).append(spec)
            counts[kind] += 1
    return list(found.values())


def shared_axes(manifest: Mapping[str, Any]) -> list[str]:
    """The axes of a package's mesh that need several processes."""
    return [axis for axis, size in manifest["mesh"].items() if isinstance(size, int) and size > 1]


def _parameters(package: Package, weights: Path | str | None, seed: int, device: torch.device, mesh: Mesh) -> State:
    """This rank's shares of all state but the cache: drawn anew, or read from files of weights or a training run's
    newest checkpoint."""
    specs = [spec for spec in package.state_specs if spec.kind != "cache"]
    read = () if weights is None else tuple(s for s in specs if s.kind in ("param", "buffer") and s.persist)
    needed = sum(math.prod(spec.share(mesh).shape) * spec.dtype.itemsize for spec in specs)

    def create() -> State:
        with room(device, needed, "the weights", "a package of less, as by --precision or --mesh tp=N"):
            return create_state(specs, seed, device, {spec.name for spec in read}, mesh)

    state = mesh.together(create)
    if weights is None:
        return state
    path = Path(weights)
    found = mesh.together(lambda: run_checkpoint(path))
    if found is not None:
        checkpoint.load_parameters(found, state, read, mesh)
    else:
        mesh.together(lambda: load_weights(path, state, specs, package.weight_layout, mesh=mesh))
    mesh.together(lambda: _check_numbers(path, {s.name: state[s.name] for s in read if s.kind == "param"}))
    return state


def _check_numbers(path: Path, parameters: State) -> None:
    """Raises CheckpointError where a parameter has what is no number: nothing would be served but the first token."""
    found = [(name, t.aminmax().max.isnan()) for name, t in parameters.items() if t.is_floating_point() and t.numel()]
    if found and bool(torch.stack([wrong for _, wrong in found]).any()):
        names = [name for name, wrong in found if bool(wrong)]
        hint = "the file is damaged, or the run that wrote it had diverged: give other weights"
        raise CheckpointError(f"no numbers (NaN) are in {some_of(names)}", str(path), hint)


def run_checkpoint(path: Path) -> checkpoint.Checkpoint | None:
    """The newest checkpoint of a training run's directory, if it is one."""
    if not path.is_dir():
        return None
    return checkpoint.latest(path / "checkpoints") or checkpoint.latest(path)
