"""Any module prints to text that parses back to an equal module; printing is deterministic, folded and fast."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import sympy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mgraph.ir.dims import Extent, NamedDim, as_dim, product, symbol
from mgraph.ir.equality import equal
from mgraph.ir.graph import Axis, Entry, Fact, Function, Module, Node, Origin, Phase, State, StateKind, Static, Value
from mgraph.ir.parser import parse_module
from mgraph.ir.printer import attr_text, fold_names, print_function, print_module
from mgraph.ir.types import DType, Partial, PendingType, Physical, Shard, TensorType

DIMS = ("B", "S", "R", "batch_2")
SYMBOLS = [symbol(name) for name in DIMS]

any_name = st.one_of(
    st.from_regex(r"[a-z][a-z0-9_.]{0,8}", fullmatch=True),
    st.from_regex(r"layers\.[0-3]\.[ab](\.[0-2])?", fullmatch=True),
    st.text(min_size=1, max_size=6),
)
any_text = st.one_of(st.text(max_size=8), st.sampled_from(['"', "\\", "a {0..3} b", "layers.3.w", "\n", "é"]))


def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.tuples(inner, inner).map(lambda p: p[0] + p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] * p[1]),
        st.tuples(inner, st.integers(2, 5)).map(lambda p: sympy.floor(sympy.sympify(p[0]) / p[1])),
        st.tuples(inner, inner).map(lambda p: sympy.Max(p[0], p[1])),
        st.tuples(inner, st.integers(2, 5)).map(lambda p: sympy.Mod(p[0], p[1])),
    )


dims = st.recursive(st.one_of(st.integers(0, 9), st.sampled_from(SYMBOLS)), extend, max_leaves=4).map(as_dim)
dtypes = st.sampled_from(list(DType))
placements = st.one_of(
    st.builds(Shard, st.integers(0, 3), st.one_of(st.none(), st.integers(0, 2)), st.booleans()),
    st.builds(Partial, st.sampled_from(["sum", "max"])),
)


@st.composite
def tensor_types(draw: st.DrawFn) -> TensorType:
    shape: list[Any] = draw(st.lists(dims, max_size=4))
    factors = []
    for index in sorted(draw(st.sets(st.integers(0, 3), max_size=2))):
        if index < len(shape):
            parts = tuple(draw(st.lists(dims, min_size=2, max_size=3)))
            factors.append((index, parts))
            shape[index] = product(parts)
    axes = draw(st.lists(st.sampled_from(["dp", "tp", "cp"]), unique=True, max_size=3))
    physical = None
    if draw(st.booleans()):
        storage = draw(st.one_of(st.none(), dtypes))
        scale = draw(st.one_of(st.none(), dtypes))
        block = tuple(draw(st.lists(st.integers(1, 128), min_size=1, max_size=3))) if scale else ()
        physical = Physical(tuple(draw(st.lists(dims, max_size=3))), storage, scale, block)
    placement = tuple((axis, draw(placements)) for axis in axes)
    return TensorType(draw(dtypes), tuple(shape), placement, tuple(factors), physical)


types = st.one_of(tensor_types(), tensor_types().map(PendingType))
attr_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        any_text,
        dtypes,
        dims,
        any_name.map(Static),
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
origins = st.one_of(
    st.just(Origin()), any_text.map(Origin), st.builds(Origin, any_text, any_text, st.integers(0, 10**6))
)
init_calls = st.one_of(
    st.just(("zeros_",)),
    st.tuples(st.just("normal_"), st.floats(), st.integers()),
    st.tuples(st.just("copy_from"), any_name),
    st.tuples(st.just("copy_"), st.lists(st.floats(allow_nan=False), max_size=3).map(tuple)),
)


@st.composite
def states(draw: st.DrawFn) -> dict[str, State]:
    """Some states on their own, some that count up, some of these broken off in the middle."""
    made: dict[str, State] = {}

    def add(name: str, like: State) -> None:
        made[name] = replace(like, name=name, value=Value(name, like.type, is_state=True))

    def one(name: str) -> State:
        return State.make(
            name,
            draw(tensor_types()),
            draw(st.sampled_from(list(StateKind))),
            init=tuple(draw(st.lists(init_calls, max_size=2))),
            trainable=draw(st.booleans()),
            persist=draw(st.booleans()),
            seed_name=draw(st.one_of(st.just(""), any_name)),
        )

    for name in draw(st.lists(any_name, max_size=4, unique=True)):
        add(name, one(name))
    suffixes = draw(st.lists(st.sampled_from(["w", "b", "n.0", "m.3.x"]), max_size=3, unique=True))
    like = {suffix: one(suffix) for suffix in suffixes}
    for number in range(draw(st.integers(0, 2)), draw(st.integers(0, 5))):
        for suffix in suffixes if draw(st.integers(0, 9)) else suffixes[:1]:
            name = f"layers.{number}.{suffix}"
            seed = draw(st.sampled_from([name, f"old.{number}.{suffix}", "fixed"]))
            add(name, replace(like[suffix], seed_name=seed, init=(("copy_from", f"src.{number}.w"),)))
    return made


@st.composite
def functions(draw: st.DrawFn, name: str, module: Module) -> Function:
    fresh = iter(draw(st.lists(any_name, min_size=14, max_size=14, unique=True)))
    params = tuple(Value(next(fresh), draw(types)) for _ in range(draw(st.integers(0, 2))))
    slots = tuple(Value(next(fresh), draw(types)) for _ in range(draw(st.integers(0, 2))))
    known = [*params, *slots, *(s.value for s in module.state.values())]
    nodes = []
    for _ in range(draw(st.integers(0, 4))):
        attrs = draw(st.dictionaries(any_name, attr_values, max_size=3))
        operands = tuple(draw(st.lists(st.sampled_from(known), max_size=3))) if known else ()
        op = draw(st.sampled_from(["rms_norm", "aten.mul.Tensor", "call"]))
        given = [draw(types) for _ in range(draw(st.integers(1, 2)))]
        if op == "call" and module.functions:
            callee = draw(st.sampled_from(sorted(module.functions)))
            attrs["callee"] = callee
            if draw(st.booleans()) and 0 < len(module.functions[callee].results) <= 2:
                given = [v.type for v in module.functions[callee].results]
        elif op == "call":
            op = "reshape"
        results = tuple(Value(next(fresh), t) for t in given)
        phase, origin, made_by = draw(st.sampled_from(list(Phase))), draw(origins), draw(any_name)
        nodes.append(Node(op, operands, results, attrs, phase, origin, made_by))
        known += results
    returned = tuple(draw(st.lists(st.sampled_from(known), max_size=3))) if known else ()
    return Function(name, params, slots, tuple(nodes), returned, tuple(draw(st.lists(any_name, max_size=2))))


@st.composite
def modules(draw: st.DrawFn) -> Module:
    module = Module(
        draw(any_text),
        {
            "B": NamedDim("B", 1),
            "S": NamedDim("S", draw(st.integers(0, 4)), draw(st.one_of(st.none(), st.integers(4, 9)))),
            "R": NamedDim("R", 0, None, draw(dims), draw(st.sampled_from([None, *Extent]))),
        },
        (Axis("dp"), Axis("tp", draw(st.integers(1, 64))), Axis("ep", None, ("dp", "tp"))),
        tuple(draw(st.lists(st.builds(Fact, any_text, st.booleans()), max_size=2))),
        draw(states()),
    )
    for name in draw(st.lists(any_name, max_size=3, unique=True)):
        module = module.with_function(draw(functions(name, module)))
    entries = {}
    for name in draw(st.lists(any_name, max_size=2, unique=True)) if module.functions else []:
        updates = tuple(draw(st.permutations(list(module.state)))) if draw(st.booleans()) else tuple(module.state)
        outputs = tuple(draw(st.lists(any_name, max_size=2)))
        names = st.sampled_from(sorted(module.functions))
        pieces = tuple(draw(st.lists(names, max_size=2)))
        entries[name] = Entry(name, draw(names), outputs, updates, not pieces and draw(st.booleans()), pieces)
    # Functions may stand in any order: a call may come before its callee.
    order = draw(st.permutations(list(module.functions)))
    return replace(module, functions={name: module.functions[name] for name in order}, entries=entries)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(modules())
def test_every_module_parses_back_equal_and_in_order(module: Module) -> None:
    text = print_module(module)
    back = parse_module(text)
    assert equal(back, module), text
    assert print_module(back) == text
    assert list(back.state) == list(module.state)
    assert [*back.functions, *back.entries] == [*module.functions, *module.entries]


def test_the_sample_prints_as_it_was_written(sample: Module, sample_text: str) -> None:
    assert print_module(sample).splitlines()[:20] == sample_text.splitlines()[:20]
    assert equal(parse_module(print_module(sample)), sample)
    assert print_function(sample.functions["layer"], sample.functions) in print_module(sample)


def test_attribute_values_as_text() -> None:
    value = (1, 1.0, -0.5, float("-inf"), True, None, 'a"b', DType.BF16, 2 * symbol("B"), Static("window"), ())
    assert attr_text(value) == '[1, 1.0, -0.5, -inf, true, none, "a\\"b", bf16, 2*B, $window, []]'


def test_names_fold_in_order() -> None:
    names = [f"layers.{i}.{part}" for i in range(3) for part in ("q", "k")]
    assert fold_names(["a", *names, "b"]) == ["@a", "@layers.{0..2}.q", "@layers.{0..2}.k", "@b"]
    by_part = [f"layers.{i}.{part}" for part in ("q", "k") for i in range(4)]
    assert fold_names(by_part) == ["@layers.{0..3}.q", "@layers.0.k", "@layers.{1..3}.k"]
    assert fold_names(["w.0", "w.2", "w.3", "w.03"]) == ["@w.0", "@w.{2..3}", "@w.03"]


def big_module(layers: int, parts: int) -> Module:
    """Layers that differ in nothing but their number, called one after another, with an update of every state."""
    row = TensorType(DType.F32, (symbol("B"), 64))
    state: dict[str, State] = {}
    for i in range(layers):
        for part in range(parts):
            name = f"layers.{i}.part_{part}.weight"
            type_ = TensorType(DType.F32, (64, 64))
            state[name] = State.make(name, type_, StateKind.PARAM, init=(("normal_", 0.0, 0.02),), trainable=True)
    x = Value("x", row)
    slots = tuple(Value(f"part_{part}.weight", TensorType(DType.F32, (64, 64))) for part in range(parts))
    y = Node("zero", (x,), (Value("y", row),), {}, origin=Origin("layers.*", "m.py", 3))
    layer = Function("layer", (x,), slots, (y,), y.results)
    nodes: list[Node] = []
    h = first = Value("h", row)
    for i in range(layers):
        own = tuple(state[f"layers.{i}.part_{part}.weight"].value for part in range(parts))
        nodes.append(
            Node("call", (h, *own), (Value(f"h_{i}", row),), {"callee": "layer"}, origin=Origin(f"layers.{i}"))
        )
        h = nodes[-1].result
    main = Function("main", (first,), (), tuple(nodes), (h, *(s.value for s in state.values())))
    entry = Entry("main", "main", ("h",), tuple(state))
    return Module("big", {"B": NamedDim("B")}, (), (), state, {"layer": layer, "main": main}, {"main": entry})


def test_a_deep_module_prints_in_little_space() -> None:
    module = big_module(64, 39)
    text = print_module(module)
    assert sum(line.startswith("state ") for line in text.splitlines()) == 39
    assert equal(parse_module(text), module)


def test_text_tools_never_import_torch() -> None:
    tools = "printer parser verifier equality diff draw json_form docs facts"
    code = f"import sys\nfor t in {tools.split()}: __import__('mgraph.ir.' + t)\n"
    code += "from mgraph.ir.opdef import declared_ops; declared_ops()\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
