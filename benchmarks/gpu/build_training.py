"""Compiles the packages that `benchmarks.gpu.training` runs. Needs no GPU.

python3 -m benchmarks.gpu.build_training DIRECTORY [dense] [llama8] [moe] [qwen30]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.gpu import training_models
from mgraph.compiler import compile_package
from mgraph.recipe import Recipe

MODELS = ("dense", "llama8", "moe", "qwen30")


def main() -> None:
    """Compile what the command line names after the directory, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all without one")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}: there are {', '.join(MODELS)}")
    for name in options.models or MODELS:
        recipe = Recipe(
            model=f"{training_models.__file__}:{name}",
            mesh="dp=1",
            precision="bf16",
            max_norm=0.0,  # as the peers: no clipping, no decay, and no look at gradients before the update
            check_finite="loss",
            weight_decay=0.0,
            grad_dtype="param",  # theirs are bf16
            one_microbatch=True,
            batch=training_models.SHAPES[name].batch,
            seq=training_models.SHAPES[name].length,
            target="h100",
            output=str(options.directory / name),
        )
        compile_package(recipe)
        print(recipe.directory, flush=True)


if __name__ == "__main__":
    main()
