"""Each rule of the verifier, broken one way at a time in a valid module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from mgraph.errors import GraphError
from mgraph.ir.dims import Extent, NamedDim, symbol
from mgraph.ir.graph import Axis, Fact, Function, Module, Node, Origin, State, Static, Value
from mgraph.ir.parser import parse_module
from mgraph.ir.types import DType, Partial, Physical, Shard, TensorType, Type
from mgraph.ir.verifier import RULES, VerifierError, verify

B, S = symbol("B"), symbol("S")
Break = Callable[[Module], Module]


def edit(function: str, index: int, change: Callable[[Node], Node]) -> Break:
    """Change one node; readers of its results read the new ones."""

    def apply(module: Module) -> Module:
        body = module.functions[function]
        new = change(body.nodes[index])
        swapped = dict(zip(body.nodes[index].results, new.results, strict=False))
        later = [replace(n, operands=tuple(swapped.get(v, v) for v in n.operands)) for n in body.nodes[index + 1 :]]
        nodes = (*body.nodes[:index], new, *later)
        results = tuple(swapped.get(v, v) for v in body.results)
        return module.with_function(replace(body, nodes=nodes, results=results))

    return apply


def attrs(changes: Mapping[str, Any], drop: str = "") -> Callable[[Node], Node]:
    return lambda n: replace(n, attrs={**{k: v for k, v in n.attrs.items() if k != drop}, **changes})


def retype(change: Callable[[Any], Type], which: int = 0) -> Callable[[Node], Node]:
    def apply(node: Node) -> Node:
        results = list(node.results)
        results[which] = Value(results[which].name, change(results[which].type))
        return replace(node, results=tuple(results))

    return apply


def operands(change: Callable[[tuple[Value, ...]], tuple[Value, ...]]) -> Callable[[Node], Node]:
    return lambda n: replace(n, operands=change(n.operands))


def function(name: str, change: Callable[[Function], Function]) -> Break:
    return lambda m: m.with_function(change(m.functions[name]))


def state(name: str, **changes: Any) -> Break:
    return lambda m: replace(m, state={**m.state, name: replace(m.state[name], **changes)})


def dim(changed: NamedDim) -> Break:
    return lambda m: replace(m, dims={**m.dims, changed.name: changed})


def entry(**changes: Any) -> Break:
    return lambda m: replace(m, entries={"microbatch": replace(m.entries["microbatch"], **changes)})


def read_state_in_layer(module: Module) -> Module:
    step = module.state["step"].value
    return edit("layer", 4, operands(lambda o: (o[0], step)))(module)


def call_main_from_layer(module: Module) -> Module:
    main, layer = module.functions["main"], module.functions["layer"]
    results = tuple(Value(f"again_{i}", v.type) for i, v in enumerate(main.results))
    call = Node("call", main.params, results, {"callee": "main"}, origin=Origin("loop", "models/model.py", 77))
    return module.with_function(replace(layer, params=(*layer.params, *main.params), nodes=(*layer.nodes, call)))


def wait_twice(module: Module) -> Module:
    main = module.functions["main"]
    again = replace(main.nodes[3], results=(Value("sum_1", main.nodes[3].result.type),))
    return module.with_function(replace(main, nodes=(*main.nodes[:4], again, *main.nodes[4:])))


def return_pending(module: Module) -> Module:
    main = module.functions["main"]
    return module.with_function(replace(main, results=(*main.results[:1], main.nodes[2].result, *main.results[2:])))


LINES = {
    "y": "models/layers.py:31",
    "cut": "models/layers.py:32",
    "flat": "models/layers.py:33",
    "stored": "models/layers.py:34",
    "ragged": "models/layers.py:35",
    "h_1": "models/model.py:10",
    "h_2": "models/model.py:10",
    "begun": "models/model.py:12",
    "sum": "models/model.py:12",
    "grad": "models/model.py:13",
    "again_0": "models/model.py:77",
}
"""The source line of each node of the sample."""

NODE_BREAKS: list[tuple[str, str, str, Break]] = [
    # rule, part of the message, node, how to break the sample
    (
        "unique-names",
        "%y is defined twice",
        "y",
        edit("layer", 0, lambda n: replace(n, results=(n.results[0], Value("y", n.results[1].type)))),
    ),
    ("defined", "%nowhere is not defined", "cut", edit("layer", 1, operands(lambda o: (Value("nowhere", o[0].type),)))),
    (
        "defined",
        "%flat is not defined",
        "cut",
        lambda m: edit("layer", 1, operands(lambda o: (m.functions["layer"].nodes[2].result,)))(m),
    ),
    ("state-operands", "@step is read outside", "ragged", read_state_in_layer),
    (
        "state-operands",
        "@momen is not declared",
        "grad",
        edit("main", 4, operands(lambda o: (o[0], Value("momen", o[1].type, is_state=True)))),
    ),
    (
        "state-operands",
        "@moment is not declared",
        "grad",
        edit("main", 4, operands(lambda o: (o[0], Value("moment", o[1].type, is_state=True)))),
    ),
    ("phase", "'sideways' is no phase", "cut", edit("layer", 1, lambda n: replace(n, phase="sideways"))),  # type: ignore[arg-type]
    ("origin", "which pass", "cut", edit("layer", 1, lambda n: replace(n, made_by=""))),
    ("statics", "$windo is not a static", "cut", edit("layer", 1, attrs({"end": Static("windo")}))),
    ("statics", "$deep is not a static", "cut", edit("layer", 1, attrs({"x": (1, (Static("deep"),))}))),
    ("known-op", "unknown op 'rms_nrm'", "y", edit("layer", 0, lambda n: replace(n, op="rms_nrm"))),
    ("attrs", "lacks the attribute 'eps'", "y", edit("layer", 0, attrs({}, drop="eps"))),
    ("attrs", "has no attribute 'epsilon'", "y", edit("layer", 0, attrs({"epsilon": 1.0}))),
    ("dims-declared", "dim 'Q' is not declared", "cut", edit("layer", 1, retype(lambda t: t.with_shape(symbol("Q"))))),
    ("dims-declared", "dim 'Q' is not declared", "flat", edit("layer", 2, attrs({"shape": (symbol("Q") * 2, 64)}))),
    ("extents", "extent -1 is negative", "cut", edit("layer", 1, retype(lambda t: t.with_shape(-1)))),
    ("extents", "not in normal form", "cut", edit("layer", 1, retype(lambda t: replace(t, shape=(B * (S + 1),))))),
    ("placement", "no axis of the mesh", "cut", edit("layer", 1, retype(lambda t: t.place("cp", Shard(0))))),
    (
        "placement",
        "placed twice over tp",
        "cut",
        edit("layer", 1, retype(lambda t: t.place("tp", Shard(0)).place("ep", Shard(1)))),
    ),
    ("placement", "split along dim 3", "cut", edit("layer", 1, retype(lambda t: t.place("tp", Shard(3))))),
    ("placement", "no such factor", "cut", edit("layer", 1, retype(lambda t: t.place("tp", Shard(0, 1))))),
    ("placement", "partial by 'mean'", "cut", edit("layer", 1, retype(lambda t: t.place("tp", Partial("mean"))))),
    (
        "factors",
        "(2 31) do not multiply to 64",
        "flat",
        edit("layer", 2, retype(lambda t: replace(t, factors=((1, (2, 31)),)))),
    ),
    (
        "factors",
        "order of its dims",
        "flat",
        edit("layer", 2, retype(lambda t: replace(t, factors=((1, (2, 32)), (0, (B, S)))))),
    ),
    ("factors", "1 factor(s) of dim 1", "flat", edit("layer", 2, retype(lambda t: replace(t, factors=((1, (64,)),))))),
    (
        "physical",
        "stored with rank 1",
        "stored",
        edit("layer", 3, retype(lambda t: replace(t, physical=Physical((128,))))),
    ),
    (
        "physical",
        "scale without a block",
        "stored",
        edit("layer", 3, retype(lambda t: replace(t, physical=Physical(t.shape, DType.I8, DType.F32)))),
    ),
    ("callee", "no function 'laier'", "h_1", edit("main", 0, attrs({"callee": "laier"}))),
    ("recursion", "@main leads back to @layer", "again_0", call_main_from_layer),
    ("call-operands", "takes 2 params and 1 slots", "h_1", edit("main", 0, operands(lambda o: o[:2]))),
    (
        "call-operands",
        "but %cos of @layer is f32[S, 16]",
        "h_1",
        edit("main", 0, operands(lambda o: (o[0], o[0], o[2]))),
    ),
    ("call-results", "(f32[B, S, 64])", "h_1", edit("main", 0, lambda n: replace(n, results=n.results[:1]))),
    ("call-results", "f64", "h_2", edit("main", 1, retype(lambda t: t.with_dtype(DType.F64)))),
    ("call-statics", "does not supply $window", "h_1", edit("main", 0, attrs({}, drop="static.window"))),
    ("call-statics", "'scale', which is no static", "h_1", edit("main", 0, attrs({"static.scale": 1}))),
    ("call-statics", "'other', which is no static", "h_1", edit("main", 0, attrs({"other": 1}))),
    ("pending", "read 2 time(s)", "begun", wait_twice),
    ("pending", "read 1 time(s), by ['zero']", "sum", edit("main", 3, lambda n: replace(n, op="zero"))),
    ("pending", "and returned", "begun", return_pending),
    (
        "inference",
        "%y is f32[B, S, 63], but rms_norm makes f32[B, S, 64]",
        "y",
        edit("layer", 0, retype(lambda t: t.with_shape(B, S, 63))),
    ),
    (
        "inference",
        "rms_norm has 2 result(s), not 1",
        "y",
        lambda m: edit("layer", 0, lambda n: replace(n, results=n.results[:1]))(drop_readers(m)),
    ),
    (
        "inference",
        "operands do not fit rms_norm",
        "y",
        edit("layer", 0, operands(lambda o: (o[0], Value("cos", o[0].type))[:1] * 2)),
    ),
    ("inference", "makes pending", "begun", edit("main", 2, retype(lambda t: type(t)(t.value.place("dp", Shard(0)))))),
]


def drop_readers(module: Module) -> Module:
    """The sample's layer alone, with nothing that reads %rstd."""
    layer = module.functions["layer"]
    alone = replace(layer, nodes=layer.nodes[:4], results=layer.results[:1])
    return replace(module, functions={"layer": alone}, entries={})


