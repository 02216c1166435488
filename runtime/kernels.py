"""Binds a package's kernel sites, once at load, to what runs them on the chosen device, and launches them.

    K = kernels(__file__)                        # in step.py
    y, rstd = K.rms_norm_fwd_0(x, weight)

On the CPU a site is its torch twin from `reference.py`. On CUDA each site takes the first that fits: its cubins,
launched through cuda-python; Triton's JIT on `kernels.py`, only if asked for; the twin, with one warning for the whole
package, or an error under strict. A cubin fits if it was built for this GPU's architecture and the driver is new
enough; what depends on the call (dtypes, shapes) is checked per call. Tensors that are not contiguous are copied, and
this is said once.

The manifest's `kernels` list, which is all this module knows of a kernel, is described where it is written, in the code
generator. Nothing of the compiler is imported here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from mgraph.errors import MgraphError, PackageError

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
}

ALIGNMENT_MASK = 15
"""Address bits that are zero on a 16-byte boundary, the only alignment binaries ask for."""

MOST_PLANS = 4096
"""Launch plans kept per site, one per combination of input shapes; then all are dropped and made anew."""

LARGEST_INDEX = 2**31 - 1
"""Rows, grids and named extents are passed as 32-bit integers."""

Site = Callable[..., tuple[torch.Tensor, ...]]
Shape = tuple[int, ...]


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
        if refusal is None:
            launchers: list[Launcher] = [CubinLauncher(launch, directory, device) for launch in entry["launches"]]
            sites[name], providers[name] = GpuSite(entry, twin, device, launchers, strict), "cubin"
        elif jit and entry["launches"]:
            module = _import_file(directory / "kernels.py")
            launchers = [JitLauncher(launch, module) for launch in entry["launches"]]
            sites[name], providers[name] = GpuSite(entry, twin, device, launchers, strict), "jit"
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


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether a binary for `arch` runs on a GPU of this capability.

    `sm_90a` holds instructions of exactly that GPU; `sm_80` also runs on later minor versions of the same major one.
    """
    match = re.fullmatch(r"sm_(\d+)(\d)(a?)", arch)
    assert match is not None, f"unknown architecture {arch} in the manifest"
    major, minor = int(match[1]), int(match[2])
    return capability == (major, minor) if match[3] else capability[0] == major and capability[1] >= minor


def evaluate(expression: Any, dims: Mapping[str, int]) -> int:
    """The value of an extent: an integer, a name of `dims`, or `[operator, left, right]`."""
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return dims[expression]
    operator, left, right = expression[0], evaluate(expression[1], dims), evaluate(expression[2], dims)
    if operator == "mul":
        return left * right
    if operator == "cdiv":
        return -(-left // right)
    assert operator in ("min", "max"), f"unknown operator {operator} in the manifest"
    return min(left, right) if operator == "min" else max(left, right)


class Device(Protocol):
    """What launching needs of a device; tests put a recording one in place of CUDA."""

    torch_device: torch.device
    capability: tuple[int, int]
    cuda: int
    multiprocessors: int

    def load(self, cubin: bytes, symbol: str, shared: int) -> Any:
        """Load a binary; the handle of its kernel `symbol`, prepared for `shared` bytes of shared memory."""

    def launch(self, kernel: Any, grid: Shape, threads: int, shared: int, parameters: int) -> None:
        """Launch on torch's current stream; `parameters` is the address of an array of pointers to the arguments."""


class CudaDevice:
    """A CUDA device through cuda-python's driver bindings, which share torch's (primary) context."""

    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.bindings import driver
        except ImportError:
            raise MgraphError(
                "running GPU kernels needs cuda-python, which is not installed", hint="pip install 'mgraph[gpu]'"
            ) from None
        self._driver: Any = driver
        self.torch_device = device
        self._index = device.index
        torch.zeros(1, device=device)  # Makes torch create the context that binaries are loaded into.
        properties = torch.cuda.get_device_properties(device)
        self.capability = (properties.major, properties.minor)
        self.multiprocessors = properties.multi_processor_count
        self.cuda = self._checked(driver.cuDriverGetVersion()) // 1000
        self._current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._success = driver.CUresult.CUDA_SUCCESS
        self._streams: dict[int, Any] = {}

    def _checked(self, answer: tuple[Any, ...]) -> Any:
        """The value in a driver answer `(code, value)`; PackageError for any code but success."""
        code, *values = answer
        if int(code) != 0:
            raise PackageError(f"the CUDA driver says {code.name} for a kernel of this package")
        return values[0] if values else None

    def load(self, cubin: bytes, symbol: str, shared: int) -> Any:
        """See `Device.load`."""
        driver = self._driver
        with torch.cuda.device(self._index):
            library = self._checked(driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0))
            kernel = self._checked(driver.cuLibraryGetKernel(library, symbol.encode()))
            # Loads the code now: the driver would otherwise load it at the first launch, which may be under capture.
            function = self._checked(driver.cuKernelGetFunction(kernel))
            if shared > 48 * 1024:  # More than every GPU has must be asked for.
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._checked(driver.cuFuncSetAttribute(function, attribute, shared))
        return function

    def launch(self, kernel: Any, grid: Shape, threads: int, shared: int, parameters: int) -> None:
        """See `Device.launch`."""
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                self.launch(kernel, grid, threads, shared, parameters)
            return
        handle = self._current_stream(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = self._driver.CUstream(handle)
        launch = self._driver.cuLaunchKernel
        code = launch(kernel, *grid, threads, 1, 1, shared, stream, parameters, 0)[0]
        if code == self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            # A thread in which torch has not touched the device yet.
            context = self._checked(self._driver.cuDevicePrimaryCtxRetain(self._index))
            self._checked(self._driver.cuCtxSetCurrent(context))
            code = launch(kernel, *grid, threads, 1, 1, shared, stream, parameters, 0)[0]
        if code != self._success:
            self._checked((code,))


class Launcher(Protocol):
    """One GPU launch of a site."""

    def launch(self, tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int], grid: Shape, aligned: bool) -> None:
        """Launch with the tensors and dims its arguments name; `aligned`: all tensors start on a 16-byte boundary."""


