"""Parts of a dim that are repeated (key and value heads that ranks share), whole and as a rank has them."""

from __future__ import annotations

from torch import Tensor


def repeat_parts(x: Tensor, *, dim: int, parts: int, times: int) -> Tensor:
    """Each of `parts` equal parts of x along `dim`, `times` in a row."""
    by_part: Tensor = x.unflatten(dim, (parts, -1))
    return by_part.repeat_interleave(times, dim).flatten(dim, dim + 1)


def repeat_parts_grad(dy: Tensor, *, dim: int, parts: int, times: int) -> Tensor:
    """The sum of dy over the repetitions of each part: the gradient of `repeat_parts`."""
    summed: Tensor = dy.unflatten(dim, (parts, times, -1)).sum(dim + 1)
    return summed.flatten(dim, dim + 1)


def repeated_part(x: Tensor, index: int, *, dim: int, parts: int, times: int, ranks: int) -> Tensor:
    """What rank `index` of `ranks` has of `repeat_parts(x)`: a view where that is one part."""
    count, size = parts * times // ranks, x.shape[dim] // parts
    first, last = index * count // times, ((index + 1) * count - 1) // times
    own = x.narrow(dim, first * size, (last - first + 1) * size)
    if count == 1:
        return own
    repeated = repeat_parts(own, dim=dim, parts=last - first + 1, times=times)
    return repeated.narrow(dim, (index * count - first * times) * size, count * size)


def repeated_part_grad(dy: Tensor, index: int, *, dim: int, parts: int, times: int, ranks: int) -> Tensor:
    """dy in the places that its parts have in the whole tensor, zeros elsewhere: a sum over ranks is the gradient."""
    count = parts * times // ranks
    size = dy.shape[dim] // count
    whole = dy.new_zeros((*dy.shape[:dim], parts * size, *dy.shape[dim + 1 :]))
    for place, piece in enumerate(dy.split(size, dim)):
        whole.narrow(dim, (index * count + place) // times * size, size).add_(piece)
    return whole
