"""joint-losses: what a loss takes from all tokens of a microbatch is taken from those of all data ranks.

The balance loss of a router is E * sum over e of (share of the choices that are e) * (mean probability of e). With
`over=dp`, before:

    %counts = aten.index_add(%zeros, %chosen, %ones)        %mean = aten.mean(%probabilities) {dim = [0]}
    %loss = … (%counts / sum(%counts)) * %mean …            %loss_sum = %cross_entropy + %loss * %count

After:

    %counts = aten.index_add(…)                             %mean = aten.mean(…)
    %counts_joint = joint_sum(%counts) {axis = "dp"}        %mean_share = axis_share(%mean) {axis = "dp"}
    %loss = … (%counts_joint / sum(%counts_joint)) * %mean_share …
    %count_joint = joint_sum(%count) {axis = "dp"}          %loss_sum = %cross_entropy + %loss * %count_joint

so that the ranks' `loss_sum` add up to that of one device with all their tokens, and so do their gradients. The pass of
the axis makes an `all_reduce` of each `joint_sum`: one of E numbers for each router, and one of the count.

How: a value without a token dim that is a sum over tokens, or linear in such sums, is a *part*: the ranks' parts add up
to it. A mean is a part once it is divided by the number of ranks. Parts stay parts through what is linear; where one is
needed whole (a denominator, one of two factors, anything else) it is summed over the ranks: sums to which no gradient
flows (counts) where they are made, which spares the backward a sum of its own. This is done only for values of which
nothing but losses is made: what tokens read again, such as ends of groups of rows, is of each rank. Where a loss takes
something of all tokens that is no sum (a maximum), all losses stay as they were, and the near miss says so. With
`over=[]` they are to stay so, which is refused where a model has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mgraph.errors import PassError
from mgraph.ir.builder import FunctionBuilder, rebuild
from mgraph.ir.facts import dependent
from mgraph.ir.graph import Function, Module, Node, Value
from mgraph.passes.base import Pass, Report, Stage, Tier
from mgraph.passes.calls import callee, roots
from mgraph.passes.expert_ways import TAKES
from mgraph.passes.loss_cone import Cone, additive, bilinear, created, divides_by_tokens, is_zero, linear, mentions

FIXED, JOINT, PART, OWN = "fixed", "joint", "part", "own"
"""What a value without tokens is: of no token; the same on all ranks; a part of a sum; of this rank's tokens alone."""


@dataclass(frozen=True)
class JointLosses(Pass):
    """Sum what losses take from all tokens of a microbatch over the axes of `over`; of none, it stays each rank's."""

    over: tuple[str, ...] = ("dp",)

    name: ClassVar[str] = "joint-losses"
    stage: ClassVar[Stage] = Stage.DERIVE
    tier: ClassVar[Tier] = Tier.BITWISE
    requires: ClassVar[frozenset[str]] = frozenset({"forward"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"microbatch", "data-parallel", "fully-shard"})

    def run(self, module: Module, report: Report) -> Module:
        """Rewrite the functions of all entries, or none of them. Raises PassError where no loss is there to stay."""
        rewriting = _Rewriting(module, self, dependent(module.dims, "B"))
        try:
            rewriting.all()
        except _NoSum as why:
            if not self.over:
                return module
            report.near_miss(why.function, why.node.id, "a loss of all ranks' tokens", "sums over tokens", str(why))
            return module
        if not self.over:
            if not rewriting.sums and not any(node.op in TAKES for _, node in module.walk()):
                hint = "leave it out; the mean over targets is that of all ranks in any case"
                raise PassError(
                    "no experts were found in the model, and no loss of its own", "--router-loss-counts", hint
                )
            return module
        for function, node, detail in rewriting.sums:
            report.match(function, node, detail)
        return replace(module, functions={**module.functions, **rewriting.done}) if rewriting.sums else module


class _NoSum(Exception):
    """A loss that cannot be put together from ranks' parts."""

    def __init__(self, function: str, node: Node, why: str) -> None:
        super().__init__(f"{why}, at {node.origin}")
        self.function, self.node = function, node


