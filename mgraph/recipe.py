"""The recipe: every setting of a compilation, in one dataclass.

`mgraph compile` makes a flag of each field, a recipe file (YAML) may set any of them, and the documentation's table
and `mgraph env` are printed from here. A flag wins over the file, the file over the default.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgraph.adapters import parse_adapter
from mgraph.errors import OptionError, did_you_mean
from mgraph.parameter_groups import parse_group
from mgraph.placement_rules import parse_placement

TARGET_ARCHS = {"h100": "sm_90a", "cpu": ""}
"""The GPU architectures that kernels of a target are built for."""

ARCHS = ("sm_80", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103", "sm_103a", "sm_120", "sm_120a")
"""The GPU architectures that kernels can be built for; the compiler behind Triton ends the process for others."""

MESH_AXES = {"dp": "data-parallel", "ep": "data-parallel", "fsdp": "fully-shard", "tp": "tensor-parallel"}
"""The axes that a mesh may have, major first (neighbouring ranks share a layer), and the pass for each."""

PLACING_AXES = ("tp",)
"""The axes for which rules of `place` say where parameters lie."""

PADDABLE = ("heads", "vocab")
"""What `pad` may name."""

OFFLOADABLE = ("activations", "optimizer")
"""What `offload` may name."""

_PURPOSES = {"train": "training", "serve": "serving"}
_NOT_TRAINED = "leave it out: what is served is not trained"
_NOT_SERVED = "--for serve, or leave it out"
OF_PURPOSE = {
    "train": {
        **dict.fromkeys(("dispatch", "ep_chunks", "expert_extent", "expert_budget"), "what is served has tp alone"),
        **dict.fromkeys(("zero", "keep_gathered", "wide_sums"), "what is served has tp alone"),
        **dict.fromkeys(("overlap", "grad_dtype", "one_microbatch"), _NOT_TRAINED),
        **dict.fromkeys(("recompute", "activation_budget", "chunk_loss", "loss_mask"), _NOT_TRAINED),
        **dict.fromkeys(("optimizer", "weight_decay", "groups", "beta1", "beta2", "eps"), _NOT_TRAINED),
        **dict.fromkeys(("max_norm", "check_finite", "expert_bias_rate"), _NOT_TRAINED),
        **dict.fromkeys(("loss_scale", "loss_scale_growth", "loss_scale_backoff", "loss_scale_interval"), _NOT_TRAINED),
        **dict.fromkeys(("expert_load", "router_loss_counts", "pad_to_capacity"), "leave it out"),
        "lora_train": "leave it out: --lora alone says what is added to the model",
        "offload": "what is served is on the device",
        "replayable_routing": "leave it out: what is served neither takes decisions nor gives them",
        "packed": "a sequence that is served has its row",
        "place": "what is served is split as its use says",
        "pad": "a tp that divides the heads and the vocabulary",
        **dict.fromkeys(("sequence_parallel", "batch", "seq"), "leave it out: a step has any number of tokens"),
        "cuda_graphs": "--graphs says how many graphs a package for serving has",
    },
    "serve": dict.fromkeys(("block_size", "graph_policy", "graph_workload", "graphs", "batch_invariant"), _NOT_SERVED),
}
"""Options that packages of one purpose alone have, each with what to say to others. All other fields are for both."""

_OF_AXIS = {
    "zero": "fsdp",
    "keep_gathered": "fsdp",
    "wide_sums": "fsdp",
    "overlap": "dp",
    "sequence_parallel": "tp",
    "pad": "tp",
    "dispatch": "ep",
    "ep_chunks": "ep",
    "expert_extent": "ep",
    "expert_budget": "ep",
}
"""Fields that say how an axis is used."""

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(rf"\s*(\d+(?:\.\d*)?)\s*({'|'.join(_UNITS)})\s*")
JOINED = ("mesh", "pad", "arch", "offload", "disable")
"""Texts of several parts with commas between them, for which a file may have a list, and flags may be given again."""
_BELOW_ONE = (0, 0.999999)
"""A decay of 1 would never let go, and the correction of its bias divides by 1 - 1."""


def option(
    default: Any,
    help_text: str,
    choices: tuple[str, ...] = (),
    within: tuple[float, float] | None = None,
    otherwise: str = "",
) -> Any:
    """A recipe field: its default, what it means, and the values or the closed range of values it may take; `otherwise`
    is a hint for who gives another."""
    metadata = {"help": help_text, "choices": choices, "within": within, "otherwise": otherwise}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a package is."""

    model: str = option("", "what to compile: a zoo model (dense-tiny), file.py:factory, or hf:config.json")
    purpose: str = option("train", "what the package is for", ("train", "serve"))
    mesh: str = option("dp=*", "mesh axes and sizes, e.g. dp=2,tp=2; dp=* binds to the number of processes at launch")
    dispatch: str = option(
        "alltoall",
        "how tokens go over ep: each to the ranks that have its experts, or all to all ranks",
        ("alltoall", "allgather"),
    )
    ep_chunks: int = option(
        1,
        "with ep: in how many messages a layer's tokens go, one on its way while the experts work on another; it must "
        "divide --seq-len",
        within=(1, 64),
    )
    expert_extent: str = option(
        "bound",
        "with ep: room for the rows that a rank receives: for all tokens of all ranks, or for exactly those that come, "
        "whose number the host waits for in each layer",
        ("bound", "host"),
    )
    expert_budget: float = option(
        0.0,
        "with ep: a rank has room for this times the rows that it receives in balance; a step that needs more ends the "
        "run with an error; 0: for all tokens of all ranks",
        within=(0, 1024),
    )
    router_loss_counts: str = option(
        "global",
        "what losses of routers count and average over: the tokens of all data ranks in a microbatch, or each rank's",
        ("global", "local"),
    )
    pad_to_capacity: bool = option(
        False,
        "experts of a model with a capacity_factor all have as many rows as their capacity, zeros where they have no "
        "token: with ep, messages and products of one size whatever routers choose",
    )
    place: tuple[str, ...] = option(
        (), "where parameters lie over a mesh axis, instead of as their use says: 'PATTERN|PATTERN: S(1)@tp' or R@tp"
    )
    sequence_parallel: bool = option(
        False, "with tp: between the blocks of a layer activations lie split along the sequence, which tp must divide"
    )
    pad: str = option("", "with tp: what is made longer by zeros where tp does not divide it: heads, vocab, or both")
    zero: int = option(
        3, "what ranks along fsdp share: 1 the optimizer's state, 2 gradients too, 3 parameters too", within=(1, 3)
    )
    keep_gathered: bool = option(
        False, "with fsdp: keep a layer's gathered parameters from its forward until its backward"
    )
    overlap: bool = option(
        False, "with dp: reduce each layer's gradients while the backward goes on, in the last microbatch of a step"
    )
    wide_sums: bool = option(False, "with fsdp: sum gradients narrower than fp32 over the ranks in fp32")
    precision: str = option("fp32", "dtype of the parameters and of the computation", ("fp32", "bf16", "fp16"))
    grad_dtype: str = option(
        "fp32",
        "dtype in which gradients are summed over microbatches: fp32, or param, that of their parameter",
        ("fp32", "param"),
    )
    one_microbatch: bool = option(
        False, "a step has one microbatch on each data rank, which writes the gradients in place of adding them"
    )
    target: str = option(
        "h100",
        "the machine that kernels are chosen for",
        tuple(TARGET_ARCHS),
        otherwise="; for an H200, --target h100 --profile h200",
    )
    arch: str = option(
        "", "GPU architectures to build kernels for, comma-separated, or none (default: the target's, sm_90a for h100)"
    )
    profile: str = option(
        "", "times that providers are chosen by: a name, or a file that mgraph tune wrote (default: the target's)"
    )
    provider: tuple[str, ...] = option(
        (), "who runs a family of ops on a GPU, wherever it can, comma-separated, e.g. attention=flash,rope=torch"
    )
    output: str = option("", "the package's directory (default: build/MODEL-PURPOSE)")
    recompute: str = option(
        "none",
        "which layer activations the backward computes again: none, all, or the cheapest that meet activation_budget",
        ("none", "selective", "full"),
    )
    activation_budget: str = option(
        "", "with recompute selective: bytes of saved activations of a microbatch, e.g. 20GiB"
    )
    memory_budget: str = option(
        "",
        "bytes that a rank may need in all, e.g. 40GiB: recompute and offload are chosen such that it fits, or when "
        "serving the CUDA graphs and the cache",
    )
    batch: int = option(8, "sequences of the microbatch that budgets and providers are chosen for", within=(1, 2**31))
    seq: int = option(2048, "tokens per sequence that budgets and providers are chosen for", within=(1, 2**31))
    offload: str = option(
        "",
        "what waits on the host: optimizer (masters and moments), activations, or activations=BYTES of a layer",
    )
    chunk_loss: str = option(
        "", "bytes of logits to have at once in training, e.g. 512MiB: the loss takes some rows at a time (empty: all)"
    )
    optimizer: str = option("adamw", "AdamW, or Adam with weight decay as part of the gradient (L2)", ("adamw", "adam"))
    weight_decay: float = option(0.01, "weight decay, for parameters of two dims or more", within=(0, 10))
    groups: tuple[str, ...] = option(
        (), "a rule for parameters by name, the first that matches: 'PATTERN|PATTERN: weight_decay=0, lr=0.1, frozen'"
    )
    lora: tuple[str, ...] = option(
        (), "train adapters of low rank for linears by name: 'PATTERN|PATTERN: rank=8, alpha=16, dropout=0.05, rslora'"
    )
    lora_train: str = option("", "with lora: parameters that are trained besides, e.g. '*norm*|*.bias'")
    beta1: float = option(0.9, "decay of the first moment", within=_BELOW_ONE)
    beta2: float = option(0.95, "decay of the second moment", within=_BELOW_ONE)
    eps: float = option(1e-8, "the optimizer's epsilon", within=(0, 1))
    max_norm: float = option(1.0, "clip the gradient's norm to this; 0: never", within=(0, 1e9))
    check_finite: str = option(
        "gradients",
        "what is finite before a step changes parameters: gradients and loss, or the loss alone, for packages that do "
        "not clip: there the update gives the norm, which then costs nothing, and train.py ends at one not finite",
        ("gradients", "loss"),
    )
    expert_bias_rate: float = option(
        0.0, "after each step, move the routers' selection biases by this towards equal load; 0: never", within=(0, 1)
    )
    expert_load: bool = option(False, "log how many tokens each expert gets, per layer and step")
    replayable_routing: bool = option(
        False, "routers take recorded decisions and give those they took: the input and output routing"
    )
    loss_scale: float = option(
        65536.0, "with fp16: the factor that the loss's gradient begins with", within=(1, 2**100)
    )
    loss_scale_growth: float = option(2.0, "with fp16: how the loss scale grows", within=(1, 2**20))
    loss_scale_backoff: float = option(0.5, "with fp16: how the loss scale shrinks at an overflow", within=(1e-6, 1))
    loss_scale_interval: int = option(2000, "with fp16: clean steps before the loss scale grows", within=(1, 2**31))
    loss_mask: bool = option(False, "add the input loss_mask f32[B, S], a weight per target")
    packed: bool = option(False, "several documents share a row: add the inputs position_ids and segment_ids i64[B, S]")
    max_length: int = option(
        0, "the longest sequence, prompt and continuation when serving (0: as the model says)", within=(0, 2**31)
    )
    block_size: int = option(16, "when serving: rows of a block of the cache, a power of two", within=(1, 1024))
    graph_policy: str = option(
        "planned",
        "when serving on GPUs: which sizes of steps are CUDA graphs, those that pad least or a list by name",
        ("planned", "linear", "exponential"),
    )
    graph_workload: str = option(
        "", "a JSON list of [tokens, requests, how often] that the graphs are chosen for (empty: every doubling alike)"
    )
    graphs: int = option(24, "when serving on GPUs: the most CUDA graphs", within=(1, 1000))
    batch_invariant: bool = option(
        False,
        "when serving on GPUs: kernels that compute a row alike whatever else is in a step, which mgraph serve "
        "--batch-invariant asks for; slower",
    )
    cuda_graphs: str = option(
        "planned",
        "when training on GPUs: an entry of the step is one CUDA graph, or where it cannot be, calls of layer "
        "functions or of parts of them are; always these; or nothing is",
        ("planned", "layers", "off"),
    )
    disable: str = option("", "passes to leave out: names or patterns, comma-separated (raise-*)")
    verify: bool = option(False, "check every pass with the interpreter, all ranks, on a reduced twin of the model")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, choices, within = getattr(self, field.name), field.metadata["choices"], field.metadata["within"]
            if choices and value not in choices:
                hint = did_you_mean(str(value), choices) + field.metadata["otherwise"]
                raise OptionError(f"{field.name} is {value!r}", where=flag_of(field.name), hint=hint)
            if within and not within[0] <= value <= within[1]:  # written so that nan fails too
                hint = "a value from {} to {}".format(*(int(end) if end == int(end) else end for end in within))
                raise OptionError(f"{field.name} is {value!r}", where=flag_of(field.name), hint=hint)
        # One spelling, so that recipes that mean the same have equal fingerprints.
        object.__setattr__(self, "groups", tuple(parse_group(rule).text for rule in self.groups))
        object.__setattr__(self, "lora", tuple(parse_adapter(rule).text for rule in self.lora))
        object.__setattr__(self, "place", tuple(parse_placement(rule).text for rule in self.place))
        object.__setattr__(self, "provider", tuple(part for rule in self.provider for part in _parts(rule)))
        object.__setattr__(self, "pad", ",".join(self.padded))
        limit = f"={self.offload.partition('=')[2].partition(',')[0].strip()}" if self.offload_limit else ""
        object.__setattr__(self, "offload", ",".join(self.offloaded).replace("activations", f"activations{limit}"))
        other = "serve" if self.purpose == "train" else "train"
        for name, hint in OF_PURPOSE[other].items():
            if getattr(self, name) != getattr(Recipe, name):
                raise OptionError(f"{name} is for {_PURPOSES[other]}", where=flag_of(name), hint=hint)
        if self.one_microbatch and self.overlap:
            problem = "one_microbatch and overlap do not go together: the last microbatch adds to those before it"
            raise OptionError(problem, where="--one-microbatch", hint="without --overlap, or without --one-microbatch")
        if self.batch_invariant and self.provider:
            problem = "batch_invariant has our kernels alone: what others give for a row depends on how many there are"
            raise OptionError(problem, where="--provider", hint="without --provider, or without --batch-invariant")
        if self.batch_invariant and (self.mesh_axes().get("tp") or 1) > 1:
            problem = "batch_invariant is for one rank: the order of sums of several ranks follows their size"
            raise OptionError(problem, where="--batch-invariant", hint="without tp, or without --batch-invariant")
        if self.check_finite == "loss" and (self.max_norm or self.precision == "fp16"):
            what = "clips gradients" if self.max_norm else "scales the loss by what gradients hold"
            problem = f"the update {what}: their norm comes before it in any case"
            hint = "--max-norm 0" if self.max_norm else "--precision bf16"
            raise OptionError(problem, where="--check-finite", hint=f"{hint}, or --check-finite gradients")
        if self.lora_train and not self.lora:
            raise OptionError("there is no adapter", where="--lora-train", hint="--lora says which linears get one")
        if (self.recompute == "selective") != bool(self.activation_budget):
            hint = (
                "--recompute selective --activation-budget 20GiB go together; --memory-budget 40GiB chooses by itself"
            )
            problem = f"recompute is {self.recompute}, and activation_budget is {self.activation_budget or 'not given'}"
            raise OptionError(problem, where="--activation-budget", hint=hint)
        assert min(self.budget, self.kept_budget, self.loss_budget) >= 0, "budgets are numbers of bytes"
        for arch in self.archs:
            if arch not in ARCHS:
                raise OptionError(
                    f"unknown GPU architecture {arch!r}", where="--arch", hint=f"one of {', '.join(ARCHS)}, or none"
                )
        if self.cuda_graphs == "layers" and not self.archs:
            hint = "--target h100" if self.target == "cpu" else "without --arch none"
            problem = "cuda_graphs is layers, and the package has no kernels for a GPU"
            raise OptionError(problem, where="--cuda-graphs", hint=f"{hint}, or without --cuda-graphs")
        if self.block_size & (self.block_size - 1):
            problem = f"block_size is {self.block_size}"
            raise OptionError(problem, where="--block-size", hint="a power of two, e.g. 16")
        if self.max_length == 1:
            raise OptionError("max_length is 1", where="--max-length", hint="sequences of at least 2 tokens")
        axes = {*(["ep"] if self.expert_axes() else []), *self.mesh_axes()}
        if not axes:
            raise OptionError("the mesh is empty", where="--mesh", hint="dp=1 for one process, dp=* for any number")
        for name, axis in _OF_AXIS.items():
            if getattr(self, name) != getattr(Recipe, name) and axis not in axes:
                hint = f"--mesh {self.mesh},{axis}=2, or without {flag_of(name)}"
                raise OptionError(f"the mesh {self.mesh} has no axis {axis}", where=flag_of(name), hint=hint)
        if self.keep_gathered and self.zero != 3:
            problem = f"with --zero {self.zero} parameters are whole, and nothing is gathered"
            raise OptionError(problem, where="--keep-gathered", hint="--zero 3, or without --keep-gathered")

    @property
    def directory(self) -> Path:
        """Where the package goes."""
        return Path(self.output) if self.output else Path("build") / f"{self.model_name}-{self.purpose}"

    @property
    def model_name(self) -> str:
        """A short name for the model: the zoo's, the factory's, or the directory of a configuration."""
        text = self.model.removeprefix("hf:")
        if self.model.startswith("hf:"):
            path = Path(text)
            return path.resolve().parent.name if path.name == "config.json" else path.stem
        return text.rpartition(":")[2] if ":" in text else Path(text).stem

    def mesh_axes(self) -> dict[str, int | None]:
        """The mesh as axis name to size (`None`: `*`), in the order of MESH_AXES. Raises OptionError."""
        axes: dict[str, int | None] = {}
        for part in self.mesh.split(",") if self.mesh.strip(", ") else ():
            name, equals, size = part.strip().partition("=")
            if name == "ep" and size[:1].isalpha():
                continue  # no axis of its own: expert_axes
            if not equals or not (size == "*" or (size.isdecimal() and int(size) > 0)):
                hint = "NAME=SIZE, with a size of at least 1, a whole number, e.g. dp=2; dp alone may be *"
                raise OptionError(f"mesh axis {part!r}", where="--mesh", hint=hint)
            if name not in MESH_AXES:
                hint = "data-parallel dp, fully sharded fsdp, tensor-parallel tp and expert-parallel ep"
                raise OptionError(f"mesh axis {name!r} is not supported", where="--mesh", hint=hint)
            if name != "dp" and size == "*":
                raise OptionError(f"the mesh axis {name} has no size", where="--mesh", hint=f"a number: {name}=2")
            if self.purpose == "serve" and name != "tp" and (name, size) not in (("dp", "*"), ("dp", "1")):
                hint = "tp=N, to serve; of copies of a model each has a server of its own"
                raise OptionError(f"the mesh axis {name} is for training", where="--mesh", hint=hint)
            if name in axes:
                raise OptionError(f"mesh axis {name!r} is given twice", where="--mesh", hint="each axis once")
            axes[name] = None if size == "*" else int(size)
        return {name: axes[name] for name in MESH_AXES if name in axes}

    def expert_axes(self) -> tuple[str, ...]:
        """The data axes whose ranks share the experts, major first: of `ep=2` its own, of `ep=dp*fsdp` these.

        Raises OptionError where one is no data axis of the mesh with a size.
        """
        given = [p.strip().partition("=")[2] for p in self.mesh.split(",") if p.strip().startswith("ep=")]
        if not given:
            return ()
        axes = self.mesh_axes()
        if given == [str(axes.get("ep"))]:
            return ("ep",)
        parts = given[0].split("*")
        for part in parts:
            if len(given) > 1 or part not in ("dp", "fsdp") or axes.get(part) is None or parts.count(part) > 1:
                hint = "ep=2, or data axes of the mesh that have sizes: dp=2,fsdp=2 with ep=dp, ep=fsdp or ep=dp*fsdp"
                raise OptionError(f"the mesh {self.mesh} does not say over which axes experts lie", "--mesh", hint)
        return tuple(axis for axis in axes if axis in parts)

    @property
    def expert_ranks(self) -> int:
        """Over how many ranks the experts lie; 1 without ep."""
        axes = self.mesh_axes()
        return math.prod(axes[axis] or 1 for axis in self.expert_axes())

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The data axes over whose ranks losses count tokens together."""
        counted = self.purpose == "train" and self.router_loss_counts == "global"
        axes = {axis: size for axis, size in self.mesh_axes().items() if axis != "tp" and size != 1}
        return tuple(axes) if counted else ()

    def placements(self) -> dict[str, tuple[str, ...]]:
        """The rules of `place` by axis. Raises OptionError for a rule of an axis that takes none."""
        # Not known before file and flags are put together, either of which may have the mesh.
        made: dict[str, tuple[str, ...]] = {}
        for axis, text in ((parse_placement(rule).axis, rule) for rule in self.place):
            if axis not in self.mesh_axes() or axis not in PLACING_AXES:
                absent = axis not in self.mesh_axes()
                missing = "the mesh has not" if absent else "splits no layers"
                takes = f"only {', '.join(PLACING_AXES)} takes placements"
                hint = f"--mesh {self.mesh},{axis}=2" if absent and axis in PLACING_AXES else takes
                raise OptionError(f"the placement '{text}' is for an axis that {missing}", "--place", hint)
            made[axis] = (*made.get(axis, ()), text)
        return made

    @property
    def archs(self) -> tuple[str, ...]:
        """GPU architectures to build kernels for."""
        return _parts("" if self.arch == "none" else self.arch or TARGET_ARCHS[self.target])

    @property
    def profile_name(self) -> str:
        """The profile that providers are chosen by, a name or a file."""
        return self.profile or (self.target if TARGET_ARCHS[self.target] else "h100")

    @property
    def budget(self) -> int:
        """The memory budget in bytes; 0 where none is given."""
        return self._bytes_of("memory_budget", "40GiB")

    @property
    def kept_budget(self) -> int:
        """Bytes of saved activations; 0 where no number is given."""
        return self._bytes_of("activation_budget", "20GiB")

    @property
    def loss_budget(self) -> int:
        """Bytes of logits at once; 0 for all of them."""
        return self._bytes_of("chunk_loss", "512MiB")

    def _bytes_of(self, field: str, example: str) -> int:
        text = getattr(self, field)
        match = _SIZE.fullmatch(text or "0B")
        if match is None or (text and float(match[1]) <= 0):
            hint = f"a number above 0 and one of {', '.join(_UNITS)}, e.g. {example}"
            raise OptionError(f"{field} is {text!r}", where=flag_of(field), hint=hint)
        return _bytes(text or "0B")

    @property
    def padded(self) -> tuple[str, ...]:
        """What is padded, in the order of PADDABLE. Raises OptionError."""
        return self._chosen("pad", PADDABLE, "padded")

    @property
    def offloaded(self) -> tuple[str, ...]:
        """What waits on the host, in the order of OFFLOADABLE. Raises OptionError."""
        return self._chosen("offload", OFFLOADABLE, "offloaded")

    @property
    def offload_limit(self) -> int:
        """How many bytes of what a call of a layer saves wait on the host; 0 for all. Raises OptionError."""
        given = _parts(self.offload)
        names = [part.partition("=")[0].strip() for part in given]
        if len(set(names)) < len(names):
            raise OptionError(f"offload is {self.offload!r}", where="--offload", hint="name each thing once")
        for part in given:
            name, equals, size = part.partition("=")
            if equals and (name.strip() != "activations" or _SIZE.fullmatch(size) is None or not _bytes(size)):
                hint = f"activations=BYTES, a number and one of {', '.join(_UNITS)}, e.g. activations=200MiB"
                raise OptionError(f"offload is {part!r}", where="--offload", hint=hint)
            if equals:
                return _bytes(size)
        return 0

    def _chosen(self, field: str, known: tuple[str, ...], participle: str) -> tuple[str, ...]:
        """The parts of a field, in the order of those known; of an offloaded one the name alone."""
        given = tuple(
            part.partition("=")[0].strip() if field == "offload" else part for part in _parts(getattr(self, field))
        )
        for part in given:
            if part not in known:
                hint = did_you_mean(part, known) or f"any of {', '.join(known)}"
                raise OptionError(f"{part!r} cannot be {participle}", where=flag_of(field), hint=hint)
        return tuple(what for what in known if what in given)

    def patterns(self) -> tuple[str, ...]:
        """Passes to leave out."""
        return _parts(self.disable)


def _bytes(text: str) -> int:
    """A size as it is written, in bytes."""
    match = _SIZE.fullmatch(text)
    assert match is not None, f"{text!r} is no size"
    return int(float(match[1]) * _UNITS[match[2]])


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def flag_of(field: str) -> str:
    """The command line flag of a recipe field."""
    return {"purpose": "--for", "model": "MODEL"}.get(field, "--" + field.replace("_", "-"))


def read_recipe(path: Path | None, flags: Mapping[str, Any]) -> Recipe:
    """The recipe of a YAML file (none: the defaults) and of the flags given. Raises OptionError with file and field."""
    recipe = Recipe() if path is None else _checked(path, _read_yaml(path))
    recipe = dataclasses.replace(recipe, **flags)
    if not recipe.model:
        hint = "mgraph compile MODEL, e.g. dense-tiny, file.py:factory or hf:config.json"
        raise OptionError("no model is named", where=str(path) if path else "MODEL", hint=hint)
    return recipe


def _checked(path: Path, values: dict[str, Any]) -> Recipe:
    """The recipe of a file's fields, errors naming the file. `for` is the flag's name for `purpose`."""
    if "for" in values:
        values["purpose"] = values.pop("for")
    fields = {f.name: f for f in dataclasses.fields(Recipe)}
    for name, value in values.items():
        if name not in fields:
            raise OptionError(f"unknown field {name!r}", where=str(path), hint=did_you_mean(name, fields))
        values[name] = _fitted(path, fields[name], value)
    try:
        return Recipe(**values)
    except OptionError as error:
        field = f", field {error.where.replace('--', '')}" if error.where else ""
        raise OptionError(error.message, f"{path}{field}", error.hint) from error


def _fitted(path: Path, field: dataclasses.Field[Any], value: Any) -> Any:
    """A value of a file as the field has it. Raises OptionError where it is of another type."""
    wanted, name = type(field.default), field.name
    if wanted is str and value is False and "off" in field.metadata["choices"]:
        return "off"  # which YAML 1.1 reads as no
    if wanted is str and type(value) in (int, float):
        return str(value)  # what is no size or name is said where it is read
    if wanted is str and name in JOINED and isinstance(value, list):
        return ",".join(map(str, value))
    if wanted is tuple and isinstance(value, str):
        return (value,)
    if wanted is float and type(value) in (int, str):
        # YAML 1.1 reads 1e-8, which has no dot, as text.
        with suppress(ValueError):
            return float(value)
    if wanted is tuple and isinstance(value, list):
        return tuple(value)
    if type(value) is not wanted:
        kind = {str: "text", int: "a whole number", float: "a number", bool: "true or false", tuple: "a list"}[wanted]
        raise OptionError(f"{name} is {value!r}", where=str(path), hint=f"give {kind}")
    return value


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "-c takes the path of a YAML file"
        raise OptionError(f"cannot read the recipe: {error.strerror}", where=str(path), hint=hint) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"not YAML: {' '.join(str(error).split())}", where=str(path)) from error
    if not isinstance(loaded, dict):
        raise OptionError("a recipe is a mapping of fields to values", where=str(path), hint="e.g. `model: dense-tiny`")
    return {str(k).replace("-", "_"): v for k, v in loaded.items()}
