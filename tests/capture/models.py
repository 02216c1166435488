"""Models that tests capture, and their eager counterparts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mgraph.capture import ModelSpec, capture
from mgraph.capture.source import resolve
from mgraph.ir import interpreter
from mgraph.ir.graph import Module

VOCAB = 256


def llama_config(**changes: Any) -> dict[str, Any]:
    """A Llama configuration of two small layers with grouped key heads."""
    return {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        **changes,
    }


def write_model(folder: Path, body: str, name: str = "user.py") -> str:
    """A user's file whose class `Model` has `self.embed`, `self.head` and the given `forward` body; gives its spec."""
    lines = "\n".join("        " + line for line in body.strip("\n").splitlines())
    (folder / name).write_text(
        "import torch\n"
        "from torch import nn\n"
        "from torch.nn import functional as F\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"        self.embed = nn.Embedding({VOCAB}, 8)\n"
        f"        self.head = nn.Linear(8, {VOCAB})\n"
        "        self.register_buffer('seen', torch.zeros(8))\n"
        "        self.table = nn.Parameter(torch.zeros(40, 8))\n"
        "    def forward(self, tokens):\n"
        "        x = self.embed(tokens)\n"
        f"{lines}\n"
    )
    return f"{folder / name}:Model"


def eager_state(model: nn.Module, module: Module) -> dict[str, Tensor]:
    """The tensors of an eager model under the names of the module's state; constants of the trace by their program."""
    found = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    assert {n for n, s in module.state.items() if s.persist} <= set(found)
    return {n: found[n] for n in module.state if n in found}


def batch(batch_size: int, length: int) -> dict[str, Tensor]:
    """Random tokens and labels, some ignored."""
    labels = torch.randint(0, VOCAB, (batch_size, length))
    labels[:, 0] = -100
    return {"tokens": torch.randint(0, VOCAB, (batch_size, length)), "labels": labels}


def forward_both(
    spec: str | ModelSpec, *sizes: tuple[int, int]
) -> list[tuple[dict[str, Tensor], Any, dict[str, Tensor]]]:
    """Per size: outputs of the captured module, of the eager model, and the batch."""
    spec = ModelSpec(spec) if isinstance(spec, str) else spec
    module, model = capture(spec), resolve(spec).factory().train(spec.training)
    state = eager_state(model, module)
    made = []
    for size in sizes:
        inputs = batch(*size)
        outputs, _ = interpreter.run(module, "forward", inputs, state)
        with torch.no_grad():
            made.append((outputs, model(inputs["tokens"]), inputs))
    return made
