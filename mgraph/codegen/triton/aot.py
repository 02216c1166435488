"""Ahead-of-time compilation: Triton source text → cubins with their launch ABI, on a machine that needs no GPU.

Each launch is compiled per architecture in up to two variants: `aligned`, which assumes that all tensors start on a
16-byte boundary, with strides that are multiples of 16 elements, and so moves 16 bytes per access, emitted where the
launch says that all rows keep that boundary; and the generic one, which assumes nothing. The runtime takes the first
that fits the tensors it is given.

An entry of the manifest's `kernels` list, as `build_kernels` returns it:

    name      site name; also the name of the twin in reference.py
    inputs, outputs, scratch    tensors: {name, dtype, shape, strided, like, alias, many}, as in `kernel.py`, and of
              those that lie beside another: beside
    dims      named extents, in order of evaluation
    lists     of a kernel over lists of tensors: {chunk, numbers}
    launches  in order; each {function, args, grid, num_warps, num_stages, most_registers, spread, binaries}, each
              binary; those that some calls leave out have `when`, or `takes`: `aligned`, `others`; those that can
              be made for some rows `by_row`: by tensor its elements for each
        file, symbol          cubin path inside the package, name of the kernel in it
        arch, cuda            `sm_90a`; least CUDA major version of the driver
        alignment             bytes on which every tensor must start
        threads, shared       per block: number of threads, bytes of shared memory
        early                 whether it may come while what was launched before it ends (`early.py`)
        hidden                bytes per program of each further pointer argument Triton appends; 0: pass a null pointer
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from mgraph.codegen.triton.early import HELPER, can_come_early, comes_early, coming_early
from mgraph.codegen.triton.kernel import FLAT, KernelSpec, Launch, kernels_text, reference_text
from mgraph.codegen.triton.triton_cache import PtxAbi, compile_whole
from mgraph.errors import MgraphError, OptionError

ALIGNMENT = 16
WARP_THREADS = 32
ROOMY = re.compile(r"sm_(90|100)a?")
"""Architectures whose blocks may have 227 KB of shared memory; others have 99 KB or more."""
_SHARED = {"sm_80": 163 * 1024, "sm_120": 99 * 1024, "sm_120a": 99 * 1024}
ARCH_PATTERN = re.compile(r"sm_(\d+)(a?)")


@dataclass(frozen=True)
class Binary:
    """One compiled kernel and what its caller must know (fields as in the manifest, see the module docstring)."""

    cubin: bytes
    symbol: str
    arch: str
    cuda: int
    alignment: int
    threads: int
    shared: int
    hidden: tuple[int, ...]
    early: bool = False

    def to_data(self, file: str) -> dict[str, Any]:
        """The manifest's entry of this binary, stored at `file`."""
        return {
            "file": file,
            "symbol": self.symbol,
            "arch": self.arch,
            "cuda": self.cuda,
            "alignment": self.alignment,
            "threads": self.threads,
            "shared": self.shared,
            "hidden": list(self.hidden),
            "early": self.early,
        }


Binaries = dict[str, Binary]
"""Compiled launches by what they are compiled from: a launch that is here is not compiled again."""


@dataclass(frozen=True)
class _Job:
    """One binary to compile: a launch of a kernel site for an architecture, as the aligned variant or the other."""

    spec: KernelSpec
    launch: Launch
    arch: str
    aligned: bool

    @property
    def key(self) -> str:
        """What the binary depends on."""
        types = self.spec.argument_types(self.launch)
        return repr((self.spec.source, self.launch, types, self.arch, self.aligned))

    @property
    def file(self) -> str:
        """Where the package has it."""
        return f"cubin/{self.launch.function}{'.aligned' if self.aligned else ''}.{self.arch}.cubin"


def most_shared(arch: str) -> int:
    """Bytes of shared memory that a block may have (CUDA C++ Programming Guide, compute capabilities)."""
    return _SHARED.get(arch, 227 * 1024)


def build_kernels(
    specs: Sequence[KernelSpec],
    directory: Path,
    archs: Sequence[str],
    made: Binaries | None = None,
    pool: Executor | None = None,
) -> list[dict[str, Any]]:
    """Write `kernels.py`, `reference.py` and `cubin/` into a package directory; return the manifest's `kernels` list.

    `archs` names GPU architectures such as `sm_90a`; with none, Triton is not needed and no cubin is written. `made`
    has binaries from before, and gets those that this adds; what it has not is compiled by the processes of `pool`, or
    here. Raises MgraphError where Triton is missing or rejects the
    source, OptionError for an unknown architecture.
    """
    made = {} if made is None else made
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names), f"two kernels of one name: {sorted(names)}"
    (directory / "reference.py").write_text(reference_text(specs), encoding="utf-8")
    if not all(ROOMY.fullmatch(arch) for arch in archs):
        specs = [without_large(spec) for spec in specs]
    if can_come_early(archs):
        specs = [coming_early(spec) for spec in specs]
    source = directory / "kernels.py"
    text = kernels_text(specs, HELPER if any(map(comes_early, specs)) else "")
    source.write_text(text, encoding="utf-8")
    missing = {job.key: job for spec in specs for launch in spec.launches for job in _jobs(spec, launch, archs)}
    missing = {key: job for key, job in missing.items() if key not in made}
    compiled = (map if pool is None else pool.map)(partial(_compile, source, text), missing.values())
    for key, binary in zip(missing, compiled, strict=True):
        made[key] = binary
    return [_entry(spec, directory, archs, made) for spec in specs]


def without_large(spec: KernelSpec) -> KernelSpec:
    """The site without the ways, and the forms of loops, that not every GPU has the shared memory for."""
    none = {str(launch.when): 0 for launch in spec.launches if launch.large}
    launches = tuple(launch for launch in spec.launches if not launch.large)
    return replace(spec, source=spec.source.replace(FLAT, ""), launches=launches, dims={**spec.dims, **none})


