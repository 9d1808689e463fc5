"""The hop through host memory between tiers that only reach the host and memory of a device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from core_helpers import key, noise, pool_of

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace
from zinf_core.completion import CompletedTransfer
from zinf_core.errors import (
    BudgetExceededError,
    InternalError,
    TransferError,
    TransferTimeoutError,
)
from zinf_core.runtime.loans import LoanDesk
from zinf_core.runtime.page import Page
from zinf_core.runtime.pager import Pager
from zinf_core.runtime.pool import BufferPool
from zinf_core.runtime.residency import Residency
from zinf_core.runtime.staging import TwoHops
from zinf_core.testing import DeferredTier, DictTier, FaultyTier, Operation
from zinf_core.testing.simulated import SimulatedDevice
from zinf_core.units import PAGE_NBYTES
from zinf_storage.device import DeviceTier
from zinf_storage.host import HostTier


class DeviceClient:
    """Sees a page as the simulated device's own view of it."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.written = False

    def open_view(self, buffer: Buffer) -> np.ndarray:
        return self._device.view(buffer) if buffer.space is MemorySpace.DEVICE else buffer.array

    def was_written(self) -> bool:
        written, self.written = self.written, False
        return written

    def close_view(self) -> None:
        """Remember nothing."""


class DeviceWorld:
    """A pager whose device memory the host does not reach."""

    def __init__(
        self, device: SimulatedDevice, *, device_pages: int = 2, host_pages: int = 2
    ) -> None:
        self.device = device
        self.device_pool = BufferPool(
            "device", budget_nbytes=device_pages * PAGE_NBYTES, allocator=device
        )
        self.host_pool = pool_of(host_pages, "host")
        self.slow = FaultyTier(DeferredTier(DictTier("slow")))
        self.pager = Pager(
            tiers={
                "device": DeviceTier("device", pool=self.device_pool, device=device),
                "host": HostTier("host", pool=self.host_pool, device=device),
                "slow": self.slow,
            },
            device_pool=self.device_pool,
            host_pool=self.host_pool,
            device=device,
        )
        self.desk = LoanDesk(self.pager)

    def page(self, name: str, home: str = "slow") -> Page:
        return self.pager.add(key(name), PAGE_NBYTES, home, DeviceClient(self.device))

    def fill(self, page: Page, data: bytes) -> None:
        self.pager.create(page)[:] = np.frombuffer(data, np.uint8)

    def read(self, page: Page) -> bytes:
        with self.pager.pinned(page) as view:
            return view.tobytes()

    def leased(self) -> tuple[int, int]:
        pools = (self.device_pool, self.host_pool)
        device, host = (pool.usage().leased_nbytes // PAGE_NBYTES for pool in pools)
        return device, host


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with SimulatedDevice() as device:
        yield device


@pytest.mark.parametrize("home", ["slow", "host"])
def test_pages_come_and_go(device: SimulatedDevice, home: str) -> None:
    """Catches a copy that is not waited for, a staging buffer used twice at once, or kept."""
    world = DeviceWorld(device, host_pages=10)
    pages = [world.page(f"p{i}", home) for i in range(6)]
    for i, page in enumerate(pages):
        world.fill(page, noise(PAGE_NBYTES, i))
    for _ in range(2):
        for i, page in enumerate(pages):
            assert world.read(page) == noise(PAGE_NBYTES, i)
    world.pager.evict_all()
    assert world.leased() == (0, 6 if home == "host" else 0)
    assert device.num_pending == 0


def test_hop_needs_one_page_of_the_host(device: SimulatedDevice) -> None:
    """Catches staging outside the host budget, or more of it than one page at a time."""
    world = DeviceWorld(device, device_pages=1, host_pages=1)
    pages = [world.page(f"p{i}") for i in range(3)]
    for i, page in enumerate(pages):
        world.fill(page, noise(PAGE_NBYTES, i))
    assert [world.read(page) for page in pages] == [noise(PAGE_NBYTES, i) for i in range(3)]
    assert world.host_pool.usage().peak_nbytes == PAGE_NBYTES


def test_no_room_for_the_hop_is_refused(device: SimulatedDevice) -> None:
    """Catches a hang, or a page lost, when the host budget is in use elsewhere."""
    world = DeviceWorld(device, device_pages=1, host_pages=1)
    first, second = world.page("a"), world.page("b")
    world.fill(first, noise(PAGE_NBYTES, 1))
    held = world.host_pool.lease_nowait(PAGE_NBYTES)
    with pytest.raises(BudgetExceededError, match="way of a/param through the host"):
        world.pager.create(second)
    held.release()
    world.fill(second, noise(PAGE_NBYTES, 2))
    assert world.read(first) == noise(PAGE_NBYTES, 1)
    assert world.read(second) == noise(PAGE_NBYTES, 2)


@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE])
def test_failing_tier(device: SimulatedDevice, operation: Operation) -> None:
    """Catches a failed hop that loses the page, its lease, or the staging memory."""
    world = DeviceWorld(device, device_pages=1, host_pages=2)
    first, second = world.page("a"), world.page("b")
    world.fill(first, noise(PAGE_NBYTES, 1))
    world.fill(second, noise(PAGE_NBYTES, 2))
    world.pager.settle()
    world.slow.fail_next(operation)

    def read() -> None:
        world.read(first)
        world.pager.settle()

    with pytest.raises(TransferError, match="planned failure"):
        read()
    assert world.read(first) == noise(PAGE_NBYTES, 1)
    assert world.read(second) == noise(PAGE_NBYTES, 2)
    world.pager.evict_all()
    assert world.leased() == (0, 0)


