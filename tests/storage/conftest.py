"""Fixtures of the storage tests."""

from __future__ import annotations

import shutil
import tempfile
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
def shm_folder() -> Iterator[Path]:
    """Return an empty folder on tmpfs, deleted after the test."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)
