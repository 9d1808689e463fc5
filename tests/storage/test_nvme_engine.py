"""Which engine moves the bytes, what it says when it cannot, and what kvikio's errors become."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nvme_helpers import SMALL, buffer_of, key, noise, opened, read, store

from zinf_core.capabilities import MemorySpace
from zinf_core.errors import ConfigError, InternalError, TransferError
from zinf_core.registry import TierUrl, open_tier
from zinf_core.testing.simulated import SimulatedDevice
from zinf_storage import factories, machine
from zinf_storage.factories import open_nvme
from zinf_storage.machine import Cuda, Package, gds_problem
from zinf_storage.nvme import DirectIo, Engine, NvmeOptions, NvmeTier, kvikio_file
from zinf_storage.nvme.gds import GdsEngine, GdsFile, os_error

GDS = NvmeOptions(engine=Engine.GDS)
NO_DRIVER = Cuda(num_devices=0, driver=None, problem="no driver: libcuda.so.1 is missing")
WITH_DRIVER = Cuda(num_devices=1, driver="13.0", problem=None)


@pytest.fixture
def cuda() -> SimulatedDevice:
    """Return a device that says it is a CUDA device."""
    return SimulatedDevice("cuda:0")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cuda], None]:
    """Return a function that decides what the CUDA driver says."""
    return lambda answer: monkeypatch.setattr(kvikio_file, "probe_cuda", lambda: answer)


@pytest.fixture
def package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[str | None], None]]:
    """Return a function that replaces kvikio by a module of that source, or by nothing."""

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "kvikio"]

    def replace_kvikio(source: str | None) -> None:
        for name in loaded():
            monkeypatch.delitem(sys.modules, name)
        if source is None:
            monkeypatch.setitem(sys.modules, "kvikio", None)
            return
        folder = tmp_path / "site" / "kvikio"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(source, encoding="utf-8")
        for name in ("cufile_driver", "defaults"):
            (folder / f"{name}.py").write_text(SETTINGS, encoding="utf-8")
        monkeypatch.syspath_prepend(folder.parent)

    yield replace_kvikio
    for name in loaded():
        del sys.modules[name]


SETTINGS = """
values = {"compat_mode": "auto", "num_threads": 1, "bounce_buffer_size": 16 << 20,
          "auto_direct_io_read": False, "auto_direct_io_write": True}
def get(name):
    return values.get(name, False)
def set(*config):
    for name, value in config[0].items() if isinstance(config[0], dict) else [config]:
        values[name]
        values[name] = value
"""
NO_FILES = """
__version__ = "1.0"
class CompatMode:
    ON, OFF = "on", "off"
class CuFile:
    def __init__(self, path, flags):
        raise RuntimeError("libcuda.so.1: cannot open shared object file")
"""
IN_MEMORY = """
import os
__version__ = "1.0"
class CompatMode:
    ON, OFF = "on", "off"
class Future:
    def __init__(self, count):
        self.get = lambda: count
