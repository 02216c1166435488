"""The kernel loader and launcher: providers, predicates, launch arguments; CUDA replaced by a recording device."""

from __future__ import annotations

import ctypes
import itertools
import json
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from mgraph.errors import MgraphError, PackageError
from mgraph.runtime import kernels as runtime
from mgraph.runtime.launch import runs_on

BINARIES = [
    {"file": "cubin/scale.aligned.sm_90a.cubin", "alignment": 16},
    {"file": "cubin/scale.sm_90a.cubin", "alignment": 1},
]
ABI = {"symbol": "scale", "arch": "sm_90a", "cuda": 12, "threads": 128, "shared": 64, "hidden": [0, 8]}
ENTRY: dict[str, Any] = {
    "name": "scale",
    "inputs": [
        {"name": "x", "dtype": "f32", "shape": ["*", 8]},
        {"name": "factor", "dtype": "f32", "shape": ["*", 1]},
    ],
    "outputs": [{"name": "y", "dtype": "bf16", "shape": ["*", 8]}],
    "scratch": [{"name": "room", "dtype": "f32", "shape": ["programs", 8]}],
    "dims": {"programs": ["min", ["cdiv", "rows", 4], ["mul", "sms", 2]]},
    "launches": [
        {
            "function": "scale",
            "args": ["x", "factor", "y", "room", "rows"],
            "grid": ["programs"],
            "num_warps": 4,
            "num_stages": 1,
            "binaries": [{**ABI, **binary} for binary in BINARIES],
        }
    ],
}
REFERENCE = "def scale(x, factor):\n    return (x * factor).bfloat16()\n"


class Recorder:
    """A device that notes what it is asked to launch, with the arguments read back through the pointers."""

    def __init__(self, capability: tuple[int, int] = (9, 0), cuda: int = 13, multiprocessors: int = 2) -> None:
        self.torch_device = torch.device("cpu")
        self.capability = capability
        self.cuda = cuda
        self.multiprocessors = multiprocessors
        self.launches: list[dict[str, Any]] = []

    def load(self, cubin: bytes, symbol: str, shared: int) -> Any:
        return (cubin.decode(), symbol, shared)

    def room(self, kernel: Any, threads: int, shared: int) -> int:
        return 3

    def launch(
        self, kernel: Any, grid: tuple[int, ...], threads: int, shared: int, parameters: int, early: bool
    ) -> None:
        pointers = (ctypes.c_uint64 * 7).from_address(parameters)
        values = [ctypes.c_uint64.from_address(pointer).value for pointer in pointers]
        record = {"kernel": kernel, "grid": grid, "threads": threads, "shared": shared, "values": values}
        record["early"] = early
        self.launches.append(record)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "manifest.json").write_text(json.dumps({"kernels": [ENTRY]}))
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "cubin").mkdir()
    for binary in BINARIES:
        (tmp_path / str(binary["file"])).write_text("aligned" if binary["alignment"] == 16 else "generic")
    return tmp_path


def bind(package: Path, device: Recorder, strict: bool = False, entry: dict[str, Any] = ENTRY) -> runtime.Kernels:
    twins = types.ModuleType("reference")
    exec(REFERENCE, twins.__dict__)
    return runtime.bind([entry], package, twins, device, strict=strict, jit=False)