class CubinLauncher:
    """Launches binaries: the first that fits the tensors' alignment. Arguments go into one array made at load."""

    def __init__(self, launch: Mapping[str, Any], directory: Path, device: Device) -> None:
        self._device = device
        fitting = [
            binary
            for binary in launch["binaries"]
            if runs_on(binary["arch"], device.capability) and binary["cuda"] <= device.cuda
        ]
        loaded = {binary["alignment"]: (self._load(directory, binary), binary) for binary in fitting}
        assert 1 in loaded, f"launch {launch['function']} has no generic binary"
        self._generic = loaded[1]
        self._aligned = loaded.get(ALIGNMENT_MASK + 1, self._generic)
        self._args: list[str] = launch["args"]
        num_slots = len(self._args) + max(len(binary["hidden"]) for binary in fitting)
        # Every argument is a pointer or a 32-bit integer, and either fits a slot of 8 bytes (little endian).
        self._slots = (ctypes.c_uint64 * num_slots)()
        start = ctypes.addressof(self._slots)
        self._parameters = (ctypes.c_uint64 * num_slots)(*(start + 8 * index for index in range(num_slots)))
        self._address = ctypes.addressof(self._parameters)
        # The driver copies the arguments during the call, so the array is free again after it.
        self._lock = threading.Lock()

    def _load(self, directory: Path, binary: Mapping[str, Any]) -> Any:
        path = directory / binary["file"]
        if not path.is_file():
            raise PackageError("a kernel binary is missing", where=str(path), hint="compile the package again")
        return self._device.load(path.read_bytes(), binary["symbol"], binary["shared"])

    def launch(self, tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int], grid: Shape, aligned: bool) -> None:
        """See `Launcher.launch`."""
        kernel, binary = self._aligned if aligned else self._generic
        slots = self._slots
        # Kept until the launch is in the stream; from then on the allocator orders the reuse of their memory.
        hidden = [
            torch.empty(size * math.prod(grid), dtype=torch.uint8, device=self._device.torch_device) if size else None
            for size in binary["hidden"]
        ]
        with self._lock:
            index = 0
            for name in self._args:
                tensor = tensors.get(name)
                slots[index] = dims[name] if tensor is None else tensor.data_ptr()
                index += 1
            for scratch in hidden:
                slots[index] = 0 if scratch is None else scratch.data_ptr()
                index += 1
            self._device.launch(kernel, grid, binary["threads"], binary["shared"], self._address)