@pytest.mark.parametrize(("rule", "message", "node", "broken"), NODE_BREAKS)
def test_a_broken_node_is_named_with_its_source_line(
    sample: Module, rule: str, message: str, node: str, broken: Break
) -> None:
    with pytest.raises(VerifierError) as caught:
        verify(broken(sample))
    text = str(caught.value)
    assert f"[{rule}: " in text and message in text
    assert f"node %{node}, from {LINES[node]}" in text
    marked = [row for row in text.splitlines() if row.startswith("  >>")]
    assert len(marked) == 1 and f"%{node}" in marked[0]


def moved_key(module: Module) -> Module:
    return replace(module, functions={**module.functions, "other": module.functions["layer"]})


TYPE = TensorType(DType.F32, (64,))
MODULE_BREAKS: list[tuple[str, str, Break]] = [
    ("names", "'layer' is listed under the name 'other'", moved_key),
    ("names", "state @step has the value %step", state("step", value=Value("step", TensorType(DType.I64)))),
    ("dims", "cannot be the name", lambda m: replace(m, dims={**m.dims, "f32": NamedDim("f32")})),
    ("dims", "ranges over 3..2", dim(NamedDim("B", 3, 2))),
    ("ragged", "bounded by 2*Q, and Q is no plain dim", dim(NamedDim("R", 0, None, 2 * symbol("Q"), Extent.BOUND))),
    ("ragged", "bounded by R, and R is no plain dim", dim(NamedDim("R", 0, None, symbol("R"), Extent.BOUND))),
    ("ragged", "does not say how", dim(NamedDim("R", 0, None, B * S))),
    ("ragged", "but no bound", dim(NamedDim("B", 1, None, None, Extent.HOST))),
    ("mesh", "declared twice", lambda m: replace(m, mesh=(*m.mesh, Axis("tp", 2)))),
    ("mesh", "not declared before it", lambda m: replace(m, mesh=m.mesh[::-1])),
    ("mesh", "has size 0", lambda m: replace(m, mesh=(*m.mesh, Axis("pp", 0)))),
    ("mesh", "has a size and is a product", lambda m: replace(m, mesh=(*m.mesh, Axis("pp", 4, ("tp",))))),
    ("facts", "one relation between", lambda m: replace(m, facts=(Fact("S is even"),))),
    ("facts", "not a dimension expression", lambda m: replace(m, facts=(Fact("S $ 2 == 0"),))),
    ("facts", "speaks of 'T'", lambda m: replace(m, facts=(Fact("T % tp == 0"),))),
    ("state", "is of kind 'weight'", state("step", kind="weight")),
    ("state", "is trainable, but it is a scalar", state("step", trainable=True)),
    ("state", "has no seed name", state("step", seed_name="")),
    ("init", "cannot be initialised by ('zero_',)", state("step", init=(("zero_",),))),
    ("init", "cannot be initialised by ('normal_', 0.0)", state("step", init=(("normal_", 0.0),))),
    ("init", "copy of @nothing, which is not declared", state("step", init=(("copy_from", "nothing"),))),
    ("init", "cannot be a copy of @moment", state("step", init=(("copy_from", "moment"),))),
    (
        "dims-declared",
        "state @new: dim 'Q' is not declared",
        lambda m: replace(
            m, state={**m.state, "new": State.make("new", TensorType(DType.F32, (symbol("Q"),)), m.state["step"].kind)}
        ),
    ),
    ("entries", "has no function 'mian'", entry(function="mian")),
    ("entries", "'lyer' cannot be a piece of it", entry(pieces=("layer", "lyer"))),
    ("entries", "'layer' cannot be a piece of it", entry(pieces=("layer",), captured=True)),
    ("entries", "names 'layer' twice", entry(pieces=("layer", "layer"))),
    ("entries", "names 'h' twice", entry(outputs=("h", "h"))),
    ("entry-results", "has 3 outputs and updates, but 4 results", entry(outputs=("h",))),
    (
        "entry-results",
        "updates @nothing, which is not declared",
        entry(updates=("layers.0.norm.weight.grad", "nothing")),
    ),
    (
        "entry-results",
        "updates @step, i64[], with %grad_1, f32[64]",
        entry(updates=("layers.0.norm.weight.grad", "step")),
    ),
    ("entries", "no slots and no statics", function("main", lambda f: replace(f, slots=(Value("s", TYPE),)))),
    (
        "defined",
        "returned value %lost is not defined",
        function("main", lambda f: replace(f, results=(*f.results[:3], Value("lost", TYPE)))),
    ),
    (
        "unique-names",
        "input %x is defined twice",
        function("layer", lambda f: replace(f, params=(f.params[0], Value("x", f.params[1].type)))),
    ),
    (
        "results",
        "zero has no result",
        function("layer", lambda f: replace(f, nodes=(*f.nodes, Node("zero", f.params[:1], ())))),
    ),
]


