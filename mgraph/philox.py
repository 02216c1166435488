"""Counter-based random numbers: Philox-4x32-10, the same bits on every device, mesh and vector width.

The value of an element depends only on (key, global linear index): a shard draws exactly the numbers that the same
slice of the whole tensor would. Element `i` is lane `i % 4` of the block with counter `i // 4`.

The bits follow Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Floats are made
with additions, multiplications, divisions and square roots only, which IEEE 754 rounds correctly everywhere: library
logarithms and cosines differ between devices, and between vector and scalar code, so between a tensor and its shard.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Key = tuple[int, int]
"""Two 32-bit words."""

Word = int | Tensor
"""One of them, on the host or as i64[]."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# Elements computed at a time: intermediates stay in the cache of a CPU, launches of a GPU stay large.
_CHUNK = {"cpu": 1 << 17}
_CHUNK_ACCELERATOR = 1 << 24


def key_from(seed: int, *parts: str | int) -> Key:
    """The key of a stream: a stable hash (BLAKE2b) of the seed and of what the stream is for.

    Strings and integers are told apart, so `key_from(0, "1")` differs from `key_from(0, 1)`.
    """
    text = "\0".join(f"{type(part).__name__}:{part}" for part in (seed, *parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Word, Word]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox on four i64 tensors of 32-bit words (0 <= word < 2**32), which it uses up as work space.

    The key is two numbers or i64[] tensors. Returns four i64 tensors of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    for round_index in range(_ROUNDS):
        key0, key1 = ((word + weyl * round_index) & _MASK for word, weyl in zip(key, _WEYL, strict=True))
        # i64 products wrap, but bits 32..63 are right whatever the sign: shift, combine, then mask once. The low
        # halves c1, c3 keep garbage above bit 31, which that mask removes in the next round.
        low0, low1 = c0.mul_(_MULTIPLIERS[0]), c2.mul_(_MULTIPLIERS[1])
        high0, high1 = low0 >> 32, low1 >> 32
        c0 = high1.bitwise_xor_(c1).bitwise_xor_(key0).bitwise_and_(_MASK)
        c2 = high0.bitwise_xor_(c3).bitwise_xor_(key1).bitwise_and_(_MASK)
        c1, c3 = low1, low0
    return c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)


