"""Device memory through NvmeTier: what comes first, what is checked, and what is left alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from simulated_gds import GdsFaults, simulated_gds

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace
from zinf_core.completion import Completion
from zinf_core.errors import CorruptDataError, TransferError, UnsupportedBufferError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.testing import Operation, host_buffer
from zinf_core.testing.simulated import SimulatedDevice
from zinf_storage.nvme import NvmeOptions, NvmeTier

OPTIONS = NvmeOptions(io_nbytes=8192, segment_nbytes=1 << 20, num_threads=2)
KEY = TensorKey.of("w", StateKind.PARAM)
NBYTES = 3 * 8192 + 100


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(100 * nbytes + seed).randbytes(nbytes)


class ComputingDevice(SimulatedDevice):
    """A device whose compute lags behind: it happens when a copy submitted after it is waited
    for, as on a stream that the copy's stream waits for."""

    def __init__(self) -> None:
        super().__init__()
        self._queued: list[Callable[[], None]] = []
        self._compute_lock = threading.Lock()

    def compute(self, kernel: Callable[[], None]) -> None:
        self._queued.append(kernel)

    def copy(self, dst: Buffer, src: Buffer) -> Completion:
        return AfterCompute(self, super().copy(dst, src), len(self._queued))

    def run(self, count: int) -> None:
        with self._compute_lock:
            for kernel in self._queued[:count]:
                kernel()
            self._queued[:count] = [lambda: None] * min(count, len(self._queued))


class AfterCompute:
    def __init__(self, device: ComputingDevice, inner: Completion, count: int) -> None:
        self._device, self._inner, self._count = device, inner, count

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, timeout_s: float | None = None) -> None:
        self._device.run(self._count)
        self._inner.wait(timeout_s)


class Rig:
    """One tier over one device."""

    def __init__(self, folder: Path, options: NvmeOptions = OPTIONS) -> None:
        self.faults = GdsFaults()
        self.device = ComputingDevice()
        self.folder = folder
        self.options = options
        self.tier = self.open()

    def open(self) -> NvmeTier:
        engine = simulated_gds(self.device, self.faults)
        return NvmeTier.open(self.folder, options=self.options, engine=engine)

    def reopen(self) -> None:
        self.tier.close()
        self.tier = self.open()

    def close(self) -> None:
        self.tier.close()
        self.device.close()
        assert self.faults.mistakes == []

    def on_device(self, data: bytes) -> Buffer:
        buffer = self.device.allocate(len(data))
        self.device.view(buffer)[:] = np.frombuffer(data, np.uint8)
        return buffer

    def on_host(self, data: bytes) -> Buffer:
        buffer = host_buffer(len(data))
        buffer.array[:] = np.frombuffer(data, np.uint8)
        return buffer

    def write(self, buffer: Buffer, offset: int = 0) -> None:
        self.tier.write_from(KEY, buffer, offset=offset).wait(timeout_s=30)

    def read(self) -> bytes:
        """Return the key as read into device memory, and require the same from host memory."""
        nbytes = self.tier.stat(KEY).nbytes
        dst, other = self.device.allocate(nbytes), host_buffer(nbytes)
        self.tier.read_into(KEY, dst).wait(timeout_s=30)
        self.tier.read_into(KEY, other).wait(timeout_s=30)
        found = self.device.view(dst).tobytes()
        assert other.array.tobytes() == found
        return found

    def checksums(self) -> tuple[int | None, ...]:
        return self.tier._parts.table.page(KEY).version.checksums

    def damage(self) -> None:
        extent = self.tier.stat(KEY)
        path = self.tier._parts.folder.segment_path(extent.segment)
        with path.open("rb+") as file:
            file.seek(extent.offset)
            file.write(b"\0\0\0\0\0\0\0\0")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.tier.reserve(KEY, NBYTES)
    yield rig
    rig.close()


def test_a_write_waits_for_what_computes_its_source(rig: Rig) -> None:
    """Catches bytes stored before the kernel that makes them has ended (kvikio waits for no
    stream)."""
    src = rig.device.allocate(NBYTES)
    data = np.frombuffer(noise(NBYTES), np.uint8)
    rig.device.compute(lambda: np.copyto(rig.device.view(src), data))
    rig.write(src)
    assert rig.read() == data.tobytes()


def test_a_read_waits_for_what_still_uses_its_destination(rig: Rig) -> None:
    """Catches new bytes stored over old ones that a kernel submitted before was to read."""
    rig.write(rig.on_device(noise(NBYTES)))
    dst = rig.on_device(noise(NBYTES, 1))
    seen: list[bytes] = []
    rig.device.compute(lambda: seen.append(rig.device.view(dst).tobytes()))
    rig.tier.read_into(KEY, dst).wait(timeout_s=30)
    rig.tier.prefetch_into(KEY, dst).wait(timeout_s=30)
    assert seen == [noise(NBYTES, 1)]
    assert rig.device.view(dst).tobytes() == noise(NBYTES)


def test_a_failing_device_fails_the_transfer(rig: Rig) -> None:
    """Catches a transfer that goes on with memory whose compute failed, or hangs."""
    src = rig.on_device(noise(NBYTES))
    rig.device.fail_next()
    with pytest.raises(TransferError):
        rig.write(src)
    rig.write(src)
    assert rig.read() == noise(NBYTES)


def test_whole_pages_are_not_copied_through_the_host(rig: Rig) -> None:
    """Catches device memory that takes the way through host memory unnoticed."""
    src = rig.on_device(noise(NBYTES))
    before = rig.device.num_copies
    rig.write(src)
    assert rig.device.num_copies - before == 1, "more than the fence"
    assert rig.faults.num_device_transfers == 4


