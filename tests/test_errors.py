"""What a person reads when they did something wrong."""

from __future__ import annotations

import errno
import pickle

from mgraph.errors import MgraphError, ModelError, did_you_mean, some_of, storage_hint


def test_text_says_what_where_and_what_to_do() -> None:
    error = ModelError("there is no model 'mor'", where="recipe.yaml:3", hint="did you mean 'moe'?")
    assert str(error) == "error: there is no model 'mor'\n  at recipe.yaml:3\n  try: did you mean 'moe'?"
    assert str(MgraphError("disk full")) == "error: disk full"
    assert error.exit_code == 2


def test_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(ModelError("what", "where", "hint")))
    assert type(error) is ModelError
    assert (error.message, error.where, error.hint) == ("what", "where", "hint")


def test_did_you_mean() -> None:
    assert did_you_mean("mor", ["moe", "dense"]) == "did you mean 'moe'?"
    assert did_you_mean("xyz", ["moe", "dense"]) == "one of dense, moe"
    many = did_you_mean("xyz", [f"model{i:03}" for i in range(250)])
    assert many.startswith("one of model000, model001") and many.endswith("model099, and 150 more")


def test_some_of_many_names() -> None:
    assert some_of(["a", "b"]) == "a, b" and some_of(list("abcdefg"), 5) == "a, b, c, d, e, and 2 more"


def test_only_a_full_disk_asks_for_space() -> None:
    assert storage_hint(OSError(errno.ENOSPC, "full")) == storage_hint(RuntimeError("short write"))
    assert "space" in storage_hint(OSError(errno.EDQUOT, "quota"))
    assert storage_hint(PermissionError(errno.EACCES, "no")) == "give another"
