"""Faults of a store that is full, fails or was damaged (P13, P14)."""

from __future__ import annotations

import errno
import os
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zinf_torch as zt
from faults.children import run_child
from faults.support import mlp, square_loss, train, values
from zinf_core.buffers import HostBuffer
from zinf_core.errors import CorruptDataError, TierError, TierFullError, TransferError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.testing import Fault, FaultPlan, FaultyTier, Operation, Phase, io_error, no_space
from zinf_core.units import PAGE_NBYTES, KiB, MiB
from zinf_storage.allocators import PageAlignedAllocator
from zinf_storage.nvme import DirectIo, NvmeOptions, NvmeTier, SystemCalls

BUDGETS = {"device": 2 * PAGE_NBYTES, "host": 8 * PAGE_NBYTES}


@pytest.mark.parametrize("pages", [1, 4, 9, 12])
def test_p13_a_capacity_that_is_too_small_is_refused_at_setup(tmp_path: Path, pages: int) -> None:
    """P13: no early check; a late crash. The refusal names path, needed and allowed bytes."""
    model = mlp(8, 2)
    before = values(model)
    with zt.Runtime(**BUDGETS, nvme=tmp_path / "z", nvme_capacity=pages * PAGE_NBYTES) as runtime:
        with pytest.raises(TierFullError) as caught:
            runtime.optimizer(torch.optim.AdamW, runtime.attach(model).parameters(), lr=0.1)
        for part in (str(tmp_path / "z"), str(pages * PAGE_NBYTES), "bytes"):
            assert part in str(caught.value)
        after = values(model)
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_p13_every_capacity_is_refused_at_setup_or_enough(tmp_path: Path) -> None:
    """P13: a capacity that set-up accepts and that is full in the middle of training."""
    accepted = []
    for pages in range(14, 26):
        with zt.Runtime(
            **BUDGETS, nvme=tmp_path / "z", nvme_capacity=pages * PAGE_NBYTES
        ) as runtime:
            try:
                model = runtime.attach(mlp(8, 2))
                optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)
            except TierFullError:
                continue
            accepted.append(pages)
            if len(accepted) < 4:
                train(model, optimizer, 2, square_loss)
    assert accepted == list(range(accepted[0], 26))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a tmpfs of 256 KiB; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_p13_a_full_disk_is_refused_at_setup(small_disk: Path) -> None:
    """P13: the disk fills after hours. Here the model's states do not fit 256 KiB."""
    with zt.Runtime(device=64 * KiB, host=256 * KiB, nvme=small_disk / "z") as runtime:
        with pytest.raises(TierFullError) as caught:
            runtime.attach(mlp(64, 16))
        assert str(small_disk / "z") in str(caught.value)
        assert re.search(r"needs \d+ bytes", str(caught.value))
        assert re.search(r"\d+ bytes are free there", str(caught.value))
    with zt.Runtime(device=64 * KiB, host=256 * KiB, nvme=small_disk / "z") as runtime:
        model = runtime.attach(mlp(8, 1))
        optimizer = runtime.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        train(model, optimizer, 1, square_loss)


class Hoarder(torch.optim.SGD):
    """Keeps every gradient it ever saw, which no set-up check can foresee."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                seen = self.state[param].setdefault("seen", [])
                seen.append(param.grad.clone())
        return super().step(closure)


def test_p13_a_disk_that_fills_in_training(small_disk: Path) -> None:
    """P13: one clear error, no hang; the weights are still there."""
    with zt.Runtime(device=64 * KiB, host=256 * KiB, nvme=small_disk / "z") as runtime:
        model = runtime.attach(mlp(32, 1))
        optimizer = runtime.optimizer(Hoarder, model.parameters(), lr=0.1)
        with pytest.raises(TierFullError) as caught:
            train(model, optimizer, 100, square_loss)
        assert str(small_disk / "z") in str(caught.value)
        assert re.search(r"\d+ bytes", str(caught.value))
        assert all(torch.isfinite(value).all() for value in values(model).values())


LIMITED = """
from zinf_core.errors import TierFullError
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
with zt.Runtime(device="256KiB", host="256KiB", nvme=folder / "z") as runtime:
    try:
        runtime.attach(nn.Linear(160, 160))
        message = None
    except TierFullError as exc:
        message = str(exc)
