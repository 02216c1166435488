"""Kernel specs: JSON round trip, signatures, and the texts of the two emitted files."""

from __future__ import annotations

import ast
import json

from mgraph.codegen.triton import KernelSpec, kernels_text, reference_text, rms_norm
from mgraph.codegen.triton.rms_norm import RmsNorm

PROBLEM = RmsNorm(96, "bf16", "f32", 1e-5, round="normed")
SPECS = [rms_norm.forward("rms_norm_fwd_0", PROBLEM), rms_norm.backward("rms_norm_bwd_0", PROBLEM)]


def test_json_round_trip() -> None:
    for spec in SPECS:
        assert KernelSpec.from_data(json.loads(json.dumps(spec.to_data()))) == spec


def test_argument_types() -> None:
    assert SPECS[0].argument_types(SPECS[0].launches[0]) == {
        "x_ptr": "*bf16",
        "weight_ptr": "*fp32",
        "y_ptr": "*bf16",
        "rstd_ptr": "*fp32",
        "rows": "i32",
    }
    assert SPECS[1].argument_types(SPECS[1].launches[1]) == {
        "partial_ptr": "*fp32",
        "dweight_ptr": "*fp32",
        "programs": "i32",
    }


def test_texts_define_every_launched_function_with_its_arguments() -> None:
    def functions(text: str) -> dict[str, list[str]]:
        nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        return {node.name: [argument.arg for argument in node.args.args] for node in nodes}

    kernels, twins = functions(kernels_text(SPECS)), functions(reference_text(SPECS))
    for spec in SPECS:
        assert twins[spec.name] == [tensor.name for tensor in spec.inputs]
        for launch in spec.launches:
            assert kernels[launch.function] == list(spec.argument_types(launch))


def test_emitted_lines_fit() -> None:
    longest = max(len(line) for text in (kernels_text(SPECS), reference_text(SPECS)) for line in text.splitlines())
    assert longest <= 120
