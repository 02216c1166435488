"""The runtime's ops on parts of a vocabulary against the bodies of the graph's ops."""

from __future__ import annotations

import pytest
import torch

from mgraph.ir.opdef import op_def
from mgraph.runtime import ops, v1


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are worked on a few at a time."""
    monkeypatch.setattr(ops, "_CHUNK_ELEMENTS", 16)


@pytest.mark.parametrize("index", [0, 2])
def test_embedding(index: int) -> None:
    weight, tokens = torch.randn(5, 3), torch.randint(15, (2, 7))
    body = op_def("embedding_part").body
    assert torch.equal(v1.embedding_part(weight, tokens, index), body(weight, tokens, index))
    grad, total = torch.randn(2, 7, 3), torch.randn(5, 3)
    expected = op_def("embedding_part_grad").body(grad, tokens, index, shape=(5, 3), padding_idx=1)
    found = v1.embedding_part_grad(grad, tokens, index, shape=(5, 3), padding_idx=1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    added = v1.embedding_part_grad_(total.clone(), grad, tokens, index, padding_idx=1)
    torch.testing.assert_close(added, total + expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("index", "classes"), [(0, 0), (2, 0), (2, 12), (2, 7)])
def test_cross_entropy(index: int, classes: int, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(9, 5)).to(dtype)
    labels = torch.randint(classes or 15, (9,))
    labels[4] = -100
    expected = op_def("cross_entropy_part").body(logits, labels, index, parts=3, classes=classes)
    found = v1.cross_entropy_part(logits, labels, index, parts=3, classes=classes)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    lse, picked = torch.randn(9, 3).to(found[0].dtype), torch.randn(9, 3).to(found[0].dtype)
    joined = op_def("cross_entropy_join").body(lse, picked, labels)
    for ours, theirs in zip(v1.cross_entropy_join(lse, picked, labels), joined, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    dsum, whole = torch.tensor(0.7), joined[1]
    wanted = op_def("cross_entropy_part_grad").body(dsum, logits, labels, whole, index, classes=classes)
    for out in (None, logits.clone()):
        given = logits if out is None else out
        made = v1.cross_entropy_part_grad(dsum, given, labels, whole, index, classes=classes, out=out)
        assert made.dtype == dtype
        torch.testing.assert_close(made, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_tokens_in_order_with_their_places() -> None:
    """Equal tokens keep their order; of a part, what lies outside and what is padding comes after the last row."""
    tokens = torch.tensor([[7, 2, 9, 2], [0, 7, 2, 5]])
    ids, order = v1.by_token(tokens)
    assert ids.tolist() == [0, 2, 2, 2, 5, 7, 7, 9] and order.tolist() == [4, 1, 3, 6, 7, 0, 5, 2]
    assert (ids.dtype, order.dtype) == (torch.int32, torch.int64)
    ids, order = v1.by_token(tokens, 1, rows=4, padding_idx=5)
    assert ids.tolist() == [3, 3, 4, 4, 4, 4, 4, 4] and order.tolist()[:2] == [0, 5]
