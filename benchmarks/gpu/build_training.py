"""Compiles the packages that `benchmarks.gpu.training` runs: `python3 -m benchmarks.gpu.build_training DIRECTORY`.

Needs no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.gpu import training_models
from mgraph.compiler import compile_package
from mgraph.recipe import Recipe


def main() -> None:
    """Compile what the command line names after the directory, or all."""
    directory, *names = sys.argv[1:]
    for name in names or ("dense", "llama8", "moe", "qwen30"):
        recipe = Recipe(
            model=f"{training_models.__file__}:{name}",
            mesh="dp=1",
            precision="bf16",
            max_norm=0.0,  # as the peers: no clipping, no decay
            weight_decay=0.0,
            grad_dtype="param",  # theirs are bf16
            one_microbatch=True,
            target="h100",
            output=str(Path(directory) / name),
        )
        compile_package(recipe)
        print(recipe.directory, flush=True)


if __name__ == "__main__":
    main()
