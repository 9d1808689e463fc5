"""Size limits of the style guide: they keep one noun to a file and one idea to a function."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("zinf_core", "zinf_storage", "zinf_torch")
MAX_FILE_LINES, MAX_CLASS_LINES, MAX_FUNCTION_LINES = 400, 250, 40


def sources() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def too_long(tree: ast.Module) -> Iterator[str]:
    """Iterate over the classes and functions of `tree` that are too long, docstrings included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            kind, limit = "class", MAX_CLASS_LINES
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kind, limit = "function", MAX_FUNCTION_LINES
        else:
            continue
        first = min((node.lineno, *(item.lineno for item in node.decorator_list)))
        num_lines = (node.end_lineno or first) - first + 1
        if num_lines > limit:
            yield f"line {first}: {kind} {node.name} has {num_lines} lines, at most {limit}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    """Catches a file, class or function that has grown into several nouns."""
    text = path.read_text(encoding="utf-8")
    num_lines = text.count("\n")
    assert num_lines <= MAX_FILE_LINES, f"{path} has {num_lines} lines"
    assert list(too_long(ast.parse(text))) == []


def test_limits_are_measured_to_the_line() -> None:
    """Catches a measurement that is off by one, or that overlooks methods and decorators."""

    def source(num_lines: int) -> ast.Module:
        body = "\n".join(["        x = 1"] * (num_lines - 2))
        return ast.parse(f"class A:\n    @staticmethod\n    def f():\n{body}\n")

    assert list(too_long(source(MAX_FUNCTION_LINES))) == []
    assert len(list(too_long(source(MAX_FUNCTION_LINES + 1)))) == 1
