"""What the importer does to single constructs: noise, in-place ops, views, regions without gradients, constants."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mgraph.capture import capture
from mgraph.errors import CaptureError
from mgraph.ir.graph import Node
from tests.capture.models import forward_both, write_model

SIZES = ((1, 3), (2, 6))


def captured(tmp_path: Path, body: str) -> list[Node]:
    """The nodes of a model with this forward, after checking its values against eager."""
    spec = write_model(tmp_path, body)
    for outputs, logits, _ in forward_both(spec, *SIZES):
        assert torch.equal(outputs["logits"], logits)
    return list(capture(spec).functions["forward"].nodes)


def ops(nodes: list[Node]) -> list[str]:
    """Ops of the user's nodes (the loss left out)."""
    return [n.op for n in nodes if n.origin.file.endswith("user.py")]


def test_what_changes_nothing_is_left_out(tmp_path: Path) -> None:
    nodes = captured(
        tmp_path,
        """
x = x.float().contiguous().to(torch.float32).type_as(x).clone() * 1.0
x = F.dropout(x[:, 0:, :], 0.0).view(x.shape).expand(x.shape)
return self.head(x)
""",
    )
    assert ops(nodes) == ["aten.embedding.default", "aten.linear.default"]


def test_conversions_and_views_have_one_spelling(tmp_path: Path) -> None:
    nodes = captured(
        tmp_path,
        """
x = x.to(torch.bfloat16).type_as(x)
x = x.flatten(1).unflatten(1, (tokens.shape[1], 8)).reshape(-1, 8).view(tokens.shape[0], -1, 8)
return self.head(x)
""",
    )
    assert ops(nodes) == ["aten.embedding.default", "cast", "cast", *["reshape"] * 4, "aten.linear.default"]
    shapes = [n.attrs["shape"] for n in nodes if n.op == "reshape"]
    assert [str(s) for s in shapes[:4]] == ["(B, 8*S)", "(B, S, 8)", "(B*S, 8)", "(B, S, 8)"]


def test_empty_tensors_of_one_dim_that_torch_joins_with_any_are_left_out(tmp_path: Path) -> None:
    """As caches begin in some classes."""
    nodes = captured(
        tmp_path,
        """
x = torch.cat((torch.empty(0), x, torch.empty(0), x), dim=-1)[..., :8]
return self.head(x + torch.cat((torch.empty(0), torch.ones(1))))
""",
    )
    joins = [[v.tensor.shape for v in n.operands] for n in nodes if n.op == "aten.cat.default"]
    assert [len(shapes) for shapes in joins] == [2, 2]
    assert all(len(shape) == 3 for shape in joins[0]) and joins[1][0] == (0,)
    body = "return self.head(torch.cat((torch.empty(0), x.half()), 1))"
    with pytest.raises(
        CaptureError, match=r"empty tensor of another dtype among those that torch\.cat joins .*float32"
    ):
        capture(write_model(tmp_path, body))


def test_attrs_follow_the_schema_and_drop_defaults(tmp_path: Path) -> None:
    nodes = captured(
        tmp_path,
        """
first, second = x.chunk(2, dim=-1)
x = torch.cat((second, first), dim=-1)
order = torch.arange(x.shape[1], device=x.device).flip(0)
return self.head(x[:, order] + x[:, :, ::1])
""",
    )
    by_op = {n.op: n for n in nodes}
    assert by_op["aten.cat.default"].attrs == {"args": ("tensors.0", "tensors.1"), "dim": -1}
    assert by_op["aten.index.Tensor"].attrs == {"args": ("self", "indices.1")}
    assert [str(v) for v in by_op["aten.arange.default"].attrs.values()] == ["S"]
    assert len(by_op["aten.chunk.default"].results) == 2


def test_in_place_ops_become_values(tmp_path: Path) -> None:
    nodes = captured(
        tmp_path,
        """
y = x * 2
z = y
y.div_(3).add_(x)
y.masked_fill_(y > 1, 0.5)
y += z.exp()
y.zero_().copy_(x[:, :1])
return self.head(y + z)
""",
    )
    assert not any(n.op.split(".")[1].endswith("_") for n in nodes if "." in n.op)
    assert "aten.div.Tensor" in ops(nodes)


def test_in_place_ops_keep_the_dtype_of_their_target(tmp_path: Path) -> None:
    captured(tmp_path, "y = x.bfloat16() * 2\ny.mul_(x.float())\nreturn self.head(y.float())")


def test_slices_written_into_a_new_tensor_become_their_concatenation(tmp_path: Path) -> None:
    nodes = captured(
        tmp_path,
        """
y = x.new_empty(*x.shape[:2], 8)
y[..., 3:] = x[..., :5]
y[..., :3] = x[..., :1]
return self.head(y)
""",
    )
    assert "aten.cat.default" in ops(nodes)


@pytest.mark.parametrize(
    "body",
    [
        "y = x * 2\ny[..., :3].mul_(2)\nreturn self.head(y)",
        "y = x.new_empty(x.shape)\ny[..., :3] = x[..., :3]\nreturn self.head(y)",
    ],
    ids=["view of a whole", "part left unwritten"],
)
def test_writes_through_views_are_refused(tmp_path: Path, body: str) -> None:
    with pytest.raises(CaptureError, match="changed in place through one view") as caught:
        capture(write_model(tmp_path, body))
    assert "user.py:" in str(caught.value.where)


def test_detach_stays_only_where_a_gradient_could_flow(tmp_path: Path) -> None:
    nodes = captured(
        tmp_path,
        """
with torch.no_grad():
    scale = x.exp().mean(-1, keepdim=True)
    steps = torch.arange(x.shape[1]).view(1, -1, 1).detach() * 2
return self.head(x * scale.detach() + steps)
""",
    )
    detached = [n for n in nodes if n.op == "aten.detach.default"]
    assert len(detached) == 1
    users = [n for n in nodes if detached[0].result in n.operands]
    assert [n.op for n in users] == ["aten.mul.Tensor"]


def test_literals_become_constants(tmp_path: Path) -> None:
    spec = write_model(tmp_path, "return self.head(x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]))")
    module = capture(spec)
    (constant,) = [n for n in module.functions["forward"].nodes if n.op == "constant"]
    assert constant.attrs["values"] == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    assert constant.origin.file.endswith("user.py")
    assert not [s for s in module.state.values() if s.name.startswith("model.lifted")]


def test_a_large_literal_is_a_buffer(tmp_path: Path) -> None:
    spec = write_model(tmp_path, "return self.head(x + torch.tensor([float(i) for i in range(400)])[:8])")
    wanted = (("copy_", tuple(float(i) for i in range(400))),)
    (constant,) = [s for s in capture(spec).state.values() if s.init == wanted]
    assert not constant.persist
