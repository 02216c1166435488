"""What a traced program may not contain, found in one walk so that the user sees all of it at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from mgraph.capture.frames import stack_frame
from mgraph.capture.shapes import ShapeReader, Unnamed
from mgraph.errors import CaptureError

INLINED = "wrap_with_set_grad_enabled"
_ASSERTIONS = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_scalar.default",
        "aten._assert_async.default",
        "aten._assert_async.msg",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)
_NORMS = {"aten.batch_norm.default": 5, "aten.instance_norm.default": 5}  # position of the argument `training`
_DROPOUTS = {
    "aten.dropout.default": (1, 2),
    "aten.feature_dropout.default": (1, 2),
    "aten.alpha_dropout.default": (1, 2),
}


DRAWN = frozenset(
    {
        "aten.dropout.default",
        "aten.rand.default",
        "aten.rand_like.default",
        "aten.scaled_dot_product_attention.default",
        "aten.uniform_.default",
    }
)
"""Ops that draw random numbers and have a form in the IR (`mgraph.capture.noise`)."""


_PRODUCTS = frozenset(
    f"aten.{name}.default"
    for name in (
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "mv",
        "dot",
        "einsum",
        "conv1d",
        "conv2d",
        "conv3d",
    )
)
"""Ops whose operands have one dtype. Of some, torch checks that on tensors with values only, not in a trace."""


def op_name(node: Any) -> str:
    """`aten.mul.Tensor` for a node that calls a torch op, the bare name for other calls."""
    target = node.target
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def is_assertion(node: Any) -> bool:
    """Whether a node only checks something at run time; a module declares its dims instead."""
    return op_name(node) in _ASSERTIONS


def argument(node: Any, index: int, name: str, default: Any = None) -> Any:
    """An argument of a node by position or keyword."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def is_no_dropout(node: Any) -> bool:
    """Whether a node is a dropout that drops nothing."""
    where = _DROPOUTS.get(op_name(node))
    return where is not None and (not argument(node, where[0], "p") or not argument(node, where[1], "train"))


def walk(graph_module: Any) -> Iterator[tuple[Any, str]]:
    """All nodes of a graph and of the regions in it, with their stacks; a region's is that of its first node."""
    for node in graph_module.graph.nodes:
        inner = [pair for region in regions(node, graph_module) for pair in walk(region)]
        stacks = [node.meta.get("stack_trace"), *(stack for _, stack in inner)]
        yield node, next((s for s in stacks if s), "")
        yield from inner


