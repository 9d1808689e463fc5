"""The system calls of the NVMe tier, as data: tests hand in calls that fail once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemCalls:
    """Each field is called exactly like the function of the same name in `os`."""

    open: Callable[..., int] = os.open
    preadv: Callable[..., int] = os.preadv
    pwritev: Callable[..., int] = os.pwritev
    write: Callable[..., int] = os.write
    fallocate: Callable[..., None] = os.posix_fallocate
    ftruncate: Callable[..., None] = os.ftruncate
    fadvise: Callable[..., None] = os.posix_fadvise
    fdatasync: Callable[..., None] = os.fdatasync
    fsync: Callable[..., None] = os.fsync
    replace: Callable[..., None] = os.replace
    statvfs: Callable[..., Any] = os.statvfs
