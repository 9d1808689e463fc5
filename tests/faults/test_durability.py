"""Faults of saves that fail and of saved bytes that were damaged (P13, P14)."""

from __future__ import annotations

import errno
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zinf_core.buffers import HostBuffer
from zinf_core.errors import CorruptDataError, TierFullError, TransferError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.units import PAGE_NBYTES, KiB, MiB
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.nvme import DirectIo, NvmeOptions, NvmeTier, SystemCalls

OPTIONS = NvmeOptions(io_nbytes=16 * KiB, segment_nbytes=MiB)


def _key(index: int) -> TensorKey:
    return TensorKey.of(f"layers.{index}.weight", StateKind.PARAM)


def _noise(index: int, generation: int = 0, nbytes: int = 50_001) -> bytes:
    return random.Random(100 * generation + index).randbytes(nbytes)


def _buffer(data: bytes) -> HostBuffer:
    buffer = PageAlignedAllocator().allocate(len(data)).resized(len(data))
    buffer.array[:] = np.frombuffer(data, np.uint8)
    return buffer


def _save(tier: NvmeTier, generation: int, num_keys: int = 4) -> None:
    for index in range(num_keys):
        if generation == 0:
            tier.reserve(_key(index), 50_001)
        tier.write_from(_key(index), _buffer(_noise(index, generation))).wait()
    tier.flush().wait()


def _load(tier: NvmeTier, index: int) -> bytes:
    buffer = _buffer(bytes(tier.stat(_key(index)).nbytes))
    tier.read_into(_key(index), buffer).wait()
    return buffer.array.tobytes()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace", "fdatasync"])
def test_p13_a_save_that_fails(tmp_path: Path, call: str, number: int) -> None:
    """P13: a failed save takes the last good one with it, which is no longer the latest."""
    failing = {"armed": False}
    real = getattr(SystemCalls(), call)

    def fail(*args: Any) -> Any:
        if failing["armed"]:
            raise OSError(number, os.strerror(number))
        return real(*args)

    with_fault = replace(SystemCalls(), **{call: fail})
    tier = NvmeTier.open(tmp_path / "z", options=OPTIONS, calls=with_fault)
    try:
        _save(tier, 0)
        failing["armed"] = True
        with pytest.raises((TierFullError, TransferError)) as caught:
            _save(tier, 1)
        assert isinstance(caught.value, TierFullError) == (number != errno.EIO)
        assert str(tmp_path / "z") in str(caught.value)
        failing["armed"] = False
    finally:
        tier.close()
    tier = NvmeTier.open(tmp_path / "z", options=OPTIONS)
    try:
        assert [_load(tier, index) for index in range(4)] == [_noise(i) for i in range(4)]
        _save(tier, 2)
    finally:
        tier.close()
    tier = NvmeTier.open(tmp_path / "z", options=OPTIONS)
    try:
        assert [_load(tier, index) for index in range(4)] == [_noise(i, 2) for i in range(4)]
    finally:
        tier.close()


def test_p13_a_save_on_a_full_disk(small_disk: Path) -> None:
    """P13: a disk that is full to the last byte does not keep the save from being made: there is
    no room for another file but that which the tier keeps for it."""
    tier = NvmeTier.open(small_disk / "z", options=replace(OPTIONS, segment_nbytes=128 * KiB))
    try:
        tier.reserve(_key(0), 50_001)
        tier.write_from(_key(0), _buffer(_noise(0))).wait()
        tier.flush().wait()
        (small_disk / "someone else's").write_bytes(bytes(100 * KiB))
        tier.write_from(_key(0), _buffer(_noise(0, 1))).wait()
        with open(small_disk / "rest", "wb", buffering=0) as rest:  # noqa: PTH123
            while _is_room_in(rest):
                pass
        tier.flush().wait()
    finally:
        tier.close()
    tier = NvmeTier.open(small_disk / "z", options=OPTIONS)
    try:
        assert _load(tier, 0) == _noise(0, 1)
    finally:
        tier.close()


