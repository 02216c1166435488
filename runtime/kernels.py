"""Binds a package's kernel sites, once at load, to what runs them on the chosen device, and launches them.

    K = kernels(__file__)                        # in step.py
    y, rstd = K.rms_norm_fwd_0(x, weight)

On the CPU a site is its torch twin from `reference.py`. On CUDA each site takes the first that fits: its cubins,
launched through cuda-python; Triton's JIT on `kernels.py`, only if asked for; the twin, with one warning for the whole
package, or an error under strict. A cubin fits if it was built for this GPU's architecture and the driver is new
enough; what depends on the call (dtypes, shapes) is checked per call. Tensors that should be contiguous and are not are
copied, and this is said once.

The manifest's `kernels` list, which is all this module knows of a kernel, is described where it is written, in the code
generator. Nothing of the compiler is imported here.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mgraph.errors import MgraphError, PackageError
from mgraph.runtime import outbox
from mgraph.runtime.launch import (
    ALIGNMENT,
    CubinLauncher,
    CudaDevice,
    Device,
    JitLauncher,
    Launcher,
    RefusedBinary,
    Shape,
    runs_on,
)
from mgraph.runtime.multi_tensor import Tables, places

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "bool": torch.bool,
}

MOST_PLANS = 4096
"""Launch plans kept per site, one per combination of input shapes; then all are dropped and made anew."""

LARGEST_INDEX = 2**31 - 1
"""Rows, grids and named extents are passed as 32-bit integers."""

Results = torch.Tensor | tuple[torch.Tensor, ...]
"""What a site gives: its results, not in a tuple where there is one."""

Site = Callable[..., Results]


@dataclass
class _Choice:
    """How packages are loaded from now on; set by `set_device`."""

    device: torch.device
    strict: bool
    jit: bool


_choice = _Choice(torch.device("cpu"), strict=False, jit=False)


def set_device(device: str | torch.device, strict: bool = False, jit: bool = False) -> None:
    """Choose where the packages loaded after this call run their kernels.

    `strict` makes it an error (PackageError) when a GPU kernel cannot be used, in place of a warning; `jit` lets Triton
    compile `kernels.py` on this machine for sites without a fitting binary.
    """
    chosen = torch.device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise MgraphError(f"packages run on cpu or cuda, not on {chosen.type}")
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise MgraphError("torch sees no CUDA device", hint="--device cpu")
        chosen = torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)
    _choice.device, _choice.strict, _choice.jit = chosen, strict, jit


class Kernels:
    """One attribute per kernel site of a package; `providers` says what runs each: `cubin`, `jit` or `twin`."""

    def __init__(self, sites: Mapping[str, Site], providers: Mapping[str, str]) -> None:
        self.providers = dict(providers)
        for name, site in sites.items():
            setattr(self, name, site)

    def __getattr__(self, name: str) -> Site:
        raise AttributeError(f"this package has no kernel site {name!r}")


def kernels(step_file: str | Path) -> Kernels:
    """Bind all kernel sites of the package that `step_file` lies in, for the device chosen by `set_device`.

    Raises PackageError if the manifest, a twin or a binary is missing, and under strict if a site has no GPU kernel.
    """
    directory = Path(step_file).resolve().parent
    entries = _manifest_entries(directory)
    twins = _import_file(directory / "reference.py") if entries else None
    device: CudaDevice | None = CudaDevice(_choice.device) if _choice.device.type == "cuda" and entries else None
    return bind(entries, directory, twins, device, strict=_choice.strict, jit=_choice.jit)


def bind(
    entries: Sequence[Mapping[str, Any]],
    directory: Path,
    twins: ModuleType | None,
    device: Device | None,
    strict: bool,
    jit: bool,
) -> Kernels:
    """Choose a provider for every entry; `device` None means the CPU."""
    sites: dict[str, Site] = {}
    providers: dict[str, str] = {}
    refusals: list[str] = []
    for entry in entries:
        name = entry["name"]
        twin = getattr(twins, name, None)
        if twin is None:
            raise PackageError(f"kernel {name} has no twin", where=str(directory / "reference.py"))
        sites[name], providers[name] = twin, "twin"
        if device is None:
            continue
        refusal = refuse(entry, device.capability, device.cuda)
        launchers: list[Launcher] = []
        if refusal is None:
            try:
                launchers = [CubinLauncher(launch, directory, device) for launch in entry["launches"]]
            except RefusedBinary as error:
                refusal = error.message
        if refusal is None:
            sites[name], providers[name] = _gpu_site(entry, twin, device, launchers, strict), "cubin"
        elif jit and entry["launches"]:
            module = _jit_module(directory, device)
            launchers = [JitLauncher(launch, module) for launch in entry["launches"]]
            sites[name], providers[name] = _gpu_site(entry, twin, device, launchers, strict), "jit"
        else:
            refusals.append(f"{name}: {refusal}")
    if refusals:
        _report("torch runs these kernels:\n  " + "\n  ".join(refusals), strict, str(directory))
    return Kernels(sites, providers)


def refuse(entry: Mapping[str, Any], capability: tuple[int, int], cuda: int) -> str | None:
    """Why the binaries of a kernel do not run on a GPU, or None if they do.

    `capability` is the GPU's (major, minor), `cuda` the driver's CUDA major version.
    """
    if not entry["launches"]:
        return "has no GPU kernel for these dtypes and sizes"
    for launch in entry["launches"]:
        binaries = launch["binaries"]
        fitting = [binary for binary in binaries if runs_on(binary["arch"], capability)]
        if not fitting:
            built = ", ".join(sorted({binary["arch"] for binary in binaries})) or "no GPU"
            return f"built for {built}; this GPU is sm_{capability[0]}{capability[1]}"
        if all(binary["cuda"] > cuda for binary in fitting):
            return f"needs a driver for CUDA {min(binary['cuda'] for binary in fitting)}; this one has CUDA {cuda}"
    return None


def evaluate(expression: Any, dims: Mapping[str, int]) -> int:
    """The value of an extent: an integer, a name of `dims`, or `[operator, left, right]`."""
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return dims[expression]
    operator, left, right = expression[0], evaluate(expression[1], dims), evaluate(expression[2], dims)
    if operator == "add":
        return left + right
    if operator == "mul":
        return left * right
    if operator == "cdiv":
        return -(-left // right)
    assert operator in ("min", "max"), f"unknown operator {operator} in the manifest"
    return min(left, right) if operator == "min" else max(left, right)


def _fits(extents: Sequence[Any], shape: Shape, dims: dict[str, int]) -> bool:
    """Whether a shape is as its extents say; names not known yet are bound."""
    for extent, size in zip(extents, shape, strict=True):
        if isinstance(extent, str):
            dims.setdefault(extent, size)
        if evaluate(extent, dims) != size:
            return False
    return True


def _strides(shape: Shape, like: Shape | None) -> Shape:
    """The strides of a new tensor without gaps: contiguous, or with its dims in the order of one like another.

    Counted here: of tensors without values torch asks its symbolic shapes, whose import takes a second.
    """
    order: Sequence[int] = range(len(shape))
    if like is not None:
        order = sorted(order, key=[-stride for stride in like].__getitem__)
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _layout(item: Mapping[str, Any], arguments: Collection[str]) -> str:
    """How an input may lie: `contiguous`; `any`; or `rows`, where the kernel is not told the stride of the last dim,
    which then must be 1."""
    if not item.get("strided", False):
        return "contiguous"
    return "any" if f"{item['name']}_stride_{len(item['shape']) - 1}" in arguments else "rows"


@dataclass(frozen=True)
class _Plan:
    """All that follows from the shapes and strides of a call: dims and strides by name, shape and strides of each new
    tensor, the grid of each launch (empty: it is left out), and whether the strides are those that launches for aligned
    tensors count on."""

    dims: Mapping[str, int]
    created: tuple[tuple[Shape, Shape], ...]
    grids: tuple[Shape, ...]
    even: bool


class GpuSite:
    """A kernel site on a GPU: allocates results, launches, and falls back to the twin for calls the kernel refuses."""

    def __init__(
        self, entry: Mapping[str, Any], twin: Site, device: Device, launchers: Sequence[Launcher], strict: bool
    ) -> None:
        self._entry = entry
        self._name: str = entry["name"]
        self._twin = twin
        self._device = device
        self._launchers = launchers
        self._takes: list[str] = [launch.get("takes", "all") for launch in entry["launches"]]
        self._strict = strict
        self._said: set[str] = set()
        self._beside: dict[str, str] = {item["name"]: item["beside"] for item in entry["inputs"] if item.get("beside")}
        written = {item.get("alias") for item in entry["outputs"]}
        arguments = {name for launch in entry["launches"] for name in launch["args"]}
        self._inputs = [
            (item["name"], DTYPES[item["dtype"]], _layout(item, arguments), item["name"] in written)
            for item in entry["inputs"]
        ]
        self._new = [item for item in (*entry["outputs"], *entry["scratch"]) if not item.get("alias")]
        self._created = [(item["name"], DTYPES[item["dtype"]]) for item in self._new]
        self._results = [item.get("alias") or item["name"] for item in entry["outputs"]]
        self._plans: dict[tuple[Any, ...], _Plan | str] = {}

    def __call__(self, *inputs: torch.Tensor) -> Results:
        """Run the site on `inputs`, in the order of the manifest; the outputs as a tuple, or the only one."""
        tensors: dict[str, torch.Tensor] = {}
        bits = 0
        key: list[Any] = []
        for (name, dtype, layout, written), tensor in zip(self._inputs, inputs, strict=True):
            if tensor.dtype is not dtype or tensor.device != self._device.torch_device:
                return self._refused(f"{name} is {tensor.dtype} on {tensor.device}, not {dtype}", inputs)
            if layout != "any" and not (tensor.is_contiguous() or (layout == "rows" and tensor.stride(-1) == 1)):
                if written:
                    return self._refused(f"{name}, which is written in place, is not contiguous", inputs)
                self._say(f"{name} is not contiguous and is copied")
                tensor = tensor.contiguous()
            if layout != "contiguous":
                key.append(tensor.stride())
            key.append(tensor.shape)
            tensors[name] = tensor
            bits |= tensor.data_ptr()
        if self._beside:
            bits = self._bits(tensors)
        plan = self._plans.get(tuple(key))
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[tuple(key)] = self._plan(list(tensors.values()))
        if isinstance(plan, str):
            return self._refused(plan, inputs)
        if any(0 in grid for grid in plan.grids):
            return self._twin(*inputs)  # A grid has at least one block; torch knows what nothing adds up to.
        device = self._device.torch_device
        sent = self._results if outbox.is_meant() else ()
        for (name, dtype), (shape, strides) in zip(self._created, plan.created, strict=True):
            there = outbox.new_result(shape, dtype) if name in sent and strides == _strides(shape, None) else None
            tensors[name] = torch.empty_strided(shape, strides, dtype=dtype, device=device) if there is None else there
        aligned = plan.even and bits % ALIGNMENT == 0  # New tensors always are.
        left_out = "others" if aligned else "aligned"
        for index, (launcher, grid, takes) in enumerate(zip(self._launchers, plan.grids, self._takes, strict=True)):
            if grid and takes != left_out and not (sent and self._others_first(index, tensors, plan, aligned)):
                launcher.launch(tensors, plan.dims, grid, aligned)
        results = tuple([tensors[name] for name in self._results])
        return results if len(results) > 1 else results[0]

    def _others_first(self, index: int, tensors: Mapping[str, torch.Tensor], plan: _Plan, aligned: bool) -> bool:
        """Launch for the rows that other ranks get, and put off those of this rank until these are under way. False for
        a launch of which that is not possible."""
        launch, rows = self._entry["launches"][index], plan.dims.get("T", 0)
        by_row: Mapping[str, int] = launch.get("by_row", {})
        result = next((name for name in self._results if name in by_row), None)
        parts = outbox.parts(tensors[result], rows) if result is not None else None
        if result is None or parts is None:
            return False

        def some(begin: int, end: int, target: torch.Tensor | None = None) -> None:
            here = dict(tensors)
            for name, count in by_row.items():
                here[name] = tensors[name].view(-1)[begin * count : end * count]
            if target is not None:
                here[result] = target
            even = aligned and all(here[name].data_ptr() % ALIGNMENT == 0 for name in by_row)
            dims = {**plan.dims, "T": end - begin}
            grid = (*(evaluate(extent, dims) for extent in launch["grid"]), 1, 1)[:3]
            self._launchers[index].launch(here, dims, grid, even)

        own, others = parts
        for begin, end in others:
            some(begin, end)
        outbox.put_off(tensors[result], functools.partial(some, *own))
        return True

    def _bits(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """The bits of the places of inputs; those that lie beside another add a bit if they do not."""
        bits = 0
        for name, tensor in tensors.items():
            place = tensor.data_ptr()
            if name in self._beside:
                place = place != tensors[self._beside[name]].data_ptr() + tensor.element_size()
            bits |= place
        return bits

    def _in_turns(self, strides: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> bool:
        """Whether the strides of inputs are those of others whose columns theirs lie between."""
        for name, other in self._beside.items():
            told = zip(strides[name], strides[other], shapes[name], strict=True)
            if strides[name][-1] != 2 or any(here != there for here, there, size in told if size > 1):
                return False
        return True

    def _plan(self, inputs: Sequence[torch.Tensor]) -> _Plan | str:
        """The plan for inputs, or why the kernel does not take them."""
        leading: Shape | None = None
        dims = {"sms": self._device.multiprocessors}
        shapes: dict[str, Shape] = {}
        strides: dict[str, Shape] = {}
        for item, tensor in zip(self._entry["inputs"], inputs, strict=True):
            wanted, shape = item["shape"], tuple(tensor.shape)
            free = wanted[:1] == ["*"]
            extents = wanted[free:]
            split = len(shape) - len(extents)
            if split < 0 or (split > 0 and not free) or not _fits(extents, shape[split:], dims):
                return f"{item['name']} has shape {list(shape)}, not {wanted}"
            if free:
                here = shape[:split]
                if leading is not None and here != leading:
                    return f"the leading dims of {item['name']} are {list(here)}, those before it {list(leading)}"
                leading = here
            shapes[item["name"]], strides[item["name"]] = shape, tensor.stride()
        dims["rows"] = math.prod(leading or ())
        for name, expression in self._entry["dims"].items():
            dims[name] = evaluate(expression, dims)
        created = []
        for item in self._new:
            free = item["shape"][:1] == ["*"]
            shape = (*(leading or ()) * free, *(evaluate(extent, dims) for extent in item["shape"][free:]))
            shapes[item["name"]] = shape
            strides[item["name"]] = _strides(shape, strides.get(item.get("like", "")))
            created.append((shape, strides[item["name"]]))
        arguments = {name for launch in self._entry["launches"] for name in launch["args"]}
        # Along a dim of one nothing is gone: its stride may be any number, odd ones and huge ones among them.
        named = {
            argument: stride * (shapes[name][i] > 1)
            for name, all_ in strides.items()
            for i, stride in enumerate(all_)
            if (argument := f"{name}_stride_{i}") in arguments
        }
        grids = tuple(
            (*(evaluate(extent, dims) for extent in launch["grid"]), 1, 1)[:3]
            if evaluate(launch.get("when", 1), dims)
            else ()
            for launch in self._entry["launches"]
        )
        if max(*dims.values(), *named.values(), 0) > LARGEST_INDEX:
            return f"{max(*dims.values(), *named.values())} is more than a 32-bit integer counts"
        told = {
            name for launch in self._entry["launches"] if launch.get("takes") != "others" for name in launch["args"]
        }
        even = all(n % ALIGNMENT == 0 for name, n in named.items() if name in told) and self._in_turns(strides, shapes)
        return _Plan({**dims, **named}, tuple(created), grids, even)

    def _refused(self, reason: str, inputs: Sequence[torch.Tensor]) -> Results:
        """Run the twin for a call the kernel does not take; an error under strict."""
        if reason not in self._said:
            self._said.add(reason)
            _report(f"torch runs a call of kernel {self._name}: {reason}", self._strict, None)
        return self._twin(*inputs)

    def _say(self, message: str) -> None:
        """Warn once per message; copies are slow, not wrong, so strict allows them."""
        if message not in self._said:
            self._said.add(message)
            warnings.warn(f"kernel {self._name}: {message}", RuntimeWarning, stacklevel=4)


class ListSite(GpuSite):
    """A kernel site over lists of tensors: launches over all of their elements, by tables of where they lie.

    Launches that take those tables run once per part (see `multi_tensor.py`), those that follow once. Where a CUDA
    graph captures a call, that with the same tensors must have been made before, or torch runs it.
    """

    def __init__(
        self, entry: Mapping[str, Any], twin: Site, device: Device, launchers: Sequence[Launcher], strict: bool
    ) -> None:
        super().__init__(entry, twin, device, launchers, strict)
        self._many = [item.get("many", False) for item in entry["inputs"]]
        self._tables = Tables(entry["lists"]["chunk"], entry["lists"]["numbers"], device.torch_device)

    def __call__(self, *inputs: Any) -> Any:
        """Run the site on lists of tensors and single tensors, in the order of the manifest; the outputs as a tuple, or
        the only one."""
        lists = {name: given for (name, *_), many, given in zip(self._inputs, self._many, inputs, strict=True) if many}
        tensors = {item[0]: given for item, given in zip(self._inputs, inputs, strict=True) if item[0] not in lists}
        key = places(lists)
        parts = self._tables.known(key)
        # What a step hands a site at the same places is of the same types: lists are looked at once.
        reason = self._reason(inputs, lists=parts is None)
        if reason is not None:
            return self._refused(reason, inputs)
        parts = self._tables.make(key, lists) if parts is None else parts
        if parts is None:
            return self._refused("a CUDA graph captures tensors that it was never called with before", inputs)
        if not parts:
            return self._twin(*inputs)  # There is no element.
        aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors.values())
        dims = {"sms": self._device.multiprocessors, "blocks": sum(part.blocks for part in parts)}
        device = self._device.torch_device
        for item, (name, dtype) in zip(self._new, self._created, strict=True):
            tensors[name] = torch.empty([evaluate(n, dims) for n in item["shape"]], dtype=dtype, device=device)
        for launcher, launch in zip(self._launchers, self._entry["launches"], strict=True):
            if "unit" not in launch["args"]:
                self._launch(launcher, launch["grid"], tensors, dims, aligned)
                continue
            for part in parts:
                first = {name: listed[part.base] for name, listed in lists.items()}
                local = {**dims, "blocks": part.blocks, "before": part.before, "unit": part.unit}
                even = aligned and part.unit == ALIGNMENT
                self._launch(launcher, launch["grid"], {**tensors, **first, **part.tables}, local, even)
        results = tuple([lists[name] if name in lists else tensors[name] for name in self._results])
        return results if len(results) > 1 else results[0]

    def _reason(self, inputs: Sequence[Any], *, lists: bool) -> str | None:
        """Why the kernel does not take the inputs, its `lists` among them, or None."""
        for (name, dtype, _, _), many, given in zip(self._inputs, self._many, inputs, strict=True):
            for tensor in (given if lists else ()) if many else (given,):
                if tensor.dtype is not dtype or tensor.device != self._device.torch_device:
                    return f"{name} is {tensor.dtype} on {tensor.device}, not {dtype}"
                if not tensor.is_contiguous() and not (many and tensor.stride(-1) == 1):
                    return f"{name} has gaps in its last dim" if many else f"{name} is not contiguous"
        return None

    @staticmethod
    def _launch(
        launcher: Launcher,
        grid: Sequence[Any],
        tensors: Mapping[str, torch.Tensor],
        dims: Mapping[str, int],
        aligned: bool,
    ) -> None:
        launcher.launch(tensors, dims, (*(evaluate(extent, dims) for extent in grid), 1, 1)[:3], aligned)


def _gpu_site(
    entry: Mapping[str, Any], twin: Site, device: Device, launchers: Sequence[Launcher], strict: bool
) -> Site:
    kind = ListSite if "lists" in entry else GpuSite
    return kind(entry, twin, device, launchers, strict)


def _report(message: str, strict: bool, where: str | None) -> None:
    """A fallback to torch: a warning, or PackageError under strict."""
    if strict:
        raise PackageError(message, where=where, hint="drop --strict, or compile the package for this machine")
    warnings.warn(message if where is None else f"{where}: {message}", RuntimeWarning, stacklevel=4)


def _manifest_entries(directory: Path) -> list[Mapping[str, Any]]:
    path = directory / "manifest.json"
    try:
        entries: list[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["kernels"]
    except (OSError, ValueError, KeyError) as error:
        raise PackageError(f"the manifest cannot be read: {error}", where=str(path)) from None
    return entries


def _jit_module(directory: Path, device: Device) -> ModuleType:
    """The package's kernels, to be compiled for a device: one before sm_90 knows no launches that come early."""
    module = _import_file(directory / "kernels.py")
    if hasattr(module, "EARLY") and device.capability < (9, 0):
        vars(module)["EARLY"] = type(vars(module)["EARLY"])(False)
    return module


def _import_file(path: Path) -> ModuleType:
    """Import one file of a package by its path; `sys.modules` stays as it is, so that packages do not meet."""
    spec = importlib.util.spec_from_file_location(f"mgraph_package_{path.stem}", path)
    assert spec is not None and spec.loader is not None, f"{path} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise PackageError(f"{path.name} of the package cannot be loaded: {error}", where=str(path)) from error
    return module