class JitLauncher:
    """Lets Triton compile a function of `kernels.py` at its first launch; it specialises by alignment itself."""

    def __init__(self, launch: Mapping[str, Any], module: ModuleType) -> None:
        self._function = getattr(module, launch["function"])
        self._args: list[str] = launch["args"]
        self._options = {"num_warps": launch["num_warps"], "num_stages": launch["num_stages"]}

    def launch(self, tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int], grid: Shape, aligned: bool) -> None:
        """See `Launcher.launch`."""
        values = [tensors[name] if name in tensors else dims[name] for name in self._args]
        self._function[grid](*values, **self._options)


@dataclass(frozen=True)
class _Plan:
    """All that follows from the shapes of a call: dims, shapes of new tensors, and the grid of each launch."""

    dims: Mapping[str, int]
    shapes: tuple[Shape, ...]
    grids: tuple[Shape, ...]


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
        self._strict = strict
        self._said: set[str] = set()
        self._inputs = [(item["name"], DTYPES[item["dtype"]]) for item in entry["inputs"]]
        self._created = [(item["name"], DTYPES[item["dtype"]]) for item in (*entry["outputs"], *entry["scratch"])]
        self._num_outputs = len(entry["outputs"])
        self._plans: dict[tuple[torch.Size, ...], _Plan | str] = {}

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the site on `inputs`, in the order of the manifest; the outputs as a tuple."""
        tensors: dict[str, torch.Tensor] = {}
        bits = 0
        for (name, dtype), tensor in zip(self._inputs, inputs, strict=True):
            if tensor.dtype is not dtype or tensor.device != self._device.torch_device:
                return self._refused(f"{name} is {tensor.dtype} on {tensor.device}, not {dtype}", inputs)
            if not tensor.is_contiguous():
                self._say(f"{name} is not contiguous and is copied")
                tensor = tensor.contiguous()
            tensors[name] = tensor
            bits |= tensor.data_ptr()
        key = tuple([tensor.shape for tensor in inputs])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._plan(key)
        if isinstance(plan, str):
            return self._refused(plan, inputs)
        if plan.dims["rows"] == 0:
            return self._twin(*inputs)  # A grid has at least one block; torch knows what nothing adds up to.
        device = self._device.torch_device
        for (name, dtype), shape in zip(self._created, plan.shapes, strict=True):
            tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        aligned = bits & ALIGNMENT_MASK == 0  # New tensors always are.
        for launcher, grid in zip(self._launchers, plan.grids, strict=True):
            launcher.launch(tensors, plan.dims, grid, aligned)
        return tuple([tensors[name] for name, _ in self._created[: self._num_outputs]])

    def _plan(self, shapes: Sequence[Shape]) -> _Plan | str:
        """The plan for input shapes, or why the kernel does not take them."""
        leading: Shape | None = None
        dims = {"sms": self._device.multiprocessors}
        for item, shape in zip(self._entry["inputs"], shapes, strict=True):
            wanted = item["shape"]
            free = wanted[:1] == ["*"]
            fixed = tuple(evaluate(extent, dims) for extent in wanted[free:])
            split = len(shape) - len(fixed)
            if split < 0 or (split > 0 and not free) or tuple(shape[split:]) != fixed:
                return f"{item['name']} has shape {list(shape)}, not {wanted}"
            if free:
                here = tuple(shape[:split])
                if leading is not None and here != leading:
                    return f"the leading dims of {item['name']} are {list(here)}, those before it {list(leading)}"
                leading = here
        dims["rows"] = math.prod(leading or ())
        for name, expression in self._entry["dims"].items():
            dims[name] = evaluate(expression, dims)

        def created(shape: Sequence[Any]) -> Shape:
            free = shape[:1] == ["*"]
            return (*(leading or ()) * free, *(evaluate(extent, dims) for extent in shape[free:]))

        grids = []
        for launch in self._entry["launches"]:
            grid = tuple(evaluate(extent, dims) for extent in launch["grid"])
            grids.append((*grid, 1, 1)[:3])
        if max(dims.values()) > LARGEST_INDEX:
            return f"{dims['rows']} rows are more than a 32-bit integer counts"
        new = (*self._entry["outputs"], *self._entry["scratch"])
        return _Plan(dims, tuple(created(item["shape"]) for item in new), tuple(grids))

    def _refused(self, reason: str, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
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
