"""Every family of kernels on small, awkward inputs under compute-sanitizer, whose summary must be clean.

    python3 -m benchmarks.gpu.sanitize DIRECTORY [--prepare] [--tools memcheck racecheck] [--results FILE.jsonl]

Compiles the kernels and makes inputs and references on the CPU, into DIRECTORY (`--prepare`: only that, on any
machine); then one process under each tool launches every kernel once and compares. Each tensor is an allocation of its
own that ends where the tensor does, and what torch launches is left out. A row of results says how many errors or
hazards were found, what the tool said (`summary`), how many `seconds` it took and which Triton the binaries are of
(`built_by`). Exit status 1 on any finding.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import rows
from benchmarks.gpu.kernels import error_of, flat, result_of, wide
from benchmarks.gpu.sanitizer import TOOLS, under
from mgraph.codegen.triton.aot import build_kernels
from mgraph.errors import MgraphError
from mgraph.runtime import kernels as runtime

CASE = "case.pt"
BUILT_BY = "built_by.txt"
"""Names the Triton that compiled the kernels, which may be another than that of the machine with the GPU; written last.
"""
SUMMARY = re.compile(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", re.MULTILINE)
CLEAN = ("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
"""What the tools say at the end of a run in which they found nothing."""


def prepare(directory: Path) -> None:
    """Binaries, inputs and references of each case into a directory of its own."""
    import triton

    for index, case in enumerate(importlib.import_module("benchmarks.gpu.sanitize_cases").CASES):
        place = directory / f"{index:02}-{case.id}"
        place.mkdir(parents=True)
        entries = build_kernels([case.spec], place, ["sm_90a"])
        (place / "manifest.json").write_text(json.dumps({"kernels": entries}), encoding="utf-8")
        torch.manual_seed(0)
        inputs = case.inputs(torch.device("cpu"))
        exact = flat(result_of(case.reference, wide(inputs), case.written))
        expected = [t.float() if t.is_floating_point() else t for t in exact]
        torch.save((case.spec.name, inputs, case.written, expected, case.bound), place / CASE)
    (directory / BUILT_BY).write_text(f"triton {triton.__version__}\n", encoding="utf-8")


def prepared(directory: Path) -> list[Path]:
    """The directories of the cases, in their order."""
    return sorted(case.parent for case in directory.glob(f"*/{CASE}"))


def built_by(directory: Path) -> str:
    """The Triton that compiled the kernels. Raises MgraphError where not all of them were."""
    file = directory / BUILT_BY
    if not file.is_file():
        raise MgraphError(f"not all kernels are prepared: no {BUILT_BY}", str(directory), "--prepare a new directory")
    return file.read_text(encoding="utf-8").strip()


def moved(value: Any, device: torch.device) -> Any:
    """Tensors, in lists too, each as an allocation that ends with it, with the strides that it has."""
    if isinstance(value, list | tuple):
        return [moved(v, device) for v in value]
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    held = value.as_strided((last + 1,), (1,)) if value.numel() else value.flatten()
    return held.to(device, copy=True).as_strided(value.shape, value.stride(), 0)


def launch(directory: Path) -> int:
    """Launch every kernel once; the number of those that are wrong. Runs under the tool."""
    device = rows.gpu()
    runtime.set_device(device, strict=True)
    wrong = 0
    for place in prepared(directory):
        name, inputs, written, expected, bound = torch.load(place / CASE)
        site = getattr(runtime.kernels(place / "step.py"), name)
        found = moved(result_of(site, moved(inputs, device), written), torch.device("cpu"))
        error = error_of(found, expected)
        if not error <= bound:
            wrong += 1
            print(f"{place.name}: error {error:.1e}, allowed {bound:.1e}", flush=True)
    return wrong


def check(directory: Path, tool: str, built: str) -> tuple[dict[str, Any], str]:
    """A row of results, and what the tool and the process said; `built`: by which Triton the binaries are."""
    begin = time.perf_counter()
    done = subprocess.run(
        [
            *under(tool, "--kernel-regex-exclude", "kns=at6native"),
            *(sys.executable, "-m", "benchmarks.gpu.sanitize", str(directory), "--launch"),
        ],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    summary = SUMMARY.findall(said)
    last = summary[-1] if summary else "none"
    clean = done.returncode == 0 and last in CLEAN
    workload = f"{len(prepared(directory))} kernels on small, awkward inputs"
    count = re.search(r"\d+", last)
    findings = max(int(count.group()) if count else 0, int(not clean))
    seconds = round(time.perf_counter() - begin, 1)
    about = rows.row(f"sanitizer-{tool}", workload, findings, "findings", summary=last, seconds=seconds, built_by=built)
    return about, said


def main() -> int:
    """Prepare, and check with each tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--launch", action="store_true", help="what runs under a tool")
    parser.add_argument("--tools", nargs="*", default=TOOLS)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    if options.launch:
        return launch(options.directory)
    if not options.prepare:
        rows.gpu()
        for tool in options.tools:
            under(tool)
    if not options.directory.is_dir():
        prepare(options.directory)
    if options.prepare:
        return 0
    built = built_by(options.directory)
    complaints = 0
    for tool in options.tools:
        row, said = check(options.directory, tool, built)
        print(json.dumps(row), flush=True)
        if row["ours"]:
            complaints += 1
            print(said[:3000], flush=True)
        if options.results is not None:
            rows.append(options.results, row)
    return int(complaints > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MgraphError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
