"""Builds, on a machine without a GPU, the binaries that `check_rms_norm` runs on one.

    python -m benchmarks.gpu.build_rms_norm DIRECTORY [--sweep]

The directory gets what the kernel loader of a package reads (manifest.json, kernels.py, reference.py, cubin/).
`--sweep` adds the timed problems once more for each of a grid of tunings.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mgraph.codegen.triton import KernelSpec, RmsNorm, build_kernels, rms_norm
from mgraph.codegen.triton.rms_norm import Tuning

GATED = [
    RmsNorm(64, "f32", "f32", 1e-5),
    RmsNorm(100, "bf16", "bf16", 1e-5, round="normed"),
    RmsNorm(129, "f32", "f32", 1e-6, offset=1.0),
    RmsNorm(768, "bf16", "f32", 1e-5),
    RmsNorm(1000, "f16", "f16", 1e-5, round="normed"),
    RmsNorm(5120, "bf16", "bf16", 1e-6, offset=1.0),
    RmsNorm(16384, "bf16", "bf16", 1e-5),
]
"""Checked only: awkward sizes and every combination of rounding, offset and dtypes."""

TIMED = [
    RmsNorm(128, "bf16", "bf16", 1e-5, round="normed"),
    RmsNorm(2048, "bf16", "bf16", 1e-5, round="normed"),
    RmsNorm(4096, "bf16", "bf16", 1e-5, round="normed"),
    RmsNorm(8192, "bf16", "bf16", 1e-5, round="normed"),
    RmsNorm(4096, "f32", "f32", 1e-5),
]
"""Checked and timed."""

ELEMENTS_PER_TILE = (1024, 2048, 4096, 8192)
WARPS = (4, 8, 16)
STAGES = (1, 2, 3)
PROGRAMS_PER_SM = (1, 2, 4)


def tunings(problem: RmsNorm, backward: bool) -> Iterator[Tuning]:
    """The grid of a sweep, without points that leave a thread less than 16 or more than 64 bytes of a row."""
    tiles = sorted({max(1, elements // problem.block) for elements in ELEMENTS_PER_TILE})
    for rows, num_warps in itertools.product(tiles, WARPS):
        if not 8 <= rows * problem.block // (32 * num_warps) <= 32:
            continue
        if not backward:
            yield Tuning(rows, num_warps)
            continue
        for num_stages, programs_per_sm in itertools.product(STAGES, PROGRAMS_PER_SM):
            if 16 <= num_warps * programs_per_sm <= 32:
                yield Tuning(rows, num_warps, num_stages, programs_per_sm)


def main() -> None:
    """Build everything and write the manifest, with the problems under `problems`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--arch", default="sm_90a", help="GPU architecture (default %(default)s)")
    parser.add_argument("--sweep", action="store_true", help="also build a grid of tunings of the timed problems")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    specs: list[KernelSpec] = []
    problems: list[dict[str, Any]] = []
    for index, problem in enumerate([*GATED, *TIMED]):
        forward, backward = f"rms_norm_fwd_{index}", f"rms_norm_bwd_{index}"
        specs += [rms_norm.forward(forward, problem), rms_norm.backward(backward, problem)]
        record: dict[str, Any] = {
            **asdict(problem),
            "timed": problem in TIMED,
            "forward": {forward: asdict(rms_norm.forward_tuning(problem))},
            "backward": {backward: asdict(rms_norm.backward_tuning(problem))},
        }
        if options.sweep and problem in TIMED:
            for point, tuning in enumerate(tunings(problem, backward=False)):
                specs.append(rms_norm.forward(f"{forward}_{point}", problem, tuning))
                record["forward"][f"{forward}_{point}"] = asdict(tuning)
            for point, tuning in enumerate(tunings(problem, backward=True)):
                specs.append(rms_norm.backward(f"{backward}_{point}", problem, tuning))
                record["backward"][f"{backward}_{point}"] = asdict(tuning)
        problems.append(record)
    kernels = build_kernels(specs, options.directory, [options.arch])
    manifest = {"kernels": kernels, "problems": problems}
    (options.directory / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    print(f"{len(kernels)} kernel sites in {options.directory}")


if __name__ == "__main__":
    main()
