"""What the person at the terminal sees: items as they come, a table at the end."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from gpu.children import Outcome

_MARKS = {"pass": "ok  ", "fail": "FAIL", "skip": "skip", "info": "    "}
_COLUMNS = ("section", "passed", "noted", "failed", "skipped", "seconds", "remarks")


def show_item(item: dict[str, Any]) -> None:
    """Print one item of a section."""
    line = f"  {_MARKS[item['status']]} {item['name']}: {item['text'] or 'done'}"
    sys.stdout.write(textwrap.fill(line, 110, subsequent_indent=" " * 9) + "\n")
    sys.stdout.flush()


def show_table(outcomes: Sequence[Outcome], verdict: str) -> None:
    """Print a line for each section, what failed and what was skipped, and the verdict."""
    rows = [_row(outcome) for outcome in outcomes]
    if importlib.util.find_spec("rich") is None:
        _print_plain(rows)
    else:
        _print_rich(rows)
    for word, status in (("FAILED", "fail"), ("Skipped", "skip")):
        for outcome in outcomes:
            for item in outcome.items:
                if item["status"] == status:
                    text = f"{word}: {outcome.name}, {item['name']}: {item['text']}"
                    print(textwrap.fill(text, 110, subsequent_indent="    "))
    print(verdict)


def _row(outcome: Outcome) -> tuple[str, ...]:
    counts = dict.fromkeys(_MARKS, 0)
    for item in outcome.items:
        counts[item["status"]] += 1
    return (
        outcome.name,
        str(counts["pass"]),
        str(counts["info"]),
        str(outcome.num_failed),
        str(counts["skip"]),
        f"{outcome.seconds:.1f}",
        "" if outcome.status == "ran" else f"{outcome.status}: {outcome.text}",
    )


def _print_rich(rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console  # noqa: PLC0415 - optional
    from rich.table import Table  # noqa: PLC0415 - optional
    from rich.text import Text  # noqa: PLC0415 - optional

    table = Table(*_COLUMNS)
    for row in rows:
        style = "red" if row[3] != "0" else "green"
        table.add_row(*(Text(cell, style=style if i < 4 else "") for i, cell in enumerate(row)))
    Console().print(table)


def _print_plain(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    for row in (_COLUMNS, *rows):
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