def uniform(
    shape: Sequence[int],
    key: Key,
    offset: Sequence[int] | None = None,
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2**-24, rounded to `dtype` (bf16 and f16 may round up to 1).

    The result is the block of `shape` that starts at `offset` (default: the origin) in a tensor of `global_shape`
    (default: `shape`).
    """
    return _fill(_to_uniform, shape, key, offset, global_shape, dtype, device)


def normal(
    shape: Sequence[int],
    key: Key,
    offset: Sequence[int] | None = None,
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Standard normal numbers by the Box-Muller transform of neighbouring words, rounded to `dtype`.

    Arguments as for `uniform`. The largest magnitude is sqrt(48 ln 2) = 5.77.
    """
    return _fill(_to_normal, shape, key, offset, global_shape, dtype, device)


def sample_key(seed: Tensor, site: str, call: int) -> tuple[Tensor, Tensor]:
    """The key of a place in a model: `seed` i64[], whose value is never read on the host, mixed with (site, call)."""
    low, high = key_from(0, site, call)
    return (seed & _MASK) ^ low, ((seed >> 32) & _MASK) ^ high


def keep_by_sample(
    shape: Sequence[int],
    samples: int,
    key: tuple[Tensor, Tensor],
    step: Tensor,
    first: Tensor,
    p: float,
    part: int = 0,
) -> Tensor:
    """True with probability 1 - p, in steps of 2**-24: bool of `shape`. Numbering as in `uniform_by_sample`.

    Where `shape` has one of several equal stretches of each sample only, `part` is its number.
    """
    threshold = round(p * 2**24)
    return _by_sample(lambda words: (words >> 8) >= threshold, torch.bool, shape, samples, key, step, first, part)


def keep_part(
    shape: Sequence[int],
    samples: int,
    key: tuple[Tensor, Tensor],
    step: Tensor,
    first: Tensor,
    p: float,
    *,
    dim: int,
    index: int,
    parts: int,
) -> Tensor:
    """Part `index` of `parts` equal ones along `dim` of what `keep_by_sample` gives for all of them; `shape` is that of
    the part, and its first dim has the samples."""
    if dim == 1:  # a stretch of each sample
        return keep_by_sample(shape, samples, key, step, first, p, index)
    whole = [*shape[:dim], shape[dim] * parts, *shape[dim + 1 :]]
    return keep_by_sample(whole, samples, key, step, first, p).narrow(dim, index * shape[dim], shape[dim])


def uniform_by_sample(
    shape: Sequence[int], samples: int, key: tuple[Tensor, Tensor], step: Tensor, first: Tensor
) -> Tensor:
    """Uniform numbers in [0, 1), f32 of `shape`, the same for a sequence wherever in a batch it lies.

    The elements of `shape` are those of `samples` equal parts, one after the other; part s is sample `first + s` of
    training step `step` (both i64[]). Element i of a part is lane `i % 4` of the block with counter (i // 4, sample,
    step).
    """
    return _by_sample(_to_uniform, torch.float32, shape, samples, key, step, first)


STRETCH = 1024
"""Elements of a row that take the same lane of as many blocks, which a kernel reads side by side."""


def gumbel_at_once(rows: int, classes: int) -> tuple[int, int]:
    """Rows that `gumbel_by_row` computes at once, about a million elements, and words of theirs: whole stretches."""
    row = 4 * _blocks(classes)
    at_once = max(1, min(rows, (1 << 20) // row))
    return at_once, at_once * row


def _blocks(classes: int) -> int:
    """Of a row: whole stretches, or a part of the first."""
    return classes if classes < STRETCH else -(-classes // (4 * STRETCH)) * STRETCH


def gumbel_by_row(seeds: Tensor, draws: Tensor, classes: int) -> Tensor:
    """Gumbel noise f32 [N, classes], of each row its own: the key is its seed, draws count on, both i64 [N].

    Element i of a row is lane `i // STRETCH % 4` of the block with counter (i // 4 STRETCH * STRETCH + i % STRETCH, low
    and high word of draws). The largest of log-probabilities with such noise is at each class as often as its
    probability says (Gumbel 1954; Maddison, Tarlow and Minka 2014, arXiv:1411.0030).
    """
    blocks = _blocks(classes)
    out = torch.empty(len(seeds), classes, device=seeds.device)
    at_once, _ = gumbel_at_once(len(seeds), classes)
    for row in range(0, len(seeds), at_once):
        seed, draw = (numbers[row : row + at_once, None] for numbers in (seeds, draws))
        block = torch.arange(blocks, device=out.device).repeat(len(seed), 1)
        nothing = torch.zeros_like(block)
        counter = block, nothing + (draw & _MASK), nothing + ((draw >> 32) & _MASK), nothing.clone()
        words = torch.stack(philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK)), 1)
        lanes = words.view(len(seed), 4, -1, min(STRETCH, blocks)).transpose(1, 2)
        out[row : row + at_once] = _to_gumbel(lanes.reshape(len(seed), -1)[:, :classes])
    return out


def _by_sample(
    transform: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    shape: Sequence[int],
    samples: int,
    key: tuple[Tensor, Tensor],
    step: Tensor,
    first: Tensor,
    part: int = 0,
) -> Tensor:
    """Elements numbered within their sample, piece by piece; those that follow on `part` times as many."""
    out = torch.empty(tuple(shape), dtype=dtype, device=first.device)
    if out.numel() == 0:
        return out
    assert out.numel() % samples == 0, f"{tuple(shape)} is not made of {samples} equal samples"
    rows = out.view(samples, -1)
    start = part * rows.shape[1]
    num_blocks = -(-(start + rows.shape[1]) // 4) - start // 4
    chunk = _CHUNK.get(out.device.type, _CHUNK_ACCELERATOR) // 4
    for row, piece, num_rows, num_columns in _pieces(samples, num_blocks, chunk):
        column = start // 4 + piece
        size = num_rows, num_columns
        block = torch.arange(column, column + num_columns, device=out.device).repeat(num_rows, 1)
        sample = torch.arange(row, row + num_rows, device=out.device)[:, None].add(first) & _MASK
        counter = block, sample.expand(size).clone(), (step & _MASK).expand(size).clone(), torch.zeros_like(block)
        words = torch.stack(philox4x32(counter, key), -1).flatten(1)
        begin, end = max(column * 4, start), min((column + num_columns) * 4, start + rows.shape[1])
        made = transform(words[:, begin - column * 4 : end - column * 4])
        rows[row : row + num_rows, begin - start : end - start] = made
    return out


def _fill(
    transform: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    key: Key,
    offset: Sequence[int] | None,
    global_shape: Sequence[int] | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Fill a tensor run by run; a run is a stretch of elements that are neighbours in the whole tensor."""
    shape, whole = tuple(shape), tuple(global_shape if global_shape is not None else shape)
    start = tuple(offset) if offset is not None else (0,) * len(shape)
    assert len(start) == len(whole) == len(shape), f"ranks differ: {shape} at {start} of {whole}"
    assert all(s >= 0 and s + n <= g for s, n, g in zip(start, shape, whole, strict=True)), (
        f"{shape} at {start} lies outside {whole}"
    )
    out = torch.empty(shape, dtype=dtype, device=device)
    if out.numel() == 0:
        return out
    starts, run = _runs(shape, start, whole)
    rows = out.view(-1, run)
    chunk = _CHUNK.get(out.device.type, _CHUNK_ACCELERATOR)
    aligned = chunk % 4 == 0 and not bool((starts % 4).any())  # asked on the host: drawing never waits for a device
    starts = starts.to(out.device)
    for row, column, num_rows, num_columns in _pieces(rows.shape[0], run, chunk):
        words = _words(starts[row : row + num_rows] + column, num_columns, key, transform, aligned)
        rows[row : row + num_rows, column : column + num_columns] = words
    return out


def _runs(shape: tuple[int, ...], start: tuple[int, ...], whole: tuple[int, ...]) -> tuple[Tensor, int]:
    """Global index of the first element of every run, i64[runs], and the length of a run."""
    first = len(shape)
    run, stride = 1, 1
    while first > 0:  # take in trailing dims until one is cut
        first -= 1
        run *= shape[first]
        stride *= whole[first]
        if shape[first] != whole[first]:
            break
    inner = math.prod(whole[first + 1 :])
    starts = torch.zeros(1, dtype=torch.int64)
    if first < len(shape):
        starts += start[first] * inner
    for dim in reversed(range(first)):
        starts = (torch.arange(start[dim], start[dim] + shape[dim])[:, None] * stride + starts).flatten()
        stride *= whole[dim]
    return starts, run


def _pieces(num_rows: int, run: int, chunk: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut rows of `run` elements into pieces of about `chunk`: (first row, first column, rows, columns)."""
    rows_at_once = max(1, chunk // run)
    for row in range(0, num_rows, rows_at_once):
        for column in range(0, run, chunk):
            yield row, column, min(rows_at_once, num_rows - row), min(chunk, run - column)


def _words(starts: Tensor, count: int, key: Key, transform: Callable[[Tensor], Tensor], aligned: bool) -> Tensor:
    """Elements `starts[r] .. starts[r] + count` of the stream, transformed: f32[rows, count]. `aligned`: all of
    `starts` are multiples of 4."""
    num_blocks = -(-count // 4) + (0 if aligned else 1)
    block = (starts // 4)[:, None] + torch.arange(num_blocks, device=starts.device)
    zeros = torch.zeros_like(block)
    words = philox4x32((block & _MASK, block >> 32, zeros, zeros.clone()), key)
    values = transform(torch.stack(words)).permute(1, 2, 0).reshape(len(starts), num_blocks * 4)
    if aligned:
        return values[:, :count]
    return values.gather(1, (starts % 4)[:, None] + torch.arange(count, device=starts.device))


def _to_uniform(words: Tensor) -> Tensor:
    """The upper 24 bits of each word as a float32 in [0, 1)."""
    return (words >> 8).to(torch.float32).mul_(2.0**-24)


def _to_gumbel(words: Tensor) -> Tensor:
    """-log(-log(1 - v)) of v in steps of 2**-32, f32: small v, of which the largest noise is, are exact."""
    v = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    rest = 1.0 - v
    # -log(1 - v), which the rounding of 1 - v does not harm (Kahan), and v itself where that is 1
    waited = torch.where(rest == 1.0, v, _log(rest) * v / (rest - 1.0))
    return -_log(waited)


def _to_normal(words: Tensor) -> Tensor:
    """i64[4, ...] words to f32[4, ...]: words 0 and 2 give radii, words 1 and 3 angles of two points each."""
    # (w + 1) / 2**24 lies in (0, 1], so the logarithm is finite.
    square_radius = _log((words[0::2] >> 8).add_(1).to(torch.float32).mul_(2.0**-24)).mul_(-2.0)
    radius = _square_root(square_radius)
    angle = words[1::2]
    # 24 bits choose the angle within a quarter turn around 0, one bit mirrors it about the diagonal, one about 0.
    quarter = ((angle & 0xFFFFFF).to(torch.float32)).sub_(float(1 << 23) - 0.5).mul_(math.pi / 2 * 2.0**-24)
    square = quarter * quarter
    cosine = _polynomial(square, [1.0, -1 / 2, 1 / 24, -1 / 720, 1 / 40320])
    sine = _polynomial(square, [1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880]).mul_(quarter)
    mirrored = (angle & 0x40000000) != 0
    radius = torch.where((angle & 0x80000000) != 0, -radius, radius)
    first = torch.where(mirrored, sine, cosine).mul_(radius)
    second = torch.where(mirrored, cosine, sine).mul_(radius)
    return torch.stack((first, second), dim=1).flatten(0, 1)


def _square_root(x: Tensor) -> Tensor:
    """Correctly rounded square root of f32; through f64, since some vector libraries miss the last bit of f32."""
    return x.double().sqrt_().float()


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of positive f32 numbers: log(m 2**e) = e log 2 + 2 artanh((m - 1) / (m + 1))."""
    mantissa, exponent = torch.frexp(x)  # mantissa in [1/2, 1)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    exponent = (exponent - small.to(exponent.dtype)).to(torch.float32)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial(ratio * ratio, [2.0, 2 / 3, 2 / 5, 2 / 7, 2 / 9]).mul_(ratio)
    return exponent.mul_(math.log(2.0)).add_(series)


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """Horner's rule, constant term first, in separate multiplications and additions (never fused)."""
    result = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result.mul_(x).add_(coefficient)
    return result
