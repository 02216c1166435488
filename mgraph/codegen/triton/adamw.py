"""AdamW over all parameters in one pass over memory, as Triton source and torch twin, specialised by dtypes.

For each parameter, with g = scale * gradient, r = lr * rate, and t the number of this update, from 1,

    w <- w - r * decay * w
    m <- m + (1 - beta1) * (g - m)
    v <- beta2 * v + (1 - beta2) * g * g
    w <- w - r / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)
    p <- w rounded                                          where w is the f32 master of a param of lower precision

in f32, with correctly rounded roots and quotients and the corrections 1 - beta^t from f64; not `decoupled` it is Adam:
decay * w is added to g instead. Where `finite` is false nothing changes.

Of each element the kernel reads gradient, w, m and v, and writes w, m, v and p: 30 bytes with f32 gradients and bf16
params. The gradient stays as it is: setting it to zero is a write of its own in any case, so that another kernel for it
moves no byte more.

Where sums of squares of the gradients are asked for, each program adds up those of its chunk in f32, before the scale
and whether or not it is finite. Two small launches add what the programs have, in f64 and in a fixed order, so that
results repeat from run to run; each sum takes the programs of its own gradients alone. Where two roundings of a formula
are possible the source says which product is fused, so that the update is the same to the bit with sums and without.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mgraph.codegen.triton.kernel import TRITON_LANGUAGE_DTYPES, KernelSpec, Launch, Lists, TensorSpec
from mgraph.ir.graph import Node
from mgraph.ir.opdef import op_def

Group = tuple[float, float, int]
"""Weight decay, multiplier of the rate, and how many consecutive parameters they are of."""

AT_ONCE = 4096
"""Programs whose sums of squares a program of the second launch adds."""


@dataclass(frozen=True)
class AdamW:
    """One instance of the op: the groups in the order of the lists, the dtypes of weights and gradients, and of the
    params that the weights are masters of (or ""), and the attributes of `adamw`. `sums` has the number of the sum of
    squares that the gradients of a group count in, from 0, or -1 (empty: there is none)."""

    groups: tuple[Group, ...]
    weight: str
    grad: str
    param: str
    beta1: float
    beta2: float
    eps: float
    decoupled: bool = True
    sums: tuple[int, ...] = ()

    @property
    def lists(self) -> dict[str, str]:
        """The lists of tensors in the order of the op's operands, with their dtypes."""
        low = {"params": self.param} if self.param else {}
        return {"weights": self.weight, "firsts": "f32", "seconds": "f32", **low, "grads": self.grad}


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut: elements of a program, those it holds in registers at a time, those a thread moves in one
    access, and warps."""

    chunk: int
    tile: int
    vector: int
    num_warps: int


def tuning(problem: AdamW) -> Tuning:
    """Eight elements a thread, in accesses of four: 16 bytes of f32. Wider ones of the 16-bit tensors would lay all
    tensors out by eight, and turn the f32 results around in shared memory. A block has 16 KB of reads under way, and a
    multiprocessor several blocks; eight tiles a program make up for the chain of reads that it begins with (owner,
    place, data)."""
    return Tuning(chunk=8192, tile=1024, vector=4, num_warps=4)


def groups(node: Node) -> dict[tuple[float, float, int], list[int]]:
    """The places of the parameters of an `adamw` node by weight decay, rate, and the sum that the squares of their
    gradients count in (-1: none). A site takes its lists by group."""
    attrs = op_def("adamw").complete(node.attrs)
    rates, sums = attrs["rates"] or (1.0,) * attrs["n"], attrs["sums"] or (-1,) * attrs["n"]
    found: dict[tuple[float, float, int], list[int]] = {}
    for i, setting in enumerate(zip(attrs["weight_decays"], rates, sums, strict=True)):
        found.setdefault(setting, []).append(i)
    return found


def problem_of(node: Node) -> AdamW | str:
    """The instance that a node `adamw` is, or why the kernel does not take it."""
    attrs: dict[str, Any] = dict(op_def("adamw").complete(node.attrs))
    count = attrs["n"]
    roles = ["weights", "first moments", "second moments", *["params"] * attrs["masters"], "gradients"]
    dtypes: dict[str, str] = {}
    for i, role in enumerate(roles):
        found = sorted({value.tensor.dtype.text for value in node.operands[i * count : (i + 1) * count]})
        taken = {"f32"} if "moments" in role else set(TRITON_LANGUAGE_DTYPES)
        if len(found) != 1 or found[0] not in taken:
            return f"the {role} are {' and '.join(found) or 'none'}; the kernel takes one of {', '.join(sorted(taken))}"
        dtypes[role] = found[0]
    lr, scale = (value.tensor.dtype.text for value in node.operands[-4:-2])
    if (lr, scale) != ("f32", "f32"):
        return f"rate and scale are {lr} and {scale}; the kernel takes f32"
    return AdamW(
        groups=tuple((decay, rate, len(places)) for (decay, rate, _), places in groups(node).items()),
        weight=dtypes["weights"],
        grad=dtypes["gradients"],
        param=dtypes.get("params", ""),
        beta1=attrs["beta1"],
        beta2=attrs["beta2"],
        eps=attrs["eps"],
        decoupled=attrs["decoupled"],
        sums=tuple(number for _, _, number in groups(node)) if attrs["sums"] else (),
    )


def build(name: str, problem: AdamW, cut: Tuning | None = None) -> KernelSpec:
    """The site `name(weights, firsts, seconds, [params,] grads, lr, scale, step, finite)`, which writes into all lists
    but the gradients: lists of tensors of any shapes, equal for entries of one index; lr and scale f32[], step i64[]
    (the number of this update), finite bool[]. Where there are sums of squares, the last result is f32 with one number
    for each."""
    cut = cut or tuning(problem)
    runs = {"decays": [group[0] for group in problem.groups], "rates": [group[1] for group in problem.groups]}
    runs |= {"sums": [float(number) for number in problem.sums]} if problem.sums else {}
    scalars = {"lr": "f32", "scale": "f32", "step": "i64", "finite": "bool"}
    inputs = [TensorSpec(role, dtype, ("*",), many=True) for role, dtype in problem.lists.items()]
    tables = ("owners", "chunks", "sizes", *(f"{role}_at" for role in problem.lists), *runs)
    found = ("squares", "counted", "before") if problem.sums else ()
    args = (*problem.lists, *scalars, *found, *tables, "unit")
    written = tuple(
        TensorSpec(f"new_{role}", dtype, ("*",), alias=role, many=True)
        for role, dtype in problem.lists.items()
        if role != "grads"
    )
    sums = max(problem.sums, default=-1) + 1
    adders = ["cdiv", "blocks", AT_ONCE]
    adding = (
        Launch(f"{name}_squares", ("squares", "counted", "partial", "blocks"), (adders, sums), 8, 1, aligned=False),
        Launch(f"{name}_sums", ("partial", "result", "blocks"), (sums,), num_warps=4, num_stages=1, aligned=False),
    )
    scratch = (
        TensorSpec("squares", "f32", ("blocks",)),
        TensorSpec("counted", "f32", ("blocks",)),
        TensorSpec("partial", "f64", (["mul", sums, adders],)),
    )
    return KernelSpec(
        name=name,
        source=_source(name, problem, cut, args),
        twin=_twin(name, problem),
        inputs=(*inputs, *(TensorSpec(scalar, dtype, ()) for scalar, dtype in scalars.items())),
        outputs=(*written, TensorSpec("result", "f32", (sums,))) if sums else written,
        scratch=scratch if sums else (),
        launches=(
            Launch(name, args, ("blocks",), cut.num_warps, num_stages=1, aligned=True),
            *(adding if sums else ()),
        ),
        lists=Lists(
            chunk=cut.chunk,
            numbers={
                key: tuple((value, group[2]) for value, group in zip(values, problem.groups, strict=True))
                for key, values in runs.items()
            },
        ),
    )


def _title(problem: AdamW) -> str:
    """The formula with its numbers, for docstrings."""
    decay = "w <- w - r * decay * w" if problem.decoupled else "g <- g + decay * w"
    lines = [
        decay,
        f"m <- m + {_rest(problem.beta1)} * (g - m)",
        f"v <- {problem.beta2!r} * v + {_rest(problem.beta2)} * g * g",
        f"w <- w - r / (1 - {problem.beta1!r}^t) * m / (sqrt(v / (1 - {problem.beta2!r}^t)) + {problem.eps!r})",
    ]
    return textwrap.indent("\n".join(lines), " " * 8)


def _rest(beta: float) -> str:
    """`1 - beta`, to the digits that f32 tells apart."""
    return repr(float(f"{1 - beta:.9g}"))


def _correction(beta: float) -> str:
    """`1 - beta^step`; the power as exp in f64, since in f32 the difference would lose most digits at first."""
    return f"1.0 - tl.exp(step * ({math.log(beta)!r}))" if beta else "1.0 + 0.0 * step"


def _source(name: str, problem: AdamW, cut: Tuning, args: Sequence[str]) -> str:
    numbers = ("unit", "before")
    parameters = textwrap.fill(", ".join(arg if arg in numbers else f"{arg}_ptr" for arg in args), 110)
    dtypes = {role: f"tl.{TRITON_LANGUAGE_DTYPES[dtype]}" for role, dtype in problem.lists.items()}
    pointers = "\n".join(
        f"    {role} = {role}_ptr + (tl.load({role}_at_ptr + owner) * unit + start)" for role in problem.lists
    )
    loaded = "tl.load(grads + element, mask=inside).to(tl.float32)"
    grad = f"{loaded} * scale"
    begin, add, inside, end, adding, told = "", "", "inside", "", "", ""
    if problem.sums:
        loaded, grad, inside = loaded.replace("inside", "inside, other=0.0"), "given * scale", "kept"
        begin = f"\n    total = tl.zeros([{cut.tile}], dtype=tl.float32)"
        add = f"""
        kept = element < written
        given = {loaded}
        total += given * given"""
        end = """
    tl.store(squares_ptr + before + program, tl.sum(total, axis=0))
    tl.store(counted_ptr + before + program, tl.load(sums_ptr + owner))"""
        adding = _adding(name)
        told = "\n    The squares of the chunk's gradients add up to squares[b], which counts in the sum counted[b].\n"
    decayed = f"g = {grad}\n        w -= rate * decay * w" if problem.decoupled else f"g = tl.fma(decay, w, {grad})"
    low = f"\n        tl.store(params + element, w.to({dtypes['params']}), mask={inside})" if problem.param else ""
    return f'''
@triton.jit
def {name}(
{textwrap.indent(parameters, "    ")},
):
    """Chunk chunks[b] ({cut.chunk} elements) of parameter owners[b], with b the number of the program.

    With g = scale * gradient, r = lr * rates[i], and t the number of this update,