@pytest.mark.parametrize("home", ["slow", "host", "device"])
@pytest.mark.parametrize("resident", [True, False])
def test_loans_of_device_pages(device: SimulatedDevice, home: str, *, resident: bool) -> None:
    """Catches an optimizer that works on device memory from the host, on a stale copy, or whose
    update does not reach the copy that compute sees."""
    world = DeviceWorld(device, device_pages=2, host_pages=4)
    page = world.page("w", home)
    world.fill(page, noise(PAGE_NBYTES, 1))
    if not resident:
        world.pager.evict_all()
    before = world.host_pool.usage().leased_nbytes
    with world.desk.lent(page.page if hasattr(page, "page") else page, write=True) as buffer:
        assert buffer.space is MemorySpace.HOST
        assert buffer.array.tobytes() == noise(PAGE_NBYTES, 1)
        buffer.array[:] = np.frombuffer(noise(PAGE_NBYTES, 2), np.uint8)
    assert world.read(page) == noise(PAGE_NBYTES, 2)
    world.pager.evict_all()
    assert world.read(page) == noise(PAGE_NBYTES, 2)
    assert world.host_pool.usage().leased_nbytes == before


@pytest.mark.parametrize("written", [True, False])
def test_a_lent_page_is_not_used_on_the_device(device: SimulatedDevice, *, written: bool) -> None:
    """Catches a second copy of a page on the device while the host writes to the first; and pins
    or memory lost when that is noticed."""
    world = DeviceWorld(device, device_pages=2, host_pages=4)
    page = world.page("w")
    world.fill(page, noise(PAGE_NBYTES, 1))
    world.pager.evict_all()
    loan = world.desk.borrow(page)
    world.desk.wait(loan)
    with pytest.raises(InternalError, match="w/param was used on the device while it was lent out"):
        world.pager.pin(page)
    assert (page.pins, world.leased()) == (1, (0, 1))
    if written:
        loan.buffer.array[:] = np.frombuffer(noise(PAGE_NBYTES, 2), np.uint8)
    world.desk.give_back(loan, written=written)
    assert world.read(page) == noise(PAGE_NBYTES, 2 if written else 1)
    assert (page.pins, world.leased()) == (0, (1, 0))
    world.pager.evict_all()
    assert world.leased() == (0, 0)
    assert world.read(page) == noise(PAGE_NBYTES, 2 if written else 1)