@pytest.mark.parametrize("nbytes", [1, 100, 4096, 5000, 8192 + 1])
def test_neighbours_in_device_memory_are_left_alone(rig: Rig, nbytes: int) -> None:
    """Catches the padding of a last page written into memory of somebody else, and read from it
    where it is not ours to read."""
    whole = rig.on_device(b"\x5a" * (6 * 4096))
    part = whole.part(4096, nbytes)
    rig.tier.discard(KEY)
    rig.tier.reserve(KEY, nbytes)
    rig.device.view(part)[:] = np.frombuffer(noise(nbytes), np.uint8)
    rig.write(part)
    rig.device.view(part)[:] = 0
    rig.tier.read_into(KEY, part).wait(timeout_s=30)
    around = rig.device.view(whole).tobytes()
    assert around[4096 : 4096 + nbytes] == noise(nbytes)
    assert set(around[:4096] + around[4096 + nbytes :]) == {0x5A}
    assert rig.read() == noise(nbytes)


def test_device_blocks_have_no_checksum_and_host_blocks_keep_theirs(rig: Rig) -> None:
    """Catches a checksum of nothing, which would make the next read fail or prove nothing."""
    data = bytearray(noise(NBYTES))
    rig.write(rig.on_host(bytes(data)))
    assert all((checksum or -1) >= 0 for checksum in rig.checksums())
    data[8192 : 2 * 8192] = noise(8192, 1)
    rig.write(rig.on_device(noise(8192, 1)), 8192)
    assert [checksum == -1 for checksum in rig.checksums()] == [False, True, False, False]
    rig.write(rig.on_device(noise(4096, 2)), 8192)
    data[8192 : 8192 + 4096] = noise(4096, 2)
    assert rig.read() == data
    assert -1 not in rig.checksums(), "a merged block passes through the host"


@pytest.mark.parametrize("reopened", [False, True])
def test_part_of_a_key_written_from_the_device_is_overwritten(rig: Rig, reopened: bool) -> None:
    """Catches blocks without a checksum taken for blocks without bytes: an overwrite would lose
    them, or happen in place."""
    rig.write(rig.on_device(noise(NBYTES)))
    rig.tier.flush().wait(timeout_s=30)
    if reopened:
        rig.reopen()
    before = rig.tier.stat(KEY).offset
    rig.write(rig.on_host(noise(100, 1)), 3 * 8192)
    assert rig.tier.stat(KEY).offset != before
    assert rig.read() == noise(NBYTES)[: 3 * 8192] + noise(100, 1)
    rig.reopen()
    assert rig.read() == noise(NBYTES)


@pytest.mark.parametrize("verify_reads", [False, True])
def test_damage_is_found_where_there_is_a_checksum(tmp_path: Path, verify_reads: bool) -> None:
    """Catches reads into device memory that skip the check that is due, or fail without one."""
    options = NvmeOptions(io_nbytes=8192, segment_nbytes=1 << 20, verify_reads=verify_reads)
    rig = Rig(tmp_path, options)
    rig.tier.reserve(KEY, NBYTES)
    rig.write(rig.on_host(noise(NBYTES)))
    rig.tier.flush().wait(timeout_s=30)
    rig.reopen()
    before = rig.faults.num_device_transfers
    assert rig.read() == noise(NBYTES)
    assert rig.faults.num_device_transfers == before, "checked in host memory"
    rig.reopen()
    rig.damage()
    dst = rig.device.allocate(NBYTES)
    with pytest.raises(CorruptDataError, match="bytes 0 to 8192"):
        rig.tier.read_into(KEY, dst).wait(timeout_s=30)
    rig.write(rig.on_device(noise(NBYTES, 1)))
    rig.damage()
    assert rig.read() == b"\0" * 8 + noise(NBYTES, 1)[8:]
    rig.close()


def test_a_failed_device_write_leaves_the_old_bytes(rig: Rig) -> None:
    """Catches law 9 broken where no checksum could tell."""
    rig.write(rig.on_device(noise(NBYTES)))
    rig.faults.armed.add(Operation.WRITE)
    with pytest.raises(TransferError, match=r"segment-00000\.zinf.*Input/output error.*kvikio"):
        rig.write(rig.on_device(noise(NBYTES, 1)))
    assert rig.read() == noise(NBYTES)


def test_a_file_that_was_cut_is_corrupt(rig: Rig) -> None:
    """Catches kvikio's text about EOF passed on as some I/O error."""
    rig.write(rig.on_device(noise(NBYTES)))
    path = rig.folder / "segment-00000.zinf"
    with path.open("rb+") as file:
        file.truncate(4096)
    with pytest.raises(CorruptDataError, match=r"segment-00000\.zinf was cut to 4096 bytes"):
        rig.tier.read_into(KEY, rig.device.allocate(NBYTES)).wait(timeout_s=30)


def test_only_an_engine_with_a_device_takes_device_memory(rig: Rig, tmp_path: Path) -> None:
    """Catches device addresses handed to system calls."""
    assert rig.tier.capabilities.takes(MemorySpace.DEVICE)
    assert rig.tier.path_taken == "gds"
    other = NvmeTier.open(tmp_path / "posix", device=rig.device)
    other.reserve(KEY, 8192)
    assert not other.capabilities.takes(MemorySpace.DEVICE)
    assert other.path_taken.startswith("posix-")
    with pytest.raises(UnsupportedBufferError):
        other.read_into(KEY, rig.device.allocate(8192))
    other.close()
