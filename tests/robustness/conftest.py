"""Every test leaves as many threads and descriptors as it found, and torch uses one thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from robustness.support import num_fds


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Compute with one thread until the session ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread or a descriptor behind."""
    before = threading.active_count(), num_fds()
    yield
    if (threading.active_count(), num_fds()) != before:
        gc.collect()
    assert (threading.active_count(), num_fds()) == before
