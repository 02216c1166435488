"""The rules of the checkout: links, sizes, docstrings, directions of import, what a wheel holds."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("mgraph", "runtime", "models")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 700, 80

COMPILER = ("mgraph.capture", "mgraph.ir", "mgraph.passes", "mgraph.codegen")
FORBIDDEN = {
    "mgraph/ir": ("mgraph.capture", "mgraph.passes", "mgraph.codegen", "mgraph.runtime"),
    "mgraph/capture": ("mgraph.passes", "mgraph.codegen", "mgraph.runtime"),
    "mgraph/passes": ("mgraph.capture", "mgraph.codegen", "mgraph.runtime"),
    "mgraph/codegen": ("mgraph.runtime",),
    "runtime": COMPILER,
    "models": ("mgraph",),
}
"""Directory -> what nothing in it may import, not even inside a function."""


@functools.cache
def _sources() -> tuple[Path, ...]:
    """Every Python file of ours, once each (links are not followed)."""
    folders = (*PACKAGES, "tests", "benchmarks", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return tuple(
        sorted(
            p.relative_to(ROOT)
            for p in paths
            if not p.is_relative_to(ROOT / "mgraph/runtime") and not p.is_relative_to(ROOT / "mgraph/models")
        )
    )


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    if parts[0] in ("runtime", "models"):
        parts = ("mgraph", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Absolute names that import statements among `nodes` may load; `from a import b` gives both a and a.b."""
    package = _module_name(path) if path.name == "__init__.py" else _module_name(path).rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """Statements that run when a module is imported: no bodies of functions, nothing for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _at_import_time(child)


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("name", ["runtime", "models"])
def test_links_lead_to_the_top(name: str) -> None:
    link = ROOT / "mgraph" / name
    assert link.is_symlink() and link.readlink() == Path("..") / name
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", ["runtime", "models"])
def test_guard_refuses_the_other_name(name: str) -> None:
    result = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert f"{name}/ is imported as mgraph.{name}, not as {name}" in result.stderr


def test_files_are_short() -> None:
    long = {str(path): n for path in _sources() if (n := (ROOT / path).read_text().count("\n")) > MAX_FILE_LINES}
    assert not long


def test_functions_are_short() -> None:
    long = [
        f"{path}:{node.lineno} {node.name}"
        for path in _sources()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long


def test_every_module_has_a_docstring() -> None:
    assert not [str(path) for path in _sources() if not ast.get_docstring(_tree(path))]


@pytest.mark.parametrize("folder", sorted(FORBIDDEN))
def test_imports_go_one_way(folder: str) -> None:
    wrong = [
        f"{path} imports {name}"
        for path in _sources()
        if path.is_relative_to(folder)
        for name in _imports(path, ast.walk(_tree(path)))
        for package in FORBIDDEN[folder]
        if _within(name, package) and not (folder == "models" and _within(name, "mgraph.models"))
    ]
    assert not wrong


def test_ir_imports_torch_only_inside_functions() -> None:
    wrong = [
        f"{path} imports {name}"
        for path in _sources()
        if path.is_relative_to("mgraph/ir")
        for name in _imports(path, _at_import_time(_tree(path)))
        if _within(name, "torch") or _within(name, "mgraph.philox")
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("statement", "absent"),
    [("import mgraph, mgraph.errors", {"torch", "sympy", "numpy"}), ("import mgraph.ir", {"torch", "triton"})],
)
def test_imports_are_lazy(statement: str, absent: set[str]) -> None:
    code = f"{statement}; import sys; print(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not absent & set(result.stdout.split())


def test_top_of_package_is_short() -> None:
    assert (ROOT / "mgraph/__init__.py").read_text().count("\n") <= 40


@pytest.mark.full
def test_wheel_holds_the_checkout(tmp_path: Path) -> None:
    """All modules of the checkout, nothing else, under the one top-level name mgraph."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
        ".",
    ]
    copy = tmp_path / "checkout"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name) for name in archive.namelist() if ".dist-info/" not in name}
    checkout = {p.relative_to(copy) for folder in PACKAGES for p in (copy / folder).rglob("*.py")}
    expected = {p if p.parts[0] == "mgraph" else Path("mgraph") / p for p in checkout}
    assert {name for name in names if name.suffix == ".py"} == expected
    assert {name.parts[0] for name in names} == {"mgraph"}
    assert {Path("mgraph/py.typed"), Path("mgraph/runtime/serving/page.html")} <= names
