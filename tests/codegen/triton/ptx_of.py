"""The PTX text that Triton makes of each launch of kernel sites, in a process of its own.

Interpreted and compiled kernels cannot share a process: `python ptx_of.py DIRECTORY`, where DIRECTORY holds
`specs.json`. The texts go to `ptx.json`, by `function` and `function.aligned`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def ptx_of(specs: Sequence[Any], directory: Path) -> dict[str, str]:
    """PTX for sm_90a by the name of a launch, with `.aligned` where all pointers are on 16-byte boundaries."""
    (directory / "specs.json").write_text(json.dumps([spec.to_data() for spec in specs]))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), str(directory)],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    texts: dict[str, str] = json.loads((directory / "ptx.json").read_text())
    return texts


def main(directory: Path) -> None:
    import triton

    from mgraph.codegen.triton import KernelSpec
    from mgraph.codegen.triton.aot import compile_launch, import_kernels, variants
    from mgraph.codegen.triton.kernel import kernels_text

    specs = [KernelSpec.from_data(data) for data in json.loads((directory / "specs.json").read_text())]
    (directory / "kernels.py").write_text(kernels_text(specs))
    module = import_kernels(directory / "kernels.py")
    compiled: list[Any] = []
    compile_source = triton.compile

    def noting(*args: Any, **options: Any) -> Any:
        compiled.append(compile_source(*args, **options))
        return compiled[-1]

    triton.compile = noting
    texts = {}
    for spec in specs:
        for launch in spec.launches:
            for aligned in variants(launch):
                compile_launch(module, spec, launch, "sm_90a", aligned)
                texts[f"{launch.function}{'.aligned' * aligned}"] = compiled[-1].asm["ptx"]
    (directory / "ptx.json").write_text(json.dumps(texts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
