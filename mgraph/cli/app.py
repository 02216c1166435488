"""The verbs and their flags. What a verb does is in a module of its own, imported when the verb runs.

The flags of `compile` are made from the fields of `Recipe`; nothing here imports torch or sympy.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mgraph.recipe import JOINED, Recipe, flag_of

_SHORT = {"output": "-o"}
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": []}  # what a verb has declared elsewhere
_Package = Annotated[Path, typer.Argument(metavar="PKG", help="a step package's directory", show_default=False)]
_BatchSize = Annotated[
    int,
    typer.Option(
        "--batch-size",
        min=0,
        help="sequences of a microbatch on a rank (0: the recipe's), or requests of a step that serves (0: one)",
    ),
]
_SeqLen = Annotated[int, typer.Option("--seq-len", min=0, help="tokens of a sequence (0: the recipe's)")]


def command() -> Any:
    """The whole command line, ready to run: typer's command group, whose `commands` are the verbs."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="Compile a plain PyTorch model definition into a step package, and ask what the compiler did.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, verb in VERBS.items():
        app.command(name, context_settings=_PASSED_ON if verb is serve else None)(verb)
    return typer.main.get_command(app)


def _compile(**given: Any) -> None:
    """Compile a model into a step package. stdout: its directory. Flags win over the recipe file."""
    from mgraph.cli.compile import run
    from mgraph.recipe import read_recipe

    recipe_file, force = given.pop("recipe_file"), given.pop("force")
    flags = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v not in (None, [])}
    flags |= {name: ",".join(flags[name]) for name in JOINED if name in flags}
    run(read_recipe(recipe_file, flags), force)


def _recipe_parameters() -> list[inspect.Parameter]:
    """One parameter per field of the recipe (None: not given), then the two flags that are not part of it."""
    parameters = []
    for field in dataclasses.fields(Recipe):
        several = field.default == () or field.name in JOINED
        kind: Any = list[str] if several else type(field.default)
        shown: dict[str, Any] = {"help": field.metadata["help"], "show_default": False}
        if field.metadata["choices"]:
            shown["metavar"] = "|".join(field.metadata["choices"])
        elif field.name in JOINED:
            shown["metavar"] = "<str>"
        if field.name == "model":
            declared: Any = typer.Argument(metavar="[MODEL]", **shown)
        else:
            flags = [flag_of(field.name), *filter(None, [_SHORT.get(field.name)])]
            if kind is bool:
                flags = [f"{flags[0]}/--no-{flags[0][2:]}"]
            elif field.default not in ("", ()):
                shown["help"] += f" (default: {field.default})"
            declared = typer.Option(*flags, **shown)
        parameters.append(_parameter(field.name, Annotated[kind | None, declared], None))
    recipe_file = typer.Option("--recipe", "-c", help="a YAML file that sets any of these fields", show_default=False)
    keep = typer.Option("--force", help="compile over files that were edited; they are kept as *.edited")
    return [
        *parameters,
        _parameter("recipe_file", Annotated[Path | None, recipe_file], None),
        _parameter("force", Annotated[bool, keep], False),
    ]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


# typer reads a verb's flags from its signature.
_compile.__signature__ = inspect.Signature(_recipe_parameters())  # type: ignore[attr-defined]
_compile.__annotations__ = {p.name: p.annotation for p in _recipe_parameters()}


def dump(
    package: _Package,
    snapshot: Annotated[
        str, typer.Argument(metavar="[PASS]", help="the graph after this pass, by name or number (default: the last)")
    ] = "",
    function: Annotated[str, typer.Option("--fn", metavar="NAME", help="this function only")] = "",
    form: Annotated[str, typer.Option("--format", metavar="text|json|dot|svg|html", help="how to write it")] = "text",
) -> None:
    """Print a graph of a package."""
    from mgraph.cli.graphs import dump as run

    run(package, snapshot, function, form)


def diff(
    package: _Package,
    before: Annotated[str, typer.Argument(metavar="[PASS_A]", help="alone: what this pass changed")] = "",
    after: Annotated[str, typer.Argument(metavar="[PASS_B]", help="with PASS_A: from after A to after B")] = "",
    form: Annotated[str, typer.Option("--format", metavar="text|json", help="how to write it")] = "text",
    limit: Annotated[int, typer.Option("--limit", min=1, help="nodes of each sort per function")] = 20,
) -> None:
    """Compare two graphs of a package, by stable node ids (default: what all passes together changed)."""
    from mgraph.cli.graphs import diff as run

    run(package, before, after, form, limit)


def explain(
    package: _Package,
    what: Annotated[
        str,
        typer.Argument(
            metavar="[NODE|PATTERN]",
            help="a node id, FUNCTION:NODE, an op, a layer or module, a pass, or what it looks for; * and ? are wild",
        ),
    ] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="nodes, modules and near misses to show")] = 10,
) -> None:
    """Say why a node, a layer or a module looks as it does: passes, cost, kernels, and why a fusion did not fire."""
    from mgraph.cli.explain import run

    run(package, what, limit)


