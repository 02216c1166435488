"""The JSON form holds what the module holds."""

from __future__ import annotations

import json

from mgraph.ir.graph import Module
from mgraph.ir.json_form import module_to_json


def test_the_sample_as_json(sample: Module) -> None:
    data = json.loads(json.dumps(module_to_json(sample), allow_nan=False))
    assert data["name"] == "sample" and data["version"] == 1
    assert data["dims"][2] == {"name": "R", "minimum": 0, "maximum": None, "bound": "2*B*S", "extent": "bound"}
    assert data["mesh"][2] == {"name": "ep", "size": None, "of": ["dp", "tp"]}
    assert [s["name"] for s in data["state"]] == list(sample.state)
    layer, main = data["functions"]
    assert layer["statics"] == ["window"] and layer["slots"] == [{"name": "norm.weight", "type": "f32[64]"}]
    assert layer["nodes"][1]["attrs"] == {"dim": 1, "end": "$window"}
    assert layer["nodes"][2]["attrs"] == {"shape": ["B*S", 64]}
    assert main["nodes"][0]["operands"] == ["%h", "@rope.cos", "@layers.0.norm.weight"]
    assert main["nodes"][0]["origin"] == {"path": "layers.0", "file": "models/model.py", "line": 10}
    assert data["entries"][0]["updates"] == ["layers.0.norm.weight.grad", "layers.1.norm.weight.grad"]