def only(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The result of a site that has one."""
    assert isinstance(result, torch.Tensor)
    return result


def test_cpu_binds_twins(package: Path) -> None:
    runtime.set_device("cpu")
    sites = runtime.kernels(package / "step.py")
    assert sites.providers == {"scale": "twin"}
    y = only(sites.scale(torch.full((3, 8), 2.0), torch.full((3, 1), 3.0)))
    assert torch.equal(y, torch.full((3, 8), 6.0).bfloat16())
    with pytest.raises(AttributeError, match="'scal'"):
        sites.scal(1)


def test_launch_arguments(package: Path) -> None:
    device = Recorder()
    sites = bind(package, device)
    assert sites.providers == {"scale": "cubin"}
    x, factor = torch.ones(5, 2, 8), torch.ones(5, 2, 1)
    y = only(sites.scale(x, factor))
    assert y.shape == (5, 2, 8) and y.dtype == torch.bfloat16
    (launch,) = device.launches
    assert launch["kernel"] == ("aligned", "scale", 64)
    assert (launch["grid"], launch["threads"], launch["shared"]) == ((3, 1, 1), 128, 64)
    pointers, rows, hidden = launch["values"][:4], launch["values"][4], launch["values"][5:]
    assert pointers[:3] == [x.data_ptr(), factor.data_ptr(), y.data_ptr()] and pointers[3] != 0
    assert rows == 10 and hidden[0] == 0 and hidden[1] != 0


def test_grid_is_bounded_by_the_device(package: Path) -> None:
    device = Recorder(multiprocessors=2)
    bind(package, device).scale(torch.ones(1000, 8), torch.ones(1000, 1))
    assert device.launches[0]["grid"] == (4, 1, 1)


@pytest.mark.parametrize(
    ("spread", "rows", "early"),
    [(False, 1000, True), (True, 8, True), (True, 12, False), (True, 20, False), (True, 24, True), (True, 1000, True)],
)
def test_programs_that_are_spread_come_early_only_where_none_takes_the_share_of_another(
    package: Path, spread: bool, rows: int, early: bool
) -> None:
    launch = {**ENTRY["launches"][0], "spread": spread, "grid": [["cdiv", "rows", 4]]}
    launch["binaries"] = [{**binary, "early": True} for binary in launch["binaries"]]
    device = Recorder(multiprocessors=2)  # each has room for three
    bind(package, device, entry={**ENTRY, "launches": [launch]}).scale(torch.ones(rows, 8), torch.ones(rows, 1))
    assert device.launches[0]["early"] is early


def test_unaligned_tensors_take_the_generic_binary(package: Path) -> None:
    device = Recorder()
    x = torch.ones(33)[1:].view(4, 8)
    assert x.data_ptr() % 16 == 4
    bind(package, device).scale(x, torch.ones(4, 1))
    assert device.launches[0]["kernel"][0] == "generic"


def test_a_launch_takes_the_calls_that_it_is_for(package: Path) -> None:
    ways = [
        {**ENTRY["launches"][0], "takes": takes, "binaries": [ENTRY["launches"][0]["binaries"][index]]}
        for index, takes in enumerate(("aligned", "others"))
    ]
    device = Recorder()
    sites = bind(package, device, entry={**ENTRY, "launches": ways})
    sites.scale(torch.ones(5, 8), torch.ones(5, 1))
    sites.scale(torch.ones(41)[1:].view(5, 8), torch.ones(5, 1))
    assert [launch["kernel"][0] for launch in device.launches] == ["aligned", "generic"]


def test_columns_in_turns_are_read_through_the_first(package: Path) -> None:
    """Where gate and up lie beside each other; else, and where they are off the boundary, by the other launch."""
    inputs = [
        {"name": name, "dtype": "f32", "shape": ["n", 8], "strided": True, **more}
        for name, more in (("gate", {}), ("up", {"beside": "gate"}))
    ]
    outputs = [{"name": "y", "dtype": "bf16", "shape": ["n", 8]}]
    strides = ["gate_stride_0", "up_stride_0", "gate_stride_1", "up_stride_1"]
    given = (["gate", "y", "gate_stride_0"], ["gate", "up", "y", *strides])
    abi = {**ABI, "hidden": [0] * 4}
    launches = [
        {**ENTRY["launches"][0], "takes": takes, "args": args, "grid": [1], "binaries": [{**abi, **binary}]}
        for takes, args, binary in zip(("aligned", "others"), given, BINARIES, strict=True)
    ]
    entry = {**ENTRY, "inputs": inputs, "outputs": outputs, "scratch": [], "dims": {}, "launches": launches}
    device = Recorder()
    sites = bind(package, device, entry=entry)
    whole, odd = torch.zeros(5, 16), torch.zeros(85)[1:81].view(5, 16)
    gate, up = whole[:, ::2], whole[:, 1::2]
    calls = {
        "aligned": [(gate, up), (gate[:1], up[:1])],
        "generic": [
            (up, gate),
            (gate, gate),
            (odd[:, ::2], odd[:, 1::2]),
            (gate.contiguous(), up.contiguous()),
            (gate, torch.zeros(5, 8)),
        ],
    }
    for kernel, both in calls.items():
        for pair in both:
            device.launches.clear()
            sites.scale(*pair)
            (launch,) = device.launches
            assert launch["kernel"][0] == kernel
            assert launch["values"][0] == pair[0].data_ptr()
    assert launch["values"][3:7] == [16, 8, 2, 1], "strides of the last call"


def test_strided_tensors_are_copied_and_said_once(package: Path) -> None:
    device = Recorder()
    sites = bind(package, device, strict=True)
    x = torch.ones(4, 16)[:, ::2]
    with pytest.warns(RuntimeWarning, match="scale: x is not contiguous"):
        sites.scale(x, torch.ones(4, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sites.scale(x, torch.ones(4, 1))
    assert all(launch["values"][0] != x.data_ptr() for launch in device.launches)


@pytest.mark.parametrize(
    ("x", "factor", "reason"),
    [
        (torch.ones(4, 8).double(), torch.ones(4, 1), "x is torch.float64"),
        (torch.ones(4, 16), torch.ones(4, 1), r"x has shape \[4, 16\]"),
        (torch.ones(4, 8), torch.ones(1), "the leading dims of factor"),
    ],
)
def test_calls_the_kernel_does_not_take(package: Path, x: torch.Tensor, factor: torch.Tensor, reason: str) -> None:
    device = Recorder()
    sites = bind(package, device)
    with pytest.warns(RuntimeWarning, match=reason):
        y = only(sites.scale(x, factor))
    assert torch.equal(y, (x * factor).bfloat16())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sites.scale(x, factor)
    assert device.launches == []
    with pytest.raises(PackageError, match=reason):
        bind(package, device, strict=True).scale(x, factor)


def test_no_rows_need_no_launch(package: Path) -> None:
    device = Recorder()
    y = only(bind(package, device, strict=True).scale(torch.ones(0, 8), torch.ones(0, 1)))
    assert y.shape == (0, 8) and device.launches == []


@pytest.mark.parametrize(
    ("capability", "cuda", "reason"),
    [((10, 0), 13, "built for sm_90a; this GPU is sm_100"), ((9, 0), 11, "needs a driver for CUDA 12")],
)
def test_binaries_that_do_not_fit(package: Path, capability: tuple[int, int], cuda: int, reason: str) -> None:
    device = Recorder(capability, cuda)
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        sites = bind(package, device)
    assert len(caught) == 1 and sites.providers == {"scale": "twin"}
    with pytest.raises(PackageError, match=reason):
        bind(package, device, strict=True)


class Refusing(Recorder):
    """A device whose driver takes no binary."""

    def load(self, cubin: bytes, symbol: str, shared: int) -> Any:
        raise PackageError("the CUDA driver says CUDA_ERROR_INVALID_IMAGE for a kernel of this package")


def test_a_binary_that_the_driver_refuses_is_left_to_torch(package: Path) -> None:
    told = r"scale: cubin/scale\S*\.sm_90a\.cubin cannot be loaded: .*INVALID_IMAGE"
    with pytest.warns(RuntimeWarning, match=told) as caught:
        sites = bind(package, Refusing())
    assert len(caught) == 1 and sites.providers == {"scale": "twin"}
    with pytest.raises(PackageError, match=told) as refused:
        bind(package, Refusing(), strict=True)
    assert refused.value.exit_code == 2


def test_missing_binary_is_an_error(package: Path) -> None:
    (package / "cubin/scale.sm_90a.cubin").unlink()
    with pytest.raises(PackageError, match=r"scale\.sm_90a\.cubin"):
        bind(package, Recorder())


def test_site_without_launches(package: Path) -> None:
    with pytest.warns(RuntimeWarning, match="has no GPU kernel"):
        assert bind(package, Recorder(), entry={**ENTRY, "launches": []}).providers == {"scale": "twin"}


@pytest.mark.parametrize(
    ("arch", "capability", "fits"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), False),
    ],
)
def test_runs_on(arch: str, capability: tuple[int, int], fits: bool) -> None:
    assert runs_on(arch, capability) is fits


def test_evaluate() -> None:
    dims = {"rows": 10, "sms": 3}
    assert runtime.evaluate(["cdiv", "rows", 4], dims) == 3
    assert runtime.evaluate(["max", ["mul", "sms", 2], ["min", "rows", 7]], dims) == 7
    with pytest.raises(AssertionError, match="unknown operator"):
        runtime.evaluate(["pow", 1, 2], dims)


def test_package_errors(package: Path) -> None:
    runtime.set_device("cpu")
    (package / "reference.py").write_text("def other(x):\n    return (x,)\n")
    with pytest.raises(PackageError, match="scale has no twin"):
        runtime.kernels(package / "step.py")
    (package / "reference.py").write_text("def scale(:\n")
    with pytest.raises(PackageError, match=r"reference\.py of the package cannot be loaded"):
        runtime.kernels(package / "step.py")
    (package / "manifest.json").write_text("{")
    with pytest.raises(PackageError, match="manifest cannot be read"):
        runtime.kernels(package / "step.py")


def test_set_device_refuses_what_packages_do_not_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MgraphError, match="not on meta"):
        runtime.set_device("meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MgraphError, match="no CUDA device"):
        runtime.set_device("cuda")


TURN: dict[str, Any] = {
    "name": "turn",
    "inputs": [
        {"name": "x", "dtype": "f32", "shape": ["B", "H", "S", 16], "strided": True},
        {"name": "table", "dtype": "f32", "shape": ["S", 16]},
        {"name": "total", "dtype": "f32", "shape": ["B"]},
    ],
    "outputs": [
        {"name": "y", "dtype": "f32", "shape": ["B", "H", "S", 16], "like": "x"},
        {"name": "sum", "dtype": "f32", "shape": ["B"], "alias": "total"},
    ],
    "scratch": [],
    "dims": {},
    "launches": [
        {
            "function": "turn",
            "args": ["x", "y", "S", "x_stride_1", "x_stride_2", "y_stride_1", "y_stride_2"],
            "grid": ["S", "B"],
            "num_warps": 4,
            "num_stages": 1,
            "binaries": [{**ABI, "hidden": [], **binary} for binary in BINARIES],
        }
    ],
}


def test_strides_and_names_and_results_in_place(package: Path) -> None:
    """A permuted view is taken as it is, the result lies as it does, and what is written in place comes back."""
    twins = types.ModuleType("reference")
    exec("def turn(x, table, total):\n    return x, total\n", twins.__dict__)
    device = Recorder()
    site = runtime.bind([TURN], package, twins, device, strict=True, jit=False).turn
    x, total = torch.ones(2, 5, 3, 16).permute(0, 2, 1, 3), torch.zeros(2)
    y, summed = site(x, torch.ones(5, 16), total)
    assert y.stride() == x.stride() == (240, 16, 48, 1) and summed is total
    (launch,) = device.launches
    assert launch["kernel"][0] == "aligned" and launch["grid"] == (5, 2, 1)
    assert launch["values"][2:] == [5, 16, 48, 16, 48]
    site(torch.ones(2, 3, 5, 17)[..., :16], torch.ones(5, 16), total)
    assert device.launches[1]["kernel"][0] == "generic"
    assert device.launches[1]["values"][2:] == [5, 85, 17, 80, 16]  # no gaps are handed on
    with pytest.raises(PackageError, match="table has shape"):
        site(x, torch.ones(4, 16), total)
    with pytest.raises(PackageError, match="total, which is written in place, is not contiguous"):
        site(x, torch.ones(5, 16), torch.ones(4)[::2])


@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (1, 3, 5, 8), (4, 1, 1, 8), (3,), ()], ids=str)
def test_new_tensors_lie_as_torch_lays_them(shape: tuple[int, ...]) -> None:
    """For every order of the dims in memory, without gaps and with: `torch.empty_like` is the reference. The stride of
    a dim of one means nothing."""
    for order in itertools.permutations(range(len(shape))):
        for gap in (0, 3):
            laid = [shape[dim] for dim in order]
            whole = torch.empty([*laid[:-1], *(size + gap for size in laid[-1:])])
            like = whole[..., : laid[-1]] if laid else whole
            like = like.permute([order.index(dim) for dim in range(len(shape))])
            told = zip(runtime._strides(shape, like.stride()), torch.empty_like(like).stride(), shape, strict=True)
            assert all(mine == theirs for mine, theirs, size in told if size > 1), (order, gap)
    assert runtime._strides(shape, None) == torch.empty(shape).stride()


def test_a_launch_is_planned_without_symbolic_shapes() -> None:
    """Their import takes a second of every start."""
    code = (
        "import sys, torch\n"
        "from mgraph.runtime.kernels import _strides\n"
        "_strides((2, 3), (1, 2))\n"
        "print('sympy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_stride_of_a_dim_of_one_means_nothing(package: Path) -> None:
    twins = types.ModuleType("reference")
    exec("def turn(x, table, total):\n    return x, total\n", twins.__dict__)
    device = Recorder()
    site = runtime.bind([TURN], package, twins, device, strict=True, jit=False).turn
    x = torch.ones(2, 3, 16).as_strided((2, 1, 3, 16), (48, (1 << 40) + 1, 16, 1))
    site(x, torch.ones(3, 16), torch.zeros(2))
    (launch,) = device.launches
    assert launch["kernel"][0] == "aligned" and launch["values"][2:5] == [3, 0, 16]


def test_a_last_dim_with_gaps_is_copied_where_the_kernel_is_not_told_of_its_stride(package: Path) -> None:
    twins = types.ModuleType("reference")
    exec("def turn(x, table, total):\n    return x, total\n", twins.__dict__)
    device = Recorder()
    site = runtime.bind([TURN], package, twins, device, strict=True, jit=False).turn
    x = torch.ones(2, 3, 5, 32)[..., ::2]
    with pytest.warns(RuntimeWarning, match="kernel turn: x is not contiguous and is copied"):
        site(x, torch.ones(5, 16), torch.zeros(2))
    (launch,) = device.launches
    assert launch["values"][0] != x.data_ptr() and launch["values"][2:] == [5, 80, 16, 80, 16]


LISTED: dict[str, Any] = {
    "name": "gather",
    "inputs": [
        {"name": "x", "dtype": "f32", "shape": ["*"], "many": True},
        {"name": "factor", "dtype": "f32", "shape": []},
    ],
    "outputs": [{"name": "sum", "dtype": "f32", "shape": []}],
    "scratch": [{"name": "partial", "dtype": "f32", "shape": ["blocks"]}],
    "dims": {},
    "lists": {"chunk": 32, "numbers": {"decays": [[0.5, 2], [0.25, 1]]}},
    "launches": [
        {
            "function": function,
            "args": args,
            "grid": grid,
            "num_warps": 4,
            "num_stages": 1,
            "binaries": [{**ABI, "hidden": [0, 0], **binary} for binary in BINARIES],
        }
        for function, args, grid in (
            ("parts", ["x", "x_at", "partial", "before", "unit"], ["blocks"]),
            ("whole", ["partial", "sum", "factor", "blocks", "sms"], [1]),
        )
    ],
}


def listed(package: Path, device: Recorder) -> Any:
    twins = types.ModuleType("reference")
    exec("def gather(x, factor):\n    return 'twin'\n", twins.__dict__)
    return runtime.bind([LISTED], package, twins, device, strict=False, jit=False).gather


def test_lists_are_launched_part_by_part(package: Path) -> None:
    """Even places and sizes by the aligned binary, the others by the generic one; what follows runs once."""
    device = Recorder()
    memory = torch.zeros(256)
    first = -memory.data_ptr() // 4 % 16
    tensors = [memory[first + start : first + start + size] for start, size in ((0, 64), (65, 33), (112, 48))]
    made = listed(package, device)(tensors, torch.tensor(2.0))
    even, odd, whole = device.launches
    assert [launch["kernel"][0] for launch in device.launches] == ["aligned", "generic", "aligned"]
    assert [launch["grid"][0] for launch in device.launches] == [4, 2, 1]
    assert even["values"][0] == tensors[0].data_ptr() and odd["values"][0] == tensors[1].data_ptr()
    assert even["values"][3:5] == [0, 16] and odd["values"][3:5] == [4, 1]
    assert even["values"][2] == odd["values"][2] == whole["values"][0]
    assert whole["values"][1] == made.data_ptr() and whole["values"][3:5] == [6, 2]


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([torch.ones(4), torch.ones(4, dtype=torch.float64), torch.ones(4)], "x is torch.float64"),
        ([torch.ones(4), torch.ones(4, 3).t(), torch.ones(4)], "x has gaps in its last dim"),
    ],
)
def test_lists_that_the_kernel_refuses(package: Path, tensors: list[torch.Tensor], reason: str) -> None:
    device = Recorder()
    with pytest.warns(RuntimeWarning, match=reason):
        assert listed(package, device)(tensors, torch.tensor(2.0)) == "twin"
    assert not device.launches


def test_lists_without_elements_are_for_torch(package: Path) -> None:
    device = Recorder()
    assert listed(package, device)([torch.empty(0), torch.empty(3, 0), torch.empty(0)], torch.tensor(2.0)) == "twin"
    assert not device.launches


def test_a_capture_takes_only_lists_that_are_known(package: Path) -> None:
    device = Recorder()
    site = listed(package, device)
    tensors = [torch.ones(16) for _ in range(3)]
    site(tensors, torch.tensor(2.0))
    site._tables._capturing = lambda: True
    site(tensors, torch.tensor(2.0))
    assert len(device.launches) == 4
    with pytest.warns(RuntimeWarning, match="never called with before"):
        assert site([torch.ones(16) for _ in range(3)], torch.tensor(2.0)) == "twin"
