"""The kit on NvmeTier: direct and buffered I/O, failing system calls, and deferred."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from zinf_core.keys import TensorKey
from zinf_core.testing import DeferredTier, Operation, TierSuite, machine_for, seeded_order
from zinf_core.tier import Tier
from zinf_core.units import MiB
from zinf_storage.nvme import DirectIo, NvmeOptions, NvmeTier, SystemCalls

DIRECT = NvmeOptions(segment_nbytes=4 * MiB, capacity_nbytes=16 * MiB)
BUFFERED = NvmeOptions(
    segment_nbytes=MiB, capacity_nbytes=16 * MiB, io_nbytes=8192, direct=DirectIo.NEVER
)
VERIFIED = NvmeOptions(
    segment_nbytes=MiB, capacity_nbytes=16 * MiB, io_nbytes=16384, num_threads=1, verify_reads=True
)
SMALL_BLOCKS = replace(VERIFIED, io_nbytes=4096)


@dataclass
class FailingCalls:
    """System calls of which the next of an armed kind fails with EIO."""

    armed: set[Operation] = field(default_factory=set)

    def calls(self) -> SystemCalls:
        return SystemCalls(preadv=self._preadv, pwritev=self._pwritev)

    def _preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self._fail(Operation.READ)
        return os.preadv(fd, buffers, offset)

    def _pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self._fail(Operation.WRITE)
        return os.pwritev(fd, buffers, offset)

    def _fail(self, operation: Operation) -> None:
        if operation in self.armed:
            self.armed.remove(operation)
            raise OSError(errno.EIO, os.strerror(errno.EIO))


class NvmeSuite(TierSuite):
    """The back doors open the segment file that `stat` names."""

    options = DIRECT

    @pytest.fixture(autouse=True)
    def _failing(self) -> None:
        self.failing = FailingCalls()

    def open_tier(self, folder: Path) -> Tier:
        self.folder = folder
        return NvmeTier.open(folder, options=self.options, calls=self.failing.calls())

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        self.failing.armed.add(operation)
        return True

    def peek(self, tier: Tier, key: TensorKey) -> bytes:
        extent = tier.stat(key)
        if not extent.nbytes:
            return b""
        with self._segment(extent.segment).open("rb") as file:
            return os.pread(file.fileno(), extent.nbytes, extent.offset)

    def poke(self, tier: Tier, key: TensorKey, data: bytes) -> bool:
        if self.options.verify_reads:
            return False
        if data:
            extent = tier.stat(key)
            with self._segment(extent.segment).open("rb+") as file:
                os.pwrite(file.fileno(), data, extent.offset)
                os.fsync(file.fileno())
        return True

    def _segment(self, number: int) -> Path:
        return self.folder / f"segment-{number:05d}.zinf"


class TestNvmeTier(NvmeSuite):
    pass


class TestBufferedNvmeTier(NvmeSuite):
    options = BUFFERED


class TestVerifiedNvmeTier(NvmeSuite):
    options = VERIFIED


class TestDeferredNvmeTier(NvmeSuite):
    def open_tier(self, folder: Path) -> Tier:
        return DeferredTier(super().open_tier(folder), order=seeded_order(4))


TestNvmeMachine = pytest.mark.slow(
    machine_for(lambda folder: NvmeTier.open(folder, options=DIRECT)).TestCase
)
TestBufferedNvmeMachine = pytest.mark.slow(
    machine_for(lambda folder: NvmeTier.open(folder, options=BUFFERED)).TestCase
)
TestVerifiedNvmeMachine = pytest.mark.slow(
    machine_for(lambda folder: NvmeTier.open(folder, options=SMALL_BLOCKS)).TestCase
)
TestDeferredNvmeMachine = pytest.mark.slow(
    machine_for(
        lambda folder: DeferredTier(NvmeTier.open(folder, options=DIRECT), order=seeded_order(6))
    ).TestCase
)
