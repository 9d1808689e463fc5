"""Fixtures of the fault tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
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


@pytest.fixture
def shm_folder() -> Iterator[Path]:
    """Return an empty folder on tmpfs, deleted after the test."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a tmpfs of 256 KiB; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
