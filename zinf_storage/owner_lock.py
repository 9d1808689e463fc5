"""OwnerLock: the lock of a tier, which lets only the process in that opened it."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from zinf_core.errors import TierClosedError


class OwnerLock:
    """Wraps a lock. A forked child is refused before it could wait: a thread that held the lock
    is not there to release it."""

    __slots__ = ("_lock", "_pid", "_what")

    def __init__(self, lock: threading.Lock, *, what: str) -> None:
        """Guard `lock`; `what` names the tier in messages."""
        self._lock = lock
        self._what = what
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that opened the tier."""
        return os.getpid() == self._pid

    def __enter__(self) -> None:
        """Acquire the lock. Raises TierClosedError in a forked child."""
        if not self.is_ours:
            raise TierClosedError(
                f"{self._what}: process {self._pid} opened it and forked; transfers must be made "
                "there"
            )
        self._lock.acquire()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the lock."""
        self._lock.release()
