"""Installs throw-away distributions with entry points, seen by the real importlib.metadata."""

from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a module with entry points until the test ends."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def do(name: str, source: str, entry_points: str, requires: str = "") -> None:
        (site / f"{name}.py").write_text(source, encoding="utf-8")
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")

    return do
