"""Tuned products: which kernel wins, what is never taken, and which products are asked for. The kernels are stand-ins
where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mgraph.compiler import compile_package
from mgraph.errors import OptionError, PackageError
from mgraph.recipe import Recipe
from mgraph.runtime import cublas_lt, kernels, package, tuned_products
from mgraph.runtime.cublas_lt import Lie, Product, Shape
from mgraph.runtime.kept_products import KeptProducts
from mgraph.runtime.tuned_products import TunedProducts, tuned_entry


class Kernels:
    """Three kernels: one is wrong, one refuses, all others multiply; `ran` has those that were run."""

    def __init__(self, wrong: int = -1, refuses: int = -1) -> None:
        self.count, self.wrong, self.refuses = 3, wrong, refuses
        self.ran: list[int] = []

    def widened(self) -> Kernels:
        return self

    def run(self, index: int, left: Tensor, right: Tensor, out: Tensor, added: Tensor | None = None) -> bool:
        self.ran.append(index)
        if index == self.refuses:
            return False
        torch.addmm(out if added is None else added, left, right, beta=int(added is not None), out=out)
        if index == self.wrong:
            out[0, 0] += 1
        return True


def tuned(
    kernels: Kernels, seconds: dict[int, float], usual: float, kept: KeptProducts | None = None
) -> tuple[TunedProducts, Any]:
    """Tuning with a clock by which kernel i takes seconds[i] and torch the usual."""

    def timer(run: Callable[[], Any], calls: int) -> float:
        before = len(kernels.ran)
        run()
        return seconds[kernels.ran[-1]] if len(kernels.ran) > before else usual

    return tuned_by(timer, kernels, kept)


def tuned_by(
    timer: tuned_products.Timer, kernels: Kernels, kept: KeptProducts | None = None
) -> tuple[TunedProducts, Any]:
    """Tuning of a product by these kernels and this clock."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(6, 4, generator=generator), torch.randn(4, 5, generator=generator)
    modes = TunedProducts(kept, timer)
    shape = Shape(6, 5, 4, Lie(False, 4), Lie(False, 5), torch.float32)
    run = modes.tune(shape, cast(Product, kernels), left, right)
    return modes, run


def test_what_is_fastest_alone_may_lose() -> None:
    """All are timed briefly; those that then take part are timed for longer, which decides."""
    kernels = Kernels()

    def timer(run: Callable[[], Any], calls: int) -> float:
        before = len(kernels.ran)
        run()
        if len(kernels.ran) == before:
            return 3.0
        brief = calls == tuned_products.TIMES
        return {0: (4.0, 4.0), 1: (1e-3, 2.0), 2: (2e-3, 1.0)}[kernels.ran[-1]][not brief]

    modes, _ = tuned_by(timer, kernels)
    assert list(modes.chosen.values()) == [2]


def test_the_fastest_wins() -> None:
    kernels = Kernels()
    modes, run = tuned(kernels, {0: 3.0, 1: 1.0, 2: 2.0}, usual=4.0)
    assert list(modes.chosen.values()) == [1]
    kernels.ran.clear()
    out = torch.empty(6, 5)
    left, right = torch.ones(6, 4), torch.ones(4, 5)
    run(left, right, out)
    assert kernels.ran == [1] and torch.equal(out, left @ right)


@pytest.mark.parametrize(
    ("kernels", "usual", "chosen"),
    [
        (Kernels(), 0.5, None),  # torch is faster
        (Kernels(), 1.0, None),  # as fast
        (Kernels(wrong=1), 4.0, 2),
        (Kernels(refuses=1), 4.0, 2),
        (Kernels(wrong=1, refuses=2), 3.0, None),
    ],
)
def test_what_is_not_taken(kernels: Kernels, usual: float, chosen: int | None) -> None:
    modes, run = tuned(kernels, {0: 3.0, 1: 1.0, 2: 2.0}, usual)
    assert list(modes.chosen.values()) == [chosen] and (run is None) == (chosen is None)


CLOCK = {0: 3.0, 1: 1.0, 2: 2.0}


def kept_in(directory: Path, machine: str = "a GPU") -> KeptProducts:
    return KeptProducts(directory, lambda: machine)


def never(run: Callable[[], Any], calls: int) -> float:
    raise AssertionError("nothing is to be timed")


@pytest.mark.parametrize(("usual", "chosen"), [(4.0, 1), (0.5, None)])
def test_choices_are_kept(tmp_path: Path, usual: float, chosen: int | None) -> None:
    """A later run takes them, torch's own too, and times nothing; what runs once is looked at once."""
    first = kept_in(tmp_path)
    modes, _ = tuned(Kernels(), CLOCK, usual, first)
    assert list(modes.chosen.values()) == [chosen] and not (tmp_path / "products.json").exists()
    first.write()
    again, run = tuned_by(never, kernels := Kernels(), kept_in(tmp_path))
    assert again.chosen == modes.chosen and (run is None) == (chosen is None)
    assert kernels.ran == ([] if chosen is None else [chosen])
    shape = next(iter(again.chosen))
    assert kept_in(tmp_path).of(shape, summed=False) == (True, chosen)
    assert kept_in(tmp_path).of(shape, summed=True) == (False, None), "a sum is another product"


