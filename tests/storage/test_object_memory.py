"""ObjectTier's promise of scratch memory, measured from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KEY_NBYTES = 96 << 20
PART_NBYTES = 8 << 20
NUM_THREADS = 2

CHILD = f"""
import resource, sys
from pathlib import Path
from object_helpers import *
from object_helpers import opened
from zinf_core.testing.buffers import host_buffer
from zinf_storage.object_store import ObjectOptions

def peak_nbytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

options = ObjectOptions(part_nbytes={PART_NBYTES}, num_threads={NUM_THREADS})
with opened(Path(sys.argv[1]), options) as tier:
    whole = host_buffer({KEY_NBYTES})
    whole.array[:] = 7
    tier.reserve(key(0), {KEY_NBYTES})
    before = peak_nbytes()
    tier.write_from(key(0), whole).wait()
    tier.read_into(key(0), whole).wait()
    print(peak_nbytes() - before)
    some = whole.part(0, {KEY_NBYTES} - 2)
    tier.write_from(key(0), some, offset=1).wait()
    print(peak_nbytes() - before)
"""


@pytest.mark.slow
def test_scratch_memory_is_what_is_promised(tmp_path: Path) -> None:
    """Catches whole keys, or parts of many of them, held a second time while they travel."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    whole, some = map(int, child.stdout.split())
    slack = 4 << 20
    assert whole <= NUM_THREADS * (1 << 20) + slack
    assert some <= NUM_THREADS * (PART_NBYTES + (1 << 20)) + slack