@pytest.mark.parametrize(("rule", "message", "broken"), MODULE_BREAKS)
def test_a_broken_declaration_is_named(sample: Module, rule: str, message: str, broken: Break) -> None:
    with pytest.raises(VerifierError) as caught:
        verify(broken(sample))
    assert f"[{rule}: " in str(caught.value) and message in str(caught.value)


def test_a_node_without_an_origin_is_named(sample: Module) -> None:
    with pytest.raises(VerifierError, match="the node has no origin") as caught:
        verify(edit("layer", 1, lambda n: replace(n, origin=Origin()))(sample))
    assert "node %cut, from <built>, made by capture" in str(caught.value)


def test_every_rule_is_broken_by_some_test() -> None:
    broken = {rule for rule, *_ in NODE_BREAKS} | {rule for rule, *_ in MODULE_BREAKS}
    assert broken == {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_the_sample_is_valid(sample: Module) -> None:
    verify(sample)


def test_the_whole_message(sample: Module) -> None:
    with pytest.raises(GraphError) as caught:
        verify(edit("main", 0, attrs({"callee": "laier"}))(sample))
    lines = str(caught.value).splitlines()
    assert lines[0] == "error: no function 'laier' to call [callee: a call names a function of the module]"
    assert lines[1] == "  at function @main, node %h_1, from models/model.py:10 (layers.0), made by outline"
    assert lines[2].startswith("     func @main(%tokens: i64[B, S], ")
    assert lines[3].startswith("  >>   %h_1: f32[B, S, 64], %r: f32[B, S, 1] = call @laier(")
    assert lines[-1] == "  try: did you mean 'layer'?"


def test_the_message_stays_short_on_a_huge_graph() -> None:
    nodes = [f'  %v{i}: f32[4] = zero(%v{i - 1}) forward at "p" "f.py":{i} by capture' for i in range(1, 5000)]
    nodes[3000] = nodes[3000].replace("zero", "zerro")
    module = parse_module(
        "\n".join(["mgraph-ir 1", 'module "m"', "func @f(%v0: f32[4]) {", *nodes, "  return %v9", "}"])
    )
    with pytest.raises(VerifierError) as caught:
        verify(module)
    text = str(caught.value)
    assert "node %v3001, from f.py:3001" in text
    assert len(text.splitlines()) <= 13 and len(text) < 2000