@dataclass
class _Rewriting:
    """The functions of a module while they are rewritten; `given` is what calls hand to each."""

    module: Module
    options: JointLosses
    batch: frozenset[str]
    done: dict[str, Function] = field(default_factory=dict)
    sums: list[tuple[str, str, str]] = field(default_factory=list)
    given: dict[str, list[str]] = field(default_factory=dict)
    results: dict[str, list[str]] = field(default_factory=dict)

    def all(self) -> None:
        """Rewrite all, again as long as calls hand over what those before did not."""
        self.cone = Cone(self.module, self.batch)
        again = True
        while again:
            before = {name: list(kinds) for name, kinds in self.given.items()}
            self.done, self.sums, self.results = {}, [], {}
            for name in roots(self.module):
                function = self.module.functions[name]
                cone = self.cone.of(function)
                self.function(function, [OWN if cone.of_tokens(v) else FIXED for v in function.inputs()])
            again = before != self.given

    def function(self, function: Function, given: Sequence[str]) -> Sequence[str]:
        """Rewrite a function, once; what its results are."""
        known = self.given.setdefault(function.name, list(given))
        for index, (old, new) in enumerate(zip(known, given, strict=True)):
            known[index] = _met(old, new)
        if function.name not in self.results:
            body = _Body(self, function, rebuild(function, self.options.name))
            self.results[function.name] = body.rewrite(known)
        return self.results[function.name]


def _met(one: str, other: str) -> str:
    """What a parameter is that calls hand different things."""
    if one == other:
        return one
    return OWN if OWN in (one, other) else PART if PART in (one, other) else JOINT