with zt.Runtime(device="64KiB", host="256KiB", nvme=folder / "z") as runtime:
    model = runtime.attach(nn.Linear(8, 8))
    optimizer = runtime.optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    model(torch.ones(8)).sum().backward()
    optimizer.step()
report(message=message, left=sorted(p.name for p in folder.iterdir()))
"""


@pytest.mark.slow
def test_p13_a_file_size_limit(tmp_path: Path) -> None:
    """P13: EFBIG and SIGXFSZ end in an obscure writer error, or in a killed process."""
    facts = run_child(LIMITED, tmp_path)
    assert str(tmp_path / "z") in facts["message"]
    assert re.search(r"\d+ bytes", facts["message"])
    assert facts["left"] == []


def _trained_on_a_faulty_tier(folder: Path, plan: FaultPlan) -> tuple[FaultyTier, list[str]]:
    """Train; return the tier and the error, with the weights read back after it."""
    torch.manual_seed(0)
    with zt.Runtime(**BUDGETS, nvme=folder / "z") as runtime:
        tier = FaultyTier(runtime.pager.tiers["nvme"], plan=plan)
        runtime.pager.tiers["nvme"] = tier
        errors = []
        model = mlp(8, 1)
        try:
            runtime.attach(model)
            optimizer = runtime.optimizer(torch.optim.Adam, model.parameters(), lr=0.1)
            train(model, optimizer, 2, square_loss)
        except TierError as exc:
            errors.append(f"{type(exc).__name__}: {exc}")
        if errors:
            for _ in range(2):
                assert all(torch.isfinite(value).all() for value in values(model).values())
        usage = runtime.usage()
        assert usage["host"].peak_nbytes <= BUDGETS["host"]
    return tier, errors


@pytest.mark.slow
@pytest.mark.parametrize("phase", Phase)
def test_p13_every_write_fails_once(tmp_path: Path, phase: Phase) -> None:
    """P13: a write that fails while swapping hangs, is lost, or takes the weights with it."""
    tier, errors = _trained_on_a_faulty_tier(tmp_path, FaultPlan())
    num_writes = tier.calls.count(Operation.WRITE)
    assert errors == []
    assert num_writes >= 12
    for call in range(num_writes):
        fault = Fault(call=call, operation=Operation.WRITE, phase=phase, error=no_space)
        tier, errors = _trained_on_a_faulty_tier(tmp_path, FaultPlan(faults=(fault,)))
        if tier.fired and call < num_writes - 6:
            assert len(errors) == 1, call
        for error in errors:
            assert "TierFullError" in error
            assert "planned failure of write_from of " in error


@pytest.mark.slow
@pytest.mark.parametrize("phase", Phase)
def test_p13_every_read_fails_once(tmp_path: Path, phase: Phase) -> None:
    """P13: the same for reads, with an I/O error."""
    tier, _ = _trained_on_a_faulty_tier(tmp_path, FaultPlan())
    num_reads = tier.calls.count(Operation.READ)
    assert num_reads >= 8
    for call in range(num_reads):
        fault = Fault(call=call, operation=Operation.READ, phase=phase, error=io_error)
        tier, errors = _trained_on_a_faulty_tier(tmp_path, FaultPlan(faults=(fault,)))
        assert len(tier.fired) == len(errors) == 1, call
        assert "TransferError" in errors[0]
        assert "planned failure of read_into of " in errors[0]


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
    """P13: the same on a real full disk, between two files of which only one fits."""
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
        with pytest.raises(TierFullError, match=f"{small_disk}.*bytes are free there"):
            tier.flush().wait()
    finally:
        tier.close()
    tier = NvmeTier.open(small_disk / "z", options=OPTIONS)
    try:
        assert _load(tier, 0) == _noise(0)
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
