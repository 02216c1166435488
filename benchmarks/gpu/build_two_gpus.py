"""Compiles the packages that `benchmarks.gpu.two_gpus` runs. Needs no GPU.

python3 -m benchmarks.gpu.build_two_gpus DIRECTORY [--small] [--only MESHES] [dense] [moe]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.gpu import training_models
from mgraph.compiler import compile_package
from mgraph.recipe import Recipe

MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("dp=1", {}),
    "alone": ("dp=1", {"one_microbatch": True}),
    "dp2": ("dp=2", {"one_microbatch": True}),
    "dp2-overlap": ("dp=2", {"overlap": True}),
    "fsdp2": ("fsdp=2", {"one_microbatch": True}),
    "fsdp2-kept": ("fsdp=2", {"one_microbatch": True, "keep_gathered": True}),
    "tp2": ("tp=2", {}),
    "tp2-sequence": ("tp=2", {"sequence_parallel": True}),
    "ep2": ("ep=2", {"one_microbatch": True}),
    "ep2-chunks": ("ep=2", {"ep_chunks": 2, "one_microbatch": True}),
}
EXPERTS_ALONE = ("ep2", "ep2-chunks")
"""Meshes that a model without experts has not."""


def main() -> None:
    """Compile every model for every mesh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("models", nargs="*", default=["dense", "moe"])
    parser.add_argument("--small", action="store_true", help="small models in fp32, for the CPU")
    parser.add_argument("--only", default="", help="comma-separated beginnings of meshes")
    options = parser.parse_intermixed_args()
    for model in options.models:
        name = f"small_{model}" if options.small else model
        for mesh, (axes, more) in MESHES.items():
            if not mesh.startswith(tuple(options.only.split(","))) or (model == "dense" and mesh in EXPERTS_ALONE):
                continue
            recipe = Recipe(
                model=f"{training_models.__file__}:{name}",
                mesh=axes,
                precision="fp32" if options.small else "bf16",
                max_norm=0.0,  # as the peers: no clipping, no decay, and no look at gradients before the update
                check_finite="loss",
                weight_decay=0.0,
                grad_dtype="param",
                target="cpu" if options.small else "h100",
                batch=training_models.SHAPES[model].batch,
                seq=training_models.SHAPES[model].length,
                output=str(options.directory / f"{model}-{mesh}"),
                **more,
            )
            compile_package(recipe)
            print(recipe.directory, flush=True)


if __name__ == "__main__":
    main()
