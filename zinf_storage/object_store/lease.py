"""WriterLease: the object that says which process writes below a prefix.

[Note: leases] A writer first puts a lease of its own name and then lists all of them; if it sees
another one of a process that may live, it takes its own back and refuses. Of two that start
together at least one sees the other, so there are never two writers; both may refuse. This needs
no condition on writes, only that a list shows what was put before, which every store promises
today. A lease never expires by time: a clock says nothing about a process that was suspended.
"""

from __future__ import annotations

import datetime
import errno
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgpack

from zinf_core.errors import TierLockedError, ZinfError
from zinf_storage.object_store.bucket import Bucket

FOLDER: Final = "leases"
_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One process, so that it can be told from all others."""

    host: str
    pid: int
    started: str
    """When the process started, in the kernel's count; tells a reused `pid` apart."""
    namespace: str
    """Boot of the machine and process namespace in which `pid` and `started` mean something."""
    since: str
    """When it took the lease, for people."""

    @classmethod
    def of_this_process(cls) -> Holder:
        """Return the calling process."""
        return cls(
            host=os.uname().nodename,
            pid=os.getpid(),
            started=_started(os.getpid()) or "",
            namespace=_namespace(),
            since=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def is_gone(self) -> bool:
        """Return whether the process is known to have ended: it ran here and does no more."""
        known = bool(self.namespace and self.started) and self.namespace == _namespace()
        return known and not _lives(self.pid, self.started)

    def __str__(self) -> str:
        """Return the form used in messages."""
        return f"process {self.pid} on {self.host} since {self.since}"


class WriterLease:
    """One writer's right to a prefix, from `acquire` to `release`."""

    def __init__(self, bucket: Bucket, lease_id: str, *, tier_name: str) -> None:
        """Take over a lease that was put; use `acquire`."""
        self._bucket = bucket
        self._doing = f"{tier_name}: lease"
        self.id = lease_id
        """Different for every opening of any prefix."""

    @classmethod
    def acquire(
        cls,
        bucket: Bucket,
        *,
        tier_name: str,
        evict: str | None = None,
        holder: Holder | None = None,
    ) -> WriterLease:
        """Return a new lease; those of processes that ended here, and `evict`, are deleted.

        Blocks. Raises TierLockedError if another process may be writing, TransferError.
        """
        lease = cls(bucket, secrets.token_hex(8), tier_name=tier_name)
        packed = msgpack.packb(asdict(holder or Holder.of_this_process()))
        bucket.put(_name(lease.id), packed, doing=lease._doing)
        try:
            bucket.delete(lease._stale(evict), doing=lease._doing)
        except ZinfError:
            lease.release()
            raise
        return lease

    def release(self) -> None:
        """Delete the lease. Blocks. Raises TransferError."""
        self._bucket.delete([_name(self.id)], doing=self._doing)

    def _stale(self, evict: str | None) -> list[str]:
        """Return the names of leases that hold nothing. Raises TierLockedError for one that may."""
        stale = []
        for name in self._bucket.names(FOLDER, doing=self._doing):
            if name == _name(self.id):
                continue
            data = self._bucket.get(name, doing=self._doing)
            if data is None:
                continue
            holder = _parsed(data)
            if name != _name(evict or "") and not (holder and holder.is_gone()):
                raise self._locked(name, holder)
            stale.append(name)
        return stale

    def _locked(self, name: str, holder: Holder | None) -> TierLockedError:
        lease_id = name.removeprefix(f"{FOLDER}/").removesuffix(".zinf")
        return TierLockedError(
            errno.EAGAIN,
            f"{self._bucket.url} is in use by {holder or 'an unknown process'}; close that tier or "
            f"use another prefix. If it has ended for certain, open once with evict={lease_id}",
        )


def _name(lease_id: str) -> str:
    return f"{FOLDER}/{lease_id}.zinf"


def _parsed(data: bytes) -> Holder | None:
    """Return the holder a lease names, None if it is damaged or of another version."""
    try:
        fields: Any = msgpack.unpackb(data)
        return Holder(**fields)
    except (ValueError, TypeError, RecursionError):
        return None


def _namespace() -> str:
    """Return what makes process numbers of this boot and container unlike all others."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _lives(pid: int, started: str) -> bool:
    """Return whether the process may still run."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _started(pid) in {started, None}


def _started(pid: int) -> str | None:
    """Return when a process started, field 22 of its ``stat``; "" once it has ended and only
    waits to be reaped, None if that cannot be seen."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is a name in parentheses that may itself hold anything.
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in {"Z", "X"} else fields[19]