{_title(problem)}
{told}    """
    program = tl.program_id(0)
    owner = tl.load(owners_ptr + program)
    start = tl.load(chunks_ptr + program).to(tl.int64) * {cut.chunk}
    count = tl.minimum(tl.load(sizes_ptr + owner) * unit - start, {cut.chunk}).to(tl.int32)
    {"written" if problem.sums else "count"} = tl.where(tl.load(finite_ptr), count, 0)
{pointers}
    scale = tl.load(scale_ptr)
    rate = tl.load(lr_ptr) * tl.load(rates_ptr + owner)
    decay = tl.load(decays_ptr + owner)
    step = tl.load(step_ptr).to(tl.float64)
    size = rate / ({_correction(problem.beta1)}).to(tl.float32)
    unbias = (1.0 / ({_correction(problem.beta2)})).to(tl.float32){begin}
    for tile in range(0, count, {cut.tile}):
        element = tl.max_contiguous(tile + tl.arange(0, {cut.tile}), {cut.vector})
        inside = element < count{add}
        w = tl.load(weights + element, mask=inside).to(tl.float32)
        {decayed}
        m = tl.load(firsts + element, mask=inside)
        v = tl.load(seconds + element, mask=inside)
        m += {_rest(problem.beta1)} * (g - m)
        v = tl.fma(v, {problem.beta2!r}, {_rest(problem.beta2)} * g * g)
        w -= size * tl.div_rn(m, tl.sqrt_rn(v * unbias) + {problem.eps!r})
        tl.store(weights + element, w.to({dtypes["weights"]}), mask={inside})
        tl.store(firsts + element, m, mask={inside})
        tl.store(seconds + element, v, mask={inside}){low}{end}
{adding}'''


def _adding(name: str) -> str:
    """The launches that add the sums of squares of all programs: by {AT_ONCE} programs, and those sums."""
    return f'''

@triton.jit
def {name}_squares(squares_ptr, counted_ptr, partial_ptr, blocks):
    """What {AT_ONCE} programs have of a sum: its number is that of the program along the second axis."""
    part = tl.program_id(0)
    number = tl.program_id(1)
    place = part * {AT_ONCE} + tl.arange(0, {AT_ONCE})
    counted = tl.load(counted_ptr + place, mask=place < blocks, other=-1.0) == number.to(tl.float32)
    squares = tl.load(squares_ptr + place, mask=counted, other=0.0).to(tl.float64)
    tl.store(partial_ptr + number * tl.num_programs(0) + part, tl.sum(squares, axis=0))


@triton.jit
def {name}_sums(partial_ptr, result_ptr, blocks):
    """The sum of the number of the program, of all parts."""
    number = tl.program_id(0)
    parts = tl.cdiv(blocks, {AT_ONCE})
    total = tl.zeros([256], dtype=tl.float64)
    for start in range(0, parts, 256):
        place = start + tl.arange(0, 256)
        total += tl.load(partial_ptr + number * parts + place, mask=place < parts, other=0.0)
    tl.store(result_ptr + number, tl.sum(total, axis=0).to(tl.float32))
'''


def _twin(name: str, problem: AdamW) -> str:
    lists = ", ".join(problem.lists)
    options = f"beta1={problem.beta1!r}, beta2={problem.beta2!r}, eps={problem.eps!r}"
    options += "" if problem.decoupled else ", decoupled=False"
    calls, start = [], 0
    for decay, rate, count in problem.groups:
        part = f"[{start}:{start + count}]" if len(problem.groups) > 1 else ""
        start += count
        weights, grads, firsts, seconds = (f"{role}{part}" for role in ("weights", "grads", "firsts", "seconds"))
        lr = "lr" if rate == 1.0 else f"lr * {rate!r}"
        calls.append(
            f"    rt.adamw_(\n        {weights}, {grads}, {firsts}, {seconds}, step, {lr},\n"
            f"        {options}, weight_decay={decay!r}, scale=scale, finite=finite,\n    )"
        )
    calls += ["    rt.copy_(params, weights)"] * bool(problem.param)
    results = ", ".join(role for role in problem.lists if role != "grads")
    if problem.sums:
        calls.insert(0, _twin_sums(problem))
        results += ", squares"
    body = "\n".join(calls)
    return f'''
def {name}({lists}, lr, scale, step, finite):
    """The update of all parameters, in place.

    With g = scale * gradient, r = lr * rate, and t the number of this update,

{_title(problem)}
    """
{body}
    return {results}
'''


def _twin_sums(problem: AdamW) -> str:
    """The sums of squares, before the update may scale the gradients in place."""
    ends = list(itertools.accumulate(count for _, _, count in problem.groups))
    lists = []
    for number in range(max(problem.sums) + 1):
        parts = [
            f"*grads[{end - group[2]}:{end}]"
            for group, end, of in zip(problem.groups, ends, problem.sums, strict=True)
            if of == number
        ]
        lists.append(f"        rt.square_sum([{', '.join(parts)}]),\n")
    return f"    squares = torch.stack([\n{''.join(lists)}    ])"