class CuFile:
    def __init__(self, path, flags):
        self.fd = os.open(path, os.O_RDWR)
    def pread(self, buf, size=None, file_offset=0, task_size=None):
        return Future(os.preadv(self.fd, [buf], file_offset))
    def pwrite(self, buf, size=None, file_offset=0, task_size=None):
        return Future(os.pwrite(self.fd, buf, file_offset))
    def close(self):
        os.close(self.fd)
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.close()
"""


def test_auto_without_a_device_asks_for_nothing(
    tmp_path: Path, package: Callable[[str | None], None]
) -> None:
    """P92: catches a package, driver or compiler needed by those who have no GPU."""
    package("raise SystemExit('imported')")
    with opened(tmp_path / "tier") as tier:
        assert tier.path_taken.startswith("posix-")
        assert tier.capabilities.memory_spaces == {MemorySpace.HOST}


@pytest.mark.parametrize(
    ("answer", "source"),
    [(NO_DRIVER, IN_MEMORY), (WITH_DRIVER, None), (WITH_DRIVER, "raise RuntimeError('broken')"),
     (WITH_DRIVER, NO_FILES)],
)  # fmt: skip
def test_auto_falls_back_and_says_so(
    tmp_path: Path, cuda: Any, driver: Any, package: Any, answer: Cuda, source: str | None
) -> None:
    """Catches an open that fails where it could work, whatever importing kvikio raises; and a
    tier that takes device memory nevertheless."""
    driver(answer)
    package(source)
    tier = NvmeTier.open(tmp_path / "tier", options=SMALL, device=cuda)
    store(tier, key(0), noise(5000))
    assert read(tier, key(0)) == noise(5000)
    assert tier.path_taken.startswith("posix-")
    assert tier.capabilities.memory_spaces == {MemorySpace.HOST}
    tier.close()


def test_auto_takes_device_memory_where_kvikio_works(
    tmp_path: Path, cuda: Any, driver: Any, package: Any
) -> None:
    """Catches a probe that never says yes, and settings that do not reach kvikio."""
    driver(WITH_DRIVER)
    package(IN_MEMORY)
    options = NvmeOptions(segment_nbytes=1 << 20, num_threads=3)
    tier = NvmeTier.open(tmp_path / "tier", options=options, device=cuda)
    store(tier, key(0), noise(8192))
    assert read(tier, key(0)) == noise(8192)
    assert tier.path_taken == "gds-compat"
    assert tier.capabilities.memory_spaces == {MemorySpace.HOST, MemorySpace.DEVICE}
    values = sys.modules["kvikio.defaults"].values
    assert (values["num_threads"], values["auto_direct_io_read"]) == (3, True)
    assert values["bounce_buffer_size"] == options.io_nbytes
    assert values["compat_mode"] == "auto"
    tier.close()
    cuda.close()


@pytest.mark.parametrize("engine", [Engine.AUTO, Engine.POSIX])
def test_posix_and_buffered_tiers_take_no_device(
    tmp_path: Path, cuda: Any, driver: Any, package: Any, engine: Engine
) -> None:
    """Catches options that say posix, or never direct, and are overruled."""
    driver(WITH_DRIVER)
    package(IN_MEMORY)
    direct = DirectIo.NEVER if engine is Engine.AUTO else DirectIo.AUTO
    options = NvmeOptions(engine=engine, direct=direct, segment_nbytes=1 << 20)
    tier = NvmeTier.open(tmp_path / "tier", options=options, device=cuda)
    assert tier.path_taken.startswith("posix-")
    tier.close()


@pytest.mark.parametrize(
    ("device", "answer", "source", "words"),
    [
        ("sim:0", WITH_DRIVER, IN_MEMORY, "sim:0 is no CUDA device"),
        ("cuda:0", NO_DRIVER, IN_MEMORY, "libcuda.so.1 is missing.*install the NVIDIA driver"),
        ("cuda:0", WITH_DRIVER, None, r"needs kvikio; pip install \"zinf\[cuda13\]\""),
        (None, NO_DRIVER, "raise KeyError('libcufile')", "needs kvikio.*KeyError: 'libcufile'"),
        (None, NO_DRIVER, NO_FILES, "cannot read a file here: libcuda.so.1.*NVIDIA driver"),
        (
            None,
            NO_DRIVER,
            NO_FILES.replace("ON, OFF", "YES, OFF"),
            "kvikio 1.0 does not know.*upgrade",
        ),
    ],
)
def test_a_forced_engine_says_what_is_missing(
    tmp_path: Path, driver: Any, package: Any, device: str | None, answer: Cuda,
    source: str | None, words: str,
) -> None:  # fmt: skip
    """P91: catches a silent fall back, a bare traceback of another package, and a folder made
    for a tier that cannot be."""
    driver(answer)
    package(source)
    given = None if device is None else SimulatedDevice(device)
    with pytest.raises(ConfigError, match=words) as caught:
        NvmeTier.open(tmp_path / "tier", options=GDS, device=given)
    assert "engine=posix" in str(caught.value)
    assert not (tmp_path / "tier").exists()


def test_forced_without_a_device_moves_host_memory(
    tmp_path: Path, driver: Any, package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches cuFile started where there is no GPU: it would never return."""
    driver(NO_DRIVER)
    package(IN_MEMORY)
    monkeypatch.setattr(factories, "cuda_problem", lambda: "no device")
    tier = open_tier(f"nvme://{tmp_path}/tier?engine=gds&segment_nbytes=1MiB")
    assert tier.path_taken == "gds-compat"
    assert tier.capabilities.memory_spaces == {MemorySpace.HOST}
    assert sys.modules["kvikio.defaults"].values["compat_mode"] == "on"
    store(tier, key(0), noise(5000))
    assert read(tier, key(0)) == noise(5000)
    tier.close()


def test_contradictions_are_refused(tmp_path: Path) -> None:
    """Catches a setting that is silently ignored."""
    with pytest.raises(ConfigError, match=r"engine = gds .* direct = never"):
        NvmeOptions(engine=Engine.GDS, direct=DirectIo.NEVER)
    url = TierUrl.parse(f"nvme://{tmp_path}/tier?engine=uring")
    with pytest.raises(ConfigError, match="engine = 'uring' is not one of auto, posix, gds"):
        open_nvme(url, capacity_nbytes=None)