@pytest.mark.parametrize("why", ["another machine", "it is wrong", "it refuses", "no such kernel"])
def test_choices_that_do_not_hold_are_made_again(tmp_path: Path, why: str) -> None:
    first = kept_in(tmp_path)
    modes, _ = tuned(Kernels(), CLOCK | {1: 9.0} if why == "no such kernel" else CLOCK, 4.0, first)
    first.write()
    kernels = Kernels(wrong=1 if why == "it is wrong" else -1, refuses=1 if why == "it refuses" else -1)
    if why == "no such kernel":
        assert list(modes.chosen.values()) == [2]
        kernels.count = 2
    later = kept_in(tmp_path, "another" if why == "another machine" else "a GPU")
    modes, _ = tuned(kernels, {0: 2.5, 1: 1.0, 2: 2.0}, 4.0, later)
    assert list(modes.chosen.values()) == [{"it is wrong": 2, "it refuses": 2}.get(why, 1)]


def test_sums_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned_products, "LEAST_WORK", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernels, total = Kernels(), torch.ones(6, 5)
    shape = Shape(6, 5, 4, Lie(False, 4), Lie(False, 5), torch.float32)
    given = shape, cast(Product, kernels), total, torch.ones(6, 4), torch.ones(4, 5)
    first = TunedProducts(kept_in(tmp_path), lambda run, calls: (run(), CLOCK[kernels.ran[-1]])[1])
    assert first.kept and first.kernel_of_sum(*given) == 1
    first.kept.write()
    assert TunedProducts(kept_in(tmp_path), never).kernel_of_sum(*given) == 1


