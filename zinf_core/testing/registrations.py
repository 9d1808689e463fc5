"""Registrations: host memory pinned for a simulated device, and mistakes made with it."""

from __future__ import annotations

import ctypes
import threading

from zinf_core.errors import BudgetError, InternalError
from zinf_core.units import PAGE_NBYTES, align_up


class Registrations:
    """Ranges of host memory that are registered now.

    Hardware does not forgive memory registered twice, given back unregistered, or unmapped while
    it is registered; here each of these raises InternalError. Thread-safe.
    """

    def __init__(self, name: str, *, lockable_nbytes: int | None = None) -> None:
        """Start with none, for the device called `name`."""
        self._name = name
        self._lockable_nbytes = lockable_nbytes
        self._lock = threading.RLock()  # the collector may unregister memory while we hold it
        self._ranges: dict[int, range] = {}

    @property
    def nbytes(self) -> int:
        """Bytes registered now."""
        with self._lock:
            return sum(map(len, self._ranges.values()))

    def add(self, address: int, nbytes: int) -> None:
        """Register `nbytes` at `address`.

        Raises BudgetError if that is more than can be locked; InternalError if the memory is not
        page aligned, not mapped, or registered already (perhaps before it was unmapped).
        """
        new = range(address, address + nbytes)
        with self._lock:
            if not nbytes or address % PAGE_NBYTES:
                raise self._mistake(new, "is no memory that starts on a page")
            for old in self._ranges.values():
                if old.start < new.stop and new.start < old.stop:
                    raise self._mistake(new, f"is registered already, as {_text(old)}")
            if not _is_mapped(new):
                raise self._mistake(new, "is registered and not mapped")
            if self._lockable_nbytes is not None and self.nbytes + nbytes > self._lockable_nbytes:
                raise BudgetError(
                    f"{self._name}: {nbytes} bytes more are not lockable, "
                    f"{self.nbytes} of {self._lockable_nbytes} are locked"
                )
            self._ranges[address] = new

    def find(self, address: int) -> range:
        """Return what was registered at `address`. Raises InternalError if nothing was."""
        with self._lock:
            if address not in self._ranges:
                raise InternalError(f"{self._name}: nothing is registered at {address:#x}")
            return self._ranges[address]

    def remove(self, address: int) -> None:
        """Unregister. Raises InternalError as `find`, or if the memory was unmapped before."""
        with self._lock:
            found = self.find(address)
            del self._ranges[address]
        if not _is_mapped(found):
            raise self._mistake(found, "was unmapped before it was unregistered")

    def check(self) -> None:
        """Raise InternalError if registered memory was unmapped."""
        with self._lock:
            for found in self._ranges.values():
                if not _is_mapped(found):
                    raise self._mistake(found, "was unmapped and is still registered")

    def _mistake(self, found: range, problem: str) -> InternalError:
        return InternalError(f"{self._name}: host memory {_text(found)} {problem}")


def _is_mapped(found: range) -> bool:
    """Ask the kernel, which answers ENOMEM for a page that is not there."""
    pages = (ctypes.c_ubyte * (align_up(len(found)) // PAGE_NBYTES))()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return bool(mincore(found.start, len(found), pages) == 0)


def _text(found: range) -> str:
    return f"[{found.start:#x}, {found.stop:#x})"