def test_a_page_cached_on_the_host_is_copied_not_read(device: SimulatedDevice) -> None:
    """Catches a read of the slow tier for bytes that host memory holds, and the cached copy kept
    beside that of the device."""
    world = DeviceWorld(device, device_pages=1, host_pages=4)
    page = world.page("w")
    world.fill(page, noise(PAGE_NBYTES, 1))
    world.pager.evict_all()
    with world.desk.lent(page, write=True) as buffer:
        buffer.array[:] = np.frombuffer(noise(PAGE_NBYTES, 2), np.uint8)
    del buffer
    before = len(world.slow.calls)
    assert world.read(page) == noise(PAGE_NBYTES, 2)
    assert (len(world.slow.calls), world.leased()) == (before, (1, 0))
    world.pager.evict_all()
    assert world.read(page) == noise(PAGE_NBYTES, 2)


def test_pages_are_read_ahead_into_host_memory(device: SimulatedDevice) -> None:
    """Catches a read ahead into memory that the tier does not reach, one that waits there for
    ever, and device memory taken by what is not used yet."""
    world = DeviceWorld(device, device_pages=2, host_pages=8)
    pages = [world.page(f"p{i}") for i in range(5)]
    for _ in range(3):
        for i, page in enumerate(pages):
            world.fill(page, noise(PAGE_NBYTES, i))
        world.pager.evict_all()
        world.pager.end_iteration()
        for i, page in enumerate(pages):
            assert world.read(page) == noise(PAGE_NBYTES, i)
        world.pager.evict_all()
        world.pager.end_iteration()
        for i, page in enumerate(pages):
            assert world.leased()[1] >= 1
            assert page.residency is not Residency.ABSENT
            assert world.read(page) == noise(PAGE_NBYTES, i)
            assert world.leased()[0] <= 2
    world.pager.evict_all()
    assert (world.leased(), device.num_pending) == ((0, 0), 0)


def test_abandoned_loan_changes_nothing(device: SimulatedDevice) -> None:
    """Catches a copy that is brought back although the borrower failed."""
    world = DeviceWorld(device, host_pages=2)
    page = world.page("w")
    world.fill(page, noise(PAGE_NBYTES, 1))

    def fail() -> None:
        with world.desk.lent(page, write=True) as buffer:
            buffer.array[:] = 0
            raise RuntimeError("half an update")

    with pytest.raises(RuntimeError, match="half an update"):
        fail()
    assert world.read(page) == noise(PAGE_NBYTES, 1)
    assert world.leased() == (1, 0)
    assert page.pins == 0


class Manual:
    """Completion that the test settles."""

    def __init__(self) -> None:
        self.settled = False

    def done(self) -> bool:
        return self.settled

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.settled:
            raise TransferTimeoutError("not yet")


def test_second_hop_waits_for_the_first() -> None:
    """Catches a second hop submitted too early, twice, or only when somebody waits."""
    first, second, submitted = Manual(), Manual(), []

    def then() -> Manual:
        submitted.append(1)
        return second

    both = TwoHops(first, then)
    assert not both.done()
    with pytest.raises(TransferTimeoutError):
        both.wait(0)
    assert not submitted
    first.settled = True
    assert not both.done()
    assert submitted == [1]
    second.settled = True
    assert both.done()
    both.wait()
    both.wait()
    assert submitted == [1]


def test_failed_first_hop_is_the_result() -> None:
    """Catches a second hop after a failure, and an error that is raised once only."""
    both = TwoHops(CompletedTransfer(TransferError(5, "broken")), lambda: pytest.fail("submitted"))
    assert both.done()
    for _ in range(2):
        with pytest.raises(TransferError, match="broken"):
            both.wait()
