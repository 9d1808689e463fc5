"""BlockMover: moves one block of a key between the caller's memory and the segment files."""

from __future__ import annotations

import xxhash

from zinf_core.buffers import Buffer, HostBuffer
from zinf_core.capabilities import MemorySpace
from zinf_core.device import Device
from zinf_core.errors import CorruptDataError, InternalError
from zinf_core.units import PAGE_NBYTES, align_up
from zinf_storage.checksum import digest_of
from zinf_storage.nvme.memory import (
    BOUNCE_NBYTES,
    BouncePages,
    ComputeFence,
    DeviceMemory,
    HostMemory,
    TransferMemory,
)
from zinf_storage.nvme.pages import UNCHECKED, Version, checksum_of
from zinf_storage.nvme.segments import SegmentStore
from zinf_storage.nvme.transfer import ReadTransfer, WriteTransfer
from zinf_storage.transfers.blocks import Block


class BlockMover:
    """Moves one block at a time between the caller's memory and the segment files.

    Stateless but for the bounce pages, so any worker may call it. Device memory is moved by the
    engine without passing through here, and so without a checksum; only what must be checked,
    merged with old bytes, or is no whole page goes through the bounce pages.
    """

    def __init__(
        self, segments: SegmentStore, *, num_threads: int, device: Device | None = None
    ) -> None:
        """Serve at most `num_threads` workers at once, and `device` if the engine reaches it.

        Takes 256 KiB of host memory per worker and two pages of device memory. Raises BudgetError.
        """
        self._segments = segments
        self._device = device
        self._bounce = BouncePages(num_threads)
        self._fence = ComputeFence(device) if device is not None else None

    def memory_of(self, buffer: Buffer) -> TransferMemory:
        """Return the memory of `buffer` for one transfer. Never blocks.

        Call it in the thread that submits the transfer: for device memory, what that thread
        submitted for compute before comes first.
        """
        if buffer.space is not MemorySpace.DEVICE:
            return HostMemory(buffer)
        if self._device is None or self._fence is None:
            raise InternalError(f"{buffer.nbytes} bytes of device memory, but no device")
        return DeviceMemory(buffer, device=self._device, fence=self._fence.submit())

    def read(self, transfer: ReadTransfer, index: int) -> None:
        """Bring the covered part of a block into memory and check it if that is due.

        Raises CorruptDataError, TransferError.
        """
        memory = _memory(transfer)
        memory.wait_ready()
        block = transfer.span.block(index)
        source = transfer.source
        due = transfer.verify or index in source.unverified
        expected = checksum_of(source, index) if due else None
        if expected is None:
            self._read_covered(transfer, block)
        elif block.is_covered and isinstance(memory, HostMemory):
            self._read_covered(transfer, block)
            view = memory.span(block.low - transfer.offset, block.high - block.low)
            found = digest_of(view)
            self._require_equal(found, expected, source, block, transfer.what)
        else:
            self._read_checked(transfer, block, expected)
        if expected is not None:
            transfer.verified.append(index)

    def write(self, transfer: WriteTransfer, index: int) -> int | None:
        """Write one block of the target and return its checksum, as `Version.checksums` has it.

        Raises CorruptDataError, TransferError, TierFullError.
        """
        source, target = transfer.versions()
        _memory(transfer).wait_ready()
        block = transfer.span.block(index)
        if block.is_covered:
            return self._write_covered(transfer, target, block)
        if block.is_untouched and source.checksums[index] is None:
            return None
        return self._merge(transfer, source, target, block)

    def _read_covered(self, transfer: ReadTransfer, block: Block) -> None:
        memory, regions = _memory(transfer), transfer.source.regions
        start, nbytes = block.low - transfer.offset, block.high - block.low
        if self._is_ragged(nbytes):
            padded = memory.padded_span(start, nbytes)
            if padded is not None:
                self._segments.read(regions, block.low, padded, transfer.what)
                return
        body = nbytes - nbytes % PAGE_NBYTES if self._is_ragged(nbytes) else nbytes
        self._segments.read(regions, block.low, memory.span(start, body), transfer.what)
        if body < nbytes:
            with self._bounce.lease() as area:
                page = area.part(0, PAGE_NBYTES).array.data
                self._segments.read(regions, block.low + body, page, transfer.what)
                memory.put(start + body, area.part(0, nbytes - body))

    def _read_checked(self, transfer: ReadTransfer, block: Block, expected: int) -> None:
        """Read all of a block for its checksum and copy the covered part."""
        memory, digest = _memory(transfer), xxhash.xxh3_64()
        with self._bounce.lease() as area:
            for start in range(block.start, block.end, BOUNCE_NBYTES):
                end = min(start + BOUNCE_NBYTES, block.end)
                view = self._io_view(area, end - start)
                self._segments.read(transfer.source.regions, start, view, transfer.what)
                digest.update(view[: end - start])
                low, high = max(start, block.low), min(end, block.high)
                if low < high:
                    memory.put(low - transfer.offset, area.part(low - start, high - low))
        self._require_equal(digest.intdigest(), expected, transfer.source, block, transfer.what)

    def _write_covered(self, transfer: WriteTransfer, target: Version, block: Block) -> int:
        memory = _memory(transfer)
        start, nbytes = block.low - transfer.offset, block.high - block.low
        checksum = UNCHECKED
        if isinstance(memory, HostMemory):
            checksum = digest_of(memory.span(start, nbytes))
        ragged = self._is_ragged(nbytes)
        padded = memory.padded_span(start, nbytes) if ragged else None
        if padded is not None:
            self._segments.write(target.regions, block.low, padded, transfer.what)
            return checksum
        body = nbytes - nbytes % PAGE_NBYTES if ragged else nbytes
        self._segments.write(target.regions, block.low, memory.span(start, body), transfer.what)
        if body < nbytes:
            with self._bounce.lease() as area:
                memory.take(start + body, area.part(0, nbytes - body))
                page = area.part(0, PAGE_NBYTES).array.data
                self._segments.write(target.regions, block.low + body, page, transfer.what)
        return checksum

    def _merge(
        self, transfer: WriteTransfer, source: Version, target: Version, block: Block
    ) -> int:
        """Write a block made of old bytes and the covered new ones; check the old ones."""
        memory, old, new = _memory(transfer), xxhash.xxh3_64(), xxhash.xxh3_64()
        with self._bounce.lease() as area:
            for start in range(block.start, block.end, BOUNCE_NBYTES):
                end = min(start + BOUNCE_NBYTES, block.end)
                view = self._io_view(area, end - start)
                self._segments.read(source.regions, start, view, transfer.what)
                old.update(view[: end - start])
                low, high = max(start, block.low), min(end, block.high)
                if low < high:
                    memory.take(low - transfer.offset, area.part(low - start, high - low))
                new.update(view[: end - start])
                self._segments.write(target.regions, start, view, transfer.what)
        expected = checksum_of(source, block.index)
        if expected is not None:
            self._require_equal(old.intdigest(), expected, source, block, transfer.what)
        checksum: int = new.intdigest()
        return checksum

    def _require_equal(
        self, found: int, expected: int, source: Version, block: Block, what: str
    ) -> None:
        if found != expected:
            raise CorruptDataError(
                f"{what} failed: bytes {block.start} to {block.end} at "
                f"{self._segments.locate(source.regions, block.start)} have checksum {found:016x} "
                f"instead of {expected:016x}; restore the file from a copy or write the key anew"
            )

    def _is_ragged(self, nbytes: int) -> bool:
        return self._segments.direct and nbytes % PAGE_NBYTES != 0

    def _io_view(self, area: HostBuffer, nbytes: int) -> memoryview:
        whole = align_up(nbytes) if self._segments.direct else nbytes
        return area.part(0, whole).array.data


def _memory(transfer: ReadTransfer | WriteTransfer) -> TransferMemory:
    if transfer.memory is None:
        raise InternalError(f"{transfer.what} went on after it was done")
    return transfer.memory