def test_who_writes_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank, with what others have written meanwhile; and nobody where nothing can be written."""
    shapes = [Shape(n, 5, 4, Lie(False, 4), Lie(True, 4), torch.bfloat16) for n in (1, 2, 3)]
    one, two = kept_in(tmp_path), kept_in(tmp_path)
    for kept, shape, index in ((one, shapes[0], 7), (two, shapes[1], None)):
        kept.keep(shape, False, index)
        kept.write()
    monkeypatch.setenv("RANK", "1")
    other = kept_in(tmp_path)
    other.keep(shapes[2], False, 1)
    other.write()
    there = kept_in(tmp_path)
    assert [there.of(shape, False) for shape in shapes] == [(True, 7), (True, None), (False, None)]
    assert [file.name for file in tmp_path.iterdir()] == ["products.json"]
    monkeypatch.setenv("RANK", "0")
    damaged = kept_in(tmp_path)
    (tmp_path / "products.json").write_text("{", encoding="utf-8")
    damaged.keep(shapes[2], False, 1)
    damaged.write()
    assert [kept_in(tmp_path).of(shape, False)[1] for shape in shapes] == [7, None, 1], "a run goes on, and mends it"
    nowhere = kept_in(tmp_path / "gone")
    nowhere.keep(shapes[0], False, 1)
    nowhere.write()
    assert not (tmp_path / "gone").exists() and nowhere.of(shapes[0], False) == (True, 1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a GPU": 3}', '{"a GPU": {"x": "1"}}', '{"a GPU": {"x": -1}}'])
def test_damaged_choices(tmp_path: Path, text: str) -> None:
    (tmp_path / "products.json").write_text(text, encoding="utf-8")
    with pytest.raises(PackageError, match="cannot be read") as caught:
        kept_in(tmp_path)
    assert "products.json" in str(caught.value) and "delete the file" in str(caught.value)


def test_sums_ask_while_it_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is slower than the first, or wrong, is not taken; a shape is timed once, and small ones never."""
    monkeypatch.setattr(tuned_products, "LEAST_WORK", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernels, before = Kernels(wrong=1), cublas_lt.kernel_of_sum
    modes = TunedProducts(timer=lambda run, calls: (run(), {0: 3.0, 1: 1.0, 2: 2.0}[kernels.ran[-1]])[1])
    total, left, right = torch.ones(6, 5), torch.ones(6, 4), torch.ones(4, 5)
    given = Shape(6, 5, 4, Lie(False, 4), Lie(False, 5), torch.float32), cast(Product, kernels), total, left, right
    assert cublas_lt.kernel_of_sum(*given) == 0 and not kernels.ran
    with modes:
        assert cublas_lt.kernel_of_sum(*given) == 2 and modes.sums == {given[0]: 2}
        kernels.ran.clear()
        assert cublas_lt.kernel_of_sum(*given) == 2 and not kernels.ran
    assert cublas_lt.kernel_of_sum is before and torch.equal(total, torch.ones(6, 5))
    monkeypatch.setattr(tuned_products, "LEAST_WORK", 10**6)
    assert TunedProducts().kernel_of_sum(*given) == 0


def test_how_matrices_lie() -> None:
    whole = torch.empty(6, 8, dtype=torch.bfloat16)
    assert Lie.of(whole) == Lie(False, 8) and Lie.of(whole.t()) == Lie(True, 8)
    assert Lie.of(whole[:, :4]) == Lie(False, 8) and Lie.of(whole[:, ::2]) is None
    right = torch.empty(5, 8, dtype=torch.bfloat16).t()
    assert Shape.of(whole, right) == Shape(6, 5, 8, Lie(False, 8), Lie(True, 8), torch.bfloat16)
    assert Shape.of(whole.float(), right.float()) is None and Shape.of(whole[:, ::2], right[:4]) is None


def test_other_products_are_torch_s() -> None:
    """On the CPU all are; an entry gives what it gave."""
    modes = TunedProducts()
    left, right = torch.ones(6, 4, dtype=torch.bfloat16), torch.ones(4, 5, dtype=torch.bfloat16)

    def entry(state: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty(6, 5, dtype=x.dtype)
        torch.mm(x, state["w"], out=out)
        return x @ state["w"], torch.nn.functional.linear(x[None], state["w"].t()), out

    found = tuned_entry(entry, modes)({"w": right}, left)
    assert all(torch.equal(f.view(6, 5), left @ right) for f in found) and not modes.chosen


def test_what_writes_nothing_is_not_taken() -> None:
    """What others have written lies where a candidate is to write."""

    class Idle(Kernels):
        def run(self, index: int, left: Tensor, right: Tensor, out: Tensor, added: Tensor | None = None) -> bool:
            if index == 1:
                self.ran.append(index)
                return True
            return super().run(index, left, right, out, added)

    modes, _ = tuned(Idle(), {0: 3.0, 1: 1.0, 2: 2.0}, usual=4.0)
    assert list(modes.chosen.values()) == [2]


@pytest.mark.parametrize("wrong", ["a row in many", "one number"])
def test_what_is_wrong_in_a_small_part_is_not_taken(wrong: str) -> None:
    """In the norm a row is little, and one number of the largest element's size still less."""

    class Nearly(Kernels):
        def run(self, index: int, left: Tensor, right: Tensor, out: Tensor, added: Tensor | None = None) -> bool:
            ran = super().run(index, left, right, out, added)
            if index == 1 and wrong == "a row in many":
                out[0] = 0
            elif index == 1:
                out[0, 0] += 0.03 * out.abs().max()
            return ran

    modes, _ = tuned(Nearly(), {0: 3.0, 1: 1.0, 2: 2.0}, usual=4.0)
    assert list(modes.chosen.values()) == [2]


def test_zeros_tell_nothing() -> None:
    zero, one = torch.zeros(4, 4), torch.ones(4, 4)
    assert tuned_products._tells(one, one)
    assert not tuned_products._tells(zero, one) and not tuned_products._tells(one, zero)


def test_what_refuses_later_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = TunedProducts()
    left, right = torch.ones(6, 4, dtype=torch.bfloat16), torch.ones(4, 5, dtype=torch.bfloat16)
    monkeypatch.setattr(modes, "_run_of", lambda *_: lambda a, b, to: False)
    with modes:
        assert torch.equal(torch.mm(left, right), torch.full((6, 5), 4.0, dtype=torch.bfloat16))


def test_tp_and_other_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of tp would choose apart; predict sees other sizes with every token."""
    for mesh in ("dp=1", "tp=2"):
        compile_package(Recipe(model="dense-tiny", mesh=mesh, arch="none", output=str(tmp_path / mesh)))
    seen = list[str]()

    def noted(entry: Callable[..., tuple[Tensor, ...]], products: TunedProducts) -> Callable[..., tuple[Tensor, ...]]:
        seen.append(entry.__name__)
        return entry

    monkeypatch.setattr(package, "tuned_entry", noted)
    monkeypatch.setattr(kernels, "set_device", lambda *_, **__: None)
    package.load_package(tmp_path / "dp=1", "cuda", tuned=True)
    assert seen == ["microbatch", "finish"]
    with pytest.raises(OptionError, match="ranks of tp"):
        package.load_package(tmp_path / "tp=2", "cuda", tuned=True)


@pytest.mark.gpu
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_every_kernel_multiplies(turned: tuple[bool, bool]) -> None:
    sides = [torch.randn(512, 1024), torch.randn(1024, 256)]
    left, right = (
        (x.t().contiguous().t() if turn else x).cuda().bfloat16() for x, turn in zip(sides, turned, strict=True)
    )
    shape = Shape.of(left, right)
    assert shape is not None
    product = Product(shape)
    proposed = product.count
    assert product.widened().count > proposed > 0
    want, out = left.double() @ right.double(), left.new_empty(512, 256)
    for index in range(product.count):
        out.zero_()
        if product.run(index, left, right, out):
            assert float((out.double() - want).norm()) < 1e-2 * float(want.norm()), index
