"""Fixtures of the fault tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def _num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread or a descriptor behind."""
    before = threading.active_count(), _num_descriptors()
    yield
    assert (threading.active_count(), _num_descriptors()) == before


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Run torch in one thread: for tiny tensors, waking others costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