def test_gds_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a doctor that says gds may work where kvikio goes through host memory."""
    kvikio = Package(name="kvikio-cu13", version="26.10", purpose="GDS", extra="cuda13")
    monkeypatch.setattr(machine, "UDEV", tmp_path / "udev")
    monkeypatch.setattr(machine, "NVIDIA_FS", tmp_path / "nvidia-fs")
    assert "udev" in (gds_problem(WITH_DRIVER, (kvikio,)) or "")
    (tmp_path / "udev").mkdir()
    assert "nvidia-fs" in (gds_problem(WITH_DRIVER, (kvikio,)) or "")
    (tmp_path / "nvidia-fs").mkdir()
    assert gds_problem(WITH_DRIVER, (kvikio,)) is None


@pytest.mark.parametrize(
    "number",
    [errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.EINTR,
     errno.EAGAIN, errno.ENXIO, errno.ENODEV],
)  # fmt: skip
def test_texts_of_kvikio_have_numbers(number: int) -> None:
    """Catches an errno read out of another one's text ("No such device" begins another)."""
    text = f"KvikIO failure at: /__w/kvikio/kvikio/cpp/src/a.cpp:9: error: {os.strerror(number)}"
    found = os_error(RuntimeError(text))
    assert found.errno == number
    assert "/__w/" not in str(found)
    assert "a.cpp:9" in str(found)


def test_an_unknown_text_is_an_io_error() -> None:
    """Catches a failure without a number, which nobody could classify."""
    assert os_error(RuntimeError("cuFile internal\n error")).errno == errno.EIO
    assert "cuFile internal error" in str(os_error(RuntimeError("cuFile internal\n error")))


class ScriptedFile:
    """A `CuFile` whose transfers end as told."""

    def __init__(self, *results: int | Exception) -> None:
        self.results = list(results)
        self.num_calls = 0

    def pread(self, buf: Any, size: int, file_offset: int, task_size: int) -> ScriptedFile:
        self.num_calls += 1
        return self

    pwrite = pread

    def get(self) -> int:
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        raise RuntimeError("POSIX error: Input/output error")


def test_a_short_count_is_an_error() -> None:
    """Catches law 5 left to kvikio: a count that nobody compares."""
    file = GdsFile(ScriptedFile(4096), task_nbytes=4096)
    with pytest.raises(OSError, match="moved 4096 of 8192 bytes"):
        file.write(memoryview(bytearray(8192)), 0)


@pytest.mark.parametrize("error", [TypeError("no"), ValueError("no"), OverflowError("no")])
def test_refused_arguments_are_a_bug_of_ours(error: Exception) -> None:
    """Catches errors outside our tree."""
    file = GdsFile(ScriptedFile(error), task_nbytes=4096)
    with pytest.raises(InternalError, match="kvikio refused 8192 bytes at 4096: no"):
        file.read(memoryview(bytearray(8192)), 4096)


def test_read_only_memory_is_not_written() -> None:
    """Catches kvikio's habit of writing into whatever it is given."""
    scripted = ScriptedFile(8192)
    with pytest.raises(InternalError, match="read-only"):
        GdsFile(scripted, task_nbytes=4096).read(memoryview(bytes(8192)), 0)
    assert scripted.num_calls == 0


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_interruptions_are_tried_again_but_not_for_ever(tmp_path: Path, number: int) -> None:
    """Catches a signal that fails a transfer, and a loop that never ends."""
    interrupted = RuntimeError(f"POSIX error: {os.strerror(number)}")

    def engine(file: ScriptedFile) -> GdsEngine:
        return GdsEngine(
            open_file=lambda path: file, path_taken="gds-compat", device=None, task_nbytes=4096
        )

    file = ScriptedFile(interrupted, interrupted, 8192)
    file.close = lambda: None
    tier = NvmeTier.open(tmp_path / "some", options=SMALL, engine=engine(file))
    store(tier, key(0), noise(8192))
    assert file.num_calls == 3
    tier.close()
    file = ScriptedFile(interrupted)
    file.close = lambda: None
    tier = NvmeTier.open(tmp_path / "all", options=SMALL, engine=engine(file))
    tier.reserve(key(0), 8192)
    with pytest.raises(TransferError, match="made no progress in 8 attempts"):
        tier.write_from(key(0), buffer_of(noise(8192))).wait(timeout_s=30)
    tier.close()


def test_a_file_that_kvikio_does_not_open_leaves_nothing(tmp_path: Path) -> None:
    """Catches a segment or descriptor left by a reserve that failed half-way (law 8)."""

    def refuse(path: Path) -> Any:
        raise RuntimeError(f"Unable to open file: {os.strerror(errno.EMFILE)}")

    engine = GdsEngine(open_file=refuse, path_taken="gds", device=None, task_nbytes=4096)
    tier = NvmeTier.open(tmp_path, options=SMALL, engine=engine)
    with pytest.raises(TransferError, match="Too many open files") as caught:
        tier.reserve(key(0), 8192)
    assert caught.value.errno == errno.EMFILE
    assert list(tmp_path.glob("segment-*")) == []
    assert tier.usage().allocated_nbytes == 0
    tier.close()
