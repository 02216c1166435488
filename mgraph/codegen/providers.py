"""Who runs an op: of each op instance the providers that take it, fastest first, and why others do not.

An op that only torch runs has one provider, `torch` (cuBLAS for products), or `nccl`. The others:

    triton   a template of ours (`kernel_sites.py`), compiled ahead of time; its twin runs where its binary cannot
    cudnn    attention by cuDNN, from Hopper on
    flash    attention by torch's flash kernel
    efficient  attention by torch's memory-efficient kernel
    torch    the runtime's op, of torch's kernels
    flash-attn  attention by FlashAttention 2 of that library; unverified, and only where it is asked for
    te       products of experts by Transformer Engine; unverified, and only where it is asked for
    tensorrt  products of a serve package by TensorRT (torch-tensorrt); unverified, and only where it is asked for

Times come from a profile (`profile.py`). A provider that is asked for (`--provider attention=flash`) goes before all
others wherever it takes the node. What is chosen is what is emitted; at load, or at the call, the runtime asks again
and takes the next one that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgraph.codegen.kernel_sites import LIBRARIES, ON_ALL_TARGETS, ON_GPUS, SUMS_ON_GPUS, TRITON, UNVERIFIED
from mgraph.codegen.profile import Instance, Profile, Time
from mgraph.errors import OptionError, did_you_mean
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.ir.local import Division, declared_sizes
from mgraph.ir.opdef import is_known_op, op_def

TORCH, NCCL = "torch", "nccl"
_FAMILIES = {
    "add_rms_norm": "residual_norm",
    "aten.embedding_dense_backward.default": "embedding_grad",
    "cross_entropy_with_grad": "cross_entropy",
    "gathered_outer": "grouped_outer",
    "glu_grad_joined": "glu",
    "grouped_matmul_sum": "grouped_matmul",
    "embedding_part_grad": "embedding_grad",
    "linear_cross_entropy_with_grad": "cross_entropy",
    "linear_glu": "linear",
    "moe_combine": "moe_rows",
    "moe_dispatch": "moe_rows",
    "moe_order": "moe_route",
    "moe_route_order": "moe_route",
    "rope_join": "rope",
    "rope_joined": "rope",
    "square_sum": "global_norm",
    "squared_relu": "glu",
}
"""Families whose name is not that of the op (without `_grad`)."""
_KERNEL_ONLY = ("region",)
"""Ops that exist as kernels alone: torch runs their twins, which is nothing to choose."""


@dataclass(frozen=True)
class Candidate:
    """A provider that takes an instance, and what it takes for it."""

    provider: str
    time: Time


@dataclass(frozen=True)
class Choice:
    """What runs a node: candidates in order, and why each other provider takes it not."""

    instance: Instance
    candidates: tuple[Candidate, ...]
    refused: Mapping[str, str]
    forced: bool = False

    @property
    def chosen(self) -> Candidate:
        """The first."""
        return self.candidates[0]

    @property
    def next(self) -> Candidate | None:
        """The runner-up."""
        return self.candidates[1] if len(self.candidates) > 1 else None


class Providers:
    """Chooses for the nodes of a module. `forced` maps families to providers (see `parse_providers`); `extents` are
    those of the named dims that times are of; `gpu`: there are kernels for GPUs."""

    def __init__(
        self,
        module: Module,
        profile: Profile,
        extents: Mapping[str, int],
        forced: Mapping[str, str] | None = None,
        *,
        gpu: bool = True,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.module, self.profile, self.extents, self.forced, self._gpu = module, profile, extents, forced or {}, gpu
        self.division = Division.of(module, declared_sizes(module) if sizes is None else sizes)
        self._known: dict[tuple[Any, ...], Choice] = {}

    def choice(self, node: Node, total: Value | None = None) -> Choice:
        """The choice for a node; with `total`, for its sum to that."""
        node = self.division.local_node(node)
        key = (node.op, str(node.attrs), *(v.type for v in node.operands), None if total is None else total.type)
        if key not in self._known:
            self._known[key] = self._choose(node, total)
        return self._known[key]

    def chosen(self, node: Node, total: Value | None = None) -> str:
        """The name of the provider that runs a node."""
        return self.choice(node, total).chosen.provider

    def _choose(self, node: Node, total: Value | None) -> Choice:
        instance, wanted = Instance.of(node, self.extents), self.forced.get(family_of(node.op))
        refused: dict[str, str] = {}
        taking = []
        for provider in providers_of(node.op) if self._gpu else (own_provider(node.op),):
            reason = refusal(provider, node, total)
            if provider in UNVERIFIED.get(family_of(node.op), ()) and provider != wanted:
                continue
            if reason is None:
                taking.append(Candidate(provider, self.profile.time(instance, provider)))
            else:
                refused[provider] = reason
        # Sorting is stable: of equal times the first one listed.
        taking.sort(key=lambda c: (c.provider != wanted, c.time.microseconds))
        return Choice(instance, tuple(taking), refused, taking[0].provider == wanted)

    def nodes(self) -> Iterator[tuple[Function, Node, Choice]]:
        """All nodes that several providers could run, by function, with the choice."""
        for function in self.module.functions.values():
            totals = {n.operands[1]: n.operands[0] for n in function.nodes if n.op == "accumulate_"}
            for node in function.nodes:
                if len(providers_of(node.op)) > 1:
                    total = totals.get(node.results[0]) if node.op in SUMS_ON_GPUS else None
                    yield function, node, self.choice(node, total)

    def check_forced(self) -> None:
        """Raise OptionError for a provider that was asked for and takes no node of its family, saying why."""
        there = [(family_of(node.op), choice) for _, node, choice in self.nodes()] if self.forced else []
        for family, provider in self.forced.items():
            found = [choice for name, choice in there if name == family]
            if not found:
                names = ", ".join(sorted({name for name, _ in there})) or "no family"
                hint = f"leave it out; with several providers it has {names}"
                raise OptionError(f"{provider} takes no {family}: this package has none", _FLAG, hint)
            if not any(choice.forced for choice in found):
                reasons = sorted({choice.refused[provider] for choice in found if provider in choice.refused})
                hint = f"leave it out; {found[0].chosen.provider} runs it"
                if any("f32" in reason for reason in reasons):
                    hint = f"--precision bf16, or {hint}"
                raise OptionError(f"{provider} takes no {family} of this model: {'; '.join(reasons)}", _FLAG, hint)

    def data(self) -> list[dict[str, Any]]:
        """What the manifest says of each node: the provider, the runner-up, times, and who refuses."""
        return [
            {
                "function": function.name,
                "node": node.id,
                "op": node.op,
                **_candidate(choice.chosen),
                "next": _candidate(choice.next) if choice.next else None,
                "refused": dict(choice.refused),
                **({"forced": True} if choice.forced else {}),
            }
            for function, node, choice in self.nodes()
        ]


_FLAG = "--provider"


def _candidate(candidate: Candidate) -> dict[str, Any]:
    time = candidate.time
    return {"provider": candidate.provider, "microseconds": round(time.microseconds, 2), "basis": time.basis}


def family_of(op: str) -> str:
    """What a person calls an op and its gradient together."""
    stem = op.removesuffix("_").removesuffix("_grad") if op not in _FAMILIES else op
    return _FAMILIES.get(stem, _FAMILIES.get(op.removesuffix("_"), stem))


def own_provider(op: str) -> str:
    """The provider of an op that has no other."""
    if "." not in op and is_known_op(op) and op_def(op).collective:
        return NCCL
    return TRITON if op in _KERNEL_ONLY else TORCH


def providers_of(op: str) -> tuple[str, ...]:
    """All providers of an op, whatever its sizes; of equally fast ones the first is taken."""
    stem = op.removesuffix("_")
    if stem in _KERNEL_ONLY or not any(stem in table for table in (ON_ALL_TARGETS, ON_GPUS, SUMS_ON_GPUS)):
        return (own_provider(op),)
    family = family_of(op)
    return (*(LIBRARIES if family == "attention" else ()), TRITON, TORCH, *UNVERIFIED.get(family, ()))


def families() -> dict[str, tuple[str, ...]]:
    """The families for which there is a choice, with their providers."""
    ops = sorted({*ON_ALL_TARGETS, *ON_GPUS, *SUMS_ON_GPUS} - set(_KERNEL_ONLY))
    return {family_of(op): providers_of(op) for op in ops}


def parse_providers(rules: Sequence[str]) -> dict[str, str]:
    """Family to provider, of rules `attention=flash`. Raises OptionError with what there is."""
    known = families()
    made: dict[str, str] = {}
    for rule in rules:
        family, _, provider = (part.strip() for part in rule.partition("="))
        if family not in known:
            hint = f"FAMILY=PROVIDER; {did_you_mean(family, known)}"
            raise OptionError(f"no family of ops '{family}' with several providers", _FLAG, hint)
        if not provider:
            hint = f"{family}=PROVIDER, of {', '.join(known[family])}"
            raise OptionError(f"'{rule}' does not say who is to run {family}", _FLAG, hint)
        if provider not in known[family]:
            raise OptionError(f"{family} has no provider '{provider}'", _FLAG, f"one of {', '.join(known[family])}")
        if made.setdefault(family, provider) != provider:
            raise OptionError(f"{family} is given {made[family]} and {provider}", _FLAG, "one provider a family")
    return made


def refusal(provider: str, node: Node, total: Value | None = None) -> str | None:
    """Why a provider does not take a node (with the types of one rank's parts), or None if it does."""
    stem = node.op.removesuffix("_")
    if provider == TRITON and stem not in _KERNEL_ONLY:
        templates = {**ON_ALL_TARGETS, **ON_GPUS}
        if total is not None:
            problem = SUMS_ON_GPUS[stem].problem(node, total, False)
        elif stem in templates:
            problem = templates[stem].instance(node)
        else:
            problem = "the kernel adds to a total, and here is none"
        return problem if isinstance(problem, str) else None
    if provider == "te":
        return _te_refusal(node)
    if provider == "tensorrt":
        dtype = node.operands[0].tensor.dtype.text
        return None if dtype in ("bf16", "f16", "f32") else f"rows are {dtype}; it takes bf16, f16 and f32"
    return _attention_refusal(provider, node) if provider in (*LIBRARIES, *UNVERIFIED["attention"]) else None


def _te_refusal(node: Node) -> str | None:
    """As the runtime's product of groups decides at the call."""
    if node.op != "grouped_matmul":
        return "it makes the product alone, not its sum with another"
    dtype = node.operands[0].tensor.dtype.text
    return None if dtype in ("bf16", "f16") else f"rows are {dtype}; it takes bf16 and f16"


def _attention_refusal(provider: str, node: Node) -> str | None:
    """As the runtime's attention decides at the call."""
    first = 1 if node.op == "attention_grad" else 0
    q, k, v = (value.tensor for value in node.operands[first : first + 3])
    width, attrs = q.shape[3], node.attrs
    if q.dtype.text not in ("bf16", "f16", *(["f32"] if provider == "efficient" else [])):
        return f"q is {q.dtype.text}; it takes bf16 and f16"
    if not isinstance(width, int) or width != v.shape[3] or width % 8:
        return f"heads of {width} and {v.shape[3]}; it takes equal ones, multiples of 8"
    most = 128 if provider == "cudnn" else 256
    if width > most:
        return f"heads are {width} wide; it takes up to {most}"
    hidden = [name for name in ("window", "softcap") if attrs.get(name) is not None and provider in LIBRARIES]
    hidden += [str(name) for name in attrs.get("extra", ()) if name != "sinks"]  # type: ignore[union-attr]
    if hidden:
        return f"the mask has {', '.join(hidden)}; it does not know that"
    if attrs.get("causal") and q.shape[2] != k.shape[2]:
        return "causal, with more keys than queries"
    return None
