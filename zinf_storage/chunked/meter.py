"""Meter: what a codec saved, and what it cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCounters:
    """Bytes and CPU time since the tier was opened, of chunks written and read with the codec."""

    encoded_nbytes: int = 0
    """Plain bytes the codec was given, also of chunks then stored as they are."""
    stored_nbytes: int = 0
    """What they were stored in."""
    encode_cpu_s: float = 0.0
    decoded_nbytes: int = 0
    """Plain bytes that came out of coded chunks."""
    decode_cpu_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Plain bytes per stored byte; 1 before anything was written."""
        return self.encoded_nbytes / self.stored_nbytes if self.stored_nbytes else 1.0


class CodecMeter:
    """Adds up CodecCounters. Thread-safe: `_lock` guards the sum."""

    def __init__(self, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        """Start at nothing; `cpu_clock` returns the CPU seconds of the calling thread."""
        self._cpu_clock = cpu_clock
        self._lock = threading.Lock()
        self._counters = CodecCounters()

    @property
    def counters(self) -> CodecCounters:
        """The sum so far."""
        with self._lock:
            return self._counters

    def stored(self, *, plain_nbytes: int, stored_nbytes: int) -> None:
        """Count a chunk."""
        with self._lock:
            old = self._counters
            self._counters = replace(
                old,
                encoded_nbytes=old.encoded_nbytes + plain_nbytes,
                stored_nbytes=old.stored_nbytes + stored_nbytes,
            )

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Count the CPU time of the block."""
        start = self._cpu_clock()
        yield
        with self._lock:
            seconds = self._counters.encode_cpu_s + self._cpu_clock() - start
            self._counters = replace(self._counters, encode_cpu_s=seconds)

    @contextmanager
    def decoding(self, nbytes: int) -> Iterator[None]:
        """Count the CPU time of the block and the `nbytes` it brings out."""
        start = self._cpu_clock()
        yield
        with self._lock:
            old = self._counters
            self._counters = replace(
                old,
                decoded_nbytes=old.decoded_nbytes + nbytes,
                decode_cpu_s=old.decode_cpu_s + self._cpu_clock() - start,
            )
