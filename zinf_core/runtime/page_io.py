"""PageIo: whole pages from and to their home tiers, observed and kept in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from zinf_core.buffers import Buffer
from zinf_core.capabilities import MemorySpace
from zinf_core.completion import Completion
from zinf_core.device import Device
from zinf_core.errors import InternalError, ZinfError
from zinf_core.runtime.events import Event, EventKind, Observer
from zinf_core.runtime.page import Page
from zinf_core.runtime.pool import Lease
from zinf_core.runtime.staging import TwoHops
from zinf_core.runtime.transfers import Finish, Transfer, TransfersInFlight
from zinf_core.tier import SupportsMap, SupportsPrefetch, Tier


class PageIo:
    """Submits transfers of pages. Guarded by the lock of the pager."""

    def __init__(
        self, tiers: Mapping[str, Tier], observers: Sequence[Observer], device: Device | None
    ) -> None:
        """Serve `tiers` by home name and tell `observers` of every transfer. `device` makes the
        copies where resident pages are not in host memory."""
        self.tiers = dict(tiers)
        self.device = device
        """Makes the copies where operations do not use host memory; else None."""
        self.in_flight = TransfersInFlight()
        self._mappable = {name: t for name, t in tiers.items() if isinstance(t, SupportsMap)}
        self._observers = tuple(observers)

    def reaches(self, page: Page, space: MemorySpace) -> bool:
        """Return whether the page's home tier transfers with memory of `space` directly."""
        return self.tiers[page.home].capabilities.takes(space)

    def read_ahead(self, page: Page, dst: Buffer, finish: Finish) -> Transfer:
        """Submit a read of the whole page into `dst` that nobody waits for yet."""
        self.emit(EventKind.READ, page)
        tier = self.tiers[page.home]
        submit = tier.prefetch_into if isinstance(tier, SupportsPrefetch) else tier.read_into
        return self.in_flight.add(submit(page.key, dst), finish, is_ahead=True)

    def read(
        self, page: Page, dst: Buffer, finish: Finish, *, staging: Lease | None = None
    ) -> Transfer:
        """Submit a read of the whole page into `dst`, through `staging` if given, which is
        released at the end."""
        self.emit(EventKind.READ, page)
        tier = self.tiers[page.home]
        if staging is None:
            return self.in_flight.add(tier.read_into(page.key, dst), finish)
        hop = staging.buffer
        read = TwoHops(tier.read_into(page.key, hop), lambda: self._copy(dst, hop))
        return self.in_flight.add(read, partial(_release_and_finish, staging, finish))

    def write(
        self, page: Page, src: Buffer, finish: Finish, *, staging: Lease | None = None
    ) -> Transfer:
        """Submit a write of the whole page from `src`, through `staging` if given, which is
        released at the end."""
        self.emit(EventKind.WRITE, page)
        tier = self.tiers[page.home]
        if staging is None:
            return self.in_flight.add(tier.write_from(page.key, src), finish)
        hop = staging.buffer
        write = TwoHops(self._copy(hop, src), lambda: tier.write_from(page.key, hop))
        return self.in_flight.add(write, partial(_release_and_finish, staging, finish))

    def copy(self, dst: Buffer, src: Buffer, finish: Finish) -> Transfer:
        """Submit a copy between host and device memory."""
        return self.in_flight.add(self._copy(dst, src), finish)

    def home_buffer(self, page: Page) -> Buffer | None:
        """Return the page's own bytes on its home tier if they can be used in place."""
        tier = self._mappable.get(page.home)
        return None if tier is None else tier.map(page.key)

    def settle(self, page: Page) -> None:
        """Block until no transfer of `page` itself is in flight. If its bytes are being written
        back they stay in memory; if they were read ahead and that failed, the page is absent."""
        transfer = page.transfer
        if transfer is not None:
            page.wanted = True
            try:
                self.in_flight.wait(transfer)
            except ZinfError:
                if not transfer.is_ahead:
                    raise
            finally:
                page.wanted = False

    def settle_all(self) -> None:
        """Block until nothing is in flight. Raises the first error after finishing them all."""
        first: Exception | None = None
        while True:
            try:
                if not self.in_flight.wait_oldest():
                    break
            except Exception as exc:  # noqa: BLE001 - raised below
                first = first or exc
        if first is not None:
            raise first

    def _copy(self, dst: Buffer, src: Buffer) -> Completion:
        if self.device is None:
            raise InternalError("there is no device to copy from or to")
        return self.device.copy(dst, src)

    def emit(self, kind: EventKind, page: Page) -> None:
        """Tell the observers."""
        if self._observers:
            event = Event(kind, page.key, page.home, page.nbytes)
            for observer in self._observers:
                observer(event)


def _release_and_finish(staging: Lease, finish: Finish, error: Exception | None) -> None:
    staging.release()
    finish(error)
