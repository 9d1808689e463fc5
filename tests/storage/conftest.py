"""Fixtures of the storage tests."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvme_helpers import num_fds


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread or a descriptor behind."""
    before = threading.active_count(), num_fds()
    yield
    assert (threading.active_count(), num_fds()) == before


@pytest.fixture
def small_ext4(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on an ext4 file system of 2 MiB; needs root and a loop device."""
    image, folder = tmp_path / "image", tmp_path / "ext4"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(2 << 20)
    for command in (["mkfs.ext4", "-q", "-F", "-m", "0", image], ["mount", image, folder]):
        try:
            subprocess.run(command, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("only root may mount a small ext4")
    yield folder
    subprocess.run(["umount", folder], check=True)
