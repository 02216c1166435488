"""Profiles of machines: rates, a model of cost for each provider, and times that were measured, by op instance.

A profile is a JSON file, one that is committed (`profiles/NAME.json`) or one that `mgraph tune` wrote:

    name, card, arch, versions      the machine, and the libraries that times were measured with
    rates                           bytes_per_second of a copy, link_bytes_per_second between GPUs,
                                    flops_per_second of a matrix product by dtype, launch_seconds
    models                          of an op (* any) on a provider: the parts of these rates that it reaches (`memory`,
                                    `math`), how often it moves the least bytes (`passes`), its launches
    measured                        rows of op, attrs, sizes, provider, microseconds, bytes, flops, source, card, date

A time is `measured` where a row of this card has the very sizes; else it is `estimated`: what the model says, times
what the two nearest rows of the same op, provider, dtype and attributes took over what it says of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mgraph.codegen.profile_form import check_profile
from mgraph.errors import OptionError, did_you_mean
from mgraph.ir.dims import Dim, as_dim, evaluate
from mgraph.ir.graph import Node, Value
from mgraph.ir.opdef import is_known_op, op_def
from mgraph.ir.ops.cost import flops_of
from mgraph.ir.types import DType, TensorType

COMMITTED = Path(__file__).parent / "profiles"
_GATHERS = ("aten.embedding.default", "embedding_part", "aten.index_select.default")
_NUMBERS = ("scale", "eps", "ignore_index", "classes", "num_experts")
"""Attributes that change nothing of the work."""
FAR = 8.0
"""A row that is further away, in powers of two, says nothing."""
NEAREST = 2
"""Rows that an estimate is made of: providers overtake each other between sizes that were measured."""


@dataclass(frozen=True)
class Instance:
    """An op with all sizes as numbers: what a time is of. `sizes` are types of the operands (`bf16[8,128]`)."""

    op: str
    attrs: Mapping[str, Any]
    sizes: tuple[str, ...]
    bytes: int
    flops: int

    @staticmethod
    def of(node: Node, extents: Mapping[str, int]) -> Instance:
        """The instance that a node (with the types of one rank's parts) is, for extents of the named dims."""
        op = node.op.removesuffix("_")
        given = op_def(op).complete(node.attrs) if "." not in op and is_known_op(op) else dict(node.attrs)
        attrs: dict[str, Any] = json.loads(json.dumps(given, default=_attr_text, sort_keys=True))
        sizes = tuple(
            f"{type_.dtype.text}[{','.join(str(evaluate(d, extents)) for d in type_.shape)}]"
            for value in node.operands
            for type_ in _tensors(value)
        )
        moved = math.floor(evaluate(_bytes(node), extents))
        return Instance(op, attrs, sizes, moved, math.floor(evaluate(flops_of(node), extents)))

    @property
    def dtype(self) -> str:
        """That of the first operand; empty where there is none."""
        return self.sizes[0].partition("[")[0] if self.sizes else ""


def _attr_text(value: object) -> str:
    """An attribute that JSON has no form of."""
    return value.text if isinstance(value, DType) else str(value)


def _tensors(value: Value) -> tuple[TensorType, ...]:
    """The tensor that a value is, or those of a list."""
    if isinstance(value.type, TensorType):
        return (value.type,)
    under_way = getattr(value.type, "value", None)
    return (under_way,) if isinstance(under_way, TensorType) else tuple(getattr(value.type, "types", ()))


def _bytes(node: Node) -> Dim:
    """What a node moves at least: all that it reads and writes; of a table of rows those that are asked for."""
    reads = node.operands[1:] + node.results if node.op in _GATHERS else node.operands
    types = [type_ for value in (*reads, *node.results) for type_ in _tensors(value)]
    return as_dim(sum(type_.numel * type_.dtype.bits // 8 for type_ in types))


@dataclass(frozen=True)
class Row(Instance):
    """What an instance took on a provider, where and when that was measured."""

    provider: str
    microseconds: float
    source: str = ""
    card: str = ""
    date: str = ""


@dataclass(frozen=True)
class Cost:
    """How a provider runs an op: parts of the rates that it reaches, passes over the least bytes, launches."""

    op: str
    provider: str
    memory: float = 0.9
    math: float = 0.7
    passes: float = 1.0
    launches: int = 1


@dataclass(frozen=True)
class Time:
    """Microseconds of an instance, and whether they are `measured` or `estimated`."""

    microseconds: float
    basis: str

    def __str__(self) -> str:
        return f"{self.microseconds:.1f}" + ("" if self.basis == "measured" else "~")


@dataclass(frozen=True)
class Profile:
    """A machine, see above."""

    name: str
    card: str
    arch: str
    versions: Mapping[str, str]
    rates: Mapping[str, Any]
    models: tuple[Cost, ...]
    measured: tuple[Row, ...] = field(default=(), repr=False)

    def time(self, instance: Instance, provider: str) -> Time:
        """What an instance takes on a provider."""
        rows = [row for row in self.measured if (row.op, row.provider) == (instance.op, provider)]
        for row in rows:
            if (row.sizes, row.attrs, row.card) == (instance.sizes, instance.attrs, self.card):
                return Time(row.microseconds, "measured")
        found = [(distance(row, instance), row) for row in rows if _alike(row, instance)]
        near = sorted((pair for pair in found if pair[0] < FAR), key=lambda pair: pair[0])[:NEAREST]
        total, weights = 0.0, 0.0
        for far, row in near:
            weight = (far + 0.05) ** -2  # the nearer says more; one of the same sizes, nearly all
            total += weight * math.log(row.microseconds / self.model(row, provider))
            weights += weight
        factor = math.exp(total / weights) if near else 1.0
        return Time(self.model(instance, provider) * factor, "estimated")

    def model(self, instance: Instance, provider: str) -> float:
        """Microseconds by the rates alone."""
        cost = self.cost(instance.op, provider)
        flops = self.rates["flops_per_second"]
        rate = flops.get(instance.dtype, flops["f32"]) * cost.math
        if provider == "nccl":
            seconds = instance.bytes / self.rates["link_bytes_per_second"]
        else:
            moved = instance.bytes * cost.passes / (self.rates["bytes_per_second"] * cost.memory)
            seconds = max(moved, instance.flops / rate)
        return float(1e6 * (seconds + cost.launches * self.rates["launch_seconds"]))

    def cost(self, op: str, provider: str) -> Cost:
        """The model of an op on a provider: its own, or that of any op."""
        for wanted in (op, "*"):
            for model in self.models:
                if (model.op, model.provider) == (wanted, provider):
                    return model
        return Cost(op, provider)

    def with_rows(self, rows: Sequence[Row]) -> Profile:
        """The profile with more rows, which stand in the place of those of the same instances and providers."""
        keys = {(row.op, row.provider, row.sizes, json.dumps(row.attrs)) for row in rows}
        kept = [r for r in self.measured if (r.op, r.provider, r.sizes, json.dumps(r.attrs)) not in keys]
        return replace(self, measured=(*kept, *rows))

    def text(self) -> str:
        """The profile as JSON, a line per row."""
        head = {"name": self.name, "card": self.card, "arch": self.arch, "versions": dict(self.versions)}
        items = [f'"{key}": {json.dumps(value)}' for key, value in {**head, "rates": dict(self.rates)}.items()]
        for key, rows in (("models", self.models), ("measured", self.measured)):
            lines = ",\n  ".join(json.dumps(vars(row)) for row in rows)
            items.append(f'"{key}": [\n  {lines}\n ]' if rows else f'"{key}": []')
        return "{\n " + ",\n ".join(items) + "\n}\n"


def distance(row: Instance, instance: Instance) -> float:
    """How far two instances of an op are apart, in powers of two: their sizes, of each operand the sum over its dims
    and of these the mean, and a quarter of how far their work is, as providers overtake each other by that, too: of two
    rows whose sizes are as far, the one with as much work says more. Where operands are of other kinds, the work."""
    work = _powers(row.flops, instance.flops) if row.flops and instance.flops else _powers(row.bytes, instance.bytes)
    shapes = [[_shape(size) for size in i.sizes] for i in (row, instance)]
    if [len(shape) for shape in shapes[0]] == [len(shape) for shape in shapes[1]]:
        apart = [_powers(a, b) for one, other in zip(*shapes, strict=True) for a, b in zip(one, other, strict=True)]
        return sum(apart) / max(len(row.sizes), 1) + work / 4
    return max(_powers(row.bytes, instance.bytes), _powers(row.flops, instance.flops))


def _shape(size: str) -> list[int]:
    """The dims of `bf16[8,128]`."""
    return [int(dim) for dim in size.partition("[")[2].rstrip("]").split(",") if dim]


def _powers(a: int, b: int) -> float:
    """How many powers of two are between two numbers."""
    return abs(math.log2(max(a, 1) / max(b, 1)))


def _alike(row: Instance, instance: Instance) -> bool:
    """Whether two instances of an op differ in sizes alone: the count of operations knows how wide a window is."""
    kinds = [
        {name: value is None if name == "window" else value for name, value in i.attrs.items() if name not in _NUMBERS}
        for i in (row, instance)
    ]
    return row.dtype == instance.dtype and kinds[0] == kinds[1]


def committed_profiles() -> tuple[str, ...]:
    """The names of the profiles that come with mgraph."""
    return tuple(sorted(path.stem for path in COMMITTED.glob("*.json")))


def read_profile(given: str, flag: str = "--profile") -> Profile:
    """The profile of a committed name or of a file, given with `flag`. Raises OptionError where there is none, or where
    it is damaged."""
    path = Path(given)
    if path.suffix != ".json":
        path = COMMITTED / f"{given}.json"
        if given not in committed_profiles():
            hint = f"{did_you_mean(given, committed_profiles())}; or a file NAME.json that mgraph tune wrote"
            raise OptionError(f"no profile '{given}'", flag, hint)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        check_profile(data)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        hint = f"{', '.join(committed_profiles())}, or a file of mgraph tune; of a package: compile it again"
        raise OptionError(f"the profile cannot be read: {reason}", str(path), hint) from error
    models = tuple(Cost(**model) for model in data["models"])
    rows = tuple(Row(**{**row, "sizes": tuple(row["sizes"])}) for row in data["measured"])
    return Profile(data["name"], data["card"], data["arch"], data["versions"], data["rates"], models, rows)
