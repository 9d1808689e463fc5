"""NvmeTier under SIGKILL: the last flush is there, complete, and nothing newer."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from nvme_helpers import SMALL, FailingCalls, flush, key, noise, opened, read, store
from test_nvme_folder import child

from zinf_storage.nvme import FolderKind

KEYS = 4
NBYTES = 30_001

WRITER = f"""
import sys
from nvme_helpers import *
with opened(sys.argv[1]) as tier:
    for i in range({KEYS}):
        tier.reserve(key(i), {NBYTES})
    generation = 0
    while True:
        new = buffer_of(noise({NBYTES}, generation))
        writes = [tier.write_from(key(i), new) for i in range({KEYS})]
        for write in writes:
            write.wait()
        if generation % 2 == 0:
            flush(tier)
            print(generation, flush=True)
        generation += 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 2, 5])
def test_a_killed_writer_leaves_its_last_flush(tmp_path: Path, lines: int) -> None:
    """Catches overwrites in place, extents freed while a manifest names them, and manifests
    renamed before the bytes they name are there. Odd generations are never flushed, so their
    bytes may not appear; the kill comes at a random moment after a flush was reported."""
    with child(WRITER, tmp_path, stdout=subprocess.PIPE) as writer:
        for _ in range(lines):
            reported = int(writer.stdout.readline())
        # Not a wait for anything: it only varies the moment of the kill.
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(timeout=random.Random(lines).uniform(0.0, 0.02))
        writer.kill()
        later = [int(line) for line in writer.stdout.read().split()]
    with opened(tmp_path, SMALL) as tier:
        assert tier.found.kind is FolderKind.COMMITTED
        found = {read(tier, key(i)) for i in range(KEYS)}
        last = later[-1] if later else reported
        # A kill between the rename and the report leaves the next flush.
        assert found in ({noise(NBYTES, last)}, {noise(NBYTES, last + 2)})


def test_a_commit_syncs_before_it_names(tmp_path: Path) -> None:
    """Catches a manifest that is durable before the bytes it names, which a killed process cannot
    show and a power cut would; and a rename that is not synced."""
    traced = FailingCalls()
    with opened(tmp_path, SMALL, traced.calls()) as tier:
        store(tier, key(0), noise(NBYTES))
        traced.log.clear()
        flush(tier)
        manifest = ["open", "write", "ftruncate", "fsync", "replace"]
        folder = ["open", "fsync"]
        room_for_the_next = ["statvfs", "open", "fallocate"]
        assert traced.log == ["fdatasync", *manifest, *folder, *room_for_the_next]
