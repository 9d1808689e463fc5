"""Section rates-drive: the nvme tier from and to host and device memory, against raw calls."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpu.lab import Lab, open_lab
from gpu.raw_drive import RawDrive
from gpu.report import Finding, Report, Skipped
from gpu.rounds import measure
from gpu.settings import Settings

from zinf_core.buffers import Buffer
from zinf_core.completion import Completion
from zinf_core.errors import ConfigError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.runtime.staging import TwoHops
from zinf_core.units import MiB, format_nbytes
from zinf_storage.allocators import PinnedAllocator
from zinf_storage.nvme import Engine, NvmeOptions, NvmeTier

_RAW, _RAW_DEVICE = "raw calls, host", "raw calls and torch copies, device"

_RESERVE_S = 25.0
"""Seconds that are left for what comes after a race."""

Move = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to move all keys between the drive and one kind of memory."""

    name: str
    write: Move
    read: Move
    base: str
    """Whom it is compared with."""
    path_taken: str


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How often everything is moved."""

    rounds: int
    report: Report

    def has_time(self) -> bool:
        """Return whether another round may begin: not if what comes after would suffer."""
        return self.report.left_s > _RESERVE_S


class Field:
    """Memory for all keys, on the host and on the device, and what moves them."""

    def __init__(
        self, lab: Lab, place: Path, stack: ExitStack, *, key_nbytes: int, num_keys: int
    ) -> None:
        """Take the memory; `stack` closes what is opened."""
        self._lab = lab
        self._place = place
        self._stack = stack
        self._key_nbytes = key_nbytes
        allocator = PinnedAllocator(lab.device)
        self._hosts: list[Buffer] = [allocator.allocate(key_nbytes) for _ in range(num_keys)]
        self._devices: list[Buffer] = [lab.device.allocate(key_nbytes) for _ in range(num_keys)]
        for host, device in zip(self._hosts, self._devices, strict=True):
            host.array[:] = 7
            lab.device.copy(device, host).wait()
        self._keys = [TensorKey.of(f"rates.{i}", StateKind.PARAM) for i in range(num_keys)]
        self.nbytes = key_nbytes * num_keys

    def raw(self) -> list[Contestant]:
        """Return what there is without zinf."""
        drive = RawDrive(
            self._place / "raw",
            self._lab,
            key_nbytes=self._key_nbytes,
            num_keys=len(self._keys),
        )
        self._stack.callback(drive.close)
        views = [memoryview(host.array) for host in self._hosts]
        tensors = [self._lab.tensor(device) for device in self._devices]
        path = drive.path_taken
        return [
            Contestant(
                name=_RAW, write=partial(drive.write, views), read=partial(drive.read, views),
                base=_RAW, path_taken=path,
            ),
            Contestant(
                name=_RAW_DEVICE, write=partial(drive.write_device, tensors),
                read=partial(drive.read_device, tensors), base=_RAW_DEVICE, path_taken=path,
            ),
        ]  # fmt: skip

    def posix(self) -> list[Contestant]:
        """Return zinf's own engine: on host memory, and on the device as the pager uses it."""
        tier = self._opened("posix", Engine.POSIX)
        device = self._lab.device

        def write() -> None:
            triples = zip(self._keys, self._hosts, self._devices, strict=True)
            _finish(
                TwoHops(device.copy(hop, src), partial(tier.write_from, key, hop))
                for key, hop, src in triples
            )

        def read() -> None:
            triples = zip(self._keys, self._hosts, self._devices, strict=True)
            _finish(
                TwoHops(tier.read_into(key, hop), partial(device.copy, dst, hop))
                for key, hop, dst in triples
            )

        path = tier.path_taken
        return [
            self._whole("zinf posix, host", tier, self._hosts, base=_RAW),
            Contestant(
                name="zinf posix staged, device", write=write, read=read, base=_RAW_DEVICE,
                path_taken=f"{path}, two hops",
            ),
        ]  # fmt: skip

    def gds(self) -> list[Contestant]:
        """Return kvikio. Raises ConfigError if it cannot be used."""
        tier = self._opened("gds", Engine.GDS)
        return [
            self._whole("zinf gds, host", tier, self._hosts, base=_RAW),
            self._whole("zinf gds, device", tier, self._devices, base=_RAW_DEVICE),
        ]

    def _opened(self, name: str, engine: Engine) -> NvmeTier:
        options = NvmeOptions(engine=engine)
        device = self._lab.device if engine is Engine.GDS else None
        tier = NvmeTier.open(self._place / name, options=options, device=device)
        self._stack.callback(tier.close)
        for key in self._keys:
            tier.reserve(key, self._key_nbytes)
        return tier

    def _whole(self, name: str, tier: NvmeTier, buffers: list[Buffer], *, base: str) -> Contestant:
        pairs = list(zip(self._keys, buffers, strict=True))
        return Contestant(
            name=name,
            write=lambda: _finish([tier.write_from(key, buffer) for key, buffer in pairs]),
            read=lambda: _finish([tier.read_into(key, buffer) for key, buffer in pairs]),
            base=base,
            path_taken=tier.path_taken,
        )


def run(report: Report, settings: Settings) -> None:
    """Measure writing and reading, first without kvikio, then with it."""
    lab = open_lab(simulate=settings.simulate)
    small = settings.quick or settings.simulate
    effort = Effort(rounds=2 if settings.quick else 4, report=report)
    try:
        with ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=settings.folder)))
            field = Field(
                lab, place, stack,
                key_nbytes=(4 if small else 64) * MiB, num_keys=4 if small else 8,
            )  # fmt: skip
            raw = field.raw()
            own = [*raw, *field.posix()]
            for operation in ("write", "read"):
                with report.item(f"{operation}, posix engine", is_check=False) as finding:
                    _race(field, own, operation, effort, finding)
            _with_kvikio(report, settings, field, raw, effort)
    finally:
        lab.close()


def _with_kvikio(
    report: Report, settings: Settings, field: Field, raw: list[Contestant], effort: Effort
) -> None:
    contestants: list[Contestant] = []
    for operation in ("write", "read"):
        with report.item(f"{operation}, kvikio", is_check=False) as finding:
            if settings.no_kvikio:
                raise Skipped(settings.no_kvikio)
            if not contestants:
                try:
                    contestants = [*raw, *field.gds()]
                except ConfigError as exc:
                    raise Skipped(str(exc)) from exc
            _race(field, contestants, operation, effort, finding)


def _race(
    field: Field,
    contestants: list[Contestant],
    operation: str,
    effort: Effort,
    finding: Finding,
) -> None:
    """Measure one operation of all; keys must have been written before they are read."""
    moves = {c.name: c.write if operation == "write" else c.read for c in contestants}
    rates = measure(moves, nbytes=field.nbytes, rounds=effort.rounds, has_time=effort.has_time)
    parts = []
    for contestant in contestants:
        ratio = ""
        if contestant.base != contestant.name:
            ratio = f" = {rates.ratio(contestant.name, contestant.base)}"
        parts.append(f"{contestant.name} [{contestant.path_taken}] "
                     f"{rates.text(contestant.name)}{ratio}")  # fmt: skip
    finding.text = f"{format_nbytes(field.nbytes)}: " + "; ".join(parts)
    finding.data = {**rates.data(), "paths": {c.name: c.path_taken for c in contestants}}


def _finish(transfers: Iterable[Completion]) -> None:
    for transfer in list(transfers):
        transfer.wait()