def _jobs(spec: KernelSpec, launch: Launch, archs: Sequence[str]) -> list[_Job]:
    """All binaries of a launch, in the order in which the runtime tries them."""
    return [_Job(spec, launch, arch, aligned) for arch in archs for aligned in variants(launch)]


def _compile(source: Path, text: str, job: _Job) -> Binary:
    return compile_launch(_imported(source, text), job.spec, job.launch, job.arch, job.aligned)


@lru_cache(maxsize=1)
def _imported(source: Path, text: str) -> ModuleType:
    """The module of a `kernels.py` with this text, read once by each process that compiles."""
    return import_kernels(source)


def import_kernels(path: Path) -> ModuleType:
    """Import a `kernels.py` by its path, without a trace in `sys.modules`.

    Triton reads the functions' source from the file, so the text must exist as a file. Then the functions are said to
    be of a file of this name alone, and those of Triton's own language of files of Triton: line information in binaries
    would have the directories that they were built in and Triton is in. Its lines are those of the text that a launch
    was compiled from first, which may be a part of the package's.
    """
    try:
        import triton
    except ImportError:
        raise MgraphError(
            "compiling GPU kernels needs triton, which is not installed",
            hint="pip install 'mgraph[gpu]', or compile for the CPU only",
        ) from None
    if triton.knobs.runtime.interpret:
        raise OptionError("TRITON_INTERPRET is set: the interpreter makes no binaries", hint="unset TRITON_INTERPRET")
    spec = importlib.util.spec_from_file_location("mgraph_kernels_being_compiled", path)
    assert spec is not None and spec.loader is not None, f"{path} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    root = Path(triton.__file__).parent.parent
    for one in (module, *(m for name, m in sys.modules.items() if name.startswith("triton.language"))):
        for function in vars(one).values():
            if isinstance(function, triton.JITFunction):
                code, file = function.fn.__code__, Path(function.fn.__code__.co_filename)
                place = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name
                function.fn.__code__ = code if not file.is_absolute() else code.replace(co_filename=place)
    return module


def compile_launch(module: ModuleType, spec: KernelSpec, launch: Launch, arch: str, aligned: bool) -> Binary:
    """Compile one launch for one architecture; `aligned` promises that every tensor starts on a 16-byte boundary, and
    that its strides are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    match = ARCH_PATTERN.fullmatch(arch)
    if match is None:
        raise OptionError(f"unknown GPU architecture {arch!r}", where="--arch", hint="one such as sm_80 or sm_90a")
    types = spec.argument_types(launch)
    even = [index for index, (n, kind) in enumerate(types.items()) if spec.is_even(n, kind)]
    hints = {(index,): [["tt.divisibility", ALIGNMENT]] for index in even} if aligned else {}
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "maxnreg": launch.most_registers or None,
    }
    source = ASTSource(getattr(module, launch.function), types, {}, hints)
    target = GPUTarget("cuda", int(match[1]), WARP_THREADS)
    try:
        compiled, abi = compile_whole(lambda: triton.compile(source, target, options), launch.function)
    except triton.errors.TritonError as error:
        raise MgraphError(f"Triton rejects kernel {launch.function}: {error}", where=module.__file__) from error
    return _binary(compiled, abi, len(types), ALIGNMENT if aligned else 1, comes_early(spec))


def _binary(compiled: Any, abi: PtxAbi, num_arguments: int, alignment: int, early: bool) -> Binary:
    """A compiled kernel with its launch ABI: of its PTX where that says it, else of Triton's metadata."""
    metadata = compiled.metadata
    assert metadata.num_ctas == 1 and not metadata.launch_cooperative_grid, (
        "clusters and cooperative grids are not launched"
    )
    hidden = (metadata.global_scratch_size, metadata.profile_scratch_size)
    assert abi.num_parameters == num_arguments + len(hidden), (
        f"kernel {abi.symbol} takes {abi.num_parameters} parameters: {num_arguments} of its own and an unknown rest"
    )
    return Binary(
        cubin=compiled.asm["cubin"],
        symbol=abi.symbol,
        arch=abi.arch,
        cuda=abi.cuda,
        alignment=alignment,
        threads=abi.threads,
        shared=metadata.shared,
        hidden=hidden,
        early=early,
    )


def variants(launch: Launch) -> tuple[bool, ...]:
    """Whether each variant is the aligned one, in the order in which the runtime tries them."""
    return {"all": (True, False) if launch.aligned else (False,), "aligned": (True,), "others": (False,)}[launch.takes]


def _entry(spec: KernelSpec, directory: Path, archs: Sequence[str], made: Binaries) -> dict[str, Any]:
    """The manifest's entry of one kernel site, whose cubins are written on the way."""
    entry = spec.to_data()
    del entry["source"], entry["twin"]  # They stand in kernels.py and reference.py.
    if spec.lists is None:
        del entry["lists"]
    for item in (*entry["inputs"], *entry["outputs"], *entry["scratch"]):
        if not item["beside"]:
            del item["beside"]
    for launch, data in zip(spec.launches, entry["launches"], strict=True):
        del data["aligned"], data["large"]
        if data["when"] == 1:
            del data["when"]
        if data["takes"] == "all":
            del data["takes"]
        data["by_row"] = dict(launch.by_row)
        if not launch.by_row:
            del data["by_row"]
        data["binaries"] = []
        for job in _jobs(spec, launch, archs):
            (directory / "cubin").mkdir(exist_ok=True)
            (directory / job.file).write_bytes(made[job.key].cubin)
            data["binaries"].append(made[job.key].to_data(job.file))
    return entry