def regions(node: Any, graph_module: Any) -> list[Any]:
    """The graphs that a higher-order op runs."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    names = [a.target for a in node.all_input_nodes if a.op == "get_attr"]
    return [getattr(graph_module, n) for n in names if isinstance(getattr(graph_module, n), torch.fx.GraphModule)]


def check(program: Any, reader: ShapeReader) -> None:
    """Raise one CaptureError that lists every unsupported construct with its source line."""
    inputs = {s.arg.name: s for s in program.graph_signature.input_specs}
    found: dict[str, str] = {}
    for node, stack in walk(program.graph_module):
        problem = _problem(node, inputs, reader) if node.op == "call_function" else None
        if problem is not None:
            frame = stack_frame(stack)
            found.setdefault(f"{problem} at {frame}" if frame else problem, problem)
    if not found:
        return
    lines = list(found)
    if len(lines) == 1:
        what, _, where = lines[0].rpartition(" at ")
        raise CaptureError(f"unsupported: {what or lines[0]}", where or None, _instead(where))
    listing = "\n".join(f"  {line}" for line in lines)
    raise CaptureError(
        f"{len(lines)} constructs are not supported:\n{listing}", None, _instead(lines[0].rpartition(" at ")[2], "them")
    )


def _instead(where: str, what: str = "it") -> str:
    """What to do about a line, or several."""
    line = "this line" if what == "it" else "these lines"
    if where.startswith("transformers/"):
        return f"a setting of config.json may leave {line} out, as output_router_logits: false does a router's loss"
    return f"rewrite {line} without {what}"


def check_sizes(program: Any, reader: ShapeReader) -> None:
    """Raise a CaptureError unless every condition on sizes that the trace left open holds for all extents."""
    for node, _ in walk(program.graph_module):
        if op_name(node) != "aten._assert_scalar.default" or not isinstance(node.args[0], torch.fx.Node):
            continue
        condition = node.args[0].meta["val"]
        unproved = reader.unproved(condition) if isinstance(condition, torch.SymBool) else None
        if unproved is not None:
            raise CaptureError(
                f"the model does not take every batch size and length: it needs {unproved}",
                None,
                "remove what fixes a size in forward",
            )


def _problem(node: Any, inputs: dict[str, Any], reader: ShapeReader) -> str | None:
    """What is wrong with a node, `None` if nothing."""
    name = op_name(node)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return None if name == INLINED else f"a region of {name.removeprefix('wrap_with_')}"
    if isinstance(node.meta.get("val"), torch.SymFloat):
        return "a number that is a quotient of sizes"
    if not isinstance(node.target, torch._ops.OpOverload) or is_assertion(node) or is_no_dropout(node):
        return None
    if torch.Tag.nondeterministic_seeded in node.target.tags and name not in DRAWN:
        return f"random numbers in forward ({name})"
    if name in _NORMS and argument(node, _NORMS[name], "training"):
        return f"running statistics ({name} in training)"
    return _mutated(node, inputs) or _mixed(node, name) or _stood_in(node, name) or _untyped(node, name, reader)


def _mutated(node: Any, inputs: dict[str, Any]) -> str | None:
    """Whether a node writes into an input, a parameter or a buffer."""
    if not node.target._schema.is_mutable:
        return None
    base = node.args[0]
    while base.op == "call_function" and base.args and is_view(base):
        base = base.args[0]
    if base.op != "placeholder":
        return None
    spec = inputs[base.name]
    named = f"'{spec.target.partition('.')[2]}'" if spec.target else f"the input '{base.name}'"
    return f"{named} is changed in place ({op_name(node)})"


def _stood_in(node: Any, name: str) -> str | None:
    """Whether tensors get their dtype from an empty one of one dim that they are joined with, which adds nothing."""
    if name != "aten.cat.default":
        return None
    made, parts = node.meta["val"], [part.meta["val"] for part in argument(node, 0, "tensors")]
    whole = [part for part in parts if part.dim() == made.dim()]
    if len(whole) == len(parts) or functools.reduce(torch.promote_types, (p.dtype for p in whole)) == made.dtype:
        return None
    return f"an empty tensor of another dtype among those that torch.cat joins ({made.dtype} results)"


def _mixed(node: Any, name: str) -> str | None:
    """Whether a product has operands of several dtypes."""
    if name not in _PRODUCTS:
        return None
    dtypes = {str(operand.meta["val"].dtype).removeprefix("torch."): None for operand in node.all_input_nodes}
    return f"a product of {' and '.join(dtypes)} ({name})" if len(dtypes) > 1 else None


def is_view(node: Any) -> bool:
    """Whether a node's result may share memory with its first argument (and is not written by the node)."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    aliases = [r.alias_info for r in node.target._schema.returns]
    return any(a is not None and not a.is_write for a in aliases)


def _untyped(node: Any, name: str, reader: ShapeReader) -> str | None:
    """Whether a result is the first of its kind with a size that depends on data, or a dtype that the IR has not."""
    problem = _unreadable(node, reader)
    if problem is None or any(_unreadable(source, reader) for source in node.all_input_nodes):
        return None
    return f"{problem} ({name})"


def _unreadable(node: Any, reader: ShapeReader) -> str | None:
    for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            try:
                reader.type_of(value)
            except Unnamed:
                return "a size that depends on the values of a tensor"
            except KeyError:
                return f"the dtype {str(value.dtype).removeprefix('torch.')}"
    return None
