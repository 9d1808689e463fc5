"""Habits that end in races, hangs or lost settings: none of them is in the packages."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("zinf_core", "zinf_storage", "zinf_torch")
MUTABLE = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp


@cache
def nodes() -> tuple[tuple[str, ast.AST], ...]:
    """Return every node of the packages, with the place it stands at."""
    return tuple(
        (f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", node)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def called(node: ast.AST) -> str:
    """Return the last name of what `node` calls, empty if it is no call."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def sleeps(node: ast.AST) -> bool:
    return called(node) == "sleep"


def starts_a_daemon(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.keyword) and node.arg == "daemon" and ast.unparse(node.value) == "True"
    )


def catches_everything(node: ast.AST) -> bool:
    """Whether `node` is a handler of everything that neither raises, keeps nor reports it."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    if node.type is None:
        return True
    is_wide = ast.unparse(node.type) in {"Exception", "BaseException"}
    uses = node.name and any(
        isinstance(inner, ast.Name) and inner.id == node.name
        for statement in node.body
        for inner in ast.walk(statement)
    )
    raises = any(isinstance(inner, ast.Raise) for part in node.body for inner in ast.walk(part))
    return is_wide and not uses and not raises


def has_mutable_default(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return False
    defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
    return any(isinstance(default, MUTABLE) for default in defaults)


def imports_a_star(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)


def changes_globals(node: ast.AST) -> bool:
    return isinstance(node, ast.Global)


def raises_a_stub(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and "NotImplemented" in ast.unparse(node)


@pytest.mark.parametrize(
    "is_hazard",
    [
        sleeps, starts_a_daemon, catches_everything, has_mutable_default, imports_a_star,
        changes_globals, raises_a_stub,
    ],
)  # fmt: skip
def test_no_hazard(is_hazard: Callable[[ast.AST], bool]) -> None:
    """Catches waiting by sleeping, threads that die mid-write, errors that vanish, state shared
    by accident, and parts that are not there."""
    assert [place for place, node in nodes() if is_hazard(node)] == []


@pytest.mark.parametrize(
    ("source", "is_hazard"),
    [
        ("time.sleep(1)", sleeps),
        ("Thread(target=f, daemon=True)", starts_a_daemon),
        ("try:\n    f()\nexcept Exception:\n    pass", catches_everything),
        ("try:\n    f()\nexcept:\n    raise", catches_everything),
        ("def f(x=[]): pass", has_mutable_default),
        ("def f(*, x={}): pass", has_mutable_default),
        ("from a import *", imports_a_star),
        ("def f():\n    global x", changes_globals),
        ("def f():\n    raise NotImplementedError", raises_a_stub),
    ],
)
def test_hazards_are_recognized(source: str, is_hazard: Callable[[ast.AST], bool]) -> None:
    """Catches a check that never finds anything."""
    assert any(map(is_hazard, ast.walk(ast.parse(source))))
