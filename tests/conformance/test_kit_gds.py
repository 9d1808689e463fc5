"""The kit on NvmeTier's engine gds: memory of a simulated device, of the host, and of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from device_rig import DeviceRig
from simulated_gds import GdsFaults, simulated_gds
from test_kit_nvme import DIRECT, SMALL_BLOCKS, NvmeSuite

from zinf_core.buffers import Buffer
from zinf_core.testing import Operation, host_buffer, machine_for
from zinf_core.tier import Tier
from zinf_storage.nvme import NvmeTier


class GdsSuite(NvmeSuite):
    """One device for all tiers of a test; nothing may be done wrong with kvikio's objects."""

    @pytest.fixture(autouse=True)
    def _simulated(self) -> Iterator[None]:
        self.faults = GdsFaults()
        self.rig = DeviceRig.drawn(5)
        with self.rig.device as device:
            # The device's thread starts with its first copy; no tier is to be blamed for it.
            device.copy(device.allocate(1), host_buffer(1)).wait()
            yield
        assert self.faults.mistakes == []

    def open_tier(self, folder: Path) -> Tier:
        self.folder = folder
        engine = simulated_gds(self.rig.device, self.faults)
        return NvmeTier.open(folder, options=self.options, engine=engine)

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        self.faults.armed.add(operation)
        return True

    def make_buffer(self, nbytes: int) -> Buffer:
        return self.rig.make(nbytes)

    def fill(self, buffer: Buffer, data: bytes) -> None:
        self.rig.fill(buffer, data)

    def contents(self, buffer: Buffer) -> bytes:
        return self.rig.contents(buffer)


class TestGdsTier(GdsSuite):
    pass


class TestGdsTierOnBoth(GdsSuite):
    """Blocks with and without a checksum, each read into memory of either space."""

    options = SMALL_BLOCKS

    def make_buffer(self, nbytes: int) -> Buffer:
        return self.rig.make_mixed(nbytes)


class TestGdsTierOnHostMemory(GdsSuite):
    def make_buffer(self, nbytes: int) -> Buffer:
        return host_buffer(nbytes)


RIG = DeviceRig.drawn(6)


@pytest.fixture(autouse=True, scope="module")
def _machines_device() -> Iterator[None]:
    yield
    RIG.device.close()


TestGdsMachine = pytest.mark.slow(
    machine_for(
        lambda folder: NvmeTier.open(
            folder, options=DIRECT, engine=simulated_gds(RIG.device, GdsFaults())
        ),
        make_buffer=RIG.make,
        fill=RIG.fill,
        contents=RIG.contents,
    ).TestCase
)
TestGdsMachineOnBoth = pytest.mark.slow(
    machine_for(
        lambda folder: NvmeTier.open(
            folder, options=SMALL_BLOCKS, engine=simulated_gds(RIG.device, GdsFaults())
        ),
        make_buffer=RIG.make_mixed,
        fill=RIG.fill,
        contents=RIG.contents,
    ).TestCase
)
