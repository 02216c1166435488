"""Launches GPU kernels: binaries through cuda-python's driver bindings, or Triton's JIT on their source."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from mgraph.errors import MgraphError, PackageError
from mgraph.manifest_form import ARCH

ALIGNMENT = 16
"""Bytes, and for strides elements, that the aligned variant of a binary counts on."""

EARLY = 12030
"""The first driver whose graphs take launches that come while others end, CUDA 12.3."""

Shape = tuple[int, ...]


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether a binary for `arch` runs on a GPU of this capability.

    `sm_90a` holds instructions of exactly that GPU; `sm_80` also runs on later minor versions of the same major one.
    """
    match = ARCH.fullmatch(arch)
    assert match is not None, f"unknown architecture {arch} in the manifest"
    major, minor = int(match[1]), int(match[2])
    return capability == (major, minor) if match[3] else capability[0] == major and capability[1] >= minor


class Device(Protocol):
    """What launching needs of a device; tests put a recording one in place of CUDA."""

    torch_device: torch.device
    capability: tuple[int, int]
    cuda: int
    multiprocessors: int

    def load(self, cubin: bytes, symbol: str, shared: int) -> Any:
        """Load a binary; the handle of its kernel `symbol`, prepared for `shared` bytes of shared memory."""

    def room(self, kernel: Any, threads: int, shared: int) -> int:
        """How many programs of a kernel a multiprocessor has room for at once."""

    def launch(self, kernel: Any, grid: Shape, threads: int, shared: int, parameters: int, early: bool) -> None:
        """Launch on torch's current stream; `parameters` is the address of an array of pointers to the arguments. What
        waits for all launches before it may come `early`, while these end: in a graph it does."""


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
        version = self._checked(driver.cuDriverGetVersion())
        self.cuda, self._knows_early = version // 1000, version >= EARLY
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

    def room(self, kernel: Any, threads: int, shared: int) -> int:
        """See `Device.room`."""
        with torch.cuda.device(self._index):
            found = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel, threads, shared)
        return int(self._checked(found))

    def launch(self, kernel: Any, grid: Shape, threads: int, shared: int, parameters: int, early: bool) -> None:
        """See `Device.launch`."""
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                self.launch(kernel, grid, threads, shared, parameters, early)
            return
        if early and self._knows_early and torch.cuda.is_current_stream_capturing():
            self._capture_early(kernel, grid, threads, shared, parameters)
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

    def _capture_early(self, kernel: Any, grid: Shape, threads: int, shared: int, parameters: int) -> None:
        """Add a kernel to the graph that is captured, which comes while the one before it in the stream ends."""
        driver = self._driver
        attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, driver.CUstream(self._current_stream(self._index))
        config.attrs, config.numAttrs = [attribute], 1
        self._checked(driver.cuLaunchKernelEx(config, kernel, parameters, 0))


class Launcher(Protocol):
    """One GPU launch of a site."""

    def launch(self, tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int], grid: Shape, aligned: bool) -> None:
        """Launch with the tensors, dims and strides that its arguments name; `aligned`: they start on 16 bytes, and
        the strides are multiples of 16 elements."""


class RefusedBinary(PackageError):
    """A binary that the driver does not take."""


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
        self._room = {
            alignment: device.room(kernel, binary["threads"], binary["shared"])
            for alignment, (kernel, binary) in loaded.items()
            if launch.get("spread")
        }
        wanted = ALIGNMENT if launch.get("takes") == "aligned" else 1
        assert wanted in loaded, f"launch {launch['function']} has no binary for tensors on {wanted} bytes"
        self._generic = loaded[wanted]
        self._aligned = loaded.get(ALIGNMENT, self._generic)
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
        try:
            return self._device.load(path.read_bytes(), binary["symbol"], binary["shared"])
        except PackageError as error:
            raise RefusedBinary(f"{binary['file']} cannot be loaded: {error.message}") from error

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
            early = binary.get("early", False) and not (self._room and self._is_crowding(binary["alignment"], grid))
            self._device.launch(kernel, grid, binary["threads"], binary["shared"], self._address, early)

    def _is_crowding(self, alignment: int, grid: Shape) -> bool:
        """Whether programs that are to be spread are more than the multiprocessors, and all have room at once: those
        that are free first would take the share of the others."""
        multiprocessors = self._device.multiprocessors
        return multiprocessors < math.prod(grid) < multiprocessors * self._room[alignment]


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory that Triton takes for a launch, as descriptors that a kernel makes need."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


class JitLauncher:
    """Lets Triton compile a function of `kernels.py` at its first launch; it specialises by alignment itself."""

    def __init__(self, launch: Mapping[str, Any], module: ModuleType) -> None:
        self._function = getattr(module, launch["function"])
        self._args: list[str] = launch["args"]
        self._options = {"num_warps": launch["num_warps"], "num_stages": launch["num_stages"]}
        if launch.get("most_registers"):
            self._options["maxnreg"] = launch["most_registers"]

    def launch(self, tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int], grid: Shape, aligned: bool) -> None:
        """See `Launcher.launch`."""
        import triton

        triton.set_allocator(_scratch)  # which is of the thread
        values = [tensors[name] if name in tensors else dims[name] for name in self._args]
        self._function[grid](*values, **self._options)
