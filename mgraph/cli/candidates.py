"""The op instances of a module that several providers could run, ready to be called on a device: for `mgraph tune`.

An instance is called as a package calls it: a kernel through the runtime, from its binary, and what torch runs by the
text that a step has for it. Inputs are random; those that must fit each other (the lse of an attention, labels, the
order of experts' rows) are made to. What is written in place, or is a list, is not called alone: it keeps its estimate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgraph.cli.routed_inputs import is_routed, routed
from mgraph.codegen.dim_text import DimScope
from mgraph.codegen.kernel_sites import LIBRARIES, TRITON, KernelSites
from mgraph.codegen.profile import Instance
from mgraph.codegen.providers import TORCH, Choice, Providers
from mgraph.codegen.torch_provider import Site, write
from mgraph.codegen.triton.aot import build_kernels
from mgraph.errors import PassError
from mgraph.ir.dims import evaluate
from mgraph.ir.graph import Node, Value
from mgraph.ir.torch_bridge import to_torch_dtype
from mgraph.ir.types import TensorType
from mgraph.runtime import kernels as kernel_runtime
from mgraph.runtime import v1 as rt

Run = Callable[..., Any]
_LABELLED = ("cross_entropy", "cross_entropy_grad", "cross_entropy_with_grad")


@dataclass(frozen=True)
class Candidate:
    """An instance, its node with numbers for extents, and what runs it by provider: `torch` is the first."""

    choice: Choice
    node: Node
    runs: Mapping[str, Run]

    @property
    def instance(self) -> Instance:
        """What is measured."""
        return self.choice.instance


def instances(providers: Providers) -> tuple[list[tuple[Choice, Node]], dict[str, str]]:
    """Each instance of a module once, as a node with numbers for extents; and, by op, why others cannot be called."""
    found: dict[str, tuple[Choice, Node]] = {}
    left: dict[str, str] = {}
    for _, node, choice in providers.nodes():
        instance = choice.instance
        key = json.dumps([instance.op, instance.attrs, instance.sizes])
        if len(choice.candidates) < 2 or key in found:
            continue
        node = _numbered(providers.division.local_node(node), providers.extents)
        reason = _unable(node)
        if reason is None:
            found[key] = choice, node
        else:
            left[instance.op] = reason
    return list(found.values()), left


def _unable(node: Node) -> str | None:
    """Why a node cannot be called alone."""
    if node.op.endswith("_") or "." in node.op or node.op.startswith(("linear_cross", "embedding")):
        return "it writes into state"
    if node.op in ("global_norm", "square_sum"):
        return "it takes a list of tensors"
    whole = [v for v in node.operands if not v.tensor.dtype.is_float]
    attention = node.op.startswith("attention") and "start" not in _extra(node)
    if whole and not (node.op in _LABELLED or attention or is_routed(node)):
        return f"what {whole[0].name} holds decides its work"
    return None


def _extra(node: Node) -> tuple[str, ...]:
    given = node.attrs.get("extra", ())
    return tuple(map(str, given)) if isinstance(given, tuple) else ()


def _numbered(node: Node, extents: Mapping[str, int]) -> Node:
    """A node with numbers in the place of named dims."""

    def numbered(value: Value) -> Value:
        if not isinstance(value.type, TensorType):
            return value
        shape = tuple(int(evaluate(d, extents)) for d in value.type.shape)
        return replace(value, type=TensorType(value.type.dtype, shape))

    return node.with_values(tuple(map(numbered, node.operands)), tuple(map(numbered, node.results)))


def candidates(
    found: Sequence[tuple[Choice, Node]], directory: Path, arch: str, device: torch.device
) -> Iterator[Candidate]:
    """What runs each instance; kernels are compiled for `arch` (on the CPU their twins run) into `directory`."""
    gpu = device.type == "cuda"
    sites = KernelSites(gpu=True, chosen=lambda node, total: TRITON)
    names = [sites.name(node) if _has(choice, TRITON) else None for choice, node in found]
    entries = build_kernels(sites.specs, directory, [arch] if gpu else [])
    (directory / "manifest.json").write_text(json.dumps({"kernels": entries}), encoding="utf-8")
    kernel_runtime.set_device(device, strict=gpu)
    bound = kernel_runtime.kernels(directory / "step.py")
    for (choice, node), name in zip(found, names, strict=True):
        runs: dict[str, Run] = {TORCH: _written(node, TORCH)}
        if name is not None:
            runs[TRITON] = getattr(bound, name)
        runs |= {library: _written(node, library) for library in LIBRARIES if _has(choice, library)}
        yield Candidate(choice, node, runs)


def _has(choice: Choice, provider: str) -> bool:
    return any(c.provider == provider for c in choice.candidates)


def _written(node: Node, provider: str) -> Run:
    """A node as a step has it that leaves it to a provider other than our kernels."""
    names = [f"x{index}" for index in range(len(node.operands))]
    sites = KernelSites(gpu=True, chosen=lambda node, total: provider)
    site = Site(node, names, DimScope(()), sites, device=_nothing, tensors=_nothing)
    text = f"lambda {', '.join(names)}: {write(site).text}"
    run: Run = eval(text, {"torch": torch, "F": torch.nn.functional, "rt": rt})
    return run


def _nothing(*_: Any) -> str:
    """A node that is called alone has no device of its own, and no list of operands."""
    raise PassError("an op that names a device or a list cannot be called alone", hint="leave it out of what is tuned")


def inputs(node: Node, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
    """Random operands of a node, in order."""
    made = torch.Generator(device).manual_seed(seed)
    extra = _extra(node)
    first = len(node.operands) - len(extra)
    given = []
    for index, value in enumerate(node.operands):
        shape = [int(d) for d in value.tensor.shape if isinstance(d, int)]
        dtype = to_torch_dtype(value.tensor.dtype)
        name = extra[index - first] if index >= first and extra else ""
        if value.tensor.dtype.is_float and name != "keys":
            drawn = torch.randn(shape, generator=made, device=device)
            # Statistics and weights of norms are around 1, as they are in a model.
            given.append((1 + 0.1 * drawn if shape[-1:] == [1] or len(shape) < 2 else drawn).to(dtype))
        elif name == "segments":
            given.append((torch.arange(shape[-1], device=device) // 512).expand(shape).to(dtype).contiguous())
        elif name == "keys":
            given.append(torch.ones(shape, device=device).to(dtype))
        elif is_routed(node):
            given.append(torch.empty(shape, dtype=dtype, device=device))
        else:  # labels of the logits
            classes = next(v.tensor.shape[1] for v in node.operands if len(v.tensor.shape) == 2)
            assert isinstance(classes, int)
            cut = node.attrs.get("classes")
            most = cut if isinstance(cut, int) and cut else classes
            given.append(torch.randint(most, shape, generator=made, device=device).to(dtype))
    return tuple(routed(node, given, made) if is_routed(node) else _fitted(node, given))


def _fitted(node: Node, given: list[Tensor]) -> list[Tensor]:
    """The operands, of which a gradient's out and lse are those of the operands before them."""
    if node.op == "attention_grad":
        attrs = {k: v for k, v in node.attrs.items() if k != "by"}
        given[4], given[5] = rt.attention(*given[1:4], *given[6:], **attrs)  # type: ignore[arg-type]
    if node.op == "cross_entropy_grad":
        given[3] = rt.cross_entropy(given[1], given[2], **node.attrs)[1]  # type: ignore[arg-type]
    return given


def largest_error(found: Any, expected: Any) -> float:
    """The largest error of a result in the Frobenius norm, relative to what it should be; not finite ones are inf."""
    pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (found, expected)), strict=True)
    errors = [
        float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)) for a, b in pairs if b.numel()
    ]
    return max((e if math.isfinite(e) else math.inf for e in errors), default=0.0)
