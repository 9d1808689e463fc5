"""Fixtures of the storage tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from nvme_helpers import num_fds


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread or a descriptor behind."""
    before = threading.active_count(), num_fds()
    yield
    assert (threading.active_count(), num_fds()) == before
