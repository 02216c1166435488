"""What a server's steps were, in the form that the compiler reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mgraph.codegen.buckets import match, plan, read_histogram
from mgraph.errors import OptionError
from mgraph.runtime.serving.engine import Engine
from mgraph.runtime.serving.parameters import SamplingParams
from mgraph.runtime.serving.workload import check_target, write
from tests.runtime.serving.fake_stepper import FakeStepper


def test_steps_are_recorded_as_the_compiler_reads_them(tmp_path: Path) -> None:
    engine = Engine(FakeStepper(max_requests=6), prefix_cache=False)
    for at in range(3):
        engine.submit([at, 1, 2, 3, 4], SamplingParams(temperature=0, max_tokens=4))
    while engine.unfinished:
        engine.step()
    assert engine.shapes == Counter({(15, 3): 1, (3, 3): 3})
    write(tmp_path / "steps.json", engine.shapes)
    read = read_histogram(tmp_path / "steps.json")
    assert read == {(3, 3): 3.0, (15, 3): 1.0} and [p.name for p in tmp_path.iterdir()] == ["steps.json"]
    found = plan(read, 4, 16, 4)
    assert found.waste == 0 and all(match(found.buckets, *shape) for shape in read)


def test_where_no_file_can_be(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent" / "steps.json", Path("/dev/null")):
        with pytest.raises(OptionError, match="no file can be written there"):
            check_target(path)
    check_target(tmp_path / "steps.json")
    with pytest.raises(OptionError, match="the steps could not be written: Is a directory"):
        write(tmp_path, {(1, 1): 1})
    assert not list(tmp_path.parent.glob("*.unfinished"))