@dataclass
class _Body:
    """One function while it is rewritten."""

    owner: _Rewriting
    source: Function
    builder: FunctionBuilder
    kinds: dict[Value, str] = field(default_factory=dict)
    whole: dict[Value, Value] = field(default_factory=dict)
    """Parts that were summed over the ranks."""
    counts: set[Value] = field(default_factory=set)
    """Those of them that are read so by all that is not told as it is."""

    def rewrite(self, given: Sequence[str]) -> list[str]:
        """Rewrite it; what its results are."""
        self.cone = self.owner.cone.of(self.source)
        self.kinds.update(zip(self.source.inputs(), given, strict=True))
        for node in self.source.nodes:
            with self.builder.at(node):
                self._node(node)
        made = [self._result(value) for value in self.source.results]
        self.owner.done[self.source.name] = self.builder.build([value for value, _ in made])
        return [kind for _, kind in made]

    def _result(self, value: Value) -> tuple[Value, str]:
        """A result and what it is; those of an entry are parts."""
        kind = self._kind(value, told=self.cone.told_by(value))
        given = self._given(value, kind)
        if self.source.name in self.owner.cone.roots and self.cone.pure(value) and kind in (FIXED, JOINT):
            node = self.source.producers().get(value, self.source.nodes[-1])
            return self._share(given, node), PART
        return given, kind

    def _kind(self, value: Value, *, told: bool = False) -> str:
        """What a value is; whether it is told as it is says how a count is read."""
        if value.is_state or value in self.source.slots:
            return FIXED
        if self.cone.of_tokens(value):
            return OWN
        return JOINT if value in self.counts and not told else self.kinds[value]

    def _node(self, node: Node) -> None:
        if node.op == "call":
            self._call(node)
            return
        read = self.source.users()
        results = [v for v in node.results if not self.cone.of_tokens(v) or v in read or v in self.source.results]
        if not all(self.cone.pure(v) for v in results):
            self.builder.keep(node)
            fixed = all(self._kind(v, told=True) == FIXED for v in node.operands)
            kind = FIXED if fixed and not mentions(node, self.owner.batch) else OWN
            self.kinds.update((v, kind) for v in node.results)
        elif any(self.cone.of_tokens(v) for v in node.operands):
            self._made_of_tokens(node)
        else:
            self._made_of_parts(node)

    def _call(self, node: Node) -> None:
        body = self.owner.module.functions[callee(node)]
        kinds = [self._kind(v) for v in node.operands]
        made = self.owner.function(body, kinds)
        operands = []
        for value, kind, wanted in zip(node.operands, kinds, self.owner.given[body.name], strict=True):
            given = self._given(value, kind)
            operands.append(self._share(given, node) if wanted == PART and kind in (FIXED, JOINT) else given)
        self.builder.nodes.append(replace(node, operands=tuple(operands)))
        self.kinds.update(zip(node.results, made, strict=True))

    def _made_of_tokens(self, node: Node) -> None:
        """A sum or a mean over tokens is a part; anything else is of this rank."""
        self.builder.keep(node)
        made = created(node, self.source)
        self.kinds.update((v, PART if made else OWN) for v in node.results)
        if made == "mean":
            self.builder.replace(node.result, self._share(node.result, node))
        elif made == "sum" and not self.cone.differentiable(node.results[0]) and not self._is_told(node):
            self._whole(node.results[0])
            self.counts.add(node.results[0])

    def _made_of_parts(self, node: Node) -> None:
        told = self._is_told(node)
        kinds = [self._kind(v, told=told) for v in node.operands]
        by_tokens = divides_by_tokens(node, self.owner.batch) and kinds[0] in (PART, JOINT)
        if mentions(node, self.owner.batch) and not by_tokens:
            kinds.append(OWN)  # of how many tokens a rank has
        if set(kinds) <= {FIXED, OWN}:
            self._keep(node, OWN if OWN in kinds else FIXED)
        elif OWN in kinds:
            if not (additive(node) and told):
                raise _NoSum(self.source.name, node, f"{node.op} takes of the tokens what is no sum over them")
            self._keep(node, OWN)
        elif PART not in kinds:
            self._keep(node, JOINT)
        elif linear(node):
            self._keep(node, PART)
        elif additive(node):
            self._sum(node, kinds)
        elif bilinear(node):
            self._product(node, kinds)
        elif node.op == "aten.div.Tensor":
            self._keep(node, PART if kinds[0] == PART else JOINT, whole=node.operands[1:])
        else:
            self._keep(node, JOINT, whole=node.operands)
        if by_tokens:
            self.builder.replace(node.result, self._share(node.result, node))

    def _is_told(self, node: Node) -> bool:
        return self.cone.told(node.results[0])

    def _sum(self, node: Node, kinds: Sequence[str]) -> None:
        """Of what all ranks have each adds its share; of zeros there is none."""
        operands = []
        for value, kind in zip(node.operands, kinds, strict=True):
            given = self._given(value, kind)
            operands.append(given if kind == PART or is_zero(value, self.source) else self._share(given, node))
        self.builder.nodes.append(replace(node, operands=tuple(operands)))
        self.kinds[node.result] = PART

    def _product(self, node: Node, kinds: Sequence[str]) -> None:
        """Of two parts one is summed: that to which no gradient flows, else the smaller."""
        whole: list[Value] = []
        if list(kinds) == [PART, PART]:
            whole = [min(node.operands, key=lambda v: (self.cone.differentiable(v), len(v.tensor.shape)))]
        self._keep(node, PART, whole=whole)

    def _keep(self, node: Node, kind: str, whole: Sequence[Value] = ()) -> None:
        """Append a node, of which some operands are read whole."""
        told = self._is_told(node)
        operands = []
        for value in node.operands:
            known = self._kind(value, told=told)
            operands.append(self._whole(value) if known == PART and value in whole else self._given(value, known))
        self.builder.nodes.append(replace(node, operands=tuple(operands)))
        self.kinds.update((v, kind) for v in node.results)

    def _given(self, value: Value, kind: str) -> Value:
        return self.whole[value] if kind == JOINT and value in self.counts else self.builder.value(value)

    def _whole(self, value: Value) -> Value:
        """The sum of a part over the ranks."""
        if value not in self.whole:
            total = self.builder.value(value)
            for axis in self.owner.options.over:
                total = self.builder.one("joint_sum", total, name=f"{value.name}_joint", axis=axis)
            self.whole[value] = total
            over = ", ".join(self.owner.options.over)
            self.owner.sums.append((self.source.name, value.name, f"{value.tensor} summed over {over}"))
        return self.whole[value]

    def _share(self, value: Value, node: Node) -> Value:
        """A rank's share of what all ranks have alike."""
        if not value.tensor.dtype.is_float:
            raise _NoSum(self.source.name, node, f"of %{value.name}, a whole number that is no sum, there is no share")
        name = value.name
        for axis in self.owner.options.over:
            value = self.builder.one("axis_share", value, name=f"{name}_share", axis=axis)
        return value
