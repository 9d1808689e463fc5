"""What a section finds, item by item, as lines of JSON to whoever started it."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """Raised inside an item that cannot be checked on this machine."""


class CheckFailed(Exception):
    """Raised inside an item whose check found something wrong."""


@dataclass
class Finding:
    """What an item says besides whether it passed."""

    text: str = ""
    data: dict[str, Any] = field(default_factory=dict)


class Report:
    """Sends findings to the descriptor `fd` as they come. Not thread-safe."""

    def __init__(self, fd: int, *, seconds: float) -> None:
        """Belong to a section that has `seconds` from now."""
        self._fd = fd
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds the section has left."""
        return self._end - time.monotonic()

    def at(self, what: str) -> None:
        """Say what is being done, for the case that it never ends."""
        self._send(event="at", name=what)

    def note(self, name: str, text: str, **data: Any) -> None:
        """Report a fact; it cannot fail."""
        self._send(event="item", name=name, status="info", text=text, data=data)

    @contextmanager
    def item(self, name: str, *, is_check: bool = True) -> Iterator[Finding]:
        """Report one check: passed if the block ends, skipped if it raises Skipped, else failed.

        What comes after the block is run in any case. What is no check, but a measurement, does not
        pass; it is noted, or failed.
        """
        self.at(name)
        finding, start = Finding(), time.monotonic()
        status = "pass" if is_check else "info"
        try:
            yield finding
        except Skipped as exc:
            status, finding.text = "skip", str(exc)
        except CheckFailed as exc:
            status, finding.text = "fail", str(exc)
        except Exception as exc:  # noqa: BLE001 - the report names it, and the next item runs
            status, finding.text = "fail", f"{type(exc).__name__}: {exc} ({_place(exc)})"
            finding.data["traceback"] = traceback.format_exc()
        self._send(
            event="item",
            name=name,
            status=status,
            text=finding.text,
            data=finding.data,
            seconds=round(time.monotonic() - start, 3),
        )

    def end(self) -> None:
        """Say that the section is through."""
        self._send(event="end")

    def _send(self, **record: Any) -> None:
        line = json.dumps(record, default=str).encode() + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]


def _place(exc: BaseException) -> str:
    """Return the last few places of a traceback, innermost last."""
    frames = traceback.extract_tb(exc.__traceback__)[-3:]
    return " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
