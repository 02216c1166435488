"""GPU kernels: templates that give Triton source and a torch twin, and their compilation ahead of time.

Importing this package never imports triton; only compiling does.
"""

from mgraph.codegen.triton.aot import build_kernels
from mgraph.codegen.triton.kernel import KernelSpec, Launch, TensorSpec, kernels_text, reference_text
from mgraph.codegen.triton.rms_norm import RmsNorm

__all__ = ["KernelSpec", "Launch", "RmsNorm", "TensorSpec", "build_kernels", "kernels_text", "reference_text"]
