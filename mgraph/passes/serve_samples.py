"""Inputs for the entries of inference: a batch of requests whose rows of the cache fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mgraph.ir.dims import evaluate
from mgraph.ir.graph import Function, Module, Value
from mgraph.ir.torch_bridge import to_torch_dtype

SAMPLE_BLOCKS = 32
"""Blocks of the cache, in checks."""
CACHE_DIMS = {"P": SAMPLE_BLOCKS}
_ROWS, _HISTORY = 3, 5
Tensors = dict[str, Any]


def block_rows(module: Module) -> int:
    """Rows of a block of the module's cache."""
    cache = next(state for state in module.state.values() if state.name.startswith("cache."))
    return int(evaluate(cache.type.shape[0], {"P": 1}))


def step_inputs(
    tokens: Sequence[Sequence[int]],
    starts: Sequence[int],
    width: int,
    block_size: int,
    padding: int = 0,
    groups: int = 1,
) -> Tensors:
    """The inputs of `step` for requests whose next tokens are given, and at which position each begins; all rows that
    are the last of a request are wanted. Request r has `width` blocks of its own, the same in all `groups` of layers:
    a graph has caches of their own for these. Requests without tokens and `padding` tokens are padding."""
    import torch

    count = len(tokens)
    lengths = [start + len(row) if row else 0 for start, row in zip(starts, tokens, strict=True)]
    positions = [p for start, row in zip(starts, tokens, strict=True) for p in range(start, start + len(row))]
    owners = [r for r, row in enumerate(tokens) for _ in row]
    # Blocks in descending order, so that nothing rests on their being neighbours.
    blocks = [[(r + 1) * width - w for w in range(width)] for r in range(count)]
    slots = [blocks[r][p // block_size] * block_size + p % block_size for r, p in zip(owners, positions, strict=True)]
    ends = [sum(len(row) for row in tokens[: r + 1]) for r in range(count)]
    i32, i64 = torch.int32, torch.int64
    given = {
        "tokens": torch.tensor([t for row in tokens for t in row] + [0] * padding, dtype=i64),
        "positions": torch.tensor(positions + [0] * padding, dtype=i64),
        "slots": torch.tensor(slots + [0] * padding, dtype=i64),
        "starts": torch.tensor([0, *ends], dtype=i32),
        "lengths": torch.tensor(lengths, dtype=i32),
        "blocks": torch.tensor(blocks, dtype=i32).reshape(count, width),
    }
    given |= {f"{name}_{group}": given[name] for group in range(1, groups) for name in ("slots", "blocks")}
    return given | {"rows": torch.tensor([end - 1 for end, row in zip(ends, tokens, strict=True) if row], dtype=i64)}


def is_of_serving(function: Function) -> bool:
    """Whether a function is an entry of inference."""
    names = {p.name for p in function.params}
    return {"slots", "blocks"} <= names or {"logits", "targets"} <= names


def serving_inputs(function: Function, vocab: int, source: Any) -> Tensors:
    """Random inputs of an entry of inference; `source` is a torch generator."""
    import torch

    params = {p.name: p for p in function.params}
    if "blocks" not in params:
        return {name: _sampling_input(p, source) for name, p in params.items()}
    width = int(params["blocks"].tensor.shape[1])
    caches = [v for node in function.nodes for v in node.operands if v.is_state and v.name.startswith("cache.")]
    size = int(evaluate(caches[0].tensor.shape[0], {"P": 1}))
    drawn = torch.randint(vocab, (3,), generator=source).tolist()
    groups = sum(name.startswith("blocks") for name in params)
    # Without padding tokens: what these leave in block 0 is nobody's, and a pass may change it.
    given = step_inputs([[drawn[0]], drawn[1:], []], [1, 0, 0], min(width, 2), size, 0, groups)
    return given | {name: _widened(width) for name in given if name.startswith("blocks")}


def _widened(width: int) -> Any:
    """The block tables of three requests, each `width` wide, of which two entries at most are used."""
    import torch

    used = min(width, 2)
    blocks = torch.zeros(3, width, dtype=torch.int32)
    blocks[:, :used] = torch.tensor([[(r + 1) * used - w for w in range(used)] for r in range(3)])
    return blocks


def _sampling_input(value: Value, source: Any) -> Any:
    import torch

    dims: Mapping[str, int] = {"N": _ROWS, "K": _HISTORY}
    shape = [int(evaluate(d, dims)) for d in value.tensor.shape]
    dtype = to_torch_dtype(value.tensor.dtype)
    if value.tensor.dtype.is_float:
        made = torch.rand(shape, generator=source) + 0.25
        return (made.clamp(max=1.0) if value.name in ("top_p", "min_p") else made).to(dtype)
    high = {"owners": _ROWS + 1, "written": 2, "targets": 1, "top_k": 4}.get(value.name, 2)
    made = torch.randint(high, shape, generator=source)
    return (made - 1 if value.name == "targets" else made).to(dtype)
