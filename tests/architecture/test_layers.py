"""Rules of the layers that import-linter's contracts cannot express."""

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zinf_core
from zinf_core import errors

ROOT = Path(__file__).parents[2]
PACKAGES = ("zinf_core", "zinf_storage", "zinf_torch")
ASSERTS_ALLOWED = ROOT / "zinf_core" / "testing"
CORE_MAY_IMPORT = {"msgpack", "numpy", "zinf_core", *sys.stdlib_module_names}
KIT_MAY_IMPORT = {"hypothesis", "pytest"}


def sources(package: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def imported_roots(tree: ast.Module) -> set[str]:
    """Return the top-level packages that `tree` imports, wherever in the file it does."""
    roots: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").partition(".")[0])
    return roots


@pytest.mark.parametrize("package", PACKAGES)
def test_no_assert_and_no_print(package: str) -> None:
    """Catches work done inside `assert`, gone under `python -O`, and output nobody asked for."""
    found = []
    for path, tree in sources(package):
        for node in ast.walk(tree):
            is_assert = isinstance(node, ast.Assert) and ASSERTS_ALLOWED not in path.parents
            is_print = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "print"
            )
            if is_assert or is_print:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_core_imports_only_what_it_may() -> None:
    """Catches a framework or helper library in the core that no list of forbidden names has."""
    found = []
    for path, tree in sources("zinf_core"):
        allowed = CORE_MAY_IMPORT
        if ASSERTS_ALLOWED in path.parents:
            allowed = CORE_MAY_IMPORT | KIT_MAY_IMPORT
        found += [
            f"{path.relative_to(ROOT)}: {root}" for root in sorted(imported_roots(tree) - allowed)
        ]
    assert found == []


@pytest.mark.parametrize("library", ["cupy", "kvikio"])
def test_device_libraries_have_one_door(library: str) -> None:
    """Catches a second import of a library that not every machine can import."""
    doors = [
        path
        for package in PACKAGES
        for path, tree in sources(package)
        if library in imported_roots(tree)
    ]
    assert len(doors) <= 1
    assert all(path.is_relative_to(ROOT / "zinf_storage") for path in doors)


def test_core_errors_are_drawn() -> None:
    """Catches an exception that the tree drawn in `errors` lacks or hangs in the wrong place."""
    defined = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.ZinfError)
    }
    drawn: dict[str, int] = {}
    parents: dict[str, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│├└─ ]*)(\w+Error)\b", line)
        if match:
            depth = len(match[1]) // 4
            above = [name for name, other in drawn.items() if other == depth - 1]
            parents[match[2]] = above[-1] if above else ""
            drawn[match[2]] = depth
    assert set(drawn) == set(defined)
    for name, parent in parents.items():
        if parent:
            assert defined[parent] in defined[name].__bases__, f"{name} drawn under {parent}"


def test_no_error_of_ours_is_defined_elsewhere() -> None:
    """Catches an exception outside the tree, which no caller could know to catch."""
    for module in pkgutil.walk_packages(zinf_core.__path__, "zinf_core."):
        if module.name.startswith("zinf_core.testing"):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if inspect.isclass(value) and issubclass(value, errors.ZinfError):
                assert value.__module__ == "zinf_core.errors", f"{module.name}.{name}"
