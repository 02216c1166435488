"""`mgraph tune`: measures who runs the ops of a package fastest on this GPU, and writes a profile of it.

Each op instance that several providers take is run by each, at the sizes that are given: first its results are compared
with those of torch, then it is timed. `mgraph compile --profile FILE` then chooses by these times.
"""

from __future__ import annotations

import collections
import datetime
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgraph.cli.table import table
from mgraph.codegen.profile import Profile, Row, read_profile
from mgraph.codegen.providers import TORCH, Providers
from mgraph.errors import OptionError
from mgraph.ir.graph import Module

if TYPE_CHECKING:
    import torch

    from mgraph.cli.snapshots import Compiled

Timer = Callable[[Callable[..., Any], Sequence[Sequence[Any]]], float]
"""Gives the seconds of a call of a function, which takes the sets of inputs by turns."""
MOST_ERROR = {"bf16": 2e-2, "f16": 5e-3, "f32": 1e-4, "f64": 1e-9}
"""How far a provider may be from torch, by the dtype of the first operand."""
WRONG_MICROSECONDS = 1e9
"""What a provider is said to take whose results are wrong: it is never chosen."""
_CACHE_BYTES, _CALLS, _ROUNDS = 50e6, 10, 10


def run(model: str, sizes: Mapping[str, int], precision: str, base: str, output: str) -> None:
    """Tune for a package or a model; stdout: a table, and the profile's path.

    Raises OptionError where there is no GPU, for an unknown profile or model, and where the file cannot be written.
    """
    import torch

    from mgraph.capture.source import ModelSpec, resolve
    from mgraph.recipe import Recipe

    profile = read_profile(base)
    path = Path(output)
    if path.suffix != ".json" or not path.absolute().parent.is_dir():
        raise OptionError(f"cannot write the profile {path}", "--output", "NAME.json in a directory that exists")
    if not torch.cuda.is_available():
        if _package(model) is None:  # what is wrong with it is said first
            Recipe(model=model, precision=precision)
            resolve(ModelSpec(model))
        hint = "run it on the machine with the GPU; mgraph compile --profile takes the file on any other"
        raise OptionError("mgraph tune measures on a GPU, and torch sees none", "mgraph tune", hint)
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    arch = f"sm_{capability[0]}{capability[1]}{'a' if capability[0] >= 9 else ''}"
    module, given = opened(model, sizes, precision)
    card = torch.cuda.get_device_name(device)
    if card != profile.card:  # times of another machine say nothing of this one
        profile = replace(profile, card=card, arch=arch, measured=(), rates={**profile.rates, **rates(device)})
    profile = replace(profile, name=path.stem, versions={**profile.versions, "torch": torch.__version__})
    profile, lines, left = tuned(module, profile, given, device, seconds_on_gpu)
    path.write_text(profile.text(), encoding="utf-8")
    sys.stdout.write(table(("op", "sizes", "provider", "us", "error"), lines))
    for op, reason in sorted(left.items()):
        print(f"note: {op} keeps its estimate: {reason}", file=sys.stderr)
    print(path)


def opened(model: str, sizes: Mapping[str, int], precision: str) -> tuple[Module, dict[str, int]]:
    """The final graph of a package, or of a model that is compiled without being written, and extents of B and S."""
    from mgraph.cli.memory import wanted_sizes
    from mgraph.compiler import build_module
    from mgraph.recipe import Recipe

    if (package := _package(model)) is not None:
        return package.snapshots[-1].module, wanted_sizes(package, sizes)
    recipe = Recipe(model=model, precision=precision)
    return build_module(recipe).module, {"B": sizes["B"] or recipe.batch, "S": sizes["S"] or recipe.seq}


def _package(model: str) -> Compiled | None:
    """The package whose directory is given, None for a model. Raises PackageError for a directory that is no whole
    package, and for what could only be one that is not there."""
    from mgraph.cli.snapshots import open_package

    return open_package(Path(model)) if Path(model).is_dir() or ("/" in model and ":" not in model) else None


def tuned(
    module: Module, profile: Profile, sizes: Mapping[str, int], device: torch.device, timer: Timer
) -> tuple[Profile, list[tuple[str, ...]], dict[str, str]]:
    """The profile with the times of a module's instances on a device; a line for each; why others were left out."""
    from mgraph.cli.candidates import candidates, inputs, instances, largest_error
    from mgraph.passes.activations import extents

    found, left = instances(Providers(module, profile, extents(module, sizes)))
    today, at = datetime.date.today().isoformat(), ", ".join(f"{name}={size}" for name, size in sizes.items())
    source = f"mgraph tune {module.name}, {at}"
    rows: list[Row] = []
    lines: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for candidate in candidates(found, Path(folder), profile.arch, device):
            instance, node = candidate.instance, candidate.node
            size = max(1, instance.bytes)
            sets = [inputs(node, device, seed) for seed in range(min(_CALLS, int(2 * _CACHE_BYTES / size) + 1))]
            expected = candidate.runs[TORCH](*inputs(node, device))
            for provider, call in candidate.runs.items():
                error = largest_error(call(*inputs(node, device)), expected)
                wrong = not error <= MOST_ERROR.get(instance.dtype, 0.0)
                time = WRONG_MICROSECONDS if wrong else 1e6 * timer(call, sets)
                said = f"{source}; WRONG by {error:.1e}" if wrong else source
                row = Row(**vars(instance), provider=provider, microseconds=round(time, 3), source=said)
                rows.append(replace(row, card=profile.card, date=today))
                shown = "wrong" if wrong else f"{time:.1f}"
                lines.append((instance.op, " ".join(instance.sizes[:3]), provider, shown, f"{error:.1e}"))
            del sets, expected
    return profile.with_rows(rows), lines, left


def seconds_on_gpu(call: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> float:
    """Median seconds of a call in a CUDA graph of several, as packages run; by itself where it cannot be captured. Like
    what is read, what is written lies elsewhere in each call, so that caches hold neither."""
    import torch

    for given in sets:
        call(*given)
    torch.cuda.synchronize()

    def calls() -> None:
        written = collections.deque[Any](maxlen=len(sets))
        for index in range(_CALLS):
            written.append(call(*sets[index % len(sets)]))

    graph = torch.cuda.CUDAGraph()
    replay: Callable[[], Any] = graph.replay
    try:
        with torch.cuda.graph(graph):
            calls()
    except RuntimeError as error:
        print(f"note: launched one by one: {str(error).splitlines()[0]}", file=sys.stderr)
        torch.cuda.synchronize()
        replay = calls
    taken = []
    for _ in range(_ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3 / _CALLS)
    return float(statistics.median(taken[2:]))


def rates(device: torch.device) -> dict[str, Any]:
    """What a copy and products of matrices reach on a device: `bytes_per_second`, `flops_per_second`."""
    import torch

    source = torch.randn(2**28, device=device)
    target = torch.empty_like(source)
    copied = seconds_on_gpu(lambda: torch.add(source, 1, out=target), [()])
    found: dict[str, Any] = {"bytes_per_second": 8 * source.numel() / copied}
    flops = {}
    wide = (("bf16", torch.bfloat16, 8192), ("f16", torch.float16, 8192), ("f32", torch.float32, 4096))
    for name, dtype, size in wide:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        flops[name] = 2 * size**3 / seconds_on_gpu(torch.mm, [(left, right)])
    return {**found, "flops_per_second": {**flops, "f64": flops["f32"]}}