def _is_room_in(file: Any) -> bool:
    try:
        return file.write(bytes(PAGE_NBYTES)) > 0
    except OSError:
        return False


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a folder with a committed state of four keys."""
    tier = NvmeTier.open(tmp_path / "z", options=OPTIONS)
    _save(tier, 0)
    tier.close()
    return tmp_path / "z"


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def _load_all(folder: Path, options: NvmeOptions = OPTIONS) -> None:
    tier = NvmeTier.open(folder, options=options)
    try:
        for index in range(4):
            assert _load(tier, index) == _noise(index)
    finally:
        tier.close()


@pytest.mark.parametrize("direct", DirectIo)
@pytest.mark.parametrize("where", [0, 0.5, 1.0])
def test_p14_a_flipped_byte_in_a_segment(saved: Path, where: float, direct: DirectIo) -> None:
    """P14: other numbers are loaded in silence. First, middle and last byte of a key."""
    options = replace(OPTIONS, direct=direct)
    tier = NvmeTier.open(saved, options=options)
    extent = tier.stat(_key(2))
    tier.close()
    segment = next(saved.glob("segment-*"))
    _flip(segment, extent.offset + int(where * (extent.nbytes - 1)))
    with pytest.raises(CorruptDataError, match=re.escape(str(segment))):
        _load_all(saved, options)


def test_p14_a_flipped_byte_in_a_range(saved: Path) -> None:
    """P14: a part of a key is read without checking, as its checksum covers more than the part."""
    tier = NvmeTier.open(saved, options=OPTIONS)
    offset = tier.stat(_key(2)).offset
    tier.close()
    _flip(next(saved.glob("segment-*")), offset + PAGE_NBYTES + 10)
    tier = NvmeTier.open(saved, options=OPTIONS)
    try:
        buffer = _buffer(bytes(PAGE_NBYTES))
        with pytest.raises(CorruptDataError, match=re.escape(str(_key(2)))):
            tier.read_into(_key(2), buffer, offset=PAGE_NBYTES).wait()
    finally:
        tier.close()


@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_p14_a_flipped_byte_in_the_manifest(saved: Path, position: str) -> None:
    """P14: a damaged manifest is taken for none, or for one with other sizes."""
    manifest = saved / "manifest.zinf"
    size = manifest.stat().st_size
    _flip(manifest, {"first": 0, "middle": size // 2, "last": size - 1}[position])
    with pytest.raises(CorruptDataError, match=re.escape(str(manifest))):
        _load_all(saved)


@pytest.mark.parametrize("name", ["segment-00000.zinf", "manifest.zinf"])
@pytest.mark.parametrize("left", ["all but one byte", "half", "nothing"])
def test_p14_a_truncated_file(saved: Path, name: str, left: str) -> None:
    """P14: a short file is read as far as it goes."""
    path = saved / name
    size = path.stat().st_size
    if name.startswith("segment"):
        tier = NvmeTier.open(saved, options=OPTIONS)
        size = max(tier.stat(key).offset + tier.stat(key).nbytes for key in list(tier.keys()))
        tier.close()
    kept = {"all but one byte": size - 1, "half": size // 2, "nothing": 0}[left]
    os.truncate(path, kept)
    with pytest.raises(CorruptDataError, match=re.escape(str(path))):
        _load_all(saved)


def test_p14_a_file_cut_where_it_holds_nothing(saved: Path) -> None:
    """P14: room that was free is gone: everything still loads, and can be saved again."""
    os.truncate(saved / "segment-00000.zinf", (saved / "segment-00000.zinf").stat().st_size - 1)
    _load_all(saved)
    tier = NvmeTier.open(saved, options=OPTIONS)
    try:
        for generation in range(1, 8):
            _save(tier, generation)
        assert [_load(tier, index) for index in range(4)] == [_noise(i, 7) for i in range(4)]
    finally:
        tier.close()


def test_p14_a_missing_segment(saved: Path) -> None:
    """P14: a file that is gone is taken for an empty one."""
    segment = next(saved.glob("segment-*"))
    segment.unlink()
    with pytest.raises(CorruptDataError, match=re.escape(str(segment))):
        _load_all(saved)


def test_p14_keys_that_are_not_damaged_still_load(saved: Path) -> None:
    """P14: one bad byte makes everything unreadable; or the damage goes away by reading twice."""
    tier = NvmeTier.open(saved, options=OPTIONS)
    offset = tier.stat(_key(1)).offset
    tier.close()
    _flip(next(saved.glob("segment-*")), offset + 7)
    tier = NvmeTier.open(saved, options=OPTIONS)
    try:
        for _ in range(2):
            with pytest.raises(CorruptDataError):
                _load(tier, 1)
            assert _load(tier, 0) == _noise(0)
        tier.write_from(_key(1), _buffer(_noise(1, 5))).wait()
        assert _load(tier, 1) == _noise(1, 5)
    finally:
        tier.close()
