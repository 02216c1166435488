"""Kernels that come to their multiprocessors while those before them end (programmatic dependent launch, CUDA 12.3).

Each program first waits for what was launched before its kernel, and the last ones then let what follows come, which
waits as well:

    come_early()                              griddepcontrol.wait; of the last programs griddepcontrol.launch_dependents

So between two kernels of a CUDA graph, where the runtime launches them so, lies no launch any more: a microsecond, much
of a step that decodes. A kernel may only be launched that way if all of its programs wait before they read or write
anything: then what is before it has ended, and what follows, which waits for it, is after both. It comes when each
program of the launch before has let it or has ended, and all of these had waited: so all but that one launch has ended.
A kernel may read before it waits what no launch of a step writes, and says by a comment, `HERE`, where it must wait.
One whose work is so short that what follows would come when it has ended says by another, `AHEAD`, that it may come
before: then up to two launches may be under way, and what follows waits for both, as this one waits.

To let it come takes an H200 0.3 ns a program, one after the other, a third of the time of short programs: where all do,
a head of 128,256 columns takes one token 157 us, and 116 where the last 4,224 do (an experiment without rows). As many
have room on it at most, so that about when the last have begun those before have ended.

What comes early goes to multiprocessors in the order in which these become free, to the first of them as many programs
as they have room for. Programs that end soon make up for that: others come in their place. Where each works long, and
all have room at once, a few multiprocessors would do everything (the router of 32,768 tokens takes 39.6 us so, 29.2
evenly; attention of 128 requests in a window 14.4 and 13.5): such a launch is `spread`, and the runtime leaves it for
when all multiprocessors are free. With no more programs than multiprocessors the launch counts for more than how they
lie (the router of 256 tokens takes 6.5 us early, 7.3 otherwise), and they come.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace

from mgraph.codegen.triton.kernel import KernelSpec

FIRST = 90
"""The first architecture, sm_90, that has the instructions."""
CALL = "come_early()"
HERE = "# waits here for what was launched before"
AHEAD = "# lets what follows come from here on"
_WAIT, _LET = "wait_for_before()", "let_next_come()"
LAST = 132 * 32
"""The multiprocessors of an H100 or H200, and the most programs that one has room for."""
HELPER = f'''
EARLY = tl.constexpr(True)  # the runtime says otherwise where it has these compiled for a GPU before sm_90


@triton.jit
def {_WAIT}:
    """Waits for all launches before this one."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def {_LET}:
    """Launches after this one may come, and wait for it."""
    if EARLY:
        x, y, z = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
        place = tl.program_id(0) + x * (tl.program_id(1) + y * tl.program_id(2))
        if x * y * z - place <= {LAST}:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def {CALL}:
    """Waits for all launches before this one; those after it may come and wait for it then."""
    {_WAIT}
    {_LET}
'''


def can_come_early(archs: Sequence[str]) -> bool:
    """Whether kernels for these architectures, such as `sm_90a`, may come while others end."""
    numbers = [re.match(r"sm_(\d+)", arch) for arch in archs]
    return bool(numbers) and all(number is not None and int(number[1]) >= FIRST for number in numbers)


def coming_early(spec: KernelSpec) -> KernelSpec:
    """The kernel with a `come_early()` as the first statement of each function that is launched, or where that says."""
    launched = {launch.function for launch in spec.launches}
    lines = spec.source.splitlines(keepends=True)
    functions = [node for node in ast.parse(spec.source).body if isinstance(node, ast.FunctionDef)]
    assert launched <= {function.name for function in functions}, f"kernel {spec.name} launches what is not in its text"
    for function in reversed(functions):
        if function.name in launched:
            first = function.body[1] if ast.get_docstring(function) is not None else function.body[0]
            margin, within = " " * first.col_offset, range(first.lineno - 1, function.end_lineno or len(lines))
            here, ahead = (
                next((number for number in within if lines[number].strip() == said), None) for said in (HERE, AHEAD)
            )
            lines.insert(within[0] if here is None else here, f"{margin}{CALL if ahead is None else _WAIT}\n")
            if ahead is not None:
                assert here is not None and ahead < here, f"{function.name} lets what follows come, and waits nowhere"
                lines.insert(ahead, f"{margin}{_LET}\n")
    return replace(spec, source="".join(lines))


def comes_early(spec: KernelSpec) -> bool:
    """Whether a kernel begins so."""
    return any(f" {call}\n" in spec.source for call in (CALL, _WAIT))
