"""PageIo: whole pages from and to their home tiers, observed and kept in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zinf_core.buffers import Buffer
from zinf_core.runtime.events import Event, EventKind, Observer
from zinf_core.runtime.page import Page
from zinf_core.runtime.transfers import Finish, Transfer, TransfersInFlight
from zinf_core.tier import SupportsMap, Tier


class PageIo:
    """Submits transfers of pages. Guarded by the lock of the pager."""

    def __init__(self, tiers: Mapping[str, Tier], observers: Sequence[Observer]) -> None:
        """Serve `tiers` by home name and tell `observers` of every transfer."""
        self.tiers = dict(tiers)
        self.in_flight = TransfersInFlight()
        self._mappable = {name: t for name, t in tiers.items() if isinstance(t, SupportsMap)}
        self._observers = tuple(observers)

    def read(self, page: Page, dst: Buffer, finish: Finish) -> Transfer:
        """Submit a read of the whole page into `dst`."""
        self.emit(EventKind.READ, page)
        return self.in_flight.add(self.tiers[page.home].read_into(page.key, dst), finish)

    def write(self, page: Page, src: Buffer, finish: Finish) -> Transfer:
        """Submit a write of the whole page from `src`."""
        self.emit(EventKind.WRITE, page)
        return self.in_flight.add(self.tiers[page.home].write_from(page.key, src), finish)

    def home_buffer(self, page: Page) -> Buffer | None:
        """Return the page's own bytes on its home tier if they can be used in place."""
        tier = self._mappable.get(page.home)
        return None if tier is None else tier.map(page.key)

    def settle(self, page: Page) -> None:
        """Block until no transfer of `page` itself is in flight. If its bytes are being written
        back they stay in memory."""
        if page.transfer is not None:
            page.wanted = True
            try:
                self.in_flight.wait(page.transfer)
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

    def emit(self, kind: EventKind, page: Page) -> None:
        """Tell the observers."""
        if self._observers:
            event = Event(kind, page.key, page.home, page.nbytes)
            for observer in self._observers:
                observer(event)