def collectives(
    package: _Package,
    form: Annotated[str, typer.Option("--format", metavar="text|json", help="how to write it")] = "text",
) -> None:
    """List the collectives of a package in their order: kind, bytes, axis, where they stand, what overlaps them."""
    from mgraph.cli.collectives import run

    run(package, form)


def memory(
    package: _Package,
    batch_size: _BatchSize = 0,
    seq_len: _SeqLen = 0,
    ranks: Annotated[int, typer.Option("--ranks", min=0, help="processes in all (0: the fewest of the mesh)")] = 0,
    entry: Annotated[str, typer.Option("--entry", help="show the tensors at its peak (default: the highest)")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="tensors to show")] = 20,
    form: Annotated[str, typer.Option("--format", metavar="text|json|svg|html", help="how to write it")] = "text",
) -> None:
    """Predict the memory of a rank: state, the peak of each entry and function, and the tensors that make it up."""
    from mgraph.cli.memory import run

    run(package, batch_size, seq_len, ranks, entry, limit, form)


def kernels(
    package: _Package,
    batch_size: _BatchSize = 0,
    seq_len: _SeqLen = 0,
    entry: Annotated[str, typer.Option("--entry", help="this entry alone (default: those of a step)")] = "",
    rates: Annotated[str, typer.Option("--rates", help="predict by this profile (default: the package's)")] = "",
    measure: Annotated[
        bool, typer.Option("--profile", help="run steps under a profiler: measured times beside")
    ] = False,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="with --profile: steps to run (default: 3)")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="auto|cpu|cuda", help="with --profile: where (default: auto)")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="nodes of a function to show")] = 20,
    form: Annotated[str, typer.Option("--format", metavar="text|json", help="how to write it")] = "text",
) -> None:
    """List who runs each node of a package, the runner-up, predicted (or measured) times and bytes, by source line."""
    from mgraph.cli.kernels import run

    run(package, {"B": batch_size, "S": seq_len}, entry, rates, limit, form, measure, steps, device)


def serve(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="PKG", help="the package, then options of its serve.py")
    ] = None,
) -> None:
    """Serve a package behind HTTP, as OpenAI's API does; the options are those of its serve.py."""
    from mgraph.cli.serve import run

    run(arguments or [])


def tune(
    model: Annotated[str, typer.Argument(metavar="PKG|MODEL", help="whose ops to measure", show_default=False)],
    batch_size: _BatchSize = 0,
    seq_len: _SeqLen = 0,
    precision: Annotated[
        str, typer.Option("--precision", metavar="fp32|bf16|fp16", help="of a MODEL; a package has its own")
    ] = "bf16",
    base: Annotated[str, typer.Option("--profile", help="the profile to begin with, a name or a file")] = "h100",
    output: Annotated[str, typer.Option("--output", "-o", help="the profile to write")] = "tuned.json",
) -> None:
    """Measure on this GPU who runs the ops of a model fastest, and write a profile for mgraph compile --profile."""
    from mgraph.cli.tune import run

    run(model, {"B": batch_size, "S": seq_len}, precision, base, output)


def opt(
    file: Annotated[str, typer.Argument(metavar="FILE", help="IR text; - is stdin", show_default=False)],
    passes: Annotated[str, typer.Option("--passes", "-p", help="a pipeline, e.g. dce,cse{option=1}")] = "",
    have: Annotated[str, typer.Option("--have", help="properties that hold already, e.g. outlined,canonical")] = "",
    print_after: Annotated[
        str, typer.Option("--print-after", help="passes (names or patterns) to print the graph after, to stderr")
    ] = "",
    verify_each: Annotated[bool, typer.Option("--verify-each", help="verify after every pass")] = False,
    time: Annotated[bool, typer.Option("--time", help="print each pass's seconds and op counts to stderr")] = False,
) -> None:
    """Run passes over IR text: a filter, graph in, graph out."""
    from mgraph.cli.opt import run

    run(file, passes, have, print_after, verify_each=verify_each, time=time)


def passes() -> None:
    """List the passes: stage, tier, options."""
    from mgraph.cli.catalogue import passes as run

    run()


def ops() -> None:
    """List the ops that mgraph declares; every op of torch works besides."""
    from mgraph.cli.catalogue import ops as run

    run()


def env() -> None:
    """Show versions, what is installed, devices, settings."""
    from mgraph.cli.environment import run

    run()


def version() -> None:
    """Print the version."""
    import mgraph

    print(mgraph.__version__)


VERBS: dict[str, Callable[..., None]] = {
    "compile": _compile,
    "dump": dump,
    "diff": diff,
    "explain": explain,
    "collectives": collectives,
    "memory": memory,
    "kernels": kernels,
    "tune": tune,
    "serve": serve,
    "opt": opt,
    "passes": passes,
    "ops": ops,
    "env": env,
    "version": version,
}
