"""What every tier refuses at submit: sizes and offsets that are no ints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from zinf_core.errors import ConfigError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.registry import open_tier
from zinf_core.testing import DictTier, host_buffer
from zinf_core.tier import Tier

KEY = TensorKey.of("w", StateKind.PARAM)
OPEN: dict[str, Callable[[Path], Tier]] = {
    "dict": lambda folder: DictTier(),
    "host": lambda folder: open_tier("host://", capacity_nbytes=1 << 20),
    "nvme": lambda folder: open_tier(f"nvme://{folder}"),
    "object": lambda folder: open_tier(f"object://file://{folder}"),
    "checksummed": lambda folder: open_tier(f"checksummed://[nvme://{folder}]"),
}


@pytest.mark.parametrize("name", OPEN)
def test_numbers_must_be_ints(tmp_path: Path, name: str) -> None:
    """Catches a numpy size that a manifest cannot hold, and a float offset that wedges a queue."""
    tier = OPEN[name](tmp_path / "t")
    with pytest.raises(ConfigError, match="is no int"):
        tier.reserve(KEY, np.int64(8192))  # type: ignore[arg-type]
    tier.reserve(KEY, 8192)
    for submit in (tier.read_into, tier.write_from):
        for offset in (4096.0, np.int64(4096)):
            with pytest.raises(ConfigError, match="is no int"):
                submit(KEY, host_buffer(4096), offset=offset)  # type: ignore[arg-type]
    tier.write_from(KEY, host_buffer(8192)).wait()
    tier.flush().wait()
    tier.close()
