"""What a section is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a section is to run."""

    simulate: bool
    """Use a simulated device."""
    quick: bool
    """Fewer sizes, rounds and variants."""
    folder: Path
    """Where files are made, and removed again."""
    no_kvikio: str
    """Why kvikio must not be touched; empty: it may be."""
