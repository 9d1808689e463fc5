"""Check of laws 9 and 14 on processes that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from zinf_core.testing.bench import Bench
from zinf_core.testing.crash import kill_repeatedly


@pytest.mark.zinf_crash
def survives_kills(bench: Bench, tmp_path: Path) -> None:
    """Catches flushes acknowledged too early or done in place, and opens that destroy."""
    if not bench.capabilities.persistent:
        pytest.skip("the tier is not persistent")
    if not bench.hooks.num_kills:
        pytest.skip("the suite has num_kills = 0: set it to have processes killed")
    folder = tmp_path / "killed"
    folder.mkdir()
    unit = max(bench.capabilities.offset_align, bench.capabilities.length_align)
    kill_repeatedly(bench.hooks, folder, unit=unit)
