"""The kit on tiers in pinned host memory and in the memory of a simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import planted_device
import pytest
from device_rig import DeviceRig, DeviceSuite
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from zinf_core.buffers import Buffer
from zinf_core.testing import (
    Operation,
    failures_of,
    host_buffer,
    latest,
    machine_for,
    seeded_order,
)
from zinf_core.testing.simulated import SimulatedDevice
from zinf_core.tier import Tier
from zinf_storage.host import HostTier


class TestPinnedHostTier(DeviceSuite):
    """Keys in pinned memory, no device memory in transfers."""

    def open_tier(self, folder: Path) -> Tier:
        self.rig = self.new_rig()
        return HostTier("pinned", pool=self.rig.pinned_pool())

    def close(self, tier: Tier) -> None:
        tier.close()
        self.rig.device.close()

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        return False


class TestHostTierWithHostBuffers(DeviceSuite):
    """The CPU copies, although there is a device."""

    def open_tier(self, folder: Path) -> Tier:
        self.rig = self.new_rig()
        return self.rig.host_tier()

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        return False


class TestHostTierWithDeviceBuffers(DeviceSuite):
    def open_tier(self, folder: Path) -> Tier:
        self.rig = self.new_rig()
        return self.rig.host_tier()

    def make_buffer(self, nbytes: int) -> Buffer:
        return self.rig.make(nbytes)


class TestHostTierWithBoth(TestHostTierWithDeviceBuffers):
    """Copies by the CPU must not disturb those of the device."""

    def make_buffer(self, nbytes: int) -> Buffer:
        return self.rig.make_mixed(nbytes)

    def fail_next(self, tier: Tier, operation: Operation) -> bool:
        return False


class TestDeviceTierWithHostBuffers(DeviceSuite):
    def open_tier(self, folder: Path) -> Tier:
        self.rig = self.new_rig()
        return self.rig.device_tier()


class TestDeviceTierWithDeviceBuffers(TestDeviceTierWithHostBuffers):
    def make_buffer(self, nbytes: int) -> Buffer:
        return self.rig.make(nbytes)


class TestDeviceTierAtTheLatest(TestDeviceTierWithHostBuffers):
    """No copy happens before it is waited for."""

    def new_rig(self) -> DeviceRig:
        return DeviceRig(SimulatedDevice(order=latest))


RIG = DeviceRig.drawn(2)


@pytest.fixture(autouse=True, scope="module")
def _machines_device() -> Iterator[None]:
    yield
    RIG.device.close()


TestPinnedHostMachine = pytest.mark.slow(
    machine_for(lambda folder: HostTier("pinned", pool=RIG.pinned_pool())).TestCase
)
TestHostWithDeviceMachine = pytest.mark.slow(
    machine_for(
        lambda folder: RIG.host_tier(), make_buffer=RIG.make, fill=RIG.fill, contents=RIG.contents
    ).TestCase
)
TestHostWithBothMachine = pytest.mark.slow(
    machine_for(
        lambda folder: RIG.host_tier(),
        make_buffer=RIG.make_mixed,
        fill=RIG.fill,
        contents=RIG.contents,
    ).TestCase
)
TestDeviceMachine = pytest.mark.slow(
    machine_for(
        lambda folder: RIG.device_tier(), make_buffer=RIG.make, fill=RIG.fill, contents=RIG.contents
    ).TestCase
)
TestDeviceWithHostMachine = pytest.mark.slow(machine_for(lambda folder: RIG.device_tier()).TestCase)


class PlantedSuite(DeviceSuite):
    """Suite of a broken tier on a device of `kind`."""

    timeout_s = 0.5

    def __init__(self, planted: type[planted_device.Planted], kind: type[SimulatedDevice]) -> None:
        self._planted = planted
        self._kind = kind

    def open_tier(self, folder: Path) -> Tier:
        self.rig = DeviceRig(self._kind(order=seeded_order(3)))
        on_host = self._planted.in_host_memory
        inner = self.rig.host_tier() if on_host else self.rig.device_tier()
        return self._planted(inner, self.rig.device)

    def make_buffer(self, nbytes: int) -> Buffer:
        on_host = self._planted.in_host_memory
        return self.rig.make_mixed(nbytes) if on_host else host_buffer(nbytes)


CAUGHT: list[tuple[type[planted_device.Planted], str]] = [
    (planted_device.ForgetsToWait, "test_law_01_written_is_read"),
    (planted_device.ForgetsToWait, "test_law_06_done_means_done"),
    (planted_device.DoneTooEarly, "test_law_06_done_means_done"),
    (planted_device.ReusesSource, "test_law_05_many_in_flight"),
    (planted_device.ReusesSource, "test_law_03_side_by_side"),
    (planted_device.ReadsScratchEarly, "test_law_01_written_is_read"),
    (planted_device.FreesUnderCopy, "test_discard_spares_transfers"),
    (planted_device.CloseForgets, "test_law_12_close_settles"),
]
FAILURES_CAUGHT: list[tuple[type[planted_device.Planted], str]] = [
    (planted_device.DamageUnnoticed, "test_law_09_failed_write"),
    (planted_device.FailureSwallowed, "test_law_10_failures_come_from_wait"),
]


@pytest.mark.parametrize(("planted", "check"), CAUGHT + FAILURES_CAUGHT)
def test_suite_catches(planted: type[planted_device.Planted], check: str, tmp_path: Path) -> None:
    """Catches a simulated device under which a tier may forget to wait."""
    failed = failures_of(PlantedSuite(planted, SimulatedDevice), tmp_path, only=check)
    assert {name.partition("[")[0] for name in failed} == {check}


@pytest.mark.parametrize(("planted", "check"), CAUGHT)
def test_a_prompt_device_hides_the_bug(
    planted: type[planted_device.Planted], check: str, tmp_path: Path
) -> None:
    """Catches a planted tier that is broken in another way than the one its name says."""
    suite = PlantedSuite(planted, planted_device.PromptDevice)
    assert failures_of(suite, tmp_path, only=check) == {}


@pytest.mark.slow
def test_the_machine_catches_the_cpu_overtaking() -> None:
    """Catches a machine that never reads with the CPU what the device is writing."""
    machine = machine_for(
        lambda folder: planted_device.CpuOvertakes(RIG.host_tier(), RIG.device),
        make_buffer=RIG.make_mixed,
        fill=RIG.fill,
        contents=RIG.contents,
    )
    found = settings(
        max_examples=200,
        stateful_step_count=30,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(machine, settings=found)


@pytest.mark.slow
def test_suite_passes_the_sound_tier(tmp_path: Path) -> None:
    """Catches a wrapper or a runner that fails by itself."""
    suite = PlantedSuite(planted_device.Planted, SimulatedDevice)
    suite.timeout_s = 30.0
    assert failures_of(suite, tmp_path) == {}
